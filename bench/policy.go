// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/bench/replay"
)

// PolicyBench compares ways to choose in simulations: all of them in the cells of
// the baseline table, the default and its rival along one axis at a time.
type PolicyBench struct {
	Traces string    // folder with the traces
	Seeds  int       // of each cell; targets want 3 or more
	Log    io.Writer // told what is being simulated

	chat, synthetic *replay.Trace
	conversations   *replay.Conversations
	dealt           map[dealt]*replay.Trace
}

type dealt struct {
	users, requests int
	seed            uint64
}

// The rules that the targets speak of.
const (
	defaultRule = replay.Default
	rivalRule   = "dynamo"
	oracleRule  = "oracle"
)

// cell is one scenario of the comparison, without its rule.
type cell struct {
	name  string
	short string // in the baseline table
	// trace returns the workload for a seed.
	trace func(seed uint64) (*replay.Trace, error)
	set   func(s *replay.Scenario)
	open  bool
}

// Measured is what one rule did in one cell.
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

func (b *PolicyBench) load() error {
	var err error
	open := func(name string) *replay.Trace {
		t, e := replay.LoadMooncake(filepath.Join(b.Traces, name))
		err = cmp.Or(err, e)
		return t
	}
	b.chat, b.synthetic = open("mooncake_conversation.jsonl.gz"), open("mooncake_synthetic.jsonl.gz")
	if err == nil {
		b.conversations, err = replay.LoadConversations(filepath.Join(b.Traces, "cc_weka_sessions.jsonl.gz"))
	}
	b.dealt = map[dealt]*replay.Trace{}
	return err
}

// The cells.

// jitter is by how much requests of a recorded open loop come later at most. Where
// caches are full or engines are, one decision that falls otherwise changes all that
// follow: without it a rule that draws nothing would show one of its results as if
// there were no others.
const jitter = time.Millisecond

func (b *PolicyBench) openCell(name, short string, trace func() *replay.Trace, load float64, blocks int) cell {
	return cell{
		name: name, short: short, open: true,
		trace: func(uint64) (*replay.Trace, error) { return trace(), nil },
		set:   func(s *replay.Scenario) { s.Speedup, s.KVBlocks, s.Jitter = load, blocks, jitter },
	}
}

func (b *PolicyBench) chatCell(load float64, blocks int) cell {
	return b.openCell(fmt.Sprintf("chat ×%g, %d blocks", load, blocks), "", func() *replay.Trace { return b.chat }, load, blocks)
}

func (b *PolicyBench) syntheticCell(load float64, blocks int) cell {
	return b.openCell(fmt.Sprintf("synthetic ×%g, %d blocks", load, blocks), "", func() *replay.Trace { return b.synthetic }, load, blocks)
}

func (b *PolicyBench) agenticCell(users, blocks int) cell {
	requests := 4000
	if users >= 256 {
		requests = 8000
	}
	return cell{
		name: fmt.Sprintf("agentic %d users, %d blocks", users, blocks),
		trace: func(seed uint64) (*replay.Trace, error) {
			key := dealt{users, requests, seed}
			if b.dealt[key] == nil {
				t, err := b.conversations.Deal(replay.DealConfig{Users: users, Requests: requests, Seed: seed})
				if err != nil {
					return nil, err
				}
				b.dealt[key] = t
			}
			return b.dealt[key], nil
		},
		set: func(s *replay.Scenario) { s.KVBlocks = blocks },
	}
}

// generatedCell has 150 prefixes of 6,000 tokens, questions of 1,200 and outputs of
// 1,000, long enough for queues to settle.
func generatedCell(rate float64, blocks int) cell {
	return cell{
		name: fmt.Sprintf("generated %g/s, %d blocks", rate, blocks), open: true,
		trace: func(seed uint64) (*replay.Trace, error) {
			return replay.Generate(replay.GenerateConfig{Rate: rate, Requests: 8000, Seed: seed})
		},
		set: func(s *replay.Scenario) { s.KVBlocks = blocks },
	}
}

// with returns a cell that differs from c in one thing.
func (c cell) with(what string, set func(s *replay.Scenario)) cell {
	before := c.set
	c.name += ", " + what
	c.set = func(s *replay.Scenario) { before(s); set(s) }
	return c
}

// play runs rules in cells and returns what they did, cell by cell.
func (b *PolicyBench) play(ctx context.Context, cells []cell, rules []string) ([]Measured, error) {
	var all []replay.Scenario
	for _, c := range cells {
		traces := make([]*replay.Trace, b.Seeds)
		for i := range traces {
			var err error
			if traces[i], err = c.trace(uint64(i) + 1); err != nil {
				return nil, err
			}
		}
		for _, name := range rules {
			rule, err := replay.ParseRule(name)
			if err != nil {
				return nil, err
			}
			for i, t := range traces {
				s := replay.Scenario{Rule: rule, Trace: t, Seed: uint64(i) + 1}
				c.set(&s)
				all = append(all, s)
			}
		}
	}
	results, err := replay.RunAll(ctx, all)
	if err != nil {
		return nil, err
	}
	var out []Measured
	for i, c := range cells {
		for j, name := range rules {
			at := (i*len(rules) + j) * b.Seeds
			out = append(out, measured(c.name, name, results[at:at+b.Seeds]))
		}
	}
	return out, nil
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

// find returns what a rule did in a cell.
func find(all []Measured, cell, rule string) *Measured {
	for i := range all {
		if all[i].Cell == cell && all[i].Rule == rule {
			return &all[i]
		}
	}
	return nil
}

// printMeasured prints a table, cell by cell.
func printMeasured(w io.Writer, all []Measured) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	last := ""
	for i := range all {
		m := &all[i]
		if m.Cell != last {
			if err := t.Flush(); err != nil {
				return fmt.Errorf("bench: %w", err)
			}
			fmt.Fprintf(w, "\n%s\n", m.Cell)
			fmt.Fprintln(t, "  rule\tTTFT mean s\tof it waiting\tp99\tE2E mean s\tTPOT ms\tgoodput/s\thits\tof LRU\timbalance")
			last = m.Cell
		}
		fmt.Fprintf(t, "  %s\t%s\t%.3g\t%s\t%s\t%s\t%.2f\t%.3f\t%.2f\t%.2f\n", m.Rule, m.TTFT.text(), m.Wait.Mean, m.TTFTp99.text(), m.E2E.text(), m.TPOT.text(),
			m.Goodput.Mean, m.HitRate.Mean, m.LRUShare.Mean, m.Imbalance.Mean)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

func (r Range) text() string { return fmt.Sprintf("%.3g (%.3g – %.3g)", r.Mean, r.Min, r.Max) }
