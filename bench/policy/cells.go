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

// noDecode is the default without the term for decoding requests.
const noDecode = defaultRule + ",decode_weight=0"

func targetRules() []string { return []string{defaultRule, rivalRule, oracleRule} }

// allRules are the default, the oracle, and the rules of other routers.
func allRules() []string { return append([]string{defaultRule, oracleRule}, replay.Published()...) }

// otherRules are also played in the seven cells.
func otherRules() []string {
	return strings.Fields(`dynamo:overlap_score_weight=4 dynamo:overlap_score_weight=32 predicted_ttft:alpha=.25 tokens`)
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
	return b.dealtCell(fmt.Sprintf("agentic %d users, %d blocks", users, blocks), users, requests, 8).also(func(s *replay.Scenario) { s.KVBlocks = blocks })
}

// dealtCell has recorded agents.
func (b *Bench) dealtCell(name string, users, requests, workers int) cell {
	return cell{
		name: name,
		trace: func(seed uint64) *replay.Trace {
			c := replay.DealConfig{Users: users, Requests: requests, Seed: seed}
			if b.dealt[c] == nil {
				b.dealt[c] = bench.Must(b.conversations.Deal(c))
			}
			return b.dealt[c]
		},
		set: func(s *replay.Scenario) { s.Workers, s.KVBlocks = workers, 2000 },
	}
}

// laneTime is how long lanes are measured.
const laneTime = 20 * time.Minute

// lanesCell has made-up sessions of coding agents, with sub-agents, as AgentX plays them. All sessions of
// a product share their tools and system prompts. With 0 products each session has its own.
func lanesCell(name string, lanes, products int) cell {
	return cell{
		name: name,
		trace: func(seed uint64) *replay.Trace {
			return bench.Must(replay.Lanes(replay.LaneConfig{Lanes: lanes, Products: products, Duration: laneTime, Seed: seed}))
		},
		set: func(s *replay.Scenario) { s.KVBlocks = 2000; predicting(s) },
	}
}

func generatedCell(name string, blocks int, c replay.GenerateConfig) cell {
	return cell{
		name: name, open: true,
		trace: func(seed uint64) *replay.Trace {
			c := c
			c.Seed = seed
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

// sevenCells are those of the table of all rules.
func (b *Bench) sevenCells() []cell {
	return predict([]cell{
		b.chatCell(1.5, 600), b.chatCell(2, 2000), b.syntheticCell(1.5, 600), b.syntheticCell(2, 2000),
		b.agenticCell(32, 1334), b.agenticCell(64, 1334), b.agenticCell(64, 5000),
	})
}

// predict returns the cells as kvroute runs by default.
func predict(cells []cell) (out []cell) {
	for _, c := range cells {
		out = append(out, c.also(predicting))
	}
	return out
}
