// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"slices"
	"testing"

	"github.com/kvroute/kvroute/bench"
)

func TestCompared(t *testing.T) {
	for _, c := range []struct {
		changed, unchanged []float64
		target             string
		met                bool
	}{
		{[]float64{1, 1.03, 1.1}, []float64{1, 1.01, .99}, "≤ 1.03", true},
		{[]float64{1, 1.04, 1.1}, []float64{1, 1.01, .99}, "≤ 1.03", false},
		{[]float64{1, 1.2, 1.3}, []float64{1, 1.2, 1.1}, "≤ 1.2", true},
		{[]float64{1, 1.2, 1.3}, []float64{1, 1, .8}, "≤ 1.25", true}, // 1.25 in the other direction
	} {
		got := compared("a", c.changed, c.unchanged)
		if len(got) != 2 || got[0].Target != c.target || got[0].Met != c.met || got[1].Target != "" {
			t.Errorf("%v, %v: got %+v, want target %q, met %v", c.changed, c.unchanged, got, c.target, c.met)
		}
	}
}

func TestCostRatio(t *testing.T) {
	row := func(target bench.Target, value float64) bench.Figure { return bench.NewFigure("a", "", target, value) }
	if got := costRatio(row(bench.AtMost(9), 3), row(bench.AtMost(9), 2)); got < 1.49 || got > 1.51 {
		t.Errorf("3 µs against 2 µs cost %v, want 1.5", got)
	}
	if got := costRatio(row(bench.AtLeast(9), 2), row(bench.AtLeast(9), 3)); got < 1.49 || got > 1.51 {
		t.Errorf("2 M/s against 3 M/s cost %v, want 1.5", got)
	}
	if got := costRatio(row(bench.AtMost(0), 0), row(bench.AtMost(0), 0)); got != 1 {
		t.Errorf("0 allocations against 0 cost %v, want 1", got)
	}
	if got := costRatio(row(bench.AtMost(0), 1), row(bench.AtMost(0), 0)); got < 1000 {
		t.Errorf("1 allocation against 0 costs %v, want more than any target", got)
	}
}

func TestBenchmarks(t *testing.T) {
	got := benchmarks(`goos: linux
BenchmarkDecision/hashes-2         	  726374	      3190 ns/op	    313450 decisions/s	       0 B/op	       0 allocs/op
BenchmarkDecision/tokens           	  300000	      81.5 ns/op
PASS
`)
	want := []bench.Figure{
		bench.NewFigure("BenchmarkDecision/hashes", "ns", bench.Target{}, 3190),
		bench.NewFigure("BenchmarkDecision/tokens", "ns", bench.Target{}, 81.5),
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
