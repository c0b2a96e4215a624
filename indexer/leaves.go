// SPDX-License-Identifier: Apache-2.0

package indexer

import "slices"

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
	if !l.on || n.queued {
		return
	}
	n.queued = true
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

func (l *leaves) pop() {
	l.heap[0].n.queued = false
	last := len(l.heap) - 1
	l.heap[0], l.heap[last] = l.heap[last], leaf{}
	l.heap = l.heap[:last]
	l.sift(0)
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
			l.pop()
		case n.kids.n > 0:
			l.pop()
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
// worker) pairs were forgotten.
func (x *Index) makeRoom(n int, at *node) int {
	chain := []*node{at}
	for _, k := range x.known {
		if k.column != nil {
			chain = append(chain, k.column.part(int(k.cell)))
		}
	}
	for _, c := range chain {
		c.marked = true
	}
	if !x.leaves.on {
		x.leaves.on = true
		for _, n := range x.nodes {
			if n != nil {
				if n.queued = false; n.kids.n == 0 {
					x.leaves.add(n)
				}
			}
		}
	}
	before := x.blocks.Load()
	var kept []*node
	for done := false; !done; {
		const atOnce = 64 // blocks; matches come in between
		x.gate.lock()
		for range atOnce {
			if done = x.blocks.Load()+int64(n) <= int64(x.maxBlocks) && !x.columns.full(n); done {
				break
			}
			oldest := x.leaves.oldest()
			if done = oldest == nil; done {
				break
			}
			if oldest.marked {
				x.leaves.pop()
				kept = append(kept, oldest)
				continue
			}
			x.dropTail(oldest)
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

// dropTail forgets the last block of a leaf, whoever holds it.
func (x *Index) dropTail(n *node) {
	x.preserve(n)
	bit := uint64(1) << (int(n.shift) + len(n.local) - 1)
	cells := n.all()
	pairs := n.full.count()
	count := func(w int32) {
		if _, owns := n.findOwn(w); !owns {
			x.workers[w].externals--
		}
	}
	for w := range n.full.all() {
		count(w)
	}
	for _, p := range n.part {
		if p.cells&bit != 0 {
			pairs++
			count(p.worker)
		}
	}
	for i, o := range slices.Backward(n.own) {
		c := o.column
		if c.live&bit == 0 {
			continue
		}
		x.workers[c.worker].externals--
		x.kill(c, bit)
		if c.live&cells == 0 {
			n.own = cut(n.own, i)
			x.columns.drop(c)
		}
	}
	if n.main != nil && n.main.live&bit != 0 {
		x.kill(n.main, bit)
	}
	x.blocks.Add(int64(-pairs))
	if len(n.local) == 1 {
		for w := range n.full.all() {
			x.workers[w].nodes--
		}
		n.full = set{}
		x.tidy(n)
		return
	}
	n.local = n.local[:len(n.local)-1]
	kept := n.part[:0]
	for _, p := range n.part {
		if p.cells &^= bit; p.cells == 0 {
			x.workers[p.worker].nodes--
		} else {
			kept = append(kept, p)
		}
	}
	if n.part = kept; len(kept) == 0 {
		n.part = nil
	}
	n.promote()
	x.tidy(n)
}
