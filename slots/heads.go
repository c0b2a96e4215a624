// SPDX-License-Identifier: Apache-2.0

package slots

import "math/bits"

// heads leads from a node of a [prefixTree] and the block behind it to the child
// that begins with that block. Every decision looks here several times for each
// candidate.
//
// It is a hash table with open addressing: an entry is at the first free place from its
// home on; when an entry is removed, later entries move back. A Go map made a decision
// among 4 workers more than 10 % slower. The zero value is empty.
//
// Invariants: the length of slots is 0 or a power of two; at most three quarters are in
// use; no place between an entry's home and its place is free.
type heads struct {
	slots []head
	used  int
	shift uint8 // 64 − log2 of the length
}

type head struct {
	block  uint64
	parent int32
	child  int32 // 0 = a free place
}

// home is the place of an entry without collisions. Blocks are hashes already; the parent
// separates equal blocks of many workers.
func (h *heads) home(parent int32, block uint64) int {
	x := (block ^ uint64(parent)*0x9E3779B97F4A7C15) * 0xD6E8FEB86659FD93
	x ^= x >> 32
	return int(x * 0x9E3779B97F4A7C15 >> h.shift)
}

// get returns the child, or 0 if no child begins with the block.
func (h *heads) get(parent int32, block uint64) int32 {
	if h.used == 0 {
		return 0
	}
	for i := h.home(parent, block); ; i++ {
		e := &h.slots[i&(len(h.slots)-1)]
		if e.child == 0 || e.block == block && e.parent == parent {
			return e.child
		}
	}
}

// put adds or replaces a child.
func (h *heads) put(parent int32, block uint64, child int32) {
	if h.used*4 >= len(h.slots)*3 {
		h.grow()
	}
	for i := h.home(parent, block); ; i++ {
		e := &h.slots[i&(len(h.slots)-1)]
		if e.child == 0 {
			h.used++
		} else if e.block != block || e.parent != parent {
			continue
		}
		*e = head{block, parent, child}
		return
	}
}

func (h *heads) grow() {
	old := h.slots
	h.slots = make([]head, max(64, 2*len(old)))
	h.shift = uint8(64 - bits.TrailingZeros(uint(len(h.slots))))
	h.used = 0
	for _, e := range old {
		if e.child != 0 {
			h.put(e.parent, e.block, e.child)
		}
	}
}

// remove removes a child that exists.
func (h *heads) remove(parent int32, block uint64) {
	mask := len(h.slots) - 1
	hole := h.home(parent, block) & mask
	for e := &h.slots[hole]; e.block != block || e.parent != parent; e = &h.slots[hole] {
		hole = (hole + 1) & mask
	}
	h.used--
	for i := hole; ; {
		i = (i + 1) & mask
		e := h.slots[i]
		if e.child == 0 {
			break
		}
		// An entry may not move back beyond its home.
		if back := (i - h.home(e.parent, e.block)) & mask; back >= (i-hole)&mask {
			h.slots[hole], hole = e, i
		}
	}
	h.slots[hole] = head{}
}
