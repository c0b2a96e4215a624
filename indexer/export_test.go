// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"fmt"
	"iter"
	"maps"
	"math"
	"math/bits"
)

// each yields the children, unordered.
func (c *children[N]) each() iter.Seq2[uint64, *N] {
	return func(yield func(uint64, *N) bool) {
		for _, k := range c.few {
			if !yield(k.first, k.node) {
				return
			}
		}
		maps.All(c.many)(yield)
	}
}

// SetSideLimit replaces the limit of a worker's entries for side blocks.
func (x *Index) SetSideLimit(n int) { x.sideLimit = n }

// Nodes counts the nodes of the tree, without the root.
func (x *Index) Nodes() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	n := 0
	for node := range x.nodes.all() {
		if *node != nil {
			n++
		}
	}
	return n
}

// Columns counts the columns, and the owners listed with them.
func (x *Index) Columns() (columns, listed int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for n := range x.nodes.all() {
		if *n != nil {
			listed += len((*n).listed)
		}
	}
	return x.columns.used, listed
}

// Last returns the external hash of the last of the leading blocks of a prompt that a
// worker holds on the device. Blocks is their number; Last returns 0 if it is 0.
func (x *Index) Last(worker int, blocks int32, local []uint64) uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	if blocks == 0 {
		return 0
	}
	n, depth := x.root.kids.get(local[0]), 0
	for depth+len(n.local) < int(blocks) {
		depth += len(n.local)
		n = n.kids.get(local[depth])
	}
	return n.external(int32(worker), int(blocks)-1-depth)
}

// FalsePositives estimates, from the number of set bits, the share of hashes that are
// found although they were not added.
func (f *Filter) FalsePositives() float64 {
	set := 0
	for i := range f.words {
		set += bits.OnesCount64(f.words[i].Load())
	}
	return math.Pow(float64(set)/float64(f.Bits()), float64(f.k))
}

// Private reports whether a worker's external hash is in a private column.
func (x *Index) Private(worker int, external uint64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.view = view{}
	k := x.find(int32(worker), external, spread(external), cell{})
	return k.mine && k.column.private
}

// Probes counts the table entries that a lookup of a worker's external hash compares if
// none of them matches.
func (x *Index) Probes(worker int, external uint64) (compared int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, key := range []uint64{spread(external), privateKey(spread(external), int32(worker))} {
		s, at := x.table.find(key)
		for steps := 0; s != nil && at >= 0; steps++ {
			for hits := s.buckets[at].hits(stampOf(key) & tagMask); hits != 0; hits &= hits - 1 {
				if id, _ := s.buckets[at].entry(hits, key); id != 0 {
					compared++
				}
			}
			at = s.after(at, steps)
		}
	}
	return compared
}

// Due returns how many dead cells the table still has.
func (x *Index) Due() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.pending)
}

// Check returns the first broken invariant.
func (x *Index) Check() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	pairs, lower, live := 0, 0, 0
	columns := map[*column]int{}
	nodes, private := map[int32]int{}, map[int32]int{}
	standing := map[[2]uint64]bool{} // external hashes seen, with the owner if private
	for id := range x.nodes.end() {
		place := x.nodes.at(id)
		if place == nil || *place == nil {
			continue
		}
		n := *place
		if n.id != id || len(n.local) == 0 || int(n.shift)+len(n.local) > maxRun {
			return fmt.Errorf("node %d: id %d, %d blocks, shift %d", id, n.id, len(n.local), n.shift)
		}
		if n.parent.kids.get(n.local[0]) != n {
			return fmt.Errorf("node %d is not its parent's child", id)
		}
		if n.unheld() && n.kids.len() == 0 {
			return fmt.Errorf("node %d has neither holder nor child", id)
		}
		if p := n.parent; n.shift > 0 && (p == &x.root || int(p.shift)+len(p.local) != int(n.shift)) {
			return fmt.Errorf("node %d: its first cell is %d, but its parent ends elsewhere", id, n.shift)
		}
		children := 0
		for local, k := range n.kids.each() {
			if children++; k.parent != n || k.local[0] != local {
				return fmt.Errorf("node %d: child %d is another's", id, k.id)
			}
		}
		if children != n.kids.len() {
			return fmt.Errorf("node %d: %d children, want %d", id, children, n.kids.len())
		}
		if n.kids.len() == 0 && n.union()>>(int(n.shift)+len(n.local)-1) == 0 {
			return fmt.Errorf("leaf %d: no owner holds its last block", id)
		}
		if n.main != nil {
			columns[n.main]++
			if live, used := n.main.live&n.all(), n.standing(n.main, n.all()); live != used {
				return fmt.Errorf("node %d: cells %b of the main column are live, %b used", id, live, used)
			}
		}
		owned := map[int32]uint64{}
		for i, o := range n.listed {
			columns[o.column]++
			for j := i - 1; j >= 0 && n.listed[j].owner == o.owner; j-- {
				if n.listed[j].column == o.column {
					return fmt.Errorf("node %d: worker %d is listed twice with column %d", id, o.owner, o.column.id)
				}
			}
			if i > 0 && n.listed[i-1].owner > o.owner || o.cells == 0 || o.cells&^n.all() != 0 {
				return fmt.Errorf("node %d: own column %d of worker %d, cells %b", id, i, o.owner, o.cells)
			}
			if o.column.owner != anyOwner && o.column.owner != o.owner || o.column.private && o.column.owner == anyOwner {
				return fmt.Errorf("node %d: column %d of %d is worker %d's, too", id, o.column.id, o.column.owner, o.owner)
			}
			if live, used := o.column.live&n.all(), n.standing(o.column, n.all()); live != used {
				return fmt.Errorf("node %d: cells %b of column %d are live, %b used", id, live, o.column.id, used)
			}
			owned[o.owner] |= o.cells
			if o.column.private {
				private[o.owner] += bits.OnesCount64(o.cells)
			}
		}
		check := func(w int32, cells uint64) error {
			pairs += bits.OnesCount64(cells)
			if w > maxWorker {
				lower += bits.OnesCount64(cells)
			}
			nodes[w]++
			if o, owns := owned[w]; owns && o != cells || cells == 0 || cells&^n.all() != 0 {
				return fmt.Errorf("node %d: worker %d holds %b, its own columns %b", id, w, cells, o)
			}
			delete(owned, w)
			return nil
		}
		for w := range n.full.all() {
			if err := check(w, n.all()); err != nil {
				return err
			}
		}
		for i, p := range n.part {
			if i > 0 && n.part[i-1].owner >= p.owner || p.owner <= maxWorker && p.cells == n.all() {
				return fmt.Errorf("node %d: part %d", id, i)
			}
			if err := check(p.owner, p.cells); err != nil {
				return err
			}
		}
		if len(owned) > 0 {
			return fmt.Errorf("node %d: own columns of %d workers that hold nothing", id, len(owned))
		}
	}
	used := x.columns.used
	for c, refs := range columns {
		if int(c.refs) != refs {
			return fmt.Errorf("column %d: %d references, want %d", c.id, c.refs, refs)
		}
		for cells := c.live; cells != 0; cells &= cells - 1 {
			live++
			at := bits.TrailingZeros64(cells)
			found := false
			h := c.key(spread(c.external(at)))
			key := [2]uint64{c.external(at), 0}
			if c.private {
				key[1] = uint64(c.owner) + 1
			}
			if standing[key] {
				return fmt.Errorf("external hash %d stands twice, in column %d, too", key[0], c.id)
			}
			standing[key] = true
			s, bucket := x.table.find(h)
			for steps := 0; s != nil && bucket >= 0; steps++ {
				b := &s.buckets[bucket]
				for hits := b.hits(stampOf(h) & tagMask); hits != 0; hits &= hits - 1 {
					id, cell := b.entry(hits, h)
					found = found || id == c.id && cell == at
				}
				bucket = s.after(bucket, steps)
			}
			if !found {
				return fmt.Errorf("column %d, cell %d is not in the table", c.id, at)
			}
		}
	}
	switch {
	case used != len(columns):
		return fmt.Errorf("%d columns are used, want %d", used, len(columns))
	case live+len(x.pending) != x.table.n:
		return fmt.Errorf("the table has %d entries, want %d and %d that are due to go", x.table.n, live, len(x.pending))
	case lower != int(x.lower.Load()):
		return fmt.Errorf("%d blocks on lower tiers, want %d", x.lower.Load(), lower)
	case pairs != x.Blocks():
		return fmt.Errorf("%d blocks, want %d", x.Blocks(), pairs)
	}
	for t, list := range x.held {
		for w := range list {
			if owner := ownerOf(w, Tier(t)); list[w].nodes != nodes[owner] {
				return fmt.Errorf("owner %d is in %d nodes, want %d", owner, list[w].nodes, nodes[owner])
			} else if list[w].private != private[owner] {
				return fmt.Errorf("owner %d has %d private cells, want %d", owner, list[w].private, private[owner])
			}
		}
	}
	return nil
}

// Check returns the first broken invariant of guessTree.
func (a *Approx) Check() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	type use struct {
		n      *guessNode
		worker int32
	}
	uses := make(map[use]int32)
	for w := range a.workers {
		if g := &a.workers[w]; g.prompts != nil {
			for _, p := range g.prompts.Values() {
				uses[use{p.end, int32(w)}]++
			}
		}
	}
	t := &a.tree
	blocks, bytes := 0, t.root.children.bytes()
	line := []*guessNode{&t.root}
	for i := 0; i < len(line); i++ {
		n := line[i]
		for first, c := range n.children.each() {
			if c.parent != n || len(c.sequence) == 0 || c.sequence[0] != first || c.depth != n.depth+len(n.sequence) || len(c.holders) == 0 {
				return fmt.Errorf("a node at depth %d of %d blocks, %d holders, is behind one that ends at %d", c.depth, len(c.sequence), len(c.holders), n.depth+len(n.sequence))
			}
			for _, h := range c.holders {
				uses[use{n, h.worker}]++
			}
			line = append(line, c)
			blocks, bytes = blocks+len(c.sequence)*len(c.holders), bytes+c.bytes()
		}
	}
	for _, n := range line[1:] {
		for i, h := range n.holders {
			if h.uses != uses[use{n, h.worker}] || i > 0 && n.holders[i-1].worker >= h.worker {
				return fmt.Errorf("worker %d has %d uses of a node at depth %d, want %d", h.worker, h.uses, n.depth, uses[use{n, h.worker}])
			}
			delete(uses, use{n, h.worker})
		}
	}
	for u := range uses {
		if u.n != &t.root {
			return fmt.Errorf("worker %d uses a node at depth %d that it does not hold", u.worker, u.n.depth)
		}
	}
	if bytes != t.bytes || blocks != a.Blocks() {
		return fmt.Errorf("%d bytes, %d pairs, counted as %d, %d", bytes, blocks, t.bytes, a.Blocks())
	}
	return nil
}
