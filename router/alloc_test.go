// SPDX-License-Identifier: Apache-2.0

//go:build !race

package router_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// A decision runs for every request, so it must not allocate, whether the decision is
// kept or not.
func TestDecisionsDoNotAllocate(t *testing.T) {
	for name, conf := range map[string]router.Config{
		"kept":     {},
		"not kept": {KeepDecisions: -1},
		"sessions": {Sessions: router.SessionConfig{TTL: 1e12}},
		"queue":    {Queue: router.QueueConfig{Threshold: new(2.)}},
		"no cost":  {Mode: router.LeastLoaded},
		"outputs":  {EstimateOutput: true},
	} {
		d := newDecider(t, conf)
		for id := range uint64(4) { // with foreign load
			d.router.SetEngineRequests(router.Worker{ID: id + 1}, 500, 500, time.Now().Add(time.Hour))
		}
		ids := make([]string, 64)
		for i := range ids {
			ids[i] = strconv.Itoa(i)
		}
		for _, hashed := range []bool{true, false} {
			n := 0
			serve := func() {
				n++
				if err := d.serve(ids[n%len(ids)], n, hashed); err != nil {
					t.Fatal(err)
				}
			}
			for range 5000 { // warm up: tables and scratch buffers reach their size
				serve()
			}
			if got := testing.AllocsPerRun(2000, serve); got != 0 {
				t.Errorf("%s, hashed %v: %v allocations for a decision and its end, want 0", name, hashed, got)
			}
		}
	}
}
