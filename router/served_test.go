// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

func decided(t *testing.T, r *router.Router, id, letters string, more ...func(*router.Request)) router.Decision {
	t.Helper()
	req := router.Request{ID: id, Owned: true, Model: "m", Tokens: prompt(letters), WantSecond: true}
	for _, m := range more {
		m(&req)
	}
	d, err := r.BestWorker(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func byID(t *testing.T, r *router.Router) map[uint64]router.WorkerState {
	t.Helper()
	states := map[uint64]router.WorkerState{}
	for _, w := range r.Workers() {
		states[w.ID] = w
	}
	return states
}

// The second choice is the next best worker of another process.
func TestSecondChoice(t *testing.T) {
	for _, mode := range []router.Mode{router.KV, router.RoundRobin, router.LeastLoaded, router.Random, router.PowerOfTwo} {
		t.Run(string(mode), func(t *testing.T) {
			r := newRouter(t, router.Config{Mode: mode}, 3)
			two := worker(2)
			two.DPSize = 4 // ranks of one process fail together
			set(t, r, two)
			for _, id := range []string{"a", "b", "c", "d", "e"} {
				d := decided(t, r, id, "abcd")
				if s, third := d.Second.Worker.ID, d.Third.Worker.ID; s == 0 || third == 0 || s == d.Worker.ID || third == d.Worker.ID || s == third || !d.Third.Address.IsValid() {
					t.Errorf("decision for %v, second choice %+v, third choice %+v", d.Worker, d.Second, d.Third)
				}
			}
			if d := decided(t, r, "not asked", "abcd", func(q *router.Request) { q.WantSecond = false }); d.Second.Address.IsValid() {
				t.Errorf("a second choice that was not requested: %+v", d.Second)
			}
			if d := decided(t, r, "pinned", "abcd", func(q *router.Request) { q.Pinned = &router.Worker{ID: 1} }); d.Second.Address.IsValid() {
				t.Errorf("a pinned request's second choice: %+v", d.Second)
			}
		})
	}
	r := newRouter(t, router.Config{Scoring: classic(1)}, 3)
	store(r, router.Worker{ID: 3}, "abcdef")
	store(r, router.Worker{ID: 1}, "abcd")
	if d := decided(t, r, "a", "abcdef"); d.Worker.ID != 3 || d.Second.Worker.ID != 1 || d.Second.OverlapBlocks != 4 || d.Third.Worker.ID != 2 {
		t.Errorf("decision for %v, second choice %+v, third %+v; want 3, then 1 with 4 blocks, then 2", d.Worker, d.Second, d.Third)
	}
	// The proxy tried all three: the first two gave no response, and the slot moves to the third.
	failing := newRouter(t, router.Config{AvoidFailing: time.Minute}, 4)
	d := decided(t, failing, "a", "abcd")
	if moved, avoided := failing.Served("a", router.Response{Address: d.Third.Address, Status: 200, Asked: 3}); !moved || len(avoided) != 2 {
		t.Errorf("the third choice served: moved %v, avoided %v", moved, avoided)
	}
	for id, w := range byID(t, failing) {
		if want := id == d.Worker.ID || id == d.Second.Worker.ID; w.Failing != want || w.ActiveRequests != map[bool]int{true: 1}[id == d.Third.Worker.ID] {
			t.Errorf("the third choice served: worker %d is failing %v, want %v, with %d requests", id, w.Failing, want, w.ActiveRequests)
		}
	}
	alone := newRouter(t, router.Config{}, 1)
	if d := decided(t, alone, "a", "abcd"); d.Second.Address.IsValid() || d.Third.Address.IsValid() {
		t.Errorf("the only worker's second choice: %+v", d.Second)
	}
}

// If the request names the rank, its second choice has the same rank.
func TestSecondChoiceOfANamedRank(t *testing.T) {
	r := newRouter(t, router.Config{Mode: router.RoundRobin}, 0)
	for id := range uint64(3) {
		w := worker(id + 1)
		w.Engine, w.DPSize = "vLLM", 2
		if id == 2 {
			w.DPSize = 1 // refuses requests that name a rank
		}
		set(t, r, w)
	}
	named := 0
	for i := range 15 {
		d := decided(t, r, string(rune('a'+i)), "abcd")
		if d.NameRank != (d.Worker.ID != 3) || !d.Second.Address.IsValid() || d.NameRank && (d.Second.Worker.DPRank != d.Worker.DPRank || d.Second.Worker.ID == 3) {
			t.Errorf("decision for %v, rank named: %v, second choice %+v", d.Worker, d.NameRank, d.Second)
		}
		if d.NameRank {
			named++
		}
	}
	if named != 12 {
		t.Errorf("%d of 15 name their rank, want 12", named)
	}
	for i := range 15 {
		d := decided(t, r, string(rune('A'+i)), "abcd", func(q *router.Request) { q.RankPerAttempt = true })
		if !d.Second.Address.IsValid() || d.Second.NameRank != (d.Second.Worker.ID != 3) {
			t.Errorf("a rank for each attempt: decision for %v, second choice %+v", d.Worker, d.Second)
		}
	}
	nodes := newRouter(t, router.Config{Mode: router.RoundRobin}, 0)
	for id := range uint32(2) {
		w := worker(uint64(id) + 1)
		w.Engine, w.DPStart, w.DPSize = "vllm", 2*id, 2
		set(t, nodes, w)
	}
	for i := range 4 {
		for _, each := range []bool{false, true} {
			d := decided(t, nodes, fmt.Sprint(i, each), "abcd", func(q *router.Request) { q.RankPerAttempt = each })
			if d.Second.NameRank != each || d.Second.Address.IsValid() != each {
				t.Errorf("nodes with different ranks, a rank for each attempt: %v: second choice %+v", each, d.Second)
			}
		}
	}
	hosts := newRouter(t, router.Config{Mode: router.RoundRobin}, 0)
	for id := range uint64(2) {
		w := worker(id + 1)
		w.Address, w.Host, w.OwnHost = worker(1).Address, fmt.Sprint(id, ".example"), true
		set(t, hosts, w)
	}
	for i, each := range []bool{false, true} {
		d := decided(t, hosts, fmt.Sprint(i), "abcd", func(q *router.Request) { q.HostPerAttempt = each })
		if d.Second.NameHost != each || d.Second.Address.IsValid() != each {
			t.Errorf("a Host for each attempt: %v: second choice %+v", each, d.Second)
		}
		if !each {
			hosts.Free(d.ID)
			continue
		}
		if moved, _ := hosts.Served(d.ID, router.Response{Address: d.Address, Asked: 2, Status: 200}); !moved || byID(t, hosts)[d.Second.Worker.ID].ActiveRequests != 1 {
			t.Errorf("the second choice, at the same address, served, and the slot moved: %v", moved)
		}
	}
	own := worker(1)
	own.Engine, own.DPSize = "vllm", 2
	own.RankAddresses = map[uint32]netip.AddrPort{0: netip.MustParseAddrPort("10.0.1.0:1"), 1: netip.MustParseAddrPort("10.0.1.1:1")}
	alone := newRouter(t, router.Config{}, 0)
	set(t, alone, own)
	if d := decided(t, alone, "a", "abcd"); d.NameRank {
		t.Error("a rank with an address of its own is named")
	}
}

// A decision is also found by the client's id of its request; the latest wins.
func TestLabelsAreKept(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	for _, id := range []string{"a", "b"} {
		decided(t, r, id, "abcd", func(q *router.Request) { q.Labels = router.Labels{RequestID: "client", Class: "batch"} })
	}
	if d, ok := r.Decision("client"); !ok || d.ID != "b" || d.Labels.Class != "batch" {
		t.Errorf("found %v, %q, %+v", ok, d.ID, d.Labels)
	}
	if _, ok := r.Decision(""); ok {
		t.Error("nothing has a decision")
	}
}

// A softly bound session may go to another worker; a hard-bound one may not.
func TestSecondChoiceOfSessions(t *testing.T) {
	for _, hard := range []bool{false, true} {
		r := newRouter(t, router.Config{Sessions: router.SessionConfig{TTL: time.Minute, Hard: hard}}, 3)
		session := func(q *router.Request) { q.Session = "s" }
		first := decided(t, r, "a", "abcd", session)
		r.MarkPrefillCompleted("a")
		again := decided(t, r, "b", "abcd", session)
		if again.Reason != router.ReasonSession || again.Worker != first.Worker || again.Second.Address.IsValid() == hard {
			t.Errorf("hard %v: %v for %v, second choice %+v", hard, again.Reason, again.Worker, again.Second)
		}
		// The session is bound to the worker that serves it.
		if moved, _ := r.Served("b", router.Response{Address: again.Second.Address, Status: 200}); moved == hard {
			t.Errorf("hard %v: moved %v", hard, moved)
		}
	}
}

// The booking follows the worker that serves the request: its slot, prefill and predicted
// blocks.
func TestTheSlotFollowsTheWorkerThatServes(t *testing.T) {
	for _, events := range []bool{true, false} {
		c := &clock{time.Unix(1000, 0)}
		r := newRouter(t, router.Config{Scoring: classic(1), NoEvents: !events, PredictTTL: time.Minute, AvoidFailing: 2 * time.Second, Now: c.read}, 2)
		d := decided(t, r, "a", "abcd")
		moved, avoided := r.Served("a", router.Response{Address: d.Second.Address, Status: 200})
		if !moved || len(avoided) != 1 || avoided[0].Worker != d.Worker {
			t.Fatalf("moved %v, avoided %v, want %v", moved, avoided, d.Worker)
		}
		states := byID(t, r)
		if first, second := states[d.Worker.ID], states[d.Second.Worker.ID]; first.ActiveRequests+first.PendTokens+first.ActiveBlocks != 0 || !first.Failing ||
			second.ActiveRequests != 1 || second.PendTokens != 32 || second.ActiveBlocks != 4 || second.Failing {
			t.Errorf("events %v: first %+v, second %+v", events, first, second)
		}
		if kept, _ := r.Decision("a"); kept.Served != d.Second.Address {
			t.Errorf("the kept decision was served by %v", kept.Served)
		}
		if moved, _ := r.Served("a", router.Response{Address: d.Second.Address, Status: 200}); moved {
			t.Error("the slot moved twice")
		}
		r.MarkPrefillCompleted("a")
		c.now = c.now.Add(3 * time.Second) // no worker is avoided
		if next := decided(t, r, "b", "abcd"); next.Worker != d.Second.Worker || next.OverlapBlocks != 4 {
			t.Errorf("events %v: the next one goes to %v with %d blocks, want %v with 4", events, next.Worker, next.OverlapBlocks, d.Second.Worker)
		}
		r.Free("a")
		r.Free("b")
		for _, w := range r.Workers() {
			if w.ActiveRequests+w.PendTokens+w.ActiveBlocks != 0 {
				t.Errorf("after the end: %+v", w)
			}
		}
		if moved, avoided := r.Served("a", router.Response{Local: true}); moved || avoided != nil {
			t.Error("the end does not free the slot")
		}
	}
}

// A request that no worker answered was served by none, whichever was tried last.
func TestNobodyServesAnErrorOfTheProxy(t *testing.T) {
	for name, resp := range map[string]router.Response{"refused": {Status: 503, Local: true}, "late": {Status: 504, Late: true}} {
		r := newRouter(t, router.Config{AvoidFailing: 2 * time.Second}, 2)
		d := decided(t, r, "a", "abcd")
		resp.Address, resp.Asked = d.Second.Address, 2
		r.Served("a", resp)
		if kept, _ := r.Decision("a"); kept.Served.IsValid() {
			t.Errorf("%s: served by %v", name, kept.Served)
		}
	}
}

// A worker that received no attempt has not failed, even if another worker served the
// request.
func TestWhoWasNotAskedIsNotBlamed(t *testing.T) {
	for asked, blamed := range map[int]bool{0: true, 1: false, 2: true} { // 0: the proxy does not report attempts
		for _, local := range []bool{false, true} {
			r := newRouter(t, router.Config{AvoidFailing: time.Minute}, 2)
			d := decided(t, r, "a", "abcd")
			moved, _ := r.Served("a", router.Response{Address: d.Second.Address, Status: 200, Local: local, Asked: asked})
			states := byID(t, r)
			if first, second := states[d.Worker.ID].Failing, states[d.Second.Worker.ID].Failing; !moved || first != blamed || second != local {
				t.Errorf("asked %d, local %v: moved %v, failing: first %v, second %v", asked, local, moved, first, second)
			}
			d = decided(t, r, "b", "abcd", func(q *router.Request) { q.Pinned = &d.Worker })
			moved, _ = r.Served("b", router.Response{Address: netip.MustParseAddrPort("10.9.9.9:1"), Status: 503, Local: local, Asked: asked})
			if first := byID(t, r)[d.Worker.ID].Failing; moved || first != blamed {
				t.Errorf("asked %d, local %v, a stranger last: moved %v, failing %v", asked, local, moved, first)
			}
		}
	}
}

// The back-off doubles at each failure within a minute after the previous back-off,
// however long that was.
func TestLongAvoidanceDoubles(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{AvoidFailing: 5 * time.Minute, Now: c.read}, 2)
	for i, minutes := range []int{5, 10, 20, 40, 80, 80} {
		d := decided(t, r, "x", "abcd", func(q *router.Request) { q.Pinned = &router.Worker{ID: 1} })
		if _, avoided := r.Served(d.ID, router.Response{Address: worker(1).Address, Status: 503, Local: true}); len(avoided) != 1 {
			t.Fatalf("failure %d has no effect", i)
		}
		r.Free(d.ID)
		c.now = c.now.Add(time.Duration(minutes)*time.Minute - 1)
		if !byID(t, r)[1].Failing {
			t.Fatalf("failure %d: the worker is not avoided for %d minutes", i, minutes)
		}
		c.now = c.now.Add(30 * time.Second)
		if byID(t, r)[1].Failing {
			t.Fatalf("failure %d: the worker is avoided for more than %d minutes", i, minutes)
		}
	}
}

// Failures keep a worker out of decisions for 2, 4, 8, 16, 32 s, unless no other worker
// is left.
func TestFailingWorkersAreAvoided(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{AvoidFailing: 2 * time.Second, Now: c.read}, 2)
	one := worker(1).Address
	clients := uint64(0)
	fail := func(resp router.Response) bool {
		t.Helper()
		clients++
		d := decided(t, r, "x", "abcd", func(q *router.Request) { q.Pinned, q.Client = &router.Worker{ID: 1}, clients })
		defer r.Free(d.ID)
		_, avoided := r.Served(d.ID, resp)
		return len(avoided) > 0
	}
	others := func() {
		for range 20 {
			decided(t, r, "other", "abcd", func(q *router.Request) { q.Pinned = &router.Worker{ID: 2} })
			r.Free("other")
		}
	}
	refused := router.Response{Address: one, Status: 503, Local: true}
	for _, seconds := range []int{2, 4, 8, 16, 32, 32} {
		if !fail(refused) || fail(refused) {
			t.Fatal("a failure begins a period, another one within the period does not")
		}
		c.now = c.now.Add(time.Duration(seconds)*time.Second - 1)
		if d := decided(t, r, "y", "abcd"); d.Worker.ID != 2 || !byID(t, r)[1].Failing {
			t.Fatalf("after almost %d s: %v, %+v", seconds, d.Worker, byID(t, r)[1])
		}
		r.Free("y")
		others() // after ten failures, tries are limited by the number of requests, too
		if c.now = c.now.Add(1); byID(t, r)[1].Failing {
			t.Fatalf("the worker is avoided after %d s", seconds)
		}
	}
	c.now = c.now.Add(61 * time.Second)
	fail(refused)
	others()
	if c.now = c.now.Add(2 * time.Second); byID(t, r)[1].Failing {
		t.Error("failures are not forgotten after a minute")
	}

	c.now = c.now.Add(61 * time.Second)
	for range 20 {
		fail(router.Response{Address: one, Status: 200})
	}
	c.now = c.now.Add(31 * time.Minute)
	for status, times := range map[int]int{
		502: 5, 503: 5, 504: 5, 429: 5, 500: 5, 501: 5, 401: 5, 403: 5, 404: 5, 400: 0, 413: 0, 422: 0, 200: 0,
	} {
		for i := range 8 {
			if begins := fail(router.Response{Address: one, Status: status}); begins != (i+1 == times) {
				t.Errorf("status %d: the response %d begins a back-off: %v", status, i+1, begins)
			}
		}
		if times == 0 != !byID(t, r)[1].Failing {
			t.Errorf("status %d: failing %v", status, byID(t, r)[1].Failing)
		}
		c.now = c.now.Add(31 * time.Minute) // earlier responses no longer count
		for range 8 {
			fail(router.Response{Address: one, Status: 200})
		}
		c.now = c.now.Add(31 * time.Minute)
	}

	fail(refused)
	d := decided(t, r, "z", "abcd", func(q *router.Request) { q.Allowed = []router.Worker{{ID: 1}} })
	if d.Worker.ID != 1 {
		t.Errorf("no other worker may take the request: %v", d.Worker)
	}
	anew := worker(1)
	anew.StartedMS = 5
	set(t, r, anew)
	if byID(t, r)[1].Failing {
		t.Error("a new process has the failures of the old one")
	}

	never := newRouter(t, router.Config{}, 2)
	decided(t, never, "a", "abcd", func(q *router.Request) { q.Pinned = &router.Worker{ID: 1} })
	if _, avoided := never.Served("a", refused); avoided != nil || byID(t, never)[1].Failing {
		t.Error("the worker is avoided without the setting")
	}
	if moved, avoided := never.Served("nobody", router.Response{Address: netip.MustParseAddrPort("10.9.9.9:1")}); moved || avoided != nil {
		t.Error("an unknown id has an effect")
	}
	// The address belongs to no worker of the fleet, so no worker is blamed.
	if moved, avoided := never.Served("a", router.Response{Address: netip.MustParseAddrPort("10.9.9.9:1"), Status: 200}); moved || avoided != nil {
		t.Error("an unknown address has an effect")
	}
}

// On a busy machine connections are refused, lost or too slow although the worker is
// healthy. A worker that has answered another request since this one was booked is not
// blamed; otherwise it is.
func TestABusyMachineBlamesNoWorker(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	r := newRouter(t, router.Config{AvoidFailing: time.Minute, Now: c.read}, 2)
	pinned := func(q *router.Request) { q.Pinned = &router.Worker{ID: 1} }
	one := worker(1).Address
	lost := router.Response{Address: one, Status: 503, Local: true}
	decided(t, r, "slow", "abcd", pinned)
	c.now = c.now.Add(time.Second)
	decided(t, r, "quick", "abcd", pinned)
	c.now = c.now.Add(time.Second)
	r.Served("quick", router.Response{Address: one, Status: 200})
	if _, avoided := r.Served("slow", lost); len(avoided) > 0 {
		t.Errorf("%v is avoided, though it has just answered another request", avoided)
	}
	c.now = c.now.Add(time.Second)
	decided(t, r, "next", "abcd", pinned)
	c.now = c.now.Add(time.Second)
	if _, avoided := r.Served("next", lost); len(avoided) != 1 {
		t.Error("a worker that has answered no other request since is not blamed")
	}
}

// The headers of a stream do not show that a worker computes: it may send them at once, and hang. Its first token does.
func TestLoadThatWasLeftStaysUntilAToken(t *testing.T) {
	r := newRouter(t, router.Config{}, 1)
	left := func() int { return byID(t, r)[1].LeftRequests }
	leave := func() {
		decided(t, r, "leaves", "ab")
		r.Leave("leaves", true)
	}
	leave()
	d := decided(t, r, "stream", "ab")
	if r.Served(d.ID, router.Response{Address: d.Address, Asked: 1, Status: 200, TokenAwaited: true}); left() != 1 {
		t.Errorf("after the headers of a stream: %d left requests, want 1", left())
	}
	if r.FirstToken(d.ID, router.SignObserver); left() != 0 {
		t.Errorf("after a first token: %d left requests", left())
	}
	leave()
	d = decided(t, r, "whole", "ab")
	if r.Served(d.ID, router.Response{Address: d.Address, Asked: 1, Status: 200}); left() != 0 {
		t.Errorf("after a response that is no stream: %d left requests", left())
	}
}

// An avoided or degraded worker is another choice if no better one is left: it may serve all the same. A worker that
// gave no response is not chosen.
func TestTheLastResort(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(r *router.Router)
		want  bool
	}{
		"it asked for a pause": {func(r *router.Router) {
			r.Attempted("", router.Response{Address: worker(2).Address, Status: 429, RetryAfter: time.Minute})
		}, true},
		"it is degraded": {func(r *router.Router) {
			w := worker(2)
			w.Health = router.Degraded
			set(t, r, w)
		}, true},
		"it gave no response": {func(r *router.Router) {
			d := decided(t, r, "lost", "ab", func(q *router.Request) { q.Pinned = &router.Worker{ID: 2} })
			r.Served(d.ID, router.Response{Address: d.Address, Asked: 1, Status: 503, Local: true})
		}, false},
		"it drains": {func(r *router.Router) {
			w := worker(2)
			w.Draining = true
			set(t, r, w)
		}, false},
	} {
		r := newRouter(t, router.Config{AvoidFailing: time.Minute}, 2)
		c.spoil(r)
		if d := decided(t, r, "a", "abcd"); d.Worker.ID != 1 || (d.Second.Worker.ID == 2) != c.want || d.Third.Address.IsValid() {
			t.Errorf("%s: worker %d, second choice %+v, third %+v", name, d.Worker.ID, d.Second, d.Third)
		}
	}
}

// A second choice without a Host of its own gets its address as the Host, not that of the first choice.
func TestTheHostOfAPlainSecondChoice(t *testing.T) {
	r := newRouter(t, router.Config{}, 2)
	own := worker(1)
	own.Host, own.OwnHost = "own.example", true
	set(t, r, own)
	for _, each := range []bool{false, true} {
		d := decided(t, r, fmt.Sprint(each), "abcd", func(q *router.Request) { q.HostPerAttempt, q.Preferred = each, &router.Worker{ID: 1} })
		if want := map[bool]string{true: worker(2).Address.String()}[each]; d.Worker.ID != 1 || d.Second.NameHost != each || d.Second.Host != want {
			t.Errorf("a Host for each attempt: %v: worker %d, second choice %+v", each, d.Worker.ID, d.Second)
		}
	}
}
