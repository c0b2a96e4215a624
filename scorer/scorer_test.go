// SPDX-License-Identifier: Apache-2.0

package scorer_test

import (
	"math"
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

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

// Tables of the temperature, with its limits.
func TestSoftmax(t *testing.T) {
	const huge = math.MaxFloat64
	inf, nan := math.Inf(1), math.NaN()
	for _, c := range []struct {
		costs       []float64
		temperature float64
		want        []float64
	}{
		{[]float64{18, 10, 11}, 1, []float64{.163475, .444370, .392155}},
		{[]float64{18, 10, 11}, .5, []float64{.070703, .522429, .406868}},
		{[]float64{18, 10, 11}, .1, []float64{.000035, .777272, .222692}},
		{[]float64{26, 15, 13}, .5, []float64{.072353, .393024, .534623}},
		{[]float64{-huge, huge}, 1, []float64{.731059, .268941}},
		{[]float64{7, 7, 7}, 1, []float64{1. / 3, 1. / 3, 1. / 3}},
		{[]float64{inf, 10, nan, 10}, 1, []float64{0, .5, 0, .5}},
		{[]float64{inf, nan}, 1, []float64{.5, .5}},
		{[]float64{1, 1 + 1e-300, 2}, 1e-300, []float64{.5, .5, 0}},
		{[]float64{0, 5e-324}, 5e-324, []float64{1, 0}},
	} {
		p := make([]float64, len(c.costs))
		scorer.Probabilities(c.costs, c.temperature, p)
		for i := range p {
			if !(math.Abs(p[i]-c.want[i]) < 1e-6) {
				t.Errorf("costs %v, temperature %v: probabilities %v, want %v", c.costs, c.temperature, p, c.want)
				break
			}
		}
	}
}

func TestSoftmaxDraws(t *testing.T) {
	table, equal, inf := []float64{18, 10, 11}, []float64{3, 3, 3}, math.Inf(1)
	for _, c := range []struct {
		costs []float64
		u     float64
		want  int
	}{
		{table, .163, 0},
		{table, .164, 1},
		{table, .607, 1},
		{table, .608, 2},
		{table, 0, 0},
		{table, 1, 2},
		{[]float64{-math.MaxFloat64, math.MaxFloat64}, .6, 0},
		{equal, .34, 1},
		{equal, .33, 0},
		{equal, .67, 2},
		{[]float64{inf, 4, inf}, 0, 1},
		{[]float64{inf, 4, inf}, 1, 1},
		{[]float64{inf, math.NaN()}, .9, 1},
		{nil, .5, -1},
	} {
		if got := scorer.Softmax(c.costs, 1, c.u); got != c.want {
			t.Errorf("costs %v, u %v: candidate %d, want %d", c.costs, c.u, got, c.want)
		}
	}
}

func TestDraw(t *testing.T) {
	if a, b := scorer.Draw(1, scorer.DrawKey("r1")), scorer.Draw(1, scorer.DrawKey("r1")); a != b {
		t.Errorf("the same request draws %v and %v", a, b)
	}
	var sum float64
	seen := map[float64]bool{}
	for i := range uint64(10000) {
		u := scorer.Draw(7, i)
		if u < 0 || u >= 1 || seen[u] {
			t.Fatalf("draw %d is %v: out of range or seen before", i, u)
		}
		seen[u] = true
		sum += u
	}
	if mean := sum / 10000; mean < .49 || mean > .51 {
		t.Errorf("the mean of 10,000 draws is %v, want .5", mean)
	}
	if scorer.Draw(1, 5) == scorer.Draw(2, 5) {
		t.Error("the seed does not matter")
	}
}
