// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"container/heap"
	"math/bits"
)

// leaves is a queue of the tree's leaves by when they were last matched or stored, the
// least recent first. It exists only while room is short: it is made when room is first
// needed, and dropped when most entries are outdated. Matches do not update it. An entry
// has the last known time of use, which only grows, so the time is checked when the entry
// comes first. Entries of nodes that are no longer leaves are dropped then.
type leaves struct {
	on   bool
	heap leafHeap
}

type leaf struct {
	used uint64
	n    *node
}

// leafHeap is a [heap.Interface].
type leafHeap []leaf

func (h leafHeap) Len() int           { return len(h) }
func (h leafHeap) Less(i, j int) bool { return h[i].used < h[j].used }
func (h leafHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *leafHeap) Push(l any)        { *h = append(*h, l.(leaf)) } //nolint:forcetypeassert // only leaves are pushed

func (h *leafHeap) Pop() any {
	last := len(*h) - 1
	l := (*h)[last]
	(*h)[last] = leaf{}
	*h = (*h)[:last]
	return l
}

func (h *leafHeap) push(n *node) { heap.Push(h, leaf{n.used.Load(), n}) }

func (h *leafHeap) pop() *node { return heap.Pop(h).(leaf).n } //nolint:forcetypeassert // only leaves are pushed

// oldest returns the least recently used leaf, or nil.
func (l *leaves) oldest() *node {
	for len(l.heap) > 0 {
		n := l.heap[0].n
		switch used := n.used.Load(); {
		case n.local == nil || n.kids.len() > 0:
			l.heap.pop().queued = false
		case used != l.heap[0].used:
			l.heap[0].used = used
			heap.Fix(&l.heap, 0)
		default:
			return n
		}
	}
	return nil
}

// queueLeaf notes that a node is a leaf.
func (x *Index) queueLeaf(n *node) {
	l := &x.leaves
	if !l.on || n.queued {
		return
	}
	if len(l.heap) > 2*x.nodes.used+16 {
		*l = leaves{}
		return
	}
	n.queued = true
	l.heap.push(n)
}

// makeRoom removes the ends of the least recently used chains until there is room for n
// more blocks. It spares the chain that is being stored: the node that it continues, and
// its known blocks. It returns how many (block, owner) pairs were removed.
func (x *Index) makeRoom(n int, at *node) int {
	defer x.mark(at)()
	if !x.leaves.on {
		x.leaves.on = true
		for n := range x.nodes.all() {
			if n := *n; n != nil {
				if n.queued = false; n.kids.len() == 0 {
					x.queueLeaf(n)
				}
			}
		}
	}
	before := x.blocks.Load()
	var kept []*node
	for done := false; !done; {
		const atOnce = 256 // pairs; matches run in between
		x.gate.Lock()
		for pairs := 0; pairs < atOnce; {
			if done = x.blocks.Load()+int64(n) <= int64(x.maxBlocks) && !x.crowded(n); done {
				break
			}
			oldest := x.leaves.oldest()
			if done = oldest == nil; done {
				break
			}
			if oldest.marked {
				x.leaves.heap.pop().queued = false
				kept = append(kept, oldest)
				continue
			}
			pairs += x.dropTail(oldest)
		}
		x.gate.Unlock()
		x.applyPending()
	}
	for _, n := range kept {
		x.queueLeaf(n)
	}
	return int(before - x.blocks.Load())
}

// dropTail removes the last block of a leaf for all its holders, and returns their
// number.
func (x *Index) dropTail(n *node) int {
	bit := uint64(1) << (int(n.shift) + len(n.local) - 1)
	x.ends = x.ends[:0]
	for w := range n.full.all() {
		x.ends = append(x.ends, w)
	}
	for _, p := range n.part {
		if p.cells&bit != 0 {
			x.ends = append(x.ends, p.owner)
		}
	}
	for _, w := range x.ends {
		x.of(w).truncated = true
		x.removeCells(w, n, bit)
	}
	x.endUnused(n, bit)
	x.tidy(n)
	return len(x.ends)
}

// shrink removes the ends of an owner's least recently used chains until there is room
// under its limit for n more blocks and a reserve. It spares the chain that is being
// stored, as makeRoom does. It returns how many blocks were removed.
func (x *Index) shrink(owner int32, n int, at *node) int {
	h := x.of(owner)
	blocks := x.blocks.Load()
	room := max(h.limit-h.limit/16-n, 0) // a reserve, so that not every event visits all nodes
	defer x.mark(at)()
	below := map[*node]int{} // number of the owner's nodes next below a node
	for m := range x.nodesOf(owner) {
		below[x.heldBefore(owner, m)]++
	}
	var ends leafHeap
	for m := range x.nodesOf(owner) {
		if below[m] == 0 {
			ends.push(m)
		}
	}
	for h.externals > room && len(ends) > 0 {
		end := ends.pop()
		if end.marked {
			continue
		}
		before := x.heldBefore(owner, end)
		cells := end.cells(owner)
		gone := cells
		for bits.OnesCount64(gone) > h.externals-room { // keep the last ones in gone
			gone &= gone - 1
		}
		h.truncated = true
		x.gate.Lock()
		x.leave(owner, end, gone)
		x.gate.Unlock()
		x.applyPending()
		if below[before]--; gone == cells && below[before] == 0 && before != &x.root {
			ends.push(before)
		}
	}
	return int(blocks - x.blocks.Load())
}

// heldBefore returns the last node above n in which an owner holds a block, or the root.
func (x *Index) heldBefore(owner int32, n *node) *node {
	for n = n.parent; n != &x.root && n.cells(owner) == 0; n = n.parent {
	}
	return n
}

// mark marks the nodes of the known blocks that are being stored, and the node that they
// follow, until unmark is called.
func (x *Index) mark(at *node) (unmark func()) {
	chain := []*node{at}
	for _, k := range x.known {
		if k.mine {
			chain = append(chain, k.column.part(int(k.cell)))
		}
	}
	set := func(marked bool) {
		for _, c := range chain {
			c.marked = marked
		}
	}
	set(true)
	return func() { set(false) }
}
