// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"iter"
	"maps"
	"math/bits"
	"slices"
)

// blockTable holds the blocks of a place by the engine's ids, with open addressing. It has no
// pointers but those of Resized, so that the garbage collector need not read it. A nil table is
// empty, and only for reading. The exported fields are saved.
type blockTable struct {
	Slots   []slot                   // at most three quarters are in use
	Resized map[uint64]*resizedBlock // of the blocks that have one
	n       int
}

// slot is a block, or vacant if it has no copies.
type slot struct {
	Block blockState
	ID    uint64 // next to the count, which a search reads, too
}

func (t *blockTable) home(id uint64) int {
	at, _ := bits.Mul64(id*0x9E3779B97F4A7C15, uint64(len(t.Slots)))
	return int(at)
}

func (t *blockTable) after(at int) int {
	if at++; at == len(t.Slots) {
		return 0
	}
	return at
}

// place returns the slot of a block, or the vacant slot for it.
func (t *blockTable) place(id uint64) (at int) {
	for at = t.home(id); t.Slots[at].ID != id && t.Slots[at].Block.Count > 0; {
		at = t.after(at)
	}
	return at
}

// find returns the slot of a block, or -1.
func (t *blockTable) find(id uint64) (at int) {
	if t == nil || t.n == 0 {
		return -1
	}
	if at = t.place(id); t.Slots[at].Block.Count == 0 {
		return -1
	}
	return at
}

// at returns the block in a slot.
func (t *blockTable) at(at int) cachedBlock {
	return cachedBlock{t.Slots[at].Block, t.Resized[t.Slots[at].ID]}
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
	if old := t.Slots; t.n*4 >= len(old)*3 {
		t.Slots = make([]slot, len(old)*3/2+8)
		for i := range old {
			if old[i].Block.Count > 0 {
				t.Slots[t.place(old[i].ID)] = old[i]
			}
		}
	}
	s := &t.Slots[t.place(id)]
	if s.Block.Count == 0 {
		t.n++
	}
	switch *s = (slot{k.blockState, id}); {
	case k.Resized == nil:
		delete(t.Resized, id)
	case t.Resized == nil:
		t.Resized = map[uint64]*resizedBlock{id: k.Resized}
	default:
		t.Resized[id] = k.Resized
	}
}

// delete removes the block in a slot. It moves the blocks that a search would not find behind the
// vacant slot.
func (t *blockTable) delete(hole int) {
	delete(t.Resized, t.Slots[hole].ID)
	for at := t.after(hole); t.Slots[at].Block.Count > 0; at = t.after(at) {
		if home := t.home(t.Slots[at].ID); hole < at && (home <= hole || home > at) || hole > at && at < home && home <= hole {
			t.Slots[hole] = t.Slots[at]
			hole = at
		}
	}
	t.Slots[hole] = slot{}
	t.n--
}

// all yields the blocks, which may be replaced meanwhile.
func (t *blockTable) all() iter.Seq2[uint64, cachedBlock] {
	return func(yield func(uint64, cachedBlock) bool) {
		for i := range t.Slots {
			if t.Slots[i].Block.Count > 0 && !yield(t.Slots[i].ID, t.at(i)) {
				return
			}
		}
	}
}

func (t *blockTable) clone() blockTable {
	return blockTable{Slots: slices.Clone(t.Slots), Resized: maps.Clone(t.Resized)}
}
