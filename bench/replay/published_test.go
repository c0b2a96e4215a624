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
		{"GIE blend without the last prompts", gieBlend(3, 2, 2, 0), "C", []float64{-3.8, -4.4, -4.8125, -3.0125}},
		{"llm-d", llmdSticky(.8, 286_720), "C", []float64{math.Inf(1), math.Inf(1), 464, 6464}},
		{"llm-d, few cached tokens are enough", llmdSticky(.5, 286_720), "C", []float64{math.Inf(1), 1024, 464, 6464}},
		{"llm-d, no gap", llmdSticky(.5, 0), "C", []float64{1024, 1024, 464, 6464}},
		{"llm-d, nobody holds enough", llmdSticky(.95, 286_720), "C", []float64{1024, 1024, 464, 6464}},
		{"SGLang", sglangCacheAware(.3, 64, 1.5), "C", nil},
		{"SGLang, smaller spread", sglangCacheAware(.3, 27, 1.5), "A", nil},
		{"SGLang, the spread itself", sglangCacheAware(.3, 28, 1.5), "C", nil},
		{"SGLang, larger ratio", sglangCacheAware(.3, 27, 15), "C", nil},
		{"SGLang, more asked of the match", sglangCacheAware(.9375, 64, 1.5), "A", nil},
		{"AIBrix", aibrixPrefixCache(8, 1), "A", nil},
		{"AIBrix, larger spread", aibrixPrefixCache(28, 1), "C", nil},
		{"AIBrix, larger spread, few requests", aibrixPrefixCache(28, -.4), "B", nil},
		{"longest prefix", longestPrefix, "C", nil},
	} {
		r, in := fixture()
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
	in[0].LastCold, in[1].LastCold = 0, 0 // never
	gieBlend(3, 2, 2, 2)(&r, in, costs)
	for i, want := range []float64{-6, -5, -4} {
		if costs[i] != want {
			t.Errorf("costs %v with two workers that never had one, want -6, -5, -4", costs)
			break
		}
	}
}

// The endpoint picker does not look at requests when sums are equal.
func TestGIEBlendDrawsAmongEqualSums(t *testing.T) {
	in, costs := []scorer.Input{{ActiveRequests: 1}, {ActiveRequests: 9}}, make([]float64, 2)
	for want, u := range []float64{.2, .8} {
		if got := gieBlend(3, 2, 2, 0)(&scorer.Request{PromptTokens: 64, BlockSize: 16, U: u}, in, costs); got != want {
			t.Errorf("draw %v takes worker %d, want %d; costs %v", u, got, want, costs)
		}
	}
}

// A request on a worker weighs as much as 1,024 tokens of active blocks, as 64 blocks of 16 tokens do.
func TestDynamoAgenticWeighsRequestsInTokens(t *testing.T) {
	s := rule(t, "dynamo-agentic").Settings
	r := scorer.Request{PromptTokens: MooncakeBlock, BlockSize: MooncakeBlock}
	in, costs := []scorer.Input{{ActiveRequests: 3}, {ActiveBlocks: 3 * 1024 / MooncakeBlock}}, make([]float64, 2)
	s.Choose(&r, in, costs)
	if costs[0] != costs[1] || costs[0] != 4+6 {
		t.Errorf("costs %v of three requests and of as many tokens, want 10 both", costs)
	}
	if !s.AssumeKVReuse {
		t.Error("the preset turns off the assumption that caches are reused, which NVIDIA's leaves on")
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
