// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench/replay"
)

// Figures simulates everything, writes what each rule did in each cell to
// dir/policy.jsonl and the plots to plots, prints it to w, and returns the figures
// with their targets.
func (b *PolicyBench) Figures(ctx context.Context, w io.Writer, dir, plots string) ([]Figure, error) {
	if err := b.load(); err != nil {
		return nil, err
	}
	var figures []Figure
	for _, part := range []func() ([]Figure, error){b.hitFigures, decideFigures, b.speedFigures} {
		f, err := part()
		if err != nil {
			return nil, err
		}
		figures = append(figures, f...)
	}
	fresh := b.cells()
	shipped := make([]cell, len(fresh))
	for i, c := range fresh {
		shipped[i] = c.with("prediction", predicting)
	}
	b.log("the %d cells of the baseline table, all rules, without prediction and with it", len(fresh))
	var rules []string
	for _, row := range baselines() {
		rules = append(rules, row.rule)
	}
	all, err := b.play(ctx, append(slices.Clip(fresh), shipped...), rules)
	if err != nil {
		return nil, err
	}
	baseline := slices.Clone(all)
	// What the targets divide by each other needs more seeds than what is shown.
	wide := *b
	wide.Seeds = max(b.Seeds, manySeeds)
	b.log("the same, the rules of the targets with %d seeds", wide.Seeds)
	many, err := wide.play(ctx, append(slices.Clip(fresh), shipped...), []string{defaultRule, rivalRule, oracleRule})
	if err != nil {
		return nil, err
	}
	for i := range many {
		*find(all, many[i].Cell, many[i].Rule) = many[i]
	}
	larger := b.largerCells()
	good := contenders(shipped, all)
	b.log("%d larger and fuller cells, the %d rules that are near the default in a smaller one", len(larger), len(good))
	more, err := b.play(ctx, larger, good)
	if err != nil {
		return nil, err
	}
	all = append(all, more...)
	cells := all
	tops, err := b.saturations(ctx)
	if err != nil {
		return nil, err
	}
	b.log("the oracle saturates at chat ×%.2f, synthetic ×%.2f and %.1f generated requests a second", tops.chat, tops.synthetic, tops.generated)
	counted := all
	axes := map[string][]Measured{}
	for _, a := range b.axes(tops) {
		b.log("axis: %s", a.name)
		if a.rules == nil {
			a.rules = []string{defaultRule, rivalRule, oracleRule}
		}
		m, err := b.play(ctx, a.cells, a.rules)
		if err != nil {
			return nil, err
		}
		axes[a.name] = m
		all = append(slices.Clip(all), m...)
		if a.counted {
			counted = append(slices.Clip(counted), m...)
		}
	}
	if err := printMeasured(w, all); err != nil {
		return nil, err
	}
	figures = append(figures, cellFigures(fresh, shipped, larger, cells)...)
	// The same without prediction, which is not how it runs by default.
	for _, f := range cellFigures(fresh, fresh, nil, cells) {
		f.What, f.Target, f.Met = "without prediction: "+f.What, "", false
		figures = append(figures, f)
	}
	based, err := b.baselineFigures(ctx, w, fresh, baseline)
	if err != nil {
		return nil, err
	}
	figures = append(figures, based...)
	figures = append(figures, rivalFigures("", counted)...)
	figures = append(figures, rivalFigures(unseenAxis+": ", axes[unseenAxis])...)
	figures = append(figures, lateFigures(axes["events"])...)
	if err := writeLines(filepath.Join(dir, "policy.jsonl"), all); err != nil {
		return nil, err
	}
	return figures, b.drawAll(plots, axes)
}

func (b *PolicyBench) log(format string, args ...any) {
	fmt.Fprintf(b.Log, "%s "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
}

func figure(what, unit string, target limit, v Range) Figure {
	f := Figure{What: what, Unit: unit, Target: target.text, Median: v.Mean, Min: v.Min, Max: v.Max}
	f.Met = target.met != nil && target.met(v.Mean)
	return f
}

func single(v float64) Range { return Range{v, v, v} }

func exactly(v float64) limit {
	return limit{fmt.Sprintf("= %g", v), func(got float64) bool { return got == v }}
}

// hitFigures are the block hits without time.
func (b *PolicyBench) hitFigures() (out []Figure, err error) {
	small, err := replay.LoadMooncake(filepath.Join(b.Traces, "dynamo_mooncake_trace_1000.jsonl.gz"))
	if err != nil {
		return nil, err
	}
	agentic, err := b.conversations.Recorded()
	if err != nil {
		return nil, err
	}
	for _, c := range []struct {
		what     string
		trace    *replay.Trace
		capacity int
		hit, of  int
	}{
		{"block hits, chat, endless cache", b.chat, 0, 105_710, 288_500},
		{"block hits, synthetic, endless cache", b.synthetic, 0, 77_953, 121_877},
		{"block hits, trace of 1,000, endless cache", small, 0, 7_479, 19_686},
		{"block hits, agentic, 32 users, one LRU of 80,000", agentic, 80_000, 10_152_557, 10_608_487},
	} {
		h := c.trace.HitRate(c.trace.InOrder(), 1, c.capacity)
		f := figure(fmt.Sprintf("%s, of %d", c.what, c.of), "", exactly(float64(c.hit)), single(float64(h.Hit)))
		f.Met = f.Met && h.Blocks == c.of
		out = append(out, f)
	}
	return out, nil
}

// speedFigures are how fast the simulation itself is, and whether it repeats.
func (b *PolicyBench) speedFigures() (out []Figure, err error) {
	rule, err := replay.ParseRule(defaultRule)
	if err != nil {
		return nil, err
	}
	agentic, err := b.agenticCell(64, 1334).trace(1)
	if err != nil {
		return nil, err
	}
	for _, c := range []struct {
		what   string
		trace  *replay.Trace
		target limit
	}{
		{"simulated requests a second on one core, chat", b.chat, atLeast(20_000)},
		{"simulated requests a second on one core, agentic", agentic, atLeast(2_000)},
	} {
		var rates []float64
		var first []byte
		same := 1.
		for range max(3, b.Seeds) {
			start := CPUTime()
			r, err := replay.Run(context.Background(), replay.Scenario{Trace: c.trace, Rule: rule, KVBlocks: 1334, Seed: 1})
			if err != nil {
				return nil, err
			}
			rates = append(rates, float64(len(c.trace.Requests))/(CPUTime()-start).Seconds())
			text, err := json.Marshal(r)
			if err != nil {
				return nil, fmt.Errorf("bench: %w", err)
			}
			if first == nil {
				first = text
			} else if !bytes.Equal(first, text) {
				same = 0
			}
		}
		out = append(
			out,
			figure(c.what, "/s", c.target, newRange(rates)),
			figure("the same seed gives the same bytes, "+c.trace.Name, "", exactly(1), single(same)),
		)
	}
	return out, nil
}

// decideFigures are what a decision costs on the load of small prompts.
func decideFigures() (out []Figure, err error) {
	for _, c := range []struct {
		what            string
		hashed, predict bool
		target          limit
	}{
		{"decisions a second from token ids, booked and freed, all cores", false, false, atLeast(500_000)},
		{"the same with hashes given", true, false, limit{}},
		{"the same from token ids, with prediction", false, true, limit{}},
		{"the same with hashes given, with prediction", true, true, limit{}},
	} {
		l, err := newDecideLoad(c.predict)
		if err != nil {
			return nil, err
		}
		var rates, busy []float64
		for range 5 {
			const rounds = 20
			start := CPUTime()
			rate, err := l.rate(c.hashed, rounds)
			if err != nil {
				return nil, err
			}
			rates = append(rates, rate)
			busy = append(busy, rounds*decideRequests/(CPUTime()-start).Seconds())
		}
		out = append(out, figure(c.what, "/s", c.target, newRange(rates)),
			figure("  … for a second of one core", "/s", limit{}, newRange(busy)))
	}
	return out, nil
}

// ratio is a divided by b, seed by seed only in its mean; its range is the widest.
func ratio(a, b Range) Range { return Range{a.Mean / b.Mean, a.Min / b.Max, a.Max / b.Min} }

// largerCells are the open loops that the baseline's text names beside its table: more
// workers, and one that is saturated whatever the rule, the last.
func (b *PolicyBench) largerCells() (out []cell) {
	for _, n := range []int{16, 32} {
		set := func(s *replay.Scenario) { s.Workers = n }
		load := 2 * float64(n) / 8
		for _, c := range []cell{b.chatCell(load, 2000), b.syntheticCell(load, 2000)} {
			out = append(out, c.with(fmt.Sprintf("%d workers", n), set).with("prediction", predicting))
		}
	}
	return append(out, b.chatCell(2, 600).with("prediction", predicting))
}

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

// cellFigures are the targets about the cells of the baseline table, all rules with
// prediction as it is by default. The rival counts as it does best.
func cellFigures(fresh, shipped, larger []cell, all []Measured) (out []Figure) {
	synthetic2, agentic32, agentic64 := 3, 4, 5
	for _, c := range []int{synthetic2, agentic64} {
		rival := find(all, shipped[c].name, rivalRule)
		if other := find(all, fresh[c].name, rivalRule); other.TTFT.Mean < rival.TTFT.Mean {
			rival = other
		}
		out = append(out, figure("mean TTFT of "+rivalRule+" over the default's, "+fresh[c].name, "×", atLeast(3),
			ratio(rival.TTFT, find(all, shipped[c].name, defaultRule).TTFT)))
	}
	for _, c := range []struct {
		cell      int
		ttft, e2e float64
	}{{1, 1.10, 1.15}, {synthetic2, 1.30, 1.20}, {agentic32, 1.45, 1.20}, {agentic64, 1.45, 1.20}} {
		own, best := find(all, shipped[c.cell].name, defaultRule), find(all, shipped[c.cell].name, oracleRule)
		out = append(
			out,
			figure("mean TTFT of the default over the oracle's, "+fresh[c.cell].name, "×", atMost(c.ttft), ratio(own.TTFT, best.TTFT)),
			// Where the distance lies.
			figure("  … of the distance in TTFT: waiting for others' prefill", "s", limit{}, single(own.Wait.Mean-best.Wait.Mean)),
			figure("  … and computing the prompt, in steps that decodes make longer", "s", limit{}, single(own.TTFT.Mean-own.Wait.Mean-best.TTFT.Mean+best.Wait.Mean)),
			figure("mean E2E of the default over the oracle's, "+fresh[c.cell].name, "×", atMost(c.e2e), ratio(own.E2E, best.E2E)),
			figure("  … of the distance in E2E: between two tokens", "ms", limit{}, single(own.TPOT.Mean-best.TPOT.Mean)),
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
		worst, where := worstE2E(larger[n-1:], all)
		out = append(out, figure("mean E2E of the default over the best other rule's, saturated: "+where, "×", limit{}, worst))
		open = append(open, larger[:n-1]...)
	}
	worst, where := worstE2E(open, all)
	return append(
		out,
		figure(fmt.Sprintf("mean E2E of the default over the best other rule's, worst of %d open cells: %s", len(open), where), "×", atMost(1.10), worst),
		figure("most prompt tokens computed by a worker over the mean, worst of chat and synthetic", "×", atMost(1.3), imbalance),
		figure("token hit rate of the default, "+fresh[agentic32].name, "", atLeast(.95), find(all, shipped[agentic32].name, defaultRule).HitRate),
	)
}

// worstE2E returns the largest ratio of the default's mean E2E to that of another rule,
// and where it is.
func worstE2E(cells []cell, all []Measured) (worst Range, where string) {
	for _, c := range cells {
		own := find(all, c.name, defaultRule)
		for i := range all {
			if m := &all[i]; m.Cell == c.name && m.Rule != defaultRule && m.Rule != oracleRule {
				if r := ratio(own.E2E, m.E2E); r.Mean > worst.Mean {
					worst, where = r, c.name+", "+m.Rule
				}
			}
		}
	}
	return worst, where
}

// baselineFigures compare with the baseline table, whose rules did not predict.
func (b *PolicyBench) baselineFigures(ctx context.Context, w io.Writer, cells []cell, all []Measured) ([]Figure, error) {
	values, off := deviations(cells, all)
	b.log("%d of %d values of the baseline table are not met within its noise: looking for the reasons", len(off), values)
	if err := b.explain(ctx, cells, off); err != nil {
		return nil, err
	}
	var unexplained [len(valueNames)]int
	fmt.Fprintf(w, "\n%d of %d values of the baseline table are met within its noise; the others:\n", values-len(off), values)
	for _, d := range off {
		why := d.Why
		if why == "" {
			unexplained[slices.Index(valueNames[:], d.What)]++
			why = "not explained; at last"
		}
		fmt.Fprintf(w, "  %s, %s, %s: %.3g, here %s; %s: %s\n", d.Rule, d.Cell, d.What, d.Baseline, d.Measured.text(), why, d.Then.text())
	}
	out := []Figure{
		figure(fmt.Sprintf("values of the baseline table met within its noise, of %d", values), "", limit{}, single(float64(values-len(off)))),
		figure("the others: met by an experiment", "", limit{}, single(float64(len(off)-unexplained[0]-unexplained[1]-unexplained[2]))),
	}
	for i, name := range valueNames {
		out = append(out, figure("values of the baseline table neither met nor explained: "+name, "", exactly(0), single(float64(unexplained[i]))))
	}
	return out, nil
}

// rivalFigures compare the default with its rival in all cells up to 95 % load:
// closed loops, and open ones in which the oracle is not saturated. A level above
// 95 % does not count either.
func rivalFigures(prefix string, all []Measured) []Figure {
	ttft, e2e := single(0), single(0)
	var whereTTFT, whereE2E string
	n := 0
	seen := map[string]bool{}
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
		if r := ratio(own.TTFT, rival.TTFT); r.Mean > ttft.Mean {
			ttft, whereTTFT = r, c
		}
		if r := ratio(own.E2E, rival.E2E); r.Mean > e2e.Mean {
			e2e, whereE2E = r, c
		}
	}
	return []Figure{
		figure(prefix+fmt.Sprintf("mean TTFT of the default over %s's, worst of %d cells up to 95 %% load: %s", rivalRule, n, whereTTFT), "×", atMost(1.05), ttft),
		figure(prefix+fmt.Sprintf("mean E2E of the default over %s's, worst of %d cells up to 95 %% load: %s", rivalRule, n, whereE2E), "×", atMost(1.05), e2e),
	}
}

// lateFigures compare late events with fresh ones, predictions on.
func lateFigures(all []Measured) (out []Figure) {
	worst, where := single(0), ""
	for i := range all {
		m := &all[i]
		if base, ok := strings.CutSuffix(m.Cell, ", events 5s late, prediction"); ok && m.Rule == defaultRule {
			fresh := find(all, base+", prediction", defaultRule)
			if r := ratio(m.TTFT, fresh.TTFT); r.Mean > worst.Mean {
				worst, where = r, base
			}
		}
	}
	return []Figure{figure("mean TTFT with events 5 s late over fresh ones, prediction on, worst: "+where, "×", atMost(1.05), worst)}
}

func writeLines(name string, all []Measured) (err error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	file, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	out := bufio.NewWriter(file)
	enc := json.NewEncoder(out)
	for i := range all {
		if err := enc.Encode(&all[i]); err != nil {
			return fmt.Errorf("bench: write %s: %w", name, err)
		}
	}
	return out.Flush()
}

// drawAll draws the plots.
func (b *PolicyBench) drawAll(dir string, axes map[string][]Measured) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	for _, name := range []string{"chat", "synthetic", "generated"} {
		p := &replay.Plot{Title: "Mean time to first token, " + name + " trace, 8 workers of 32B", X: "% of the load that the oracle bears", Y: "s", LogY: true}
		for _, rule := range []string{"round-robin", rivalRule, defaultRule, oracleRule} {
			s := replay.Series{Name: shortName(rule)}
			for i, m := range of(axes["load, "+name], rule) {
				s.Points = append(s.Points, replay.Point{X: 100 * levels[i], Y: m.TTFT.Mean})
			}
			p.Series = append(p.Series, s)
		}
		if err := draw(filepath.Join(dir, "ttft-"+name+".svg"), p); err != nil {
			return err
		}
	}
	p := &replay.Plot{Title: "What alpha buys: first token against the tokens after it", X: "mean time between tokens, ms", Y: "mean TTFT, s"}
	for _, cell := range []cell{b.chatCell(2, 2000), b.syntheticCell(2, 2000)} {
		s := replay.Series{Name: cell.name}
		for _, alpha := range alphas {
			m := find(axes[alphaAxis], cell.name, alphaRule(alpha))
			s.Points = append(s.Points, replay.Point{X: m.TPOT.Mean, Y: m.TTFT.Mean})
			s.Marks = append(s.Marks, fmt.Sprintf("%g", alpha))
		}
		p.Series = append(p.Series, s)
	}
	return draw(filepath.Join(dir, "alpha.svg"), p)
}

func shortName(rule string) string {
	if rule == defaultRule {
		return "tokens + attention"
	}
	return rule
}

// of returns what a rule did, in the order of the cells.
func of(all []Measured, rule string) (out []Measured) {
	for i := range all {
		if all[i].Rule == rule {
			out = append(out, all[i])
		}
	}
	return out
}

func draw(name string, p *replay.Plot) (err error) {
	file, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return p.WriteSVG(file)
}
