// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Probes fail although workers serve. The worker that answered a request first must not stay the only candidate, and
// a worker that hangs must not get more than a few requests.
func TestWorkersThatMayServeAreTried(t *testing.T) {
	unproved := func(h router.Health) func(*router.WorkerInfo) {
		return func(w *router.WorkerInfo) { w.Health, w.Unproved = h, true }
	}
	play := func(first func(*router.WorkerInfo)) (got map[uint64]int) {
		c := newClock()
		r := newRouter(t, router.Config{Mode: router.RoundRobin, AvoidFailing: time.Second, Now: c.read}, 0)
		for id, change := range map[uint64]func(*router.WorkerInfo){
			1: first,
			2: unproved(router.Unhealthy),
			3: unproved(router.Starting),
			4: func(w *router.WorkerInfo) { w.Health, w.Unproved, w.Refuses = router.Expired, true, true },
			5: func(w *router.WorkerInfo) { w.Health = router.Unhealthy }, // answered its probe with 503
		} {
			w := worker(id)
			change(&w)
			set(t, r, w)
		}
		got = map[uint64]int{}
		for i := range 600 { // a minute
			d := decided(t, r, fmt.Sprint(i), "ab")
			if got[d.Worker.ID]++; d.Panic {
				t.Error("a worker is healthy or degraded, and the decision says that none is")
			}
			r.Free(d.ID)
			c.pass(100 * time.Millisecond)
		}
		return got
	}
	for name, first := range map[string]func(*router.WorkerInfo){"healthy": unproved(router.Healthy), "degraded": unproved(router.Degraded)} {
		got := play(first)
		for _, hangs := range []uint64{2, 3} { // tried after 0, 2, 6, 14 and 30 s
			if got[hangs] != 5 {
				t.Errorf("%s: worker %d, which answers nothing, got %d requests in a minute, want 5", name, hangs, got[hangs])
			}
		}
		if got[4] != 0 || got[5] != 0 {
			t.Errorf("%s: workers that refuse got requests: %v", name, got)
		}
	}
	if got := play(func(*router.WorkerInfo) {}); got[1] != 600 {
		t.Errorf("a worker is proved to be healthy, and others got requests: %v", got)
	}
	refused := func(w *router.WorkerInfo) { w.Health, w.Unproved, w.Refuses = router.Healthy, true, true }
	if got := play(refused); got[4] != 5 {
		t.Errorf("the probes of all workers are refused, the first one serves, and the other one got %d requests", got[4])
	}
}

// A worker that answers the request that tries it gets its share, and is tried at once if it is unhealthy again.
func TestATryEndsWithAnAnswer(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Mode: router.RoundRobin, AvoidFailing: time.Second, Now: c.read}, 0)
	health := func(id uint64, h router.Health) {
		w := worker(id)
		w.Health, w.Unproved = h, true
		set(t, r, w)
	}
	n := 0
	tries := func() (second int) {
		for range 4 {
			n++
			if d := decided(t, r, fmt.Sprint(n), "ab"); d.Worker.ID == 2 {
				second++
			}
			r.Free(fmt.Sprint(n))
		}
		return second
	}
	health(1, router.Healthy)
	for range 3 {
		health(2, router.Unhealthy)
		if got := tries(); got != 1 {
			t.Fatalf("unhealthy: %d requests, want 1", got)
		}
		health(2, router.Healthy)
		if got := tries(); got != 2 {
			t.Fatalf("healthy: %d requests, want 2", got)
		}
	}
}

// The second choice is not a worker that failed last.
func TestSecondChoiceIsNotDead(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{AvoidFailing: time.Second, Now: c.read}, 3)
	n, both := 0, 0
	for range 200 {
		n++
		d := decided(t, r, fmt.Sprint(n), "abcd", func(q *router.Request) { q.WantSecond, q.Tokens = true, []uint32{uint32(n)} })
		switch served := worker(1).Address; {
		case d.Worker.ID == 1:
			r.Served(d.ID, router.Response{Address: served, Asked: 1, Status: 200})
		case d.Second.Worker.ID == 1:
			r.Served(d.ID, router.Response{Address: served, Asked: 2, Status: 200})
		default:
			both++
			r.Served(d.ID, router.Response{Address: d.Second.Address, Asked: 2, Status: 503, Local: true})
		}
		r.Free(d.ID)
		c.pass(200 * time.Millisecond)
	}
	if both > 1 { // nothing is known before the first failures
		t.Errorf("%d of %d requests had two dead workers", both, n)
	}
	faults := map[string]int{}
	for _, w := range r.Workers() {
		for _, f := range w.Faults {
			faults[f.What]++
		}
	}
	if faults["no_response"] != 2 {
		t.Errorf("two workers give no response, and the faults are %v", faults)
	}
	for id := range uint64(3) {
		d := decided(t, r, fmt.Sprint("back", id), "ab", func(q *router.Request) { q.Pinned = &router.Worker{ID: 1 + id} })
		r.Served(d.ID, router.Response{Address: d.Address, Status: 200})
		if f := byID(t, r)[1+id].Faults; f != nil {
			t.Errorf("worker %d answered, and has the faults %v", 1+id, f)
		}
	}
}

// Responses that the proxy repeats at another worker are answers, too. A response of which both the proxy's log and
// the request tell counts once, whichever comes first.
func TestRepeatedAnswersAreErrors(t *testing.T) {
	for _, status := range []int{429, 503} {
		for name, told := range map[string][]func(r *router.Router, id string, resp router.Response){
			"log":              {logged},
			"request":          {served},
			"log, then served": {logged, served},
			"served, then log": {served, logged},
		} {
			c := newClock()
			r := newRouter(t, router.Config{AvoidFailing: time.Second, Now: c.read}, 2)
			for i := range 6 {
				d := decided(t, r, fmt.Sprint(i), "ab", func(q *router.Request) { q.Pinned, q.Client = &router.Worker{ID: 2}, uint64(1+i) })
				for _, tell := range told {
					tell(r, d.ID, router.Response{Address: d.Address, Status: status})
				}
				r.Free(d.ID)
				c.pass(time.Second)
			}
			want := fmt.Sprintf("answered %d to about 6 of its last 6", status)
			if faults := byID(t, r)[2].Faults; len(faults) != 1 || faults[0].What != "answers_errors" || !strings.Contains(faults[0].Text, want) {
				t.Errorf("%d, told by %s: the faults are %v, want one with %q", status, name, faults, want)
			}
		}
	}
}

func logged(r *router.Router, id string, resp router.Response) { r.Attempted(id, resp) }
func served(r *router.Router, id string, resp router.Response) { r.Served(id, resp) }

// A worker that fails is no reason to try none of the workers whose probes are silent, and a worker that still loads
// gets nothing while one of these may serve.
func TestAFailingWorkerIsNotTheOnlyOne(t *testing.T) {
	for name, status := range map[string]int{"answers 401": 401, "answers 429": 429, "gives no response": 0} {
		c := newClock()
		r := newRouter(t, router.Config{Mode: router.RoundRobin, AvoidFailing: 2 * time.Second, Now: c.read}, 0)
		health := func(id uint64, h router.Health, unproved bool) {
			w := worker(id)
			w.Health, w.Unproved = h, unproved
			set(t, r, w)
		}
		health(1, router.Healthy, false) // fails
		health(2, router.Unhealthy, true)
		health(3, router.Expired, true)
		health(4, router.Starting, true) // still loads
		got := map[uint64]int{}
		for i := range 200 {
			d := decided(t, r, fmt.Sprint(i), "ab", func(q *router.Request) { q.Client, q.Prefix = uint64(1+i%5), 1 })
			got[d.Worker.ID]++
			switch d.Worker.ID {
			case 1:
				r.Served(d.ID, router.Response{Address: d.Address, Status: max(status, 503*(1-min(status, 1))), Local: status == 0})
			case 2, 3:
				r.Served(d.ID, router.Response{Address: d.Address, Status: 200})
				health(d.Worker.ID, router.Healthy, true)
			}
			r.Free(d.ID)
			c.pass(100 * time.Millisecond)
		}
		if got[1] > 20 || got[2] < 60 || got[3] < 60 || got[4] > 5 {
			t.Errorf("the first worker %s: requests by worker: %v", name, got)
		}
	}
}

// Without a healthy worker, those that may serve come before those that still load, and failures count.
func TestOrderWithoutAHealthyWorker(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Mode: router.RoundRobin, AvoidFailing: 2 * time.Second, Now: c.read}, 0)
	for id, h := range map[uint64]router.Health{1: router.Unhealthy, 2: router.Unhealthy, 3: router.Starting} {
		w := worker(id)
		w.Health, w.Unproved = h, true
		set(t, r, w)
	}
	got := map[uint64]int{}
	for i := range 100 {
		d := decided(t, r, fmt.Sprint(i), "ab", func(q *router.Request) { q.Client = uint64(1 + i) })
		got[d.Worker.ID]++
		if !d.Panic {
			t.Error("no worker is healthy, and the decision does not say so")
		}
		if d.Worker.ID == 1 {
			r.Served(d.ID, router.Response{Address: d.Address, Status: 429})
		}
		r.Free(d.ID)
		c.pass(100 * time.Millisecond)
	}
	if got[1] > 10 || got[3] > 0 {
		t.Errorf("worker 1 answers 429, worker 3 loads: requests by worker: %v", got)
	}
	for i := range 5 { // no other worker may take these
		d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint("pinned", i), Model: "m", Tokens: prompt("ab"), Pinned: &router.Worker{ID: 3}})
		if err != nil || d.Worker.ID != 3 {
			t.Errorf("a request pinned to a worker that may serve: %v, %v", d.Worker, err)
		}
	}
}

// The requests of a hard session go to its worker if that may serve, however many come at once.
func TestHardSessionsOfAWorkerThatMayServe(t *testing.T) {
	for name, q := range map[string]struct {
		change func(w *router.WorkerInfo)
		serves bool
	}{
		"silent probes":      {func(w *router.WorkerInfo) { w.Health, w.Unproved = router.Unhealthy, true }, true},
		"expired":            {func(w *router.WorkerInfo) { w.Health, w.Unproved = router.Expired, true }, true},
		"degraded":           {func(w *router.WorkerInfo) { w.Health = router.Degraded }, true},
		"its probe says 503": {func(w *router.WorkerInfo) { w.Health = router.Unhealthy }, false},
		"its probe refused":  {func(w *router.WorkerInfo) { w.Health, w.Unproved, w.Refuses = router.Unhealthy, true, true }, false},
		"draining":           {func(w *router.WorkerInfo) { w.Draining = true }, false},
	} {
		r := newRouter(t, router.Config{AvoidFailing: time.Minute, Sessions: router.SessionConfig{TTL: time.Hour, Hard: true}}, 3)
		n := 0
		turn := func(to *router.Worker) (router.Decision, error) {
			n++
			return r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(n), Model: "m", Tokens: prompt("ab"), Session: "s", Pinned: to})
		}
		if _, err := turn(&router.Worker{ID: 2}); err != nil {
			t.Fatal(err)
		}
		r.MarkPrefillCompleted("1")
		w := worker(2)
		q.change(&w)
		set(t, r, w)
		for range 4 {
			if d, err := turn(nil); (err == nil) != q.serves || q.serves && (d.Worker.ID != 2 || d.Reason != router.ReasonSession) {
				t.Errorf("%s: worker %d by %q, %v", name, d.Worker.ID, d.Reason, err)
			}
		}
		if q.serves {
			continue
		}
		// A worker that is avoided for its answers has no substitute either; one that gives none is not asked.
		set(t, r, worker(2))
		for _, resp := range []router.Response{{Status: 429, RetryAfter: time.Minute}, {Status: 503, Local: true}} {
			d, err := turn(nil)
			if err != nil || d.Worker.ID != 2 {
				t.Fatalf("%s: healthy again: worker %d, %v", name, d.Worker.ID, err)
			}
			resp.Address = d.Address
			r.Served(d.ID, resp)
		}
		if d, err := turn(nil); err == nil {
			t.Errorf("%s: the worker gives no response, and the session goes to worker %d", name, d.Worker.ID)
		}
	}
}
