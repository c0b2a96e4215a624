// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// Where the external hashes of an event stand. All of this runs under mu.

// parent returns where the block stands behind which an owner's blocks are to follow: one
// of the owner's, or of the same worker on another tier.
func (x *Index) parent(who int32, external uint64) (k cell) {
	for w := range parents(who) {
		if x.has(w) && !k.mine {
			x.view = view{}
			k = x.find(w, external, spread(external), cell{})
		}
	}
	return k
}

// hash fills x.hashes. The hashes are needed more than once, and made apart from
// their use they do not wait for memory.
func (x *Index) hash(n int, external func(int) uint64) {
	x.hashes = x.hashes[:0]
	for i := range n {
		x.hashes = append(x.hashes, spread(external(i)))
	}
}

// touchRemoved asks memory for what the hashes of an event seem to stand for: all
// buckets at once, then all cells and their nodes, since blocks that are removed
// together need not lie together.
func (x *Index) touchRemoved() {
	if len(x.hashes) == 1 {
		return // the search is as soon there
	}
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

// lastRemoved returns where the block stood that an owner removed last, if these
// external hashes of his seem to be its neighbours.
func (x *Index) lastRemoved(who int32, h *holdings, externals []uint64) cell {
	c := x.columns.at(h.near)
	if c == nil || c.private && c.who != who {
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

// findAll fills x.known for the blocks of an event, and counts those not known.
func (x *Index) findAll(who int32, blocks []Block) (unknown int) {
	x.table.touch(len(x.hashes), func(i int) uint64 { return x.hashes[i] })
	x.known, x.view = x.known[:0], view{}
	var k cell
	for i := range blocks {
		k = x.find(who, blocks[i].External, x.hashes[i], k)
		x.known = append(x.known, k)
		if !k.mine {
			unknown++
		}
	}
	return unknown
}

// find returns where an external hash of an owner stands. If he has not got it, it
// returns the shared cell of that hash, if there is one. Beside near is where it
// looks first.
func (x *Index) find(who int32, external, hash uint64, near cell) (k cell) {
	if near.column != nil {
		for _, at := range [...]int{int(near.cell) + 1, int(near.cell) - 1} {
			if at < maxRun && near.column.holds(at, external) {
				k = cell{near.column, int32(at), x.view.of(who, near.column, at)}
				break
			}
		}
	}
	if k.column == nil {
		if k = x.search(hash, external, anybody); k.column != nil {
			k.mine = x.view.of(who, k.column, int(k.cell))
		}
	}
	if !k.mine && x.of(who).private > 0 {
		if p := x.search(privateKey(hash, who), external, who); p.column != nil {
			p.mine = true
			return p
		}
	}
	return k
}

// search looks for an external hash in the shared columns, or in an owner's private
// ones. There is one at most.
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
			if c.holds(at, external) && (private == anybody && !c.private || c.private && c.who == private) {
				return cell{column: c, cell: int32(at)}
			}
		}
		at = s.after(at, steps)
	}
	return cell{}
}

// view is what an owner holds by one column in one node, kept while many cells
// are asked for and none changes.
type view struct {
	column   *column
	from, to int
	cells    uint64
}

// of reports whether a live cell of a column is an owner's.
func (v *view) of(who int32, c *column, at int) bool {
	if c.who != anybody {
		return c.who == who
	}
	if v.column != c || at < v.from || at >= v.to {
		n := c.part(at)
		v.column, v.from, v.to = c, int(n.shift), int(n.shift)+len(n.local)
		v.cells = n.cellsBy(who, c)
	}
	return v.cells>>at&1 != 0
}

// part returns the node in which a live cell lies.
func (c *column) part(at int) *node {
	for c.node.local == nil { // the last part is gone
		c.node = c.node.parent
	}
	return c.node.with(at)
}

// with returns the part in which a cell lies of what once was one node, and of which
// n is the last.
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
