// SPDX-License-Identifier: Apache-2.0

package confirm

import (
	"cmp"
	"math"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

const (
	// mostNodes limits the nodes of a tree, apart from those of its last subject; mostBases the blocks that are read
	// from the index for it.
	mostNodes = 1 << 17
	mostBases = 1 << 20
	// mostEnds limits how many ends of prompts on the way of a sequence are looked at.
	mostEnds = 64

	always = math.MaxInt64
	never  = int64(-1) // no event
)

// tree has the blocks of the subjects of one worker. A node is a prefix of a subject's prompt. The stored sequences are
// followed through the tree: each one leaves it at a node. A subject whose path has this node, and goes on with another
// block, differs from the sequence there.
//
// Each step reads one block of a subject, a peer, or a stored sequence: the work grows linearly with them.
type tree struct {
	nodes []node
	at    map[uint64]int32 // nodes by sequence hash
	// missing has the last event that stored a subject's missing block, by the sequence hash up to the block. lost has
	// that of a sequence whose beginning is unknown, by the block's local hash.
	missing, lost map[uint64]int64
	ends          map[uint64]*ending // the ends of peers' prompts, by sequence hash
	spans         map[uint64]*spans  // of the peers whose prompts have a stored sequence, by its sequence hash
	stored        []sequence
	steps         int
}

// node is a prefix; the first one is the empty prefix.
type node struct {
	parent int32
	block  uint64 // its last block
	event  int64  // the last event that ends here
	// branches are the two last ones, the later one first: sequences that go on with other blocks.
	branches [2]branch
}

// branch is the last event with a sequence that goes on with a block.
type branch struct {
	child uint64
	event int64
}

// add notes a sequence of an event that goes on with a block.
func (n *node) add(child uint64, event int64) {
	b := &n.branches
	switch {
	case event > b[0].event && child != b[0].child:
		b[0], b[1] = branch{child, event}, b[0]
	case child == b[0].child:
		b[0].event = max(b[0].event, event)
	case event > b[1].event:
		b[1] = branch{child, event}
	}
}

// last returns the last event with a sequence that has the node's prefix.
func (n *node) last() int64 { return max(n.event, n.branches[0].event) }

// sequence is where a stored sequence is after some blocks.
type sequence struct {
	hash  uint64
	begun bool   // it has blocks
	node  int32  // the last one that it reached
	child uint64 // the block with which it left that node
	left  bool
	above *ending // the last prompt that ended on its way
	known bool

	number      int64 // of the event
	began, last int64
}

// subject is a request that misses a block.
type subject struct {
	slot

	of    Worker
	local []uint64
	held  int // leading blocks that the worker has
	// Of the tree: the nodes of the first 0 to held blocks, and the sequence hash up to the missing block.
	path    []int32
	missing uint64
}

// peer is a request that may explain stored blocks.
type peer struct {
	local []uint64
	span
}

// span is the time in which a request explains blocks, unix ns.
type span struct{ from, until int64 }

// spans are some of them. They are sorted when all are known: until is the largest one up to there then.
type spans []span

func (s spans) sort() {
	slices.SortFunc(s, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	for i := 1; i < len(s); i++ {
		s[i].until = max(s[i].until, s[i-1].until)
	}
}

// cover reports whether one of the spans has all of a time.
func (s spans) cover(from, until int64) bool {
	i, _ := slices.BinarySearchFunc(s, from, func(a span, from int64) int {
		if a.from <= from {
			return -1
		}
		return 1
	})
	return i > 0 && s[i-1].until >= until
}

// ending is the end of some prompts.
type ending struct {
	spans spans
	above *ending // the end of a shorter prompt on the same way
}

func newTree() *tree {
	t := &tree{at: map[uint64]int32{}, missing: map[uint64]int64{}, lost: map[uint64]int64{}, ends: map[uint64]*ending{}, spans: map[uint64]*spans{}}
	t.nodes = append(t.nodes, newNode(-1, 0))
	return t
}

func newNode(parent int32, block uint64) node {
	return node{parent, block, never, [2]branch{{0, never}, {0, never}}}
}

func (t *tree) full() bool { return len(t.nodes) > mostNodes }

// extend returns the sequence hash of a sequence with one more block.
func extend(hash, block uint64, begun bool) uint64 {
	if !begun {
		return block
	}
	return indexer.NextSequenceHash(hash, block)
}

func (t *tree) addSubject(s *subject) {
	t.steps += s.held + 1
	s.path = append(make([]int32, 0, s.held+1), 0)
	hash := uint64(0)
	for i, block := range s.local[:s.held] {
		hash = extend(hash, block, i > 0)
		n, known := t.at[hash]
		if !known {
			n = int32(len(t.nodes))
			t.nodes = append(t.nodes, newNode(s.path[i], block))
			t.at[hash] = n
		}
		s.path = append(s.path, n)
	}
	s.missing = extend(hash, s.local[s.held], s.held > 0)
	t.missing[s.missing], t.lost[s.local[s.held]] = never, never
}

// addEnds notes the ends of peers' prompts.
func (t *tree) addEnds(peers []peer) {
	for _, p := range peers {
		hash := uint64(0)
		for i, block := range p.local {
			hash = extend(hash, block, i > 0)
		}
		t.steps += len(p.local)
		e := t.ends[hash]
		if e == nil {
			e = new(ending)
			t.ends[hash] = e
		}
		e.spans = append(e.spans, p.span)
	}
	for _, e := range t.ends {
		e.spans.sort()
	}
}

// follow has a sequence go on with some blocks, which an event stored.
func (t *tree) follow(q *sequence, blocks []uint64, event int64) {
	t.steps += len(blocks)
	for _, block := range blocks {
		q.hash = extend(q.hash, block, q.begun)
		q.begun = true
		if !q.left {
			n, known := t.at[q.hash]
			if known {
				q.node = n
			} else {
				q.left, q.child = true, block
			}
		}
		if _, missing := t.missing[q.hash]; missing && q.known {
			t.missing[q.hash] = max(t.missing[q.hash], event)
		}
		if _, missing := t.lost[block]; missing && !q.known {
			t.lost[block] = event
		}
		if e := t.ends[q.hash]; e != nil && e != q.above {
			e.above, q.above = q.above, e
		}
	}
}

// addEvents follows the sequences of a worker's events, from a number on. chain appends the blocks up to one that an
// earlier event stored.
func (t *tree) addEvents(l *log, from uint64, chain func(dst []uint64, external uint64) []uint64) {
	byEnd, bases := map[uint64]int{}, map[uint64]sequence{}
	var buffer []uint64
	read := 0
	for ev, blocks := range l.since(from) {
		q := sequence{known: true}
		if ev.hasParent {
			i, inLog := byEnd[ev.parent]
			base, inIndex := bases[ev.parent]
			switch {
			case inLog:
				q = t.stored[i]
			case inIndex:
				q = base
			case read < mostBases:
				buffer = chain(buffer[:0], ev.parent)
				read += len(buffer)
				q.known = len(buffer) > 0
				t.follow(&q, buffer, never)
				bases[ev.parent] = q
			default:
				q.known = false
			}
		}
		if t.follow(&q, blocks, int64(ev.number)); q.known {
			q.number, q.began, q.last = int64(ev.number), ev.began, ev.last
			byEnd[ev.end] = len(t.stored)
			t.stored = append(t.stored, q)
		}
	}
}

// finish notes where the sequences that no peer explains leave the tree.
func (t *tree) finish(peers []peer) {
	open := t.stored[:0]
	for _, q := range t.stored {
		if q.explained() {
			continue
		}
		open = append(open, q)
		t.spans[q.hash] = new(spans)
	}
	t.stored = open
	if len(open) == 0 {
		return
	}
	for _, p := range peers {
		t.steps += len(p.local)
		hash := uint64(0)
		for i, block := range p.local {
			hash = extend(hash, block, i > 0)
			if s := t.spans[hash]; s != nil {
				*s = append(*s, p.span)
			}
		}
	}
	for _, s := range t.spans {
		s.sort()
	}
	t.stored = slices.DeleteFunc(open, func(q sequence) bool { return t.spans[q.hash].cover(q.began, q.last) })
	for _, q := range t.stored {
		if q.left {
			t.nodes[q.node].add(q.child, q.number)
		} else {
			t.nodes[q.node].event = q.number
		}
	}
	for i := len(t.nodes) - 1; i > 0; i-- { // a node stands behind its parent
		n := &t.nodes[i]
		if event := n.last(); event != never {
			t.nodes[n.parent].add(n.block, event)
		}
	}
}

// explained reports whether the sequence may be what a request generated: the request's prompt ends on its way.
func (q *sequence) explained() bool {
	n := 0
	for e := q.above; e != nil; e = e.above {
		if n++; n > mostEnds || e.spans.cover(q.began, q.last) {
			return true
		}
	}
	return false
}

// storedMissing reports whether the worker stored the block that a subject misses since its booking.
func (t *tree) storedMissing(s *subject) bool {
	return max(t.missing[s.missing], t.lost[s.local[s.held]]) >= int64(s.mark)
}

// differs returns the last block of a subject at which unexplained sequences differ that were stored since its booking;
// -1 if there is none.
func (t *tree) differs(s *subject) int {
	for at := s.held; at >= 0; at-- {
		t.steps++
		for _, b := range t.nodes[s.path[at]].branches {
			if b.event >= int64(s.mark) && b.child != s.local[at] {
				return at
			}
		}
	}
	return -1
}

// mostOthers limits the result of others.
const mostOthers = 64

// others returns the blocks with which the sequences go on that differ at a block of a subject, as keys. It is slow.
func (t *tree) others(s *subject, at int) map[uint64][]uint32 {
	others, next := make(map[uint64][]uint32), s.local[at]
	add := func(n int32, block uint64, event int64) {
		if n == s.path[at] && block != next && event >= int64(s.mark) && len(others) < mostOthers {
			others[block] = nil
		}
	}
	t.steps += len(t.stored) + len(t.nodes)
	for i := range t.stored {
		if q := &t.stored[i]; q.left {
			add(q.node, q.child, q.number)
		}
	}
	for i := range t.nodes {
		add(t.nodes[i].parent, t.nodes[i].block, t.nodes[i].last())
	}
	return others
}
