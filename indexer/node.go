// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"iter"
	"math/bits"
	"slices"
	"sync/atomic"
)

// maxRun is the largest number of blocks in a node: a word has a bit for each, and events
// are not much longer.
const maxRun = 64

// node is a run of blocks without a branch between them. Bit i+shift of a word
// of cells stands for the node's block i.
type node struct {
	// Fields that removals read come first, in few cache lines.
	local  []uint64
	shift  uint8
	full   set       // workers that hold every block on the device
	part   []part    // the other owners that hold some, by owner
	listed []listing // owners that hold by other columns than the main one, by owner
	kids   children[node]

	main   *column // external hashes of the owners that are not listed; nil until there was one
	parent *node

	id     uint32
	marked bool   // part of the chain being stored, which is not evicted
	queued bool   // in the queue of leaves
	dumped uint32 // id of the last dump that has a copy
	number uint32 // of its run in that dump

	used atomic.Uint64 // value of Index.clock when a match last ended here; set by matches
}

// part is an owner that holds blocks of a node. An owner on the device does not hold all
// of them.
type part struct {
	owner int32
	cells uint64
}

// listing is the cells that an owner holds by a column. A listed owner holds only by the
// columns that it is listed with, each once. An owner with several external hashes for a
// block has several columns.
type listing struct {
	owner  int32
	column *column
	cells  uint64 // at least one cell, all of this node
}

// touch reads a word of each cache line that a removal needs.
func (n *node) touch() uint64 { return uint64(n.shift) + uint64(len(n.part)) + uint64(n.kids.len()) }

func ones(n int) uint64 { return 1<<n - 1 }

// all returns the node's cells.
func (n *node) all() uint64 { return ones(len(n.local)) << n.shift }

func (n *node) findPart(owner int32) (int, bool) {
	if last := len(n.part) - 1; last < 0 || n.part[last].owner < owner {
		return last + 1, false
	}
	return slices.BinarySearchFunc(n.part, owner, func(p part, w int32) int { return int(p.owner - w) })
}

// listings returns the index of an owner's first listing, or the index to insert it at, and all
// listings of the owner, which are nil if there are none.
func (n *node) listings(owner int32) (first int, own []listing) {
	if last := len(n.listed) - 1; last < 0 || n.listed[last].owner < owner {
		return last + 1, nil
	}
	first, _ = slices.BinarySearchFunc(n.listed, owner, func(o listing, w int32) int { return int(o.owner - w) })
	for end := first; end < len(n.listed) && n.listed[end].owner == owner; end++ {
		own = n.listed[first : end+1]
	}
	return first, own
}

// cells returns the cells that an owner holds.
func (n *node) cells(owner int32) uint64 {
	if owner <= maxWorker && n.full.has(owner) {
		return n.all()
	}
	if i, ok := n.findPart(owner); ok {
		return n.part[i].cells
	}
	return 0
}

// cellsBy returns the cells that an owner holds by a column.
func (n *node) cellsBy(owner int32, c *column) uint64 {
	if c.owner != anyOwner {
		if c.owner != owner {
			return 0
		}
		return c.live & n.all()
	}
	_, own := n.listings(owner)
	if own == nil && c == n.main {
		return n.cells(owner)
	}
	for _, o := range own {
		if o.column == c {
			return o.cells
		}
	}
	return 0
}

// setCells changes the cells that an owner holds from before to after.
func (n *node) setCells(owner int32, before, after uint64) {
	all := n.all()
	if owner > maxWorker {
		all = 0 // owners on lower tiers are never in full
	}
	if before == all && all != 0 {
		n.full.remove(owner)
	} else if before != 0 {
		i, _ := n.findPart(owner)
		if after != all && after != 0 {
			n.part[i].cells = after
			return
		}
		n.part = cut(n.part, i)
	}
	if after == all && all != 0 {
		n.full.add(owner)
	} else if after != 0 {
		i, _ := n.findPart(owner)
		n.part = insert(n.part, i, part{owner, after})
	}
}

// union returns the cells that any owner holds.
func (n *node) union() (cells uint64) {
	if !n.full.empty() {
		return n.all()
	}
	for i := range n.part {
		cells |= n.part[i].cells
	}
	return cells
}

// onlyFor reports whether an owner holds every block of the node, and no other owner
// holds any.
func (n *node) onlyFor(owner int32) bool {
	if owner > maxWorker {
		return len(n.part) == 1 && n.part[0] == part{owner, n.all()} && n.full.empty()
	}
	return len(n.part) == 0 && n.full.has(owner) && n.full.count() == 1
}

// unheld reports whether no owner holds a block of the node.
func (n *node) unheld() bool { return len(n.part) == 0 && n.full.empty() }

// standing returns those of the given cells that some owner holds by a column.
func (n *node) standing(c *column, cells uint64) (live uint64) {
	for i := range n.listed {
		if n.listed[i].column == c {
			live |= n.listed[i].cells
		}
	}
	if c == n.main && live&cells != cells {
		live |= n.byDefault(cells)
	}
	return live & cells
}

// byDefault returns those of the given cells that some unlisted owner holds.
func (n *node) byDefault(cells uint64) (live uint64) {
	for w := range n.full.all() {
		if _, own := n.listings(w); own == nil {
			return cells & n.all() // the node may just have become shorter
		}
	}
	for _, p := range n.part {
		if _, own := n.listings(p.owner); own == nil {
			live |= p.cells
		}
	}
	return live & cells
}

// external returns an owner's external hash of block i, which it holds.
func (n *node) external(owner int32, i int) uint64 {
	cell := i + int(n.shift)
	_, own := n.listings(owner)
	for _, o := range own {
		if o.cells>>cell&1 != 0 {
			return o.column.external(cell)
		}
	}
	return n.main.external(cell)
}

// common returns how many leading elements a and b have in common.
func common(a, b []uint64) int {
	n := min(len(a), len(b))
	i := 0
	for ; i+16 <= n; i += 16 {
		// Comparing arrays is as fast as the memory.
		if *(*[16]uint64)(a[i:]) != *(*[16]uint64)(b[i:]) {
			break
		}
	}
	for ; i < n && a[i] == b[i]; i++ {
	}
	return i
}

// commonBlocks is common for local hashes and blocks.
func commonBlocks(a []uint64, b []Block) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i].Local {
			return i
		}
	}
	return n
}

// insert and cut keep slices that are small, and rarely change, nearly full.
func insert[T any](s []T, i int, v T) []T {
	if len(s) == cap(s) {
		grown := make([]T, len(s)+1, len(s)+1+len(s)/4)
		copy(grown, s[:i])
		copy(grown[i+1:], s[i:])
		grown[i] = v
		return grown
	}
	return slices.Insert(s, i, v)
}

func cut[T any](s []T, i int) []T {
	if len(s) == 1 {
		return nil
	}
	s = slices.Delete(s, i, i+1)
	if cap(s) >= 16 && len(s)*3 < cap(s) {
		return slices.Clone(s)
	}
	return s
}

// set is a set of workers, a bit each.
type set []uint64

func (s set) has(w int32) bool { return int(w>>6) < len(s) && s[w>>6]>>(w&63)&1 != 0 }

func (s *set) add(w int32) {
	if words := int(w>>6) + 1; words > len(*s) {
		*s = append(make(set, 0, words), *s...)[:words]
	}
	(*s)[w>>6] |= 1 << (w & 63)
}

func (s *set) remove(w int32) {
	(*s)[w>>6] &^= 1 << (w & 63)
	if s.empty() {
		*s = nil
	}
}

func (s set) empty() bool {
	for _, word := range s {
		if word != 0 {
			return false
		}
	}
	return true
}

func (s set) count() (n int) {
	for _, word := range s {
		n += bits.OnesCount64(word)
	}
	return n
}

// all yields the workers in order.
func (s set) all() iter.Seq[int32] {
	return func(yield func(int32) bool) {
		for i, word := range s {
			for ; word != 0; word &= word - 1 {
				if !yield(int32(i*64 + bits.TrailingZeros64(word))) {
					return
				}
			}
		}
	}
}
