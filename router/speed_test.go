// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// prefills has each of the workers 1 to 4 compute prompts, each in the expected time divided by the
// worker's speed.
func prefills(t *testing.T, r *router.Router, w *watch, n int, speed map[uint64]float64) {
	t.Helper()
	for i := range n {
		for id := range uint64(4) {
			name := fmt.Sprint("p", w.now().UnixNano(), i, id)
			tokens := make([]uint32, 8000)
			for j := range tokens {
				tokens[j] = uint32(w.now().UnixNano()%100_000) + uint32(i)
			}
			d, err := r.BestWorker(t.Context(), router.Request{ID: name, Model: "m", Tokens: tokens, Pinned: &router.Worker{ID: id + 1}, Owned: true})
			if err != nil {
				t.Fatal(err)
			}
			v := speed[id+1]
			if v == 0 {
				v = 1
			}
			// The model of the engine is wrong by a factor of 3 for all.
			w.advance(time.Duration(3 * d.EstimatedTTFT / v * float64(time.Millisecond)))
			r.MarkPrefillCompleted(name)
			r.Free(name)
		}
	}
}

// speeds are the speeds of the candidates, 1 if unknown.
func speeds(t *testing.T, r *router.Router) (all [4]float64) {
	t.Helper()
	for i, c := range dryRun(t, r, "abc").Candidates {
		if all[i] = c.Speed; c.Speed == 0 {
			all[i] = 1
		}
	}
	return all
}

// A worker that becomes slow without saying so is noticed by its first tokens, gets fewer requests, and
// is tried again later.
func TestASlowWorkerIsNoticed(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Now: w.now, PredictTTL: -1}, 4)
	prefills(t, r, w, 5, nil)
	if got := speeds(t, r); got != [4]float64{1, 1, 1, 1} {
		t.Errorf("equal workers have the speeds %v", got)
	}
	prefills(t, r, w, 10, map[uint64]float64{3: .25})
	got := speeds(t, r)
	if got[2] > .5 || got[2] < .2 || got[0] != got[1] || got[0] < 1 {
		t.Errorf("speeds %v after ten prompts at a quarter of the speed", got)
	}
	routed := map[uint64]int{}
	for i := range 100 {
		d := bookFor(t, r, fmt.Sprint(i), fmt.Sprintf("%c%c%c", 'a'+i%26, 'A'+i/26, 'x'))
		routed[d.Worker.ID]++
	}
	if routed[3] > 15 {
		t.Errorf("the slow worker gets %d of 100 requests: %v", routed[3], routed)
	}
	for i := range 100 {
		r.Free(fmt.Sprint(i))
	}
	w.advance(time.Hour)
	if got := speeds(t, r); math.Abs(got[2]-1) > .01 {
		t.Errorf("speeds %v an hour later, want 1: the worker is to be tried again", got)
	}
	// A new process is not the slow one.
	prefills(t, r, w, 10, map[uint64]float64{3: .25})
	info := worker(3)
	info.StartedMS = 99
	set(t, r, info)
	prefills(t, r, w, 1, nil)
	if got := speeds(t, r); got[2] < .7 {
		t.Errorf("speeds %v after a restart", got)
	}
}

// Without measurements the registered throughput decides; measurements replace it.
func TestRegisteredSpeeds(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Now: w.now, PredictTTL: -1}, 4)
	for id, tps := range map[uint64]float64{1: 20_000, 2: 20_000, 3: 5_000} {
		info := worker(id)
		info.PrefillThroughput = tps
		set(t, r, info)
	}
	if got := speeds(t, r); got != [4]float64{1, 1, .25, 1} {
		t.Errorf("speeds %v, want .25 for the worker with a quarter of the throughput", got)
	}
	prefills(t, r, w, 20, nil)
	if got := speeds(t, r); got[2] < .75 {
		t.Errorf("speeds %v: the worker is as fast as the others", got)
	}
	// Half of the pool is registered as slow, and is so.
	half := newRouter(t, router.Config{Now: w.now, PredictTTL: -1}, 4)
	slow := map[uint64]float64{1: 1, 2: 1, 3: .25, 4: .25}
	for id, v := range slow {
		info := worker(id)
		info.PrefillThroughput = 20_000 * v
		set(t, half, info)
	}
	apart := func(when string) {
		t.Helper()
		if got := speeds(t, half); math.Abs(got[0]-got[1]) > .01 || got[2] != got[3] || math.Abs(got[0]/got[2]-4) > .8 {
			t.Errorf("%s: speeds %v, want a factor of 4", when, got)
		}
	}
	apart("registered")
	prefills(t, half, w, 5, slow)
	apart("measured")
	w.advance(time.Hour)
	apart("an hour later")
	off := newRouter(t, router.Config{Now: w.now, NoSpeeds: true}, 4)
	info := worker(3)
	info.PrefillThroughput = 1
	set(t, off, info)
	prefills(t, off, w, 5, map[uint64]float64{2: .1})
	if got := speeds(t, off); got != [4]float64{1, 1, 1, 1} {
		t.Errorf("speeds %v although they are off", got)
	}
}

// A wait behind other prompts says nothing about the speed.
func TestAQueueIsNotSlow(t *testing.T) {
	w := newWatch()
	r := newRouter(t, router.Config{Now: w.now, PredictTTL: -1}, 2)
	for i := range 40 {
		for k := range 3 { // the second and third prompts wait for the first
			name := fmt.Sprint(i, "-", k)
			tokens := make([]uint32, 4000)
			tokens[0] = uint32(3*i + k)
			if _, err := r.BestWorker(t.Context(), router.Request{ID: name, Model: "m", Tokens: tokens, Pinned: &router.Worker{ID: 1}, Owned: true}); err != nil {
				t.Fatal(err)
			}
		}
		for k := range 3 {
			w.advance(200 * time.Millisecond)
			name := fmt.Sprint(i, "-", k)
			r.MarkPrefillCompleted(name)
			r.Free(name)
		}
	}
	for _, c := range dryRun(t, r, "abc").Candidates {
		if c.Speed != 0 && c.Speed != 1 {
			t.Errorf("worker %d has the speed %v", c.Worker.ID, c.Speed)
		}
	}
}
