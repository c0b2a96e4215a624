// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"testing"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// Without a worker every mode and policy returns an error; with one worker it returns
// that worker.
func TestNobodyAndOne(t *testing.T) {
	configs := map[string]router.Config{}
	for _, m := range router.Modes() {
		configs[string(m)] = router.Config{Mode: m}
	}
	for _, p := range scorer.Policies() {
		s := scorer.Defaults()
		s.Policy = p
		configs[string(p)] = router.Config{Scoring: s}
		s.Temperature = 1
		configs[string(p)+", drawn"] = router.Config{Scoring: s}
	}
	for name, conf := range configs {
		t.Run(name, func(t *testing.T) {
			r := newRouter(t, conf, 1)
			req := router.Request{ID: "r"}
			if conf.Mode == router.Direct {
				req.Pinned = &router.Worker{ID: 1}
			}
			if w, err := pick(t, r, req); err != nil || w != 1 {
				t.Errorf("of one: worker %d, %v", w, err)
			}
			r.Free("r")
			r.RemoveWorker(1)
			want := router.ErrNoWorkers
			if req.Pinned != nil {
				want = router.ErrPinnedUnknown
			}
			if _, err := pick(t, r, req); !errors.Is(err, want) {
				t.Errorf("of none: %v, want %v", err, want)
			}
			if _, err := pick(t, newRouter(t, conf, 0), router.Request{}); !errors.Is(err, router.ErrNoWorkers) {
				t.Errorf("of none ever: %v", err)
			}
			if loads, err := r.PotentialLoads(t.Context(), router.Request{Model: "m", Tokens: prompt("A"), Pinned: req.Pinned}); !errors.Is(err, want) {
				t.Errorf("loads of none: %v, %v", loads, err)
			}
		})
	}
}

// A worker may leave at any moment of a request's life. Later calls for the request do
// nothing, and its id can be used again.
func TestAWorkerVanishes(t *testing.T) {
	r := newRouter(t, router.Config{Queue: router.QueueConfig{Threshold: new(0.)}}, 0)
	for id := range uint64(2) {
		w := worker(id + 1)
		w.MaxBatchedTokens = 8
		set(t, r, w)
	}
	store(r, router.Worker{ID: 1}, "QRS")

	// The worker leaves between a choice and its booking by the caller.
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("QRS")})
	if err != nil || d.Worker.ID != 1 {
		t.Fatal(d.Worker, err)
	}
	r.RemoveWorker(1)
	if _, err := pick(t, r, router.Request{ID: "r", Pinned: &d.Worker}); !errors.Is(err, router.ErrPinnedUnknown) {
		t.Errorf("booking on a worker that has left: %v", err)
	}
	if r.Free("r") || r.MarkPrefillCompleted("r") || r.AddOutputTokens("r", 1) {
		t.Error("the request holds something")
	}

	// The worker leaves between a booking and its end.
	if w, err := pick(t, r, router.Request{ID: "r"}); err != nil || w != 2 {
		t.Fatal(w, err)
	}
	// The worker leaves while a request waits for it.
	waits, left := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := r.BestWorker(context.Background(), router.Request{
			ID: "waits", Model: "m", Tokens: prompt("A"), Pinned: &router.Worker{ID: 2}, Waiting: func(bool) { close(waits) },
		})
		left <- err
	}()
	<-waits
	r.RemoveWorker(2)
	if err := <-left; !errors.Is(err, router.ErrPinnedUnknown) {
		t.Errorf("the request that waited for the worker: %v", err)
	}
	if r.MarkPrefillCompleted("r") || r.AddOutputTokens("r", 1) {
		t.Error("the request has a slot on an unknown worker")
	}
	r.Free("r")
	if r.Free("r") || r.Free("nobody") || r.MarkPrefillCompleted("nobody") || r.AddOutputTokens("nobody", 1) || r.Abandon("nobody") {
		t.Error("an unknown request holds something")
	}
	set(t, r, worker(3))
	if w, err := pick(t, r, router.Request{ID: "r"}); err != nil || w != 3 {
		t.Errorf("the id again: worker %d, %v", w, err)
	}
	r.MarkPrefillCompleted("r")
	r.Free("r")
	if r.MarkPrefillCompleted("r") {
		t.Error("a first token after the end is counted")
	}
	if s := r.Workers()[0]; s.ActiveRequests != 0 || s.ActiveBlocks != 0 || s.PendTokens != 0 {
		t.Errorf("left over: %+v", s)
	}
}

// The values of a request are limited in number and in size.
func TestEnormousRequests(t *testing.T) {
	r := newRouter(t, router.Config{}, 0)
	w := worker(1)
	w.Taints = []string{"a", "b"}
	set(t, r, w)
	set(t, r, worker(2))
	names, weights := make([]string, 257), map[string]float64{}
	for i := range names {
		names[i] = "a"
		weights[string(rune('A'+i))] = 1
	}
	for name, req := range map[string]router.Request{
		"required taints":  {RequiredTaints: names},
		"preferred taints": {PreferredTaints: weights},
	} {
		if _, err := pick(t, r, req); !errors.Is(err, router.ErrBadRequest) {
			t.Errorf("%d %s: %v", len(names), name, err)
		}
	}
	blocks := router.Request{Model: "m", Blocks: &router.Blocks{Tokens: math.MaxInt}}
	if _, err := r.BestWorker(t.Context(), blocks); !errors.Is(err, router.ErrBadBlocks) {
		t.Errorf("a prompt of %d tokens: %v", math.MaxInt, err)
	}
	huge := router.Request{
		ID: "r", Model: "m", Tokens: prompt("ABC"), Explain: true,
		PreferredTaints: map[string]float64{"a": -1e308, "b": -1e308},
		Override:        &router.Override{OverlapScoreWeight: new(1e308)},
	}
	d, err := r.BestWorker(t.Context(), huge)
	if err != nil || d.Worker.ID != 2 {
		t.Fatal(d.Worker, err)
	}
	if _, err := json.Marshal(d); err != nil {
		t.Errorf("the decision cannot be encoded: %v", err)
	}
	own := newRouter(t, router.Config{Rule: func(_ *scorer.Request, _ []scorer.Input, costs []float64) int {
		costs[0] = math.NaN()
		return 0
	}}, 1)
	if d, err = own.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("A"), Explain: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := json.Marshal(d); err != nil {
		t.Errorf("the decision of a rule cannot be encoded: %v", err)
	}
}
