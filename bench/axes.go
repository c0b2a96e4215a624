// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/scorer"
)

// axis is a list of cells that differ in one thing.
type axis struct {
	name  string
	cells []cell
	rules []string // default: the default, its rival and the oracle
	// counted cells are among those that the targets against the rival look at.
	counted bool
}

// predict is the product's default.
const predict = 10 * time.Second

func predicting(s *replay.Scenario) { s.Predict = predict }

func (b *PolicyBench) axes(tops tops) (out []axis) {
	chat, synthetic, agentic := b.chatCell(1.5, 2000), b.syntheticCell(1.5, 2000), b.agenticCell(32, 1334)
	three := []cell{chat, synthetic, agentic}

	for _, top := range []struct {
		name string
		load float64
		cell func(load float64, blocks int) cell
	}{{"chat", tops.chat, b.chatCell}, {"synthetic", tops.synthetic, b.syntheticCell}, {"generated", tops.generated, generatedCell}} {
		a := axis{name: "load, " + top.name, counted: true, rules: []string{defaultRule, rivalRule, oracleRule, "round-robin"}}
		for _, share := range levels {
			c := top.cell(share*top.load, 2000)
			c.name = fmt.Sprintf("%s at %.0f %% load, 2000 blocks", top.name, share*100)
			a.cells = append(a.cells, c)
		}
		out = append(out, a)
	}
	generated := axis{name: "generated requests a second"}
	for _, rate := range []float64{3, 10, 30, 60} {
		generated.cells = append(generated.cells, generatedCell(rate, 2000))
	}
	// Shapes that no setting of a rule was found with, about 75 to 95 % of what
	// the oracle bears.
	unseen := axis{name: unseenAxis}
	for _, shape := range []struct {
		name   string
		config replay.GenerateConfig
		blocks int
		rates  []float64
	}{
		{"few short prefixes", replay.GenerateConfig{Prefixes: 20, PrefixTokens: 3000, QuestionTokens: 600, OutputTokens: 600}, 2000, []float64{34, 38, 40}},
		{"many long prefixes", replay.GenerateConfig{Prefixes: 400, PrefixTokens: 12_000, QuestionTokens: 800, OutputTokens: 1500}, 5000, []float64{5, 6, 6.5}},
		{"conversations", replay.GenerateConfig{Prefixes: 60, PrefixTokens: 4000, QuestionTokens: 500, OutputTokens: 400, Turns: 4}, 2000, []float64{40, 44, 48}},
	} {
		for _, rate := range shape.rates {
			unseen.cells = append(unseen.cells, cell{
				name: fmt.Sprintf("generated, %s, %g/s, %d blocks", shape.name, rate, shape.blocks), open: true,
				trace: func(seed uint64) (*replay.Trace, error) {
					c := shape.config
					c.Rate, c.Requests, c.Seed = rate, 6000, seed+100
					return replay.Generate(c)
				},
				set: func(s *replay.Scenario) { s.KVBlocks = shape.blocks },
			})
		}
	}
	users := axis{name: "users", counted: true, cells: []cell{b.agenticCell(128, 1334), b.agenticCell(128, 5000)}}
	memory := axis{name: "KV per worker", counted: true}
	for _, blocks := range []int{600, 1334, 2000, 5000, 8000} {
		memory.cells = append(memory.cells, b.chatCell(1.5, blocks), b.syntheticCell(1.5, blocks))
	}
	workers := axis{name: "workers", counted: true}
	for _, n := range []int{4, 8, 16, 32, 128} {
		set := func(s *replay.Scenario) { s.Workers = n }
		load := 1.5 * float64(n) / 8
		workers.cells = append(workers.cells, b.chatCell(load, 2000).with(fmt.Sprintf("%d workers", n), set),
			b.syntheticCell(load, 2000).with(fmt.Sprintf("%d workers", n), set))
	}
	half := func(s *replay.Scenario) { s.Speeds = []float64{.5, .5, .5, .5} }
	workers.cells = append(workers.cells, b.chatCell(1, 2000).with("4 of 8 at half speed", half),
		b.syntheticCell(1, 2000).with("4 of 8 at half speed", half))
	engines := axis{name: "engine", counted: true}
	for _, e := range []struct {
		name  string
		model scorer.Engine
		load  float64
	}{{"8B", scorer.Dense8B(), 3.5}, {"70B", scorer.Dense70B(), 1}} {
		set := func(s *replay.Scenario) { s.Engine = e.model }
		engines.cells = append(engines.cells, b.chatCell(e.load, 2000).with(e.name, set), b.syntheticCell(e.load, 2000).with(e.name, set))
	}
	out = append(out, generated, unseen, users, memory, workers, engines)

	late := axis{name: "events", counted: true}
	for _, c := range three {
		late.cells = append(late.cells, c.with("prediction", predicting))
		for _, delay := range []time.Duration{5 * time.Second, 30 * time.Second} {
			set := func(s *replay.Scenario) { s.EventDelay = delay }
			late.cells = append(late.cells, c.with(fmt.Sprintf("events %v late", delay), set),
				c.with(fmt.Sprintf("events %v late", delay), set).with("prediction", predicting))
		}
		late.cells = append(late.cells, c.with("1 % of events lost", func(s *replay.Scenario) { s.EventLoss = .01 }))
	}
	disturbed := axis{name: "disturbance", counted: true}
	for _, c := range []cell{b.chatCell(1.3, 2000), b.syntheticCell(1.3, 2000)} {
		at := 200 * time.Second
		for _, kind := range []replay.ChangeKind{replay.Join, replay.Leave, replay.Restart} {
			disturbed.cells = append(disturbed.cells, c.with("worker "+string(kind)+"s at 200 s", func(s *replay.Scenario) {
				s.Changes = []replay.Change{{At: at, Worker: 3, Kind: kind}}
			}))
		}
		disturbed.cells = append(disturbed.cells, c.with("routers replaced at 200 s", func(s *replay.Scenario) { s.ColdStart = at }))
	}
	replicas := axis{name: "replicas", rules: []string{defaultRule, rivalRule}}
	for _, c := range three {
		replicas.cells = append(replicas.cells, c)
		for _, n := range []int{2, 4} {
			for _, delay := range []time.Duration{0, 10 * time.Millisecond, 100 * time.Millisecond, time.Second, -1} {
				what := fmt.Sprintf("%d replicas, %v", n, delay)
				if delay < 0 {
					what = fmt.Sprintf("%d replicas, no sync", n)
				}
				replicas.cells = append(replicas.cells, c.with(what, func(s *replay.Scenario) { s.Replicas, s.SyncDelay = n, delay }))
			}
		}
	}
	for _, c := range three {
		replicas.cells = append(replicas.cells, c.with("4 replicas, 10ms, lost for 10 s", func(s *replay.Scenario) {
			s.Replicas, s.SyncDelay, s.SyncLost, s.SyncLostFor = 4, 10*time.Millisecond, 200*time.Second, 10*time.Second
		}))
	}
	split := axis{name: "prefill and decode apart", rules: []string{defaultRule, rivalRule}}
	for _, c := range three {
		split.cells = append(split.cells, c.with("prediction", predicting))
		for _, n := range []int{4, 5, 6} {
			split.cells = append(split.cells, c.with("prediction", predicting).with(fmt.Sprintf("%d prefill, %d decode", n, 8-n), func(s *replay.Scenario) {
				s.PrefillWorkers = n
			}))
		}
	}
	groups := axis{name: "router groups", rules: []string{defaultRule}}
	for _, c := range []cell{b.chatCell(8, 2000), b.syntheticCell(6, 2000), b.agenticCell(256, 1334)} {
		c = c.with("32 workers", func(s *replay.Scenario) { s.Workers = 32 })
		groups.cells = append(groups.cells, c)
		for _, n := range []int{4, 8} {
			for _, age := range []time.Duration{250 * time.Millisecond, time.Second, 5 * time.Second} {
				groups.cells = append(groups.cells, c.with(fmt.Sprintf("%d groups, summaries every %v", n, age), func(s *replay.Scenario) {
					s.Groups, s.SummaryAge = n, age
				}))
			}
		}
	}
	knob := axis{name: alphaAxis, cells: []cell{b.chatCell(2, 2000), b.syntheticCell(2, 2000)}}
	for _, alpha := range alphas {
		knob.rules = append(knob.rules, alphaRule(alpha))
	}
	return append(out, late, disturbed, replicas, split, groups, knob)
}

// levels are shares of the load at which the oracle saturates.
var levels = []float64{.4, .6, .8, .95, 1.1} //nolint:gochecknoglobals // a table

const (
	alphaAxis  = "alpha"
	unseenAxis = "generated, unseen shapes"
)

var alphas = []float64{0, .05, .1, .25, .5, 1} //nolint:gochecknoglobals // a table

func alphaRule(alpha float64) string { return fmt.Sprintf("tokens:alpha=%g,attention=6e-5", alpha) }

// saturated is the p90 of TTFT, in s, above which the oracle counts as saturated.
const saturated = 2.

// tops are the loads that the oracle bears: factors by which traces are played
// faster, and generated requests a second.
type tops struct{ chat, synthetic, generated float64 }

func (b *PolicyBench) saturations(ctx context.Context) (t tops, err error) {
	for _, top := range []struct {
		cell      func(load float64, blocks int) cell
		low, high float64
		to        *float64
	}{{b.chatCell, .1, 6, &t.chat}, {b.syntheticCell, .1, 6, &t.synthetic}, {generatedCell, 1, 60, &t.generated}} {
		if *top.to, err = saturation(ctx, top.cell, top.low, top.high); err != nil {
			return t, err
		}
	}
	return t, nil
}

// saturation returns the highest load that the oracle bears, between two bounds.
func saturation(ctx context.Context, at func(load float64, blocks int) cell, low, high float64) (float64, error) {
	rule, err := replay.ParseRule(oracleRule)
	if err != nil {
		return 0, err
	}
	for high-low > .005*high {
		mid := (low + high) / 2
		c := at(mid, 2000)
		s := replay.Scenario{Rule: rule, Seed: 1}
		if s.Trace, err = c.trace(s.Seed); err != nil {
			return 0, err
		}
		c.set(&s)
		r, err := replay.Run(ctx, s)
		switch {
		case err != nil:
			return 0, err
		case r.TTFT.P90 <= saturated:
			low = mid
		default:
			high = mid
		}
	}
	return low, nil
}
