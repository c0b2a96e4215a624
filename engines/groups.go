// SPDX-License-Identifier: Apache-2.0

package engines

import "github.com/kvroute/kvroute/indexer"

// needs are the rules of the kinds of side groups, by the names of vLLM's kv_cache_spec_kind. A kind that is missing
// makes no prefix usable. MLA with a window has the rule of the window.
//
//nolint:gochecknoglobals // a table
var needs = map[string]indexer.Needs{
	"sliding_window": indexer.NeedsWindow, "sliding_window_mla": indexer.NeedsWindow, "mamba": indexer.NeedsState,
	"chunked_local_attention": indexer.NeedsChunk,
}

// sendShape adds an event with the shape of a rank, if it differs from what the index knows. It counts the change to a
// shape without a rule, after the groups changed too often.
func (r *engineRank) sendShape(blockSize int, out *output) {
	unsteady := r.Layers.Unsteady()
	out.unsteady = out.unsteady || unsteady
	if shape := r.Layers.Next(blockSize); shape != nil {
		out.add(indexer.Event{Kind: indexer.Shaped, Shape: shape})
		if unsteady {
			out.drop(DropGroupKind, 1)
		}
	}
}

// storeSide passes on the blocks that a side group has stored. Each event has the shape, for an index that began
// meanwhile. If the group's kind is unknown, or if the groups changed too often, the blocks are dropped, and no prefix
// of the worker can be used.
func (r *engineRank) storeSide(blockSize int, ev *EngineEvent, out *output) {
	if ev.Tier != indexer.Device || ev.BlockSize <= 0 {
		out.drop(DropGroup, max(1, len(ev.Hashes)))
		return
	}
	part, other := r.Layers.TakeSide(indexer.SideGroup{
		Group: ev.Group, Needs: needs[ev.Spec], Block: ev.BlockSize, Tokens: ev.Window,
	})
	if part {
		out.drop(DropGroup, max(1, len(ev.Hashes)))
		return
	}
	if other {
		out.drop(DropGroupKind, 1)
	}
	r.sendShape(blockSize, out)
	unknown := needs[ev.Spec] == indexer.NeedsUnknown
	if unknown {
		out.unknownKind = ev.Spec
	}
	if unknown || r.Layers.Unsteady() {
		out.drop(DropGroupKind, max(1, len(ev.Hashes)))
		return
	}
	if len(ev.Hashes) > 0 {
		first := len(out.externals)
		out.externals = append(out.externals, ev.Hashes...)
		out.add(indexer.Event{
			Kind: indexer.SideStored, Group: ev.Group, Parent: ev.Parent, HasParent: ev.HasParent,
			Externals: out.externals[first:], Shape: r.Layers.Shape(),
		})
	}
}

// removeSide passes on the removal of one copy of blocks of a side group, or of all copies.
func removeSide(ev *EngineEvent, all bool, out *output) {
	if ev.Tier != indexer.Device && !ev.AnyTier {
		return
	}
	first := len(out.externals)
	out.externals = append(out.externals, ev.Hashes...)
	if last := out.last(indexer.SideRemoved, indexer.Device); last != nil && last.Group == ev.Group {
		last.Externals = out.externals[first-len(last.Externals):]
		return
	}
	out.add(indexer.Event{Kind: indexer.SideRemoved, Group: ev.Group, AllCopies: all, Externals: out.externals[first:]})
}
