// SPDX-License-Identifier: Apache-2.0

package scorer_test

import (
	"errors"
	"math"
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

func TestBusy(t *testing.T) {
	share, tokens, fraction := .8, 10_000, 1.5
	blocks := scorer.Thresholds{ActiveBlocks: &share}
	pend := scorer.Thresholds{PrefillTokens: &tokens}
	batches := scorer.Thresholds{PrefillFraction: &fraction}
	all := scorer.Thresholds{ActiveBlocks: &share, PrefillTokens: &tokens, PrefillFraction: &fraction}
	for _, c := range []struct {
		name    string
		t       scorer.Thresholds
		o       scorer.Occupancy
		want    bool
		skipped int
	}{
		{"off", scorer.Thresholds{}, scorer.Occupancy{ActiveBlocks: 1e6, PendTokens: 1e6, TotalBlocks: 1, MaxBatchedTokens: 1}, false, 0},
		{"800 of 1,000", blocks, scorer.Occupancy{ActiveBlocks: 800, TotalBlocks: 1000}, false, 0},
		{"801 of 1,000", blocks, scorer.Occupancy{ActiveBlocks: 801, TotalBlocks: 1000}, true, 0},
		{"the engine says 801", blocks, scorer.Occupancy{EngineBlocks: 801, TotalBlocks: 1000}, true, 0},
		{"size unknown", blocks, scorer.Occupancy{ActiveBlocks: 801}, false, 1},
		{"10,000 tokens", pend, scorer.Occupancy{PendTokens: 10_000}, false, 0},
		{"10,001 tokens", pend, scorer.Occupancy{PendTokens: 10_001}, true, 0},
		{"one and a half batches", batches, scorer.Occupancy{PendTokens: 3 * 4096, MaxBatchedTokens: 8192}, false, 0},
		{"and a token", batches, scorer.Occupancy{PendTokens: 3*4096 + 1, MaxBatchedTokens: 8192}, true, 0},
		{"batch unknown", batches, scorer.Occupancy{PendTokens: 1e6}, false, 1},
		{"one suffices", all, scorer.Occupancy{PendTokens: 10_001}, true, 2},
	} {
		if busy, skipped := c.t.Busy(c.o); busy != c.want || skipped != c.skipped {
			t.Errorf("%s: busy %v, %d skipped; want %v, %d", c.name, busy, skipped, c.want, c.skipped)
		}
	}
}

func TestThresholdsRefuseNonsense(t *testing.T) {
	f := func(x float64) *float64 { return &x }
	minus := -1
	for name, bad := range map[string][]scorer.Thresholds{
		"active_decode_blocks_threshold":       {{ActiveBlocks: f(-.1)}, {ActiveBlocks: f(1.1)}, {ActiveBlocks: f(math.NaN())}},
		"active_prefill_tokens_threshold":      {{PrefillTokens: &minus}},
		"active_prefill_tokens_threshold_frac": {{PrefillFraction: f(-1)}, {PrefillFraction: f(math.NaN())}, {PrefillFraction: f(math.Inf(1))}},
	} {
		for _, b := range bad {
			var named *scorer.SettingError
			if err := b.Validate(); !errors.As(err, &named) || named.Setting != name {
				t.Errorf("error %v, want one that names %s", err, name)
			}
		}
	}
	zero := 0
	good := scorer.Thresholds{ActiveBlocks: f(0), PrefillTokens: &zero, PrefillFraction: f(0)}
	if err := good.Validate(); err != nil {
		t.Errorf("zeros: %v", err)
	}
}

func TestQueueThreshold(t *testing.T) {
	in := []scorer.Input{{PendTokens: 16_385, MaxBatchedTokens: 8192}, {PendTokens: 16_384, MaxBatchedTokens: 8192}}
	if scorer.MustWait(in, 2) {
		t.Error("two batches are not more than two batches")
	}
	in[1].PendTokens++
	if !scorer.MustWait(in, 2) {
		t.Error("all have more than two batches")
	}
	in[1].MaxBatchedTokens = 0
	if scorer.MustWait(in, 2) || scorer.MustWait(nil, 2) {
		t.Error("no request waits for a worker of unknown batch size, or without candidates")
	}
}
