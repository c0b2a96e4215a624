// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// sequenceOf returns the sequence hashes of a prompt.
func sequenceOf(letters string) []uint64 {
	return indexer.AppendSequenceHashes(nil, indexer.AppendLocalHashes(nil, prompt(letters), 8, indexer.Seed("", "")))
}

func taken(id, letters string, worker uint64) router.Change {
	return router.Change{
		Kind: router.SlotTaken, ID: id, Worker: router.Worker{ID: worker},
		Sequence: sequenceOf(letters), PromptTokens: 8 * len(letters),
	}
}

func loads(r *router.Router) (all string) {
	for _, w := range r.Workers() {
		all += fmt.Sprintf("%d:%d/%d/%d ", w.Worker.ID, w.ActiveRequests, w.PendTokens, w.ActiveBlocks)
	}
	return all
}

// A peer cannot fill the memory: requests beyond its limit do not count. Those of another peer do, and its own when
// earlier ones have ended.
func TestPeersHaveLimitedMemory(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	request := func(peer uint64, i int) bool {
		return r.PeerChanged(peer, taken(fmt.Sprintf("%0900d", i), "a", 1))
	}
	n := 0
	for n < 200_000 && request(7, n) {
		n++
	}
	if n < 50_000 || n == 200_000 {
		t.Errorf("a peer has %d requests with ids of 900 bytes", n)
	}
	if request(7, n) || !request(8, n) {
		t.Error("beyond the limit of a peer, want no request of it, and one of another peer")
	}
	if r.PeerChanged(7, router.Change{Kind: router.SlotFreed, ID: fmt.Sprintf("%0900d", 0), Worker: router.Worker{ID: 1}}); !request(7, n) {
		t.Error("a request has ended, and the next one is refused")
	}
	r.RemovePeer(7)
	if !request(7, 0) {
		t.Error("a peer that left and returned has no room")
	}
}

// A peer's request counts from its beginning to its end under an id of its own, and only
// this peer ends it.
func TestPeerChanged(t *testing.T) {
	r := newRouter(t, router.Config{}, 2)
	c := func(k router.ChangeKind, id string, worker uint64) router.Change {
		return router.Change{Kind: k, ID: id, Worker: router.Worker{ID: worker}}
	}
	moved := c(router.SlotMoved, "x", 2)
	moved.CachedTokens = 8
	for i, s := range []struct {
		peer  uint64
		c     router.Change
		known bool
		want  string
	}{
		{7, c(router.FirstToken, "x", 1), false, "1:0/0/0 2:0/0/0 "},
		{7, c(router.SlotFreed, "x", 1), false, "1:0/0/0 2:0/0/0 "},
		{7, taken("x", "abc", 1), true, "1:1/24/3 2:0/0/0 "},
		{7, taken("x", "abcd", 2), true, "1:1/24/3 2:0/0/0 "}, // already booked
		{8, taken("x", "abd", 1), true, "1:2/48/4 2:0/0/0 "},  // another peer's
		{8, taken("y", "abd", 3), false, "1:2/48/4 2:0/0/0 "}, // on no worker
		{8, c(router.SlotFreed, "z", 1), false, "1:2/48/4 2:0/0/0 "},
		{7, moved, true, "1:1/24/3 2:1/16/3 "},
		{7, c(router.FirstToken, "x", 2), true, "1:1/24/3 2:1/0/3 "},
		{7, c(router.FirstToken, "x", 2), true, "1:1/24/3 2:1/0/3 "},
		{7, c(router.SlotFreed, "x", 2), true, "1:1/24/3 2:0/0/0 "},
		{7, taken("x", "a", 2), true, "1:1/24/3 2:1/8/1 "}, // the id again, for another request
		{7, c(router.SlotMoved, "x", 9), false, "1:1/24/3 2:0/0/0 "},
		{8, c(router.ChangeKind(99), "x", 1), false, "1:1/24/3 2:0/0/0 "},
		{0, taken("y", "a", 1), false, "1:1/24/3 2:0/0/0 "},
		{8, router.Change{Kind: router.SlotTaken, ID: "o", Worker: router.Worker{ID: 1}, PromptTokens: 20, OverlapBlocks: 2, CachedTokens: -1}, true, "1:2/28/3 2:0/0/0 "},
	} {
		if known := r.PeerChanged(s.peer, s.c); known != s.known || loads(r) != s.want {
			t.Errorf("step %d: known %v, loads %s; want %v, %s", i, known, loads(r), s.known, s.want)
		}
	}
	for _, id := range []string{"x", "0000000000000008:x"} {
		if r.Free(id) || r.Abandon(id) || r.AddOutputTokens(id, 1) {
			t.Errorf("%s can be freed at the wrong replica", id)
		}
	}
	r.RemovePeer(8)
	if got, want := loads(r), "1:0/0/0 2:0/0/0 "; got != want {
		t.Errorf("without its peer %s, want %s", got, want)
	}
}

// The changes of a request that expires may come in any order: a beginning after the end
// takes no slot for 60 s.
func TestPeerMessagesOutOfOrder(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read}, 1)
	late := taken("a", "ab", 1)
	late.Expires = true
	end := router.Change{Kind: router.SlotFreed, ID: "a", Worker: router.Worker{ID: 1}, Expires: true}
	none, one := "1:0/0/0 ", "1:1/16/2 "
	expect := func(want, when string) {
		t.Helper()
		if got := loads(r); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	r.PeerChanged(7, end)
	c.pass(59 * time.Second)
	r.PeerChanged(7, late)
	expect(none, "a request that ended before it began")
	c.pass(time.Second)
	r.PeerChanged(7, late)
	expect(one, "after 60 s the id is free again")
	r.PeerChanged(7, end)
	r.PeerChanged(7, late)
	expect(none, "a repeated beginning after the end")
	// A client may send the same id to this router.
	for range 2 {
		book(t, r, "a", "ab")
		expect(one, "an own request")
		r.Free("a")
	}
}

// A router reports each of its own slots in order, and no slot of another router.
func TestTell(t *testing.T) {
	var changes []string
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read, Hooks: router.Hooks{Tell: func(c router.Change) {
		changes = append(changes, fmt.Sprint(c.Kind, " ", c.ID, " ", c.Worker.ID, " ", len(c.Sequence), " ", c.PromptTokens-c.CachedTokens, " ", c.Owner, " ", c.Abandoned))
	}}}, 1)
	book(t, r, "a", "xy")
	book(t, r, "", "xy")
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "b", Model: "none"}); err == nil {
		t.Error("an unknown model is served")
	}
	r.MarkPrefillCompleted("a")
	r.MarkPrefillCompleted("a")
	r.Free("a")
	r.Free("a")
	book(t, r, "c", "x")
	r.Abandon("c")
	book(t, r, "d", "") // without an owner
	r.PeerChanged(9, taken("0000000000000009-p", "x", 1))
	r.MarkPrefillCompleted("0000000000000009-p")
	c.pass(301 * time.Second)
	r.Tick()
	want := []string{
		"taken a 1 2 16 0 false", "first_token a 0 0 0 0 false", "freed a 0 0 0 0 false",
		"taken c 1 1 8 0 false", "freed c 0 0 0 0 true", "taken d 1 0 0 0 false",
		"first_token 0000000000000009-p 1 0 0 9 false", "freed d 0 0 0 0 false",
	}
	if fmt.Sprint(changes) != fmt.Sprint(want) {
		t.Errorf("changes\n%q, want\n%q", changes, want)
	}
}

// A prompt that a peer sends to a worker is predicted to be cached there, as one of our
// own, and removed if the request was abandoned. Predictions from both are the same kind.
func TestPeersFeedGuesses(t *testing.T) {
	for name, conf := range map[string]router.Config{"history": {NoEvents: true}, "prediction": {PredictTTL: 10 * time.Second}} {
		t.Run(name, func(t *testing.T) {
			c := newClock()
			conf.Now = c.read
			r := newRouter(t, conf, 4)
			r.PeerChanged(7, taken("1", "abcd", 3))
			r.PeerChanged(7, router.Change{Kind: router.FirstToken, ID: "1", Worker: router.Worker{ID: 3}})
			r.PeerChanged(7, router.Change{Kind: router.SlotFreed, ID: "1", Worker: router.Worker{ID: 3}})
			if w, n := decide(t, r, "abcx"); w != 3 || n != 3 {
				t.Errorf("the next turn goes to worker %d with %d blocks, want 3 with 3", w, n)
			}
			r.PeerChanged(7, taken("2", "klmn", 2))
			r.PeerChanged(7, router.Change{Kind: router.SlotFreed, ID: "2", Worker: router.Worker{ID: 2}, Abandoned: true})
			if _, n := decide(t, r, "klmn"); n != 0 {
				t.Errorf("%d blocks of an abandoned request count", n)
			}
			r.PeerChanged(7, taken("3", "rst", 2))
			r.PeerChanged(7, router.Change{Kind: router.SlotMoved, ID: "3", Worker: router.Worker{ID: 4}})
			r.PeerChanged(7, router.Change{Kind: router.SlotFreed, ID: "3", Worker: router.Worker{ID: 4}})
			if w, n := decide(t, r, "rst"); w != 4 || n != 3 {
				t.Errorf("after a move the prompt goes to worker %d with %d blocks, want 4 with 3", w, n)
			}
		})
	}
}

// A request that a peer frees, and the requests of a peer that leaves, make room for
// waiting requests.
func TestPeersWakeTheQueue(t *testing.T) {
	for name, end := range map[string]func(*router.Router){
		"free": func(r *router.Router) {
			r.PeerChanged(7, router.Change{Kind: router.SlotFreed, ID: "p", Worker: router.Worker{ID: 1}})
		},
		"first token": func(r *router.Router) {
			r.PeerChanged(7, router.Change{Kind: router.FirstToken, ID: "p", Worker: router.Worker{ID: 1}})
		},
		"gone": func(r *router.Router) { r.RemovePeer(7) },
	} {
		t.Run(name, func(t *testing.T) {
			threshold := 0.0
			r := newRouter(t, router.Config{Queue: router.QueueConfig{Threshold: &threshold}}, 0)
			w := worker(1)
			w.MaxBatchedTokens = 8
			set(t, r, w)
			r.PeerChanged(7, taken("p", "ab", 1))
			waits, done := make(chan struct{}), make(chan error, 1)
			go func() {
				_, err := r.BestWorker(context.WithoutCancel(t.Context()), router.Request{ID: "o", Model: "m", Tokens: prompt("c"), Waiting: func(bool) { close(waits) }})
				done <- err
			}()
			<-waits
			end(r)
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("the request still waits")
			}
		})
	}
}

// Peers cannot infer the first tokens of our requests, so they receive the ones that we
// inferred.
func TestInferredFirstTokensAreTold(t *testing.T) {
	var changes []string
	r := newRouter(t, router.Config{InferFirstTokens: true, Hooks: router.Hooks{Tell: func(c router.Change) {
		changes = append(changes, fmt.Sprint(c.Kind, " ", c.ID))
	}}}, 1)
	book(t, r, "a", "abcd")
	book(t, r, "b", "bcde")
	r.MarkPrefillCompleted("b")
	want := map[string]bool{"taken a": true, "taken b": true, "first_token a": true, "first_token b": true}
	for _, what := range changes {
		if !want[what] {
			t.Errorf("%q was reported, but did not happen or was reported twice", what)
		}
		delete(want, what)
	}
	if len(want) > 0 {
		t.Errorf("not reported: %v", want)
	}
}

// Replicas that share their sessions send each session to one worker: the first binding
// wins, each replica measures idle time by its own requests, and an end of a session
// applies to all.
func TestPeersShareSessions(t *testing.T) {
	c := newClock()
	var a, b *router.Router
	var bindings []router.SessionBinding
	conf := router.Config{Now: c.read, Sessions: router.SessionConfig{TTL: time.Minute}}
	conf.Hooks.TellSession = func(s router.SessionBinding) {
		bindings = append(bindings, s)
		b.PeerSession(s)
	}
	a = newRouter(t, conf, 4)
	conf.Hooks.TellSession = func(s router.SessionBinding) { a.PeerSession(s) }
	b = newRouter(t, conf, 4)
	n := 0
	routeSession := func(r *router.Router, session string, pin uint64, final bool) (worker uint64, bound bool) {
		t.Helper()
		n++
		q := router.Request{ID: fmt.Sprint(n), Model: "m", Tokens: prompt("A"), Session: session, SessionFinal: final}
		if pin > 0 {
			q.Pinned = &router.Worker{ID: pin}
		}
		d, err := r.BestWorker(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		r.MarkPrefillCompleted(q.ID)
		r.Free(q.ID)
		return d.Worker.ID, d.Reason == router.ReasonSession
	}
	expect := func(r *router.Router, session string, want uint64) {
		t.Helper()
		if worker, bound := routeSession(r, session, 0, false); worker != want || !bound {
			t.Errorf("session %s goes to worker %d (bound: %v), want %d", session, worker, bound, want)
		}
	}
	routeSession(a, "s", 3, false)
	expect(b, "s", 3)
	routeSession(b, "first", 2, false)
	routeSession(a, "first", 4, false) // already bound here by b's message
	expect(a, "first", 2)
	expect(b, "first", 2)

	// b's binding lives for a minute after b's own last use; a's requests do not extend
	// it.
	c.pass(40 * time.Second)
	expect(a, "s", 3)
	c.pass(30 * time.Second)
	if b.PeerSession(router.SessionBinding{Session: "other", Worker: router.Worker{ID: 9}}) {
		t.Error("a session is bound to a worker that is not known")
	}
	if !b.PeerSession(router.SessionBinding{Session: "s", Worker: router.Worker{ID: 1}}) {
		t.Error("a peer cannot bind a session again whose binding has ended")
	}
	if b.PeerSession(router.SessionBinding{Session: "s", Worker: router.Worker{ID: 2}}) {
		t.Error("a peer's message moves a bound session")
	}
	expect(b, "s", 1)
	if !b.PeerSession(router.SessionBinding{Session: "s", Worker: router.Worker{ID: 1}, Over: true}) {
		t.Error("the end of a session has no effect")
	}

	routeSession(a, "over", 2, false)
	bindings = nil
	routeSession(a, "over", 2, true)
	if len(bindings) != 1 || !bindings[0].Over || bindings[0].Session != "over" || bindings[0].Worker.ID != 2 {
		t.Errorf("at the end of a session the router reports %+v", bindings)
	}
	for _, r := range []*router.Router{b, a} {
		if _, bound := routeSession(r, "over", 1, false); bound {
			t.Error("a session that has ended is bound")
		}
		a.PeerSession(router.SessionBinding{Session: "over", Worker: router.Worker{ID: 1}, Over: true})
		b.PeerSession(router.SessionBinding{Session: "over", Worker: router.Worker{ID: 1}, Over: true})
	}

	// A session that moves because its worker has far more load than the others moves for
	// all replicas.
	routeSession(a, "moves", 1, false)
	for i := range 3 {
		if _, err := a.BestWorker(t.Context(), router.Request{ID: fmt.Sprint("load", i), Model: "m", Tokens: make([]uint32, 80_000), Pinned: &router.Worker{ID: 1}}); err != nil {
			t.Fatal(err)
		}
	}
	bindings = nil
	to, bound := routeSession(a, "moves", 0, false)
	if bound || to == 1 {
		t.Fatalf("an overloaded worker keeps its session: it goes to %d", to)
	}
	expect(b, "moves", to)
	if len(bindings) != 2 || !bindings[0].Over || bindings[1].Over || bindings[1].Worker.ID != to {
		t.Errorf("for a session that moves the router reports %+v", bindings)
	}
	if newRouter(t, router.Config{}, 1).PeerSession(router.SessionBinding{Session: "s", Worker: router.Worker{ID: 1}}) {
		t.Error("a router without sessions binds one")
	}
}
