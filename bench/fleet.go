// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench/replay"
)

// FleetBench holds several routers against one that knows all: replicas that tell each
// other what they book, and router groups below an upper tier; and measures what the
// telling costs.
type FleetBench struct {
	Traces string    // folder with the traces
	Seeds  int       // of each cell; targets want 3 or more
	Bus    []string  // command that does what [ServeBus] does
	Log    io.Writer // told what is being measured
}

// Figures measures everything, writes what was simulated to dir/fleet.jsonl, prints it
// to w, and returns the figures with their targets.
func (b *FleetBench) Figures(ctx context.Context, w io.Writer, dir string) (figures []Figure, err error) {
	p := &PolicyBench{Traces: b.Traces, Seeds: b.Seeds, Log: b.Log}
	if err := p.load(); err != nil {
		return nil, err
	}
	// One seed of groups can be off by a third, so there are more of them.
	wide := *p
	wide.Seeds = 2 * b.Seeds
	var all []Measured
	for _, part := range []struct {
		name        string
		bench       *PolicyBench
		comparisons []comparison
	}{{"replicas", p, replicaComparisons(p)}, {"groups", &wide, groupComparisons(p)}} {
		var cells []cell
		for _, c := range part.comparisons {
			for _, one := range []cell{c.one, c.cell} {
				if !slices.ContainsFunc(cells, func(c cell) bool { return c.name == one.name }) {
					cells = append(cells, one)
				}
			}
		}
		p.log("%s: %d cells with %d seeds", part.name, len(cells), part.bench.Seeds)
		m, err := part.bench.play(ctx, cells, []string{defaultRule})
		if err != nil {
			return nil, err
		}
		for _, c := range part.comparisons {
			figures = append(figures, c.figures(m)...)
		}
		all = append(all, m...)
	}
	if err := printMeasured(w, all); err != nil {
		return nil, err
	}
	if err := writeLines(filepath.Join(dir, "fleet.jsonl"), all); err != nil {
		return nil, err
	}
	for _, part := range []struct {
		name    string
		measure func() ([]Figure, error)
	}{
		{"what replicas cost", func() ([]Figure, error) { return syncCost(b.Bus) }}, //nolint:contextcheck // as below
		{"what groups tell", tellBytes},
		{"decisions among groups", func() ([]Figure, error) { return scaleFigures(b.Traces) }}, //nolint:contextcheck // it takes seconds
	} {
		p.log("%s", part.name)
		f, err := part.measure()
		if err != nil {
			return nil, err
		}
		figures = append(figures, f...)
	}
	return figures, nil
}

// comparison holds a cell against the cell of one router.
type comparison struct {
	what      string
	cell, one cell
	ttft, e2e limit // of the first divided by the second; without text: for information
}

func (c *comparison) figures(all []Measured) []Figure {
	several, one := find(all, c.cell.name, defaultRule), find(all, c.one.name, defaultRule)
	return []Figure{
		figure("mean TTFT of "+c.what, "×", c.ttft, ratio(several.TTFT, one.TTFT)),
		figure("mean E2E of "+c.what, "×", c.e2e, ratio(several.E2E, one.E2E)),
	}
}

// replicaComparisons are of four replicas and one, with events and without.
func replicaComparisons(p *PolicyBench) (out []comparison) {
	const delay = 10 * time.Millisecond
	for _, c := range []cell{p.chatCell(1.5, 2000), p.syntheticCell(1.5, 2000), p.agenticCell(32, 1334)} {
		for _, kind := range []struct {
			name string
			set  func(s *replay.Scenario)
			ttft limit
		}{
			{"", predicting, atMost(1.10)},
			{"approximate ", func(s *replay.Scenario) { s.Approximate = true }, atMost(1.15)},
		} {
			one := c.with(kind.name+"replica", kind.set)
			four := func(what string, delay time.Duration) cell {
				return one.with("4, "+what, func(s *replay.Scenario) { s.Replicas, s.SyncDelay = 4, delay })
			}
			out = append(
				out,
				comparison{"four synced " + kind.name + "replicas over one, " + c.name, four(delay.String(), delay), one, kind.ttft, limit{}},
				comparison{"four " + kind.name + "replicas that are not synced over one, " + c.name, four("no sync", -1), one, limit{}, limit{}},
			)
		}
	}
	return out
}

// groupComparisons are of 32 workers in four groups and in none.
func groupComparisons(p *PolicyBench) (out []comparison) {
	for _, c := range []cell{p.chatCell(8, 2000), p.syntheticCell(6, 2000), p.agenticCell(256, 1334)} {
		flat := c.with("32 workers", func(s *replay.Scenario) { s.Workers = 32 }).with("prediction", predicting)
		groups := flat.with("4 groups, summaries every 1s", func(s *replay.Scenario) { s.Groups, s.SummaryAge = 4, time.Second })
		out = append(out, comparison{"four groups of eight workers over 32 in none, " + c.name, groups, flat, atMost(1.15), atMost(1.05)})
	}
	return out
}
