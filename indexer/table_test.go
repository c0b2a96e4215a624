// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// The table finds what was added and not removed, however many entries have the
// same hash, lie in the same bucket, or go past the end of a segment.
func TestTableEqualsAMap(t *testing.T) {
	type entry struct {
		hash   uint64
		column uint32
		cell   int
	}
	for name, hash := range map[string]func(rng *rand.Rand) uint64{
		"any hash":             (*rand.Rand).Uint64,
		"few hashes":           func(rng *rand.Rand) uint64 { return spread(rng.Uint64N(7)) },
		"one segment":          func(rng *rand.Rand) uint64 { return rng.Uint64() >> 10 },
		"the segment's end":    func(rng *rand.Rand) uint64 { return 1<<54 - 1 - rng.Uint64N(3)<<36 },
		"the segment's begin":  func(rng *rand.Rand) uint64 { return rng.Uint64N(3) << 36 },
		"stamps that are zero": func(*rand.Rand) uint64 { return 0 },
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 9))
			var x table
			all := map[entry]bool{}
			var list []entry
			for step := range 30_000 {
				growing := step/3000%2 == 0
				if len(list) > 0 && rng.IntN(4) > 0 != growing {
					i := rng.IntN(len(list))
					e := list[i]
					list[i] = list[len(list)-1]
					list = list[:len(list)-1]
					x.remove(e.hash, e.column, e.cell)
					delete(all, e)
				} else if len(list) < 700 {
					e := entry{hash(rng), 1 + rng.Uint32N(1<<columnBits-1), rng.IntN(maxRun)}
					if !all[e] {
						x.add(e.hash, e.column, e.cell)
						all[e] = true
						list = append(list, e)
					}
				}
				if x.n != len(all) {
					t.Fatalf("step %d: %d entries, want %d", step, x.n, len(all))
				}
				if step%500 > 0 {
					continue
				}
				found := map[entry]bool{}
				for _, e := range list {
					s, at := x.find(e.hash)
					for steps := 0; s != nil && at >= 0; steps++ {
						for hits := s.buckets[at].hits(stampOf(e.hash) & tagMask); hits != 0; hits &= hits - 1 {
							if column, cell := s.buckets[at].entry(hits, e.hash); column != 0 {
								found[entry{e.hash, column, cell}] = true
							}
						}
						at = s.after(at, steps)
					}
				}
				for e := range all {
					if !found[e] {
						t.Fatalf("step %d: %+v is not found, %d others are", step, e, len(found))
					}
				}
			}
			for _, e := range slices.Collect(maps.Keys(all)) {
				x.remove(e.hash, e.column, e.cell)
			}
			if x.n != 0 || x.bytes() != 0 {
				t.Errorf("%d entries, %d bytes left after all were removed", x.n, x.bytes())
			}
		})
	}
}
