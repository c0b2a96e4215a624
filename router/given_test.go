// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// continues decides for a request that needs what a worker keeps under an id.
func continues(t *testing.T, r *router.Router, id, held string) router.Decision {
	t.Helper()
	return decided(t, r, id, "abcd", func(q *router.Request) { q.Held = held })
}

// Requests with an id go to the worker that gave it out, whatever the others have cached.
func TestIDsBindToTheirWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // for the waits
		r := newRouter(t, router.Config{Scoring: classic(1)}, 4)
		store(r, router.Worker{ID: 1}, "abcd")
		if d := continues(t, r, "before", "resp_1"); d.Worker.ID != 1 || !d.Second.Address.IsValid() {
			t.Errorf("an unknown id: to worker %d, second choice %v; want what the costs say", d.Worker.ID, d.Second)
		}
		for n := range 8 { // with odd ones: of other characters, and the longest
			id := []string{"resp_1", "0", " ", "\x00", "a/../b", "%2e", "ß\xff", strings.Repeat("x", 256)}[n]
			w := router.Worker{ID: uint64(n%3) + 2}
			for range 2 { // a repetition changes nothing
				if !r.Gave(id, w) {
					t.Errorf("%q is not bound", id)
				}
			}
			d := continues(t, r, fmt.Sprint(n), id)
			if d.Worker != w || d.Reason != router.ReasonSession || d.Second.Address.IsValid() {
				t.Errorf("%q: to %v by %s, second choice %v; want %v and no second", id, d.Worker, d.Reason, d.Second, w)
			}
			if h, known := r.Holder(t.Context(), id); !known || h.Worker != w || h.Address != d.Address {
				t.Errorf("%q: held by %v at %v, known: %v", id, h.Worker, h.Address, known)
			}
		}
		for _, id := range []string{"", strings.Repeat("x", 257), strings.Repeat("x", 1<<20)} {
			if r.Gave(id, router.Worker{ID: 3}) {
				t.Errorf("an id of %d bytes is bound", len(id))
			}
			if _, known := r.Holder(t.Context(), id); known || continues(t, r, fmt.Sprint("bad", len(id)), id).Worker.ID != 1 {
				t.Errorf("an id of %d bytes leads to a worker", len(id))
			}
		}
		// A request without booking, and one whose worker is named, which counts more.
		if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Held: "resp_1"}); err != nil || d.Worker.ID != 2 {
			t.Errorf("a question goes to %d, %v", d.Worker.ID, err)
		}
		if d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Held: "resp_1", Pinned: &router.Worker{ID: 3}}); err != nil || d.Worker.ID != 3 {
			t.Errorf("a pinned request goes to %d, %v", d.Worker.ID, err)
		}
	})
}

// Only the first worker that gives out an id has it: neither requests nor other workers move it.
func TestIDsAreNotMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // for the waits
		r := newRouter(t, router.Config{}, 3)
		r.Gave("resp_1", router.Worker{ID: 2})
		if r.Gave("resp_1", router.Worker{ID: 3}) {
			t.Error("another worker takes over an id")
		}
		decided(t, r, "forger", "abcd", func(q *router.Request) { q.Held, q.Pinned = "resp_1", &router.Worker{ID: 1} })
		r.MarkPrefillCompleted("forger")
		if d := continues(t, r, "a", "resp_1"); d.Worker.ID != 2 {
			t.Errorf("the id leads to %d", d.Worker.ID)
		}
		// When the worker has left, any worker answers, and the id may be given out again.
		r.RemoveWorker(2)
		if d := continues(t, r, "b", "resp_1"); d.Worker.ID == 2 || !d.Second.Address.IsValid() {
			t.Errorf("an id of a worker that left leads to %d, second choice %v", d.Worker.ID, d.Second)
		}
		if _, known := r.Holder(t.Context(), "resp_1"); known {
			t.Error("an id of a worker that left is held")
		}
		if !r.Gave("resp_1", router.Worker{ID: 3}) || continues(t, r, "c", "resp_1").Worker.ID != 3 {
			t.Error("an id of a worker that left is not bound again")
		}
	})
}

// What becomes of a request whose worker has another state.
func TestIDsAndTheStateOfTheirWorker(t *testing.T) {
	bound := router.Worker{ID: 2}
	for name, c := range map[string]struct {
		conf   router.Config
		change func(w *router.WorkerInfo)
		held   bool
	}{
		"draining":         {change: func(w *router.WorkerInfo) { w.Draining = true }, held: true},
		"degraded":         {change: func(w *router.WorkerInfo) { w.Health = router.Degraded }, held: true},
		"unhealthy":        {change: func(w *router.WorkerInfo) { w.Health = router.Unhealthy }},
		"expired":          {change: func(w *router.WorkerInfo) { w.Health = router.Expired }},
		"direct":           {conf: router.Config{Mode: router.Direct}, held: true},
		"a prefill worker": {change: func(w *router.WorkerInfo) { w.Role = router.Prefill }},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRouter(t, c.conf, 3)
			r.Gave("resp_1", bound)
			w := worker(2)
			if c.change != nil {
				c.change(&w)
			}
			set(t, r, w)
			if d := continues(t, r, "a", "resp_1"); (d.Worker == bound) != c.held {
				t.Errorf("the request goes to %d", d.Worker.ID)
			}
			if _, known := r.Holder(t.Context(), "resp_1"); known != c.held && name != "a prefill worker" {
				t.Errorf("held: %v", known)
			}
		})
	}
	// If no worker is healthy, the worker with the id is as good as the others.
	r := newRouter(t, router.Config{}, 0)
	for id := range uint64(3) {
		w := worker(id + 1)
		w.Health = router.Unhealthy
		set(t, r, w)
	}
	r.Gave("resp_1", bound)
	if _, known := r.Holder(t.Context(), "resp_1"); !known {
		t.Error("no worker is healthy, and the id is not held")
	}
	if d := continues(t, r, "a", "resp_1"); d.Worker != bound {
		t.Errorf("no worker is healthy, and the request goes to %d", d.Worker.ID)
	}
}

// A busy worker keeps its conversations: no other worker can serve them. Questions about an id compute nothing.
func TestIDsOfABusyWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // for the waits
		r := newRouter(t, router.Config{Thresholds: scorer.Thresholds{PrefillTokens: new(0)}}, 3)
		r.Gave("resp_1", router.Worker{ID: 2})
		continues(t, r, "first", "resp_1")
		_, err := r.BestWorker(t.Context(), router.Request{ID: "second", Owned: true, Model: "m", Held: "resp_1", Tokens: prompt("ab")})
		if !errors.Is(err, router.ErrAllBusy) || errors.Is(err, router.ErrPinnedBusy) {
			t.Errorf("the worker is busy: %v", err)
		}
		if d, known := r.Holder(t.Context(), "resp_1"); !known || d.Worker.ID != 2 {
			t.Error("a busy worker does not hold its ids")
		}
	})
}

// An id leads to a worker of the request's model only.
func TestIDsOfAnotherModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // for the waits
		r := newRouter(t, router.Config{}, 2)
		other := worker(7)
		other.Models = []string{"other"}
		set(t, r, other)
		r.Gave("resp_1", router.Worker{ID: 7})
		if d := continues(t, r, "a", "resp_1"); d.Worker.ID == 7 {
			t.Error("the request goes to a worker of another model")
		}
		if d, known := r.Holder(t.Context(), "resp_1"); !known || d.Worker.ID != 7 || d.Model != "other" {
			t.Errorf("the id is held by %d of %q", d.Worker.ID, d.Model)
		}
		large := worker(8) // a pool of its own
		large.BlockSize = 8
		set(t, r, large)
		r.Gave("resp_2", router.Worker{ID: 8})
		if d := continues(t, r, "b", "resp_2"); d.Worker.ID != 8 {
			t.Errorf("the id in another pool of the model leads to %d", d.Worker.ID)
		}
	})
}

// An id is bound to the rank that gave it out.
func TestIDsBindToARank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // for the waits
		r := newRouter(t, router.Config{}, 0)
		w := worker(1)
		w.DPSize, w.Engine = 4, "vllm"
		set(t, r, w)
		r.Gave("resp_1", router.Worker{ID: 1, DPRank: 3})
		if d := continues(t, r, "a", "resp_1"); d.Worker.DPRank != 3 || !d.NameRank {
			t.Errorf("the request goes to rank %d, named: %v", d.Worker.DPRank, d.NameRank)
		}
		if d, _ := r.Holder(t.Context(), "resp_1"); d.Worker.DPRank != 3 || !d.NameRank {
			t.Errorf("the id is held by rank %d, named: %v", d.Worker.DPRank, d.NameRank)
		}
	})
}

// Ids expire when they were not used for a day, and a flood of them removes the least recently used.
func TestIDsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // for the waits
		now := time.Unix(1_000_000, 0)
		r := newRouter(t, router.Config{Now: func() time.Time { return now }}, 2)
		held := func(id string) bool { _, known := r.Holder(t.Context(), id); return known }
		r.Gave("used", router.Worker{ID: 1})
		r.Gave("unused", router.Worker{ID: 1})
		for range 3 {
			now = now.Add(23 * time.Hour)
			if !held("used") {
				t.Fatal("an id that is used expires")
			}
			r.Tick()
		}
		if held("unused") || r.GivenIDs() != 1 {
			t.Errorf("an unused id does not expire; %d ids are bound", r.GivenIDs())
		}
		r.Gave("old", router.Worker{ID: 1})
		for n := range 1<<18 + 10_000 {
			r.Gave(fmt.Sprint(n), router.Worker{ID: 2})
			if n%10_000 == 0 && !held("used") {
				t.Fatal("an id that is used leaves")
			}
		}
		if n := r.GivenIDs(); n != 1<<18 || held("old") || held("1") || !held(fmt.Sprint(1<<18+9_999)) {
			t.Errorf("%d ids are bound, want %d, the newest", n, 1<<18)
		}
	})
}

// A new router takes the bindings of another one, also before it knows their workers. Ids that it knows stay.
func TestBindingsAreTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // for the waits
		r := newRouter(t, router.Config{}, 3)
		for n := range uint64(3) {
			r.Gave(fmt.Sprint("resp_", n+1), router.Worker{ID: n + 1})
		}
		if _, known := r.Holder(t.Context(), "resp_1"); !known {
			t.Fatal("resp_1 is unknown")
		}
		list := r.GivenBindings()
		if len(list) != 3 || list[0].Worker.ID != 2 || list[2].Worker.ID != 1 || r.GivenChanges() != 3 {
			t.Fatalf("the bindings are %v", list)
		}
		later := newRouter(t, router.Config{}, 1)
		later.Gave("resp_3", router.Worker{ID: 1})
		for _, b := range list {
			later.PeerGave(b)
		}
		if _, known := later.Holder(t.Context(), "resp_2"); known {
			t.Error("a worker that is not known holds an id")
		}
		set(t, later, worker(2))
		for id, want := range map[string]uint64{"resp_1": 1, "resp_2": 2, "resp_3": 1} {
			if d, known := later.Holder(t.Context(), id); !known || d.Worker.ID != want {
				t.Errorf("%s leads to %d, want %d", id, d.Worker.ID, want)
			}
		}
		if later.PeerGave(router.GivenBinding{Worker: router.Worker{ID: 1}}) {
			t.Error("a binding without an id is taken")
		}
	})
}

// The worker that answers is the one at the address that Envoy reports, also for another replica's request.
func TestGiver(t *testing.T) {
	r := newRouter(t, router.Config{}, 3)
	d := decided(t, r, "a", "abcd", func(q *router.Request) { q.Pinned = &router.Worker{ID: 2} })
	for _, c := range []struct {
		at   netip.AddrPort
		want uint64
	}{
		{netip.AddrPort{}, 2}, {d.Address, 2}, {worker(3).Address, 3}, {netip.MustParseAddrPort("192.0.2.9:1"), 0},
	} {
		if w, known := r.Giver("a", c.at); w.ID != c.want || known != (c.want != 0) {
			t.Errorf("at %v: worker %d, want %d", c.at, w.ID, c.want)
		}
	}
	decided(t, r, "b", "abcd")
	r.Free("a")
	r.Free("b")
	if w, known := r.Giver("a", d.Address); !known || w.ID != 3 {
		t.Errorf("a request that ended after a call had worker %d, want the last one", w.ID)
	}
	if _, known := r.Giver("b", d.Address); known {
		t.Error("a request that ended without a call has a worker")
	}
	const id = "0000000000000007-1"
	r.PeerChanged(7, taken(id, "abcd", 3))
	if w, known := r.Giver(id, netip.AddrPort{}); !known || w.ID != 3 {
		t.Errorf("another replica's request: worker %d", w.ID)
	}
}

// The report of a response may come after the next request: the request waits for it.
func TestIDsAreAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRouter(t, router.Config{}, 3)
		begin := time.Now()
		took := func() (d time.Duration) {
			d, begin = time.Since(begin), time.Now()
			return d
		}
		later := func(id string) {
			go func() {
				time.Sleep(100 * time.Millisecond)
				r.Gave(id, router.Worker{ID: 2})
			}()
		}
		later("resp_1")
		if d := continues(t, r, "a", "resp_1"); d.Worker.ID != 2 || took() != 100*time.Millisecond {
			t.Errorf("the request does not wait for its id: worker %d", d.Worker.ID)
		}
		later("resp_2")
		if d, known := r.Holder(t.Context(), "resp_2"); !known || d.Worker.ID != 2 || took() != 100*time.Millisecond {
			t.Errorf("a question does not wait for its id: worker %d", d.Worker.ID)
		}
		later("resp_3")
		for range 2 { // of several requests each one
			go func() {
				if d, known := r.Holder(t.Context(), "resp_3"); !known || d.Worker.ID != 2 {
					t.Errorf("worker %d", d.Worker.ID)
				}
			}()
		}
		synctest.Wait()
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		took()
		if _, known := r.Holder(t.Context(), "resp_4"); known || took() != 250*time.Millisecond {
			t.Error("an unknown id is not awaited for 250 ms")
		}
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Held: "resp_4", DecisionTimeout: 100 * time.Millisecond})
		if err != nil || took() != 50*time.Millisecond {
			t.Errorf("the wait takes more than half of the decision's time: worker %d, %v", d.Worker.ID, err)
		}
		if n := r.AwaitedIDs(); n != 0 {
			t.Errorf("%d ids are awaited", n)
		}
	})
}
