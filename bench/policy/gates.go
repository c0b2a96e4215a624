// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

func figure(what, unit string, target bench.Target, v Range) bench.Figure {
	return target.Figure(what, unit, v.Mean, v.Min, v.Max)
}

func single(v float64) Range { return Range{v, v, v} }

// speedFigures are how fast the simulation itself is, and whether it repeats.
func (b *Bench) speedFigures() (out []bench.Figure) {
	rule := bench.Must(replay.ParseRule(defaultRule))
	agentic := b.agenticCell(64, 1334).trace(1)
	for _, c := range []struct {
		what   string
		trace  *replay.Trace
		target bench.Target
	}{
		{"simulated requests a second on one core, chat", b.chat, bench.AtLeast(20_000)},
		{"simulated requests a second on one core, agentic", agentic, bench.AtLeast(2_000)},
	} {
		var rates []float64
		var first []byte
		same := 1.
		for range max(3, b.Seeds) {
			start := bench.CPUTime()
			r := bench.Must(replay.Run(context.Background(), replay.Scenario{Trace: c.trace, Rule: rule, KVBlocks: 1334, Seed: 1}))
			rates = append(rates, float64(len(c.trace.Requests))/(bench.CPUTime()-start).Seconds())
			text := bench.Must(json.Marshal(r))
			if first == nil {
				first = text
			} else if !bytes.Equal(first, text) {
				same = 0
			}
		}
		out = append(
			out,
			figure(c.what, "/s", c.target, newRange(rates)),
			figure("the same seed gives the same bytes, "+c.trace.Name, "", bench.Exactly(1), single(same)),
		)
	}
	return out
}

// ratio is a divided by b, seed by seed only in its mean; its range is the widest.
func ratio(a, b Range) Range { return Range{a.Mean / b.Mean, a.Min / b.Max, a.Max / b.Min} }

// contenders are the rules whose mean E2E is at most a quarter above the default's in
// one of the open cells, and the default itself.
func contenders(cells []cell, all []Measured) (rules []string) {
	for i := range all {
		m := &all[i]
		for _, c := range cells {
			if c.open && c.name == m.Cell && m.Rule != oracleRule && m.E2E.Mean <= 1.25*find(all, c.name, defaultRule).E2E.Mean && !slices.Contains(rules, m.Rule) {
				rules = append(rules, m.Rule)
			}
		}
	}
	return rules
}

// cellFigures are the targets about the seven cells, all rules with prediction. Of the
// rival the better result counts, with prediction or without.
func cellFigures(fresh, shipped, larger []cell, all []Measured) (out []bench.Figure) {
	synthetic2, agentic32, agentic64 := 3, 4, 5
	for _, c := range []int{synthetic2, agentic64} {
		rival := find(all, shipped[c].name, rivalRule)
		if other := find(all, fresh[c].name, rivalRule); other.TTFT.Mean < rival.TTFT.Mean {
			rival = other
		}
		out = append(out, figure("mean TTFT of "+rivalRule+" over the default's, "+fresh[c].name, "×", bench.AtLeast(3),
			ratio(rival.TTFT, find(all, shipped[c].name, defaultRule).TTFT)))
	}
	for _, c := range []struct {
		cell      int
		ttft, e2e float64
	}{{1, 1.10, 1.15}, {synthetic2, 1.30, 1.20}, {agentic32, 1.45, 1.20}, {agentic64, 1.45, 1.20}} {
		own, best := find(all, shipped[c.cell].name, defaultRule), find(all, shipped[c.cell].name, oracleRule)
		out = append(
			out,
			figure("mean TTFT of the default over the oracle's, "+fresh[c.cell].name, "×", bench.AtMost(c.ttft), ratio(own.TTFT, best.TTFT)),
			// Where the distance lies.
			figure("  … of the distance in TTFT: waiting for others' prefill", "s", bench.Target{}, single(own.Wait.Mean-best.Wait.Mean)),
			figure("  … and computing the prompt, in steps that decodes make longer", "s", bench.Target{}, single(own.TTFT.Mean-own.Wait.Mean-best.TTFT.Mean+best.Wait.Mean)),
			figure("mean E2E of the default over the oracle's, "+fresh[c.cell].name, "×", bench.AtMost(c.e2e), ratio(own.E2E, best.E2E)),
			figure("  … of the distance in E2E: between two tokens", "ms", bench.Target{}, single(own.TPOT.Mean-best.TPOT.Mean)),
		)
	}
	var open []cell
	imbalance := single(0)
	for _, c := range shipped {
		if !c.open {
			continue
		}
		open = append(open, c)
		if own := find(all, c.name, defaultRule); own.Imbalance.Mean > imbalance.Mean {
			imbalance = own.Imbalance
		}
	}
	if n := len(larger); n > 0 {
		w := worstE2E(larger[n-1:], all)
		out = append(out, figure("mean E2E of the default over the best other rule's, saturated: "+w.where, "×", bench.Target{}, w.ratio))
		open = append(open, larger[:n-1]...)
	}
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
