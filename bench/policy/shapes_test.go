// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/bench/replay"
)

// Each cell has an oracle to be compared with, or says that there is none. The busiest worker counts only
// where workers are equal and stay.
func TestShapesAreSound(t *testing.T) {
	b := &Bench{}
	first, further := b.firstShapes(), b.furtherShapes()
	if len(first) != 23 {
		t.Errorf("%d first shapes, want 23", len(first))
	}
	bounds, seen := map[string]bool{}, map[string]bool{}
	for _, c := range slices.Concat(first, further) {
		if seen[c.name] {
			t.Errorf("two cells are named %q", c.name)
		}
		seen[c.name] = true
		bounds[c.name] = c.bound == ""
	}
	kinds := map[string]int{}
	for _, c := range slices.Concat(first, further) {
		var s replay.Scenario
		c.set(&s)
		if c.bound != noOracle && !bounds[cmp.Or(c.bound, c.name)] {
			t.Errorf("%s: no oracle plays %q", c.name, c.bound)
		}
		if (s.Approximate || s.Groups > 1 || s.Replicas > 1) != (c.bound != "" && c.bound != noOracle) {
			t.Errorf("%s: the bound is %q, want another cell's oracle if and only if there are guesses, groups or replicas", c.name, c.bound)
		}
		if c.few && (len(s.Changes) > 0 || len(s.Speeds) > 0) {
			t.Errorf("%s: the busiest worker is judged though the workers differ", c.name)
		}
		if (s.Predict == 0) != s.Approximate {
			t.Errorf("%s: prediction %v, approximate %v", c.name, s.Predict, s.Approximate)
		}
		for kind, is := range map[string]bool{
			"few prefixes": c.few, "closed loops": !c.open, "new workers": len(s.Changes) == 4, "mixed speeds": len(s.Speeds) == 4,
			"no events": s.Approximate, "groups": s.Groups == 4, "replicas": s.Replicas == 4, "bursts": strings.Contains(c.name, "bursts"),
			"best of n": strings.Contains(c.name, "best of"), "64 workers": s.Workers == 64,
		} {
			if is {
				kinds[kind]++
			}
		}
	}
	for _, kind := range []string{"few prefixes", "closed loops", "new workers", "mixed speeds", "no events", "groups", "replicas", "bursts", "best of n", "64 workers"} {
		if kinds[kind] < 2 {
			t.Errorf("%d cells with %s, want 2 or more", kinds[kind], kind)
		}
	}
	if got := publicShapes(first); len(got) != 6 {
		t.Errorf("%d public workloads, want 6", len(got))
	}
}

// Generated cells make their trace, with the seed of the simulation.
func TestGeneratedShapes(t *testing.T) {
	c := equalPrompts()
	one, two := c.trace(1), c.trace(2)
	if len(one.Requests) != 400 || slices.EqualFunc(one.Requests, two.Requests, func(a, b replay.Request) bool { return a.At == b.At }) {
		t.Errorf("%d requests, want 400 that differ by seed", len(one.Requests))
	}
	for i := range 8 {
		if !slices.Equal(one.Requests[i].Blocks, one.Requests[0].Blocks) {
			t.Errorf("prompt %d differs", i)
		}
	}
}

// equalResults gives all rules the same results in all cells of the figures.
func equalResults(cells []cell) (all []Measured) {
	for _, c := range cells {
		for _, rule := range append(allRules(), noDecode) {
			m := fixed(c.name, rule, 2, 10)
			m.TTFTp99, m.E2Ep99, m.TPOT, m.Busiest = single(4), single(20), single(15), single(1.1)
			all = append(all, m)
		}
	}
	return all
}

func figureWith(t *testing.T, b *Bench, first, further []cell, all []Measured, text ...string) (median float64, met bool, what string) {
	t.Helper()
	for _, f := range b.shapeFigures("", first, further, all) {
		if !slices.ContainsFunc(text, func(part string) bool { return !strings.Contains(f.What, part) }) {
			return f.Median, f.Met, f.What
		}
	}
	t.Fatalf("no figure with %q", text)
	return 0, false, ""
}

// Rules that are all alike meet all targets. A result of one cell that is worse changes the figure about it,
// and the figure names the cell.
func TestShapeFigures(t *testing.T) {
	b := &Bench{Log: io.Discard}
	first, further := b.firstShapes(), b.furtherShapes()
	cells := slices.Concat(first, further)
	for _, f := range b.shapeFigures("x: ", first, further, equalResults(cells)) {
		if want := map[bool]float64{true: 1.1, false: 1}[strings.Contains(f.What, "busiest")]; !f.Met || f.Median < want-1e-9 || f.Median > want+1e-9 || !strings.HasPrefix(f.What, "x: ") {
			t.Errorf("%+v", f)
		}
	}
	const hot, other = "h16-1x15k", "1 prefix of 30k, 64 workers, 95 %"
	for _, c := range []struct {
		cell, rule string
		change     func(m *Measured)
		text       []string
		want       float64
	}{
		{hot, defaultRule, func(m *Measured) { m.TTFT = single(2 << 23) }, []string{"mean TTFT", "oracle", "23 cells", hot}, 2},
		{hot, defaultRule, func(m *Measured) { m.TTFTp99 = single(4 << 23) }, []string{"p99 TTFT", "oracle", "23 cells", hot}, 2},
		{hot, defaultRule, func(m *Measured) { m.E2Ep99 = single(20 << 23) }, []string{"p99 E2E", "oracle", "23 cells", hot}, 2},
		{other, oracleRule, func(m *Measured) { m.E2E = single(5) }, []string{"mean E2E", "oracle", "further cells", other}, 1.01},
		{other, "lmetric", func(m *Measured) { m.TTFT = single(1) }, []string{"mean TTFT", "best other", other + ", lmetric"}, 2},
		{hot, "dynamo", func(m *Measured) { m.E2E = single(8) }, []string{"mean E2E", "best other", hot + ", dynamo"}, 1.25},
		{hot, "round-robin", func(m *Measured) { m.TPOT = single(10) }, []string{"time per token", hot + ", round-robin"}, 1.5},
		{other, defaultRule, func(m *Measured) { m.Busiest = single(16) }, []string{"busiest", other}, 16},
		{"t-conv2", noDecode, func(m *Measured) { m.TTFT = single(1) }, []string{"mean TTFT", "worst of 6 public", "t-conv2"}, 2},
		{"ag32-8", noDecode, func(m *Measured) { m.E2E = single(9) }, []string{"mean E2E", "worst of 6 public", "ag32-8"}, 10. / 9},
		{equalPrompts().name, "round-robin", func(m *Measured) { m.TTFT = single(1) }, []string{"round robin's", equalPrompts().name}, 2},
	} {
		all := equalResults(cells)
		c.change(find(all, c.cell, c.rule))
		if got, met, what := figureWith(t, b, first, further, all, c.text...); got < .999*c.want || got > 1.02*c.want || met && c.want > 1.05 {
			t.Errorf("%s: %v, met %v, want %v", what, got, met, c.want)
		}
	}
}

// Comparisons with other rules leave out open cells in which the oracle is saturated.
func TestSaturatedCellsAreLeftOut(t *testing.T) {
	b := &Bench{}
	first, further := b.firstShapes(), b.furtherShapes()
	all := equalResults(slices.Concat(first, further))
	find(all, "few-short", "lmetric").TTFT = single(1)
	find(all, "few-short", oracleRule).TTFTp90 = single(saturated + 1)
	find(all, "ag32-8", oracleRule).TTFTp90 = single(saturated + 1)
	if got, met, what := figureWith(t, b, first, further, all, "mean TTFT", "best other"); got != 1 || !met {
		t.Errorf("%s: %v", what, got)
	}
	find(all, "ag32-8", "lmetric").TTFT = single(1)
	if got, _, what := figureWith(t, b, first, further, all, "mean TTFT", "best other"); got != 2 {
		t.Errorf("%s: %v; a closed loop counts", what, got)
	}
}

// The table of all rules has the geometric means over the oracle's results.
func TestJudge(t *testing.T) {
	cells := []cell{{name: "a", few: true}, {name: "b"}, {name: "b without events", bound: "b"}, {name: "slow", bound: noOracle}}
	all := equalResults(cells)
	find(all, "a", "lmetric").TTFT = single(16)
	find(all, "a", "lmetric").Busiest = single(1.7)
	find(all, "b", "lmetric").Busiest = single(9)
	find(all, "b without events", oracleRule).TTFT = single(99) // does not count
	var out strings.Builder
	judge(&out, "cells", cells, all)
	for line := range strings.Lines(out.String()) {
		if fields := strings.Fields(line); len(fields) == 7 && fields[0] == "lmetric" {
			if strings.Join(fields[1:], " ") != "2.000 1.000 1.000 1.000 1.000 1.70" {
				t.Errorf("lmetric: %v", fields)
			}
			return
		}
	}
	t.Error(out.String())
}
