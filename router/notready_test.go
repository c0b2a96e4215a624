// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"errors"
	"testing"

	"github.com/kvroute/kvroute/router"
)

// A worker that is not ready gets no request, also if no worker is healthy, and keeps its blocks.
func TestWorkersThatAreNotReady(t *testing.T) {
	r := newRouter(t, router.Config{}, 2)
	store(r, router.Worker{ID: 1}, "ABC")
	state := func(id uint64, h router.Health, unproved bool) {
		w := worker(id)
		w.Health, w.Unproved = h, unproved
		set(t, r, w)
	}
	route := func(to *router.Worker) (uint64, error) {
		d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABCD"), Pinned: to})
		return d.Worker.ID, err
	}
	state(1, router.NotReady, false)
	for _, other := range []router.Health{router.Healthy, router.Degraded, router.Starting, router.Unhealthy, router.Expired} {
		state(2, other, other >= router.Unhealthy)
		if id, err := route(nil); id != 2 {
			t.Errorf("the other worker is %v: worker %d, %v, want 2", other, id, err)
		}
		if id, err := route(&router.Worker{ID: 1}); !errors.Is(err, router.ErrNoWorkers) {
			t.Errorf("the other worker is %v: a request for worker 1 goes to %d, %v", other, id, err)
		}
	}
	state(2, router.NotReady, false)
	if id, err := route(nil); !errors.Is(err, router.ErrNoWorkers) {
		t.Errorf("no worker is ready: worker %d, %v, want %v", id, err, router.ErrNoWorkers)
	}
	state(1, router.Healthy, false)
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABCD")})
	if err != nil || d.Worker.ID != 1 || d.OverlapBlocks != 3 {
		t.Errorf("ready again: worker %d with %d blocks, %v, want 1 with 3", d.Worker.ID, d.OverlapBlocks, err)
	}
}
