// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// costs returns what each worker would cost, without a booking.
func costs(t *testing.T, r *router.Router) (list []float64, all []router.Candidate) {
	t.Helper()
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABCDE"), Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range d.Candidates {
		list = append(list, c.Cost)
	}
	return list, d.Candidates
}

// A worker that reports requests of other senders costs more than an idle one, with every
// policy and in every mode that uses load, until the report is too old.
func TestForeignLoadCountsInEveryCost(t *testing.T) {
	for _, policy := range scorer.Policies() {
		for _, blocks := range []int{0, 1000} {
			for name, report := range map[string]func(*router.Router, time.Time){
				"all": func(r *router.Router, at time.Time) {
					r.SetEngineRequests(router.Worker{ID: 1}, 8, 30, at)
					r.SetEngineUsage(router.Worker{ID: 1}, .99, at)
				},
				"requests": func(r *router.Router, at time.Time) { r.SetEngineRequests(router.Worker{ID: 1}, 8, 0, at) },
				"queue":    func(r *router.Router, at time.Time) { r.SetEngineRequests(router.Worker{ID: 1}, 0, 30, at) },
			} {
				c, s := newClock(), scorer.Defaults()
				s.Policy = policy
				r := newRouter(t, router.Config{Scoring: s, Now: c.read}, 0)
				for id := range uint64(2) {
					w := worker(id + 1)
					w.TotalKVBlocks = blocks
					set(t, r, w)
				}
				if got, _ := costs(t, r); got[0] != got[1] {
					t.Fatalf("%s: idle workers cost %v", policy, got)
				}
				report(r, c.now)
				got, all := costs(t, r)
				if got[0] <= got[1] || all[0].Foreign == (router.Foreign{}) || all[1].Foreign != (router.Foreign{}) {
					t.Errorf("%s, %s reported, %d blocks: a busy worker and an idle one cost %v; foreign load %v", policy, name, blocks, got, all[0].Foreign)
				}
				if f := r.Workers()[0].Foreign; f.Requests == 0 {
					t.Errorf("%s, %s reported: /v1/workers has the foreign load %+v", policy, name, f)
				}
				c.pass(10*time.Second + time.Millisecond)
				if got, _ := costs(t, r); got[0] != got[1] {
					t.Errorf("%s, %s reported: after 10 s workers cost %v", policy, name, got)
				}
			}
		}
	}
	for _, mode := range []router.Mode{router.LeastLoaded, router.PowerOfTwo} {
		r := newRouter(t, router.Config{Mode: mode}, 2)
		r.SetEngineRequests(router.Worker{ID: 1}, 1, 0, time.Now())
		if id, err := pick(t, r, router.Request{}); id != 2 || err != nil {
			t.Errorf("%s: worker %d, %v; want the idle one", mode, id, err)
		}
	}
}

// A report that contains only this router's own requests changes no cost, even if the
// report is older than the latest bookings and ends.
func TestOwnLoadIsNotCountedTwice(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read}, 0)
	info := worker(1)
	info.TotalKVBlocks = 1000
	set(t, r, info)
	set(t, r, worker(2))
	ids := []string{"a", "b", "c", "d"}
	for i, id := range ids {
		occupy(t, r, id, 1, id+"XYZ", i < 2)
	}
	before, _ := costs(t, r)
	r.SetEngineRequests(router.Worker{ID: 1}, 3, 1, c.now)
	r.SetEngineLoad(router.Worker{ID: 1}, 20, c.now) // 4 blocks and a partial one for each of 4 prompts
	if after, all := costs(t, r); !slices.Equal(before, after) || all[0].Foreign != (router.Foreign{}) {
		t.Errorf("costs were %v, with the report %v; foreign load %+v", before, after, all[0].Foreign)
	}
	// The report was measured before three requests ended and one more began.
	measured := c.now
	c.pass(900 * time.Millisecond)
	for _, id := range ids[:3] {
		r.Free(id)
	}
	occupy(t, r, "e", 1, "eXYZ", false)
	r.SetEngineRequests(router.Worker{ID: 1}, 3, 1, measured)
	r.SetEngineLoad(router.Worker{ID: 1}, 20, measured)
	if _, all := costs(t, r); all[0].Foreign != (router.Foreign{}) || all[0].ActiveRequests != 2 {
		t.Errorf("%d requests, foreign load %+v; want 2 and none", all[0].ActiveRequests, all[0].Foreign)
	}
	// A booking after a report adds to the report's load.
	c.pass(3 * time.Second)
	r.SetEngineRequests(router.Worker{ID: 1}, 7, 0, c.now)
	occupy(t, r, "f", 1, "fXYZ", true)
	if _, all := costs(t, r); all[0].ActiveRequests != 3+5 || all[0].Foreign.Requests != 5 {
		t.Errorf("%d requests, foreign %+v; want 3 own ones and 5", all[0].ActiveRequests, all[0].Foreign)
	}
	// Another process at the same address has no foreign load.
	info.StartedMS = 7
	set(t, r, info)
	if _, all := costs(t, r); all[0].Foreign != (router.Foreign{}) {
		t.Errorf("a restarted worker has the foreign load %+v", all[0].Foreign)
	}
}

// Another replica's request that a report contains is foreign only until the replica
// reports it.
func TestAReplicasRequestIsNotCountedTwice(t *testing.T) {
	for late, want := range map[time.Duration]int{10 * time.Millisecond: 1, time.Second: 2} {
		c := newClock()
		r := newRouter(t, router.Config{Now: c.read}, 1)
		w := router.Worker{ID: 1}
		r.SetEngineRequests(w, 0, 1, c.now)
		if _, all := costs(t, r); all[0].ActiveRequests != 1 {
			t.Errorf("%d requests, want the reported one", all[0].ActiveRequests)
		}
		c.pass(late)
		r.PeerChanged(2, router.Change{Kind: router.SlotTaken, ID: "x", Worker: w, PromptTokens: 30})
		if _, all := costs(t, r); all[0].ActiveRequests != want {
			t.Errorf("a replica reports a request %v after a report: %d requests, want %d", late, all[0].ActiveRequests, want)
		}
	}
}

// Nor is a request counted twice that moved to another worker, if that worker's engine
// reported it before the router learned of the move.
func TestAMovedRequestIsNotCountedTwice(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read}, 2)
	d := decided(t, r, "a", "ABC")
	r.SetEngineRequests(d.Second.Worker, 1, 0, c.now)
	c.pass(3 * time.Second)
	if moved, _ := r.Served("a", router.Response{Address: d.Second.Address, Status: 200}); !moved {
		t.Fatal("the request did not move")
	}
	if s := byID(t, r)[d.Second.Worker.ID]; s.ActiveRequests != 1 || s.Foreign != (router.Foreign{}) {
		t.Errorf("%d requests and the foreign load %+v, want 1 and none", s.ActiveRequests, s.Foreign)
	}
}

// In a random world the foreign load of a report is at most the engine's load of others
// at the time of measurement, although requests reach and leave the engine later than the
// router knows, and reports arrive late. It is exact if nothing changed for a while.
func TestForeignLoadEqualsSlowModel(t *testing.T) {
	type request struct {
		id                 string
		from, until, freed time.Time // from and until: in the engine; freed: by the router
		waiting, own       bool
	}
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 32))
		ms := func(most int) time.Duration { return time.Duration(rng.IntN(most)) * time.Millisecond }
		c := newClock()
		r := newRouter(t, router.Config{Now: c.read}, 1)
		w := router.Worker{ID: 1}
		var all []*request
		// count returns how many requests an engine had at a time.
		count := func(at time.Time, own bool) (n, waiting int) {
			for _, q := range all {
				if q.own == own && !q.from.After(at) && (q.until.IsZero() || q.until.After(at)) {
					n++
					if q.waiting {
						waiting++
					}
				}
			}
			return n, waiting
		}
		var reported time.Time
		last := c.now
		for step := range 2000 {
			c.pass(ms(60))
			q := &request{id: fmt.Sprint(step), from: c.now}
			switch rng.IntN(5) {
			case 0:
				q.own, q.waiting, q.from = true, true, c.now.Add(ms(200))
				occupy(t, r, q.id, 1, "ABC", false)
				all, last = append(all, q), c.now
			case 1:
				q.waiting = rng.IntN(2) == 0
				all, last = append(all, q), c.now
			case 2, 3: // a request ends, which the router learns later
				if len(all) == 0 {
					break
				}
				if e := all[rng.IntN(len(all))]; e.until.IsZero() && !e.from.After(c.now) {
					e.until, last = c.now, c.now
					if e.own {
						e.freed = c.now.Add(ms(200))
					}
				}
			}
			if rng.IntN(20) == 0 {
				c.pass(4 * time.Second)
			}
			for _, e := range all {
				if !e.freed.IsZero() && !e.freed.After(c.now) {
					r.Free(e.id)
					e.freed, last = time.Time{}, c.now
				}
			}
			if rng.IntN(10) > 0 {
				continue
			}
			measured := c.now.Add(-ms(700))
			if measured.Before(reported) {
				continue // the router ignores it
			}
			reported = measured
			own, ownWaiting := count(measured, true)
			foreign, foreignWaiting := count(measured, false)
			waiting := ownWaiting + foreignWaiting
			r.SetEngineRequests(w, own+foreign-waiting, waiting, measured)
			got := r.Workers()[0].Foreign
			quiet := c.now.Sub(last) > 3*time.Second
			if got.Requests < 0 || got.Requests > foreign || got.Waiting > got.Requests || got.Waiting > foreignWaiting {
				t.Fatalf("seed %d, step %d: the router takes %+v to be foreign of %d requests, %d of them waiting", seed, step, got, foreign, foreignWaiting)
			}
			if quiet && (got.Requests != foreign || got.Waiting != foreignWaiting) {
				t.Fatalf("seed %d, step %d: nothing has happened, and %+v is foreign, want %d, %d waiting", seed, step, got, foreign, foreignWaiting)
			}
		}
	}
}

// The same reports and requests give the same decisions.
func TestForeignLoadIsDeterministic(t *testing.T) {
	play := func() (all []string) {
		c := newClock()
		r := newRouter(t, router.Config{Now: c.read, Seed: 3}, 4)
		rng := rand.New(rand.NewPCG(5, 5))
		for i := range 500 {
			c.pass(time.Duration(rng.IntN(50)) * time.Millisecond)
			r.SetEngineRequests(router.Worker{ID: uint64(rng.IntN(4) + 1)}, rng.IntN(20), rng.IntN(20), c.now)
			d, err := r.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(i), Model: "m", Tokens: prompt("ABC"[:1+rng.IntN(3)]), Explain: true})
			if err != nil {
				t.Fatal(err)
			}
			if i > 10 {
				r.Free(fmt.Sprint(i - 10))
			}
			d.TokenizeTime, d.HashTime, d.MatchTime, d.PickTime = 0, 0, 0, 0
			text, err := json.Marshal(d)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, string(text))
		}
		return all
	}
	if a, b := play(), play(); !slices.Equal(a, b) {
		t.Error("two plays of the same differ")
	}
}

// The coarse estimate uses the throughput that the worker reports.
func TestCoarseEstimateUsesTheWorkersThroughput(t *testing.T) {
	r := newRouter(t, router.Config{PrefillThroughput: 1000}, 1)
	slow := worker(2)
	slow.PrefillThroughput, slow.GPUType = 100, "L4"
	set(t, r, slow)
	loads, err := r.PotentialLoads(t.Context(), router.Request{Model: "m", Tokens: prompt("ABCDE")})
	if err != nil || loads[0].CoarseTTFT != 40 || loads[1].CoarseTTFT != 400 {
		t.Errorf("%+v, %v; want 40 and 400 ms", loads, err)
	}
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABCDE"), Pinned: &router.Worker{ID: 2}})
	if err != nil || d.CoarseTTFT != 400 {
		t.Errorf("%v ms, %v; want 400", d.CoarseTTFT, err)
	}
	if s := r.Workers()[1]; s.PrefillTPS != 100 || s.GPUType != "L4" {
		t.Errorf("%+v", s)
	}
	slow.PrefillThroughput = -1
	if r.SetWorker(slow) == nil {
		t.Error("a negative throughput was accepted")
	}
}
