// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Adding a worker with known model names, or changing its health, costs no work that
// grows with the number of names. Otherwise starting a fleet would take quadratic time.
func TestAWorkerWithKnownNamesIsCheap(t *testing.T) {
	cost := func(workers, adapters int) float64 {
		r := newRouter(t, router.Config{}, 0)
		next := worker(1)
		for i := range adapters {
			next.LoRA = append(next.LoRA, fmt.Sprint("adapter", i))
		}
		for range workers {
			set(t, r, next)
			next.ID++
		}
		return testing.AllocsPerRun(100, func() {
			set(t, r, next) // the worker is added first, then its health changes
			next.Health = 1 - next.Health
		})
	}
	if few, many := cost(2, 1), cost(300, 300); many > few+2 {
		t.Errorf("%.0f allocations with 300 workers and adapters, %.0f with 2 workers and one adapter", many, few)
	}
}

// Removing a worker whose names other workers have, too, costs no work that grows with
// the fleet.
func TestAWorkerThatLeavesIsCheap(t *testing.T) {
	cost := func(workers int) float64 {
		r := newRouter(t, router.Config{}, 0)
		w := worker(1)
		for range workers {
			w.LoRA = append(w.LoRA, fmt.Sprint("adapter", w.ID))
			set(t, r, w)
			w.ID++
		}
		return testing.AllocsPerRun(100, func() {
			set(t, r, w)
			r.RemoveWorker(w.ID)
		})
	}
	if few, many := cost(2), cost(300); many > few+4 {
		t.Errorf("%.0f allocations with 300 workers, %.0f with 2", many, few)
	}
}

// The callback for inferred first tokens may call the router: no lock is held.
func TestInferredFirstTokensAreToldWithoutALock(t *testing.T) {
	c := newClock()
	firstTokens := make(chan string, 9)
	var r *router.Router
	r = newRouter(t, router.Config{Now: c.read, InferFirstTokens: true, Hooks: router.Hooks{Tell: func(ch router.Change) {
		if ch.Kind == router.FirstToken {
			if err := r.SetWorker(worker(1)); err != nil {
				t.Error(err)
			}
			firstTokens <- ch.ID
		}
	}}}, 0)
	w := worker(1)
	w.MaxBatchedTokens = 512
	set(t, r, w)
	for i := range 5 {
		id := fmt.Sprint("seen", i)
		if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Owned: true, Model: "m", Tokens: long(id, 1000)}); err != nil {
			t.Fatal(err)
		}
		c.pass(100 * time.Millisecond)
		r.FirstToken(id, router.SignObserver)
		r.Free(id)
		<-firstTokens
	}
	if _, err := r.BestWorker(t.Context(), router.Request{ID: "silent", Owned: true, Model: "m", Tokens: long("silent", 10_000), Unseen: true}); err != nil {
		t.Fatal(err)
	}
	c.pass(time.Minute)
	go r.Tick() // so its prefill should be done
	select {
	case <-firstTokens:
	case <-time.After(30 * time.Second):
		t.Fatal("a callback waits for a lock that its caller holds")
	}
}
