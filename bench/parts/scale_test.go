// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"slices"
	"testing"

	"github.com/kvroute/kvroute/bench/replay"
)

// Prompts in small blocks meet where those in large blocks do, behind what all have.
func TestScalePrompts(t *testing.T) {
	trace, err := replay.Generate(replay.GenerateConfig{Requests: 40, Rate: 1, Prefixes: 3, PrefixTokens: 2048, QuestionTokens: 700, OutputTokens: 10, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	const common = 5
	prompts := scalePrompts(trace, 40, common)
	met := 0
	for i := range prompts {
		a, ra := &prompts[i], &trace.Requests[i]
		if n := len(a.Local) - common; n > ra.Input/blockTokens || n < ra.Input/blockTokens-replay.MooncakeBlock/blockTokens || len(a.Sequence) != len(a.Local) || a.Tokens != ra.Input+common*blockTokens {
			t.Fatalf("prompt %d of %d tokens: %d and %d blocks, %d tokens", i, ra.Input, len(a.Local), len(a.Sequence), a.Tokens)
		}
		for j := range i {
			b, rb := &prompts[j], &trace.Requests[j]
			want := 0
			for want < min(len(ra.Blocks), len(rb.Blocks)) && ra.Blocks[want] == rb.Blocks[want] {
				want++
			}
			got := 0
			for got < min(len(a.Sequence), len(b.Sequence)) && a.Sequence[got] == b.Sequence[got] {
				got++
			}
			if got != min(common+want*replay.MooncakeBlock/blockTokens, len(a.Sequence), len(b.Sequence)) {
				t.Fatalf("prompts %d and %d have %d blocks in common, of %d large ones", i, j, got, want)
			}
			if want > 0 {
				met++
			}
		}
	}
	if met == 0 || slices.Equal(prompts[0].Local, prompts[1].Local) {
		t.Fatal("no prompts with a common beginning, or all the same")
	}
}
