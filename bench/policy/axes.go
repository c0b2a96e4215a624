// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"context"
	"fmt"
	"time"

	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/scorer"
)

// axisCells vary one thing at a time: users, lanes, blocks of a worker, workers, engine, events, and what
// happens to a worker.
func (b *Bench) axisCells() []cell {
	out := []cell{b.agenticCell(128, 1334), b.agenticCell(128, 5000)}
	// About 60, 80 and 95 % of the lanes that the oracle bears with 2000 blocks, 80 % with 5000.
	out = append(out, lanesCell(25, 2000), lanesCell(33, 2000), lanesCell(39, 2000), lanesCell(90, 5000))
	for _, blocks := range []int{600, 1334, 2000, 5000, 8000} {
		out = append(out, b.recorded(1.5, blocks)...)
	}
	for _, n := range []int{4, 8, 16, 32, 128} {
		for _, c := range b.recorded(1.5*float64(n)/8, 2000) {
			out = append(out, c.with(fmt.Sprintf("%d workers", n), func(s *replay.Scenario) { s.Workers = n }))
		}
	}
	for _, c := range b.recorded(1, 2000) {
		out = append(out, c.with("4 of 8 at half speed", func(s *replay.Scenario) { s.Speeds = []float64{.5, .5, .5, .5} }))
	}
	for _, c := range b.recorded(3.5, 2000) {
		out = append(out, c.with("8B", func(s *replay.Scenario) { s.Engine = scorer.Dense8B() }))
	}
	for _, c := range b.recorded(1, 2000) {
		out = append(out, c.with("70B", func(s *replay.Scenario) { s.Engine = scorer.Dense70B() }))
	}
	for _, c := range b.three() {
		out = append(out, c.with("prediction", predicting))
		for _, delay := range []time.Duration{5 * time.Second, 30 * time.Second} {
			late := c.with(fmt.Sprintf("events %v late", delay), func(s *replay.Scenario) { s.EventDelay = delay })
			out = append(out, late, late.with("prediction", predicting))
		}
		out = append(out, c.with("1 % of events lost", func(s *replay.Scenario) { s.EventLoss = .01 }))
	}
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
			shape.config.Rate, shape.config.Requests, shape.config.Seed = rate, 6000, 100
			out = append(out, generatedCell(fmt.Sprintf("generated, %s, %g/s, %d blocks", shape.name, rate, shape.blocks), shape.blocks, shape.config))
		}
	}
	return out
}

// saturated is the p90 of TTFT, in s, above which the oracle counts as saturated.
const saturated = 2.

// loadCells are open loops at shares of the load at which the oracle saturates.
func (b *Bench) loadCells(ctx context.Context) (out []cell) {
	for _, kind := range []struct {
		name      string
		low, high float64 // bounds of that load
		cell      func(load float64, blocks int) cell
	}{
		{"chat", .1, 6, b.chatCell},
		{"synthetic", .1, 6, b.syntheticCell},
		// 150 prefixes of 6,000 tokens, questions of 1,200 and outputs of 1,000, long enough for
		// queues to settle.
		{"generated", 1, 60, func(rate float64, blocks int) cell {
			return generatedCell(fmt.Sprint(rate), blocks, replay.GenerateConfig{Rate: rate, Requests: 8000})
		}},
	} {
		low, high := kind.low, kind.high
		for high-low > .005*high {
			mid := (low + high) / 2
			if m := b.play(ctx, []cell{kind.cell(mid, 2000)}, []string{oracleRule}, 1); m[0].TTFTp90.Mean <= saturated {
				low = mid
			} else {
				high = mid
			}
		}
		b.log("%s: the oracle saturates at load %.2f", kind.name, low)
		for _, share := range []float64{.4, .6, .8, .95, 1.1} {
			c := kind.cell(share*low, 2000)
			c.name = fmt.Sprintf("%s at %.0f %% load, 2000 blocks", kind.name, share*100)
			out = append(out, c)
		}
	}
	return out
}
