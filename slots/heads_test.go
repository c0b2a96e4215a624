// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"math/rand/v2"
	"testing"
)

// The table agrees with a map after random insertions and removals.
func TestHeadsAgainstAMap(t *testing.T) {
	type key struct {
		parent int32
		block  uint64
	}
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var h heads
		want := map[key]int32{}
		keys := 1 << rnd.IntN(12)
		for range 20_000 {
			k := key{rnd.Int32N(4), rnd.Uint64N(uint64(keys))}
			if rnd.IntN(2) == 0 {
				child := rnd.Int32N(1000) + 1
				h.put(k.parent, k.block, child)
				want[k] = child
			} else if want[k] != 0 {
				h.remove(k.parent, k.block)
				delete(want, k)
			}
			if got := h.get(k.parent, k.block); got != want[k] || h.used != len(want) {
				t.Fatalf("seed %d: %v leads to %d with %d in use, want %d and %d", seed, k, got, h.used, want[k], len(want))
			}
		}
		for k, child := range want {
			if got := h.get(k.parent, k.block); got != child {
				t.Fatalf("seed %d: %v leads to %d, want %d", seed, k, got, child)
			}
		}
	}
}
