// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/bench"
)

// Peers are the programs of bench/peers, each with the index of another project.
type Peers struct{ Dynamo, LLMD string }

// peerShape is a shape that a peer has too. Prompts are of 512 blocks, and all blocks of
// a prompt have the same engine hash on each worker: where they differ, Dynamo's tree
// remembers the hashes of the first worker only.
type peerShape struct {
	name, what, unit string
	measure          func() float64
	dynamo, llmd     asked
}

// asked says whether a peer has a shape, and the target of kvroute's figure divided by the
// peer's.
type asked struct {
	has    bool
	target bench.Target
}

func peerShapes() []peerShape {
	match := func(workers int) func() float64 {
		return func() float64 { return matchTime(fullPath(workers, true)) }
	}
	no, report := asked{}, asked{has: true}
	atMost := func(v float64) asked { return asked{true, bench.AtMost(v)} }
	atLeast := func(v float64) asked { return asked{true, bench.AtLeast(v)} }
	return []peerShape{
		{"match-4-agree", "match, 4 workers, p50", "µs", match(4), atMost(1), report},
		{"match-64-agree", "match, 64 workers, p50", "µs", match(64), atMost(1), atMost(1e-4)},
		{"match-512-agree", "match, 512 workers, p50", "µs", match(512), atMost(1), report},
		{"match-allocations", "match, 64 workers, allocations", "", matchAllocs, report, report},
		{"path-16", "match, 64 workers, path of 16 nodes, p50", "µs", func() float64 { return matchTime(branchedPath(16, true)) }, atMost(1), no},
		{"path-512", "match, 64 workers, path of 512 nodes, p50", "µs", func() float64 { return matchTime(branchedPath(512, true)) }, report, no},
		{"match-under-load", "match, 64 workers, under full event load, p99", "µs", matchUnderLoad, report, no},
		{"match-random", "match 32 blocks of 10,000 prompts, 4 workers, two threads", "M/s", func() float64 { return matchRandom(true) }, atLeast(1), no},
		{"apply-unique", "events of 32 blocks, unique", "M blocks/s", func() float64 { return applyRate(unique()) }, atLeast(1), report},
		{"apply-shared-agree", "events of 32 blocks, shared by 64", "M blocks/s", func() float64 { return applyRate(shared(true)) }, atLeast(1), report},
		{"remove-1", "removals, 1 per event, tails first", "M blocks/s", func() float64 { return removeRate(unique(), 1, false) }, atLeast(2), no},
		{"remove-1-random", "removals, 1 per event, at random", "M blocks/s", func() float64 { return removeRate(unique(), 1, true) }, atLeast(2), no},
		{"remove-32", "removals, 32 per event, tails first", "M blocks/s", func() float64 { return removeRate(unique(), 32, false) }, atLeast(1.1), no},
		{"bytes-unshared", "bytes per (block, worker), unshared", "B", func() float64 { return pairBytes(unique()) }, atMost(1), report},
		{"bytes-shared-agree", "bytes per (block, worker), shared by 64", "B", func() float64 { return pairBytes(shared(true)) }, atMost(1), atMost(.05)},
		{"heap-returned", "heap returned after removing everything", "%", heapReturned, report, no},
	}
}

// Peers measures kvroute's index and those of its peers in turn, shape by shape and round
// by round, so that other work on the machine affects all of them alike. Each shape gives
// kvroute's figure, each peer's, and the ratio of the two.
func (b *Bench) Peers(ctx context.Context, programs Peers) (out []bench.Figure) {
	for _, s := range peerShapes() {
		if b.Only != nil && !b.Only.MatchString(s.name) {
			continue
		}
		fmt.Fprintf(b.Log, "%s\n", s.name)
		var ours []float64
		theirs := map[string][]float64{}
		peers := []struct {
			name, program string
			asked
		}{{"dynamo-kv-router 1.6.1", programs.Dynamo, s.dynamo}, {"llm-d-kv-cache 0.9.0", programs.LLMD, s.llmd}}
		for range b.Rounds {
			runtime.GC()
			ours = append(ours, s.measure())
			for _, p := range peers {
				if !p.has {
					continue
				}
				text := bench.Must(exec.CommandContext(ctx, p.program, s.name).Output())
				theirs[p.name] = append(theirs[p.name], bench.Must(strconv.ParseFloat(strings.TrimSpace(string(text)), 64)))
			}
		}
		out = append(out, bench.NewFigure(s.what+", kvroute", s.unit, bench.Target{}, ours...))
		for _, p := range peers {
			v := theirs[p.name]
			if !p.has {
				continue
			}
			out = append(out, bench.NewFigure(s.what+", "+p.name, s.unit, bench.Target{}, v...))
			if !p.target.IsSet() && (slices.Min(v) <= 0 || slices.Max(ours) <= 0) {
				continue // a ratio would mean nothing
			}
			ratios := make([]float64, len(ours))
			for i := range ours {
				ratios[i] = ours[i] / v[i]
			}
			out = append(out, bench.NewFigure(s.what+", kvroute ÷ "+p.name, "×", p.target, ratios...))
		}
	}
	return out
}
