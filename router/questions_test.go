// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"math"
	"testing"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// askTimes asks n times without an id for the same prompt, and counts the workers.
func askTimes(t *testing.T, r *router.Router, n int) map[uint64]int {
	t.Helper()
	got := map[uint64]int{}
	for range n {
		got[dryRun(t, r, "abc").Worker.ID]++
	}
	return got
}

// Questions without an id about the same prompt draw again each time: they follow the softmax, and
// spread over equal workers.
func TestQuestionsWithoutAnIDDrawFairly(t *testing.T) {
	within := func(name string, got map[uint64]int, n int, want map[uint64]float64) {
		t.Helper()
		for id, p := range want {
			if sigma := math.Sqrt(float64(n) * p * (1 - p)); math.Abs(float64(got[id])-float64(n)*p) > 3*sigma {
				t.Errorf("%s: worker %d is named %d of %d times, want %v ± %v", name, id, got[id], n, float64(n)*p, 3*sigma)
			}
		}
	}
	equal := map[uint64]float64{1: .25, 2: .25, 3: .25, 4: .25}
	for _, c := range []struct {
		name string
		conf router.Config
	}{
		{"random", router.Config{Mode: router.Random}},
		{"power-of-two", router.Config{Mode: router.PowerOfTwo}},
		{"least-loaded", router.Config{Mode: router.LeastLoaded}},
		{"kv, ties", router.Config{}},
	} {
		within(c.name, askTimes(t, newRouter(t, c.conf, 4), 1000), 1000, equal)
	}
	if got := askTimes(t, newRouter(t, router.Config{Mode: router.RoundRobin}, 4), 1000); got[1] != 250 || got[2] != 250 || got[3] != 250 {
		t.Errorf("round-robin: %v, want each in turn", got)
	}

	// Worker i has 10, 2 and 3 blocks in use: costs of 13, 5 and 6 blocks.
	s := classic(1)
	s.Temperature = .7
	r := newRouter(t, router.Config{Scoring: s}, 3)
	for id, letters := range map[uint64]string{1: "ABCDEFGHIJ", 2: "KL", 3: "MNO"} {
		occupy(t, r, letters, id, letters, true)
	}
	costs := costsOf(dryRun(t, r, "abc"))
	p := make([]float64, 3)
	scorer.Probabilities(costs, .7, p)
	within("softmax", askTimes(t, r, 1000), 1000, map[uint64]float64{1: p[0], 2: p[1], 3: p[2]})
}

// Questions change neither the turn of requests nor their draws.
func TestQuestionsDoNotChangeRequests(t *testing.T) {
	for _, mode := range []router.Mode{router.RoundRobin, router.Random, router.KV} {
		var chosen [2][]uint64
		for i := range chosen {
			r := newRouter(t, router.Config{Mode: mode}, 4)
			for n := range 20 {
				if i == 1 {
					askTimes(t, r, 3)
				}
				id := string(rune('a' + n))
				chosen[i] = append(chosen[i], bookFor(t, r, id, id).Worker.ID)
				r.MarkPrefillCompleted(id)
				r.Free(id)
			}
		}
		for n := range chosen[0] {
			if chosen[0][n] != chosen[1][n] {
				t.Errorf("%s: request %d goes to worker %d, with questions before it to %d", mode, n, chosen[0][n], chosen[1][n])
				break
			}
		}
	}
}

// Probes of a quiet group name its workers fairly.
func TestProbesOfAQuietGroup(t *testing.T) {
	r := newRouter(t, router.Config{}, 4)
	got := map[uint64]int{}
	for range 200 {
		a, err := r.Answer(t.Context(), router.Probe{Model: "m", BlockSize: 8, Tokens: 8})
		if err != nil {
			t.Fatal(err)
		}
		got[a.Worker.ID]++
	}
	for id := range uint64(4) {
		if got[id+1] < 30 {
			t.Errorf("200 answers name %v", got)
			break
		}
	}
}
