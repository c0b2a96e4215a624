// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/slots"
)

// left returns what Decided hands over, as "id" or "id: error".
func left(t *testing.T, r *router.Router) (all []string) {
	t.Helper()
	r.Decided(t.Context(), func(id string, d router.Decision, err error) {
		switch {
		case err != nil:
			all = append(all, fmt.Sprint(id, ": ", errors.Unwrap(err)))
		case d.ID != id || d.Worker.ID == 0:
			t.Errorf("%s has the decision %+v", id, d)
		default:
			all = append(all, id)
		}
	})
	return all
}

// wait submits a request, which is expected to wait.
func wait(t *testing.T, r *router.Router, req router.Request) {
	t.Helper()
	req.Model = "m"
	if _, waits, err := r.Submit(t.Context(), req); !waits || err != nil {
		t.Errorf("%s waits: %v, %v", req.ID, waits, err)
	}
}

// The requests of Submit leave the queue in the order of the policy, one after the other.
func TestSubmittedRequestsKeepTheOrder(t *testing.T) {
	for policy, want := range map[slots.QueuePolicy]string{slots.FCFS: "D A B C", slots.LCFS: "D C B A", slots.WSPT: "D C B A"} {
		synctest.Test(t, func(t *testing.T) {
			r := queued(t, router.QueueConfig{Policy: policy}, 1)
			d, waits, err := r.Submit(t.Context(), router.Request{ID: "x", Model: "m", Tokens: prompt("XY")})
			if waits || err != nil || d.Worker.ID != 1 {
				t.Fatalf("with an idle worker: waits %v, worker %d, %v", waits, d.Worker.ID, err)
			}
			for _, q := range []router.Request{
				{ID: "A", Tokens: own("A", 8)}, {ID: "B", Tokens: own("B", 4)}, {ID: "C", Tokens: own("C", 2)}, {ID: "D", Tokens: own("D", 8), StrictPriority: 1},
			} {
				wait(t, r, q)
				time.Sleep(time.Second)
			}
			var order []string
			for last := "x"; ; {
				r.Free(last)
				admitted := left(t, r)
				if len(admitted) == 0 {
					break
				}
				order, last = append(order, admitted...), admitted[0]
			}
			if got := strings.Join(order, " "); got != want {
				t.Errorf("%s: admitted %q, want %q", policy, got, want)
			}
		})
	}
}

// Random loads get the same decisions with Submit as with BestWorker.
func TestSubmitDecidesAsBestWorker(t *testing.T) {
	for seed := range uint64(8) {
		conf := router.Config{Seed: seed, Queue: router.QueueConfig{Threshold: new(1.), Policy: []slots.QueuePolicy{slots.FCFS, slots.LCFS, slots.WSPT}[seed%3], Limit: 6}}
		var worlds [2][]string
		waited := 0
		for blocking := range worlds {
			synctest.Test(t, func(t *testing.T) {
				r := newRouter(t, conf, 0)
				for id := range uint64(2) {
					w := worker(id + 1)
					w.MaxBatchedTokens = 20
					set(t, r, w)
				}
				var mu sync.Mutex
				var log, running []string
				ctx, cancel := context.WithCancel(t.Context())
				note := func(id string, d router.Decision, err error) {
					if err == nil {
						running = append(running, id)
					}
					if d.QueueTime > 0 {
						waited++
					}
					log = append(log, fmt.Sprint(id, d.Worker, d.Turn, d.QueueTime, d.Cost, d.OverlapBlocks, err))
				}
				rnd := rand.New(rand.NewPCG(seed, 6))
				for i := range 300 {
					time.Sleep(time.Duration(1+rnd.IntN(900)) * time.Millisecond)
					mu.Lock()
					log = append(log, "step")
					switch at := rnd.IntN(5); {
					case at < 3:
						req := router.Request{ID: fmt.Sprint(i), Model: "m", Tokens: own(string(rune('A'+rnd.IntN(9))), 1+rnd.IntN(4)), StrictPriority: rnd.IntN(2), Priority: float64(rnd.IntN(3))}
						if blocking == 1 {
							go func() {
								d, err := r.BestWorker(ctx, req)
								mu.Lock()
								defer mu.Unlock()
								note(req.ID, d, err)
							}()
						} else if d, waits, err := r.Submit(ctx, req); !waits {
							note(req.ID, d, err)
						}
					case len(running) > 0:
						n := rnd.IntN(len(running))
						r.Free(running[n])
						running = slices.Delete(running, n, n+1)
					}
					mu.Unlock()
					synctest.Wait()
					mu.Lock()
					r.Decided(ctx, note)
					// Several requests may leave at a time: goroutines tell of them in any order.
					from := len(log) - 1
					for ; log[from] != "step"; from-- {
					}
					slices.Sort(log[from+1:])
					slices.Sort(running)
					mu.Unlock()
				}
				worlds[blocking] = log
				cancel()
				synctest.Wait()
			})
		}
		if !slices.Equal(worlds[0], worlds[1]) {
			t.Errorf("seed %d: submitted\n%q\nblocking\n%q", seed, worlds[0], worlds[1])
		}
		if !strings.Contains(strings.Join(worlds[0], " "), "queue is full") || waited < 40 {
			t.Errorf("seed %d: %d requests waited, or no queue was full", seed, waited)
		}
	}
}

// Each wait ends once: by the caller, at its time, or with the last worker. Nothing is left.
func TestSubmittedWaitsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := queued(t, router.QueueConfig{Limit: 3}, 1)
		occupy(t, r, "x", 1, "XY", false)
		wait(t, r, router.Request{ID: "leaves"})
		wait(t, r, router.Request{ID: "hurry", QueueWait: time.Second})
		wait(t, r, router.Request{ID: "stays"})
		if _, waits, err := r.Submit(t.Context(), router.Request{ID: "one too many", Model: "m"}); waits || !errors.Is(err, router.ErrQueueFull) {
			t.Errorf("the fourth of three: waits %v, %v", waits, err)
		}
		if _, waits, err := r.Submit(t.Context(), router.Request{ID: "stays", Model: "m"}); waits || !errors.Is(err, router.ErrDuplicate) {
			t.Errorf("an id that waits: waits %v, %v", waits, err)
		}
		if got := left(t, r); got != nil {
			t.Errorf("all wait, but %q left", got)
		}
		r.Free("leaves")
		time.Sleep(time.Second)
		r.Tick()
		if got := left(t, r); len(got) != 2 || !strings.HasPrefix(got[0], "leaves: ") || !strings.HasPrefix(got[1], "hurry: ") {
			t.Errorf("left: %q", got)
		}
		r.RemoveWorker(1)
		if got := left(t, r); len(got) != 1 || !strings.Contains(got[0], router.ErrNoWorkers.Error()) {
			t.Errorf("without workers: %q", got)
		}
		for _, id := range []string{"leaves", "hurry", "stays"} {
			if r.Free(id) {
				t.Errorf("%s is still in flight", id)
			}
		}
		if got := left(t, r); got != nil {
			t.Errorf("left again: %q", got)
		}
	})
}

// A submitted request counts its overlap again after a long wait. The callback may use the router.
func TestSubmittedRequestsCountOverlapAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := queued(t, router.QueueConfig{}, 1)
		occupy(t, r, "x", 1, "XYZ", false)
		wait(t, r, router.Request{ID: "a", Tokens: prompt("QRST")})
		wait(t, r, router.Request{ID: "b", Tokens: prompt("abcd")})
		store(r, router.Worker{ID: 1}, "QRS")
		time.Sleep(11 * time.Second)
		r.Free("x")
		var order []string
		r.Decided(t.Context(), func(id string, d router.Decision, err error) {
			order = append(order, fmt.Sprint(id, d.OverlapBlocks, d.QueueTime, err))
			if !r.Free(id) {
				t.Errorf("%s has no slot", id)
			}
		})
		if want := []string{"a3 11s <nil>", "b0 11s <nil>"}; !slices.Equal(order, want) {
			t.Errorf("%q, want %q", order, want)
		}
		// A request that is freed before it has counted again leaves once.
		occupy(t, r, "y", 1, "XYZ", false)
		wait(t, r, router.Request{ID: "c", Tokens: prompt("QRST")})
		time.Sleep(11 * time.Second)
		r.Free("y")
		r.Free("c")
		if got := left(t, r); len(got) != 1 || !strings.HasPrefix(got[0], "c: ") || r.Free("c") {
			t.Errorf("left: %q", got)
		}
	})
}
