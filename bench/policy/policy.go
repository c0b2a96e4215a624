// SPDX-License-Identifier: Apache-2.0

// Package policy compares ways to choose a worker in simulations ([replay]): rules with
// each other, several routers with one, prefill and decode workers with aggregated ones.
// ../README.md is the method.
package policy

import (
	"context"
	"io"
	"path/filepath"
	"slices"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

// Figures simulates all cells, writes the results of each rule to dir/policy.jsonl, prints
// them to w, and returns the figures with their targets.
func (b *Bench) Figures(ctx context.Context, w io.Writer, dir string) []bench.Figure {
	b.load()
	figures := b.speedFigures()
	first, further, seven, axis := b.firstShapes(), b.furtherShapes(), b.sevenCells(), b.axisCells()
	all := slices.Concat(
		b.play(ctx, "23 shapes", first, allRules(), b.Seeds),
		b.play(ctx, "public workloads", publicShapes(first), []string{noDecode}, b.Seeds),
		b.play(ctx, "further shapes", further, allRules(), b.Seeds),
		b.play(ctx, "the table of all rules", seven, append(allRules(), otherRules()...), b.Seeds),
		b.play(ctx, "one thing at a time", axis, targetRules(), b.Seeds),
	)
	speeds := b.speedComparisons()
	var fast []cell
	for _, c := range speeds {
		fast = append(fast, c.one)
	}
	all = append(all, b.play(ctx, "fast workers alone", fast, []string{defaultRule}, b.Seeds)...)
	figures = append(figures, b.shapeFigures("", first, further, all)...)
	for _, c := range speeds {
		figures = append(figures, c.figures(all)...)
	}
	figures = append(figures, rivalFigures(slices.Concat(first, further, seven, axis), all)...)
	figures = append(figures, b.olderFigures(all)...)

	// Engines that read a shared prefix once a step bear more load, and one busy worker does less harm.
	again := slices.Concat(
		b.play(ctx, sharing+", 23 shapes", shared(first), allRules(), sharedSeeds),
		b.play(ctx, sharing+", public workloads", shared(publicShapes(first)), []string{noDecode}, sharedSeeds),
		b.play(ctx, sharing+", further shapes", shared(further), allRules(), sharedSeeds),
	)
	figures = append(figures, b.shapeFigures(sharing+": ", first, further, again)...)
	for i := range again {
		again[i].Cell += ", " + sharing
	}
	all = append(all, again...)
	record(w, filepath.Join(dir, "policy.jsonl"), all)
	judge(w, "23 shapes", first, all)
	judge(w, "further shapes", further, all)
	return figures
}

// The second pass over the shapes.
const (
	sharing     = "shared-prefix attention"
	sharedSeeds = 1
)

// shared returns the cells with shared-prefix attention, under their names.
func shared(cells []cell) (out []cell) {
	for _, c := range cells {
		out = append(out, c.also(func(s *replay.Scenario) { s.SharedAttention = true }))
	}
	return out
}
