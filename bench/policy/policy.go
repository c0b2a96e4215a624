// SPDX-License-Identifier: Apache-2.0

// Package policy compares ways to choose a worker in simulations ([replay]): rules with
// each other, several routers with one. ../README.md is the method.
package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

// Bench has the settings of the comparisons.
type Bench struct {
	Traces string    // folder with the traces
	Seeds  int       // of each cell; targets want 3 or more
	Log    io.Writer // gets a line for each part of the simulation

	chat, synthetic *replay.Trace
	conversations   *replay.Conversations
	dealt           map[dealt]*replay.Trace
}

type dealt struct {
	users, requests int
	seed            uint64
}

// The rules of the targets.
const (
	defaultRule = replay.Default
	rivalRule   = "dynamo"
	oracleRule  = "oracle"
)

// manySeeds are for the rules that the targets divide by each other.
const manySeeds = 10

// Figures simulates all cells, writes the results of each rule to dir/policy.jsonl, prints
// them to w, and returns the figures with their targets.
func (b *Bench) Figures(ctx context.Context, w io.Writer, dir string) []bench.Figure {
	b.load()
	figures := b.speedFigures() //nolint:contextcheck // a decision has a context of its own
	fresh := b.cells()
	shipped := make([]cell, len(fresh))
	for i, c := range fresh {
		shipped[i] = c.with("prediction", predicting)
	}
	b.log("the %d cells, all rules, without prediction and with it", len(fresh))
	all := b.play(ctx, append(slices.Clip(fresh), shipped...), cellRules())
	// The rules that the targets compare need more seeds than the others.
	wide := *b
	wide.Seeds = max(b.Seeds, manySeeds)
	b.log("the same, the rules of the targets with %d seeds", wide.Seeds)
	many := wide.play(ctx, append(slices.Clip(fresh), shipped...), targetRules())
	for i := range many {
		*find(all, many[i].Cell, many[i].Rule) = many[i]
	}
	larger := b.largerCells()
	good := contenders(shipped, all)
	b.log("%d larger and fuller cells, the %d rules that are near the default in a smaller one", len(larger), len(good))
	more := b.play(ctx, larger, good)
	all = append(all, more...)
	cells, counted := all, all
	tops := b.saturations(ctx)
	b.log("the oracle saturates at chat ×%.2f, synthetic ×%.2f and %.1f generated requests a second", tops.chat, tops.synthetic, tops.generated)
	axes := map[string][]Measured{}
	for _, a := range b.axes(tops) {
		b.log("axis: %s", a.name)
		m := b.play(ctx, a.cells, a.rules)
		axes[a.name] = m
		all = append(slices.Clip(all), m...)
		if a.counted {
			counted = append(slices.Clip(counted), m...)
		}
	}
	printMeasured(w, all)
	figures = append(figures, cellFigures(fresh, shipped, larger, cells)...)
	// The same without prediction, which is not how kvroute runs by default.
	for _, f := range cellFigures(fresh, fresh, nil, cells) {
		f.What, f.Target, f.Met = "without prediction: "+f.What, "", false
		figures = append(figures, f)
	}
	figures = append(figures, rivalFigures("", counted)...)
	figures = append(figures, rivalFigures(unseenAxis+": ", axes[unseenAxis])...)
	figures = append(figures, lateFigures(axes["events"])...)
	writeLines(filepath.Join(dir, "policy.jsonl"), all)
	return figures
}

func (b *Bench) log(format string, args ...any) {
	fmt.Fprintf(b.Log, "%s "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
}

func (b *Bench) load() {
	open := func(name string) *replay.Trace { return bench.Must(replay.LoadMooncake(filepath.Join(b.Traces, name))) }
	b.chat, b.synthetic = open("mooncake_conversation.jsonl.gz"), open("mooncake_synthetic.jsonl.gz")
	b.conversations = bench.Must(replay.LoadConversations(filepath.Join(b.Traces, "cc_weka_sessions.jsonl.gz")))
	b.dealt = map[dealt]*replay.Trace{}
}

// Measured is the result of one rule in one cell.
type Measured struct {
	Cell string `json:"cell"`
	Rule string `json:"rule"`
	// Means over the seeds, and the lowest and highest seed.
	TTFT      Range `json:"ttft_s"`
	Wait      Range `json:"wait_s"` // the part of TTFT before the prompt is begun
	TTFTp99   Range `json:"ttft_p99_s"`
	TTFTp90   Range `json:"ttft_p90_s"`
	E2E       Range `json:"e2e_s"`
	TPOT      Range `json:"tpot_ms"`
	TPOTp99   Range `json:"tpot_p99_ms"`
	Goodput   Range `json:"goodput_rps"`
	HitRate   Range `json:"token_hit_rate"`
	LRUShare  Range `json:"lru_share"`
	Imbalance Range `json:"imbalance"`
	Misjudged Range `json:"misjudged_tokens"`
}

// Range is a mean with the lowest and highest value. In JSON it is the three of
// them in a list, to four digits.
type Range struct{ Mean, Min, Max float64 }

// MarshalJSON implements [json.Marshaler].
func (r Range) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "[%.4g,%.4g,%.4g]", r.Mean, r.Min, r.Max), nil
}

func newRange(v []float64) (r Range) {
	for _, x := range v {
		r.Mean += x / float64(len(v))
	}
	return Range{r.Mean, slices.Min(v), slices.Max(v)}
}

// play runs rules in cells and returns the results, cell by cell.
func (b *Bench) play(ctx context.Context, cells []cell, rules []string) (out []Measured) {
	var all []replay.Scenario
	for _, c := range cells {
		traces := make([]*replay.Trace, b.Seeds)
		for i := range traces {
			traces[i] = c.trace(uint64(i) + 1)
		}
		for _, name := range rules {
			rule := bench.Must(replay.ParseRule(name))
			for i, t := range traces {
				s := replay.Scenario{Rule: rule, Trace: t, Seed: uint64(i) + 1}
				c.set(&s)
				all = append(all, s)
			}
		}
	}
	results := bench.Must(replay.RunAll(ctx, all))
	for i, c := range cells {
		for j, name := range rules {
			at := (i*len(rules) + j) * b.Seeds
			out = append(out, measured(c.name, name, results[at:at+b.Seeds]))
		}
	}
	return out
}

func measured(cell, rule string, results []*replay.Result) Measured {
	over := func(get func(r *replay.Result) float64) Range {
		var v []float64
		for _, r := range results {
			v = append(v, get(r))
		}
		return newRange(v)
	}
	return Measured{
		Cell: cell, Rule: rule,
		TTFT:      over(func(r *replay.Result) float64 { return r.TTFT.Mean }),
		Wait:      over(func(r *replay.Result) float64 { return r.Wait.Mean }),
		TTFTp90:   over(func(r *replay.Result) float64 { return r.TTFT.P90 }),
		TTFTp99:   over(func(r *replay.Result) float64 { return r.TTFT.P99 }),
		E2E:       over(func(r *replay.Result) float64 { return r.E2E.Mean }),
		TPOT:      over(func(r *replay.Result) float64 { return r.TPOT.Mean * 1e3 }),
		TPOTp99:   over(func(r *replay.Result) float64 { return r.TPOT.P99 * 1e3 }),
		Goodput:   over(func(r *replay.Result) float64 { return r.Goodput }),
		HitRate:   over(func(r *replay.Result) float64 { return r.HitRate }),
		LRUShare:  over(func(r *replay.Result) float64 { return r.LRUShare }),
		Imbalance: over(func(r *replay.Result) float64 { return r.Imbalance }),
		Misjudged: over(func(r *replay.Result) float64 { return r.Misjudged }),
	}
}

// find returns the result of a rule in a cell.
func find(all []Measured, cell, rule string) *Measured {
	for i := range all {
		if all[i].Cell == cell && all[i].Rule == rule {
			return &all[i]
		}
	}
	return nil
}

// printMeasured prints a table, cell by cell.
func printMeasured(w io.Writer, all []Measured) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	last := ""
	for i := range all {
		m := &all[i]
		if m.Cell != last {
			bench.NoError(t.Flush())
			fmt.Fprintf(w, "\n%s\n", m.Cell)
			fmt.Fprintln(t, "  rule\tTTFT mean s\tof it waiting\tp99\tE2E mean s\tTPOT ms\tgoodput/s\thits\tof LRU\timbalance")
			last = m.Cell
		}
		fmt.Fprintf(t, "  %s\t%s\t%.3g\t%s\t%s\t%s\t%.2f\t%.3f\t%.2f\t%.2f\n", m.Rule, m.TTFT.text(), m.Wait.Mean, m.TTFTp99.text(), m.E2E.text(), m.TPOT.text(),
			m.Goodput.Mean, m.HitRate.Mean, m.LRUShare.Mean, m.Imbalance.Mean)
	}
	bench.NoError(t.Flush())
}

func (r Range) text() string { return fmt.Sprintf("%.3g (%.3g – %.3g)", r.Mean, r.Min, r.Max) }

func writeLines(name string, all []Measured) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for i := range all {
		bench.NoError(enc.Encode(&all[i]))
	}
	bench.NoError(os.MkdirAll(filepath.Dir(name), 0o755))
	bench.NoError(os.WriteFile(name, b.Bytes(), 0o644))
}
