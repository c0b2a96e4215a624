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
	c := x.known[i].column
	if c == nil || c.live>>x.known[i].cell&1 == 0 {
		return 0
	}
	n := c.part(int(x.known[i].cell))
	held := c.live & n.all()
	if c.who == mainColumn {
		held = n.mainCells(who)
	}
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
	id, dead, gone := c.id, cells, cells // what ends in the table, and in the node
	before := n.cells(who)
	if c.who != mainColumn {
		if c.live &^= cells; c.live&n.all() == 0 {
			x.disown(n, c)
		}
		for i, _ := n.findOwn(who); i < len(n.own) && n.own[i].who == who; i++ {
			gone &^= n.own[i].column.live // it has these under other hashes still
		}
	}
	if after := before &^ gone; gone != 0 {
		x.count(who, -bits.OnesCount64(gone))
		left := bits.OnesCount64(after)
		switch {
		case after == 0:
			n.setCells(who, before, 0)
			x.of(who).nodes--
		case n.kids.n == 0 && before == n.all() && after>>n.shift == ones(left) && len(n.part) == 0 && n.full.count() == 1:
			n.local = n.local[:left] // the most frequent case: an engine forgets its tails first
		default:
			n.setCells(who, before, after)
		}
	}
	if c.who == mainColumn {
		dead &^= n.mainLive(cells)
		if c.live &^= dead; c.live == 0 {
			c.ext = nil
		}
	}
	if dead != 0 {
		for j, k := range x.known[i : i+released] {
			if dead>>k.cell&1 != 0 {
				x.pending = append(x.pending, entry{x.hashes[i+j], id, uint8(k.cell), true})
			}
		}
	}
	if gone != 0 {
		x.tidy(n)
	}
	return released
}

// disown removes an own column from a node.
func (x *Index) disown(n *node, c *column) {
	n.own = cut(n.own, slices.IndexFunc(n.own, func(o own) bool { return o.column == c }))
	x.columns.drop(c)
}

// leave takes the blocks of some cells of a node from an owner.
func (x *Index) leave(who int32, n *node, cells uint64) {
	if x.take(who, n, cells) {
		x.bury(n, cells)
	}
	x.tidy(n)
}

// take is leave but for what follows from it: whether nobody uses the cells of the
// main column any more, if it says that they were used, and whether the node is.
func (x *Index) take(who int32, n *node, cells uint64) (main bool) {
	before := n.cells(who)
	if cells &= before; cells == 0 {
		return false
	}
	x.preserve(n)
	h := x.of(who)
	first, owns := n.findOwn(who)
	last := first
	for last < len(n.own) && n.own[last].who == who {
		last++
	}
	for i := last - 1; i >= first; i-- {
		c := n.own[i].column
		h.externals -= bits.OnesCount64(c.live & cells)
		if x.kill(c, c.live&cells); c.live&n.all() == 0 {
			n.own = cut(n.own, i)
			x.columns.drop(c)
		}
	}
	if !owns {
		h.externals -= bits.OnesCount64(cells)
	}
	n.setCells(who, before, before&^cells)
	x.count(who, -bits.OnesCount64(cells))
	if before == cells {
		h.nodes--
	}
	return !owns
}

// tidy drops a node that nobody needs, with what thereby becomes useless, or the
// end of a leaf that nobody holds.
func (x *Index) tidy(n *node) {
	for n != &x.root && n.kids.n == 0 && n.unheld() {
		parent := n.parent
		x.preserve(n)
		if parent == &x.root {
			x.firsts[n.local[0]%256].remove(n.local[0])
		} else {
			parent.kids.remove(n.local[0])
		}
		if parent.tail == n {
			parent.tail = nil
		}
		if n.main != nil {
			x.columns.drop(n.main)
		}
		x.nodes[n.id] = nil
		x.vacant = append(x.vacant, n.id)
		n.local, n.main, n.parent = nil, nil, nil
		x.leaves.lost(n)
		n = parent
		if n.kids.n == 0 && n != &x.root {
			x.leaves.add(n)
		}
	}
	if n == &x.root || n.kids.n > 0 || !n.full.empty() {
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

// bury ends those of the given cells of a node's main column that nobody uses.
func (x *Index) bury(n *node, cells uint64) {
	c := n.main
	if cells &= c.live; cells == 0 {
		return
	}
	if cells &^= n.mainLive(cells); cells == 0 {
		return
	}
	x.kill(c, cells)
}

// kill ends live cells of a column.
func (x *Index) kill(c *column, cells uint64) {
	c.live &^= cells
	for ; cells != 0; cells &= cells - 1 {
		at := bits.TrailingZeros64(cells)
		x.pending = append(x.pending, entry{spread(c.external(at)), c.id, uint8(at), true})
	}
	if c.live == 0 {
		c.ext = nil
	}
}
