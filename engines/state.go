// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
)

// The file of what is known of engines that are heard directly is one of [records]: for
// each rank a savedRank as gob, cut into records of at most sourcePiece bytes, the
// first of sourceRank, the rest of sourceMore. The number of its own at the end is that
// of the ranks.
const (
	sourceMagic   = "KVRSRCS2"
	sourceVersion = 1
	sourceRank    = 1
	sourceMore    = 2
	sourcePiece   = 1 << 18
)

// maxSavedRank bounds a rank in the file: a few times what 2 M blocks take.
const maxSavedRank = 1 << 30

const (
	maxSavedRanks = 1 << 18
	savedFor      = time.Minute // that workers have to come back
	tiers         = int(indexer.External) + 1
)

// savedRank is a rank as the last batch that was applied left it. The index is not in
// it: its blocks are those that the engine's state says were told.
type savedRank struct {
	Worker  uint64
	Rank    uint32
	Started int64
	Options EngineOptions

	// Of the stream.
	Heard            bool
	Last             uint64
	Digest           uint64
	Partial, Suspect bool

	Ranks map[uint32]*savedEngineRank
}

// savedEngineRank is what an [Engine] remembers of a rank.
type savedEngineRank struct {
	Groups  map[int]groupKind
	Window  int
	LastID  uint64
	HeardID bool
	Blocks  []savedBlock
}

type savedBlock struct {
	Tier  indexer.Tier
	Group int

	Hash, Local, Seed, Parent uint64
	Count                     uint32
	HasParent, Published      bool

	// Of a block whose size is not the index's.
	More, Part bool
	Tokens     []uint32
	Parts      []uint64 // hashes of those before it
	Locals     []uint64
}

// Save writes what is known of the engines and up to where, so that [Sources.Load] of a
// later process can go on with it. The error is w's.
func (s *Sources) Save(w io.Writer) error {
	s.mu.Lock()
	ranks := slices.Collect(maps.Keys(s.ranks))
	blobs := make([][]byte, 0, len(ranks)+len(s.saved))
	if time.Since(s.loaded) >= savedFor {
		s.saved = nil
	}
	for _, b := range s.saved { // their workers may come still
		blobs = append(blobs, b)
	}
	s.mu.Unlock()
	out := records.NewWriter(w, records.Header{Magic: sourceMagic, Version: sourceVersion})
	n := uint64(0)
	put := func(blob []byte) error {
		n++
		kind := byte(sourceRank)
		for piece := range slices.Chunk(blob, sourcePiece) {
			if err := out.Record(kind, func(b []byte) []byte { return append(b, piece...) }); err != nil {
				return err
			}
			kind = sourceMore
		}
		return nil
	}
	for _, b := range blobs {
		if err := put(b); err != nil {
			return err
		}
	}
	for _, r := range ranks {
		state, ok := r.save()
		if !ok {
			continue
		}
		blob, err := state.encode()
		if err == nil {
			err = put(blob)
		}
		if err != nil {
			return err
		}
	}
	return out.Close(n)
}

// ended forgets the ranks of a worker that is not followed any more. If it still should
// be then we end, and what is known of it is saved yet.
func (s *Sources) ended(w EngineWorker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wanted, ok := s.wanted[w.ID]
	stays := ok && reflect.DeepEqual(wanted, w)
	for r := range s.ranks {
		if r.worker.ID != w.ID {
			continue
		}
		delete(s.ranks, r)
		if state, ok := r.save(); ok && stays {
			if blob, err := state.encode(); err == nil {
				if s.saved == nil {
					s.saved = make(map[WorkerRank][]byte)
				}
				s.saved[WorkerRank{w.ID, r.at.rank}], s.loaded = blob, time.Now()
			}
		}
	}
}

func (s *savedRank) encode() ([]byte, error) {
	var blob bytes.Buffer
	if err := gob.NewEncoder(&blob).Encode(s); err != nil {
		return nil, fmt.Errorf("events: save a rank: %w", err)
	}
	if blob.Len() > maxSavedRank {
		return nil, fmt.Errorf("events: save a rank: it has %d bytes", blob.Len())
	}
	return blob.Bytes(), nil
}

// Load takes what an earlier process saved, before Run. Each rank is used when its
// worker is followed within a minute, if that asks for the same. The error wraps
// [events.ErrSnapshot], unless it is in's; then nothing is taken.
func (s *Sources) Load(in io.Reader) (ranks int, err error) {
	saved, err := readSources(in)
	if err != nil {
		return 0, fmt.Errorf("events: load: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saved, s.loaded = saved, time.Now()
	return len(saved), nil
}

func readSources(in io.Reader) (map[WorkerRank][]byte, error) {
	file, _, err := records.NewReader(in, sourceMagic, sourceVersion)
	if err != nil {
		return nil, err
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{events.ErrSnapshot}, args...)...)
	}
	saved := make(map[WorkerRank][]byte)
	var blob []byte // of the rank whose records are read
	keep := func() error {
		if blob == nil {
			return nil
		}
		var head struct { // of what is in it only this is wanted now
			Worker uint64
			Rank   uint32
		}
		if err := gob.NewDecoder(bytes.NewReader(blob)).Decode(&head); err != nil {
			return bad("rank %d cannot be read: %w", len(saved)+1, err)
		}
		saved[WorkerRank{head.Worker, head.Rank}] = blob
		return nil
	}
	for {
		kind, payload, err := file.Next()
		switch {
		case errors.Is(err, io.EOF):
			if err := keep(); err != nil {
				return nil, err
			}
			if file.Count() != uint64(len(saved)) {
				return nil, bad("it has %d ranks, want %d", len(saved), file.Count())
			}
			return saved, nil
		case err != nil:
			return nil, err
		case kind == sourceRank && len(saved) < maxSavedRanks:
			if err := keep(); err != nil {
				return nil, err
			}
			blob = slices.Clone(payload)
		case kind == sourceMore && blob != nil && len(blob)+len(payload) <= maxSavedRank:
			blob = append(blob, payload...)
		default:
			return nil, bad("record %d of type %d, behind %d ranks and %d bytes of one", file.Records(), kind, len(saved), len(blob))
		}
	}
}

// save returns the rank's state between two batches, if it can be of use: a process
// that comes later must be able to find out whether the engine is still the same.
func (r *rankSource) save() (*savedRank, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at.plane || !r.stream.heard || !r.at.replays && r.at.url == "" {
		return nil, false
	}
	st := r.stream
	return &savedRank{
		Worker: r.worker.ID, Rank: r.at.rank, Started: r.worker.Started, Options: r.engine.opt,
		Heard: st.heard, Last: st.last, Digest: st.digest, Partial: st.partial, Suspect: st.suspect,
		Ranks: r.engine.save(),
	}, true
}

// restore begins the rank with what was saved, if that is of the same kind, and tells
// the index.
func (r *rankSource) restore() {
	key := WorkerRank{r.worker.ID, r.at.rank}
	r.s.mu.Lock()
	blob := r.s.saved[key]
	delete(r.s.saved, key)
	late := time.Since(r.s.loaded) >= savedFor
	r.s.mu.Unlock()
	if blob == nil || late {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var saved savedRank
	if err := gob.NewDecoder(bytes.NewReader(blob)).Decode(&saved); err != nil {
		r.log.Warn("what was known of an engine cannot be read", "err", err)
		return
	}
	if saved.Options != r.engine.opt || saved.Started != r.worker.Started {
		r.log.Info("what was known of an engine is not used: it is another one, or blocks are counted otherwise")
		return
	}
	told, untold := r.engine.restore(saved.Ranks)
	for _, ev := range told {
		r.spoken[ev.DPRank] = struct{}{}
		r.fits = true
		r.deliver(ev)
	}
	st := r.stream
	st.heard, st.last, st.digest = saved.Heard, saved.Last, saved.Digest
	st.partial, st.suspect, st.review = saved.Partial, saved.Suspect || untold > 0, untold > 0
	r.count(sourceRestored, 1)
	r.log.Info("what was known of an engine is back", "blocks", r.engine.Blocks(), "behind_holes", untold, "sequence", saved.Last)
}

// save returns a copy of what is remembered.
func (e *Engine) save() map[uint32]*savedEngineRank {
	all := make(map[uint32]*savedEngineRank, len(e.ranks))
	for rank, r := range e.ranks {
		out := &savedEngineRank{Groups: make(map[int]groupKind), Window: r.window, LastID: r.lastID, HeardID: r.heardID}
		for g, kind := range r.groups {
			if kind != groupUnheard {
				out.Groups[g] = kind
			}
		}
		for at, blocks := range r.places {
			var names map[*more]uint64 // of parts
			for hash, k := range blocks {
				b := savedBlock{
					Tier: at.tier, Group: at.group, Hash: hash, Local: k.local, Seed: k.seed, Parent: k.parent, Count: k.count,
					HasParent: k.hasParent, Published: k.published,
				}
				if k.more != nil {
					if names == nil {
						names = partNames(blocks)
					}
					b.More, b.Part, b.Tokens, b.Locals = true, k.more.part, slices.Clone(k.more.tokens), slices.Clone(k.more.locals)
					for _, p := range k.more.parts {
						b.Parts = append(b.Parts, names[p])
					}
				}
				out.Blocks = append(out.Blocks, b)
			}
		}
		all[rank] = out
	}
	return all
}

func partNames(blocks map[uint64]known) map[*more]uint64 {
	names := make(map[*more]uint64)
	for hash, k := range blocks {
		if k.more != nil {
			names[k.more] = hash
		}
	}
	return names
}

// restore takes what was saved and returns what the index is to be told. A block behind
// one that is gone is not told of, and remembered as such: nobody knows any more at
// which place it is. If it is stored again it counts again. untold is how many those are.
func (e *Engine) restore(saved map[uint32]*savedEngineRank) (told []events.RouterEvent, untold int) {
	for rank, in := range saved {
		if len(e.ranks) >= maxEngineRanks {
			break
		}
		r := &engineRank{places: make(map[place]map[uint64]known), window: in.Window, lastID: in.LastID, heardID: in.HeardID}
		e.ranks[rank] = r
		for g, kind := range in.Groups {
			if g >= 0 && g < maxGroup {
				r.groups[g] = kind
			}
		}
		for i := range in.Blocks {
			b := &in.Blocks[i]
			k := known{local: b.Local, seed: b.Seed, parent: b.Parent, hasParent: b.HasParent, published: b.Published}
			if b.More {
				k.more = &more{part: b.Part, tokens: b.Tokens, locals: b.Locals}
			}
			at := place{b.Tier, b.Group}
			if int(b.Tier) >= tiers || e.put(r, at, b.Hash, &k) != DropNone {
				continue
			}
			k.count = b.Count
			r.places[at][b.Hash] = k
		}
		for i := range in.Blocks {
			b := &in.Blocks[i]
			blocks := r.places[place{b.Tier, b.Group}]
			k, ok := blocks[b.Hash]
			if !ok || len(b.Parts) == 0 {
				continue
			}
			for _, hash := range b.Parts {
				if p, ok := blocks[hash]; ok && p.more != nil {
					k.more.parts = append(k.more.parts, p.more)
				}
			}
			if k.published {
				k.more.register(b.Hash)
			}
		}
		evs, n := e.tell(rank)
		told, untold = append(told, evs...), untold+n
	}
	return told, untold
}

// tell returns the events that make what a rank has, the faster tiers first and parents
// before children, and how many blocks no event can make.
func (e *Engine) tell(rank uint32) (told []events.RouterEvent, untold int) {
	r := e.ranks[rank]
	var there [tiers]map[uint64]bool // what the index knows then
	for t := range there {
		tier := indexer.Tier(t)
		there[t] = make(map[uint64]bool)
		for _, at := range slices.SortedFunc(maps.Keys(r.places), func(a, b place) int { return a.group - b.group }) {
			if at.tier != tier {
				continue
			}
			blocks := r.places[at]
			children := make(map[uint64][]uint64)
			var ready []uint64
			for hash, k := range blocks {
				switch {
				case !k.published:
				case !k.hasParent:
					ready = append(ready, hash)
				case blocks[k.parent].published:
					children[k.parent] = append(children[k.parent], hash)
				case slices.ContainsFunc(there[:t+1], func(known map[uint64]bool) bool { return known[k.parent] }):
					ready = append(ready, hash)
				}
			}
			slices.Sort(ready)
			for len(ready) > 0 {
				hash := ready[len(ready)-1]
				ready = ready[:len(ready)-1]
				k := blocks[hash]
				ev := indexer.Event{Kind: indexer.Stored, Tier: tier, Parent: k.parent, HasParent: k.hasParent}
				for {
					k := blocks[hash]
					ev.Blocks = appendBlocks(ev.Blocks, hash, &k)
					there[t][hash] = true
					next := children[hash]
					delete(children, hash) // a circle would not be one of an engine
					if len(next) == 0 {
						break
					}
					slices.Sort(next)
					hash = next[0]
					ready = append(ready, next[1:]...)
				}
				told = append(told, events.RouterEvent{DPRank: rank, Event: ev})
			}
			for hash, k := range blocks {
				if k.published && !there[t][hash] {
					untold += k.weight()
					e.blocks += 1 - k.weight()
					k.more.unregister(hash)
					blocks[hash] = known{count: k.count}
				}
			}
		}
	}
	return told, untold
}
