// SPDX-License-Identifier: Apache-2.0

package slots

// prefixTree holds the active prompts of all workers: a root for each worker, and below it
// the blocks of its prompts. Blocks without a branch between them share a node. A node that
// was split stays split when its other branch ends: to join nodes would cost more than
// walking over them, and a path never has more nodes than blocks.
//
// # Invariants
//
//   - A node is on the paths of refs slots, at least one. users is the XOR of their
//     numbers, so it is the slot's number if there is only one.
//   - A slot's path ends with a whole node.
//   - heads leads from a node and the next block to the child that begins with it.
//   - Nodes without refs are vacant, except roots.
type prefixTree struct {
	nodes  []node // nodes[0] is not used: number 0 means no node
	vacant []int32
	kept   int // blocks that the vacant nodes have room for
	heads  heads
}

type node struct {
	parent int32 // 0 = a root
	users  int32
	refs   int32
	blocks []uint64
}

// keptBlocks bounds the room for blocks that all vacant nodes keep together: 8 MB.
const keptBlocks = 1 << 20

func (t *prefixTree) newNode(n node) int32 {
	if len(t.nodes) == 0 {
		t.nodes = append(t.nodes, node{})
	}
	if last := len(t.vacant) - 1; last >= 0 {
		i := t.vacant[last]
		t.vacant = t.vacant[:last]
		t.kept -= cap(t.nodes[i].blocks)
		n.blocks = append(t.nodes[i].blocks[:0], n.blocks...)
		t.nodes[i] = n
		return i
	}
	n.blocks = append([]uint64(nil), n.blocks...)
	t.nodes = append(t.nodes, n)
	return int32(len(t.nodes) - 1)
}

func (t *prefixTree) retire(i int32) {
	room := t.nodes[i].blocks
	if t.kept += cap(room); t.kept > keptBlocks {
		t.kept -= cap(room)
		room = nil
	}
	t.nodes[i] = node{blocks: room[:0]}
	t.vacant = append(t.vacant, i)
}

// match returns how many leading blocks are active under a root.
func (t *prefixTree) match(root int32, blocks []uint64) (matched int) {
	at := root
	for matched < len(blocks) {
		next := t.heads.get(at, blocks[matched])
		if next == 0 {
			break
		}
		own := t.nodes[next].blocks
		k := common(own, blocks[matched:])
		matched += k
		if k < len(own) {
			break
		}
		at = next
	}
	return matched
}

// common returns the length of the prefix that a and b share.
func common(a, b []uint64) int {
	n := min(len(a), len(b))
	a, b = a[:n], b[:n]
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// add puts the blocks of a user under a root and returns the last node of its path, and how many of
// the blocks were not there. It calls lone for each change of the number of blocks that a user has alone.
func (t *prefixTree) add(root int32, blocks []uint64, user int32, lone func(user int32, delta int)) (leaf int32, added int) {
	at := root
	for len(blocks) > 0 {
		next := t.heads.get(at, blocks[0])
		if next == 0 {
			leaf = t.newNode(node{parent: at, users: user, refs: 1, blocks: blocks})
			t.heads.put(at, blocks[0], leaf)
			lone(user, len(blocks))
			return leaf, len(blocks)
		}
		k := common(t.nodes[next].blocks, blocks)
		if k < len(t.nodes[next].blocks) {
			next = t.split(next, k)
		}
		n := &t.nodes[next]
		if n.refs == 1 {
			lone(n.users, -k)
		}
		n.refs++
		n.users ^= user
		at, blocks = next, blocks[k:]
	}
	return at, 0
}

// split splits a node behind its first k blocks and returns the new node with these. The old
// node keeps its number and the other blocks, because paths may end with it.
func (t *prefixTree) split(i int32, k int) int32 {
	old := t.nodes[i]
	upper := t.newNode(node{parent: old.parent, users: old.users, refs: old.refs, blocks: old.blocks[:k]})
	t.heads.put(old.parent, old.blocks[0], upper)
	n := &t.nodes[i]
	n.parent = upper
	n.blocks = n.blocks[:copy(n.blocks, n.blocks[k:])]
	t.heads.put(upper, n.blocks[0], i)
	return upper
}

// remove removes a user's path, from its last node up. It returns how many blocks no user has any more.
func (t *prefixTree) remove(leaf, user int32, lone func(user int32, delta int)) (removed int) {
	for at := leaf; t.nodes[at].parent != 0; {
		n := &t.nodes[at]
		parent := n.parent
		n.refs--
		n.users ^= user
		switch n.refs {
		case 0:
			removed += len(n.blocks)
			t.heads.remove(parent, n.blocks[0])
			t.retire(at)
		case 1:
			lone(n.users, len(n.blocks))
		}
		at = parent
	}
	return removed
}
