// SPDX-License-Identifier: Apache-2.0

package scorer_test

import (
	"math"
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

// A prompt of ten blocks and three workers with nothing pending: the worked
// example of the cost formula.
func TestDynamoWorkedExample(t *testing.T) {
	workers := []scorer.Input{
		{PromptTokens: 160, OverlapBlocks: 2, ActiveBlocks: 10},
		{PromptTokens: 160, OverlapBlocks: 5, ActiveBlocks: 5},
		{PromptTokens: 160, OverlapBlocks: 8, ActiveBlocks: 9},
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
		costs := make([]float64, len(workers))
		for i, w := range workers {
			costs[i] = scorer.Dynamo(w, 16, c.weight)
			if costs[i] != c.want[i] {
				t.Errorf("weight %v, worker %d: cost %v, want %v", c.weight, i+1, costs[i], c.want[i])
			}
		}
		if got := scorer.Pick(costs, workers, 0); got != c.pick {
			t.Errorf("weight %v: worker %d wins, want %d", c.weight, got+1, c.pick+1)
		}
	}
}

// Four workers from idle to loaded, a prompt of 64 blocks.
func TestDynamoFixture(t *testing.T) {
	workers := []scorer.Input{
		{PromptTokens: 1024, ActiveRequests: 2, ActiveBlocks: 100, AdditionalBlocks: 64},
		{PromptTokens: 1024, OverlapBlocks: 32, PendTokens: 512, ActiveRequests: 6, ActiveBlocks: 300, AdditionalBlocks: 32},
		{PromptTokens: 1024, OverlapBlocks: 60, PendTokens: 400, ActiveRequests: 9, ActiveBlocks: 500, AdditionalBlocks: 4},
		{PromptTokens: 1024, OverlapBlocks: 60, PendTokens: 6400, ActiveRequests: 30, ActiveBlocks: 1500, AdditionalBlocks: 64},
	}
	for weight, want := range map[float64][4]float64{
		0:  {164, 332, 504, 1564},
		1:  {228, 396, 533, 1968},
		2:  {292, 460, 562, 2372},
		4:  {420, 588, 620, 3180},
		32: {2212, 2380, 1432, 14492},
	} {
		for i, w := range workers {
			if got := scorer.Dynamo(w, 16, weight); got != want[i] {
				t.Errorf("weight %v, worker %c: cost %v, want %v", weight, 'A'+i, got, want[i])
			}
		}
	}
}

func TestDynamoIsFractionalAndNeverNegative(t *testing.T) {
	if got := scorer.Dynamo(scorer.Input{PromptTokens: 24}, 16, 1); got != 1.5 {
		t.Errorf("24 tokens cost %v, want 1.5 blocks", got)
	}
	// An index that claims more than the prompt has is no reason for a bonus.
	if got := scorer.Dynamo(scorer.Input{PromptTokens: 16, OverlapBlocks: 4, ActiveBlocks: 3}, 16, 2); got != 3 {
		t.Errorf("overlap beyond the prompt: cost %v, want 3", got)
	}
}

func TestPick(t *testing.T) {
	nan := math.NaN()
	for _, c := range []struct {
		name  string
		costs []float64
		in    []scorer.Input
		u     float64
		want  int
	}{
		{"nobody", nil, nil, .5, -1},
		{"the only one", []float64{7}, make([]scorer.Input, 1), .99, 0},
		{"lowest", []float64{3, 1, 2}, make([]scorer.Input, 3), .99, 1},
		{"tie: first half of the draw", []float64{1, 2, 1}, make([]scorer.Input, 3), .49, 0},
		{"tie: second half of the draw", []float64{1, 2, 1}, make([]scorer.Input, 3), .5, 2},
		{"tie among three", []float64{1, 1, 1}, make([]scorer.Input, 3), .999999, 2},
		{"tie: fewer requests", []float64{1, 1, 1}, []scorer.Input{{ActiveRequests: 3}, {ActiveRequests: 2}, {ActiveRequests: 3}}, 0, 1},
		{"tie: fewer blocks", []float64{1, 1, 1}, []scorer.Input{{ActiveBlocks: 3}, {ActiveBlocks: 3}, {ActiveBlocks: 2}}, 0, 2},
		{"a rounding error is a tie", []float64{.1 + .2, .3}, make([]scorer.Input, 2), .9, 1},
		{"zero costs tie", []float64{0, 0}, make([]scorer.Input, 2), .9, 1},
		{"not a number never wins", []float64{nan, 1e300, nan}, make([]scorer.Input, 3), 0, 1},
		{"all not numbers: still somebody", []float64{nan, nan}, make([]scorer.Input, 2), 0, 0},
		{"infinite loses", []float64{math.Inf(1), 5}, make([]scorer.Input, 2), 0, 1},
		{"a draw of one", []float64{1, 1}, make([]scorer.Input, 2), 1, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := scorer.Pick(c.costs, c.in, c.u); got != c.want {
				t.Errorf("Pick = %d, want %d", got, c.want)
			}
		})
	}
}

func TestPickDoesNotAllocate(t *testing.T) {
	costs, in := make([]float64, 64), make([]scorer.Input, 64)
	if n := testing.AllocsPerRun(10, func() { scorer.Pick(costs, in, .5) }); n != 0 {
		t.Errorf("Pick makes %v allocations, want 0", n)
	}
}
