// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"maps"
	"math"
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

const (
	defaultMaxBlocks = 1 << 21
	// maxEngineRanks is far above the number of ranks of an engine.
	maxEngineRanks = 1024
)

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
//   - A part of a block of the index's size names each published block that ends with
//     another part after it, and that block names its parts.
type Engine struct {
	opt    EngineOptions
	ranks  map[uint32]*engineRank
	blocks int      // remembered, of all ranks
	gaps   int      // how often events of TensorRT-LLM were missing
	hashes []uint64 // reused buffer
}

type engineRank struct {
	places map[place]map[uint64]known // neither the outer nor an inner map is ever empty
	groups [maxGroup]groupKind
	window int // TensorRT-LLM: the largest attention window

	lastID  uint64 // TensorRT-LLM
	heardID bool
}

// place is where an engine keeps blocks: a tier of a group of its cache.
type place struct {
	tier  indexer.Tier
	group int
}

type groupKind uint8

const (
	groupUnheard groupKind = iota
	groupPrefix            // its blocks are prefixes
	groupOther
)

// known is the remembered state of a block.
type known struct {
	local, seed uint64
	parent      uint64 // as in the index; for a part that is not published, the engine's id
	count       uint32
	hasParent   bool
	published   bool // the index has the block
	more        *more
}

// more is the additional state of a block whose size is not the index's.
type more struct {
	part   bool // smaller than the index's block
	tokens []uint32
	parts  []*more             // of a last part: the parts before it
	groups map[uint64]struct{} // of another part: the last parts after it
	locals []uint64            // of a larger block: the hashes of its parts
}

func (m *more) register(hash uint64) {
	if m == nil {
		return
	}
	for _, p := range m.parts {
		if p.groups == nil {
			p.groups = make(map[uint64]struct{})
		}
		p.groups[hash] = struct{}{}
	}
}

func (m *more) unregister(hash uint64) {
	if m == nil {
		return
	}
	for _, p := range m.parts {
		delete(p.groups, hash)
	}
}

// weight returns the number of blocks that a block counts as in MaxBlocks.
func (k *known) weight() int {
	if k.more == nil {
		return 1
	}
	return max(1, len(k.more.locals))
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
		for _, blocks := range r.places {
			for _, k := range blocks {
				most = max(most, int(k.count))
			}
		}
	}
	return most
}

// Clear forgets a rank, as after a restart or a loss, and returns the event that clears it.
func (e *Engine) Clear(rank uint32) events.RouterEvent {
	if r := e.ranks[rank]; r != nil {
		e.forget(r)
	}
	return events.RouterEvent{DPRank: rank, Event: indexer.Event{Kind: indexer.Cleared}}
}

func (e *Engine) forget(r *engineRank) {
	for _, blocks := range r.places {
		for _, k := range blocks {
			e.blocks -= k.weight()
		}
	}
	clear(r.places)
}

// Apply applies a batch in order. It returns the events for the index, without worker and id,
// which the publisher adds, and the number of blocks that the decoder or Apply ignored.
func (e *Engine) Apply(b *EngineBatch) ([]events.RouterEvent, Drops) {
	out := output{drops: b.Drops}
	if len(b.Events) > 0 {
		out.events = make([]events.RouterEvent, 0, len(b.Events))
	}
	for i := range b.Events {
		e.apply(&b.Events[i], &out)
	}
	return out.events, out.drops
}

// output collects the events that a batch produces.
type output struct {
	events []events.RouterEvent
	drops  Drops
	rank   uint32
	open   bool // the last event belongs to the engine's event that is being applied
}

func (o *output) add(ev indexer.Event) {
	o.events = append(o.events, events.RouterEvent{DPRank: o.rank, Event: ev})
}

// stored adds a block to the last event if it continues that event's sequence, otherwise
// to a new one.
func (o *output) stored(tier indexer.Tier, hash uint64, k *known) {
	if o.open && k.hasParent {
		last := &o.events[len(o.events)-1].Event
		if n := len(last.Blocks); n > 0 && last.Tier == tier && last.Blocks[n-1].External == k.parent {
			last.Blocks = appendBlocks(last.Blocks, hash, k)
			return
		}
	}
	o.add(indexer.Event{Kind: indexer.Stored, Tier: tier, Parent: k.parent, HasParent: k.hasParent, Blocks: appendBlocks(nil, hash, k)})
	o.open = true
}

func (o *output) removed(tier indexer.Tier, externals ...uint64) {
	if len(externals) > 0 {
		o.add(indexer.Event{Kind: indexer.Removed, Tier: tier, Externals: externals})
	}
}

func (o *output) drop(reason DropReason, blocks int) { o.drops[reason] += blocks }

func (e *Engine) apply(ev *EngineEvent, out *output) {
	out.rank, out.open = e.opt.Rank, false
	if ev.HasRank {
		out.rank = ev.Rank
	}
	r := e.ranks[out.rank]
	if r == nil {
		if len(e.ranks) >= maxEngineRanks {
			out.drop(DropFull, max(1, len(ev.Hashes)))
			return
		}
		r = &engineRank{places: make(map[place]map[uint64]known)}
		e.ranks[out.rank] = r
	}
	if ev.HasID && !ev.SameID {
		e.follow(r, ev, out)
	}
	if ev.WindowSize < r.window && ev.WindowSize > 0 {
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
		out.events = append(out.events, e.Clear(out.rank))
	case EngineStarted: // has only an id and a window
	}
}

// follow checks the ids and windows of TensorRT-LLM's events. They cannot be requested again, so
// known blocks are forgotten after a loss or a restart.
func (e *Engine) follow(r *engineRank, ev *EngineEvent, out *output) {
	lost := r.heardID && ev.ID != r.lastID+1
	r.lastID, r.heardID = ev.ID, true
	if lost {
		if ev.ID > 0 { // otherwise the engine restarted, and holds nothing
			e.gaps++
		}
		out.drop(DropLost, 1)
		r.window = 0
	}
	if ev.WindowSize > r.window {
		lost = lost || len(r.places) > 0 // the known blocks belong to a smaller window
		r.window = ev.WindowSize
	}
	if lost {
		out.events = append(out.events, e.Clear(out.rank))
	}
}

// find looks for a block at a place and on other tiers, because a parent may be on another tier.
func (r *engineRank) find(hash uint64, at place) (known, bool) {
	if k, ok := r.places[at][hash]; ok {
		return k, true
	}
	if k, ok := r.places[place{indexer.Device, at.group}][hash]; ok {
		return k, true
	}
	for _, blocks := range r.places {
		if k, ok := blocks[hash]; ok {
			return k, true
		}
	}
	return known{}, false
}

// put remembers a block, or one more copy of it. The index keeps the first content of a block
// until the block is removed; k is set to that content.
func (e *Engine) put(r *engineRank, at place, hash uint64, k *known) DropReason {
	old, again := r.places[at][hash]
	reason, grown := DropNone, k.weight()
	k.count = 1
	if again {
		count := old.count
		if count < math.MaxUint32 {
			count++
		}
		switch {
		case old.published:
			if k.published && k.local != old.local {
				reason = DropConflict
			}
			*k = old
		case k.more != nil && old.more != nil && !k.published:
			k.more = old.more
		}
		k.count = count
		grown = k.weight() - old.weight()
	}
	if grown > 0 && e.blocks+grown > e.opt.MaxBlocks {
		return DropFull
	}
	if r.places[at] == nil {
		r.places[at] = make(map[uint64]known)
	}
	r.places[at][hash] = *k
	e.blocks += grown
	return reason
}

// remember keeps a block that is not published, so that its removal is not published either.
func (e *Engine) remember(r *engineRank, at place, hash uint64) {
	if _, there := r.places[at][hash]; !there {
		e.put(r, at, hash, &known{})
	}
}

func (e *Engine) delete(r *engineRank, at place, hash uint64) {
	k := r.places[at][hash]
	e.blocks -= k.weight()
	delete(r.places[at], hash)
	if len(r.places[at]) == 0 {
		delete(r.places, at)
	}
}

// prefixes reports whether the blocks of a stored event are prefixes, and remembers it, because
// removals do not state it.
func (r *engineRank) prefixes(ev *EngineEvent) bool {
	kind := groupOther
	switch ev.Spec {
	case "full_attention", "mla_attention", "sink_full_attention":
		kind = groupPrefix
	case "":
		if ev.Group == 0 {
			kind = groupPrefix
		}
	}
	r.groups[ev.Group] = kind
	return kind == groupPrefix
}

func (e *Engine) store(r *engineRank, ev *EngineEvent, out *output) {
	n, at := len(ev.Hashes), place{ev.Tier, ev.Group}
	switch {
	case !r.prefixes(ev):
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
	for i, hash := range ev.Hashes[:usable] {
		k := known{seed: seed, parent: parent, hasParent: hasParent}
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
		if k.published && k.more != nil {
			k.more.register(hash)
		}
		published = i + 1
		if parent, hasParent = hash, true; k.published {
			out.stored(ev.Tier, hash, &k)
		}
	}
}

// seed returns the seed of an event's blocks, or a reason to ignore them.
func (r *engineRank) seed(ev *EngineEvent, at place) (uint64, DropReason) {
	if ev.HasParent {
		parent, ok := r.find(ev.Parent, at)
		hashed := parent.published || parent.more != nil
		switch {
		case ok && !hashed, !ok && !ev.HasSalt:
			return 0, DropParent
		case !ev.HasSalt:
			return parent.seed, DropNone
		}
	}
	if ev.LoRA == "" && ev.HasLoRAID {
		return 0, DropLoRA
	}
	return indexer.Seed(ev.LoRA, ev.Salt), DropNone
}

// hash computes the local hashes of an event's i-th block, or returns a reason to ignore
// the block and those after it.
func (e *Engine) hash(r *engineRank, at place, ev *EngineEvent, i int, k *known) DropReason {
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
		e.hashes = indexer.AppendLocalHashes(e.hashes[:0], tokens, len(tokens), k.seed)
	case len(objects) > 0:
		e.hashes = append(e.hashes[:0], indexer.ObjectHash(tokens, objects, k.seed))
	default:
		e.hashes = indexer.AppendLocalHashes(e.hashes[:0], tokens, e.opt.BlockSize, k.seed)
	}
	k.published = true
	if k.local = e.hashes[len(e.hashes)-1]; len(e.hashes) > 1 {
		k.more = &more{locals: slices.Clone(e.hashes)}
	}
	return DropNone
}

// join hashes the scope's block that ends with a smaller one, if there is one: the parts
// after the end of another block, or after the beginning of the sequence, must fill it exactly. It
// is published with its last part. If another part is removed and stored again, it is
// published when the last one is stored again.
func (e *Engine) join(r *engineRank, at place, tokens []uint32, size int, k *known) DropReason {
	k.more = &more{part: true, tokens: slices.Clone(tokens[:size])}
	parts := []*more{k.more}
	start, hasStart := k.parent, k.hasParent
	for hasStart {
		if before, ok := r.find(start, at); ok && before.published {
			break
		}
		before, ok := r.places[at][start]
		if !ok || before.more == nil || len(before.more.tokens) != size || len(parts)*size >= e.opt.BlockSize {
			return DropParent
		}
		parts = append(parts, before.more)
		start, hasStart = before.parent, before.hasParent
	}
	if len(parts)*size < e.opt.BlockSize {
		return DropNone
	}
	var whole []uint32
	for _, p := range slices.Backward(parts) {
		whole = append(whole, p.tokens...)
	}
	k.more.parts = parts[1:]
	whole = append(whole, tokens[size:]...)
	e.hashes = indexer.AppendLocalHashes(e.hashes[:0], whole, len(whole), k.seed)
	k.local, k.published = e.hashes[0], true
	k.parent, k.hasParent = start, hasStart
	return DropNone
}

// appendBlocks appends the index's blocks of a block of the engine. The last part of a
// split block keeps the engine's id.
func appendBlocks(blocks []indexer.Block, hash uint64, k *known) []indexer.Block {
	if k.more != nil {
		for j, local := range k.more.locals[:max(0, len(k.more.locals)-1)] {
			blocks = append(blocks, indexer.Block{External: splitID(hash, j), Local: local})
		}
	}
	return append(blocks, indexer.Block{External: hash, Local: k.local})
}

// splitID is the id of the j-th part of a split block: XXH3-64 with the base seed
// over both, which is how a block of three tokens is hashed.
func splitID(hash uint64, j int) uint64 {
	var id [1]uint64
	return indexer.AppendLocalHashes(id[:0], []uint32{uint32(hash), uint32(hash >> 32), uint32(j)}, 3, indexer.Seed("", ""))[0]
}

// offload stores blocks on a further tier whose content the event does not have.
func (e *Engine) offload(r *engineRank, ev *EngineEvent, at place, out *output) {
	for _, hash := range ev.Hashes {
		k, ok := r.find(hash, at)
		if !ok || !k.published || k.more != nil && k.more.part {
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
		k, ok := r.places[from][hash]
		if !ok {
			out.drop(DropBlock, 1)
			out.removed(ev.From, hash)
			continue
		}
		out.removed(ev.From, e.take(r, from, hash, true)...)
		switch {
		case ev.GoneTo:
			out.drop(DropMedium, 1)
			continue
		case !k.published || k.more != nil && k.more.part:
			k = known{}
		}
		if reason := e.put(r, to, hash, &k); reason != DropNone {
			out.drop(reason, 1)
		} else if k.published {
			out.stored(ev.Tier, hash, &k)
		}
	}
}

func (e *Engine) remove(r *engineRank, ev *EngineEvent, out *output) {
	if kind := r.groups[ev.Group]; kind == groupOther || kind == groupUnheard && ev.Group > 0 {
		out.drop(DropGroup, max(1, len(ev.Hashes)))
		return
	}
	var gone [tiers][]uint64
	for _, hash := range ev.Hashes {
		found := false
		for t := range gone {
			at := place{indexer.Tier(t), ev.Group}
			if !ev.AnyTier && at.tier != ev.Tier {
				continue
			}
			if _, ok := r.places[at][hash]; ok {
				found = true
				gone[t] = append(gone[t], e.take(r, at, hash, ev.HasID || e.opt.SetLike)...)
			}
		}
		if !found {
			gone[ev.Tier] = append(gone[ev.Tier], hash) // the index may still have the block
		}
	}
	for t, externals := range gone {
		out.removed(indexer.Tier(t), externals...)
	}
}

// take removes one copy of a block, or all copies, and returns the index's ids of the blocks that
// are gone.
func (e *Engine) take(r *engineRank, at place, hash uint64, all bool) (externals []uint64) {
	k := r.places[at][hash]
	if k.count > 1 && !all {
		k.count--
		r.places[at][hash] = k
		return nil
	}
	if k.published {
		for _, b := range appendBlocks(nil, hash, &k) {
			externals = append(externals, b.External)
		}
	}
	e.delete(r, at, hash)
	if k.more == nil {
		return externals
	}
	k.more.unregister(hash)
	for _, group := range slices.Sorted(maps.Keys(k.more.groups)) {
		// Of a block in parts, the index has only the last part's id.
		if g, ok := r.places[at][group]; ok && g.published {
			externals = append(externals, group)
			g.more.unregister(group)
			g.published, g.more = false, nil
			r.places[at][group] = g
		}
	}
	return externals
}
