// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// Matches has the overlaps of workers with a prompt. The caller makes the slices, which
// are indexed by the worker's number and are overwritten. Those of Lower may be nil, and
// are not filled then; none may be shorter than Device.
type Matches struct {
	// Device is the number of leading blocks that a worker holds on the device.
	Device []int32
	// Lower is the number of the following blocks that a worker holds in host memory,
	// then on disk, then in external storage: each tier begins where the count of the
	// previous one ends. It is 0 if the worker does not hold the first of them there.
	Lower [tiers - 1][]int32
	// Tokens is the length of the prompt in tokens; 0 = unknown. Hybrid workers compute at least the last token.
	Tokens int
	// Whole also counts blocks that hybrid workers hold and cannot use.
	Whole bool
	// Held receives the counts of Device with Whole, and Ends where the usable prefixes of each worker end. Both are nil,
	// and are not filled then, or as long as Device.
	Held []int32
	Ends []Boundaries
}

// Match counts, for each worker, how many leading blocks of the prompt with the given
// local hashes it holds on the device: dst[w] is the count of worker w, and dst must be
// as long as the caller's largest worker number plus one. The former contents of dst are
// overwritten. Match does not allocate for up to 4,096 workers.
func (x *Index) Match(dst []int32, local []uint64) {
	x.FindMatches(&Matches{Device: dst}, local)
}

// FindMatches fills m for the prompt with the given local hashes. For up to 4,096 workers
// it does not allocate, except once if a hybrid worker is counted and the prompt's path has more than 64 nodes.
func (x *Index) FindMatches(m *Matches, local []uint64) {
	clear(m.Device)
	clear(m.Held)
	lower := false
	for _, dst := range m.Lower {
		clear(dst)
		lower = lower || dst != nil
	}
	if len(local) == 0 || len(m.Device) == 0 {
		if m.Ends != nil {
			x.gate.RLock()
			x.fillEnds(m.Ends)
			x.gate.RUnlock()
		}
		return
	}
	var few [matchWords]uint64
	alive := few[:]
	if words := (len(m.Device) + 63) / 64; words > matchWords {
		alive = make([]uint64, words)
	} else {
		alive = alive[:words]
	}
	w := walk{dst: m.Device, alive: alive}
	x.gate.RLock()
	x.fillEnds(m.Ends)
	now := x.clock.Add(1)
	if n := x.root.kids.get(local[0]); n != nil {
		w.walk(n, local)
		w.end.used.Store(now)
		if lower && x.lower.Load() > 0 {
			if end := m.goOn(n, local); end != nil {
				end.used.Store(now)
			}
		}
		copy(m.Held, m.Device)
		if len(x.sides) > 0 && !m.Whole {
			x.useBoundaries(m, local)
		}
	}
	x.gate.RUnlock()
}

// onward returns the child of n that continues a prompt, or nil if no child does, and how
// many blocks of the child match. n begins depth blocks into the prompt, and k of its
// blocks match.
func onward(n *node, local []uint64, depth, k int) (next *node, run int) {
	if depth += k; k < len(n.local) || depth == len(local) {
		return nil, 0
	}
	if next = n.kids.get(local[depth]); next == nil {
		return nil, 0
	}
	return next, common(next.local, local[depth:])
}

// goOn continues the counts on the lower tiers, and returns the last node where a count
// grew, or nil. A node only concerns workers whose count ends in it.
func (m *Matches) goOn(first *node, local []uint64) (end *node) {
	deepest := -1
	for t, dst := range m.Lower {
		if dst == nil {
			continue
		}
		from, to := ownerOf(0, Tier(t+1)), ownerOf(len(dst), Tier(t+1))
		depth := 0
		for n, k := first, common(first.local, local); n != nil; {
			i, _ := n.findPart(from)
			for ; i < len(n.part) && n.part[i].owner < to; i++ {
				w := n.part[i].owner & maxWorker
				at := int(m.Device[w]) - depth
				for faster := range t + 1 {
					if m.Lower[faster] != nil {
						at += int(m.Lower[faster][w])
					}
				}
				if at < 0 || at >= k {
					continue
				}
				held := min(bits.TrailingZeros64(^(n.part[i].cells >> n.shift >> at)), k-at)
				dst[w] += int32(held)
				if held > 0 && depth > deepest {
					deepest, end = depth, n
				}
			}
			at := depth + k
			n, k = onward(n, local, depth, k)
			depth = at
		}
	}
	return end
}

// matchWords is the number of words, for 64 workers each, up to which a match does not
// allocate.
const matchWords = 64

// walk is one match on its way down the tree.
type walk struct {
	dst   []int32
	alive []uint64 // workers that hold all blocks so far
	end   *node    // the last node with workers in alive
}

func (m *walk) walk(n *node, local []uint64) {
	// Workers above the last word of n.full are not alive: they are not in n.full.
	m.alive = m.alive[:copy(m.alive, n.full)]
	if last := len(m.dst) / 64; last < len(m.alive) {
		m.alive[last] &= ones(len(m.dst) % 64)
	}
	m.end = n
	depth := common(n.local, local)
	for i := range n.part {
		p := &n.part[i]
		if p.owner > maxWorker {
			break // owners on lower tiers come last
		}
		if k := min(bits.TrailingZeros64(^(p.cells >> n.shift)), depth); k > 0 && int(p.owner) < len(m.dst) {
			m.dst[p.owner] = int32(k)
		}
	}
	run := depth // blocks of n that match
	for run == len(n.local) && depth < len(local) {
		c := n.kids.get(local[depth])
		if c == nil {
			break
		}
		k := common(c.local, local[depth:])
		left := uint64(0)
		for i, alive := range m.alive {
			held := uint64(0)
			if i < len(c.full) {
				held = c.full[i]
			}
			if gone := alive &^ held; gone != 0 {
				m.alive[i] &^= gone
				m.depart(i, gone, c, depth, k)
			}
			left |= m.alive[i]
		}
		if left == 0 {
			m.end = c
			return
		}
		n, depth, run = c, depth+k, k
	}
	m.end = n
	m.arrive(depth)
}

// depart ends the count of workers that do not hold all of c, before which there are
// depth blocks.
func (m *walk) depart(word int, gone uint64, c *node, depth, k int) {
	for ; gone != 0; gone &= gone - 1 {
		w := int32(word*64 + bits.TrailingZeros64(gone))
		held := 0
		if i, ok := c.findPart(w); ok {
			held = min(bits.TrailingZeros64(^(c.part[i].cells >> c.shift)), k)
		}
		m.dst[w] = int32(depth + held)
	}
}

// arrive ends the count of the workers that hold all blocks that match.
func (m *walk) arrive(depth int) {
	for w := range set(m.alive).all() {
		m.dst[w] = int32(depth)
	}
}
