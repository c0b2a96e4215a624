// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// Match counts, for each worker, how many leading blocks of the prompt with the
// given local hashes it holds: dst[w] is the count of worker w, and dst must be
// as long as the caller's largest worker number plus one. What dst held before
// is lost. Match does not allocate.
func (x *Index) Match(dst []int32, local []uint64) { x.MatchLast(dst, nil, local) }

// MatchLast is Match, and puts into last, unless it is nil, the external hash of
// each worker's last block counted, 0 where there is none. It must be as long as
// dst.
func (x *Index) MatchLast(dst []int32, last []uint64, local []uint64) {
	clear(dst)
	clear(last)
	if len(local) == 0 || len(dst) == 0 {
		return
	}
	var few [matchWords]uint64
	alive := few[:]
	if words := (len(dst) + 63) / 64; words > matchWords {
		alive = make([]uint64, words)
	} else {
		alive = alive[:words]
	}
	m := walk{dst: dst, last: last, alive: alive}
	x.gate.rlock()
	if n := x.firsts[local[0]%256].get(local[0]); n != nil {
		m.walk(n, local)
		m.end.used.Store(x.gate.clock.Add(1))
	}
	x.gate.runlock()
}

// matchWords is for how many workers (64 a word) a match needs no memory.
const matchWords = 64

// walk is one match on its way down the tree.
type walk struct {
	dst   []int32
	last  []uint64
	alive []uint64 // workers that hold all blocks so far
	end   *node    // the last one where there was any
}

func (m *walk) walk(n *node, local []uint64) {
	from, to := n.full.words()
	to = min(to, len(m.alive))
	for i := from; i < to; i++ {
		m.alive[i] = n.full.word(i)
	}
	if to == len(m.alive) && from < to && len(m.dst)%64 != 0 {
		m.alive[to-1] &= ones(len(m.dst) % 64)
	}
	m.end = n
	depth := common(n.local, local)
	for i := range n.part {
		p := &n.part[i]
		if k := min(bits.TrailingZeros64(^(p.cells >> n.shift)), depth); k > 0 && int(p.worker) < len(m.dst) {
			m.dst[p.worker] = int32(k)
			if m.last != nil {
				m.last[p.worker] = n.external(p.worker, k-1)
			}
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
		for i := from; i < to; i++ {
			if gone := m.alive[i] &^ c.full.word(i); gone != 0 {
				m.alive[i] &^= gone
				m.depart(i, gone, n, c, depth, k)
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
	m.arrive(from, to, n, depth, run)
}

// depart ends the count of workers that do not hold all of c, which follows the
// depth blocks up to the end of n.
func (m *walk) depart(word int, gone uint64, n, c *node, depth, k int) {
	for ; gone != 0; gone &= gone - 1 {
		w := int32(word*64 + bits.TrailingZeros64(gone))
		held := 0
		if i, ok := c.findPart(w); ok {
			held = min(bits.TrailingZeros64(^(c.part[i].cells >> c.shift)), k)
		}
		m.dst[w] = int32(depth + held)
		if m.last == nil {
			continue
		}
		if held > 0 {
			m.last[w] = c.external(w, held-1)
		} else {
			m.last[w] = n.external(w, len(n.local)-1)
		}
	}
}

// arrive ends the count of the workers that came to the end, block run of n.
func (m *walk) arrive(from, to int, n *node, depth, run int) {
	owner := 0
	for i := from; i < to; i++ {
		for a := m.alive[i]; a != 0; a &= a - 1 {
			w := int32(i*64 + bits.TrailingZeros64(a))
			m.dst[w] = int32(depth)
			if m.last == nil {
				continue
			}
			for owner < len(n.own) && n.own[owner].worker < w {
				owner++
			}
			m.last[w] = n.externalFrom(owner, w, run-1)
		}
	}
}
