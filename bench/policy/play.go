// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"cmp"
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
	Seeds  int       // of each cell; targets need 3 or more
	Log    io.Writer // gets a line for each part of the simulation

	chat, synthetic *replay.Trace
	conversations   *replay.Conversations
	dealt           map[replay.DealConfig]*replay.Trace
}

func (b *Bench) load() {
	open := func(name string) *replay.Trace { return bench.Must(replay.LoadMooncake(filepath.Join(b.Traces, name))) }
	b.chat, b.synthetic = open("mooncake_conversation.jsonl.gz"), open("mooncake_synthetic.jsonl.gz")
	b.conversations = bench.Must(replay.LoadConversations(filepath.Join(b.Traces, "cc_weka_sessions.jsonl.gz")))
	b.dealt = map[replay.DealConfig]*replay.Trace{}
}

func (b *Bench) log(format string, args ...any) {
	fmt.Fprintf(b.Log, "%s "+format+"\n", append([]any{time.Now().Format(time.TimeOnly)}, args...)...)
}

// cell is one scenario of the comparison, without its rule. Cells of one name are equal.
type cell struct {
	name string
	// trace returns the workload for a seed.
	trace func(seed uint64) *replay.Trace
	set   func(s *replay.Scenario)
	open  bool // an open loop
	// bound names the cell whose oracle is the bound, if the oracle cannot play this one, or would be
	// hampered, too; [noOracle] = there is none.
	bound string
	few   bool // few shared prefixes, and equal workers that stay: the busiest worker is judged
}

// noOracle is the bound of cells in which the oracle is no bound: it does not know that workers are slow.
const noOracle = "-"

// with returns a cell that differs from c in one thing.
func (c cell) with(what string, set func(s *replay.Scenario)) cell {
	return c.also(set).named(c.name + ", " + what)
}

// also returns a cell of the same name with another setting.
func (c cell) also(set func(s *replay.Scenario)) cell {
	before := c.set
	c.set = func(s *replay.Scenario) { before(s); set(s) }
	return c
}

func (c cell) named(name string) cell {
	c.name = name
	return c
}

// beside is with, and c's oracle is the bound.
func (c cell) beside(what string, set func(s *replay.Scenario)) cell {
	of := cmp.Or(c.bound, c.name)
	c = c.with(what, set)
	c.bound = of
	return c
}

// Measured is the result of one rule in one cell: means over the seeds, and the lowest and
// highest seed.
type Measured struct {
	Cell      string `json:"cell"`
	Rule      string `json:"rule"`
	TTFT      Range  `json:"ttft_s"`
	TTFTp90   Range  `json:"ttft_p90_s"`
	TTFTp99   Range  `json:"ttft_p99_s"`
	E2E       Range  `json:"e2e_s"`
	E2Ep99    Range  `json:"e2e_p99_s"`
	TPOT      Range  `json:"tpot_ms"`
	TPOTp99   Range  `json:"tpot_p99_ms"`
	HitRate   Range  `json:"token_hit_rate"`
	Imbalance Range  `json:"imbalance"`
	Busiest   Range  `json:"busiest_running"`
}

// play simulates rules in cells with so many seeds each, and returns the results cell by cell. Of
// cells with the same name only the first is played.
func (b *Bench) play(ctx context.Context, what string, cells []cell, rules []string, seeds int) (out []Measured) {
	start, seen := time.Now(), map[string]bool{}
	for _, c := range cells {
		if seen[c.name] {
			continue
		}
		seen[c.name] = true
		out = append(out, c.play(ctx, rules, seeds)...)
	}
	b.log("%s: %d cells, %d rules, %d seeds in %v", what, len(seen), len(rules), seeds, time.Since(start).Round(time.Second))
	return out
}

// play simulates rules in a cell. The oracle does not play cells whose bound is another cell's.
func (c cell) play(ctx context.Context, rules []string, seeds int) (out []Measured) {
	traces := make([]*replay.Trace, seeds)
	for i := range traces {
		traces[i] = c.trace(uint64(i) + 1)
	}
	var all []replay.Scenario
	for _, name := range rules {
		if name == oracleRule && c.bound != "" {
			continue
		}
		out = append(out, Measured{Cell: c.name, Rule: name})
		for i, t := range traces {
			s := replay.Scenario{Rule: bench.Must(replay.ParseRule(name)), Trace: t, Seed: uint64(i) + 1}
			c.set(&s)
			all = append(all, s)
		}
	}
	results := bench.Must(replay.RunAll(ctx, all))
	for i := range out {
		out[i].fill(results[i*seeds : (i+1)*seeds])
	}
	return out
}

func (m *Measured) fill(results []*replay.Result) {
	over := func(get func(r *replay.Result) float64) Range {
		var v []float64
		for _, r := range results {
			v = append(v, get(r))
		}
		return newRange(v)
	}
	m.TTFT = over(func(r *replay.Result) float64 { return r.TTFT.Mean })
	m.TTFTp90 = over(func(r *replay.Result) float64 { return r.TTFT.P90 })
	m.TTFTp99 = over(func(r *replay.Result) float64 { return r.TTFT.P99 })
	m.E2E = over(func(r *replay.Result) float64 { return r.E2E.Mean })
	m.E2Ep99 = over(func(r *replay.Result) float64 { return r.E2E.P99 })
	m.TPOT = over(func(r *replay.Result) float64 { return r.TPOT.Mean * 1e3 })
	m.TPOTp99 = over(func(r *replay.Result) float64 { return r.TPOT.P99 * 1e3 })
	m.HitRate = over(func(r *replay.Result) float64 { return r.HitRate })
	m.Imbalance = over(func(r *replay.Result) float64 { return r.Imbalance })
	m.Busiest = over(func(r *replay.Result) float64 { return r.Busiest })
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

func (r Range) String() string { return fmt.Sprintf("%.3g (%.3g – %.3g)", r.Mean, r.Min, r.Max) }

// find returns the result of a rule in a cell.
func find(all []Measured, cell, rule string) *Measured {
	for i := range all {
		if all[i].Cell == cell && all[i].Rule == rule {
			return &all[i]
		}
	}
	return nil
}

// record prints the results as a table and writes them to a file, a line each.
func record(w io.Writer, name string, all []Measured) {
	var lines bytes.Buffer
	t, enc := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0), json.NewEncoder(&lines)
	fmt.Fprintln(t, "cell\trule\tTTFT mean s\tp99\tE2E mean s\tp99\tTPOT ms\thits\tbusiest")
	for i := range all {
		m := &all[i]
		fmt.Fprintf(t, "%s\t%s\t%v\t%v\t%v\t%v\t%v\t%.3f\t%.2f\n", m.Cell, m.Rule, m.TTFT, m.TTFTp99, m.E2E, m.E2Ep99, m.TPOT, m.HitRate.Mean, m.Busiest.Mean)
		bench.NoError(enc.Encode(m))
	}
	bench.NoError(t.Flush())
	bench.NoError(os.MkdirAll(filepath.Dir(name), 0o755))
	bench.NoError(os.WriteFile(name, lines.Bytes(), 0o644))
}
