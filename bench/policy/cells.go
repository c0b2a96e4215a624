// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/replay"
)

// The rules of the targets.
const (
	defaultRule = replay.Default
	rivalRule   = "dynamo"
	oracleRule  = "oracle"
)

func targetRules() []string { return []string{defaultRule, rivalRule, oracleRule} }

// otherRules are the rules that are also played in the seven cells and the larger ones.
func otherRules() []string {
	return strings.Fields(`random round-robin power-of-two least-requests vllm-dp sglang-cache-aware aibrix-prefix-cache gie-3-2-2 gie-3-2-2-2 llm-d-baseline
		lmetric dynamo:overlap_score_weight=4 dynamo:overlap_score_weight=32 dynamo-agentic predicted_ttft predicted_ttft:alpha=.1 predicted_ttft:alpha=.25 tokens`)
}

// jitter is the most by which a request of a recorded open loop comes later. Where caches
// or engines are full, one different decision changes all later ones. Without jitter, a
// rule that draws nothing would show one such course as its only result.
const jitter = time.Millisecond

// predicting is how kvroute runs by default.
func predicting(s *replay.Scenario) { s.Predict = 10 * time.Second }

func (b *Bench) chatCell(load float64, blocks int) cell {
	return recordedCell("chat", &b.chat, load, blocks)
}

func (b *Bench) syntheticCell(load float64, blocks int) cell {
	return recordedCell("synthetic", &b.synthetic, load, blocks)
}

func recordedCell(name string, trace **replay.Trace, load float64, blocks int) cell {
	return cell{
		name: fmt.Sprintf("%s ×%g, %d blocks", name, load, blocks), open: true,
		trace: func(uint64) *replay.Trace { return *trace },
		set:   func(s *replay.Scenario) { s.Speedup, s.KVBlocks, s.Jitter = load, blocks, jitter },
	}
}

func (b *Bench) agenticCell(users, blocks int) cell {
	requests := 4000
	if users >= 256 {
		requests = 8000
	}
	return cell{
		name: fmt.Sprintf("agentic %d users, %d blocks", users, blocks),
		trace: func(seed uint64) *replay.Trace {
			c := replay.DealConfig{Users: users, Requests: requests, Seed: seed}
			if b.dealt[c] == nil {
				b.dealt[c] = bench.Must(b.conversations.Deal(c))
			}
			return b.dealt[c]
		},
		set: func(s *replay.Scenario) { s.KVBlocks = blocks },
	}
}

// lanesCell has made-up sessions of coding agents, with sub-agents, as AgentX plays them.
func lanesCell(lanes, blocks int) cell {
	return cell{
		name: fmt.Sprintf("%d lanes, %d blocks", lanes, blocks),
		trace: func(seed uint64) *replay.Trace {
			return bench.Must(replay.Lanes(replay.LaneConfig{Lanes: lanes, Seed: seed}))
		},
		set: func(s *replay.Scenario) { s.KVBlocks = blocks },
	}
}

func generatedCell(name string, blocks int, c replay.GenerateConfig) cell {
	return cell{
		name: name, open: true,
		trace: func(seed uint64) *replay.Trace {
			c := c
			c.Seed += seed
			return bench.Must(replay.Generate(c))
		},
		set: func(s *replay.Scenario) { s.KVBlocks = blocks },
	}
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

// largerCells are open loops with more workers.
func (b *Bench) largerCells() (out []cell) {
	for _, n := range []int{16, 32} {
		for _, c := range b.recorded(2*float64(n)/8, 2000) {
			out = append(out, c.with(fmt.Sprintf("%d workers", n), func(s *replay.Scenario) { s.Workers = n }).with("prediction", predicting))
		}
	}
	return out
}
