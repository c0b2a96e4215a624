// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"math/bits"
	"slices"
)

// The removal of blocks from owners. All of this runs under mu and gate.

// release removes from an owner the known external hash i of an event, and the following
// ones in the same column and node that the owner has. It returns how many: 0 if the
// owner no longer has the first one, because the event contains it twice.
func (x *Index) release(owner int32, i int) (released int) {
	c, cell := x.known[i].column, x.known[i].cell
	if !x.known[i].mine || c.live>>cell&1 == 0 {
		return 0
	}
	n := c.part(int(cell))
	held := n.cellsBy(owner, c)
	var cells uint64
	for _, k := range x.known[i:] {
		bit := uint64(1) << k.cell
		if k.column != c || held&bit == 0 {
			break
		}
		held &^= bit
		cells |= bit
		released++
	}
	if released == 0 {
		return 0
	}
	x.preserve(n)
	before, gone := n.cells(owner), cells // gone: cells that the owner stops holding
	spent := -1                           // a listing that is no longer needed
	first, own := n.listings(owner)
	for j := range own {
		if o := &own[j]; o.column != c {
			gone &^= o.cells // the owner still has these under other hashes
		} else if o.cells &^= cells; o.cells == 0 {
			spent = first + j
		}
	}
	if after := before &^ gone; gone != 0 {
		x.count(owner, -bits.OnesCount64(gone))
		left := bits.OnesCount64(after)
		switch {
		case after == 0:
			n.setCells(owner, before, 0)
			x.of(owner).nodes--
		case n.kids.len() == 0 && before == n.all() && after>>n.shift == ones(left) && len(n.part) == 0 && n.full.count() == 1:
			n.local = n.local[:left] // the most frequent case: an engine removes the ends of its chains first
		default:
			n.setCells(owner, before, after)
		}
	}
	dead := cells // cells that leave the table
	if c.owner == anyOwner {
		dead &^= n.standing(c, cells)
	}
	if dead != 0 {
		for j, k := range x.known[i : i+released] {
			if dead>>k.cell&1 != 0 {
				x.pending = append(x.pending, entry{c.key(x.hashes[i+j]), c.id, uint8(k.cell), true})
			}
		}
		x.end(c, dead)
	}
	if spent >= 0 {
		n.listed = cut(n.listed, spent)
		x.drop(c)
	}
	if gone != 0 {
		x.tidy(n)
	}
	return released
}

// leave removes an owner from the blocks of some cells of a node.
func (x *Index) leave(owner int32, n *node, cells uint64) {
	x.removeCells(owner, n, cells)
	x.endUnused(n, cells)
	x.tidy(n)
}

// removeCells is leave without its consequences: for cells of the columns in x.maybeUnused
// that no owner uses any more, and for a node that is not needed any more.
func (x *Index) removeCells(owner int32, n *node, cells uint64) {
	before := n.cells(owner)
	if cells &= before; cells == 0 {
		return
	}
	x.preserve(n)
	h := x.of(owner)
	first, own := n.listings(owner)
	for i := first + len(own) - 1; i >= first; i-- {
		o := &n.listed[i]
		c, gone := o.column, o.cells&cells
		h.externals -= bits.OnesCount64(gone)
		o.cells &^= gone
		if x.unlist(c, gone); o.cells == 0 {
			n.listed = cut(n.listed, i)
			x.drop(c)
		}
	}
	if own == nil {
		h.externals -= bits.OnesCount64(cells)
		x.unlist(n.main, cells)
	}
	n.setCells(owner, before, before&^cells)
	x.count(owner, -bits.OnesCount64(cells))
	if before == cells {
		h.nodes--
	}
}

// unlist ends cells of a column that an owner no longer holds by it, if no other owner
// uses the column; else endUnused checks the cells.
func (x *Index) unlist(c *column, cells uint64) {
	switch {
	case c.owner != anyOwner:
		x.endCells(c, cells)
	case cells != 0 && !slices.Contains(x.maybeUnused, c):
		c.refs++ // until endUnused
		x.maybeUnused = append(x.maybeUnused, c)
	}
}

// endUnused ends the given cells of the columns in x.maybeUnused that no owner uses.
func (x *Index) endUnused(n *node, cells uint64) {
	for _, c := range x.maybeUnused {
		if left := cells & c.live; left != 0 {
			x.endCells(c, left&^n.standing(c, left))
		}
		x.drop(c)
	}
	x.maybeUnused = x.maybeUnused[:0]
}

// tidy drops a node without holders and children, and the parents that this makes
// unnecessary. It shortens a leaf whose last blocks have no holder.
func (x *Index) tidy(n *node) {
	for n != &x.root && n.kids.len() == 0 && n.unheld() {
		parent := n.parent
		x.preserve(n)
		parent.kids.remove(n.local[0])
		// A match that ended there went through the parent.
		parent.used.Store(max(parent.used.Load(), n.used.Load()))
		if n.main != nil {
			x.drop(n.main)
		}
		x.nodes.drop(n.id)
		n.local, n.main = nil, nil // columns shared with the parent still point to this node
		n = parent
		if n.kids.len() == 0 && n != &x.root {
			x.queueLeaf(n)
		}
	}
	if n == &x.root || n.kids.len() > 0 || !n.full.empty() {
		return
	}
	if last := bits.Len64(n.union()) - int(n.shift); last < len(n.local) {
		x.preserve(n)
		n.local = n.local[:last]
		n.promote()
	}
}

// promote moves workers that hold all blocks of a shortened node from part to full.
func (n *node) promote() {
	all, kept := n.all(), n.part[:0]
	for _, p := range n.part {
		if p.cells == all && p.owner <= maxWorker {
			n.full.add(p.owner)
		} else {
			kept = append(kept, p)
		}
	}
	if n.part = kept; len(kept) == 0 {
		n.part = nil
	}
}

// endCells ends live cells of a column.
func (x *Index) endCells(c *column, cells uint64) {
	for rest := cells; rest != 0; rest &= rest - 1 {
		at := bits.TrailingZeros64(rest)
		x.pending = append(x.pending, entry{c.key(spread(c.external(at))), c.id, uint8(at), true})
	}
	x.end(c, cells)
}

// end is endCells without the change of the table.
func (x *Index) end(c *column, cells uint64) {
	if c.private {
		x.of(c.owner).private -= bits.OnesCount64(cells)
	}
	if c.live &^= cells; c.live == 0 {
		c.ext = nil
	}
}
