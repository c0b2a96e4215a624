// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// runs is one match of a hybrid worker: it looks for the longest prefix of which all groups have what they need.
// Positions are numbers of blocks of the index before a boundary.
type runs struct {
	s       *sides
	owner   int32
	path    []pathNode
	at      int // the node of path that was used last
	by      int // the rule that lowered the prefix last, to the boundary before the missing block
	missing int // the boundary before that block
	lowered bool
	lo      [maxSides]int // by rule: of the blocks after this position it was checked that they are held
}

// pathNode is a node on the way of a prompt, and the number of blocks before it.
type pathNode struct {
	n    *node
	from int
}

// few is the number of nodes up to which a match of hybrid workers does not allocate.
const few = 64

// useBoundaries lowers the counts of workers with a [Shape] to the blocks that they can use. Which blocks of side
// groups are on lower tiers is unknown, so those tiers of hybrid workers do not count. gate is locked.
func (x *Index) useBoundaries(m *Matches, local []uint64) {
	var room [few]pathNode
	path := room[:0]
	for w, s := range x.sides[:min(len(x.sides), len(m.Device))] {
		if s == nil {
			continue
		}
		if len(s.shape.Sides) == 0 {
			s.roundDown(m, w)
			continue
		}
		for _, dst := range m.Lower {
			if dst != nil {
				dst[w] = 0
			}
		}
		if m.Device[w] == 0 {
			continue
		}
		if len(path) == 0 {
			path = x.appendPath(path, local)
		}
		r := runs{s: s, owner: int32(w), path: path}
		m.Device[w] = int32(r.longest(int(s.boundary(m.Device[w], m.Tokens))))
		if m.Ends != nil && r.lowered {
			m.Ends[w].Lacks, m.Ends[w].Group = r.lacking()
		}
	}
}

// roundDown ends the counts of a worker without side groups at boundaries, on each tier: a copy of a part of the
// engine's block serves no request.
func (s *sides) roundDown(m *Matches, w int) {
	held, used := m.Device[w], s.boundary(m.Device[w], m.Tokens)
	m.Device[w] = used
	for _, dst := range m.Lower {
		if dst != nil {
			held += dst[w]
			end := s.boundary(held, m.Tokens)
			dst[w], used = end-used, end
		}
	}
}

// boundary returns the last boundary within some blocks, behind which at least one token of the prompt follows; 0 if
// the rule is unknown. The length of the prompt is unknown if tokens is 0.
func (s *sides) boundary(blocks int32, tokens int) int32 {
	if s.step == 0 {
		return 0
	}
	if tokens > 0 {
		blocks = min(blocks, int32((tokens-1)/s.shape.Block))
	}
	return blocks / int32(s.step) * int32(s.step)
}

// appendPath appends the nodes that a prompt passes through.
func (x *Index) appendPath(path []pathNode, local []uint64) []pathNode {
	depth := 0
	for n := x.root.kids.get(local[0]); n != nil; {
		path = append(path, pathNode{n, depth})
		k := common(n.local, local[depth:])
		next, _ := onward(n, local, depth, k)
		n, depth = next, depth+k
	}
	return path
}

// longest returns the longest usable prefix up to a boundary before which the worker has all blocks of full attention.
func (r *runs) longest(l int) int {
	s := r.s
	for i := range s.rules {
		r.lo[i] = l
	}
	for l > 0 {
		next := l
		for i := range s.rules {
			if next = r.usable(i, l); next < l {
				r.by, r.missing, r.lowered = i, next, true
				break
			}
		}
		if next == l {
			return l
		}
		l = next
	}
	return 0
}

// lacking returns the group that lowered the prefix last, and what it needs.
func (r *runs) lacking() (Needs, int32) {
	g := &r.s.rules[r.by]
	at := g.position
	if external, ok := r.external(r.missing + r.s.step - 1); ok {
		if missing := g.mask &^ r.s.held[external]; missing != 0 {
			at = bits.TrailingZeros16(missing)
		}
	}
	return g.Needs, int32(r.s.shape.Sides[at].Group)
}

// usable returns l if the groups of a rule have what they need there, or else the next lower boundary for which they
// do not need the block that is missing.
func (r *runs) usable(i, l int) int {
	s := r.s
	g := &s.rules[i]
	need := 1
	switch tokens := l * s.shape.Block; g.Needs {
	case NeedsWindow:
		need = min((g.Tokens-1+g.Block-1)/g.Block, tokens/g.Block)
	case NeedsChunk:
		if g.Tokens > 0 {
			tokens %= g.Tokens
		}
		need = (tokens + g.Block - 1) / g.Block
	case NeedsState, NeedsUnknown:
	}
	r.lo[i] = min(r.lo[i], l)
	p := r.lo[i]
	need -= (l - p) / s.step * g.per
	for ; need > 0; need -= g.per {
		if !r.has(g, p, min(g.per, need), need > g.per) {
			r.lo[i] = p - s.step
			return p - s.step
		}
		if p -= s.step; need >= g.per {
			r.lo[i] = p
		}
	}
	return l
}

// has reports whether the groups of a rule have the last n blocks before a boundary; with joins, the blocks must also
// follow the block that ends at the boundary before.
func (r *runs) has(g *rule, p, n int, joins bool) bool {
	external, ok := r.external(p - 1)
	switch {
	case !ok:
		return false
	case g.per == 1:
		return r.s.held[external]&g.mask == g.mask
	}
	known := r.s.before[g.position]
	first := external
	before, ok := known[external]
	for ; ok && n > 1; n-- {
		if before == external || before == first || r.isBoundary(before, p) {
			return false
		}
		external = before
		before, ok = known[external]
	}
	if !ok || !joins {
		return ok
	}
	end, ok := r.external(p - r.s.step - 1)
	return ok && before == end && before != external
}

// isBoundary reports whether a block ends at one of the two boundaries before p.
func (r *runs) isBoundary(external uint64, p int) bool {
	for range 2 {
		if p -= r.s.step; p <= 0 {
			return false
		}
		if end, ok := r.external(p - 1); ok && end == external {
			return true
		}
	}
	return false
}

// external returns the worker's id of a block of the prompt.
func (r *runs) external(block int) (external uint64, ok bool) {
	if len(r.path) == 0 {
		return 0, false
	}
	for r.at > 0 && r.path[r.at].from > block {
		r.at--
	}
	for r.at+1 < len(r.path) && r.path[r.at+1].from <= block {
		r.at++
	}
	n := r.path[r.at].n
	cell := block - r.path[r.at].from + int(n.shift)
	_, own := n.listings(r.owner)
	if own == nil {
		if n.main == nil || cell-int(n.main.base) < 0 || cell-int(n.main.base) >= len(n.main.ext) {
			return 0, false
		}
		return n.main.external(cell), true
	}
	for j := range own {
		if own[j].cells>>cell&1 == 1 {
			return own[j].column.external(cell), true
		}
	}
	return 0, false
}
