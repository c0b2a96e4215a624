// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
)

// comparison plays a workload with half of the conversations held out, and compares the sides. The first tokens of the
// side round-robin come later by added.
func comparison(t *testing.T, seed uint64, mode router.Mode, added time.Duration) outcomes.Comparison {
	t.Helper()
	trace, err := Generate(GenerateConfig{Requests: 1200, Rate: 8, Prefixes: 30, PrefixTokens: 6000, QuestionTokens: 1500, OutputTokens: 60, Turns: 3, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	var recorder *outcomes.Recorder
	play(t, Scenario{Trace: trace, Rule: rule(t, "tokens"), KVBlocks: 300, Seed: seed, holdout: .5, edit: func(c *router.Config) {
		if c.Mode = mode; mode != router.KV {
			c.Rule = nil
		}
		if recorder, err = outcomes.New(nil, c.Now); err != nil {
			t.Fatal(err)
		}
		c.Hooks.Finished = func(o router.Outcome) {
			if o.Holdout == router.SideRoundRobin {
				o.FirstToken = o.FirstToken.Add(added)
			}
			recorder.Finished(o)
		}
	}})
	h := recorder.Holdout(.5)
	if len(h.Models) != 1 || h.Models[0].Difference == nil {
		t.Fatalf("seed %d: %+v", seed, h)
	}
	return h.Models[0]
}

// Where both sides are routed round robin, the interval contains no difference. A difference that is added to one side
// is found, and routing by cache is better than round robin.
func TestHoldoutFindsDifferences(t *testing.T) {
	const seeds = 20
	agree, found, better := 0, 0, 0
	for seed := range uint64(seeds) {
		same := comparison(t, seed+1, router.RoundRobin, 0)
		t.Logf("seed %d: round robin on both sides: %.1f and %.1f ms, %.1f to %.1f", seed+1, same.Routed.Mean, same.RoundRobin.Mean, *same.Low, *same.High)
		if *same.Low <= 0 && *same.High >= 0 {
			agree++
		}
		added := time.Duration(same.Routed.Mean) * time.Millisecond
		if c := comparison(t, seed+1, router.RoundRobin, added); *c.Low > 0 && *c.Low <= ms(added) && *c.High >= ms(added) {
			found++
		}
		kv := comparison(t, seed+1, router.KV, 0)
		t.Logf("seed %d: by cache: %.1f and %.1f ms, %.1f to %.1f", seed+1, kv.Routed.Mean, kv.RoundRobin.Mean, *kv.Low, *kv.High)
		if *kv.Low > 0 {
			better++
		}
	}
	t.Logf("of %d seeds: agree %d, found %d, better %d", seeds, agree, found, better)
	if agree < 19 || found < 19 || better < 19 {
		t.Errorf("of %d seeds the sides agree in %d, an added difference is found in %d, and routing by cache is better in %d; want 19 of each", seeds, agree, found, better)
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
