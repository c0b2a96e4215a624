// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"context"
	"io"
	"path/filepath"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

// Fleet compares several routers with one: replicas that exchange their requests, and
// router groups below an upper tier. It writes the results to dir/fleet.jsonl, prints them
// to w, and returns the figures with their targets.
func (b *Bench) Fleet(ctx context.Context, w io.Writer, dir string) (figures []bench.Figure) {
	b.load()
	var all []Measured
	for _, part := range []struct {
		name        string
		seeds       int
		comparisons []comparison
	}{
		{"replicas", b.Seeds, b.replicaComparisons()},
		{"groups", 2 * b.Seeds, b.groupComparisons()}, // one seed can be off by a third
	} {
		m, f := b.compare(ctx, part.name, part.comparisons, part.seeds)
		all, figures = append(all, m...), append(figures, f...)
	}
	record(w, filepath.Join(dir, "fleet.jsonl"), all)
	return figures
}

// compare plays the cells of comparisons.
func (b *Bench) compare(ctx context.Context, name string, comparisons []comparison, seeds int) (all []Measured, figures []bench.Figure) {
	var cells []cell
	for _, c := range comparisons {
		cells = append(cells, c.one, c.cell)
	}
	all = b.play(ctx, name, cells, []string{defaultRule}, seeds)
	for _, c := range comparisons {
		figures = append(figures, c.figures(all)...)
	}
	return all, figures
}

// comparison compares a cell with another one: that of one router, or of aggregated workers.
type comparison struct {
	what      string
	cell, one cell
	ttft, e2e bench.Target // of the first divided by the second; without text: for information
	tpot      bool         // also compare the times between tokens
}

func (c *comparison) figures(all []Measured) []bench.Figure {
	m, one := find(all, c.cell.name, defaultRule), find(all, c.one.name, defaultRule)
	out := []bench.Figure{
		figure("mean TTFT of "+c.what, "×", c.ttft, ratio(m.TTFT, one.TTFT)),
		figure("mean E2E of "+c.what, "×", c.e2e, ratio(m.E2E, one.E2E)),
	}
	if c.tpot {
		out = append(
			out,
			figure("mean TPOT of "+c.what, "×", bench.Target{}, ratio(m.TPOT, one.TPOT)),
			figure("p99 TPOT of "+c.what, "×", bench.Target{}, ratio(m.TPOTp99, one.TPOTp99)),
		)
	}
	return out
}

// replicaComparisons are of four replicas and one, with events and without.
func (b *Bench) replicaComparisons() (out []comparison) {
	const delay = 10 * time.Millisecond
	for _, c := range b.three() {
		for _, kind := range []struct {
			name string
			set  func(s *replay.Scenario)
			ttft bench.Target
		}{
			{"", predicting, bench.AtMost(1.10)},
			{"approximate ", func(s *replay.Scenario) { s.Approximate = true }, bench.AtMost(1.15)},
		} {
			one := c.with(kind.name+"replica", kind.set)
			four := func(what string, delay time.Duration) cell {
				return one.with("4, "+what, func(s *replay.Scenario) { s.Replicas, s.SyncDelay = 4, delay })
			}
			out = append(
				out,
				comparison{what: "four synced " + kind.name + "replicas over one, " + c.name, cell: four(delay.String(), delay), one: one, ttft: kind.ttft},
				comparison{what: "four " + kind.name + "replicas that are not synced over one, " + c.name, cell: four("no sync", -1), one: one},
			)
		}
	}
	return out
}

// groupComparisons are of 32 workers in four groups and in none.
func (b *Bench) groupComparisons() (out []comparison) {
	for _, c := range []cell{b.chatCell(8, 2000), b.syntheticCell(6, 2000), b.agenticCell(256, 1334)} {
		flat := c.with("32 workers", func(s *replay.Scenario) { s.Workers = 32 }).with("prediction", predicting)
		groups := flat.with("4 groups, summaries every 1s", func(s *replay.Scenario) { s.Groups, s.SummaryAge = 4, time.Second })
		out = append(out, comparison{
			what: "four groups of eight workers over 32 in none, " + c.name, cell: groups, one: flat, ttft: bench.AtMost(1.15), e2e: bench.AtMost(1.05),
		})
	}
	return out
}
