// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"context"
	"io"
	"path/filepath"
	"slices"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

// Split compares four prefill and four decode workers with eight aggregated ones, on traces whose
// prompts have 12,000 tokens or more on average. It writes the results to dir/split.jsonl, prints
// them to w, and returns the figures. These have no targets: either outcome is a result.
func (b *Bench) Split(ctx context.Context, w io.Writer, dir string) []bench.Figure {
	b.load()
	all, figures := b.compare(ctx, "prefill and decode workers", b.splitComparisons(), b.Seeds)
	record(w, filepath.Join(dir, "split.jsonl"), all)
	return figures
}

func (b *Bench) splitComparisons() (out []comparison) {
	for _, c := range slices.Concat(b.recorded(.5, 2000), b.recorded(1, 2000), []cell{b.agenticCell(32, 1334), b.agenticCell(32, 5000)}) {
		one := c.with("prediction", predicting)
		always := one.with("4 prefill, 4 decode", func(s *replay.Scenario) { s.PrefillWorkers = 4 })
		conditional := always.with("isl_bounding", func(s *replay.Scenario) { s.ConditionalDisaggregation = "isl_bounding" })
		out = append(
			out,
			comparison{what: "4 prefill and 4 decode workers over 8 aggregated, " + c.name, cell: always, one: one, tpot: true},
			comparison{what: "4 prefill and 4 decode workers with isl_bounding over 8 aggregated, " + c.name, cell: conditional, one: one, tpot: true},
		)
	}
	return out
}
