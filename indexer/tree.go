// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"iter"
	"math/bits"
	"slices"
)

// The changes of the tree. All of this runs under mu and gate; what the changes
// mean for the table of external hashes is noted, and done without gate.

func (x *Index) childOf(n *node, local uint64) *node {
	if n == &x.root {
		return x.firsts[local%256].get(local)
	}
	return n.kids.get(local)
}

func (x *Index) newNode(parent *node, local []uint64, shift uint8) *node {
	n := &node{local: local, parent: parent, shift: shift}
	if last := len(x.vacant) - 1; last >= 0 {
		n.id = x.vacant[last]
		x.vacant = x.vacant[:last]
		x.nodes[n.id] = n
	} else {
		n.id = uint32(len(x.nodes))
		x.nodes = append(x.nodes, n)
	}
	n.used.Store(x.gate.clock.Load())
	if x.dump != nil {
		n.dumped = x.dump.id // it is younger than what is being dumped
	}
	return n
}

func (x *Index) adopt(parent, n *node) {
	if parent == &x.root {
		x.firsts[n.local[0]%256].add(n.local[0], n)
	} else {
		parent.kids.add(n.local[0], n)
	}
}

// store stores blocks that an owner does not have, behind at, and returns where
// the last one is.
func (x *Index) store(who int32, at place, blocks []Block, hashes []uint64) place {
	for len(blocks) > 0 {
		n, from := at.n, at.block+1
		var k int
		longer := false
		if from < len(n.local) {
			if k = commonBlocks(n.local[from:], blocks); k == 0 {
				x.split(n, from)
				continue
			}
		} else if c := x.childOf(n, blocks[0].Local); c != nil {
			at = place{c, -1}
			continue
		} else if k = x.extend(n, who, blocks); k > 0 {
			longer = true
		} else {
			k = min(maxRun, len(blocks))
			c := x.newNode(n, locals(make([]uint64, 0, runCap(k)), blocks[:k]), 0)
			x.adopt(n, c)
			x.leaves.add(c)
			n, from = c, 0
		}
		if who >= 0 {
			x.hold(who, n, from, blocks[:k], hashes[:k], longer)
		}
		at, blocks = place{n, from + k - 1}, blocks[k:]
		if who >= 0 {
			hashes = hashes[k:]
		}
	}
	return at
}

func locals(dst []uint64, blocks []Block) []uint64 {
	for i := range blocks {
		dst = append(dst, blocks[i].Local)
	}
	return dst
}

// extend makes a node longer by some of the blocks, if its only holder is the
// owner to store them, and returns by how many. The owner counts as their
// holder at once; their cells are still to be written.
func (x *Index) extend(n *node, who int32, blocks []Block) int {
	if who < 0 || n == &x.root || n.kids.n > 0 || len(n.own) > 1 || !n.onlyFor(who) {
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
	if who > maxWorker {
		n.part[0].cells = n.all()
	}
	n.used.Store(x.gate.clock.Load())
	return k
}

// hold makes an owner the holder of some blocks of a node, under external hashes
// that it does not have yet. The blocks may just have made the node longer.
func (x *Index) hold(who int32, n *node, from int, blocks []Block, hashes []uint64, longer bool) {
	x.preserve(n)
	at := from + int(n.shift)
	cells := ones(len(blocks)) << at
	before := n.cells(who)
	if longer {
		before &^= cells
	}
	owner, owns := n.findOwn(who)
	switch {
	case owns || n.main == nil || n.main.shares(at, blocks):
	default:
		x.secede(who, n, before)
		owner, owns = n.findOwn(who)
	}
	var c *column
	switch {
	case owns:
		c = n.own[owner].column
		for c.live&cells != 0 {
			// It has these blocks under other hashes, too: another column.
			if owner++; owner == len(n.own) || n.own[owner].who != who {
				n.own = insert(n.own, owner, own{who, x.columns.add(n, who)})
			}
			c = n.own[owner].column
		}
	case n.main == nil:
		n.main = x.columns.add(n, mainColumn)
		c = n.main
	default:
		c = n.main
	}
	fresh := cells &^ c.live
	if fresh == cells {
		c.write(at, blocks)
		for i := range blocks {
			x.pending = append(x.pending, entry{hashes[i], c.id, uint8(at + i), false})
		}
	} else {
		for f := fresh; f != 0; f &= f - 1 {
			i := bits.TrailingZeros64(f) - at
			c.write(at+i, blocks[i:i+1])
			x.pending = append(x.pending, entry{hashes[i], c.id, uint8(at + i), false})
		}
	}
	c.live |= cells
	if after := before | cells; after != before {
		if !longer {
			n.setCells(who, before, after)
		}
		x.count(who, bits.OnesCount64(after&^before))
	}
	if before == 0 {
		x.enter(who, n)
	}
}

// shares reports whether blocks have the same external hashes here, where any stand.
func (c *column) shares(at int, blocks []Block) bool {
	for i := range blocks {
		if c.live>>(at+i)&1 != 0 && c.external(at+i) != blocks[i].External {
			return false
		}
	}
	return true
}

// secede gives an owner a column of its own, with what it had in the main one.
func (x *Index) secede(who int32, n *node, before uint64) {
	c := x.columns.add(n, who)
	owner, _ := n.findOwn(who)
	n.own = insert(n.own, owner, own{who, c})
	for cells := before; cells != 0; cells &= cells - 1 {
		at := bits.TrailingZeros64(cells)
		e := n.main.external(at)
		c.write(at, []Block{{External: e}})
		x.pending = append(x.pending, entry{spread(e), c.id, uint8(at), false})
	}
	c.live = before
	x.bury(n, before)
}

// split makes the blocks of n from block on a node of their own, n's only child.
func (x *Index) split(n *node, block int) {
	x.preserve(n)
	t := x.newNode(n, append(make([]uint64, 0, runCap(len(n.local)-block)), n.local[block:]...), n.shift+uint8(block))
	t.used.Store(n.used.Load())
	t.uses.Store(n.uses.Load())
	t.number = n.number // what follows a dumped run follows it still
	t.kids, n.kids = n.kids, children{}
	for k := range t.kids.all() {
		k.parent = t
	}
	t.tail, n.tail = n.tail, t
	n.local = append(make([]uint64, 0, runCap(block)), n.local[:block]...)
	x.adopt(n, t)

	t.full = n.full.clone()
	for w := range t.full.all() {
		x.enter(w, t)
	}
	parts := n.part
	n.part = nil
	for _, p := range parts {
		low, high := p.cells&n.all(), p.cells&t.all()
		if low == 0 {
			x.of(p.who).nodes--
		} else {
			n.setCells(p.who, 0, low)
		}
		if high != 0 {
			t.setCells(p.who, 0, high)
			x.enter(p.who, t)
		}
	}
	if t.main = n.main; t.main != nil {
		t.main.refs++
	}
	owns := n.own
	n.own = nil
	for _, o := range owns {
		low, high := o.column.live&n.all() != 0, o.column.live&t.all() != 0
		if low {
			n.own = append(n.own, o)
		}
		if high {
			t.own = append(t.own, o)
		}
		if low && high {
			o.column.refs++
		}
	}
	n.own, t.own = slices.Clone(n.own), slices.Clone(t.own)
	x.leaves.add(t)
}

// enter notes that an owner has begun to hold something of a node.
func (x *Index) enter(who int32, n *node) {
	h := x.of(who)
	h.nodes++
	if len(h.log) == cap(h.log) {
		h.log = append(make([]uint32, 0, len(h.log)+len(h.log)/4+4), h.log...)
	}
	h.log = append(h.log, n.id)
}

// settle makes the table agree with the tree.
func (x *Index) settle() {
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
	if x.blocks.Load() == 0 && len(x.nodes) > 1<<6 { // all are vacant
		x.nodes, x.vacant, x.columns, x.leaves = nil, nil, columns{}, leaves{}
		for _, list := range x.held {
			for i := range list {
				list[i].log = nil
			}
		}
	}
}

// tidyLog keeps an owner's log in proportion to what it holds.
func (x *Index) tidyLog(who int32) {
	h := x.of(who)
	if len(h.log) <= 2*h.nodes+16 {
		return
	}
	if h.nodes == 0 {
		h.log = nil
		return
	}
	kept := make([]uint32, 0, h.nodes+h.nodes/4)
	for n := range x.nodesOf(who) {
		kept = append(kept, n.id)
	}
	h.log = kept
}

// nodesOf yields the nodes of which an owner holds something.
func (x *Index) nodesOf(who int32) iter.Seq[*node] {
	return func(yield func(*node) bool) {
		h := x.of(who)
		slices.Sort(h.log)
		h.log = slices.Compact(h.log)
		for _, id := range h.log {
			if n := x.nodes[id]; n != nil && n.cells(who) != 0 && !yield(n) {
				return
			}
		}
	}
}
