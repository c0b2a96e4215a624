// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// The requests of a burst have an equal prompt and come within a time. Bursts come so rarely that the
// rate of requests stays.
func TestBurstsOfEqualPrompts(t *testing.T) {
	const burst, apart, rate = 8, 30 * time.Millisecond, 2.
	trace, err := Generate(GenerateConfig{
		Requests: 1996, Rate: rate, Prefixes: 1 << 20, PrefixTokens: 4000, QuestionTokens: 600, OutputTokens: 50, Burst: burst, BurstApart: apart, Seed: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.IsSortedFunc(trace.Requests, func(a, b Request) int { return int(a.At - b.At) }) {
		t.Error("requests are not in the order of their times")
	}
	bursts := map[uint64][]Request{}
	for _, r := range trace.Requests {
		bursts[r.Session] = append(bursts[r.Session], r)
	}
	short := 0
	for _, b := range bursts {
		if len(b) != burst {
			short++
		}
		outputs := map[int]bool{}
		for _, r := range b {
			outputs[r.Output] = true
			if !slices.Equal(r.Blocks, b[0].Blocks) || r.Input != b[0].Input {
				t.Fatalf("prompts of a burst differ: %+v and %+v", b[0], r)
			}
		}
		if d := b[len(b)-1].At - b[0].At; d == 0 || d > apart {
			t.Errorf("a burst takes %v, want up to %v", d, apart)
		}
		if len(b) == burst && len(outputs) == 1 {
			t.Errorf("all outputs of a burst have the length %v", outputs)
		}
	}
	if len(trace.Requests) != 1996 || len(bursts) != 250 || short != 1 {
		t.Errorf("%d requests in %d bursts, of which %d are short; want 1996 in 250, of which 1", len(trace.Requests), len(bursts), short)
	}
	if got := 1996 / trace.Requests[1995].At.Seconds(); math.Abs(got/rate-1) > .2 {
		t.Errorf("%.2f requests a second, want about %v", got, rate)
	}
}

// With questions of their own, the requests of a burst share the prefix and nothing else.
func TestBurstsOfOnePrefix(t *testing.T) {
	c := GenerateConfig{Requests: 40, Rate: 10, Prefixes: 1 << 20, PrefixTokens: 1024, QuestionTokens: 2048, Burst: 20, BurstQuestions: true, Seed: 1}
	trace, err := Generate(c)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range trace.Requests {
		for j, other := range trace.Requests[:i] {
			common := 0
			for common < min(len(r.Blocks), len(other.Blocks)) && r.Blocks[common] == other.Blocks[common] {
				common++
			}
			want := 0
			if (i < 20) == (j < 20) {
				want = 2
			}
			if common != want || r.Session == other.Session {
				t.Fatalf("requests %d and %d have %d blocks in common and the sessions %d and %d, want %d blocks and two sessions", i, j, common, r.Session, other.Session, want)
			}
		}
	}
	c.Turns = 2
	if _, err := Generate(c); err == nil || !strings.Contains(err.Error(), "burst-questions") {
		t.Errorf("turns: %v", err)
	}
}

// A worker that joins the oracle's workers has their blocks, and gets requests at once.
func TestAJoiningWorkerSharesTheOraclesCache(t *testing.T) {
	trace, err := Generate(GenerateConfig{Requests: 300, Rate: 10, Prefixes: 1, PrefixTokens: 20_000, QuestionTokens: 100, OutputTokens: 300, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	const prefix = 20_000 / MooncakeBlock * MooncakeBlock
	fewest, joined := prefix, 0
	c := Scenario{Trace: trace, Rule: rule(t, "oracle"), Workers: 2, Seed: 1, Changes: []Change{{At: 10 * time.Second, Worker: 1, Kind: Join}}}
	c.decided = func(_ int32, d router.Decision) {
		if d.Worker.ID == c.Seed<<20+2 {
			fewest = min(fewest, d.CachedTokens)
			joined++
		}
	}
	play(t, c)
	if joined < 50 || fewest < prefix {
		t.Errorf("the new worker got %d requests, with at least %d cached tokens; want 50 or more, with %d", joined, fewest, prefix)
	}
}
