// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"maps"
	"math"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// engineRank is the state of a rank of an engine. Its exported fields are saved.
type engineRank struct {
	Places []*placeBlocks `json:"-"` // none is empty; there are few
	Groups [maxGroup]groupKind
	Window int // TensorRT-LLM: the largest attention window
	Layers indexer.Layers

	LastID    uint64 // TensorRT-LLM
	HasLastID bool
}

// place is where an engine keeps blocks: a tier of a group of its cache.
type place struct {
	Tier  indexer.Tier
	Group int
}

// placeBlocks are the blocks at a place.
type placeBlocks struct {
	At    place
	table blockTable

	Blocks oldBlocks // of a file of release 0.1.0; else empty
}

// blocks returns the blocks at a place, or nil.
func (r *engineRank) blocks(at place) *blockTable {
	for _, p := range r.Places {
		if p.At == at {
			return &p.table
		}
	}
	return nil
}

// placed is blocks, and adds the place if it is not there.
func (r *engineRank) placed(at place) *blockTable {
	if r.blocks(at) == nil {
		r.Places = append(r.Places, &placeBlocks{At: at})
	}
	return r.blocks(at)
}

type groupKind uint8

const (
	groupUnknown groupKind = iota
	groupPrefix            // its blocks are prefixes
	groupOther
)

// cachedBlock is a block in the engine's cache.
type cachedBlock struct {
	blockState

	Resized *resizedBlock // nil if the block's size is the index's
}

// blockState is the state of a block of any size.
type blockState struct {
	Local, Seed uint64
	Parent      uint64 // as in the index; for a part that is not published, the engine's id
	Count       uint32 // copies
	HasParent   bool
	Published   bool // the index has the block
}

// resizedBlock is the additional state of a block whose size is not the index's. Its exported
// fields never change, so that they can be saved without a lock.
type resizedBlock struct {
	Part   bool     // smaller than the index's block
	Tokens []uint32 // of a part
	Parts  []uint64 // of a published part: the ids of the parts before it
	Locals []uint64 // of a larger block: the hashes of its parts

	whole map[uint64]struct{} // of a part: the ids of the published parts after it
}

// register adds a published part to the parts before it, or removes it from them.
func (r *engineRank) register(at place, hash uint64, k *cachedBlock, published bool) {
	if k.Resized == nil {
		return
	}
	for _, id := range k.Resized.Parts {
		switch part, _ := r.blocks(at).get(id); {
		case part.Resized == nil:
		case !published:
			delete(part.Resized.whole, hash)
		case part.Resized.whole == nil:
			part.Resized.whole = map[uint64]struct{}{hash: {}}
		default:
			part.Resized.whole[hash] = struct{}{}
		}
	}
}

// weight returns the number of blocks that a block counts as in MaxBlocks.
func (k *cachedBlock) weight() int {
	if k.Resized == nil {
		return 1
	}
	return max(1, len(k.Resized.Locals))
}

func (e *Engine) forget(r *engineRank) {
	for _, p := range r.Places {
		for _, k := range p.table.all() {
			e.blocks -= k.weight()
		}
	}
	r.Places = nil
}

// find looks for a block at a place and on other tiers, because a parent may be on another tier.
func (r *engineRank) find(hash uint64, at place) (cachedBlock, bool) {
	if k, ok := r.blocks(at).get(hash); ok {
		return k, true
	}
	if k, ok := r.blocks(place{indexer.Device, at.Group}).get(hash); ok {
		return k, true
	}
	for _, p := range r.Places {
		if k, ok := p.table.get(hash); ok {
			return k, true
		}
	}
	return cachedBlock{}, false
}

// put remembers a block, or one more copy of it. The index keeps the first content of a block
// until the block is removed; k is set to that content.
func (e *Engine) put(r *engineRank, at place, hash uint64, k *cachedBlock) DropReason {
	blocks := r.blocks(at)
	reason, grown := DropNone, k.weight()
	k.Count = 1
	if slot := blocks.find(hash); slot >= 0 {
		old := blocks.at(slot)
		count := old.Count
		if count < math.MaxUint32 {
			count++
		}
		switch {
		case old.Published:
			if k.Published && k.Local != old.Local {
				reason = DropConflict
			}
			*k = old
		case k.Resized != nil && old.Resized != nil && !k.Published:
			k.Resized = old.Resized
		}
		k.Count = count
		grown = k.weight() - old.weight()
	}
	if grown > 0 && e.blocks+grown > e.opt.MaxBlocks {
		return DropFull
	}
	if blocks == nil {
		blocks = r.placed(at)
	}
	blocks.set(hash, k)
	e.blocks += grown
	return reason
}

// remember keeps a block that is not published, so that its removal is not published either.
func (e *Engine) remember(r *engineRank, at place, hash uint64) {
	if r.blocks(at).find(hash) < 0 {
		e.put(r, at, hash, &cachedBlock{})
	}
}

// join hashes the index's block that ends with a part, if there is one: the parts after the end
// of another block, or after the beginning of the sequence, must fill it exactly. The block is
// published with its last part. If another part is removed and stored again, the block is
// published when its last part is stored again.
func (e *Engine) join(r *engineRank, at place, tokens []uint32, size int, k *cachedBlock) DropReason {
	k.Resized = &resizedBlock{Part: true, Tokens: slices.Clone(tokens[:size])}
	var ids []uint64 // of the parts before the last one, backwards
	start, hasStart := k.Parent, k.HasParent
	for hasStart {
		if before, ok := r.find(start, at); ok && before.Published {
			break
		}
		before, _ := r.blocks(at).get(start)
		if before.Resized == nil || len(before.Resized.Tokens) != size || (len(ids)+1)*size >= e.opt.BlockSize {
			return DropParent
		}
		ids = append(ids, start)
		start, hasStart = before.Parent, before.HasParent
	}
	if (len(ids)+1)*size < e.opt.BlockSize {
		return DropNone
	}
	whole := make([]uint32, 0, e.opt.BlockSize+1)
	for _, id := range slices.Backward(ids) {
		part, _ := r.blocks(at).get(id)
		whole = append(whole, part.Resized.Tokens...)
	}
	whole = append(whole, tokens...)
	k.Resized.Parts = ids
	e.hashes = indexer.AppendLocalHashes(e.hashes[:0], whole, len(whole), k.Seed)
	k.Local, k.Published = e.hashes[0], true
	k.Parent, k.HasParent = start, hasStart
	return DropNone
}

// appendBlocks appends the index's blocks of a block of the engine. The last part of a
// split block keeps the engine's id.
func appendBlocks(blocks []indexer.Block, hash uint64, k *cachedBlock) []indexer.Block {
	if k.Resized != nil {
		for j, local := range k.Resized.Locals[:max(0, len(k.Resized.Locals)-1)] {
			blocks = append(blocks, indexer.Block{External: splitID(hash, j), Local: local})
		}
	}
	return append(blocks, indexer.Block{External: hash, Local: k.Local})
}

// splitID is the id of the j-th part of a split block: XXH3-64 with the base seed
// over both, which is how a block of three tokens is hashed.
func splitID(hash uint64, j int) uint64 {
	var id [1]uint64
	return indexer.AppendLocalHashes(id[:0], []uint32{uint32(hash), uint32(hash >> 32), uint32(j)}, 3,
		indexer.Seed("", ""))[0]
}

// appendIDs appends the index's ids of a published block, each once.
func appendIDs(ids []uint64, hash uint64, k *cachedBlock) []uint64 {
	if k.Resized == nil && len(ids) == 0 {
		return append(ids, hash)
	}
	for _, b := range appendBlocks(nil, hash, k) {
		if !slices.Contains(ids, b.External) {
			ids = append(ids, b.External)
		}
	}
	return ids
}

// unpublish notes that the index loses a block because a group lost it: a prefix needs the block in all groups of full
// attention. It appends the ids under which the index may have the block for the other groups of the tier. The block
// is published again when one of the groups stores it.
func (e *Engine) unpublish(gone []uint64, r *engineRank, at place, hash uint64) []uint64 {
	for _, p := range r.Places {
		if p.At.Tier != at.Tier || p.At.Group == at.Group {
			continue
		}
		if k, _ := p.table.get(hash); k.Published {
			gone = appendIDs(gone, hash, &k)
			e.hide(r, p, hash, &k)
		}
	}
	return gone
}

// hide notes that a block is not published any more.
func (e *Engine) hide(r *engineRank, p *placeBlocks, hash uint64, k *cachedBlock) {
	e.blocks += 1 - k.weight()
	r.register(p.At, hash, k, false)
	p.table.set(hash, &cachedBlock{blockState: blockState{Count: k.Count}})
}

// take removes one copy of the block in a slot, or all copies, and appends the index's ids of the
// blocks that are gone to gone.
func (e *Engine) take(gone []uint64, r *engineRank, at place, slot int, all bool) []uint64 {
	blocks := r.blocks(at)
	if s := &blocks.slots[slot]; s.count > 1 && !all {
		s.count--
		return gone
	}
	hash, k := blocks.slots[slot].id, blocks.at(slot)
	if k.Published {
		gone = appendIDs(gone, hash, &k)
	}
	gone = e.unpublish(gone, r, at, hash)
	e.blocks -= k.weight()
	if blocks.delete(slot); blocks.n == 0 {
		r.Places = slices.DeleteFunc(r.Places, func(p *placeBlocks) bool { return p.At == at })
	}
	if k.Resized == nil {
		return gone
	}
	r.register(at, hash, &k, false)
	for _, id := range slices.Sorted(maps.Keys(k.Resized.whole)) {
		// Of a block in parts, the index has only the last part's id.
		if last, ok := blocks.get(id); ok && last.Published {
			gone = append(gone, id)
			r.register(at, id, &last, false)
			last.Published, last.Resized = false, nil
			blocks.set(id, &last)
			gone = e.unpublish(gone, r, at, id)
		}
	}
	return gone
}
