// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// The search for the cells of external hashes. All of this runs under mu.

// parent returns the cell of the block that an owner's new blocks follow: a block of the
// owner, or of the same worker on another tier.
func (x *Index) parent(owner int32, external uint64) (k cell) {
	for w := range parents(owner) {
		if x.has(w) && !k.mine {
			x.view = view{}
			k = x.find(w, external, spread(external), cell{})
		}
	}
	return k
}

// hash fills x.hashes. The hashes are needed more than once, and a loop that only
// computes them does not wait for memory.
func (x *Index) hash(n int, external func(int) uint64) {
	x.hashes = x.hashes[:0]
	for i := range n {
		x.hashes = append(x.hashes, spread(external(i)))
	}
}

// touchRemoved loads the memory that the hashes of an event seem to refer to into the
// processor's cache: all buckets at once, then all cells and their nodes. Blocks that are
// removed together need not lie together in memory.
func (x *Index) touchRemoved() {
	x.table.touch(len(x.hashes), func(i int) uint64 { return x.hashes[i] })
	if len(x.hashes) < 4 {
		return
	}
	x.known = x.known[:0]
	sum := uint64(0)
	for _, h := range x.hashes {
		s, at := x.table.find(h)
		if s == nil {
			continue
		}
		b := &s.buckets[at]
		if hits := b.hits(stampOf(h) & tagMask); hits != 0 {
			if id, at := b.entry(hits, h); id != 0 {
				c := x.columns.get(id)
				x.known = append(x.known, cell{column: c, cell: int32(at)})
				sum += c.live
			}
		}
	}
	for _, k := range x.known {
		if i := int(k.cell) - int(k.column.base); i >= 0 && i < len(k.column.ext) {
			sum += k.column.ext[i]
		}
		sum += k.column.node.touch()
	}
	x.table.touched = sum
}

// lastRemoved returns the cell of the block that an owner removed last, if these
// external hashes seem to be its neighbours.
func (x *Index) lastRemoved(owner int32, h *holdings, externals []uint64) cell {
	c := x.columns.at(h.near)
	if c == nil || c.private && c.owner != owner {
		return cell{}
	}
	for _, step := range [...]int{-1, 1} {
		at, n := int(h.cell), len(externals)
		if c.holds(at+step, externals[0]) && c.holds(at+step*n, externals[n-1]) {
			return cell{column: c, cell: int32(at)}
		}
	}
	return cell{}
}

// findAll fills x.known for the blocks of an event, and counts the unknown ones.
func (x *Index) findAll(owner int32, blocks []Block) (unknown int) {
	x.table.touch(len(x.hashes), func(i int) uint64 { return x.hashes[i] })
	x.known, x.view = x.known[:0], view{}
	var k cell
	for i := range blocks {
		k = x.find(owner, blocks[i].External, x.hashes[i], k)
		x.known = append(x.known, k)
		if !k.mine {
			unknown++
		}
	}
	return unknown
}

// find returns the cell of an external hash of an owner. If the owner does not have the
// hash, find returns the shared cell of that hash, if there is one. It looks beside near
// first.
func (x *Index) find(owner int32, external, hash uint64, near cell) (k cell) {
	if near.column != nil {
		for _, at := range [...]int{int(near.cell) + 1, int(near.cell) - 1} {
			if at < maxRun && near.column.holds(at, external) {
				k = cell{near.column, int32(at), x.view.of(owner, near.column, at)}
				break
			}
		}
	}
	if k.column == nil {
		if k = x.search(hash, external, anyOwner); k.column != nil {
			k.mine = x.view.of(owner, k.column, int(k.cell))
		}
	}
	if !k.mine && x.of(owner).private > 0 {
		if p := x.search(privateKey(hash, owner), external, owner); p.column != nil {
			p.mine = true
			return p
		}
	}
	return k
}

// search looks for an external hash in the shared columns, or in an owner's private ones.
// At most one cell matches.
func (x *Index) search(key, external uint64, private int32) cell {
	s, at := x.table.find(key)
	if s == nil {
		return cell{}
	}
	for steps := 0; at >= 0; steps++ {
		b := &s.buckets[at]
		for hits := b.hits(stampOf(key) & tagMask); hits != 0; hits &= hits - 1 {
			id, at := b.entry(hits, key)
			if id == 0 {
				continue
			}
			c := x.columns.get(id)
			if c.holds(at, external) && (private == anyOwner && !c.private || c.private && c.owner == private) {
				return cell{column: c, cell: int32(at)}
			}
		}
		at = s.after(at, steps)
	}
	return cell{}
}

// view caches the cells that an owner holds by one column in one node, while many cells
// are looked up and none changes.
type view struct {
	column   *column
	from, to int
	cells    uint64
}

// of reports whether a live cell of a column is an owner's.
func (v *view) of(owner int32, c *column, at int) bool {
	if c.owner != anyOwner {
		return c.owner == owner
	}
	if v.column != c || at < v.from || at >= v.to {
		n := c.part(at)
		v.column, v.from, v.to = c, int(n.shift), int(n.shift)+len(n.local)
		v.cells = n.cellsBy(owner, c)
	}
	return v.cells>>at&1 != 0
}

// part returns the node in which a live cell lies.
func (c *column) part(at int) *node {
	for c.node.local == nil { // the last part was removed
		c.node = c.node.parent
	}
	return c.node.with(at)
}

// with returns the part that has a cell, of the parts of a node that was split; n is the
// last part.
func (n *node) with(at int) *node {
	for at < int(n.shift) {
		n = n.parent
	}
	return n
}

func (k cell) place() place {
	n := k.column.part(int(k.cell))
	return place{n, int(k.cell) - int(n.shift)}
}

// before returns the block before p.
func (p place) before() place {
	if p.block > 0 {
		return place{p.n, p.block - 1}
	}
	return place{p.n.parent, len(p.n.parent.local) - 1}
}

// contradictory reports whether a stored event names a block twice, or a block
// as its own parent.
func (x *Index) contradictory(ev *Event) bool {
	if len(ev.Blocks) == 1 {
		return ev.HasParent && ev.Parent == ev.Blocks[0].External
	}
	size := 1 << bits.Len(uint(4*len(ev.Blocks)))
	if len(x.seen) < size {
		x.seen = make([]int32, size)
	}
	defer clear(x.seen[:size])
	mask := uint64(size - 1)
	twice := false
	for i := range ev.Blocks {
		b := ev.Blocks[i].External
		twice = ev.HasParent && b == ev.Parent
		p := x.hashes[i] & mask
		for ; x.seen[p] != 0 && !twice; p = (p + 1) & mask {
			twice = ev.Blocks[x.seen[p]-1].External == b
		}
		if twice {
			break
		}
		x.seen[p] = int32(i + 1)
	}
	return twice
}
