// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

func figure(what, unit string, target bench.Target, v Range) bench.Figure {
	return target.Figure(what, unit, v.Mean, v.Min, v.Max)
}

// speedFigures measure the simulation itself.
func (b *Bench) speedFigures() []bench.Figure {
	speed := func(t *replay.Trace) float64 {
		start := bench.CPUTime()
		bench.Must(replay.Run(context.Background(), replay.Scenario{Trace: t, Rule: bench.Must(replay.ParseRule(defaultRule)), KVBlocks: 1334, Seed: 1}))
		return float64(len(t.Requests)) / (bench.CPUTime() - start).Seconds()
	}
	agentic := b.agenticCell(64, 1334).trace(1)
	return bench.Rounds(max(3, b.Seeds), []bench.Row{
		bench.NewRow("simulated requests a second on one core, chat", "/s", bench.AtLeast(20_000)),
		bench.NewRow("simulated requests a second on one core, agentic", "/s", bench.AtLeast(2_000)),
	}, func() []float64 { return []float64{speed(b.chat), speed(agentic)} })
}

// ratio is a divided by b, seed by seed only in its mean; its range is the widest.
func ratio(a, b Range) Range { return Range{a.Mean / b.Mean, a.Min / b.Max, a.Max / b.Min} }

// cellFigures are the targets about the seven cells, all rules with prediction. Of the
// rival the better result counts, with prediction or without.
func cellFigures(fresh, shipped, larger []cell, all []Measured) (out []bench.Figure) {
	chat2, synthetic2, agentic32, agentic64 := 1, 3, 4, 5
	for _, i := range []int{synthetic2, agentic64} {
		rival := find(all, shipped[i].name, rivalRule).TTFT
		if other := find(all, fresh[i].name, rivalRule).TTFT; other.Mean < rival.Mean {
			rival = other
		}
		out = append(out, figure("mean TTFT of "+rivalRule+" over the default's, "+fresh[i].name, "×", bench.AtLeast(3), ratio(rival, find(all, shipped[i].name, defaultRule).TTFT)))
	}
	for _, c := range []struct {
		cell      int
		ttft, e2e float64
	}{{chat2, 1.10, 1.15}, {synthetic2, 1.30, 1.20}, {agentic32, 1.45, 1.20}, {agentic64, 1.45, 1.20}} {
		own, best := find(all, shipped[c.cell].name, defaultRule), find(all, shipped[c.cell].name, oracleRule)
		out = append(
			out,
			figure("mean TTFT of the default over the oracle's, "+fresh[c.cell].name, "×", bench.AtMost(c.ttft), ratio(own.TTFT, best.TTFT)),
			figure("mean E2E of the default over the oracle's, "+fresh[c.cell].name, "×", bench.AtMost(c.e2e), ratio(own.E2E, best.E2E)),
		)
	}
	open := slices.DeleteFunc(slices.Clone(shipped), func(c cell) bool { return !c.open })
	var imbalance Range
	for _, c := range open {
		if own := find(all, c.name, defaultRule); own.Imbalance.Mean > imbalance.Mean {
			imbalance = own.Imbalance
		}
	}
	open = append(open, larger...)
	w := worstE2E(open, all)
	return append(
		out,
		figure(fmt.Sprintf("mean E2E of the default over the best other rule's, worst of %d open cells: %s", len(open), w.where), "×", bench.AtMost(1.10), w.ratio),
		figure("most prompt tokens computed by a worker over the mean, worst of chat and synthetic", "×", bench.AtMost(1.3), imbalance),
		figure("token hit rate of the default, "+fresh[agentic32].name, "", bench.AtLeast(.95), find(all, shipped[agentic32].name, defaultRule).HitRate),
	)
}

// A worst is the largest ratio that was seen, and where.
type worst struct {
	ratio Range
	where string
}

func (w *worst) see(r Range, where string) {
	if r.Mean > w.ratio.Mean {
		*w = worst{r, where}
	}
}

// worstE2E returns the largest ratio of the default's mean E2E to that of another rule.
func worstE2E(cells []cell, all []Measured) (w worst) {
	for _, c := range cells {
		own := find(all, c.name, defaultRule)
		for i := range all {
			if m := &all[i]; m.Cell == c.name && m.Rule != defaultRule && m.Rule != oracleRule {
				w.see(ratio(own.E2E, m.E2E), c.name+", "+m.Rule)
			}
		}
	}
	return w
}

// rivalFigures compare the default with its rival in all cells up to 95 % load:
// closed loops, and open ones in which the oracle is not saturated.
func rivalFigures(prefix string, all []Measured) []bench.Figure {
	var ttft, e2e worst
	seen := map[string]bool{}
	n := 0
	for i := range all {
		c := all[i].Cell
		own, rival, best := find(all, c, defaultRule), find(all, c, rivalRule), find(all, c, oracleRule)
		if seen[c] || own == nil || rival == nil || best == nil {
			continue
		}
		seen[c] = true
		if best.TTFTp90.Mean > saturated && !strings.HasPrefix(c, "agentic") || strings.Contains(c, "110 % load") {
			continue
		}
		n++
		ttft.see(ratio(own.TTFT, rival.TTFT), c)
		e2e.see(ratio(own.E2E, rival.E2E), c)
	}
	compared := func(what string, w worst) bench.Figure {
		return figure(fmt.Sprintf("%smean %s of the default over %s's, worst of %d cells up to 95 %% load: %s", prefix, what, rivalRule, n, w.where), "×", bench.AtMost(1.05), w.ratio)
	}
	return []bench.Figure{compared("TTFT", ttft), compared("E2E", e2e)}
}

// lateFigures compare late events with fresh ones, predictions on.
func lateFigures(all []Measured) []bench.Figure {
	var w worst
	for i := range all {
		m := &all[i]
		if base, ok := strings.CutSuffix(m.Cell, ", events 5s late, prediction"); ok && m.Rule == defaultRule {
			w.see(ratio(m.TTFT, find(all, base+", prediction", defaultRule).TTFT), base)
		}
	}
	return []bench.Figure{figure("mean TTFT with events 5 s late over fresh ones, prediction on, worst: "+w.where, "×", bench.AtMost(1.05), w.ratio)}
}
