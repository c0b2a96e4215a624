// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"iter"
	"math/bits"
	"slices"
)

// The changes of the tree. All of this runs under mu and gate. The changes that the table
// of external hashes needs are collected in pending, and made without gate.

func (x *Index) newNode(parent *node, local []uint64, shift uint8) *node {
	n := &node{local: local, parent: parent, shift: shift}
	id, place := x.nodes.add()
	n.id, *place = id, n
	n.used.Store(x.clock.Load())
	if x.dump != nil {
		n.dumped = x.dump.id // the node is newer than the dump
	}
	return n
}

// store stores blocks that an owner does not have, after the place at, and returns the
// place of the last one. known has the cells of their external hashes, if there are any.
// An owner below 0 stores the blocks without a holder.
func (x *Index) store(owner int32, at place, blocks []Block, known []cell, hashes []uint64) place {
	for len(blocks) > 0 {
		n, from := at.n, at.block+1
		var k int
		longer := false
		if from < len(n.local) {
			if k = commonBlocks(n.local[from:], blocks); k == 0 {
				at.n = x.split(n, from)
				continue
			}
		} else if c := n.kids.get(blocks[0].Local); c != nil {
			at = place{c, -1}
			continue
		} else if k = x.extend(n, owner, blocks); k > 0 {
			longer = true
		} else {
			k = min(maxRun, len(blocks))
			c := x.newNode(n, locals(make([]uint64, 0, runCap(k)), blocks[:k]), 0)
			n.kids.set(blocks[0].Local, c)
			x.queueLeaf(c)
			n, from = c, 0
		}
		if owner >= 0 {
			x.hold(owner, n, from, blocks[:k], known[:k], hashes[:k], longer)
			known, hashes = known[k:], hashes[k:]
		}
		at, blocks = place{n, from + k - 1}, blocks[k:]
	}
	return at
}

func locals(dst []uint64, blocks []Block) []uint64 {
	for i := range blocks {
		dst = append(dst, blocks[i].Local)
	}
	return dst
}

// extend appends some of the blocks to a node whose only holder is the owner that stores
// them, and returns how many. The owner counts as their holder at once; the caller writes
// their cells.
func (x *Index) extend(n *node, owner int32, blocks []Block) int {
	if owner < 0 || n == &x.root || n.kids.len() > 0 || !n.onlyFor(owner) {
		return 0
	}
	k := min(maxRun-int(n.shift)-len(n.local), len(blocks))
	if k <= 0 {
		return 0
	}
	x.preserve(n)
	if size := len(n.local) + k; size > cap(n.local) {
		room := max(size, len(n.local)+len(n.local)/4+2)
		n.local = append(make([]uint64, 0, runCap(min(room, maxRun-int(n.shift)))), n.local...)
	}
	n.local = locals(n.local, blocks[:k])
	if owner > maxWorker {
		n.part[0].cells = n.all()
	}
	n.used.Store(x.clock.Load())
	return k
}

// hold makes an owner the holder of some blocks of a node, under external hashes
// that it does not have yet. The blocks may just have made the node longer.
func (x *Index) hold(owner int32, n *node, from int, blocks []Block, known []cell, hashes []uint64, longer bool) {
	x.preserve(n)
	at := from + int(n.shift)
	cells := ones(len(blocks)) << at
	before := n.cells(owner)
	if longer {
		before &^= cells
	}
	byDefault := before // cells that the unlisted owner holds by the main column
	for i := 0; i < len(blocks); {
		k, elsewhere := 1, known[i].column != nil
		c := known[i].column
		if elsewhere && int(known[i].cell) == at+i && c.part(at+i) == n {
			for i+k < len(blocks) && known[i+k].column == c && int(known[i+k].cell) == at+i+k {
				k++
			}
			if c.owner != owner {
				c.owner = anyOwner
			}
		} else {
			for i+k < len(blocks) && (known[i+k].column != nil) == elsewhere && (!elsewhere || int(known[i+k].cell) != at+i+k) {
				k++
			}
			c = x.columnFor(owner, n, at+i, elsewhere)
			k = min(k, bits.TrailingZeros64(c.live>>(at+i)))
			x.write(owner, c, at+i, blocks[i:i+k], hashes[i:i+k])
		}
		run := ones(k) << (at + i)
		if n.assign(owner, c, run, byDefault) {
			byDefault |= run
		}
		i += k
	}
	if after := before | cells; after != before {
		if !longer {
			n.setCells(owner, before, after)
		}
		x.count(owner, bits.OnesCount64(after&^before))
	}
	if before == 0 {
		x.enter(owner, n)
	}
}

// columnFor returns a column whose cell at is free, for new external hashes of an owner:
// a private one for hashes that another shared cell has already.
func (x *Index) columnFor(owner int32, n *node, at int, private bool) *column {
	_, own := n.listings(owner)
	for _, o := range own {
		if c := o.column; c.private == private && c.live>>at&1 == 0 {
			return c
		}
	}
	if !private {
		if n.main == nil {
			n.main = x.newColumn(n, owner, false)
			n.main.refs++
		}
		if own == nil && n.main.live>>at&1 == 0 {
			return n.main
		}
	}
	return x.newColumn(n, owner, private)
}

// write writes new external hashes of an owner into free cells of a column.
func (x *Index) write(owner int32, c *column, at int, blocks []Block, hashes []uint64) {
	c.write(at, blocks)
	switch {
	case c.private:
		x.of(owner).private += len(blocks)
	case c.live == 0:
		c.owner = owner
	case c.owner != owner:
		c.owner = anyOwner
	}
	c.live |= ones(len(blocks)) << at
	for i := range blocks {
		x.pending = append(x.pending, entry{c.key(hashes[i]), c.id, uint8(at + i), false})
	}
}

// assign notes that an owner holds cells by a column. byDefault are the cells that an
// owner that is not listed holds by the main column. assign reports whether the new
// cells are held that way, too.
func (n *node) assign(owner int32, c *column, cells, byDefault uint64) bool {
	i, own := n.listings(owner)
	switch {
	case own == nil && c == n.main:
		return true
	case own == nil && byDefault != 0:
		n.name(i, listing{owner, n.main, byDefault})
		i++
	}
	for j := range own {
		if own[j].column == c {
			own[j].cells |= cells
			return false
		}
	}
	n.name(i+len(own), listing{owner, c, cells})
	return false
}

func (n *node) name(i int, o listing) {
	n.listed = insert(n.listed, i, o)
	o.column.refs++
}

// split moves the blocks of n before block to a new node, whose only child is n, and
// returns the new node. The new node is the first part, since the second may have any
// number of children.
func (x *Index) split(n *node, block int) *node {
	x.preserve(n)
	h := x.newNode(n.parent, append(make([]uint64, 0, runCap(block)), n.local[:block]...), n.shift)
	h.used.Store(n.used.Load())
	h.parent.kids.set(n.local[0], h)
	n.parent = h
	n.local = append(make([]uint64, 0, runCap(len(n.local)-block)), n.local[block:]...)
	n.shift += uint8(block)
	h.kids.set(n.local[0], n)

	h.full = slices.Clone(n.full)
	for w := range h.full.all() {
		x.enter(w, h)
	}
	parts := n.part
	n.part = nil
	for _, p := range parts {
		low, high := p.cells&h.all(), p.cells&n.all()
		if low != 0 {
			h.setCells(p.owner, 0, low)
			x.enter(p.owner, h)
		}
		if high != 0 {
			n.setCells(p.owner, 0, high)
		} else {
			x.of(p.owner).nodes--
		}
	}
	if h.main = n.main; h.main != nil {
		h.main.refs++
	}
	owns := n.listed
	n.listed = nil
	for _, o := range owns {
		low, high := o.cells&h.all(), o.cells&n.all()
		if low != 0 {
			h.listed = append(h.listed, listing{o.owner, o.column, low})
		}
		if high != 0 {
			n.listed = append(n.listed, listing{o.owner, o.column, high})
		}
		if low != 0 && high != 0 {
			o.column.refs++
		}
	}
	h.listed, n.listed = slices.Clone(h.listed), slices.Clone(n.listed)
	return h
}

// enter notes that an owner now holds a block of a node.
func (x *Index) enter(owner int32, n *node) {
	h := x.of(owner)
	h.nodes++
	if len(h.log) == cap(h.log) {
		h.log = append(make([]uint32, 0, len(h.log)+len(h.log)/4+4), h.log...)
	}
	h.log = append(h.log, n.id)
}

// pendingRemovals is how many dead cells removals may leave in the table. A search ignores
// them, since their columns say that they are dead. Removed together, their buckets are
// loaded from memory together. None may be left when a column's id is used again.
const pendingRemovals = 32

// applyPending makes the pending changes of the table.
func (x *Index) applyPending() {
	x.dropped = false
	for _, e := range x.pending {
		if e.remove {
			x.table.remove(e.hash, e.column, int(e.cell))
		} else {
			x.table.add(e.hash, e.column, int(e.cell))
		}
	}
	if x.pending = x.pending[:0]; cap(x.pending) > 1<<16 {
		x.pending = nil
	}
	if x.blocks.Load() == 0 {
		x.leaves = leaves{}
	}
}

// tidyLog removes outdated entries from an owner's log when most of them are.
func (x *Index) tidyLog(owner int32) {
	h := x.of(owner)
	if len(h.log) <= 2*h.nodes+16 {
		return
	}
	if h.nodes == 0 {
		h.log = nil
		return
	}
	kept := make([]uint32, 0, h.nodes+h.nodes/4)
	for n := range x.nodesOf(owner) {
		kept = append(kept, n.id)
	}
	h.log = kept
}

// nodesOf yields the nodes in which an owner holds a block.
func (x *Index) nodesOf(owner int32) iter.Seq[*node] {
	return func(yield func(*node) bool) {
		h := x.of(owner)
		slices.Sort(h.log)
		h.log = slices.Compact(h.log)
		for _, id := range h.log {
			if n := x.nodes.at(id); n != nil && *n != nil && (*n).cells(owner) != 0 && !yield(*n) {
				return
			}
		}
	}
}
