// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"math/bits"
	"slices"
)

// What takes blocks from owners. All of this runs under mu and gate.

// release takes from an owner the known external hash i of an event, and those
// behind it that stand in the same column and node, as far as it has them. It
// returns how many: none if it has not got the first, since it was named twice.
func (x *Index) release(who int32, i int) (released int) {
	c, first := x.known[i].column, x.known[i].cell
	if !x.known[i].mine || c.live>>first&1 == 0 {
		return 0
	}
	n := c.part(int(first))
	held := n.cellsBy(who, c)
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
	before, gone := n.cells(who), cells // what ends in the node
	spent := -1                         // what of own is no longer needed
	if o, owns := n.findOwn(who); owns {
		for ; o < len(n.own) && n.own[o].who == who; o++ {
			if n.own[o].column != c {
				gone &^= n.own[o].cells // it has these under other hashes still
			} else if n.own[o].cells &^= cells; n.own[o].cells == 0 {
				spent = o
			}
		}
	}
	if after := before &^ gone; gone != 0 {
		x.count(who, -bits.OnesCount64(gone))
		left := bits.OnesCount64(after)
		switch {
		case after == 0:
			n.setCells(who, before, 0)
			x.of(who).nodes--
		case n.kids.len() == 0 && before == n.all() && after>>n.shift == ones(left) && len(n.part) == 0 && n.full.count() == 1:
			n.local = n.local[:left] // the most frequent case: an engine forgets its tails first
		default:
			n.setCells(who, before, after)
		}
	}
	dead := cells // what ends in the table
	if c.who == anybody {
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
		n.own = cut(n.own, spent)
		x.drop(c)
	}
	if gone != 0 {
		x.tidy(n)
	}
	return released
}

// leave takes the blocks of some cells of a node from an owner.
func (x *Index) leave(who int32, n *node, cells uint64) {
	x.take(who, n, cells)
	x.bury(n, cells)
	x.tidy(n)
}

// take is leave but for what follows from it: whether anybody still uses the cells
// of the columns that x.worn names, and whether the node is needed.
func (x *Index) take(who int32, n *node, cells uint64) {
	before := n.cells(who)
	if cells &= before; cells == 0 {
		return
	}
	x.preserve(n)
	h := x.of(who)
	first, owns := n.findOwn(who)
	last := first
	for last < len(n.own) && n.own[last].who == who {
		last++
	}
	for i := last - 1; i >= first; i-- {
		o := &n.own[i]
		c, gone := o.column, o.cells&cells
		h.externals -= bits.OnesCount64(gone)
		o.cells &^= gone
		if x.wear(c, gone); o.cells == 0 {
			n.own = cut(n.own, i)
			x.drop(c)
		}
	}
	if !owns {
		h.externals -= bits.OnesCount64(cells)
		x.wear(n.main, cells)
	}
	n.setCells(who, before, before&^cells)
	x.count(who, -bits.OnesCount64(cells))
	if before == cells {
		h.nodes--
	}
}

// wear ends cells of a column that an owner no longer holds by it, if nobody else
// can; otherwise bury is to look.
func (x *Index) wear(c *column, cells uint64) {
	switch {
	case c.who != anybody:
		x.kill(c, cells)
	case cells != 0 && !slices.Contains(x.worn, c):
		c.refs++ // it is not to go before
		x.worn = append(x.worn, c)
	}
}

// bury ends those of the given cells that nobody uses of the columns in x.worn.
func (x *Index) bury(n *node, cells uint64) {
	for _, c := range x.worn {
		if left := cells & c.live; left != 0 {
			x.kill(c, left&^n.standing(c, left))
		}
		x.drop(c)
	}
	x.worn = x.worn[:0]
}

// tidy drops a node that nobody needs, with what thereby becomes useless, or the
// end of a leaf that nobody holds.
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
		n.local, n.main = nil, nil // columns that it shared with the parent still lead there
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

// promote makes those full that hold all that is left of the node.
func (n *node) promote() {
	all, kept := n.all(), n.part[:0]
	for _, p := range n.part {
		if p.cells == all && p.who <= maxWorker {
			n.full.add(p.who)
		} else {
			kept = append(kept, p)
		}
	}
	if n.part = kept; len(kept) == 0 {
		n.part = nil
	}
}

// kill ends live cells of a column.
func (x *Index) kill(c *column, cells uint64) {
	for rest := cells; rest != 0; rest &= rest - 1 {
		at := bits.TrailingZeros64(rest)
		x.pending = append(x.pending, entry{c.key(spread(c.external(at))), c.id, uint8(at), true})
	}
	x.end(c, cells)
}

// end is kill but for the table.
func (x *Index) end(c *column, cells uint64) {
	if c.private {
		x.of(c.who).private -= bits.OnesCount64(cells)
	}
	if c.live &^= cells; c.live == 0 {
		c.ext = nil
	}
}
