// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"testing"

	"github.com/kvroute/kvroute/internal/fixtures"
)

func TestHitRatesOfTheMooncakeTraces(t *testing.T) {
	for _, c := range []struct {
		file          string
		blocks, hit   int
		tokens        float64
		robin, shared [3]int // caches of 1,000, 2,000 and 10,000 blocks
		one           [3]int
	}{
		{"mooncake_conversation", 288_500, 105_710, .3736, [3]int{17669, 22969, 36463}, [3]int{51368, 75791, 104305}, [3]int{12847, 15665, 61046}},
		{"mooncake_synthetic", 121_877, 77_953, .6512, [3]int{7831, 13055, 27505}, [3]int{45493, 64581, 77953}, [3]int{10252, 17839, 51669}},
		{"dynamo_mooncake_trace_1000", 19_686, 7_479, .3907, [3]int{5625, 5730, 5730}, [3]int{7355, 7479, 7479}, [3]int{5565, 5646, 7453}},
	} {
		t.Run(c.file, func(t *testing.T) {
			name := fixtures.Need(t, "traces", c.file+".jsonl.gz")
			trace, err := LoadMooncake(name)
			if err != nil {
				t.Fatal(err)
			}
			h := trace.HitRate(1, 0)
			if h.Hit != c.hit || h.Blocks != c.blocks {
				t.Errorf("%s: %d of %d blocks hit an endless cache, want %d of %d", c.file, h.Hit, h.Blocks, c.hit, c.blocks)
			}
			if share := float64(h.HitTokens) / float64(h.Tokens); share < c.tokens-5e-5 || share > c.tokens+5e-5 {
				t.Errorf("%s: %.5f of tokens hit, want %.4f", c.file, share, c.tokens)
			}
			for i, size := range []int{1000, 2000, 10_000} {
				if got := trace.HitRate(8, size).Hit; got != c.robin[i] {
					t.Errorf("%s: 8 workers of %d blocks, round robin: %d hits, want %d", c.file, size, got, c.robin[i])
				}
				if got := trace.HitRate(1, 8*size).Hit; got != c.shared[i] {
					t.Errorf("%s: one cache of 8 × %d blocks: %d hits, want %d", c.file, size, got, c.shared[i])
				}
				if got := trace.HitRate(1, size).Hit; got != c.one[i] {
					t.Errorf("%s: one cache of %d blocks: %d hits, want %d", c.file, size, got, c.one[i])
				}
			}
		})
	}
}
