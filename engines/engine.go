// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"slices"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// EngineOptions holds the settings that an engine's events do not contain.
type EngineOptions struct {
	// BlockSize is the block size of the index, in tokens. The engine's block size must divide it
	// or be a multiple of it.
	BlockSize int
	// Rank is the rank of events that name none.
	Rank uint32
	// Placeholder is the model's token for an image; 0 if unknown.
	Placeholder uint32
	// SetLike means that one removal removes all copies of a block. It is right for SGLang and for
	// engines that report a block again although they have it. Otherwise, as with vLLM, a block
	// stays until it was removed as often as it was stored.
	SetLike bool
	// MaxBlocks limits the number of remembered blocks. Default 2,097,152.
	MaxBlocks int
}

const defaultMaxBlocks = 1 << 21

// Engine translates the events of one engine for the index. It remembers the blocks,
// because engines name the salt only where a sequence begins, move blocks between tiers
// without their content, and store several copies of a block. It is not safe for
// concurrent use.
//
// # Invariants
//
//   - The index has exactly the published blocks. Their removal is returned before they
//     are forgotten.
//   - A block has as many copies as were stored and not removed; with SetLike one.
//   - blocks is the sum of the weights of the remembered blocks, at most MaxBlocks.
//   - A part of a block of the index's size names each published part after it that completes a
//     block, and that part names the parts before it.
type Engine struct {
	opt    EngineOptions
	ranks  map[uint32]*engineRank
	blocks int      // remembered, of all ranks
	gaps   int      // how often events of TensorRT-LLM were missing
	hashes []uint64 // reused buffer
	gone   []uint64 // reused buffer

	touched uint64 // prevents the compiler from removing the loop of [blockTable.touch]
}

// NewEngine returns an Engine whose caches are empty.
func NewEngine(opt EngineOptions) *Engine {
	if opt.MaxBlocks <= 0 {
		opt.MaxBlocks = defaultMaxBlocks
	}
	return &Engine{opt: opt, ranks: make(map[uint32]*engineRank)}
}

// Blocks returns the number of remembered blocks.
func (e *Engine) Blocks() int { return e.blocks }

// Copies returns the largest number of copies that a block has. If the engine does not report each
// removal, the number grows without limit; then SetLike is right.
func (e *Engine) Copies() (most int) {
	for _, r := range e.ranks {
		for _, p := range r.Places {
			for _, k := range p.table.all() {
				most = max(most, int(k.Count))
			}
		}
	}
	return most
}

// Clear forgets a rank, as after a restart or a loss, and returns the event that clears it. The next process of the
// engine may have other groups and block sizes.
func (e *Engine) Clear(rank uint32) events.RouterEvent {
	if r := e.ranks[rank]; r != nil {
		r.Layers, r.Groups = indexer.Layers{}, [maxGroup]groupKind{}
	}
	return e.clear(rank)
}

// clear forgets the blocks of a rank. The event that it returns clears the shape in the index, too, so the next blocks
// come after a new event for the shape. A reader that misses that event has then missed no later one.
func (e *Engine) clear(rank uint32) events.RouterEvent {
	if r := e.ranks[rank]; r != nil {
		r.Layers.Clear()
		e.forget(r)
	}
	return events.RouterEvent{DPRank: rank, Event: indexer.Event{Kind: indexer.Cleared}}
}

// Apply applies a batch in order. It returns the events for the index, without worker and id,
// which the publisher adds, and the number of blocks that the decoder or Apply ignored.
func (e *Engine) Apply(b *EngineBatch) ([]events.RouterEvent, Drops) {
	var out output
	e.translate(b, &out)
	return out.events, out.drops
}

// translate is Apply, and reuses the memory of out.
func (e *Engine) translate(b *EngineBatch, out *output) {
	*out = output{drops: b.Drops, events: out.events[:0], blocks: out.blocks[:0], externals: out.externals[:0]}
	for i := range b.Events {
		e.apply(&b.Events[i], out)
	}
}

func (e *Engine) apply(ev *EngineEvent, out *output) {
	out.rank = e.opt.Rank
	if ev.HasRank {
		out.rank = ev.Rank
	}
	r := e.ranks[out.rank]
	if r == nil {
		if len(e.ranks) >= maxEngineRanks {
			out.drop(DropFull, max(1, len(ev.Hashes)))
			return
		}
		r = &engineRank{}
		e.ranks[out.rank] = r
	}
	if ev.HasID && !ev.SameID {
		e.follow(r, ev, out)
	}
	if ev.WindowSize < r.Window && ev.WindowSize > 0 {
		out.drop(DropGroup, max(1, len(ev.Hashes)))
		return
	}
	switch ev.Kind {
	case EngineStored:
		e.store(r, ev, out)
	case EngineRemoved:
		e.remove(r, ev, out)
	case EngineMoved:
		e.move(r, ev, out)
	case EngineCleared:
		out.add(e.clear(out.rank).Event)
	case EngineStarted: // has only an id and a window
	}
}

// follow checks the ids and windows of TensorRT-LLM's events. They cannot be requested again, so
// known blocks are forgotten after a loss or a restart.
func (e *Engine) follow(r *engineRank, ev *EngineEvent, out *output) {
	lost := r.HasLastID && ev.ID != r.LastID+1
	r.LastID, r.HasLastID = ev.ID, true
	if lost {
		if ev.ID > 0 { // otherwise the engine restarted, and holds nothing
			e.gaps++
		}
		out.drop(DropLost, 1)
		r.Window = 0
	}
	if ev.WindowSize > r.Window {
		lost = lost || len(r.Places) > 0 // the known blocks belong to a smaller window
		r.Window = ev.WindowSize
	}
	if lost {
		out.add(e.clear(out.rank).Event)
	}
}

// prefixes reports whether the blocks of a stored event are prefixes, and remembers it, because
// removals do not state it.
func (r *engineRank) prefixes(ev *EngineEvent, out *output) bool {
	kind := groupOther
	switch ev.Spec {
	case "full_attention", "mla_attention", "sink_full_attention":
		kind = groupPrefix
	case "":
		if known := r.Groups[ev.Group]; ev.Tier != indexer.Device && known != groupUnknown {
			kind = known // vLLM's offloading tiers do not name the kind again
		} else if ev.Group == 0 {
			kind = groupPrefix
		}
	}
	if r.Groups[ev.Group] = kind; kind == groupPrefix && r.Layers.ForgetSide(ev.Group) {
		out.drop(DropGroupKind, 1)
	}
	return kind == groupPrefix
}

func (e *Engine) store(r *engineRank, ev *EngineEvent, out *output) {
	n, at := len(ev.Hashes), place{ev.Tier, ev.Group}
	switch {
	case !r.prefixes(ev, out) && ev.Spec == "":
		out.drop(DropGroup, max(1, n))
		return
	case r.Groups[ev.Group] != groupPrefix:
		if slices.ContainsFunc(r.Places, func(p *placeBlocks) bool { return p.At.Group == ev.Group }) {
			// It had full attention, and no later event removes those blocks.
			r.Layers.Forget()
			out.drop(DropGroupKind, 1)
			out.add(e.clear(out.rank).Event)
		}
		r.storeSide(e.opt.BlockSize, ev, out)
		return
	case len(ev.Tokens) > 0 && r.Layers.IsPart(ev.BlockSize):
		out.drop(DropGroup, max(1, n))
		return
	case n == 0:
		return
	case len(ev.Tokens) == 0:
		e.offload(r, ev, at, out)
		return
	}
	published := 0
	defer func() {
		for _, h := range ev.Hashes[published:] {
			e.remember(r, at, h)
		}
	}()
	seed, reason := r.seed(ev, at)
	size, own := ev.BlockSize, len(ev.Tokens)
	switch {
	case reason != DropNone:
	case size <= 0 || e.opt.BlockSize <= 0 || size%e.opt.BlockSize != 0 && e.opt.BlockSize%size != 0:
		reason = DropSize
	case own > n*size:
		reason = DropTokens // the event covers more blocks than it names
	}
	if reason != DropNone {
		out.drop(reason, n)
		return
	}
	usable := min(n, own/size)
	out.drop(DropTokens, n-usable)
	if ev.Usable < usable {
		out.drop(DropKeys, usable-ev.Usable)
		usable = ev.Usable
	}
	parent, hasParent := ev.Parent, ev.HasParent
	e.touched = r.blocks(at).touch(ev.Hashes)
	for i, hash := range ev.Hashes[:usable] {
		k := cachedBlock{blockState: blockState{Seed: seed, Parent: parent, HasParent: hasParent}}
		reason := e.hash(r, at, ev, i, &k)
		if reason == DropNone {
			reason = e.put(r, at, hash, &k)
		}
		if reason == DropConflict {
			out.drop(reason, 1)
		} else if reason != DropNone {
			out.drop(reason, usable-i)
			return
		}
		if k.Published {
			r.register(at, hash, &k, true)
			if ev.Tier == indexer.Device {
				r.Layers.TakeFull(size)
			}
			r.sendShape(e.opt.BlockSize, out)
		}
		published = i + 1
		if parent, hasParent = hash, true; k.Published {
			out.stored(ev.Tier, hash, &k)
		}
	}
}

// seed returns the seed of an event's blocks, or a reason to ignore them.
func (r *engineRank) seed(ev *EngineEvent, at place) (uint64, DropReason) {
	if ev.HasParent {
		parent, ok := r.find(ev.Parent, at)
		hashed := parent.Published || parent.Resized != nil
		switch {
		case ok && !hashed, !ok && !ev.HasSalt:
			return 0, DropParent
		case !ev.HasSalt:
			return parent.Seed, DropNone
		}
	}
	if ev.LoRA == "" && ev.HasLoRAID {
		return 0, DropLoRA
	}
	return indexer.Seed(ev.LoRA, ev.Salt), DropNone
}

// hash computes the local hashes of an event's i-th block, or returns a reason to ignore
// the block and those after it.
func (e *Engine) hash(r *engineRank, at place, ev *EngineEvent, i int, k *cachedBlock) DropReason {
	tokens := ev.Tokens[i*ev.BlockSize:][:ev.BlockSize]
	var objects []uint64
	if i < len(ev.Objects) {
		objects = ev.Objects[i]
	}
	switch {
	case ev.BlockSize != e.opt.BlockSize && len(objects) > 0:
		return DropSize // it is unknown which of the scope's blocks they are in
	case ev.BlockSize < e.opt.BlockSize:
		return e.join(r, at, tokens, ev.BlockSize, k)
	case len(objects) > 0 && e.opt.Placeholder != 0:
		tokens = slices.Clone(tokens)
		indexer.ReplacePlaceholders(tokens, e.opt.Placeholder, objects)
		e.hashes = indexer.AppendLocalHashes(e.hashes[:0], tokens, len(tokens), k.Seed)
	case len(objects) > 0:
		e.hashes = append(e.hashes[:0], indexer.ObjectHash(tokens, objects, k.Seed))
	default:
		e.hashes = indexer.AppendLocalHashes(e.hashes[:0], tokens, e.opt.BlockSize, k.Seed)
	}
	k.Published = true
	if k.Local = e.hashes[len(e.hashes)-1]; len(e.hashes) > 1 {
		k.Resized = &resizedBlock{Locals: slices.Clone(e.hashes)}
	}
	return DropNone
}

// offload stores blocks on a further tier whose content the event does not have.
func (e *Engine) offload(r *engineRank, ev *EngineEvent, at place, out *output) {
	for _, hash := range ev.Hashes {
		k, ok := r.find(hash, at)
		if !ok || !k.Published || k.Resized != nil && k.Resized.Part {
			out.drop(DropBlock, 1)
			e.remember(r, at, hash)
		} else if reason := e.put(r, at, hash, &k); reason != DropNone {
			out.drop(reason, 1)
		} else {
			out.stored(ev.Tier, hash, &k)
		}
	}
}

// move moves blocks to another tier.
func (e *Engine) move(r *engineRank, ev *EngineEvent, out *output) {
	from, to := place{ev.From, ev.Group}, place{ev.Tier, ev.Group}
	for _, hash := range ev.Hashes {
		slot := r.blocks(from).find(hash)
		if slot < 0 {
			out.drop(DropBlock, 1)
			e.gone = e.unpublish(append(e.gone[:0], hash), r, from, hash)
			out.removed(ev.From, e.gone...)
			continue
		}
		k := r.blocks(from).at(slot)
		e.gone = e.take(e.gone[:0], r, from, slot, true)
		out.removed(ev.From, e.gone...)
		switch {
		case ev.GoneTo:
			out.drop(DropMedium, 1)
			continue
		case !k.Published || k.Resized != nil && k.Resized.Part:
			k = cachedBlock{}
		}
		if reason := e.put(r, to, hash, &k); reason != DropNone {
			out.drop(reason, 1)
		} else if k.Published {
			out.stored(ev.Tier, hash, &k)
		}
	}
}

func (e *Engine) remove(r *engineRank, ev *EngineEvent, out *output) {
	switch kind := r.Groups[ev.Group]; {
	case r.Layers.IsSide(ev.Group):
		removeSide(ev, e.opt.SetLike, out)
		return
	case kind == groupOther || kind == groupUnknown && ev.Group > 0:
		out.drop(DropGroup, max(1, len(ev.Hashes)))
		return
	}
	for _, hash := range ev.Hashes {
		found := false
		for t := range indexer.Tier(tiers) {
			if !ev.AnyTier && t != ev.Tier {
				continue
			}
			at := place{t, ev.Group}
			if slot := r.blocks(at).find(hash); slot >= 0 {
				found = true
				e.gone = e.take(e.gone[:0], r, at, slot, ev.HasID || e.opt.SetLike)
				out.removed(t, e.gone...)
			}
		}
		if !found { // the index may still have the block
			e.gone = e.unpublish(append(e.gone[:0], hash), r, place{ev.Tier, ev.Group}, hash)
			out.removed(ev.Tier, e.gone...)
		}
	}
}
