// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// counts returns an error if a bucket has a wrong number of entries that went past it.
func (t *table) counts() error {
	if t.segments == nil {
		return nil
	}
	for number := range t.segments {
		s := &t.segments[number]
		past := make([]int, len(s.buckets))
		entries := 0
		for at := range s.buckets {
			b := &s.buckets[at]
			entries += b.len()
			for slot := range b.len() {
				home := s.homeOf(uint64(b.ids[slot]>>idBits)<<tagBits | b.tag(slot))
				for ; home != at; home = (home + 1) % len(s.buckets) {
					past[home]++
				}
			}
		}
		for at := range s.buckets {
			if got := int(s.buckets[at].tags[2] >> 36); got != past[at] {
				return fmt.Errorf("segment %d: %d entries went past bucket %d of %d, its count is %d", number, past[at], at, len(past), got)
			}
		}
		if entries != s.n || entries*3 < (len(s.buckets)-5)*bucketEntries {
			return fmt.Errorf("segment %d: %d entries in %d buckets, its count is %d", number, entries, len(s.buckets), s.n)
		}
	}
	return nil
}

// If entries of several kinds have the same key, a search returns an entry of the
// requested kind.
func TestSearchTakesTheColumnItWasAskedFor(t *testing.T) {
	const key, external = 0x123456789ABCDEF0, 77
	x := New(Config{})
	n := &node{local: []uint64{1}}
	column := func(owner int32, private bool, external uint64) *column {
		c := x.newColumn(n, owner, private)
		c.write(0, []Block{{External: external}})
		c.live = 1
		x.table.add(key, c.id, 0)
		return c
	}
	column(5, false, 76)
	column(5, true, 76)
	six, shared, five := column(6, true, external), column(5, false, external), column(5, true, external)
	for owner, want := range map[int32]cell{anyOwner: {column: shared}, 5: {column: five}, 6: {column: six}, 7: {}} {
		if got := x.search(key, external, owner); got != want {
			t.Errorf("for %d: %+v, want %+v", owner, got, want)
		}
	}
	five.live = 0
	if got := x.search(key, external, 5); got.column != nil {
		t.Errorf("a dead cell is found")
	}
}

// The table finds all added entries until they are removed, however many have the same
// hash, are in the same bucket, or go past the end of a segment.
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
		"tags alike":           func(rng *rand.Rand) uint64 { return rng.Uint64N(4) << 52 },
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
					if rng.IntN(2) == 0 { // the same column and cell under several hashes
						e.column, e.cell = e.column%3+1, e.cell%3
					}
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
				// A search may confuse a tag with the next greater one, but no other bits
				// of a stamp.
				upper := func(e entry) entry { return entry{e.hash >> (64 - 12), e.column, e.cell} }
				there := map[entry]bool{}
				for e := range all {
					there[upper(e)] = true
				}
				for e := range found {
					if !there[upper(e)] {
						t.Fatalf("step %d: %+v is found, but was removed", step, e)
					}
				}
				if err := x.counts(); err != nil {
					t.Fatalf("step %d: %v", step, err)
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
