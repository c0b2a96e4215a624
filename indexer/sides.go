// SPDX-License-Identifier: Apache-2.0

package indexer

import (
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
	// maxSideBlocks limits the side blocks of a worker.
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
//   - held has a bit for each group of the shape that has at least one copy of a block; it has no entry without a bit.
//   - more has the further copies, at least one for each entry.
//   - before has a block before each block that held has, in groups whose blocks are shorter than a step. If the group
//     keeps the block directly before it when it stores the block, it is that one.
type sides struct {
	shape  Shape
	step   int // see Shape.step
	rules  []rule
	held   map[uint64]uint16
	more   map[sideBlock]uint32
	before map[sideBlock]uint64
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

// short reports whether the blocks of a group are shorter than a step, so that their predecessors count.
func (s *sides) short(group int) bool {
	return s.shape.Sides[group].Block < s.step*s.shape.Block
}

// shape changes the shape of a worker. Groups that stay as they were keep their blocks.
func (x *Index) shape(worker int, to *Shape) {
	if to == nil || to.Full <= to.Block && len(to.Sides) == 0 {
		x.dropSides(worker)
		return
	}
	if old := x.sidesOf(worker); old != nil && old.shape.equal(to) {
		return
	}
	s := &sides{
		shape: *to, step: to.step(),
		held: make(map[uint64]uint16), more: make(map[sideBlock]uint32), before: make(map[sideBlock]uint64),
	}
	if s.shape.Sides = slices.Clone(to.Sides); s.step > 0 {
		s.makeRules()
	}
	if old := x.sidesOf(worker); old != nil && s.step > 0 {
		s.take(old)
	}
	x.gate.Lock()
	defer x.gate.Unlock()
	for len(x.sides) <= worker {
		x.sides = append(x.sides, nil)
	}
	x.sides[worker] = s
	x.shaped.Store(true)
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
	x.gate.Lock()
	x.sides[worker] = nil
	x.gate.Unlock()
}

// take takes the blocks of groups that did not change.
func (s *sides) take(old *sides) {
	for i, g := range old.shape.Sides {
		to := s.find(g.Group)
		if to < 0 || s.shape.Sides[to] != g {
			continue
		}
		for e, groups := range old.held {
			if groups>>i&1 == 0 {
				continue
			}
			from, at := sideBlock{i, e}, sideBlock{to, e}
			s.held[e] |= 1 << to
			if n := old.more[from]; n > 0 {
				s.more[at] = n
			}
			if b, ok := old.before[from]; ok {
				s.before[at] = b
			}
		}
	}
}

// storeSides notes blocks of a side group. They are some of the blocks of one sequence, in its order.
func (x *Index) storeSides(worker int, ev *Event) (out Outcome) {
	if ev.Shape != nil {
		x.shape(worker, ev.Shape)
	}
	s := x.sidesOf(worker)
	if s == nil || s.step == 0 {
		return Outcome{Invalid: len(ev.Externals)}
	}
	g := s.find(ev.Group)
	if g < 0 {
		return Outcome{Invalid: len(ev.Externals)}
	}
	x.gate.Lock()
	defer x.gate.Unlock()
	short := s.short(g)
	before, has := ev.Parent, ev.HasParent
	for _, e := range ev.Externals {
		at, groups := sideBlock{g, e}, s.held[e]
		switch {
		case groups>>g&1 == 1:
			if s.more[at] < math.MaxUint32 {
				s.more[at]++
			}
			out.Duplicate++
		case groups == 0 && len(s.held) >= maxSideBlocks:
			out.Refused++
			continue
		default:
			s.held[e] = groups | 1<<g
			out.Stored++
		}
		if old, known := s.before[at]; short && has && before != e && (!known || s.held[old]>>g&1 == 0) {
			s.before[at] = before // unless the block that came before is there: it may be nearer
		}
		before, has = e, true
	}
	return out
}

// removeSides removes one copy of each block of a side group.
func (x *Index) removeSides(worker int, ev *Event) (out Outcome) {
	s, g := x.sidesOf(worker), -1
	if s != nil {
		g = s.find(ev.Group)
	}
	x.gate.Lock()
	defer x.gate.Unlock()
	for _, e := range ev.Externals {
		if g < 0 || s.held[e]>>g&1 == 0 {
			out.Unknown++
			continue
		}
		out.Removed++
		at := sideBlock{g, e}
		if n := s.more[at]; n > 0 {
			if s.more[at] = n - 1; n == 1 {
				delete(s.more, at)
			}
			continue
		}
		delete(s.before, at)
		if s.held[e] &^= 1 << g; s.held[e] == 0 {
			delete(s.held, e)
		}
	}
	return out
}

// SideBlocks returns the number of blocks that side groups of a worker hold.
func (x *Index) SideBlocks(worker int) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	if s := x.sidesOf(worker); s != nil {
		return len(s.held)
	}
	return 0
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
	for i := range shape.Sides {
		evs = s.appendGroup(evs, i, &shape)
	}
	return evs
}

func (x *Index) sidesLen() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.sides)
}

// appendGroup appends the blocks of a group. Where predecessors count, each block has an event of its own: a reader
// takes the block before a block in an event for its predecessor, and the blocks of a group come in no order.
func (s *sides) appendGroup(evs []Event, group int, shape *Shape) []Event {
	next := Event{Kind: SideStored, Group: shape.Sides[group].Group, Shape: shape}
	short := s.short(group)
	for e, groups := range s.held {
		at := sideBlock{group, e}
		if groups>>group&1 == 0 {
			continue
		}
		copies := slices.Repeat([]uint64{e}, int(min(s.more[at], maxCopies))+1)
		if short {
			before, has := s.before[at]
			evs = append(evs, Event{
				Kind: SideStored, Group: next.Group, Shape: shape, Parent: before, HasParent: has, Externals: copies,
			})
			continue
		}
		if next.Externals = append(next.Externals, copies...); len(next.Externals) >= sidesOfEvent {
			evs = append(evs, next)
			next.Externals = nil
		}
	}
	if len(next.Externals) > 0 {
		evs = append(evs, next)
	}
	return evs
}
