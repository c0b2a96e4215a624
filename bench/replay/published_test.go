// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

// The four workers A to D that the published rules were worked out on.
func fixture() (scorer.Request, []scorer.Input) {
	return scorer.Request{PromptTokens: 1024, BlockSize: 16, Sequence: []uint64{1, 2, 3, 4, 5}}, []scorer.Input{
		{Key: 10, ActiveRequests: 2, KVUse: .1},
		{Key: 11, OverlapBlocks: 32, PendTokens: 512, ActiveRequests: 6, WaitingRequests: 1, KVUse: .3},
		{Key: 12, OverlapBlocks: 60, PendTokens: 400, ActiveRequests: 9, WaitingRequests: 2, KVUse: .5},
		{Key: 13, OverlapBlocks: 60, PendTokens: 6400, ActiveRequests: 30, WaitingRequests: 4, KVUse: .9},
	}
}

func TestPublishedRulesOnTheFixture(t *testing.T) {
	inf := math.Inf(1)
	for _, c := range []struct {
		name  string
		rule  scorer.Rule
		pick  string
		costs []float64 // nil if the rule counts none
	}{
		{"lMetric", lMetric, "A", []float64{3072, 7168, 4640, 200384}},
		{"least pending", leastPending, "A", []float64{0, 512, 400, 6400}},
		{"least requests", func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.LeastLoaded(in, r.U) }, "A", nil},
		{"vLLM DP", vllmDataParallel, "A", []float64{2, 9, 15, 42}},
		{"GIE blend", gieBlend(3, 2, 2, 2), "C", []float64{-4.8, -5.4, -5.8125, -4.0125}},
		{"token-aware filter, 18 s", tokenAwareFilter(18), "C", []float64{inf, inf, 464, 6464}},
		{"SGLang", sglangCacheAware(.5, 32, 1.1), "C", nil},
		{"SGLang, smaller spread", sglangCacheAware(.5, 27, 1.1), "A", nil},
		{"SGLang, more asked of the match", sglangCacheAware(.9375, 32, 1.1), "A", nil},
		{"AIBrix", aibrixPrefixCache(8, 1), "A", nil},
		{"AIBrix, larger spread", aibrixPrefixCache(28, 1), "C", nil},
		{"AIBrix, larger spread, few requests", aibrixPrefixCache(28, -.4), "B", nil},
		{"two-tier, spread 8", twoTier(8), "A", nil},
		{"two-tier, spread 32", twoTier(32), "C", nil},
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

func TestBoundedHash(t *testing.T) {
	r, in := fixture()
	if got := bounded(in, 3, 1.25); got != 0 {
		t.Errorf("D is full, and the next one is %c, want A", 'A'+got)
	}
	if got := bounded(in, 2, 1.25); got != 2 {
		t.Errorf("C has room, and %c is taken", 'A'+got)
	}
	// The second block names the prefix, not what follows.
	home := chwbl(100, false)(&r, in, nil)
	r.Sequence[2] = 99
	if got := chwbl(100, false)(&r, in, nil); got != home {
		t.Errorf("another third block leads to %d, want %d", got, home)
	}
	if got := chwbl(1.25, false)(&r, nil, nil); got != -1 {
		t.Errorf("of nobody: %d, want -1", got)
	}
}

func TestDualMap(t *testing.T) {
	r, in := fixture()
	const a, c, d = 0, 2, 3
	for _, k := range []struct {
		name string
		i, j int
		gate float64
		want int
	}{
		{"the longer match, in time", a, c, 5, c},
		{"whatever the order", c, a, 5, c},
		{"the longer match, though later", a, d, 5, d},
		{"too late", a, d, .3, a},
		{"equal matches: the shorter time", d, c, 5, c},
		{"equal matches: the shorter time, whatever the order", c, d, 5, c},
	} {
		if got := dual(&r, in, k.i, k.j, k.gate, false); got != k.want {
			t.Errorf("%s: %c, want %c", k.name, 'A'+got, 'A'+k.want)
		}
	}
	if got := dual(&r, in, d, c, 5, true); got != d {
		t.Errorf("equal matches, the first: %c, want D", 'A'+got)
	}
	if got := dual(&r, in, c, a, 5, true); got != c {
		t.Errorf("the longer match is first: %c, want C", 'A'+got)
	}
	if got := dual(&r, in, a, c, 5, true); got != c {
		t.Errorf("the longer match is second: %c, want C", 'A'+got)
	}
	if got := dualMap(5, false)(&r, in[:1], nil); got != 0 {
		t.Errorf("of one: %d", got)
	}
}

// Scattered, what a full home passes on goes everywhere.
func TestScatteredHash(t *testing.T) {
	_, in := fixture()
	rule := chwbl(1.25, true)
	to := map[[2]int]int{}
	for key := range uint64(4000) {
		r := scorer.Request{Sequence: []uint64{0, key}}
		idle := make([]scorer.Input, len(in))
		for i := range in {
			idle[i].Key = in[i].Key
		}
		home := rule(&r, idle, nil)
		if first, _ := ring(in, key); home != first {
			t.Fatalf("key %d: home %d, want %d", key, home, first)
		}
		idle[home].ActiveRequests = 100
		next := rule(&r, idle, nil)
		if _, second := ring(in, key); next != second {
			t.Fatalf("key %d: %d after its home, want %d", key, next, second)
		}
		to[[2]int{home, next}]++
	}
	if len(to) != 12 {
		t.Errorf("%d pairs of a home and the one after it, want all 12", len(to))
	}
}

// A worker that leaves moves only the keys that it had.
func TestRingIsConsistent(t *testing.T) {
	_, in := fixture()
	var share [4]int
	for key := range uint64(4000) {
		first, second := ring(in, key)
		if first == second {
			t.Fatalf("key %d has one home, %d", key, first)
		}
		share[first]++
		fewer := append(append([]scorer.Input{}, in[:first]...), in[first+1:]...)
		if got, _ := ring(fewer, key); fewer[got].Key != in[second].Key {
			t.Fatalf("key %d moves to %d, want its second home", key, fewer[got].Key)
		}
		other := append(append([]scorer.Input{}, in[:second]...), in[second+1:]...)
		if got, _ := ring(other, key); other[got].Key != in[first].Key {
			t.Fatalf("key %d has moved although its home stayed", key)
		}
	}
	for i, n := range share {
		if n < 850 || n > 1150 {
			t.Errorf("worker %d is home of %d of 4,000 keys, want about 1,000", i, n)
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

func TestTokenAwareFilterOpens(t *testing.T) {
	r, in := fixture()
	costs := make([]float64, 4)
	in[2].PendTokens, in[3].PendTokens = 2*peakPrefill, 2*peakPrefill
	if got := tokenAwareFilter(2)(&r, in, costs); got == 0 {
		t.Error("exactly the gate is not above it")
	}
	in[2].PendTokens, in[3].PendTokens = 2*peakPrefill+1, 2*peakPrefill+1
	if got := tokenAwareFilter(2)(&r, in, costs); got != 0 {
		t.Errorf("worker %d, want A: the warm ones have too much to do", got)
	}
	in = in[2:]
	if got := tokenAwareFilter(2)(&r, in, costs[:2]); got != 0 {
		t.Errorf("all are warm: worker %d, want the first", got)
	}
}

func TestSessionHashStays(t *testing.T) {
	_, in := fixture()
	a := sessionHash(&scorer.Request{Session: 77}, in, nil)
	in[a].ActiveRequests, in[a].PendTokens = 900, 1_000_000
	if b := sessionHash(&scorer.Request{Session: 77}, in, nil); a != b {
		t.Errorf("a session moves from %d to %d", a, b)
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
