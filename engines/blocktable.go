// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"iter"
	"maps"
	"math"
	"math/bits"
	"slices"
)

// blockTable holds the blocks of a place by the engine's ids, with open addressing. Its slots have no
// pointers, so the garbage collector need not read them. A nil table can be read, and is empty.
type blockTable struct {
	slots   []slot                   // at most three quarters are in use
	resized map[uint64]*resizedBlock // of the blocks that have one
	n       int

	// Most blocks share their seed with others, so a slot has the seed's index in seeds. When seeds is full
	// of seeds of present blocks, the seed of a block is in others, by the block's id.
	seeds   []uint64
	indexes map[uint64]uint16 // of seeds
	last    uint16            // index that was used last
	others  map[uint64]uint64
	missed  int // blocks that found seeds full since the last renumbering
}

// otherSeed is the index of a seed in others, and the length of seeds when it is full.
const otherSeed = math.MaxUint16

// slot is a block, or vacant if it has no copies.
type slot struct {
	id                   uint64
	local, parent        uint64
	count                uint32
	seed                 uint16
	hasParent, published bool
}

func (t *blockTable) home(id uint64) int {
	at, _ := bits.Mul64(id*0x9E3779B97F4A7C15, uint64(len(t.slots)))
	return int(at)
}

func (t *blockTable) after(at int) int {
	if at++; at == len(t.slots) {
		return 0
	}
	return at
}

// place returns the slot of a block, or the vacant slot for it.
func (t *blockTable) place(id uint64) (at int) {
	for at = t.home(id); t.slots[at].id != id && t.slots[at].count > 0; {
		at = t.after(at)
	}
	return at
}

// touch reads the slots where the searches for some blocks begin. The processor loads them at the same time,
// so the searches do not wait for memory one after the other.
func (t *blockTable) touch(ids []uint64) (sum uint64) {
	if t == nil || t.n == 0 {
		return 0
	}
	for _, id := range ids {
		s := &t.slots[t.home(id)]
		sum += s.id + uint64(s.count)
	}
	return sum
}

// find returns the slot of a block, or -1.
func (t *blockTable) find(id uint64) (at int) {
	if t == nil || t.n == 0 {
		return -1
	}
	if at = t.place(id); t.slots[at].count == 0 {
		return -1
	}
	return at
}

// at returns the block in a slot.
func (t *blockTable) at(at int) cachedBlock {
	s := &t.slots[at]
	return cachedBlock{blockState{
		Local: s.local, Seed: t.seedOf(s), Parent: s.parent, Count: s.count, HasParent: s.hasParent, Published: s.published,
	}, t.resized[s.id]}
}

// get returns a block, if the table has it.
func (t *blockTable) get(id uint64) (k cachedBlock, ok bool) {
	if at := t.find(id); at >= 0 {
		return t.at(at), true
	}
	return k, false
}

// set adds or replaces a block, which must have a copy.
func (t *blockTable) set(id uint64, k *cachedBlock) {
	if old := t.slots; t.n*4 >= len(old)*3 {
		t.slots = make([]slot, len(old)*3/2+8)
		for i := range old {
			if old[i].count > 0 {
				t.slots[t.place(old[i].id)] = old[i]
			}
		}
	}
	s := &t.slots[t.place(id)]
	if s.count == 0 {
		t.n++
	}
	seed := t.indexOf(id, k.Seed)
	if seed != otherSeed {
		delete(t.others, id)
	}
	*s = slot{id, k.Local, k.Parent, k.Count, seed, k.HasParent, k.Published}
	switch {
	case k.Resized == nil:
		delete(t.resized, id)
	case t.resized == nil:
		t.resized = map[uint64]*resizedBlock{id: k.Resized}
	default:
		t.resized[id] = k.Resized
	}
}

func (t *blockTable) seedOf(s *slot) uint64 {
	if s.seed == otherSeed {
		return t.others[s.id]
	}
	return t.seeds[s.seed]
}

// indexOf returns the index of a block's seed.
func (t *blockTable) indexOf(id, seed uint64) uint16 {
	if int(t.last) < len(t.seeds) && t.seeds[t.last] == seed {
		return t.last
	}
	at, known := t.indexes[seed]
	switch {
	case known:
	case len(t.seeds) == otherSeed && (t.missed == 0 || t.missed > len(t.slots)):
		t.renumber()
		return t.indexOf(id, seed)
	case len(t.seeds) == otherSeed:
		if t.missed++; t.others == nil {
			t.others = make(map[uint64]uint64)
		}
		t.others[id] = seed
		return otherSeed
	default:
		if t.indexes == nil {
			t.indexes = make(map[uint64]uint16)
		}
		at = uint16(len(t.seeds))
		t.seeds, t.indexes[seed] = append(t.seeds, seed), at
	}
	t.last = at
	return at
}

// renumber removes the seeds of blocks that are gone from seeds.
func (t *blockTable) renumber() {
	seeds, others := t.seeds, t.others
	t.seeds, t.indexes, t.others, t.missed = nil, nil, nil, 1
	for i := range t.slots {
		switch s := &t.slots[i]; {
		case s.count == 0:
		case s.seed == otherSeed:
			s.seed = t.indexOf(s.id, others[s.id])
		default:
			s.seed = t.indexOf(s.id, seeds[s.seed])
		}
	}
}

// delete removes the block in a slot. It moves the blocks that a search would not find behind the
// vacant slot.
func (t *blockTable) delete(hole int) {
	delete(t.resized, t.slots[hole].id)
	delete(t.others, t.slots[hole].id)
	for at := t.after(hole); t.slots[at].count > 0; at = t.after(at) {
		if home := t.home(t.slots[at].id); hole < at && (home <= hole || home > at) || hole > at && at < home && home <= hole {
			t.slots[hole] = t.slots[at]
			hole = at
		}
	}
	t.slots[hole] = slot{}
	t.n--
}

// all yields the blocks, which may be replaced meanwhile.
func (t *blockTable) all() iter.Seq2[uint64, cachedBlock] {
	return func(yield func(uint64, cachedBlock) bool) {
		for i := range t.slots {
			if t.slots[i].count > 0 && !yield(t.slots[i].id, t.at(i)) {
				return
			}
		}
	}
}

// clone returns a copy for reading.
func (t *blockTable) clone() blockTable {
	return blockTable{
		slots: slices.Clone(t.slots), n: t.n, resized: maps.Clone(t.resized), seeds: slices.Clone(t.seeds), others: maps.Clone(t.others),
	}
}
