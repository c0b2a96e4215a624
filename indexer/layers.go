// SPDX-License-Identifier: Apache-2.0

package indexer

import "slices"

// maxShapes limits the changes of a worker's shape that are followed, since each one may copy all of its side blocks. An
// engine names its groups and their sizes once, so its shape grows by a few events after the start. After more changes
// no prefix of the worker counts.
const maxShapes = 32

// noRule are the side groups of a shape without a rule: no prefix can be used.
func noRule() []SideGroup { return []SideGroup{{}} }

// Layers is what the events of an engine's rank say of the groups of its model. It makes the rank's [Shape]. Its
// exported fields are saved.
type Layers struct {
	Full  int // tokens in a block of full attention; 0 = unknown
	Sides []SideGroup

	shape   *Shape // that the index knows; nil if it knows none
	sent    bool   // nothing changed since then
	changes int    // of Full and Sides
}

func (l *Layers) change() {
	l.sent = false
	l.changes++
}

// TakeFull notes the size of an indexed block of full attention on the device. A lower tier may have larger blocks,
// which say nothing of where the device's prefixes end.
func (l *Layers) TakeFull(size int) {
	if size > l.Full {
		l.Full = size
		l.change()
	}
}

// IsPart reports whether blocks of full attention are only parts of the group's blocks, which no hit uses.
func (l *Layers) IsPart(size int) bool { return len(l.Sides) > 0 && size < max(1, l.Full) }

// TakeSide notes the group of stored blocks. part says that they are only parts of the group's blocks, other that the
// group was a side group of another kind.
func (l *Layers) TakeSide(g SideGroup) (part, other bool) {
	i := l.find(g.Group)
	switch {
	case i < 0:
		l.Sides = append(l.Sides, g)
	case l.Sides[i] == g:
		return false, false
	case l.Sides[i].Needs == g.Needs && g.Block < l.Sides[i].Block:
		return true, false
	default:
		other = l.Sides[i].Needs != g.Needs
		l.Sides[i] = g
	}
	l.change()
	return false, other
}

func (l *Layers) find(group int) int {
	return slices.IndexFunc(l.Sides, func(g SideGroup) bool { return g.Group == group })
}

// IsSide reports whether a group is a side group.
func (l *Layers) IsSide(group int) bool { return l.find(group) >= 0 }

// ForgetSide forgets that a group is a side group. It reports whether it was one.
func (l *Layers) ForgetSide(group int) bool {
	i := l.find(group)
	if i >= 0 {
		l.Sides = slices.Delete(l.Sides, i, i+1)
		l.change()
	}
	return i >= 0
}

// Forget forgets all groups of a rank, of which one became another kind, but not how often that happened.
func (l *Layers) Forget() { *l = Layers{changes: l.changes + 1} }

// Clear notes that the index forgot the shape.
func (l *Layers) Clear() { l.shape, l.sent = nil, false }

// Unsteady reports whether the groups changed more often than is followed. The shape then has no rule.
func (l *Layers) Unsteady() bool { return l.changes > maxShapes }

// Shape returns the shape that the index knows; nil if it knows none.
func (l *Layers) Shape() *Shape { return l.shape }

// Next returns the shape if it differs from the one that the index knows; nil otherwise. The caller gives the returned
// shape to the index. block is the number of tokens in a block of the index.
func (l *Layers) Next(block int) *Shape {
	if l.sent || l.shape == nil && l.Full <= block && len(l.Sides) == 0 && !l.Unsteady() {
		return nil
	}
	l.sent = true
	to := &Shape{Block: block, Full: max(l.Full, block), Sides: slices.Clone(l.Sides)}
	if l.Unsteady() {
		to = &Shape{Block: block, Full: block, Sides: noRule()}
	}
	if l.shape != nil && l.shape.equal(to) {
		return nil
	}
	l.shape = to
	return to
}
