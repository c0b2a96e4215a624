// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"io"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/replay"
)

// What is held against one router differs from it in what its name says, and in nothing
// else.
func TestFleetComparisons(t *testing.T) {
	p := &PolicyBench{Log: io.Discard}
	targets := 0
	for _, c := range append(replicaComparisons(p), groupComparisons(p)...) {
		var one, several replay.Scenario
		c.one.set(&one)
		c.cell.set(&several)
		if several.Groups == 4 {
			if several.SummaryAge != time.Second || several.Workers != 32 || several.Predict == 0 {
				t.Errorf("%s: %+v", c.what, several)
			}
			several.Groups, several.SummaryAge = 0, 0
		} else {
			if several.Replicas != 4 || (several.SyncDelay == -1) != (c.ttft.met == nil) {
				t.Errorf("%s: %+v", c.what, several)
			}
			several.Replicas, several.SyncDelay = 0, 0
		}
		if one.Workers != several.Workers || one.KVBlocks != several.KVBlocks || one.Speedup != several.Speedup || one.Approximate != several.Approximate ||
			one.Predict != several.Predict || one.Groups != several.Groups || one.Replicas != several.Replicas {
			t.Errorf("%s: %+v against %+v", c.what, several, one)
		}
		all := []Measured{
			{Cell: c.one.name, Rule: defaultRule, TTFT: single(2), E2E: single(10)},
			{Cell: c.cell.name, Rule: defaultRule, TTFT: single(2.6), E2E: single(10.4)},
		}
		for i, f := range c.figures(all) {
			if want := []float64{1.3, 1.04}[i]; f.Median != want {
				t.Errorf("%s: %v, want %v", f.What, f.Median, want)
			}
			if f.Target == "" {
				continue
			}
			if targets++; f.Met != (i == 1) {
				t.Errorf("%s %s: met %v", f.What, f.Target, f.Met)
			}
		}
	}
	if targets != 12 {
		t.Errorf("%d targets, want 12", targets)
	}
}

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
		if n := len(a.Local) - common; n > ra.Input/scaleBlock || n < ra.Input/scaleBlock-replay.MooncakeBlock/scaleBlock || len(a.Sequence) != len(a.Local) || a.Tokens != ra.Input+common*scaleBlock {
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
			if got != min(common+want*replay.MooncakeBlock/scaleBlock, len(a.Sequence), len(b.Sequence)) {
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
