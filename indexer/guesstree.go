// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"slices"
	"unsafe"
)

// guessTree is the tree of the predicted blocks, one for all workers. A sequence hash
// covers its block and all blocks before it. So it identifies a block, and a worker that
// holds a block holds all earlier ones.
//
// # Invariants
//
//   - A worker that holds a node holds all of its blocks, and its parent. So a worker's
//     count is the depth of the last node of a prompt's path that it holds.
//   - A worker's uses of a node are the prompts of its list that end there, and the
//     node's children that it holds. It holds the node while the uses are above 0.
//   - Every node has a holder, except the root, which has no holders.
type guessTree struct {
	root  guessNode
	bytes int // of all nodes with their slices; for the root, only of its children
}

// guessNode is a run of blocks that have the same holders.
type guessNode struct {
	parent   *guessNode
	sequence []uint64
	depth    int                 // blocks before it
	children children[guessNode] // by first sequence hash
	holders  []guessHolder       // by worker
}

type guessHolder struct {
	worker int32
	uses   int32
}

func (n *guessNode) holder(worker int) (at int, held bool) {
	return slices.BinarySearchFunc(n.holders, int32(worker),
		func(h guessHolder, w int32) int { return int(h.worker) - int(w) })
}

// match counts the leading blocks that workers hold; see [Index.Match].
func (t *guessTree) match(dst []int32, sequence []uint64) {
	clear(dst)
	n, at := &t.root, 0
	for at == n.depth+len(n.sequence) && at < len(sequence) {
		c := n.children.get(sequence[at])
		if c == nil {
			break
		}
		at += common(c.sequence, sequence[at:])
		n = c
	}
	// Workers that hold a node hold those before it, so equal counts mean equal holders.
	for seen := 0; n != &t.root; n = n.parent {
		if len(n.holders) > seen {
			seen = len(n.holders)
			for _, h := range n.holders {
				if int(h.worker) < len(dst) && dst[h.worker] == 0 {
					dst[h.worker] = int32(at)
				}
			}
		}
		at = n.depth
	}
}

// follow returns the node of the block that follows the first from blocks of n and has
// the given sequence hash, and the number of that node's blocks up to it. It returns nil
// if n has no such block.
func (n *guessNode) follow(from int, sequence uint64) (*guessNode, int) {
	if from == len(n.sequence) {
		return n.children.get(sequence), 1
	}
	if n.sequence[from] != sequence {
		return nil, 0
	}
	return n, from + 1
}

// path returns the blocks from the beginning of a prompt to the end of n.
func (n *guessNode) path() []uint64 {
	sequence := make([]uint64, n.depth+len(n.sequence))
	for m := n; m.parent != nil; m = m.parent {
		copy(sequence[m.depth:], m.sequence)
	}
	return sequence
}

// within reports whether n is m or a descendant of m.
func (n *guessNode) within(m *guessNode) bool {
	for n.depth > m.depth {
		n = n.parent
	}
	return n == m
}

// use adds a use, by a worker, of the node that ends with the last block of a prompt. It
// makes the node if necessary, and returns the node and how many more blocks the worker
// holds.
func (t *guessTree) use(worker int, sequence []uint64) (end *guessNode, more int) {
	end, at := &t.root, 0
	for at < len(sequence) {
		c := end.children.get(sequence[at])
		if c == nil {
			c = &guessNode{sequence: slices.Clone(sequence[at:]), depth: at}
			t.bytes += c.bytes()
			t.adopt(end, c)
		}
		k := common(c.sequence, sequence[at:])
		if at += k; k < len(c.sequence) {
			c = t.split(c, k)
		}
		end = c
	}
	return end, t.hold(worker, end)
}

// shift moves a worker's use from n to a node above n, and returns how many fewer blocks
// the worker holds. The node above is not the root.
func (t *guessTree) shift(worker int, n, above *guessNode) (less int) {
	t.hold(worker, above)
	return t.leave(worker, n)
}

// hold adds a use of a node, and returns how many more blocks the worker holds. A worker
// that did not hold the node uses its parent, too.
func (t *guessTree) hold(worker int, n *guessNode) (more int) {
	for ; n != &t.root; n = n.parent {
		at, held := n.holder(worker)
		if held {
			n.holders[at].uses++
			break
		}
		before := n.bytes()
		n.holders = insert(n.holders, at, guessHolder{int32(worker), 1})
		t.bytes += n.bytes() - before
		more += len(n.sequence)
	}
	return more
}

// leave removes a use of a node, and returns how many fewer blocks the worker holds. A
// worker without uses of a node no longer uses its parent either.
func (t *guessTree) leave(worker int, n *guessNode) (less int) {
	for n != &t.root {
		at, _ := n.holder(worker)
		if n.holders[at].uses--; n.holders[at].uses > 0 {
			break
		}
		less += len(n.sequence)
		parent := n.parent
		if len(n.holders) == 1 {
			t.remove(n)
		} else {
			before := n.bytes()
			n.holders = cut(n.holders, at)
			t.bytes += n.bytes() - before
		}
		n = parent
	}
	return less
}

// remove removes a node without holders, which therefore has no children.
func (t *guessTree) remove(n *guessNode) {
	before := n.bytes() + n.parent.bytes()
	n.parent.children.remove(n.sequence[0])
	t.bytes += n.parent.bytes() - before
}

// adopt makes n a child of another node, in place of the child with the same first hash.
func (t *guessTree) adopt(parent, n *guessNode) {
	before := parent.bytes()
	n.parent = parent
	parent.children.set(n.sequence[0], n)
	t.bytes += parent.bytes() - before
}

// bytes returns the heap memory of a node.
func (n *guessNode) bytes() int {
	return heapSize(int(unsafe.Sizeof(*n))) + heapSize(8*cap(n.sequence)) + heapSize(8*cap(n.holders)) + n.children.bytes()
}

// split moves the first k blocks of n to a new node before n, and returns the new node.
// Prompts that end with n still do.
func (t *guessTree) split(n *guessNode, k int) *guessNode {
	head := &guessNode{sequence: slices.Clone(n.sequence[:k]), depth: n.depth, holders: slices.Clone(n.holders)}
	for i := range head.holders {
		head.holders[i].uses = 1 // the use by its child n
	}
	before := n.bytes()
	t.adopt(n.parent, head)
	n.sequence = slices.Clone(n.sequence[k:])
	n.depth += k
	t.bytes += head.bytes() + n.bytes() - before
	t.adopt(head, n)
	return head
}
