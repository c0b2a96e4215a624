// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// leaves is a queue of the tree's leaves by when they were last matched or stored,
// longest ago first. It exists only while room is short: it is made when the first
// room is needed. Matches do not know of it: an entry says when its leaf was used
// as far as known, and since that only grows, looking again when the entry comes
// first is enough. Entries of what is no leaf any more are dropped then, too.
type leaves struct {
	on   bool
	heap []leaf
	gone int // entries of nodes that are not in the tree
}

type leaf struct {
	used uint64
	n    *node
}

func (l *leaves) add(n *node) {
	if l.on && !n.queued {
		n.queued = true
		l.push(n)
	}
}

func (l *leaves) push(n *node) {
	l.heap = append(l.heap, leaf{n.used.Load(), n})
	for i := len(l.heap) - 1; i > 0 && l.heap[i].used < l.heap[(i-1)/2].used; i = (i - 1) / 2 {
		l.heap[i], l.heap[(i-1)/2] = l.heap[(i-1)/2], l.heap[i]
	}
}

func (l *leaves) sift(i int) {
	for {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(l.heap); c++ {
			if l.heap[c].used < l.heap[least].used {
				least = c
			}
		}
		if least == i {
			return
		}
		l.heap[i], l.heap[least] = l.heap[least], l.heap[i]
		i = least
	}
}

func (l *leaves) pop() *node {
	n := l.heap[0].n
	last := len(l.heap) - 1
	l.heap[0], l.heap[last] = l.heap[last], leaf{}
	l.heap = l.heap[:last]
	l.sift(0)
	return n
}

// lost notes that a node has left the tree.
func (l *leaves) lost(n *node) {
	if !n.queued {
		return
	}
	if l.gone++; 2*l.gone <= len(l.heap) {
		return
	}
	kept := make([]leaf, 0, len(l.heap)-l.gone)
	for _, e := range l.heap {
		if e.n.local != nil {
			kept = append(kept, e)
		}
	}
	l.heap, l.gone = kept, 0
	for i := len(kept)/2 - 1; i >= 0; i-- {
		l.sift(i)
	}
}

// oldest returns the leaf used longest ago, or nil.
func (l *leaves) oldest() *node {
	for len(l.heap) > 0 {
		n := l.heap[0].n
		switch used := n.used.Load(); {
		case n.local == nil:
			l.gone--
			l.pop().queued = false
		case n.kids.n > 0:
			l.pop().queued = false
		case used != l.heap[0].used:
			l.heap[0].used = used
			l.sift(0)
		default:
			return n
		}
	}
	return nil
}

// makeRoom forgets the ends of the chains used longest ago until there is room for
// n more blocks, but nothing of the chain that is being stored: neither the node it
// continues nor the blocks of it that are known. It returns how many (block,
// owner) pairs were forgotten.
func (x *Index) makeRoom(n int, at *node) int {
	chain := x.chain(at)
	if !x.leaves.on {
		x.leaves.on = true
		for n := range x.nodes.all() {
			if n := *n; n != nil {
				if n.queued = false; n.kids.n == 0 {
					x.leaves.add(n)
				}
			}
		}
	}
	before := x.blocks.Load()
	var kept []*node
	for done := false; !done; {
		const atOnce = 256 // pairs; matches come in between
		x.gate.lock()
		for pairs := 0; pairs < atOnce; {
			if done = x.blocks.Load()+int64(n) <= int64(x.maxBlocks) && !x.crowded(n); done {
				break
			}
			oldest := x.leaves.oldest()
			if done = oldest == nil; done {
				break
			}
			if oldest.marked {
				x.leaves.pop().queued = false
				kept = append(kept, oldest)
				continue
			}
			pairs += x.dropTail(oldest)
		}
		x.gate.unlock()
		x.settle()
	}
	for _, n := range kept {
		x.leaves.add(n)
	}
	for _, c := range chain {
		c.marked = false
	}
	return int(before - x.blocks.Load())
}

// dropTail forgets the last block of a leaf, whoever holds it, and returns how
// many did.
func (x *Index) dropTail(n *node) int {
	bit := uint64(1) << (int(n.shift) + len(n.local) - 1)
	x.ends = x.ends[:0]
	for w := range n.full.all() {
		x.ends = append(x.ends, w)
	}
	for _, p := range n.part {
		if p.cells&bit != 0 {
			x.ends = append(x.ends, p.who)
		}
	}
	for _, w := range x.ends {
		x.of(w).truncated = true
		x.take(w, n, bit)
	}
	x.bury(n, bit)
	x.tidy(n)
	return len(x.ends)
}

// shrink forgets the ends of those of an owner's chains that were used longest ago
// until there is room under its limit for n more blocks and some to spare, but
// nothing of the chain that is being stored, as makeRoom does. It returns how many
// blocks were forgotten.
func (x *Index) shrink(who int32, n int, at *node) int {
	h := x.of(who)
	blocks := x.blocks.Load()
	room := max(h.limit-h.limit/16-n, 0) // not to look at all nodes for each event
	chain := x.chain(at)
	below := map[*node]int{} // how many nodes of the owner's come next below
	for m := range x.nodesOf(who) {
		below[x.heldBefore(who, m)]++
	}
	var ends leaves
	for m := range x.nodesOf(who) {
		if below[m] == 0 {
			ends.push(m)
		}
	}
	for h.externals > room && len(ends.heap) > 0 {
		end := ends.pop()
		if end.marked {
			continue
		}
		before := x.heldBefore(who, end)
		cells := end.cells(who)
		gone := cells
		for bits.OnesCount64(gone) > h.externals-room { // the last ones
			gone &= gone - 1
		}
		h.truncated = true
		x.gate.lock()
		x.leave(who, end, gone)
		x.gate.unlock()
		x.settle()
		if below[before]--; gone == cells && below[before] == 0 && before != &x.root {
			ends.push(before)
		}
	}
	for _, c := range chain {
		c.marked = false
	}
	return int(blocks - x.blocks.Load())
}

// heldBefore returns the last node above n that an owner holds something of, or the
// root.
func (x *Index) heldBefore(who int32, n *node) *node {
	for n = n.parent; n != &x.root && n.cells(who) == 0; n = n.parent {
	}
	return n
}

// chain marks and returns the nodes that hold what is being stored and known, and
// what it follows.
func (x *Index) chain(at *node) []*node {
	chain := []*node{at}
	for _, k := range x.known {
		if k.mine {
			chain = append(chain, k.column.part(int(k.cell)))
		}
	}
	for _, c := range chain {
		c.marked = true
	}
	return chain
}
