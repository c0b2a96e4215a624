// SPDX-License-Identifier: Apache-2.0

package scorer_test

import (
	"math"
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

func TestRoundRobin(t *testing.T) {
	for turn, want := range []int{0, 1, 2, 0, 1, 2, 0} {
		if got := scorer.RoundRobin(3, uint64(turn)); got != want {
			t.Errorf("turn %d: %d, want %d", turn, got, want)
		}
	}
	if got := scorer.RoundRobin(0, 5); got != -1 {
		t.Errorf("no candidates: %d, want -1", got)
	}
}

func TestRandomIsUniform(t *testing.T) {
	for u, want := range map[float64]int{0: 0, .24: 0, .25: 1, .75: 3, .999: 3, 1: 3} {
		if got := scorer.Random(4, u); got != want {
			t.Errorf("draw %v of four: %d, want %d", u, got, want)
		}
	}
	if got := scorer.Random(4, math.NaN()); got < 0 || got > 3 {
		t.Errorf("a draw with NaN: %d of four", got)
	}
	if got := scorer.Random(0, .5); got != -1 {
		t.Errorf("no candidates: %d, want -1", got)
	}
}

func TestPowerOfTwoDrawsEveryPairAlike(t *testing.T) {
	in := make([]scorer.Input, 4) // all equal: the first drawn wins
	var wins [4]int
	for k := range 12 {
		wins[scorer.PowerOfTwo(in, (float64(k)+.5)/12)]++
	}
	if wins != [4]int{3, 3, 3, 3} {
		t.Errorf("first drawn of the twelve ordered pairs: %v, want 3 each", wins)
	}
	// Of two different workers, the one with more requests never wins.
	wins, in = [4]int{}, []scorer.Input{{ActiveRequests: 4}, {ActiveRequests: 3}, {ActiveRequests: 2}, {ActiveRequests: 1}}
	for k := range 12 {
		wins[scorer.PowerOfTwo(in, (float64(k)+.5)/12)]++
	}
	if wins != [4]int{0, 2, 4, 6} {
		t.Errorf("wins of workers with 4 to 1 requests: %v, want 0, 2, 4, 6", wins)
	}
	// The pair (C, B) of the fixture, and the same with the order reversed.
	_, in = fixture()
	for _, pair := range []int{2*3 + 1, 1*3 + 1} {
		if got := scorer.PowerOfTwo(in, (float64(pair)+.5)/12); got != 1 {
			t.Errorf("pair %d: worker %c, want B", pair, 'A'+got)
		}
	}
	if got := scorer.PowerOfTwo(in[:1], .9); got != 0 {
		t.Errorf("the only candidate: %d", got)
	}
	if got := scorer.PowerOfTwo(nil, .9); got != -1 {
		t.Errorf("no candidates: %d, want -1", got)
	}
}

func TestLeastLoaded(t *testing.T) {
	in := []scorer.Input{{ActiveRequests: 2}, {ActiveRequests: 1, ActiveBlocks: 9}, {ActiveRequests: 1, ActiveBlocks: 8}, {ActiveRequests: 1, ActiveBlocks: 8}}
	for u, want := range map[float64]int{.1: 2, .9: 3} {
		if got := scorer.LeastLoaded(in, u); got != want {
			t.Errorf("draw %v: %d, want %d", u, got, want)
		}
	}
}

func TestDeviceAware(t *testing.T) {
	in := []scorer.Input{{CPU: true, ActiveRequests: 1}, {CPU: true, ActiveRequests: 1}, {ActiveRequests: 8}, {ActiveRequests: 4}}
	for _, c := range []struct {
		name  string
		in    []scorer.Input
		ratio float64
		hit   bool
		want  int
	}{
		{"1.0 against 12/16", in, 8, false, 3},
		{"1.0 against 12/8", in, 4, false, 0},
		{"equal: the GPUs", in, 6, false, 3},
		{"one class only", in[2:], 4, false, 1},
		{"CPUs only", in[:2], 4, false, 0},
		{"nothing to encode", in, 8, true, 0},
		{"nobody", nil, 8, false, -1},
	} {
		if got := scorer.DeviceAware(&scorer.Request{EmbeddingHit: c.hit}, c.in, c.ratio); got != c.want {
			t.Errorf("%s: worker %d, want %d", c.name, got, c.want)
		}
	}
}
