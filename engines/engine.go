// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"maps"
	"math"
	"slices"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// EngineOptions is what an engine's events do not say.
type EngineOptions struct {
	// BlockSize is the scope's. An engine whose blocks divide it, or are a
	// multiple of it, is understood; others are not.
	BlockSize int
	// Rank is that of events which do not name theirs.
	Rank uint32
	// Eagle says that prompts are hashed in windows, see [indexer.AppendWindowHashes].
	Eagle bool
	// Placeholder is the model's token for an image, 0 if it is not known.
	Placeholder uint32
	// LoRA names the adapters that events give as numbers.
	LoRA map[int64]string
	// SetLike says that a removal removes, however often the block was stored. It
	// is right for SGLang and for full reporting. vLLM otherwise announces each
	// copy of a block, and a block stays until the last copy is removed.
	SetLike bool
	// MaxBlocks bounds what is kept. Default 2,097,152.
	MaxBlocks int
}

const (
	defaultMaxBlocks = 1 << 21
	// maxEngineRanks is far above the ranks of an engine.
	maxEngineRanks = 1024
)

// Engine follows the caches of one engine's ranks and says what its events mean
// for the index. It remembers the blocks, because engines name the salt only where
// a sequence begins, move blocks between tiers without saying what is in them, and
// store several copies of one block. It is not safe for concurrent use.
//
// # Invariants
//
//   - The index was told of exactly the blocks that are published, and is told of their
//     removal before they are forgotten.
//   - A block has as many copies as were stored and not removed; with SetLike one.
//   - blocks is the sum of the weights of what is kept, at most MaxBlocks.
//   - A part of a block of the index's size names each published block that ends with
//     others behind it, and that one names its parts.
type Engine struct {
	opt    EngineOptions
	ranks  map[uint32]*engineRank
	blocks int // kept, of all ranks
	gaps   int // so often events of TensorRT-LLM were missing
	hashes []uint64
	window []uint32
}

type engineRank struct {
	places map[place]map[uint64]known // neither is ever empty
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

// known is what is remembered of a block.
type known struct {
	local, seed uint64
	parent      uint64 // as the index knows it; of a part alone as the engine does
	count       uint32
	hasParent   bool
	published   bool // the index was told of it
	more        *more
}

// more is what is remembered of a block whose size is not the scope's.
type more struct {
	part   bool // smaller
	tokens []uint32
	parts  []*more             // of the last part: those before it
	groups map[uint64]struct{} // of others: the last parts behind it
	locals []uint64            // of a larger one: its parts
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

// weight is how many blocks a block counts as in MaxBlocks.
func (k *known) weight() int {
	if k.more == nil {
		return 1
	}
	return max(1, len(k.more.locals))
}

// NewEngine returns one whose caches are empty.
func NewEngine(opt EngineOptions) *Engine {
	if opt.MaxBlocks <= 0 {
		opt.MaxBlocks = defaultMaxBlocks
	}
	return &Engine{opt: opt, ranks: make(map[uint32]*engineRank)}
}

// Blocks returns how many blocks are remembered.
func (e *Engine) Blocks() int { return e.blocks }

// Copies returns the largest number of copies that a block has. It grows without
// end if removals are not announced one by one; then SetLike is right.
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

// Clear forgets a rank, as after a restart or a loss, and returns the event that
// says so.
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

// Apply takes a batch, in order, and returns what it means: events without worker
// and id, which are their publisher's business, and what was left out, here and by
// the decoder.
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

type output struct {
	events []events.RouterEvent
	drops  Drops
	rank   uint32
}

func (o *output) add(ev indexer.Event) {
	o.events = append(o.events, events.RouterEvent{DPRank: o.rank, Event: ev})
}

func (o *output) removed(tier indexer.Tier, externals ...uint64) {
	if len(externals) > 0 {
		o.add(indexer.Event{Kind: indexer.Removed, Tier: tier, Externals: externals})
	}
}

func (o *output) drop(reason DropReason, blocks int) { o.drops[reason] += blocks }

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
	case EngineStarted: // its id and window are what it says
	}
}

// follow watches the ids and windows of TensorRT-LLM. Nothing there can be read
// again, so what was known before a loss or a restart is forgotten.
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
		lost = lost || len(r.places) > 0 // they were of a smaller window
		r.window = ev.WindowSize
	}
	if lost {
		out.events = append(out.events, e.Clear(out.rank))
	}
}

// find looks for a block near a place: parents may be on another tier.
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

// put remembers a block, or one more copy of it. What the index was told of a
// block stands until the block is gone; k then becomes what it was told.
func (e *Engine) put(r *engineRank, at place, hash uint64, k *known) DropReason {
	old, again := r.places[at][hash]
	reason, grown := DropReasons, k.weight()
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

// remember keeps a block that the index is not told of, so that it is not told of
// its removal either.
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

// prefixes says whether the blocks of a stored event are prefixes, and remembers
// it: removals do not say.
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
	n := len(ev.Hashes)
	at := place{ev.Tier, ev.Group}
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
	told := 0
	defer func() {
		for _, h := range ev.Hashes[told:] {
			e.remember(r, at, h)
		}
	}()

	seed, reason := e.seed(r, ev, at)
	if reason != DropReasons {
		out.drop(reason, n)
		return
	}
	size, full := ev.BlockSize, e.opt.BlockSize
	if size <= 0 || full <= 0 || size%full != 0 && full%size != 0 {
		out.drop(DropSize, n)
		return
	}
	own := len(ev.Tokens) // tokens of the blocks themselves
	if ev.Window || e.opt.Eagle && own == n*size+1 {
		own--
	}
	if own > n*size {
		// Some cover more blocks than they name, and nobody says which.
		out.drop(DropTokens, n)
		return
	}
	usable := min(n, own/size)
	out.drop(DropTokens, n-usable)
	if ev.Usable < usable {
		out.drop(DropKeys, usable-ev.Usable)
		usable = ev.Usable
	}

	parent, hasParent := ev.Parent, ev.HasParent
	event := indexer.Event{Kind: indexer.Stored, Tier: ev.Tier}
	for i := range usable {
		hash, before := ev.Hashes[i], len(event.Blocks)
		k := known{seed: seed, parent: parent, hasParent: hasParent}
		tokens := e.blockTokens(ev, i, own < len(ev.Tokens))
		var objects []uint64
		if i < len(ev.Objects) {
			objects = ev.Objects[i]
		}
		reason := DropReasons
		switch {
		case size != full && len(objects) > 0:
			reason = DropSize // which of the scope's blocks they are in is not known
		case size < full:
			reason = e.join(r, at, tokens, size, &k)
		default:
			e.split(tokens, objects, size, &k)
		}
		if reason == DropReasons {
			reason = e.put(r, at, hash, &k)
		}
		if reason == DropConflict {
			out.drop(reason, 1)
		} else if reason != DropReasons {
			out.drop(reason, usable-i)
			break
		}
		if size < full && k.published {
			k.more.register(hash)
		}
		told = i + 1
		if parent, hasParent = hash, true; !k.published {
			continue
		}
		if before == 0 {
			event.Parent, event.HasParent = k.parent, k.hasParent
		}
		event.Blocks = appendBlocks(event.Blocks, hash, &k)
	}
	if len(event.Blocks) > 0 {
		out.add(event)
	}
}

// seed returns the seed of an event's blocks, or a reason to leave them out.
func (e *Engine) seed(r *engineRank, ev *EngineEvent, at place) (uint64, DropReason) {
	if ev.HasParent {
		parent, ok := r.find(ev.Parent, at)
		hashed := parent.published || parent.more != nil
		switch {
		case ok && !hashed, !ok && !ev.HasSalt:
			return 0, DropParent
		case !ev.HasSalt:
			return parent.seed, DropReasons
		}
	}
	lora := ev.LoRA
	if lora == "" && ev.HasLoRAID {
		if lora = e.opt.LoRA[ev.LoRAID]; lora == "" {
			return 0, DropLoRA
		}
	}
	return indexer.Seed(lora, ev.Salt), DropReasons
}

// blockTokens returns the tokens of a block and, where windows are hashed and it
// is known, the one behind it. The caller may write to them, until the next call.
func (e *Engine) blockTokens(ev *EngineEvent, i int, behind bool) []uint32 {
	from, to := i*ev.BlockSize, (i+1)*ev.BlockSize
	if behind {
		to++
	}
	e.window = append(e.window[:0], ev.Tokens[from:to]...)
	if !behind && e.opt.Eagle && i < len(ev.Lookahead) && ev.Lookahead[i].Known {
		e.window = append(e.window, ev.Lookahead[i].Token)
	}
	return e.window
}

// split hashes a block of the scope's size, or of a multiple of it.
func (e *Engine) split(tokens []uint32, objects []uint64, size int, k *known) {
	k.published = true
	switch {
	case len(objects) > 0 && e.opt.Placeholder != 0:
		indexer.ReplacePlaceholders(tokens, e.opt.Placeholder, objects)
		e.hashes = indexer.AppendLocalHashes(e.hashes[:0], tokens, len(tokens), k.seed)
	case len(objects) > 0:
		e.hashes = append(e.hashes[:0], indexer.ObjectHash(tokens, objects, k.seed))
	case len(tokens) > size:
		e.hashes = indexer.AppendWindowHashes(e.hashes[:0], tokens, e.opt.BlockSize, k.seed)
	default:
		e.hashes = indexer.AppendLocalHashes(e.hashes[:0], tokens, e.opt.BlockSize, k.seed)
	}
	if k.local = e.hashes[len(e.hashes)-1]; len(e.hashes) > 1 {
		k.more = &more{locals: slices.Clone(e.hashes)}
	}
}

// join hashes the scope's block that ends with a smaller one, if one does: from
// the last end of one, or the beginning, the parts must fill it exactly. So the
// index is told when the last part comes. If a middle part goes and comes again,
// it is told when the last one comes again.
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
		return DropReasons
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
	return DropReasons
}

// appendBlocks appends what the index calls a block of the engine. The last part
// of one that is split keeps the engine's id.
func appendBlocks(blocks []indexer.Block, hash uint64, k *known) []indexer.Block {
	if k.more != nil {
		for j, local := range k.more.locals[:max(0, len(k.more.locals)-1)] {
			blocks = append(blocks, indexer.Block{External: splitID(hash, j), Local: local})
		}
	}
	return append(blocks, indexer.Block{External: hash, Local: k.local})
}

func appendExternals(externals []uint64, hash uint64, k *known) []uint64 {
	for _, b := range appendBlocks(nil, hash, k) {
		externals = append(externals, b.External)
	}
	return externals
}

// splitID is the id of the j-th part of a split block: XXH3-64 with the base seed
// over both, which is how a block of three tokens is hashed.
func splitID(hash uint64, j int) uint64 {
	var id [1]uint64
	return indexer.AppendLocalHashes(id[:0], []uint32{uint32(hash), uint32(hash >> 32), uint32(j)}, 3, indexer.Seed("", ""))[0]
}

// offload takes blocks that an engine stores on a further tier without saying
// what is in them.
func (e *Engine) offload(r *engineRank, ev *EngineEvent, at place, out *output) {
	event := indexer.Event{Kind: indexer.Stored, Tier: ev.Tier}
	flush := func() {
		if len(event.Blocks) > 0 {
			out.add(event)
		}
		event.Blocks = nil
	}
	for _, hash := range ev.Hashes {
		k, ok := r.find(hash, at)
		if !ok || !k.published || k.more != nil && k.more.part {
			out.drop(DropBlock, 1)
			e.remember(r, at, hash)
			flush()
			continue
		}
		if reason := e.put(r, at, hash, &k); reason != DropReasons {
			out.drop(reason, 1)
			flush()
			continue
		}
		if n := len(event.Blocks); n > 0 && (!k.hasParent || k.parent != event.Blocks[n-1].External) {
			flush()
		}
		if len(event.Blocks) == 0 {
			event.Parent, event.HasParent = k.parent, k.hasParent
		}
		event.Blocks = appendBlocks(event.Blocks, hash, &k)
	}
	flush()
}

// move takes blocks that change their tier.
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
		if reason := e.put(r, to, hash, &k); reason != DropReasons {
			out.drop(reason, 1)
		} else if k.published {
			out.add(indexer.Event{
				Kind: indexer.Stored, Tier: ev.Tier, Parent: k.parent, HasParent: k.hasParent, Blocks: appendBlocks(nil, hash, &k),
			})
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
			gone[ev.Tier] = append(gone[ev.Tier], hash) // the index may know better
		}
	}
	for t, externals := range gone {
		out.removed(indexer.Tier(t), externals...)
	}
}

// take removes a copy of a block, or all of them, and returns what is gone as the
// index calls it.
func (e *Engine) take(r *engineRank, at place, hash uint64, all bool) (externals []uint64) {
	k := r.places[at][hash]
	if k.count > 1 && !all {
		k.count--
		r.places[at][hash] = k
		return nil
	}
	if k.published {
		externals = appendExternals(externals, hash, &k)
	}
	e.delete(r, at, hash)
	if k.more == nil {
		return externals
	}
	k.more.unregister(hash)
	for _, group := range slices.Sorted(maps.Keys(k.more.groups)) {
		// Of a block in parts only its last part is known to the index.
		if g, ok := r.places[at][group]; ok && g.published {
			externals = append(externals, group)
			g.more.unregister(group)
			g.published, g.more = false, nil
			r.places[at][group] = g
		}
	}
	return externals
}
