// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// equalPrompts are n requests with the same prompt, which arrive one after the other.
func equalPrompts(n, input, output int, apart time.Duration) *Trace {
	t := &Trace{BlockSize: MooncakeBlock}
	var blocks []int32
	parent := none
	for b := range input / MooncakeBlock {
		parent = t.blocks.number(parent, uint64(b))
		blocks = append(blocks, parent)
	}
	for i := range n {
		t.Requests = append(t.Requests, Request{At: time.Duration(i) * apart, Input: input, Output: output, Blocks: blocks})
	}
	return t
}

// Of equal prompts that come at once an engine computes one, and of the others what fills no block.
func TestEqualPromptsAreComputedOnce(t *testing.T) {
	const n, input = 8, 20_000
	r := play(t, Scenario{Trace: equalPrompts(n, input, 10, time.Millisecond), Rule: rule(t, "tokens"), Workers: 1})
	most := (input - 1) / MooncakeBlock * MooncakeBlock
	if want := float64((n-1)*most) / float64(n*input); math.Abs(r.HitRate-want) > 1e-9 {
		t.Errorf("hit rate %v, want %v: all but the first prompt are cached", r.HitRate, want)
	}
	// The last prompt has its first token soon after the first prompt.
	if first := play(t, Scenario{Trace: equalPrompts(1, input, 10, 0), Rule: rule(t, "tokens"), Workers: 1}).TTFT.Mean; r.TTFT.P99 > 1.1*first {
		t.Errorf("p99 of TTFT %v s, want about the %v s of one prompt", r.TTFT.P99, first)
	}
}

// A router learns of a prompt chunk by chunk, at the ends of the steps.
func TestChunksArePublishedStepByStep(t *testing.T) {
	trace := equalPrompts(4, 20_480, 1, 0)
	chunk := scorer.Dense32B().Chunk
	// The steps end after about 400, 960 and 1,310 ms.
	for i, at := range []time.Duration{0, 100 * time.Millisecond, 500 * time.Millisecond, 1500 * time.Millisecond} {
		trace.Requests[i].At = at
	}
	var cached []int
	c := Scenario{Trace: trace, Rule: rule(t, "tokens"), Workers: 1}
	c.decided = func(_ int32, d router.Decision) { cached = append(cached, d.CachedTokens) }
	play(t, c)
	for i, want := range []int{0, 0, int(chunk), 20_480} {
		if cached[i] != want {
			t.Errorf("request %d finds %d cached tokens, want %d", i, cached[i], want)
		}
	}
}

// With shared-prefix attention a step reads each block once, whoever decodes with it.
func TestSharedPrefixAttention(t *testing.T) {
	const n, input, output = 8, 51_200, 101
	c := Scenario{Trace: equalPrompts(n, input, output, 0), Rule: rule(t, "tokens"), Workers: 1}
	alone := play(t, c)
	c.SharedAttention = true
	shared := play(t, c)
	e := scorer.Dense32B()
	// All decode at once, about: a step reads n prompts, or one.
	for _, v := range []struct{ got, want float64 }{
		{alone.TPOT.Mean, (e.Floor + e.KVToken*n*(input+output/2)) / 1e3},
		{shared.TPOT.Mean, (e.Floor + e.KVToken*(input+n*output/2)) / 1e3},
	} {
		if math.Abs(v.got-v.want) > .05*v.want {
			t.Errorf("TPOT %v s, want %v", v.got, v.want)
		}
	}
}

// After all requests have ended, nothing reads a block.
func TestReadersOfBlocksEnd(t *testing.T) {
	for _, name := range []string{"tokens", "oracle"} {
		s, err := newSim(t.Context(), Scenario{Trace: small(t), Rule: rule(t, name), KVBlocks: 60, SharedAttention: true, Seed: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.play(); err != nil {
			t.Fatal(err)
		}
		for _, e := range s.engines {
			if e.repeated != 0 || e.held != 0 || e.cache.live != 0 {
				t.Errorf("%s: engine %d: %d blocks read twice, %d tokens held, %d blocks live", name, e.number, e.repeated, e.held, e.cache.live)
			}
			for b, n := range e.readers {
				if n != 0 {
					t.Fatalf("%s: %d requests read block %d", name, n, b)
				}
			}
		}
	}
}

func TestTheBusiestWorker(t *testing.T) {
	for name, want := range map[string]float64{"round-robin": 1, "weighted": 4} {
		// 40 equal prompts on 4 workers; weighted sends all of them to the first one.
		r := play(t, Scenario{Trace: equalPrompts(40, 5120, 50, 2*time.Second), Rule: rule(t, name), Workers: 4})
		if math.Abs(r.Busiest-want) > .02*want {
			t.Errorf("%s: the busiest worker has %v times the mean, want %v", name, r.Busiest, want)
		}
	}
}
