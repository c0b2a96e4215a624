// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// PeerBench measures the index and its peers in turn, shape by shape and round by
// round, so that what the machine does besides falls on all of them alike.
type PeerBench struct {
	Rounds       int
	Only         *regexp.Regexp // of the shapes' names; nil means all
	Dynamo, LLMD string         // programs of bench/peers
	Log          io.Writer      // told what is being measured
}

// peerShape is a shape that a peer has, too, with what ours may be at most (or must
// be at least) as a multiple of the peer's figure. Prompts are of 512 blocks and all
// of a prompt's blocks have the same engine hash on each worker: where they differ,
// Dynamo's tree remembers the first worker's only.
type peerShape struct {
	name, what, unit string
	dynamo, llmd     limit // without text: the peer has no such shape, or no target
	measure          func() float64
}

func peerShapes() []peerShape {
	report := limit{text: "–"}
	match := func(workers int) func() float64 {
		return func() float64 { return matchTime(fullPath(workers, true)) }
	}
	return []peerShape{
		{"match-4-agree", "match, 4 workers, p50", "µs", atMost(1), report, match(4)},
		{"match-64-agree", "match, 64 workers, p50", "µs", atMost(1), atMost(1e-4), match(64)},
		{"match-512-agree", "match, 512 workers, p50", "µs", atMost(1), report, match(512)},
		{"match-allocations", "match, 64 workers, allocations", "", report, report, matchAllocs},
		{"path-16", "match, 64 workers, path of 16 nodes, p50", "µs", atMost(1), limit{}, func() float64 { return matchTime(branchedPath(16, true)) }},
		{"path-512", "match, 64 workers, path of 512 nodes, p50", "µs", report, limit{}, func() float64 { return matchTime(branchedPath(512, true)) }},
		{"match-under-load", "match, 64 workers, under full event load, p99", "µs", report, limit{}, matchUnderLoad},
		{"match-random", "match 32 blocks of 10,000 prompts, 4 workers, two threads", "M/s", atLeast(1), limit{}, func() float64 { return matchRandom(true) }},
		{"apply-unique", "events of 32 blocks, unique", "M blocks/s", atLeast(1), report, func() float64 { return applyRate(unique()) }},
		{"apply-shared-agree", "events of 32 blocks, shared by 64", "M blocks/s", atLeast(1), report, func() float64 { return applyRate(shared(true)) }},
		{"remove-1", "removals, 1 per event, tails first", "M blocks/s", atLeast(2), limit{}, func() float64 { return removeRate(unique(), 1, false) }},
		{"remove-1-random", "removals, 1 per event, at random", "M blocks/s", atLeast(2), limit{}, func() float64 { return removeRate(unique(), 1, true) }},
		{"remove-32", "removals, 32 per event, tails first", "M blocks/s", atLeast(1.1), limit{}, func() float64 { return removeRate(unique(), 32, false) }},
		{"bytes-unshared", "bytes per (block, worker), unshared", "B", atMost(1), report, func() float64 { return pairBytes(unique()) }},
		{"bytes-shared-agree", "bytes per (block, worker), shared by 64", "B", atMost(1), atMost(.05), func() float64 { return pairBytes(shared(true)) }},
		{"heap-returned", "heap returned after removing everything", "%", report, limit{}, heapReturned},
	}
}

// Figures measures the shapes. Each gives our figure, each peer's, and our figure
// as a multiple of each peer's.
func (b *PeerBench) Figures(ctx context.Context) (out []Figure, err error) {
	for _, s := range peerShapes() {
		if b.Only != nil && !b.Only.MatchString(s.name) {
			continue
		}
		fmt.Fprintf(b.Log, "%s\n", s.name)
		peers := []struct {
			name, program string
			limit         limit
			values        []float64
		}{{"dynamo-kv-router 1.6.1", b.Dynamo, s.dynamo, nil}, {"llm-d-kv-cache 0.9.0", b.LLMD, s.llmd, nil}}
		var ours []float64
		for range b.Rounds {
			runtime.GC()
			ours = append(ours, s.measure())
			for i := range peers {
				if peers[i].limit.text == "" {
					continue
				}
				v, err := runPeer(ctx, peers[i].program, s.name)
				if err != nil {
					return out, err
				}
				peers[i].values = append(peers[i].values, v)
			}
		}
		out = append(out, summary(s.what+", kvroute", s.unit, ours))
		for _, p := range peers {
			if p.limit.text == "" {
				continue
			}
			out = append(out, summary(s.what+", "+p.name, s.unit, p.values))
			if p.limit.met == nil && (slices.Min(p.values) <= 0 || slices.Max(ours) <= 0) {
				continue // a ratio would say nothing
			}
			ratios := make([]float64, len(ours))
			for i := range ours {
				ratios[i] = ours[i] / p.values[i]
			}
			f := summary(s.what+", kvroute ÷ "+p.name, "×", ratios)
			if p.limit.met != nil {
				f.Target, f.Met = p.limit.text, p.limit.met(f.Median)
			}
			out = append(out, f)
		}
	}
	return out, nil
}

// summary is the figure of a quantity that was measured several times.
func summary(what, unit string, values []float64) Figure {
	v := slices.Sorted(slices.Values(values))
	return Figure{What: what, Unit: unit, Median: v[len(v)/2], Min: v[0], Max: v[len(v)-1]}
}

// runPeer lets a peer measure a shape.
func runPeer(ctx context.Context, program, shape string) (float64, error) {
	text, err := exec.CommandContext(ctx, program, shape).Output()
	if err != nil {
		return 0, fmt.Errorf("bench: %s %s: %w", program, shape, err)
	}
	v, err := strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
	if err != nil {
		return 0, fmt.Errorf("bench: %s %s: %w", program, shape, err)
	}
	return v, nil
}
