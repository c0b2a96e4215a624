// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

// The four workers A to D that the published rules were worked out on.
func fixture() (scorer.Request, []scorer.Input) {
	return scorer.Request{PromptTokens: 1024, BlockSize: 16}, []scorer.Input{
		{ActiveRequests: 2, KVUse: .1},
		{OverlapBlocks: 32, PendTokens: 512, ActiveRequests: 6, WaitingRequests: 1, KVUse: .3},
		{OverlapBlocks: 60, PendTokens: 400, ActiveRequests: 9, WaitingRequests: 2, KVUse: .5},
		{OverlapBlocks: 60, PendTokens: 6400, ActiveRequests: 30, WaitingRequests: 4, KVUse: .9},
	}
}

func TestPublishedRulesOnTheFixture(t *testing.T) {
	for _, c := range []struct {
		name  string
		rule  scorer.Rule
		pick  string
		costs []float64 // nil if the rule counts none
	}{
		{"lMetric", lMetric, "A", []float64{3072, 7168, 4640, 200384}},
		{"least requests", func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.LeastLoaded(in, r.U) }, "A", nil},
		{"vLLM DP", vllmDataParallel, "A", []float64{2, 9, 15, 42}},
		{"GIE blend", gieBlend(3, 2, 2, 2), "C", []float64{-4.8, -5.4, -5.8125, -4.0125}},
		{"SGLang", sglangCacheAware(.5, 32, 1.1), "C", nil},
		{"SGLang, smaller spread", sglangCacheAware(.5, 27, 1.1), "A", nil},
		{"SGLang, more asked of the match", sglangCacheAware(.9375, 32, 1.1), "A", nil},
		{"AIBrix", aibrixPrefixCache(8, 1), "A", nil},
		{"AIBrix, larger spread", aibrixPrefixCache(28, 1), "C", nil},
		{"AIBrix, larger spread, few requests", aibrixPrefixCache(28, -.4), "B", nil},
		{"longest prefix", longestPrefix, "C", nil},
	} {
		r, in := fixture()
		in[1].CachedBlocks, in[2].CachedBlocks, in[3].CachedBlocks = 5, 5, 5 // A holds nothing
		costs := make([]float64, len(in))
		if got := string(rune('A' + c.rule(&r, in, costs))); got != c.pick {
			t.Errorf("%s picks %s, want %s", c.name, got, c.pick)
		}
		for i := range c.costs {
			if d := math.Abs(costs[i] - c.costs[i]); d > 1e-9 {
				t.Errorf("%s: costs %v, want %v", c.name, costs, c.costs)
				break
			}
		}
	}
}

func TestGIEBlendSpreadsUnknownPrompts(t *testing.T) {
	r := scorer.Request{PromptTokens: 64, BlockSize: 16}
	in := []scorer.Input{{LastCold: 3}, {LastCold: 1}, {LastCold: 2}}
	costs := make([]float64, 3)
	if got := gieBlend(3, 2, 2, 2)(&r, in, costs); got != 1 {
		t.Errorf("worker %d gets the unknown prompt, want the one whose last is longest ago", got)
	}
	for i, want := range []float64{-4, -6, -5} {
		if costs[i] != want {
			t.Errorf("costs %v, want -4, -6, -5", costs)
			break
		}
	}
	in[0].LastCold = 0 // never
	if gieBlend(3, 2, 2, 2)(&r, in, costs); costs[0] != -6 {
		t.Errorf("a worker that never had one: cost %v, want -6", costs[0])
	}
}

func TestPublishedRulesOfNobodyAndOfOne(t *testing.T) {
	r, in := fixture()
	names := map[string]bool{}
	for _, p := range publishedRules() {
		if names[p.Name] {
			t.Errorf("two rules are named %s", p.Name)
		}
		names[p.Name] = true
		if got := p.Choose(&r, nil, nil); got != -1 {
			t.Errorf("%s chooses %d of nobody", p.Name, got)
		}
		if got := p.Choose(&r, in[:1], make([]float64, 1)); got != 0 {
			t.Errorf("%s chooses %d of one", p.Name, got)
		}
		idle := make([]scorer.Input, 3)
		if got := p.Choose(&scorer.Request{}, idle, make([]float64, 3)); got < 0 || got > 2 {
			t.Errorf("%s chooses %d of three idle ones", p.Name, got)
		}
	}
}

func TestPublishedRulesDoNotAllocate(t *testing.T) {
	r, in := fixture()
	costs := make([]float64, len(in))
	for _, rule := range publishedRules() {
		if n := testing.AllocsPerRun(10, func() { rule.Choose(&r, in, costs) }); n != 0 {
			t.Errorf("%s makes %v allocations, want 0", rule.Name, n)
		}
	}
}
