// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"context"
	"fmt"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/scorer"
)

// axis is a list of cells that differ in one thing.
type axis struct {
	name  string
	cells []cell
	rules []string
	// counted cells are among those that the targets against the rival look at.
	counted bool
}

const (
	alphaAxis  = "alpha"
	unseenAxis = "generated, unseen shapes"
)

func (b *Bench) axes(t tops) []axis {
	return append(
		b.loadAxes(t),
		axis{name: unseenAxis, cells: unseenCells(), rules: targetRules()},
		axis{name: "users", counted: true, cells: []cell{b.agenticCell(128, 1334), b.agenticCell(128, 5000)}, rules: targetRules()},
		axis{name: "KV per worker", counted: true, cells: b.memoryCells(), rules: targetRules()},
		axis{name: "workers", counted: true, cells: b.workerCells(), rules: targetRules()},
		axis{name: "engine", counted: true, cells: b.engineCells(), rules: targetRules()},
		axis{name: "events", counted: true, cells: b.eventCells(), rules: targetRules()},
		axis{name: "disturbance", counted: true, cells: b.disturbedCells(), rules: targetRules()},
		axis{name: "prefill and decode apart", cells: b.splitCells(), rules: []string{defaultRule, rivalRule}},
		axis{name: alphaAxis, cells: b.recorded(2, 2000), rules: alphaRules()},
	)
}

// levels are shares of the load at which the oracle saturates.
var levels = []float64{.4, .6, .8, .95, 1.1} //nolint:gochecknoglobals // a table

func (b *Bench) loadAxes(t tops) (out []axis) {
	for _, top := range []struct {
		name string
		load float64
		cell func(load float64, blocks int) cell
	}{{"chat", t.chat, b.chatCell}, {"synthetic", t.synthetic, b.syntheticCell}, {"generated", t.generated, generatedCell}} {
		a := axis{name: "load, " + top.name, counted: true, rules: append(targetRules(), "round-robin")}
		for _, share := range levels {
			c := top.cell(share*top.load, 2000)
			c.name = fmt.Sprintf("%s at %.0f %% load, 2000 blocks", top.name, share*100)
			a.cells = append(a.cells, c)
		}
		out = append(out, a)
	}
	return out
}

// unseenCells have shapes that no setting of a rule was found with, at about 75 to 95 %
// of the load that the oracle bears.
func unseenCells() (out []cell) {
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
			out = append(out, cell{
				name: fmt.Sprintf("generated, %s, %g/s, %d blocks", shape.name, rate, shape.blocks), open: true,
				trace: func(seed uint64) *replay.Trace {
					c := shape.config
					c.Rate, c.Requests, c.Seed = rate, 6000, seed+100
					return bench.Must(replay.Generate(c))
				},
				set: func(s *replay.Scenario) { s.KVBlocks = shape.blocks },
			})
		}
	}
	return out
}

func (b *Bench) memoryCells() (out []cell) {
	for _, blocks := range []int{600, 1334, 2000, 5000, 8000} {
		out = append(out, b.recorded(1.5, blocks)...)
	}
	return out
}

func (b *Bench) workerCells() (out []cell) {
	for _, n := range []int{4, 8, 16, 32, 128} {
		for _, c := range b.recorded(1.5*float64(n)/8, 2000) {
			out = append(out, c.with(fmt.Sprintf("%d workers", n), func(s *replay.Scenario) { s.Workers = n }))
		}
	}
	for _, c := range b.recorded(1, 2000) {
		out = append(out, c.with("4 of 8 at half speed", func(s *replay.Scenario) { s.Speeds = []float64{.5, .5, .5, .5} }))
	}
	return out
}

func (b *Bench) engineCells() (out []cell) {
	for _, e := range []struct {
		name  string
		model scorer.Engine
		load  float64
	}{{"8B", scorer.Dense8B(), 3.5}, {"70B", scorer.Dense70B(), 1}} {
		for _, c := range b.recorded(e.load, 2000) {
			out = append(out, c.with(e.name, func(s *replay.Scenario) { s.Engine = e.model }))
		}
	}
	return out
}

func (b *Bench) eventCells() (out []cell) {
	for _, c := range b.three() {
		out = append(out, c.with("prediction", predicting))
		for _, delay := range []time.Duration{5 * time.Second, 30 * time.Second} {
			late := c.with(fmt.Sprintf("events %v late", delay), func(s *replay.Scenario) { s.EventDelay = delay })
			out = append(out, late, late.with("prediction", predicting))
		}
		out = append(out, c.with("1 % of events lost", func(s *replay.Scenario) { s.EventLoss = .01 }))
	}
	return out
}

func (b *Bench) disturbedCells() (out []cell) {
	const at = 200 * time.Second
	for _, c := range b.recorded(1.3, 2000) {
		for _, kind := range []replay.ChangeKind{replay.Join, replay.Leave, replay.Restart} {
			out = append(out, c.with("worker "+string(kind)+"s at 200 s", func(s *replay.Scenario) {
				s.Changes = []replay.Change{{At: at, Worker: 3, Kind: kind}}
			}))
		}
		out = append(out, c.with("routers replaced at 200 s", func(s *replay.Scenario) { s.ColdStart = at }))
	}
	return out
}

func (b *Bench) splitCells() (out []cell) {
	for _, c := range b.three() {
		c = c.with("prediction", predicting)
		out = append(out, c)
		for _, n := range []int{4, 5, 6} {
			out = append(out, c.with(fmt.Sprintf("%d prefill, %d decode", n, 8-n), func(s *replay.Scenario) { s.PrefillWorkers = n }))
		}
	}
	return out
}

var alphas = []float64{0, .05, .1, .25, .5, 1} //nolint:gochecknoglobals // a table

func alphaRule(alpha float64) string { return fmt.Sprintf("tokens:alpha=%g,attention=6e-5", alpha) }

func alphaRules() (out []string) {
	for _, alpha := range alphas {
		out = append(out, alphaRule(alpha))
	}
	return out
}

// saturated is the p90 of TTFT, in s, above which the oracle counts as saturated.
const saturated = 2.

// tops are the loads that the oracle bears: factors by which traces are played
// faster, and generated requests a second.
type tops struct{ chat, synthetic, generated float64 }

func (b *Bench) saturations(ctx context.Context) (t tops) {
	for _, top := range []struct {
		cell      func(load float64, blocks int) cell
		low, high float64
		to        *float64
	}{{b.chatCell, .1, 6, &t.chat}, {b.syntheticCell, .1, 6, &t.synthetic}, {generatedCell, 1, 60, &t.generated}} {
		*top.to = saturation(ctx, top.cell, top.low, top.high)
	}
	return t
}

// saturation returns the highest load that the oracle bears, between two bounds.
func saturation(ctx context.Context, at func(load float64, blocks int) cell, low, high float64) float64 {
	one := Bench{Seeds: 1}
	for high-low > .005*high {
		mid := (low + high) / 2
		if m := one.play(ctx, []cell{at(mid, 2000)}, []string{oracleRule}); m[0].TTFTp90.Mean <= saturated {
			low = mid
		} else {
			high = mid
		}
	}
	return low
}
