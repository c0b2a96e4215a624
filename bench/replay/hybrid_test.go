// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"strings"
	"testing"
	"time"
)

// shared20 are requests with 20 shared prefixes, and caches of the default size, in blocks of a size.
func shared20(t *testing.T, block int, seed uint64) Scenario {
	t.Helper()
	trace, err := Generate(GenerateConfig{Requests: 400, Rate: 4, Prefixes: 20, BlockSize: block, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	return Scenario{Trace: trace, KVBlocks: 2000 * MooncakeBlock / block, Seed: seed}
}

// A prompt that shares the held and not yet usable beginning of another goes where it makes this part usable: the
// second sharers of a prefix then find it, at no cost for the whole.
func TestJunctionsPay(t *testing.T) {
	for _, c := range []struct {
		hybrid string
		block  int
	}{{"window=1024", 16}, {"state=640", 640}} {
		for _, predict := range []time.Duration{0, 10 * time.Second} {
			var sharers, hits, e2e, ttft [2]float64
			for seed := range uint64(4) {
				for i, name := range []string{Default + ",junction=none", Default} {
					s := shared20(t, c.block, seed+1)
					s.Rule, s.Hybrid, s.Predict = rule(t, name), c.hybrid, predict
					r := play(t, s)
					sharers[i] += float64(r.Hybrid.SecondSharers)
					hits[i] += float64(r.Hybrid.Hit)
					e2e[i] += r.E2E.Mean
					ttft[i] += r.TTFT.Mean
				}
			}
			if sharers[1] <= 1.3*sharers[0] || e2e[1] > e2e[0] || ttft[1] > ttft[0] {
				t.Errorf("%s, predict %v: second sharers hit %.0f tokens, without the rule %.0f; mean E2E is %.4f times, mean TTFT %.4f times",
					c.hybrid, predict, sharers[1], sharers[0], e2e[1]/e2e[0], ttft[1]/ttft[0])
			}
			t.Logf("%s, predict %v: hit tokens of second sharers %.0f / %.0f = %.2f, of all %.3f times, E2E %.4f times, TTFT %.3f times",
				c.hybrid, predict, sharers[1], sharers[0], sharers[1]/sharers[0], hits[1]/hits[0], e2e[1]/e2e[0], ttft[1]/ttft[0])
		}
	}
}

// The router promises what the simulated engines hit, also when they evict. Only requests that overlap may differ: an
// engine caches blocks when it begins with them, and the router hears of them at the end of the step.
func TestHybridPromises(t *testing.T) {
	for hybrid, block := range map[string]int{"window=1024": 16, "window=2048": 512, "state=640": 640, "state=1024": 512} {
		s := shared20(t, block, 1)
		s.KVBlocks /= 20
		s.Rule, s.Hybrid, s.Speedup = rule(t, Default), hybrid, .01 // one request after the other
		r := play(t, s)
		if r.Misjudged != 0 || r.Hybrid.Promised != r.Hybrid.Hit || r.Hybrid.Hit == 0 {
			t.Errorf("%s in blocks of %d: %d tokens promised, %d hit, misjudged by %g", hybrid, block, r.Hybrid.Promised, r.Hybrid.Hit, r.Misjudged)
		}
		s.Hybrid = ""
		if plain := play(t, s); plain.Hybrid != nil || plain.HitRate <= r.HitRate {
			t.Errorf("%s in blocks of %d: hit rate %g, with full attention only %g", hybrid, block, r.HitRate, plain.HitRate)
		}
	}
}

// Without side groups nothing depends on junctions, and the rule of a simulation that leaves them out decides the same.
func TestNoJunctionsWithoutSideGroups(t *testing.T) {
	s := shared20(t, MooncakeBlock, 1)
	s.Rule = rule(t, Default)
	with := play(t, s)
	s.Rule = rule(t, Default+",junction=none")
	without := play(t, s)
	without.Rule = with.Rule
	if a, b := encode(t, with), encode(t, without); a != b {
		t.Errorf("%s\n%s", a, b)
	}
}

func TestBadHybrids(t *testing.T) {
	s := shared20(t, MooncakeBlock, 1)
	s.Rule = rule(t, Default)
	for hybrid, want := range map[string]string{"window": "want window=", "chunk=512": "want window=", "state=640": "multiple of 512", "window=1": "from 2"} {
		s.Hybrid = hybrid
		if _, err := Run(t.Context(), s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", hybrid, err)
		}
	}
	s.Hybrid, s.Rule = "window=512", rule(t, "oracle")
	if _, err := Run(t.Context(), s); err == nil || !strings.Contains(err.Error(), "oracle") {
		t.Errorf("oracle: %v", err)
	}
	if _, err := ParseRule("random:junction=none"); err == nil {
		t.Error("a rule without costs has no junctions")
	}
}
