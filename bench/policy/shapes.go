// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/scorer"
)

// most is the number of shared prefixes up to which [replay.Result.Busiest] is judged. With more of
// them, a rule that follows the prefixes alone does not fill one worker either.
const most = 4

// shape describes generated requests and the workers. A value of 0 has its default.
type shape struct {
	workers int
	rate    float64 // requests a second
	n       int     // requests
	// Shared prefixes, their tokens, and the mean tokens of questions and outputs.
	prefixes, prefix, question, output int
	turns                              int
	burst                              int // requests that come together
	apart                              time.Duration
	users                              bool // they share only the prefix
	blocks                             int
	engine                             scorer.Engine
}

// unique is a number of prefixes of which hardly any comes twice.
const unique = 1 << 20

// generated returns the cell of a shape. kvroute runs as it does by default.
func generated(name string, s shape) cell {
	c := generatedCell(name, cmp.Or(s.blocks, 2000), replay.GenerateConfig{
		Requests: s.n, Rate: s.rate, Prefixes: s.prefixes, PrefixTokens: s.prefix, QuestionTokens: s.question, OutputTokens: s.output, Turns: s.turns,
		Burst: s.burst, BurstApart: s.apart, BurstQuestions: s.users,
	}).also(predicting).also(func(r *replay.Scenario) { r.Workers, r.Engine = s.workers, s.engine })
	c.few = s.prefixes > 0 && s.prefixes <= most
	return c
}

// firstShapes are the 23 cells with which the fault was found that one prefix filled one worker, and with
// which the cost of decoding was chosen.
func (b *Bench) firstShapes() []cell {
	hot := func(workers, n int, rate float64, prefixes, prefix, question int) shape {
		return shape{workers: workers, n: n, rate: rate, prefixes: prefixes, prefix: prefix, question: question, output: 600}
	}
	small, large := hot(16, 2400, 12, 1, 15_000, 500), hot(16, 2400, 4, 1, 15_000, 500)
	small.engine, large.engine = scorer.Dense8B(), scorer.Dense70B()
	chat := func(name string, load float64, blocks int) cell {
		return b.chatCell(load, blocks).also(predicting).named(name)
	}
	return []cell{
		generated("h16-1x15k", hot(16, 2400, 6, 1, 15_000, 500)),
		generated("h16-1x30k", hot(16, 2400, 6, 1, 30_000, 500)),
		generated("h16-1x8k", hot(16, 2400, 6, 1, 8000, 500)),
		generated("h8-4x30k", hot(8, 1200, 3, 4, 30_000, 500)),
		generated("h16-4x8k", hot(16, 2400, 6, 4, 8000, 500)),
		generated("h16-1x4k", hot(16, 2400, 10, 1, 4000, 200)),
		generated("h8-32x8k", hot(8, 1200, 3, 32, 8000, 500)),
		generated("d8-150x6k", shape{n: 3000, rate: 12}),
		chat("t-conv2", 2, 2000),
		chat("t-conv1", 1, 2000),
		b.syntheticCell(2, 2000).also(predicting).named("t-syn2"),
		b.dealtCell("t-ag64", 64, 3000, 8).also(predicting),
		generated("b8-16x15k", small),
		generated("b70-16x15k", large),
		b.dealtCell("ag128-16", 128, 4000, 16).also(predicting),
		b.dealtCell("ag32-8", 32, 2000, 8).also(predicting),
		generated("turns5", shape{workers: 16, n: 2400, rate: 6, prefixes: 4, prefix: 20_000, question: 2000, turns: 5, output: 300}),
		generated("few-short", hot(8, 6000, 36, 20, 3000, 600)),
		generated("many-long", shape{n: 3000, rate: 6, prefixes: 400, prefix: 12_000, question: 800, output: 1500, blocks: 5000}),
		generated("short-out", shape{n: 6000, rate: 30, prefixes: 8, prefix: 4000, question: 300, output: 20}),
		chat("halfspeed", 1, 2000).also(slowHalf(.5)),
		generated("w64", shape{workers: 64, n: 8000, rate: 60, prefixes: 10, prefix: 6000, question: 800, output: 500}),
		chat("small-cache", 1.5, 600),
	}
}

// publicShapes are the public traces among the 23 cells.
func publicShapes(first []cell) []cell {
	return pick(first, "t-conv1", "t-conv2", "t-syn2", "ag32-8", "t-ag64", "ag128-16")
}

// pick returns the cells with these names.
func pick(cells []cell, names ...string) (out []cell) {
	for _, name := range names {
		out = append(out, cells[slices.IndexFunc(cells, func(c cell) bool { return c.name == name })])
	}
	return out
}

// slowHalf has four of eight workers run at a speed.
func slowHalf(v float64) func(s *replay.Scenario) {
	return func(s *replay.Scenario) { s.Speeds = []float64{v, v, v, v} }
}

// equalPrompts is eight equal prompts within 30 ms, of which the caches hold nothing, onto eight idle workers.
func equalPrompts() cell {
	return generated("8 equal prompts within 30 ms", shape{n: 400, rate: .008, prefixes: unique, prefix: 8000, question: 400, output: 300, burst: 8, apart: 30 * time.Millisecond})
}

// furtherShapes are cells that no setting of a rule was chosen with.
func (b *Bench) furtherShapes() []cell {
	shares := b.shareCells()
	bestOf := func(n int) shape {
		return shape{rate: float64(n) / 2, n: max(800, 40*n), prefixes: unique, prefix: 6000, question: 400, output: 300, burst: n}
	}
	hotBest := generated("best of 8, 16/s, 4 prefixes of 8k, 16 workers", shape{workers: 16, rate: 16, n: 1200, prefixes: 4, prefix: 8000, question: 400, output: 300, burst: 8})
	out := slices.Concat(shares, b.scaleOuts(), b.agentCells(), []cell{
		equalPrompts(),
		generated("best of 8 every 2 s", bestOf(8)),
		generated("best of 32 every 2 s", bestOf(32)),
		hotBest,
		generated("bursts of 100 users of a new prefix of 15k within 5 s, 16 workers", shape{
			workers: 16, rate: 100 / 30., n: 1000, prefixes: unique, prefix: 15_000, question: 400, output: 300, burst: 100, apart: 5 * time.Second, users: true,
		}),
		generated("bursts of 200 users of 4 prefixes of 4k within 2 s, 16 workers", shape{
			workers: 16, rate: 200 / 30., n: 2000, prefixes: 4, prefix: 4000, question: 400, output: 300, burst: 200, apart: 2 * time.Second, users: true,
		}),
		generated("bursts of 400 users of 1 prefix of 8k within 1 s, 32 workers", shape{
			workers: 32, rate: 10, n: 3200, prefixes: 1, prefix: 8000, question: 400, output: 300, burst: 400, apart: time.Second, users: true,
		}),
		generated("outputs of 20 tokens, 1 prefix of 8k, 80/s", shape{rate: 80, n: 4000, prefixes: 1, prefix: 8000, question: 400, output: 20}),
		generated("outputs of 20 tokens, 4 prefixes of 2k, 16 workers, 200/s", shape{workers: 16, rate: 200, n: 6000, prefixes: 4, prefix: 2000, question: 400, output: 20}),
		generated("8B, 2 prefixes of 8k, 16 workers, 60/s", shape{workers: 16, rate: 60, n: 3000, prefixes: 2, prefix: 8000, question: 400, output: 300, engine: scorer.Dense8B()}),
		generated("70B, 2 prefixes of 8k, 16 workers, 30/s", shape{workers: 16, rate: 30, n: 1800, prefixes: 2, prefix: 8000, question: 400, output: 300, engine: scorer.Dense70B()}),
		generated("60 conversations of 4 turns, 44/s", shape{rate: 44, n: 4000, prefixes: 60, prefix: 4000, question: 500, turns: 4, output: 400}),
	})
	for _, c := range append(pick(shares, "1 prefix of 15k, 16 workers, 60 %", "4 prefixes of 15k, 16 workers, 60 %"), b.chatCell(1.5, 2000).also(predicting)) {
		if c.open && !c.few {
			out = append(out, c)
		}
		out = append(out, c.beside("no events", func(s *replay.Scenario) { s.Approximate, s.Predict = true, 0 }))
	}
	for _, c := range pick(shares, "2 prefixes of 8k, 32 workers, 60 %", "20 prefixes of 15k, 32 workers, 60 %") {
		out = append(out, c.beside("4 groups", func(s *replay.Scenario) { s.Groups, s.SummaryAge = 4, time.Second }))
	}
	for _, c := range append(pick(shares, "1 prefix of 15k, 16 workers, 60 %", "4 prefixes of 4k, 16 workers, 95 %"), hotBest) {
		out = append(out, c.beside("4 replicas", func(s *replay.Scenario) { s.Replicas, s.SyncDelay = 4, 10*time.Millisecond }))
	}
	for _, c := range b.speedComparisons() {
		out = append(out, c.cell)
	}
	return out
}

// shareCells have shared prefixes at shares of the load that the oracle bears: up to there its p90 of TTFT
// is at most 2 s and its mean time per token at most 50 ms. There are at least 150 requests for each worker,
// so that the first copies of a prefix are not most of the work.
func (b *Bench) shareCells() (out []cell) {
	for _, s := range []struct {
		prefixes, prefix, workers int
		bears                     float64 // requests a second, found by simulation
	}{
		{1, 1000, 8, 103},
		{1, 15_000, 16, 47},
		{1, 30_000, 64, 90},
		{2, 30_000, 8, 11.3},
		{2, 8000, 32, 153},
		{4, 15_000, 16, 47},
		{4, 4000, 16, 120},
		{20, 8000, 8, 38},
		{20, 15_000, 32, 94},
	} {
		plural := "es"
		if s.prefixes == 1 {
			plural = ""
		}
		for _, percent := range []float64{20, 60, 95} {
			rate := s.bears * percent / 100
			out = append(out, generated(fmt.Sprintf("%d prefix%s of %dk, %d workers, %.0f %%", s.prefixes, plural, s.prefix/1000, s.workers, percent), shape{
				workers: s.workers, rate: rate, n: max(150*s.workers, min(4000, int(60*rate))), prefixes: s.prefixes, prefix: s.prefix, question: 400, output: 300,
			}))
		}
	}
	return out
}

// scaleOuts have eight workers with 95 % of the load that they bear. Four more join.
func (b *Bench) scaleOuts() []cell {
	grow := func(at time.Duration) func(s *replay.Scenario) {
		return func(s *replay.Scenario) {
			s.Workers, s.Changes = 12, nil
			for w := 8; w < 12; w++ {
				s.Changes = append(s.Changes, replay.Change{At: at, Worker: w, Kind: replay.Join})
			}
		}
	}
	out := []cell{
		generated("1 prefix of 15k, 22/s", shape{rate: 22, n: 1320, prefixes: 1, prefix: 15_000, question: 400, output: 300}).with("8 workers to 12 at 20 s", grow(20*time.Second)),
		generated("4 prefixes of 8k, 36/s", shape{rate: 36, n: 2160, prefixes: 4, prefix: 8000, question: 400, output: 300}).with("8 workers to 12 at 20 s", grow(20*time.Second)),
		b.chatCell(2, 2000).also(predicting).with("8 workers to 12 at 200 s", grow(200*time.Second)),
	}
	for i := range out {
		out[i].few = false // the new workers cannot have had as many requests
	}
	return out
}

// agentCells are closed loops with pauses: recorded agents, and lanes with sub-agents.
func (b *Bench) agentCells() []cell {
	return []cell{b.dealtCell("16 agents", 16, 1500, 8).also(predicting), lanesCell("12 lanes", 12, 0), lanesCell("33 lanes", 33, 0), lanesCell("12 lanes, one product", 12, 1)}
}

// speedComparisons are of four fast workers with and without four slow ones.
func (b *Bench) speedComparisons() (out []comparison) {
	for _, c := range []cell{
		b.chatCell(.6, 2000).also(predicting),
		generated("1 prefix of 8k, 12/s", shape{rate: 12, n: 1200, prefixes: 1, prefix: 8000, question: 400, output: 300}),
	} {
		c.few = false
		four := c.with("4 workers", func(s *replay.Scenario) { s.Workers = 4 })
		for _, v := range []float64{.25, .5} {
			slow := c.with(fmt.Sprintf("4 of 8 at speed %g", v), slowHalf(v))
			slow.bound = noOracle
			k := comparison{what: fmt.Sprintf("4 workers and 4 at speed %g over the 4 alone, %s", v, c.name), cell: slow, one: four}
			if c.name == "chat ×0.6, 2000 blocks" {
				k.ttft = bench.AtMost(1) // 1 = the slow workers do no harm
			}
			out = append(out, k)
		}
	}
	return out
}
