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
)

// manySeeds are for the rules that the targets divide by each other.
const manySeeds = 10

// Figures simulates all cells, writes the results of each rule to dir/policy.jsonl, prints
// them to w, and returns the figures with their targets.
func (b *Bench) Figures(ctx context.Context, w io.Writer, dir string) []bench.Figure {
	b.load()
	figures := b.speedFigures()
	fresh := b.cells()
	var shipped []cell
	for _, c := range fresh {
		shipped = append(shipped, c.with("prediction", predicting))
	}
	larger := b.largerCells()
	b.log("the %d cells, without prediction and with it, and %d larger ones", len(fresh), len(larger))
	counted := b.play(ctx, slices.Concat(fresh, shipped), targetRules(), max(b.Seeds, manySeeds))
	others := b.play(ctx, slices.Concat(fresh, shipped), otherRules(), b.Seeds)
	others = append(others, b.play(ctx, larger, append([]string{defaultRule, rivalRule}, otherRules()...), b.Seeds)...)
	figures = append(figures, cellFigures(fresh, shipped, larger, slices.Concat(counted, others))...)
	loads := b.loadCells(ctx)
	b.log("one thing at a time")
	counted = append(counted, b.play(ctx, append(b.axisCells(), loads...), targetRules(), b.Seeds)...)
	others = append(others, b.play(ctx, loads, []string{"round-robin"}, b.Seeds)...) // for the plots
	unseen := b.play(ctx, unseenCells(), targetRules(), b.Seeds)
	record(w, filepath.Join(dir, "policy.jsonl"), slices.Concat(counted, others, unseen))
	return slices.Concat(figures, rivalFigures("", counted), rivalFigures("generated, unseen shapes: ", unseen), lateFigures(counted))
}
