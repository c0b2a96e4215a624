// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

// cell is one scenario of the comparison, without its rule.
type cell struct {
	name string
	// trace returns the workload for a seed.
	trace func(seed uint64) *replay.Trace
	set   func(s *replay.Scenario)
	open  bool
}

// jitter is the most by which a request of a recorded open loop comes later. Where caches
// or engines are full, one different decision changes all later ones. Without jitter, a
// rule that draws nothing would show one such course as its only result.
const jitter = time.Millisecond

// predicting is how kvroute runs by default.
func predicting(s *replay.Scenario) { s.Predict = 10 * time.Second }

func (b *Bench) openCell(name string, trace func() *replay.Trace, load float64, blocks int) cell {
	return cell{
		name: name, open: true,
		trace: func(uint64) *replay.Trace { return trace() },
		set:   func(s *replay.Scenario) { s.Speedup, s.KVBlocks, s.Jitter = load, blocks, jitter },
	}
}

func (b *Bench) chatCell(load float64, blocks int) cell {
	return b.openCell(fmt.Sprintf("chat ×%g, %d blocks", load, blocks), func() *replay.Trace { return b.chat }, load, blocks)
}

func (b *Bench) syntheticCell(load float64, blocks int) cell {
	return b.openCell(fmt.Sprintf("synthetic ×%g, %d blocks", load, blocks), func() *replay.Trace { return b.synthetic }, load, blocks)
}

func (b *Bench) agenticCell(users, blocks int) cell {
	requests := 4000
	if users >= 256 {
		requests = 8000
	}
	return cell{
		name: fmt.Sprintf("agentic %d users, %d blocks", users, blocks),
		trace: func(seed uint64) *replay.Trace {
			key := dealt{users, requests, seed}
			if b.dealt[key] == nil {
				t := bench.Must(b.conversations.Deal(replay.DealConfig{Users: users, Requests: requests, Seed: seed}))
				b.dealt[key] = t
			}
			return b.dealt[key]
		},
		set: func(s *replay.Scenario) { s.KVBlocks = blocks },
	}
}

// generatedCell has 150 prefixes of 6,000 tokens, questions of 1,200 and outputs of
// 1,000, long enough for queues to settle.
func generatedCell(rate float64, blocks int) cell {
	return cell{
		name: fmt.Sprintf("generated %g/s, %d blocks", rate, blocks), open: true,
		trace: func(seed uint64) *replay.Trace {
			return bench.Must(replay.Generate(replay.GenerateConfig{Rate: rate, Requests: 8000, Seed: seed}))
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

// recorded are the two recorded open loops.
func (b *Bench) recorded(load float64, blocks int) []cell {
	return []cell{b.chatCell(load, blocks), b.syntheticCell(load, blocks)}
}

// three are one cell of each recorded trace.
func (b *Bench) three() []cell { return append(b.recorded(1.5, 2000), b.agenticCell(32, 1334)) }

// cells are the seven in which all rules are played.
func (b *Bench) cells() []cell {
	return []cell{
		b.chatCell(1.5, 600), b.chatCell(2, 2000), b.syntheticCell(1.5, 600), b.syntheticCell(2, 2000),
		b.agenticCell(32, 1334), b.agenticCell(64, 1334), b.agenticCell(64, 5000),
	}
}

// largerCells are open loops with more workers, and last one that every rule saturates.
func (b *Bench) largerCells() (out []cell) {
	for _, n := range []int{16, 32} {
		for _, c := range b.recorded(2*float64(n)/8, 2000) {
			out = append(out, c.with(fmt.Sprintf("%d workers", n), func(s *replay.Scenario) { s.Workers = n }).with("prediction", predicting))
		}
	}
	return append(out, b.chatCell(2, 600).with("prediction", predicting))
}

// targetRules are the rules that the targets divide by each other.
func targetRules() []string { return []string{defaultRule, rivalRule, oracleRule} }

// cellRules are the rules that are played in the seven cells.
func cellRules() []string {
	return append(targetRules(), strings.Fields(`random round-robin power-of-two least-requests vllm-dp sglang-cache-aware aibrix-prefix-cache gie-3-2-2-2
		lmetric dynamo:overlap_score_weight=4 dynamo:overlap_score_weight=32 dynamo-agentic predicted_ttft predicted_ttft:alpha=.1 predicted_ttft:alpha=.25 tokens`)...)
}
