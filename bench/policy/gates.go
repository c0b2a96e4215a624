// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

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

// A measure is one number of a result that rules are judged by.
type measure struct {
	name string
	of   func(m *Measured) Range
}

//nolint:gochecknoglobals // a table
var (
	ttft    = measure{"mean TTFT", func(m *Measured) Range { return m.TTFT }}
	ttftP99 = measure{"p99 TTFT", func(m *Measured) Range { return m.TTFTp99 }}
	e2e     = measure{"mean E2E", func(m *Measured) Range { return m.E2E }}
	e2eP99  = measure{"p99 E2E", func(m *Measured) Range { return m.E2Ep99 }}
	tpot    = measure{"mean time per token", func(m *Measured) Range { return m.TPOT }}
)

// against returns the ratio of two rules' results in a cell. The oracle's result is that of the cell's bound.
func (k measure) against(c cell, all []Measured, rule, other string) Range {
	of := func(rule string) Range {
		name := c.name
		if rule == oracleRule {
			name = cmp.Or(c.bound, name)
		}
		return k.of(find(all, name, rule))
	}
	return ratio(of(rule), of(other))
}

// mean returns the geometric mean of the ratio of two rules over the cells that have an oracle, the least
// ratio and the worst one.
func (k measure) mean(cells []cell, all []Measured, rule, other string) (mean, least float64, w worst) {
	sum, n := 0., 0.
	least = math.Inf(1)
	for _, c := range cells {
		if c.bound == noOracle {
			continue
		}
		r := k.against(c, all, rule, other)
		sum, n, least = sum+math.Log(r.Mean), n+1, min(least, r.Mean)
		w.see(r, c.name)
	}
	return math.Exp(sum / n), least, w
}

// geometric is the figure of the mean ratio of the default to another rule, which has a name for readers.
func (k measure) geometric(what string, target float64, cells []cell, all []Measured, other, name string) bench.Figure {
	mean, least, w := k.mean(cells, all, defaultRule, other)
	return bench.AtMost(target).Figure(
		fmt.Sprintf("%s of the default over that of %s, geometric mean of %s; worst: %s", k.name, name, what, w.where), "×", mean, least, w.ratio.Mean)
}

// best returns the other router's rule with the lowest value in a cell. Of equal ones it is the first.
func (k measure) best(c cell, all []Measured) (rule string) {
	least := math.Inf(1)
	for _, name := range replay.Published() {
		if m := find(all, c.name, name); m != nil && k.of(m).Mean < least {
			least, rule = k.of(m).Mean, name
		}
	}
	return rule
}

// bearable reports whether a cell compares rules under a load that the workers bear: all closed loops, and
// open ones in which the oracle is not saturated.
func bearable(c cell, all []Measured) bool {
	return !c.open || c.bound == noOracle || find(all, cmp.Or(c.bound, c.name), oracleRule).TTFTp90.Mean <= saturated
}

// saturated is the p90 of TTFT, in s, above which the oracle counts as saturated.
const saturated = 2.

// shapeFigures are the targets about the shapes. prefix says what they have in common.
func (b *Bench) shapeFigures(prefix string, first, further []cell, all []Measured) (out []bench.Figure) {
	n := fmt.Sprintf("%d further cells", len(slices.DeleteFunc(slices.Clone(further), func(c cell) bool { return c.bound == noOracle })))
	out = append(
		out,
		ttft.geometric("23 cells", 1.13, first, all, oracleRule, "the oracle"),
		ttftP99.geometric("23 cells", 1.20, first, all, oracleRule, "the oracle"),
		e2e.geometric("23 cells", 1.03, first, all, oracleRule, "the oracle"),
		e2eP99.geometric("23 cells", 1.05, first, all, oracleRule, "the oracle"),
		ttft.geometric(n, 1.13, further, all, oracleRule, "the oracle"),
		e2e.geometric(n, 1.03, further, all, oracleRule, "the oracle"),
		e2eP99.geometric(n, 1.05, further, all, oracleRule, "the oracle"),
	)
	equal := equalPrompts()
	out = append(out, figure("mean TTFT of the default over round robin's, "+equal.name, "×", bench.AtMost(1), ttft.against(equal, all, defaultRule, "round-robin")))
	cells := slices.Concat(first, further)
	loaded := slices.DeleteFunc(slices.Clone(cells), func(c cell) bool { return !bearable(c, all) })
	for _, t := range []struct {
		measure
		target float64
	}{{ttft, 1.25}, {e2e, 1.05}, {tpot, 1.05}} {
		var w worst
		for _, c := range loaded {
			rule := t.best(c, all)
			w.see(t.against(c, all, defaultRule, rule), c.name+", "+rule)
		}
		out = append(out, figure(fmt.Sprintf("%s of the default over the best other router's, worst of %d cells that are not saturated: %s", t.name, len(loaded), w.where), "×", bench.AtMost(t.target), w.ratio))
	}
	busy, hot := busiest(cells, all, defaultRule)
	out = append(out, figure(fmt.Sprintf("requests on the busiest worker over the mean, worst of %d cells with one to %d prefixes: %s", hot, most, busy.where), "×", bench.AtMost(1.3), busy.ratio))
	public := publicShapes(first)
	out = append(out, ttft.geometric("6 public workloads", 1.02, public, all, noDecode, "the same rule with decode_weight=0"))
	for _, t := range []struct {
		measure
		target float64
	}{{ttft, 1.05}, {e2e, 1}} {
		var w worst
		for _, c := range public {
			w.see(t.against(c, all, defaultRule, noDecode), c.name)
		}
		out = append(out, figure(fmt.Sprintf("%s of the default over that of the same rule with decode_weight=0, worst of 6 public workloads: %s", t.name, w.where), "×", bench.AtMost(t.target), w.ratio))
	}
	for i := range out {
		out[i].What = prefix + out[i].What
	}
	return out
}

// rivalFigures compare the default with its rival in all cells that are not saturated.
func rivalFigures(cells []cell, all []Measured) []bench.Figure {
	var first, whole worst
	n := 0
	for _, c := range cells {
		if !bearable(c, all) {
			continue
		}
		n++
		first.see(ttft.against(c, all, defaultRule, rivalRule), c.name)
		whole.see(e2e.against(c, all, defaultRule, rivalRule), c.name)
	}
	compared := func(k measure, w worst) bench.Figure {
		return figure(fmt.Sprintf("%s of the default over that of %s, worst of %d cells that are not saturated: %s", k.name, rivalRule, n, w.where), "×", bench.AtMost(1.05), w.ratio)
	}
	return []bench.Figure{compared(ttft, first), compared(e2e, whole)}
}

// olderFigures are targets about single recorded workloads.
func (b *Bench) olderFigures(all []Measured) (out []bench.Figure) {
	for _, c := range []cell{b.syntheticCell(2, 2000), b.agenticCell(64, 1334)} {
		out = append(out, figure("mean TTFT of "+rivalRule+" over the default's, "+c.name, "×", bench.AtLeast(3), ttft.against(c, all, rivalRule, defaultRule)))
	}
	agents := b.agenticCell(32, 1334).name
	out = append(out, figure("token hit rate of the default, "+agents, "", bench.AtLeast(.95), find(all, agents, defaultRule).HitRate))
	var w worst
	for _, c := range b.lateComparisons() {
		w.see(ratio(find(all, c.cell.name, defaultRule).TTFT, find(all, c.one.name, defaultRule).TTFT), c.what)
	}
	return append(out, figure("mean TTFT of the default with events 5 s late over fresh ones, worst: "+w.where, "×", bench.AtMost(1.05), w.ratio))
}

// judge prints, for each rule, the geometric means over the cells of its results divided by the oracle's,
// and the busiest worker in the worst cell with few prefixes.
func judge(w io.Writer, what string, cells []cell, all []Measured) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	measures := []measure{ttft, ttftP99, tpot, e2e, e2eP99}
	fmt.Fprintf(t, "\n%s: over the oracle's", what)
	for _, k := range measures {
		fmt.Fprintf(t, "\t%s", k.name)
	}
	fmt.Fprintln(t, "\tbusiest worker")
	for _, rule := range allRules() {
		fmt.Fprint(t, rule)
		for _, k := range measures {
			mean, _, _ := k.mean(cells, all, rule, oracleRule)
			fmt.Fprintf(t, "\t%.3f", mean)
		}
		busiest, _ := busiest(cells, all, rule)
		fmt.Fprintf(t, "\t%.2f\n", busiest.ratio.Mean)
	}
	bench.NoError(t.Flush())
}

// busiest returns the busiest worker of a rule in the worst of the cells with few prefixes, and how many
// cells these are.
func busiest(cells []cell, all []Measured, rule string) (w worst, n int) {
	for _, c := range cells {
		if m := find(all, c.name, rule); c.few && m != nil {
			w.see(m.Busiest, c.name)
			n++
		}
	}
	return w, n
}
