// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"iter"
	"maps"
	"math/bits"
	"slices"
)

// blockTable holds the blocks of a place by the engine's ids, with open addressing. It takes some
// 60 bytes a block and has no pointers, so that the garbage collector need not read it. A nil table
// is empty, and only for reading. The exported fields are saved.
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

// place returns the slot of a block, or the vacant slot for it. There must be a vacant slot.
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

// get returns a block, if the table has it.
func (t *blockTable) get(id uint64) (k cachedBlock, ok bool) {
	at := t.find(id)
	if at < 0 {
		return cachedBlock{}, false
	}
	return t.at(at), true
}

// at returns the block in a slot.
func (t *blockTable) at(at int) cachedBlock {
	k := cachedBlock{blockState: t.Slots[at].Block}
	if len(t.Resized) > 0 {
		k.Resized = t.Resized[t.Slots[at].ID]
	}
	return k
}

// set adds or replaces a block, which must have a copy.
func (t *blockTable) set(id uint64, k *cachedBlock) {
	if t.n*4 >= len(t.Slots)*3 {
		t.resize(len(t.Slots)*3/2 + 8)
	}
	s := &t.Slots[t.place(id)]
	if s.Block.Count == 0 {
		t.n++
	}
	s.ID, s.Block = id, k.blockState
	switch {
	case k.Resized != nil:
		if t.Resized == nil {
			t.Resized = make(map[uint64]*resizedBlock)
		}
		t.Resized[id] = k.Resized
	case len(t.Resized) > 0:
		delete(t.Resized, id)
	}
}

// delete removes the block in a slot. It moves the blocks that a search would not find behind the
// vacant slot.
func (t *blockTable) delete(hole int) {
	if len(t.Resized) > 0 {
		delete(t.Resized, t.Slots[hole].ID)
	}
	for at := t.after(hole); t.Slots[at].Block.Count > 0; at = t.after(at) {
		home := t.home(t.Slots[at].ID)
		if between := hole < home && home <= at; between || hole > at && (hole < home || home <= at) {
			continue
		}
		t.Slots[hole] = t.Slots[at]
		hole = at
	}
	t.Slots[hole] = slot{}
	if t.n--; t.n*4 < len(t.Slots) && len(t.Slots) > 64 {
		t.resize(len(t.Slots) / 2)
	}
}

func (t *blockTable) resize(size int) {
	old := t.Slots
	t.Slots = make([]slot, size)
	for i := range old {
		if old[i].Block.Count > 0 {
			t.Slots[t.place(old[i].ID)] = old[i]
		}
	}
}

// all yields the blocks, which may be replaced meanwhile.
func (t *blockTable) all() iter.Seq2[uint64, cachedBlock] {
	return func(yield func(uint64, cachedBlock) bool) {
		for i := range t.Slots {
			if s := &t.Slots[i]; s.Block.Count > 0 && !yield(s.ID, cachedBlock{s.Block, t.Resized[s.ID]}) {
				return
			}
		}
	}
}

func (t *blockTable) clone() blockTable {
	return blockTable{Slots: slices.Clone(t.Slots), Resized: maps.Clone(t.Resized)}
}
