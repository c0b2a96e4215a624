// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"os/exec"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/bench"
)

// Peers are the programs of bench/peers, each with the index of another project.
type Peers struct{ Dynamo, LLMD string }

// peerShape is a shape that a peer has too. Prompts have 512 blocks, and all blocks of a prompt
// have the same engine hash on each worker: where they differ, Dynamo's tree remembers only the
// hashes of the first worker.
type peerShape struct {
	name, what, unit string
	measure          func() float64
	// The targets of kvroute's figure divided by the peer's; nil if the peer has no such shape.
	dynamo, llmd *bench.Target
}

func peerShapes() []peerShape {
	match := func(workers int) func() float64 {
		return func() float64 { return matchTime(fullPath(workers, agree)) }
	}
	atMost := func(v float64) *bench.Target { return new(bench.AtMost(v)) }
	atLeast := func(v float64) *bench.Target { return new(bench.AtLeast(v)) }
	report := new(bench.Target)
	return []peerShape{
		{"match-4-agree", "match, 4 workers, p50", "µs", match(4), atMost(1), report},
		{"match-64-agree", "match, 64 workers, p50", "µs", match(64), atMost(1), atMost(1e-4)},
		{"match-512-agree", "match, 512 workers, p50", "µs", match(512), atMost(1), report},
		{"match-allocations", "match, 64 workers, allocations", "", matchAllocs, report, report},
		{"path-16", "match, 64 workers, path of 16 nodes, p50", "µs", func() float64 { return matchTime(branchedPath(16, agree)) }, atMost(1), nil},
		{"path-512", "match, 64 workers, path of 512 nodes, p50", "µs", func() float64 { return matchTime(branchedPath(512, agree)) }, report, nil},
		{"match-under-load", "match, 64 workers, under full event load, p99", "µs", matchUnderLoad, report, nil},
		{"match-random", "match 32 blocks of 10,000 prompts, 4 workers, two threads", "M/s", func() float64 { return matchRandom(agree) }, atLeast(1), nil},
		{"apply-unique", "events of 32 blocks, unique", "M blocks/s", func() float64 { return applyRate(unique()) }, atLeast(1), report},
		{"apply-shared-agree", "events of 32 blocks, shared by 64", "M blocks/s", func() float64 { return applyRate(shared(agree)) }, atLeast(1), report},
		{"remove-1", "removals, 1 per event, tails first", "M blocks/s", func() float64 { return removeRate(unique(), removals, 1) }, atLeast(2), nil},
		{"remove-1-random", "removals, 1 per event, at random", "M blocks/s", func() float64 { return removeRate(unique(), scattered, 1) }, atLeast(2), nil},
		{"remove-32", "removals, 32 per event, tails first", "M blocks/s", func() float64 { return removeRate(unique(), removals, 32) }, atLeast(1.1), nil},
		{"bytes-unshared", "bytes per (block, worker), unshared", "B", func() float64 { return pairBytes(unique()) }, atMost(1), report},
		{"bytes-shared-agree", "bytes per (block, worker), shared by 64", "B", func() float64 { return pairBytes(shared(agree)) }, atMost(1), atMost(.05)},
		{"heap-returned", "heap returned after removing everything", "%", heapReturned, report, nil},
	}
}

// Peers measures kvroute's index and those of its peers in turn, shape by shape and round
// by round, so that other work on the machine affects all of them alike. Each shape gives
// kvroute's figure, each peer's, and the ratio of the two where it has a target.
func (b *Bench) Peers(ctx context.Context, programs Peers) []bench.Figure {
	var shapes []shape
	for _, s := range peerShapes() {
		rows := []bench.Row{bench.NewRow(s.what+", kvroute", s.unit, bench.Target{})}
		peers := []struct {
			name, program string
			ratio         *bench.Target
		}{{"dynamo-kv-router 1.6.1", programs.Dynamo, s.dynamo}, {"llm-d-kv-cache 0.9.0", programs.LLMD, s.llmd}}
		for _, p := range peers {
			if p.ratio != nil {
				rows = append(rows, bench.NewRow(s.what+", "+p.name, s.unit, bench.Target{}))
			}
			if p.ratio != nil && p.ratio.IsSet() {
				rows = append(rows, bench.NewRow(s.what+", kvroute ÷ "+p.name, "×", *p.ratio))
			}
		}
		shapes = append(shapes, shape{rows, func() []float64 {
			ours := s.measure()
			values := []float64{ours}
			for _, p := range peers {
				if p.ratio == nil {
					continue
				}
				text := bench.Must(exec.CommandContext(ctx, p.program, s.name).Output())
				theirs := bench.Must(strconv.ParseFloat(strings.TrimSpace(string(text)), 64))
				if values = append(values, theirs); p.ratio.IsSet() {
					values = append(values, ours/theirs)
				}
			}
			return values
		}})
	}
	return b.run(shapes)
}
