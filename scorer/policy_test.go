// SPDX-License-Identifier: Apache-2.0

package scorer_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

func near(got, want, tolerance float64) bool { return math.Abs(got-want) <= tolerance }

// with returns the default settings after a change.
func with(change func(*scorer.Settings)) scorer.Settings {
	s := scorer.Defaults()
	change(&s)
	return s
}

func classic(weight float64) scorer.Settings {
	return with(func(s *scorer.Settings) { s.Policy, s.OverlapWeight = scorer.Dynamo, weight })
}

// one returns the cost of one candidate.
func one(s scorer.Settings, r scorer.Request, in scorer.Input) float64 {
	var cost [1]float64
	s.Costs(&r, []scorer.Input{in}, cost[:])
	return cost[0]
}

// A prompt of ten blocks and three workers with nothing pending: the worked
// example of the cost formula.
func TestDynamoWorkedExample(t *testing.T) {
	r := scorer.Request{PromptTokens: 160, BlockSize: 16}
	workers := []scorer.Input{
		{OverlapBlocks: 2, ActiveBlocks: 10},
		{OverlapBlocks: 5, ActiveBlocks: 5},
		{OverlapBlocks: 8, ActiveBlocks: 9},
	}
	for _, c := range []struct {
		weight float64
		want   [3]float64
		pick   int
	}{
		{1, [3]float64{18, 10, 11}, 1},
		{0, [3]float64{10, 5, 9}, 1},
		{.5, [3]float64{14, 7.5, 10}, 1},
		{2, [3]float64{26, 15, 13}, 2},
	} {
		var costs [3]float64
		s := classic(c.weight)
		if got := s.Choose(&r, workers, costs[:]); got != c.pick || costs != c.want {
			t.Errorf("weight %v: worker %d wins with %v, want %d with %v", c.weight, got+1, costs, c.pick+1, c.want)
		}
	}
}

// fixture is a prompt of 64 blocks and four workers A to D, from idle to loaded.
func fixture() (scorer.Request, []scorer.Input) {
	in := []scorer.Input{
		{ActiveRequests: 2, ActiveBlocks: 100, AdditionalBlocks: 64, KVUse: .1},
		{OverlapBlocks: 32, PendTokens: 512, ActiveRequests: 6, WaitingRequests: 1, ActiveBlocks: 300, AdditionalBlocks: 32, KVUse: .3},
		{OverlapBlocks: 60, PendTokens: 400, ActiveRequests: 9, WaitingRequests: 2, ActiveBlocks: 500, AdditionalBlocks: 4, KVUse: .5},
		{OverlapBlocks: 60, PendTokens: 6400, ActiveRequests: 30, WaitingRequests: 4, ActiveBlocks: 1500, AdditionalBlocks: 64, KVUse: .9},
	}
	for i := range in {
		in[i].DecodeTokens = 16 * in[i].ActiveBlocks
	}
	return scorer.Request{PromptTokens: 1024, BlockSize: 16}, in
}

func TestPoliciesOnTheFixture(t *testing.T) {
	agentic := with(func(s *scorer.Settings) {
		s.Policy, s.OverlapCredit, s.PrefillScale, s.RequestWeight = scorer.DynamoNewer, 2, 4, 64
	})
	attention := with(func(s *scorer.Settings) { s.Attention = 6e-5 })
	predicted := func(alpha float64) scorer.Settings {
		return with(func(s *scorer.Settings) { s.Policy, s.Alpha = scorer.PredictedTTFT, alpha })
	}
	for _, c := range []struct {
		name      string
		settings  scorer.Settings
		want      [4]float64
		pick      string
		tolerance float64
	}{
		{"dynamo w=0", classic(0), [4]float64{164, 332, 504, 1564}, "A", 0},
		{"dynamo w=1", classic(1), [4]float64{228, 396, 533, 1968}, "A", 0},
		{"dynamo w=2", classic(2), [4]float64{292, 460, 562, 2372}, "A", 0},
		{"dynamo w=4", classic(4), [4]float64{420, 588, 620, 3180}, "A", 0},
		{"dynamo w=32", classic(32), [4]float64{2212, 2380, 1432, 14492}, "C", 0},
		{"newer form, defaults", with(func(s *scorer.Settings) { s.Policy = scorer.DynamoNewer }), [4]float64{228, 396, 533, 1968}, "A", 0},
		{"agentic preset", agentic, [4]float64{548, 844, 1080, 4860}, "A", 0},
		{"tokens, alpha .1, without decoding", with(func(s *scorer.Settings) { s.DecodeWeight = 0 }), [4]float64{1228.8, 1331.2, 521.6, 6656}, "C", 1e-9},
		{"tokens + attention, without decoding", with(func(s *scorer.Settings) { s.Attention, s.DecodeWeight = 6e-5, 0 }), [4]float64{1266.5487, 1368.9487, 528.8376, 6671.2371}, "C", 5e-5},
		// On A and B a quarter of the 960 and 448 tokens that C has cached is added, with their attention.
		{"tokens, alpha .1", scorer.Defaults(), [4]float64{1228.8 + 240, 1331.2 + 112, 521.6, 6656}, "C", 1e-9},
		{"tokens, alpha 0", with(func(s *scorer.Settings) { s.Alpha = 0 }), [4]float64{1024 + 240, 1024 + 112, 464, 6464}, "C", 0},
		{"tokens + attention", attention, [4]float64{1266.5487 + 246.912, 1368.9487 + 116.9459, 528.8376, 6671.2371}, "C", 1e-4},
		{"predicted, alpha 0", predicted(0), [4]float64{42.1342, 44.8157, 21.0227, 296.4545}, "C", 5e-5},
		{"predicted, alpha .1", predicted(.1), [4]float64{50.2838, 57.2233, 23.3792, 304.3095}, "C", 5e-5},
		{"weighted", with(func(s *scorer.Settings) { s.Policy = scorer.Weighted }), [4]float64{.0123, -.2630, -.5020, -.4373}, "C", 5e-5},
	} {
		r, in := fixture()
		var costs [4]float64
		pick := c.settings.Choose(&r, in, costs[:])
		if got := string(rune('A' + pick)); got != c.pick {
			t.Errorf("%s picks %s, want %s", c.name, got, c.pick)
		}
		for i := range costs {
			if !near(costs[i], c.want[i], c.tolerance) {
				t.Errorf("%s: costs %v, want %v", c.name, costs, c.want)
				break
			}
		}
	}
}

// No blocks are re-used, so each worker would get all 64.
func TestLoadAwareSettings(t *testing.T) {
	r, in := fixture()
	for i := range in {
		in[i].AdditionalBlocks = 64
	}
	var costs [4]float64
	s := with(func(s *scorer.Settings) {
		s.Policy, s.OverlapCredit, s.HostWeight, s.DiskWeight, s.AssumeKVReuse = scorer.DynamoNewer, 0, 0, 0, false
	})
	if pick := s.Choose(&r, in, costs[:]); pick != 0 || costs != [4]float64{228, 460, 653, 2028} {
		t.Errorf("candidate %d with %v, want 0 with 228, 460, 653, 2028", pick, costs)
	}
}

func TestModelTTFTIsPredictedTTFTWithoutAlpha(t *testing.T) {
	r, in := fixture()
	s := scorer.Defaults()
	for i, want := range []float64{42.1342, 44.8157, 21.0227, 296.4545} {
		if got := s.ModelTTFT(&r, &in[i]); !near(got, want, 5e-5) {
			t.Errorf("worker %c: %v ms, want %v", 'A'+i, got, want)
		}
	}
	if got := s.ModelTTFT(&scorer.Request{PromptTokens: 8192, BlockSize: 16}, &scorer.Input{}); !near(got, 405.393, 5e-4) {
		t.Errorf("8,192 tokens on an idle worker: %v ms, want 405.393", got)
	}
	e := scorer.Dense32B()
	if got := e.AttentionWeight(); !near(got, 6e-5, 5e-7) {
		t.Errorf("attention weight %v, want 6e-5", got)
	}
}

func TestCoarseTTFT(t *testing.T) {
	for _, c := range []struct {
		isl, cached, n int
		want           float64
	}{{612, 512, 10, 102}, {306, 256, 5, 51}, {300, 0, 0, 6}} {
		if got := scorer.CoarseTTFT(c.isl-c.cached, c.n, 50_000); got != c.want {
			t.Errorf("%+v: %v ms", c, got)
		}
	}
}

func TestDynamoIsFractionalAndNeverNegative(t *testing.T) {
	if got := one(classic(1), scorer.Request{PromptTokens: 24, BlockSize: 16}, scorer.Input{}); got != 1.5 {
		t.Errorf("24 tokens cost %v, want 1.5 blocks", got)
	}
	// An index that claims more blocks than the prompt has adds no bonus.
	if got := one(classic(2), scorer.Request{PromptTokens: 16, BlockSize: 16}, scorer.Input{OverlapBlocks: 4, ActiveBlocks: 3}); got != 3 {
		t.Errorf("overlap beyond the prompt: cost %v, want 3", got)
	}
	if got := one(classic(1), scorer.Request{PromptTokens: 7}, scorer.Input{}); got != 7 {
		t.Errorf("without a block size: cost %v, want 7", got)
	}
}

func TestDynamoNewerForm(t *testing.T) {
	r := scorer.Request{PromptTokens: 160, BlockSize: 16}
	in := []scorer.Input{
		{OverlapBlocks: 4, HostBlocks: 2, DiskBlocks: 1, PendTokens: 32, ActiveBlocks: 20, ActiveRequests: 3},
		{ActiveRequests: 1}, // the least loaded
	}
	for _, c := range []struct {
		name   string
		change func(*scorer.Settings)
		taint  float64
		want   float64
	}{
		{"defaults", func(*scorer.Settings) {}, 0, 32.25},
		{"decay .5", func(s *scorer.Settings) { s.CreditDecay = .5 }, 0, 32.613636},
		{"scale 32", func(s *scorer.Settings) { s.PrefillScale = 32 }, 0, 226},
		{"credit 2, scale 4, request weight 64", func(s *scorer.Settings) { s.OverlapCredit, s.PrefillScale, s.RequestWeight = 2, 4, 64 }, 0, 221},
		{"no credit, no tiers", func(s *scorer.Settings) { s.OverlapCredit, s.HostWeight, s.DiskWeight = 0, 0, 0 }, 0, 38},
		{"taints +.5", func(*scorer.Settings) {}, .5, 20.315840},
		{"taints -.5", func(*scorer.Settings) {}, -.5, 51.194659},
	} {
		s := with(func(s *scorer.Settings) { s.Policy, s.RequestWeight = scorer.DynamoNewer, 2 })
		c.change(&s)
		in[0].TaintWeight = c.taint
		var costs [2]float64
		s.Costs(&r, in, costs[:])
		if !near(costs[0], c.want, 1e-6) {
			t.Errorf("%s: cost %v, want %v", c.name, costs[0], c.want)
		}
	}
	s := scorer.Defaults()
	if got := s.CachedTokens(&r, &in[0]); got != 92 {
		t.Errorf("%d cached tokens, want 92", got)
	}
	pinned := r
	pinned.Pinned = true
	s = with(func(s *scorer.Settings) { s.Policy, s.RequestWeight = scorer.DynamoNewer, 2 })
	if got := one(s, pinned, in[0]); got != 32.25 {
		t.Errorf("taints of a pinned worker: cost %v, want 32.25", got)
	}
}

func TestDynamoNewerCases(t *testing.T) {
	newer := func(change func(*scorer.Settings)) scorer.Settings {
		s := with(change)
		s.Policy = scorer.DynamoNewer
		return s
	}
	isl64 := scorer.Request{PromptTokens: 64, BlockSize: 16}
	untracked := isl64
	untracked.PrefillUntracked = true
	scale2 := newer(func(s *scorer.Settings) { s.PrefillScale = 2 })
	over := scorer.Input{OverlapBlocks: 6, PendTokens: 16, ActiveBlocks: 2, AdditionalBlocks: 3}
	weight32 := newer(func(s *scorer.Settings) { s.RequestWeight = 32 })
	busy := scorer.Input{OverlapBlocks: 4, ActiveBlocks: 100, ActiveRequests: 4}
	for _, c := range []struct {
		name string
		got  float64
		want float64
	}{
		{"more cached than asked", one(scale2, isl64, over), 7},
		{"the same, prefill not tracked", one(scale2, untracked, over), 5},
		{"request weight 0", one(newer(func(*scorer.Settings) {}), isl64, busy), 100},
		{"request weight 32", one(weight32, isl64, busy), 228},
		{"decode-only worker", one(scale2, untracked, scorer.Input{DecodeOnly: true, OverlapBlocks: 3, ActiveBlocks: 10}), 7},
		{"decode-only worker that takes prefill all the same", one(scale2, isl64, scorer.Input{DecodeOnly: true, OverlapBlocks: 3, ActiveBlocks: 10}), 12},
		{"scale 2, overlap 2, decode 3", one(scale2, isl64, scorer.Input{OverlapBlocks: 2, ActiveBlocks: 3}), 7},
	} {
		if c.got != c.want {
			t.Errorf("%s: cost %v, want %v", c.name, c.got, c.want)
		}
	}

	warmCold := []scorer.Input{{OverlapBlocks: 4, PendTokens: 48}, {}}
	for decay, want := range map[float64][2]float64{0: {3, 4}, 1: {4.714286, 4}} {
		s := newer(func(s *scorer.Settings) { s.CreditDecay = decay })
		var costs [2]float64
		s.Costs(&isl64, warmCold, costs[:])
		if !near(costs[0], want[0], 1e-6) || costs[1] != want[1] {
			t.Errorf("decay %v: costs %v, want %v", decay, costs, want)
		}
	}
}

func TestTokenRule(t *testing.T) {
	for _, c := range []struct {
		prompt, attention float64
		in                [3]float64 // pending tokens, own tokens, requests
		want              float64
	}{
		{1000, 0, [3]float64{0, 1000, 0}, 1000},
		{1000, 0, [3]float64{500, 200, 10}, 900},
		{1000, 0, [3]float64{100, 40, 40}, 300},
		{100_000, 6e-5, [3]float64{0, 100_000, 0}, 400_000},
		{100_000, 6e-5, [3]float64{20_000, 10_000, 8}, 140_600},
		// For router groups the inputs are means over members, with the requests sent
		// since the summary.
		{500, 0, [3]float64{4000, 500, 6}, 4800},
		{3000, 0, [3]float64{1000, 3000, 4}, 5200},
		{500, 0, [3]float64{4000 + 500./4, 500, 6 + 1./4}, 4937.5},
		{500, 0, [3]float64{4000 + 1000./4, 500, 6 + 2./4}, 5075},
		{500, 0, [3]float64{4000 + 1500./4, 500, 6 + 3./4}, 5212.5},
	} {
		if got := scorer.TokenCost(c.in[0], c.in[1], c.prompt, c.in[2], .1, c.attention); !near(got, c.want, 1e-6) {
			t.Errorf("%v tokens on %v: cost %v, want %v", c.prompt, c.in, got, c.want)
		}
	}
	s := scorer.Defaults()
	if got := s.UncachedTokens(&scorer.Request{PromptTokens: 64, BlockSize: 16}, &scorer.Input{OverlapBlocks: 4}); got != 1 {
		t.Errorf("a prompt that is all cached: %d tokens to compute, want 1", got)
	}
}

func TestTokenRuleTies(t *testing.T) {
	s := with(func(s *scorer.Settings) { s.Alpha = 0 })
	in := make([]scorer.Input, 4)
	costs := make([]float64, 4)
	var wins [4]int
	for i := range uint64(4000) {
		r := scorer.Request{PromptTokens: 64, BlockSize: 16, U: scorer.Draw(3, i)}
		wins[s.Choose(&r, in, costs)]++
	}
	for i, n := range wins {
		if n < 850 || n > 1150 {
			t.Errorf("idle worker %d got %d of 4,000 requests, want about 1,000", i, n)
		}
	}
	in = []scorer.Input{{ActiveRequests: 3}, {ActiveRequests: 2}}
	if got := s.Choose(&scorer.Request{PromptTokens: 64, BlockSize: 16}, in, costs[:2]); got != 1 {
		t.Errorf("equal cost, 3 and 2 requests: worker %d, want 1", got)
	}
}

// The decode leg of a split request needs room.
func TestTokenRuleOfDecodeLeg(t *testing.T) {
	r := scorer.Request{PromptTokens: 1024, BlockSize: 16, PrefillUntracked: true}
	in := []scorer.Input{
		{ActiveBlocks: 50, AdditionalBlocks: 64, PendTokens: 9, DecodeTokens: 50 * 16},
		{ActiveBlocks: 40, AdditionalBlocks: 64, ActiveRequests: 9, DecodeTokens: 24 * 16, WaitingTokens: 16 * 16},
	}
	var costs [2]float64
	s := scorer.Defaults()
	if got := s.Choose(&r, in, costs[:]); got != 1 || costs != [2]float64{114, 104} {
		t.Errorf("worker %d with %v, want 1 with 114, 104", got, costs)
	}
	// Nine requests with the same 40 blocks hold 360.
	in[1].DecodeTokens = 9 * 40 * 16
	if got := s.Choose(&r, in, costs[:]); got != 0 || costs != [2]float64{114, 9*40 + 16 + 64} {
		t.Errorf("shared blocks: worker %d with %v, want 0 with 114, 440", got, costs)
	}
	s.DecodeWeight = 0
	if got := s.Choose(&r, in, costs[:]); got != 1 || costs != [2]float64{114, 104} {
		t.Errorf("without the weight: worker %d with %v, want 1 with 114, 104", got, costs)
	}
	// A decode worker has credit for what it holds.
	s.OverlapCredit, in[0].DecodeOnly, in[0].OverlapBlocks = 2, true, 30
	if s.Costs(&r, in, costs[:]); costs != [2]float64{54, 104} {
		t.Errorf("with credit: %v, want 54, 104", costs)
	}
	c := classic(1)
	if c.Costs(&r, in, costs[:]); costs != [2]float64{114, 104} {
		t.Errorf("dynamo: costs %v, want 114, 104", costs)
	}
}

// Workers A and B hold a prefix of 15,000 tokens. Eight requests decode on A, none on B, and C is idle
// without the prefix.
func TestDecodingCounts(t *testing.T) {
	r := scorer.Request{PromptTokens: 15_500, BlockSize: 100, OutputTokens: 600}
	in := []scorer.Input{
		{OverlapBlocks: 150, ActiveRequests: 8, DecodeTokens: 6 * 15_800, WaitingRequests: 2, WaitingTokens: 2 * 15_800},
		{OverlapBlocks: 150},
		{},
	}
	// 5.6e-5/.0386 · 600 · 126,400 / 3
	const delay = 36_675.3
	for _, c := range []struct {
		policy scorer.Policy
		want   float64 // by which A's cost is above that of the weight 0
	}{{scorer.Tokens, delay}, {scorer.PredictedTTFT, .0386 * delay}, {scorer.Weighted, .6 * delay / 15_500}, {scorer.Dynamo, 0}, {scorer.DynamoNewer, 0}} {
		var on, off [3]float64
		s := with(func(s *scorer.Settings) { s.Policy, s.Attention = c.policy, 6e-5 })
		s.Costs(&r, in, on[:])
		s.DecodeWeight = 0
		s.Costs(&r, in, off[:])
		if got := on[0] - off[0]; !near(got, c.want, 1e-5*c.want) {
			t.Errorf("%s: decoding costs %v, want %v", c.policy, got, c.want)
		}
		if on[1] != off[1] || on[2] != off[2] {
			t.Errorf("%s: idle workers cost %v and %v", c.policy, on, off)
		}
	}
	s := with(func(s *scorer.Settings) { s.Attention = 6e-5 })
	var costs [2]float64
	// Computing the prefix again is worth it now, and was not with three requests.
	if got := s.Choose(&r, []scorer.Input{in[0], in[2]}, costs[:]); got != 1 {
		t.Errorf("eight requests: worker %d of %v, want the idle one", got, costs)
	}
	if got := s.Choose(&r, []scorer.Input{{OverlapBlocks: 150, ActiveRequests: 3, DecodeTokens: 3 * 15_800}, in[2]}, costs[:]); got != 0 {
		t.Errorf("three requests: worker %d of %v, want the one with the prefix", got, costs)
	}
	// A short output is delayed little.
	if r.OutputTokens = 1; s.Choose(&r, []scorer.Input{in[0], in[2]}, costs[:]) != 0 {
		t.Errorf("one token: costs %v, want the worker with the prefix", costs)
	}
}

// The worked example of docs/concepts.md.
func TestTheExampleInTheDocs(t *testing.T) {
	s := with(func(s *scorer.Settings) { s.Attention = 6e-5 })
	r := scorer.Request{PromptTokens: 10_000, BlockSize: 16, OutputTokens: 300, ActivePrefix: 9_600, Sharers: 9}
	in := []scorer.Input{
		{OverlapBlocks: 600, ActiveRequests: 9, DecodeTokens: 91_800},
		{},
		{OverlapBlocks: 600, PendTokens: 4_000, ActiveRequests: 2, DecodeTokens: 10_200, WaitingRequests: 1, WaitingTokens: 10_200},
	}
	var costs [3]float64
	if got := s.Choose(&r, in, costs[:]); got != 1 {
		t.Errorf("worker %d, want B", got)
	}
	for i, want := range []float64{14_525, 1_872, 7_722} {
		if !near(costs[i], want, 1) {
			t.Errorf("costs %v, want %v for worker %d", costs, want, i)
		}
	}
	s.DecodeWeight = 0
	if got := s.Choose(&r, in, costs[:]); got != 0 || !near(costs[0], 1_207, 1) {
		t.Errorf("without decoding: worker %d for %v, want A for 1207", got, costs)
	}
}

// The wait for a prefix that is still being computed contains its attention. Where another worker has
// the prefix ready, the wait counts once more.
func TestWaitForAPrefix(t *testing.T) {
	r := scorer.Request{PromptTokens: 10_001, BlockSize: 100}
	s := with(func(s *scorer.Settings) { s.Attention, s.Alpha = 6e-5, 0 })
	p := with(func(s *scorer.Settings) { s.Policy, s.Alpha = scorer.PredictedTTFT, 0 })
	for _, c := range []struct {
		in   scorer.Input
		want float64 // above the pending tokens
	}{
		{scorer.Input{OverlapBlocks: 100, PendTokens: 10_000}, 0},                         // reported: other prompts are pending
		{scorer.Input{OverlapBlocks: 100, PendingBlocks: 100, PendTokens: 10_000}, 3_000}, // 10,000 · 6e-5 · 5,000
		{scorer.Input{OverlapBlocks: 100, PendingBlocks: 20, PendTokens: 10_000}, 1_080},  // 2,000 · 6e-5 · 9,000
		{scorer.Input{OverlapBlocks: 100, PendingBlocks: 100}, 0},                         // nothing is pending: the events are late
		{scorer.Input{OverlapBlocks: 100, PendingBlocks: 100, PendTokens: 20_000, Members: 2}, 3_000},
	} {
		var costs [1]float64
		s.Costs(&r, []scorer.Input{c.in}, costs[:])
		pend := float64(c.in.PendTokens / max(1, c.in.Members))
		if got := costs[0] - pend - (1 + 6e-5*(10_001-.5)); !near(got, c.want, 1e-6) {
			t.Errorf("%+v: the wait costs %v, want %v", c.in, got, c.want)
		}
	}
	wait := scorer.Input{OverlapBlocks: 100, PendingBlocks: 100, PendTokens: 10_000}
	for ready, want := range map[int]float64{0: 3_000, 30: 6_000, 100: 13_000, 104: 13_000} {
		var costs [2]float64
		s.Costs(&r, []scorer.Input{wait, {OverlapBlocks: ready, ActiveRequests: 1}}, costs[:])
		if got := costs[0] - 10_000 - (1 + 6e-5*(10_001-.5)); ready < 101 && !near(got, want, 1e-6) {
			t.Errorf("%d blocks are ready elsewhere: the wait costs %v, want %v", ready, got, want)
		}
	}
	e := p.Engine
	if got, want := p.ModelTTFT(&r, &wait), e.Token*10_001+e.Attention*(10_000*5_000+10_001-.5)+10_001/e.Chunk*e.Floor; !near(got, want, 1e-6) {
		t.Errorf("time to the first token %v ms, want %v: the prefix, one token, and the steps", got, want)
	}
}

// A copy of tokens that another worker has costs more on a worker with requests, and less on an idle
// one as far as requests are using them.
func TestCopiesOfAPrefix(t *testing.T) {
	s := with(func(s *scorer.Settings) { s.Attention, s.Alpha = 6e-5, 0 })
	r := scorer.Request{PromptTokens: 10_500, BlockSize: 100}
	work := func(from, to float64) float64 { return (to - from) * (1 + 6e-5*(from+to)/2) }
	holder := scorer.Input{OverlapBlocks: 100, ActiveRequests: 2}
	for _, c := range []struct {
		name   string
		in     scorer.Input
		active int
		want   float64 // beyond the prefill
	}{
		{"idle", scorer.Input{}, 0, 0},
		{"idle, the whole prefix is in use", scorer.Input{}, 10_000, -work(0, 10_000) * 2 / 3},
		{"idle, more than the prefix is in use", scorer.Input{}, 10_400, -work(0, 10_000) * 2 / 3},
		{"idle, a part is in use", scorer.Input{OverlapBlocks: 20}, 5_000, -work(2_000, 5_000) * 2 / 3},
		{"idle, only what it has is in use", scorer.Input{OverlapBlocks: 60}, 5_000, 0},
		{"busy", scorer.Input{ActiveRequests: 1}, 10_000, work(0, 10_000) / 4},
		{"busy, with a part", scorer.Input{OverlapBlocks: 90, ActiveRequests: 1}, 10_000, work(9_000, 10_000) / 4},
		{"with all of it", scorer.Input{OverlapBlocks: 100}, 10_000, 0},
		{"with more", scorer.Input{OverlapBlocks: 104}, 10_000, 0},
		{"a group", scorer.Input{Members: 2, ActiveRequests: 1}, 10_000, 0},
	} {
		r.ActivePrefix, r.Sharers = c.active, holder.ActiveRequests
		var costs [2]float64
		s.Costs(&r, []scorer.Input{c.in, holder}, costs[:])
		own := float64(10_500 - 100*c.in.OverlapBlocks)
		if got := costs[0] - work(10_500-own, 10_500); !near(got, c.want, 1e-6) {
			t.Errorf("%s: the copy costs %v beyond its prefill, want %v", c.name, got, c.want)
		}
	}
}

// A slower worker takes longer for each part of the cost, and for each step of the output.
func TestSpeedOfAWorker(t *testing.T) {
	r := scorer.Request{PromptTokens: 1000, BlockSize: 100, OutputTokens: 300}
	in := []scorer.Input{{PendTokens: 500, ActiveRequests: 1, DecodeTokens: 4000}, {}, {PendTokens: 500, ActiveRequests: 1, DecodeTokens: 4000, Speed: .25}}
	for _, c := range []struct {
		policy scorer.Policy
		base   float64 // of an output: a third of 300 steps
	}{{scorer.Tokens, 100 * 11 / .0386}, {scorer.PredictedTTFT, 100 * 11}} {
		s := with(func(s *scorer.Settings) { s.Policy = c.policy })
		var costs [3]float64
		if got := s.Choose(&r, in, costs[:]); got != 1 {
			t.Errorf("%s: worker %d of %v, want the idle one", c.policy, got, costs)
		}
		var equal [2]float64
		s.Costs(&r, in[:2], equal[:])
		if want := equal[0] + c.base; !near(costs[0], want, 1e-6*want) {
			t.Errorf("%s: speed 1 beside another costs %v, want %v", c.policy, costs[0], want)
		}
		if want := (equal[0] + c.base) * math.Pow(4, .75); !near(costs[2], want, 1e-6*want) {
			t.Errorf("%s: a quarter of the speed costs %v, want %v", c.policy, costs[2], want)
		}
		// Costs stay positive, so that preferred taints keep their effect.
		fast := []scorer.Input{{Speed: 4, TaintWeight: 1}, {Speed: 4, TaintWeight: -1}}
		if s.Costs(&r, fast, equal[:]); equal[0] <= 0 || equal[0] >= equal[1] {
			t.Errorf("%s: fast workers with and against a taint cost %v", c.policy, equal)
		}
	}
	for _, p := range []scorer.Policy{scorer.Dynamo, scorer.DynamoNewer, scorer.Weighted} {
		s := with(func(s *scorer.Settings) { s.Policy = p })
		var costs [3]float64
		if s.Costs(&r, in, costs[:]); costs[0] != costs[2] {
			t.Errorf("%s: the speed changes %v", p, costs)
		}
	}
}

func TestWeightedScore(t *testing.T) {
	s := with(func(s *scorer.Settings) { s.Policy = scorer.Weighted })
	r := scorer.Request{PromptTokens: 612, BlockSize: 16}
	in := []scorer.Input{
		{OverlapBlocks: 32, ActiveRequests: 10, KVUse: .3},
		{KVUse: .1},
		{ActiveRequests: 5, KVUse: .2},
	}
	var costs [3]float64
	if got := s.Choose(&r, in, costs[:]); got != 0 {
		t.Errorf("worker %d wins, want the one with the cache", got)
	}
	for i, want := range []float64{.460242, -.01, -.025859} {
		if !near(-costs[i], want, 1e-6) {
			t.Errorf("worker %d: score %v, want %v", i, -costs[i], want)
		}
	}
	in = make([]scorer.Input, 3)
	r.U = .9
	if got := s.Choose(&r, in, costs[:]); got != 0 {
		t.Errorf("of equals worker %d wins, want the first", got)
	}
}

func TestTemperatureChooses(t *testing.T) {
	s := classic(1)
	s.Temperature = 1
	in := []scorer.Input{{ActiveBlocks: 18}, {ActiveBlocks: 10}, {ActiveBlocks: 11}}
	var costs [3]float64
	for u, want := range map[float64]int{.163: 0, .164: 1, .607: 1, .608: 2} {
		if got := s.Choose(&scorer.Request{BlockSize: 16, U: u}, in, costs[:]); got != want {
			t.Errorf("draw %v: worker %d, want %d", u, got, want)
		}
	}
}

func TestSettingsRefuseNonsense(t *testing.T) {
	good := []scorer.Settings{scorer.Defaults(), classic(0)}
	for _, s := range good {
		if err := s.Validate(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
	}
	for name, field := range map[string]func(*scorer.Settings) *float64{
		"router_temperature":         func(s *scorer.Settings) *float64 { return &s.Temperature },
		"overlap_score_weight":       func(s *scorer.Settings) *float64 { return &s.OverlapWeight },
		"overlap_score_credit":       func(s *scorer.Settings) *float64 { return &s.OverlapCredit },
		"overlap_score_credit_decay": func(s *scorer.Settings) *float64 { return &s.CreditDecay },
		"prefill_load_scale":         func(s *scorer.Settings) *float64 { return &s.PrefillScale },
		"active_request_weight":      func(s *scorer.Settings) *float64 { return &s.RequestWeight },
		"host_cache_weight":          func(s *scorer.Settings) *float64 { return &s.HostWeight },
		"disk_cache_weight":          func(s *scorer.Settings) *float64 { return &s.DiskWeight },
		"alpha":                      func(s *scorer.Settings) *float64 { return &s.Alpha },
		"attention":                  func(s *scorer.Settings) *float64 { return &s.Attention },
		"engine.token":               func(s *scorer.Settings) *float64 { return &s.Engine.Token },
		"engine.chunk":               func(s *scorer.Settings) *float64 { return &s.Engine.Chunk },
		"max_batch":                  func(s *scorer.Settings) *float64 { return &s.MaxBatch },
	} {
		for _, bad := range []float64{math.NaN(), -1, math.Inf(1), math.Inf(-1)} {
			s := scorer.Defaults()
			*field(&s) = bad
			var err *scorer.SettingError
			if got := s.Validate(); !errors.As(got, &err) || err.Setting != name {
				t.Errorf("%s %v: error %v, want one that names it", name, bad, got)
			}
		}
	}
	for _, name := range []scorer.Policy{"", "Dynamo", "fastest"} {
		s := with(func(s *scorer.Settings) { s.Policy = name })
		var err *scorer.SettingError
		if got := s.Validate(); !errors.As(got, &err) || err.Setting != "cost" {
			t.Errorf("policy %q: error %v, want one that names cost", name, got)
		}
	}
	s := with(func(s *scorer.Settings) { s.MaxBatch = 0 })
	if got := s.Validate(); got == nil || got.Error() != "scorer: max_batch is 0, want a finite number above 0" {
		t.Errorf("max_batch 0: %v", got)
	}
}

func TestOverride(t *testing.T) {
	f := func(x float64) *float64 { return &x }
	p := func(x scorer.Policy) *scorer.Policy { return &x }
	no := false
	tokens, newer := scorer.Defaults(), with(func(s *scorer.Settings) { s.Policy = scorer.DynamoNewer })
	for _, c := range []struct {
		name string
		base scorer.Settings
		o    scorer.Override
		want func(*scorer.Settings) bool
		err  string // setting that the error names
	}{
		{name: "nothing", base: tokens, want: func(s *scorer.Settings) bool { return *s == scorer.Defaults() }},
		{
			name: "the classic weight selects dynamo", base: tokens, o: scorer.Override{OverlapScoreWeight: f(2)},
			want: func(s *scorer.Settings) bool { return s.Policy == scorer.Dynamo && s.OverlapWeight == 2 },
		},
		{
			name: "and scales prefill in the newer form", base: newer, o: scorer.Override{OverlapScoreWeight: f(2)},
			want: func(s *scorer.Settings) bool {
				return s.Policy == scorer.DynamoNewer && s.PrefillScale == 2 && s.OverlapCredit == 1
			},
		},
		{
			name: "where 0 is no credit either", base: newer, o: scorer.Override{OverlapScoreWeight: f(0)},
			want: func(s *scorer.Settings) bool { return s.PrefillScale == 0 && s.OverlapCredit == 0 },
		},
		{
			name: "credit selects the newer form", base: classic(3), o: scorer.Override{OverlapScoreCredit: f(.5)},
			want: func(s *scorer.Settings) bool {
				return s.Policy == scorer.DynamoNewer && s.OverlapCredit == .5 && s.PrefillScale == 3
			},
		},
		{
			name: "weight and credit", base: tokens, o: scorer.Override{OverlapScoreWeight: f(3), OverlapScoreCredit: f(.5)},
			want: func(s *scorer.Settings) bool {
				return s.Policy == scorer.DynamoNewer && s.OverlapCredit == .5 && s.PrefillScale == 3
			},
		},
		{
			name: "alpha selects tokens", base: classic(1), o: scorer.Override{Alpha: f(.5), Attention: f(1e-5)},
			want: func(s *scorer.Settings) bool {
				return s.Policy == scorer.Tokens && s.Alpha == .5 && s.Attention == 1e-5
			},
		},
		{
			name: "alpha stays where it is known", base: with(func(s *scorer.Settings) { s.Policy = scorer.PredictedTTFT }), o: scorer.Override{Alpha: f(.5)},
			want: func(s *scorer.Settings) bool { return s.Policy == scorer.PredictedTTFT && s.Alpha == .5 },
		},
		{
			name: "what all know", base: tokens, o: scorer.Override{Temperature: f(.5), AssumeKVReuse: &no, TrackPrefillTokens: &no},
			want: func(s *scorer.Settings) bool {
				return s.Policy == scorer.Tokens && s.Temperature == .5 && !s.AssumeKVReuse && !s.TrackPrefill
			},
		},
		{
			name: "a policy by name", base: tokens, o: scorer.Override{Cost: p(scorer.Dynamo)},
			want: func(s *scorer.Settings) bool { return s.Policy == scorer.Dynamo && s.OverlapWeight == 1 },
		},
		{name: "contradiction: weight of tokens", base: tokens, o: scorer.Override{Cost: p(scorer.Tokens), OverlapScoreWeight: f(1)}, err: "overlap_score_weight"},
		{name: "contradiction: alpha of dynamo", base: tokens, o: scorer.Override{Cost: p(scorer.Dynamo), Alpha: f(1)}, err: "alpha"},
		{name: "contradiction: both", base: tokens, o: scorer.Override{OverlapScoreWeight: f(1), Alpha: f(1)}, err: "overlap_score_weight"},
		{name: "contradiction: two scales", base: newer, o: scorer.Override{OverlapScoreWeight: f(1), PrefillLoadScale: f(1)}, err: "prefill_load_scale"},
		{name: "unknown policy", base: tokens, o: scorer.Override{Cost: p("best")}, err: "cost"},
		{name: "unknown policy with a weight", base: tokens, o: scorer.Override{Cost: p("best"), Alpha: f(1)}, err: "cost"},
		{name: "not a number", base: tokens, o: scorer.Override{Temperature: f(math.NaN())}, err: "router_temperature"},
		{name: "negative", base: tokens, o: scorer.Override{Attention: f(-1)}, err: "attention"},
		{name: "weight where there is no index", base: classic(0), o: scorer.Override{OverlapScoreWeight: f(1)}, err: "overlap_score_weight"},
		{name: "tokens where there is no index", base: classic(0), o: scorer.Override{Cost: p(scorer.Tokens)}, err: "cost"},
		{name: "alpha 0 where there is no index", base: classic(0), o: scorer.Override{Alpha: f(0)}, err: "alpha"},
		{
			name: "weight 0 where there is no index", base: classic(0), o: scorer.Override{OverlapScoreWeight: f(0)},
			want: func(s *scorer.Settings) bool { return *s == classic(0) || !s.UsesOverlap() },
		},
	} {
		before := c.base
		got, err := c.base.With(&c.o)
		var named *scorer.SettingError
		switch {
		case c.base != before:
			t.Errorf("%s: the configured settings have changed", c.name)
		case c.err != "" && (!errors.As(err, &named) || named.Setting != c.err):
			t.Errorf("%s: error %v, want one that names %s", c.name, err, c.err)
		case c.err == "" && (err != nil || !c.want(&got)):
			t.Errorf("%s: %+v, error %v", c.name, got, err)
		}
	}
	if got, err := tokens.With(nil); err != nil || got != tokens {
		t.Errorf("no override: %+v, %v", got, err)
	}
}

// Each number in the settings that the policy uses changes a cost.
func TestEverySettingMatters(t *testing.T) {
	r := scorer.Request{PromptTokens: 1024, BlockSize: 16, OutputTokens: 200}
	in := []scorer.Input{{}, {
		OverlapBlocks: 8, HostBlocks: 4, DiskBlocks: 4, PendTokens: 640, ActiveRequests: 3,
		ActiveBlocks: 90, AdditionalBlocks: 40, DecodeTokens: 9000, KVUse: .2,
	}}
	for _, c := range []struct {
		policy scorer.Policy
		fields map[string]func(*scorer.Settings) *float64
	}{
		{scorer.Dynamo, map[string]func(*scorer.Settings) *float64{"weight": func(s *scorer.Settings) *float64 { return &s.OverlapWeight }}},
		{scorer.DynamoNewer, map[string]func(*scorer.Settings) *float64{
			"credit":  func(s *scorer.Settings) *float64 { return &s.OverlapCredit },
			"decay":   func(s *scorer.Settings) *float64 { return &s.CreditDecay },
			"scale":   func(s *scorer.Settings) *float64 { return &s.PrefillScale },
			"request": func(s *scorer.Settings) *float64 { return &s.RequestWeight },
			"host":    func(s *scorer.Settings) *float64 { return &s.HostWeight },
			"disk":    func(s *scorer.Settings) *float64 { return &s.DiskWeight },
		}},
		{scorer.Tokens, map[string]func(*scorer.Settings) *float64{
			"alpha":     func(s *scorer.Settings) *float64 { return &s.Alpha },
			"attention": func(s *scorer.Settings) *float64 { return &s.Attention },
			"decode":    func(s *scorer.Settings) *float64 { return &s.DecodeWeight },
			"kv read":   func(s *scorer.Settings) *float64 { return &s.KVRead },
		}},
		{scorer.PredictedTTFT, map[string]func(*scorer.Settings) *float64{
			"alpha":     func(s *scorer.Settings) *float64 { return &s.Alpha },
			"decode":    func(s *scorer.Settings) *float64 { return &s.DecodeWeight },
			"kv read":   func(s *scorer.Settings) *float64 { return &s.KVRead },
			"floor":     func(s *scorer.Settings) *float64 { return &s.Engine.Floor },
			"token":     func(s *scorer.Settings) *float64 { return &s.Engine.Token },
			"attention": func(s *scorer.Settings) *float64 { return &s.Engine.Attention },
			"kv token":  func(s *scorer.Settings) *float64 { return &s.Engine.KVToken },
			"chunk":     func(s *scorer.Settings) *float64 { return &s.Engine.Chunk },
		}},
		{scorer.Weighted, map[string]func(*scorer.Settings) *float64{
			"batch":    func(s *scorer.Settings) *float64 { return &s.MaxBatch },
			"decode":   func(s *scorer.Settings) *float64 { return &s.DecodeWeight },
			"kv read":  func(s *scorer.Settings) *float64 { return &s.KVRead },
			"overlap":  func(s *scorer.Settings) *float64 { return &s.WeightedOverlap },
			"requests": func(s *scorer.Settings) *float64 { return &s.WeightedRequests },
			"kv use":   func(s *scorer.Settings) *float64 { return &s.WeightedKVUse },
		}},
	} {
		for name, field := range c.fields {
			s := with(func(s *scorer.Settings) { s.Policy = c.policy })
			var before, after [2]float64
			s.Costs(&r, in, before[:])
			*field(&s) += .5
			s.Costs(&r, in, after[:])
			if before[1] == after[1] {
				t.Errorf("%s: %s is without effect", c.policy, name)
			}
		}
	}
}

func TestChoosingDoesNotAllocate(t *testing.T) {
	r, in := fixture()
	costs := make([]float64, len(in))
	for _, p := range scorer.Policies() {
		for _, temperature := range []float64{0, .5} {
			s := with(func(s *scorer.Settings) { s.Policy, s.Temperature = p, temperature })
			if n := testing.AllocsPerRun(10, func() { r.U = scorer.Draw(1, 2); s.Choose(&r, in, costs) }); n != 0 {
				t.Errorf("%s makes %v allocations, want 0", p, n)
			}
			if got := s.Choose(&r, nil, nil); got != -1 {
				t.Errorf("%s chooses %d of no candidates", p, got)
			}
			if got := s.Choose(&r, in[2:3], costs[:1]); got != 0 {
				t.Errorf("%s chooses %d of one candidate", p, got)
			}
		}
	}
}

// Very large settings give very large but finite costs, and an idle worker costs no more
// than the same worker with a request.
func TestCostsAreFinite(t *testing.T) {
	huge := []float64{0, 1, 1e300, math.MaxFloat64}
	rng := rand.New(rand.NewPCG(1, 1))
	of := func() float64 { return huge[rng.IntN(len(huge))] }
	for range 20_000 {
		s := scorer.Defaults()
		s.Policy = scorer.Policies()[rng.IntN(len(scorer.Policies()))]
		s.OverlapWeight, s.OverlapCredit, s.CreditDecay, s.PrefillScale, s.RequestWeight = of(), of(), of(), of(), of()
		s.HostWeight, s.DiskWeight, s.Alpha, s.Attention = of(), of(), of(), of()
		s.DecodeWeight, s.KVRead = of(), of()
		if err := s.Validate(); err != nil {
			t.Fatal(err)
		}
		r := scorer.Request{PromptTokens: 1 + rng.IntN(2000), BlockSize: 16, OutputTokens: float64(rng.IntN(2000))}
		idle := scorer.Input{OverlapBlocks: rng.IntN(3), HostBlocks: rng.IntN(3), TaintWeight: float64(rng.IntN(3) - 1)}
		busy := idle
		busy.DecodeTokens, busy.WaitingTokens, busy.PendingBlocks = rng.IntN(9000), rng.IntN(9000), rng.IntN(1+busy.OverlapBlocks)
		busy.PendTokens, busy.ActiveRequests, busy.ActiveBlocks = rng.IntN(5000), 1+rng.IntN(9), rng.IntN(500)
		costs := make([]float64, 2)
		s.Costs(&r, []scorer.Input{idle, busy}, costs)
		if own := s.UncachedTokens(&r, &idle); own < 1 || own > r.PromptTokens {
			t.Fatalf("%+v, %+v: %d of %d tokens to compute", s, idle, own, r.PromptTokens)
		}
		for _, c := range costs {
			if math.IsNaN(c) || math.IsInf(c, 0) {
				t.Fatalf("%+v: costs %v", s, costs)
			}
		}
		if s.CreditDecay == 0 && costs[0] > costs[1] {
			t.Fatalf("%+v, %+v, %+v: costs %v", s, idle, busy, costs)
		}
	}
	costs := []float64{math.NaN(), math.Inf(1), math.Inf(-1), 5}
	if scorer.Bound(costs); !slices.Equal(costs, []float64{math.MaxFloat64, math.MaxFloat64, -math.MaxFloat64, 5}) {
		t.Errorf("bounded: %v", costs)
	}
}

// Of workers with costs near the lowest one, the one that holds most of the prompt is chosen, although its hybrid
// model cannot use it yet: the costs may differ by half of the prefill that a later prompt saves.
func TestJunctions(t *testing.T) {
	r := scorer.Request{PromptTokens: 1600, BlockSize: 16, U: .7}
	s := scorer.Defaults()
	for name, c := range map[string]struct {
		in   []scorer.Input
		want int
	}{
		"equal costs":                {[]scorer.Input{{}, {UnusableBlocks: 40}, {UnusableBlocks: 90}, {}}, 2},
		"half of it more":            {[]scorer.Input{{}, {UnusableBlocks: 90, PendTokens: 720}}, 1},
		"most of it more":            {[]scorer.Input{{}, {UnusableBlocks: 90, PendTokens: 1300}}, 0},
		"a short part, half a block": {[]scorer.Input{{}, {UnusableBlocks: 1, PendTokens: 15}}, 1},
		"a short part, two blocks":   {[]scorer.Input{{}, {UnusableBlocks: 1, PendTokens: 32}}, 0},
		"less than the usable part":  {[]scorer.Input{{OverlapBlocks: 20}, {UnusableBlocks: 50}}, 0},
		"more than the usable part":  {[]scorer.Input{{OverlapBlocks: 20}, {UnusableBlocks: 90}}, 1},
		"as long as the usable part": {[]scorer.Input{{OverlapBlocks: 20}, {UnusableBlocks: 20}}, 0},
		"the longest of both":        {[]scorer.Input{{OverlapBlocks: 20}, {OverlapBlocks: 20, UnusableBlocks: 1}}, 1},
	} {
		if got := s.Choose(&r, c.in, make([]float64, len(c.in))); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
