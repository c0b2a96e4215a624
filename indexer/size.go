// SPDX-License-Identifier: Apache-2.0

package indexer

import "unsafe"

// Bytes estimates the heap memory of the index, within a tenth from some thousand blocks
// on. It reads every node, so call it no more often than metrics are read. Events
// continue meanwhile.
func (x *Index) Bytes() int {
	const atOnce = 1024 // nodes; some 50 µs
	x.mu.Lock()
	defer x.mu.Unlock()
	total := x.table.bytes() + x.columns.bytes() + heapSize(int(unsafe.Sizeof(*x))) +
		x.nodes.bytes() + heapSize(16*cap(x.leaves.heap)) +
		heapSize(8*cap(x.hashes)) + heapSize(4*cap(x.seen)) + heapSize(int(unsafe.Sizeof(cell{}))*cap(x.known)) +
		heapSize(int(unsafe.Sizeof(entry{}))*cap(x.pending)) + heapSize(4*cap(x.ends))
	for _, list := range x.held {
		total += heapSize(int(unsafe.Sizeof(holdings{})) * cap(list))
		for i := range list {
			total += heapSize(4 * cap(list[i].log))
		}
	}
	for c := range x.columns.all() {
		total += heapSize(8 * cap(c.ext))
	}
	for _, s := range x.sides {
		if s != nil {
			total += heapSize(int(unsafe.Sizeof(*s))) + mapBytes(len(s.held)) + 40*len(s.more)
			for _, before := range s.before {
				total += mapBytes(len(before))
			}
		}
	}
	total += x.root.kids.bytes()
	for i := uint32(1); i < x.nodes.end(); i++ {
		if i%atOnce == atOnce-1 {
			x.mu.Unlock()
			x.mu.Lock()
		}
		if n := x.nodes.at(i); n != nil && *n != nil {
			total += (*n).bytes()
		}
	}
	return total
}

func (n *node) bytes() int {
	return heapSize(int(unsafe.Sizeof(*n))) + heapSize(8*cap(n.local)) + heapSize(8*cap(n.full)) +
		heapSize(16*cap(n.part)) +
		heapSize(24*cap(n.listed)) + n.kids.bytes()
}

// heapSize estimates the memory that the allocator uses for n bytes: it rounds up to its
// size classes, and large ones to pages.
func heapSize(n int) int {
	switch {
	case n <= 0:
		return 0
	case n <= 8:
		return 8
	case n <= 256:
		return (n + 15) &^ 15
	case n <= 512:
		return (n + 31) &^ 31
	case n <= 32<<10:
		return n + n/24
	}
	return (n + 8<<10 - 1) &^ (8<<10 - 1)
}

// mapBytes estimates the memory of a map of n words to pointers: a large map is two
// thirds full.
func mapBytes(n int) int {
	const header, group = 48, 144
	switch {
	case n == 0:
		return 0
	case n <= 8:
		return header + group
	}
	return header + 27*n
}
