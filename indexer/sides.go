// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"iter"
	"maps"
	"math"
	"slices"
)

// Needs says which blocks of a side group an engine needs to continue after a prefix.
type Needs uint8

// The kinds of side groups.
const (
	NeedsUnknown Needs = iota // no prefix can be used: the rule is unknown
	NeedsWindow               // the blocks with the last Tokens-1 tokens: sliding window
	NeedsState                // the block that ends there: the state of a recurrent layer
	NeedsChunk                // the blocks from the last multiple of Tokens on: chunked local attention
)

// SideGroup is a group of a hybrid model's layers that does not have full attention. The layers of a group share one
// list of blocks.
type SideGroup struct {
	Group  int // number of the group in the engine
	Needs  Needs
	Block  int // tokens in a block
	Tokens int // size of the window or chunk; 0 = unknown, which counts as a chunk without end
}

// Shape describes the blocks of a worker whose cached prefix is not simply the leading blocks that it has: a prefix
// can be used only up to a boundary, which is a multiple of all block sizes, and only if each side group has the
// blocks that it needs there. The rule is that of vLLM (find_longest_cache_hit in v1/core/kv_cache_coordinator.py).
type Shape struct {
	Block int // tokens in a block of the index
	Full  int // tokens in the engine's blocks of full attention
	Sides []SideGroup
}

const (
	// maxSides limits the side groups of a worker.
	maxSides = 16
	// maxSideBlocks limits the entries for the side blocks of a worker, of all its groups together: 76 MB, or 94 MB if
	// half of them are for copies. An engine has no more blocks than fit its memory, and its side groups keep few.
	maxSideBlocks = 1 << 21
	// maxStep limits the tokens between two boundaries.
	maxStep = 1 << 24
)

// step returns the number of blocks of the index between two boundaries; 0 if the shape contradicts itself, or if its
// rule is unknown.
func (s *Shape) step() int {
	if len(s.Sides) > maxSides || s.Block <= 0 {
		return 0
	}
	step := lcm(s.Block, s.Full)
	for i := range s.Sides {
		g := &s.Sides[i]
		step = lcm(step, g.Block)
		if g.Needs == NeedsUnknown || g.Needs > NeedsChunk || g.Needs == NeedsWindow && g.Tokens <= 0 {
			return 0
		}
	}
	return step / s.Block
}

// lcm returns the least common multiple of two numbers; 0 if there is none, or if it is above maxStep.
func lcm(a, b int) int {
	if a <= 0 || b <= 0 || a > maxStep || b > maxStep {
		return 0
	}
	x, y := a, b
	for y > 0 {
		x, y = y, x%y
	}
	if a = a / x * b; a > maxStep {
		return 0
	}
	return a
}

// sides are the side groups of a worker on the device.
//
// # Invariants
//
//   - held has a bit for each group with blocks of a step or more that has at least one copy of a block; it has no
//     entry without a bit.
//   - before has a map for each group whose blocks are shorter than a step: for each block that the group has, a block
//     before it, or the block itself if that is unknown. If the group keeps the block directly before it when it stores
//     the block, it is that one.
//   - more has the further copies, at least one for each entry.
//   - The entries of these maps are at most Index.sideLimit, and those of all workers, sideEntries, at most maxBlocks.
type sides struct {
	shape  Shape
	shapes int // how many it has had since it had none; above maxShapes, shape has no rule and does not change
	step   int // see Shape.step
	rules  []rule
	held   map[uint64]uint16
	before []map[uint64]uint64 // by the position of the group in the shape
	more   map[sideBlock]uint32
}

// rule is what groups of one kind need, which keep or lose their blocks at the same places.
type rule struct {
	SideGroup

	position int    // of the first group in the shape
	mask     uint16 // of all groups
	per      int    // blocks between two boundaries
}

// makeRules makes the rules of a shape. A group whose blocks are shorter than a step has a rule of its own, since
// before is by group.
func (s *sides) makeRules() {
	for i, g := range s.shape.Sides {
		per := s.step * s.shape.Block / g.Block
		same := slices.IndexFunc(s.rules, func(r rule) bool {
			return per == 1 && r.Needs == g.Needs && r.Block == g.Block && r.Tokens == g.Tokens
		})
		if same < 0 {
			same = len(s.rules)
			s.rules = append(s.rules, rule{SideGroup: g, position: i, per: per})
		}
		s.rules[same].mask |= 1 << i
	}
}

// sideBlock is a block of a side group: the position of the group in the shape, and the engine's id of the block.
type sideBlock struct {
	group    int
	external uint64
}

// find returns the position of a group in the shape, -1 if it is not there.
func (s *sides) find(group int) int {
	return slices.IndexFunc(s.shape.Sides, func(g SideGroup) bool { return g.Group == group })
}

// has reports whether a group has a block.
func (s *sides) has(group int, external uint64) bool {
	if before := s.before[group]; before != nil {
		_, has := before[external]
		return has
	}
	return s.held[external]>>group&1 == 1
}

// entries returns the number of entries for blocks.
func (s *sides) entries() int {
	if s == nil {
		return 0
	}
	n := len(s.held) + len(s.more)
	for _, before := range s.before {
		n += len(before)
	}
	return n
}

// shape changes the shape of a worker. Groups that stay as they were keep their blocks. It returns false if the shape
// changed too often.
func (x *Index) shape(worker int, to *Shape) bool {
	old := x.sidesOf(worker)
	switch {
	case old != nil && old.shapes > maxShapes:
		return false
	case to == nil, to.Full <= to.Block && len(to.Sides) == 0:
		x.dropSides(worker)
		return true
	case old != nil && old.shape.equal(to):
		return true
	}
	s := &sides{shape: *to, shapes: 1, held: make(map[uint64]uint16), more: make(map[sideBlock]uint32)}
	s.shape.Sides = slices.Clone(to.Sides)
	if old != nil {
		s.shapes += old.shapes
	}
	if s.shapes > maxShapes {
		s.shape.Sides = noRule()
	}
	if s.step = s.shape.step(); s.step > 0 {
		s.makeRules()
		s.before = make([]map[uint64]uint64, len(s.shape.Sides))
		for i, g := range s.shape.Sides {
			if g.Block < s.step*s.shape.Block {
				s.before[i] = make(map[uint64]uint64)
			}
		}
	}
	if x.sideEntries -= old.entries(); old != nil && s.step > 0 {
		s.take(old, x.sideRoom(nil))
	}
	x.sideEntries += s.entries()
	x.gate.Lock()
	defer x.gate.Unlock()
	for len(x.sides) <= worker {
		x.sides = append(x.sides, nil)
	}
	x.sides[worker] = s
	x.shaped.Store(true)
	return s.shapes <= maxShapes
}

func (s *Shape) equal(o *Shape) bool {
	return s.Block == o.Block && s.Full == o.Full && slices.Equal(s.Sides, o.Sides)
}

// Hybrid reports whether a worker has a [Shape].
func (x *Index) Hybrid(worker int) bool {
	if !x.shaped.Load() {
		return false
	}
	x.gate.RLock()
	defer x.gate.RUnlock()
	return x.sidesOf(worker) != nil
}

// Boundaries says where the usable prefixes of a worker end.
type Boundaries struct {
	Step  int  // blocks between two boundaries; 1 without a [Shape], 0 if the rule is unknown: no prefix counts
	Sides bool // the worker has side groups
	// Lacks is what the side group Group needs, if a match found that it lacks a block, so that less of the full prefix
	// can be used; NeedsUnknown otherwise.
	Lacks Needs
	Group int32 // number of the group in the engine
}

// Boundaries returns where the usable prefixes of a worker end.
func (x *Index) Boundaries(worker int) Boundaries {
	if !x.shaped.Load() {
		return Boundaries{Step: 1}
	}
	x.gate.RLock()
	defer x.gate.RUnlock()
	return x.boundariesOf(worker)
}

func (x *Index) boundariesOf(worker int) Boundaries {
	if s := x.sidesOf(worker); s != nil {
		return Boundaries{Step: s.step, Sides: len(s.shape.Sides) > 0}
	}
	return Boundaries{Step: 1}
}

func (x *Index) fillEnds(dst []Boundaries) {
	for w := range dst {
		dst[w] = x.boundariesOf(w)
	}
}

// AnyHybrid reports whether any worker has had a [Shape].
func (x *Index) AnyHybrid() bool { return x.shaped.Load() }

// sidesOf returns the side groups of a worker; nil if its model is not hybrid.
func (x *Index) sidesOf(worker int) *sides {
	if worker < len(x.sides) {
		return x.sides[worker]
	}
	return nil
}

// dropSides forgets the shape of a worker, and the blocks of its side groups.
func (x *Index) dropSides(worker int) {
	if x.sidesOf(worker) == nil {
		return
	}
	x.sideEntries -= x.sides[worker].entries()
	x.gate.Lock()
	x.sides[worker] = nil
	x.gate.Unlock()
}

// sideRoom returns how many further entries a worker may have.
func (x *Index) sideRoom(s *sides) int {
	return min(x.sideLimit-s.entries(), x.maxBlocks-x.sideEntries)
}

// take takes the blocks of groups that did not change, as far as there is room for them.
func (s *sides) take(old *sides, room int) {
	for i, g := range old.shape.Sides {
		to := s.find(g.Group)
		if to < 0 || s.shape.Sides[to] != g {
			continue
		}
		for e, before := range old.blocks(i) {
			if room < 2 { // a block and its copies
				return
			}
			room -= s.put(to, e, before)
			if n := old.more[sideBlock{i, e}]; n > 0 {
				s.more[sideBlock{to, e}] = n
				room--
			}
		}
	}
}

// blocks yields the blocks of a group, each with the block before it, or with itself if that is unknown.
func (s *sides) blocks(group int) iter.Seq2[uint64, uint64] {
	if len(s.before) > 0 && s.before[group] != nil {
		return maps.All(s.before[group])
	}
	return func(yield func(uint64, uint64) bool) {
		for e, groups := range s.held {
			if groups>>group&1 == 1 && !yield(e, e) {
				return
			}
		}
	}
}

// put notes that a group has a block, and returns the number of new entries.
func (s *sides) put(group int, external, before uint64) (grown int) {
	if known := s.before[group]; known != nil {
		known[external] = before
		return 1
	}
	groups := s.held[external]
	s.held[external] = groups | 1<<group
	if groups == 0 {
		return 1
	}
	return 0
}

// storeSides notes blocks of a side group. They are some of the blocks of one sequence, in its order, or pairs.
func (x *Index) storeSides(worker int, ev *Event) (out Outcome) {
	if ev.Shape != nil && !x.shape(worker, ev.Shape) {
		return Outcome{Refused: len(ev.Externals)}
	}
	s, g := x.sidesOf(worker), -1
	if s != nil && s.step > 0 {
		g = s.find(ev.Group)
	}
	if g < 0 || ev.Pairs && len(ev.Externals)%2 == 1 {
		return Outcome{Invalid: len(ev.Externals)}
	}
	x.gate.Lock()
	defer x.gate.Unlock()
	room, grown := x.sideRoom(s), 0
	before, has := ev.Parent, ev.HasParent
	for i, e := range ev.Externals {
		if ev.Pairs && i%2 == 0 {
			before, has = e, e != ev.Externals[i+1]
			continue
		}
		at, held := sideBlock{g, e}, s.has(g, e)
		switch {
		case grown >= room && (held && s.more[at] == 0 || !held && (s.before[g] != nil || s.held[e] == 0)):
			out.Refused++
			before, has = e, true
			continue
		case held:
			out.Duplicate++
			n := s.more[at]
			if s.more[at] = n + 1; n == 0 {
				grown++
			} else if n == math.MaxUint32 {
				s.more[at] = n
			}
		default:
			out.Stored++
			grown += s.put(g, e, e)
		}
		if known := s.before[g]; known != nil && has && before != e {
			if old := known[e]; old == e || !s.has(g, old) {
				known[e] = before // unless the block that came before is there: it may be nearer
			}
		}
		before, has = e, true
	}
	x.sideEntries += grown
	return out
}

// removeSides removes one copy of each block of a side group, or all copies.
func (x *Index) removeSides(worker int, ev *Event) (out Outcome) {
	s, g := x.sidesOf(worker), -1
	if s != nil {
		g = s.find(ev.Group)
	}
	x.gate.Lock()
	defer x.gate.Unlock()
	was := s.entries()
	for _, e := range ev.Externals {
		if g < 0 || s.step == 0 || !s.has(g, e) {
			out.Unknown++
			continue
		}
		out.Removed++
		at := sideBlock{g, e}
		n := s.more[at]
		if n > 0 && ev.AllCopies {
			delete(s.more, at)
			n = 0
		}
		switch {
		case n > 1:
			s.more[at] = n - 1
		case n == 1:
			delete(s.more, at)
		case s.before[g] != nil:
			delete(s.before[g], e)
		default:
			if s.held[e] &^= 1 << g; s.held[e] == 0 {
				delete(s.held, e)
			}
		}
	}
	x.sideEntries -= was - s.entries()
	return out
}

// SideBlocks returns the number of entries for blocks that side groups of a worker hold: one for each block that groups
// with blocks of a step or more hold, one for each block of each other group, and one for each block with copies.
func (x *Index) SideBlocks(worker int) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.sidesOf(worker).entries()
}

// sidesOfEvent limits the blocks of an event that [Parked.Events] returns, maxCopies the copies of a block that it
// counts.
const sidesOfEvent, maxCopies = 4096, 255

// Sides returns events that give another index the shape of a worker and the blocks of its side groups; nil without a
// shape.
func (x *Index) Sides(worker int) (evs []Event) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.sidesOf(worker)
	if s == nil {
		return nil
	}
	shape := s.shape
	shape.Sides = slices.Clone(s.shape.Sides)
	evs = append(evs, Event{Kind: Shaped, Shape: &shape})
	if s.step > 0 {
		for i := range shape.Sides {
			evs = s.appendGroup(evs, i, &shape)
		}
	}
	return evs
}

func (x *Index) sidesLen() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.sides)
}

// appendGroup appends the blocks of a group, as pairs where predecessors count: the blocks of a group come in no order.
func (s *sides) appendGroup(evs []Event, group int, shape *Shape) []Event {
	next := Event{Kind: SideStored, Group: shape.Sides[group].Group, Shape: shape, Pairs: s.before[group] != nil}
	for e, before := range s.blocks(group) {
		for range min(s.more[sideBlock{group, e}], maxCopies) + 1 {
			if next.Pairs {
				next.Externals = append(next.Externals, before)
			}
			next.Externals = append(next.Externals, e)
		}
		if len(next.Externals) >= sidesOfEvent {
			evs = append(evs, next)
			next.Externals = make([]uint64, 0, sidesOfEvent+16)
		}
	}
	if len(next.Externals) > 0 {
		evs = append(evs, next)
	}
	return evs
}
