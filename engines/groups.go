// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// needs are the rules of the kinds of side groups, by the names of vLLM's kv_cache_spec_kind. A kind that is missing
// makes no prefix usable. MLA with a window has the rule of the window.
//
//nolint:gochecknoglobals // a table
var needs = map[string]indexer.Needs{
	"sliding_window": indexer.NeedsWindow, "sliding_window_mla": indexer.NeedsWindow, "mamba": indexer.NeedsState,
	"chunked_local_attention": indexer.NeedsChunk,
}

// layers is what a rank's events say of the groups of its model.
type layers struct {
	Full  int // tokens in a block of full attention; 0 = unknown
	Sides []indexer.SideGroup

	shapeSent bool // the index knows the shape
	shape     *indexer.Shape
}

// takeFull notes the size of an indexed block of full attention on the device. A lower tier may have larger blocks,
// which say nothing of where the device's prefixes end.
func (l *layers) takeFull(size int) {
	if size > l.Full {
		l.Full, l.shapeSent = size, false
	}
}

// isPart reports whether blocks of full attention are only parts of the group's blocks, which no hit uses.
func (l *layers) isPart(size int) bool { return len(l.Sides) > 0 && size < max(1, l.Full) }

// takeSide notes the group of a stored event. It returns false for a block that is only a part of the group's blocks.
func (r *engineRank) takeSide(ev *EngineEvent) bool {
	l := &r.Layers
	g := indexer.SideGroup{Group: ev.Group, Needs: needs[ev.Spec], Block: ev.BlockSize, Tokens: ev.Window}
	i := slices.IndexFunc(l.Sides, func(g indexer.SideGroup) bool { return g.Group == ev.Group })
	switch {
	case i < 0:
		l.Sides = append(l.Sides, g)
	case l.Sides[i].Needs == g.Needs && g.Block < l.Sides[i].Block:
		return false
	case l.Sides[i] == g:
		return true
	default:
		l.Sides[i] = g
	}
	l.shapeSent = false
	return true
}

// forgetSide forgets that a group is a side group.
func (r *engineRank) forgetSide(group int) {
	l := &r.Layers
	if n := len(l.Sides); n > 0 {
		l.Sides = slices.DeleteFunc(l.Sides, func(g indexer.SideGroup) bool { return g.Group == group })
		l.shapeSent = l.shapeSent && n == len(l.Sides)
	}
}

// sendShape adds an event with the shape of a rank, if it differs from what the index knows.
func (r *engineRank) sendShape(blockSize int, out *output) {
	l := &r.Layers
	if l.shapeSent || l.shape == nil && l.Full <= blockSize && len(l.Sides) == 0 {
		return
	}
	l.shapeSent = true
	full := max(l.Full, blockSize)
	if l.shape != nil && l.shape.Full == full && slices.Equal(l.shape.Sides, l.Sides) {
		return
	}
	l.shape = &indexer.Shape{Block: blockSize, Full: full, Sides: slices.Clone(l.Sides)}
	out.add(indexer.Event{Kind: indexer.Shaped, Shape: l.shape})
}

// storeSide passes on the blocks that a side group has stored. Each event has the shape, for an index that began
// meanwhile.
func (r *engineRank) storeSide(blockSize int, ev *EngineEvent, out *output) {
	if ev.Tier != indexer.Device || ev.BlockSize <= 0 || !r.takeSide(ev) {
		out.drop(DropGroup, max(1, len(ev.Hashes)))
		return
	}
	r.sendShape(blockSize, out)
	if needs[ev.Spec] == indexer.NeedsUnknown {
		out.drop(DropGroupKind, max(1, len(ev.Hashes)))
		out.unknownKind = ev.Spec
		return
	}
	if len(ev.Hashes) > 0 {
		first := len(out.externals)
		out.externals = append(out.externals, ev.Hashes...)
		out.add(indexer.Event{
			Kind: indexer.SideStored, Group: ev.Group, Parent: ev.Parent, HasParent: ev.HasParent,
			Externals: out.externals[first:], Shape: r.Layers.shape,
		})
	}
}

// removeSide passes on the removal of blocks of a side group.
func (r *engineRank) removeSide(ev *EngineEvent, out *output) {
	if ev.Tier != indexer.Device && !ev.AnyTier {
		return
	}
	first := len(out.externals)
	out.externals = append(out.externals, ev.Hashes...)
	if last := out.last(indexer.SideRemoved, indexer.Device); last != nil && last.Group == ev.Group {
		last.Externals = out.externals[first-len(last.Externals):]
		return
	}
	out.add(indexer.Event{Kind: indexer.SideRemoved, Group: ev.Group, Externals: out.externals[first:]})
}
