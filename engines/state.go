// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"cmp"
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

// The file "sources" has the state of engines whose sockets or HTTP server kvroute reads. It
// has the frame of [records]; its data is a gob stream of savedRank. The count at its end is
// the number of ranks.
const (
	sourceMagic   = "KVRSRCS3"
	sourceVersion = 1

	maxSavedRanks = 1 << 18
	savedFor      = time.Minute // workers must register again within this time
	tiers         = int(indexer.External) + 1
)

// savedRank is the state of a rank after the last applied batch. It does not contain the index:
// its blocks are the published blocks of the engine's state.
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

// savedEngineRank is an [Engine]'s state of a rank.
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

// Save writes the state of the engines and the last batch of each, so that [Sources.Load] of a
// later process can continue from it. The error is w's.
func (s *Sources) Save(w io.Writer) error {
	s.mu.Lock()
	ranks := slices.Collect(maps.Keys(s.ranks))
	if time.Since(s.loaded) >= savedFor {
		s.saved = nil
	}
	saved := slices.Collect(maps.Values(s.saved)) // of workers that may still come
	s.mu.Unlock()
	out := records.NewWriter(w, records.Header{Magic: sourceMagic, Version: sourceVersion})
	enc, n := gob.NewEncoder(out), uint64(0)
	for _, state := range saved {
		if err := enc.Encode(state); err != nil {
			return fmt.Errorf("engines: save a rank: %w", err)
		}
		n++
	}
	for _, r := range ranks {
		state, ok := r.save()
		if !ok {
			continue
		}
		if err := enc.Encode(state); err != nil {
			return fmt.Errorf("engines: save a rank: %w", err)
		}
		n++
	}
	return out.Close(n)
}

// ended removes the ranks of a worker that is not followed any more. If the worker is still
// wanted, kvroute ends, and the last save has its state as well.
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
			if s.saved == nil {
				s.saved = make(map[WorkerRank]*savedRank)
			}
			s.saved[WorkerRank{w.ID, r.at.rank}], s.loaded = state, time.Now()
		}
	}
}

// Load reads the state that an earlier process saved. It must be called before Run. The state of a
// rank is used when its worker is followed within a minute, with the same settings. The error
// wraps [events.ErrSnapshot], unless it is in's; then nothing is loaded.
func (s *Sources) Load(in io.Reader) (ranks int, err error) {
	saved, err := readSources(in)
	if err != nil {
		return 0, fmt.Errorf("engines: load: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saved, s.loaded = saved, time.Now()
	return len(saved), nil
}

func readSources(in io.Reader) (map[WorkerRank]*savedRank, error) {
	file, _, err := records.NewReader(in, sourceMagic, sourceVersion)
	if err != nil {
		return nil, err
	}
	saved := make(map[WorkerRank]*savedRank)
	for dec := gob.NewDecoder(file); ; {
		r := new(savedRank)
		err := dec.Decode(r)
		switch n := uint64(len(saved)); {
		case errors.Is(err, io.EOF) && n == file.Count():
			return saved, nil
		case err == nil && n < maxSavedRanks:
			saved[WorkerRank{r.Worker, r.Rank}] = r
		case file.Err() != nil:
			return nil, file.Err()
		default:
			return nil, fmt.Errorf("%w: rank %d of %d cannot be read: %w", events.ErrSnapshot, n+1, file.Count(), cmp.Or(err, errTooManyRanks))
		}
	}
}

var errTooManyRanks = fmt.Errorf("more than %d ranks", maxSavedRanks)

// save returns the rank's state between two batches. ok is false if a later process could
// not find out whether the engine is still the same.
func (r *rankSource) save() (state *savedRank, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.stream.heard || !r.at.replays && r.at.url == "" {
		return nil, false
	}
	st := r.stream
	return &savedRank{
		Worker: r.worker.ID, Rank: r.at.rank, Started: r.worker.Started, Options: r.engine.opt,
		Heard: st.heard, Last: st.last, Digest: st.digest, Partial: st.partial, Suspect: st.suspect,
		Ranks: r.engine.save(),
	}, true
}

// restore begins the rank with the saved state, if the settings are the same, and gives its
// blocks to the index.
func (r *rankSource) restore() {
	key := WorkerRank{r.worker.ID, r.at.rank}
	r.s.mu.Lock()
	saved := r.s.saved[key]
	delete(r.s.saved, key)
	late := time.Since(r.s.loaded) >= savedFor
	r.s.mu.Unlock()
	if saved == nil || late {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if saved.Options != r.engine.opt || saved.Started != r.worker.Started {
		r.log.Info("the saved state of an engine is not used: the engine or its settings are different")
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
	r.log.Info("the saved state of an engine is used", "blocks", r.engine.Blocks(), "behind_holes", untold, "sequence", saved.Last)
}

// save returns a copy of the state.
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

// restore replaces the state by a saved one, and returns the events that give its blocks to
// the index. A block after a removed one is in no event, because its place is unknown; it
// counts again when it is stored again. untold is the number of such blocks.
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

// tell returns the events that build a rank's blocks, the faster tiers first and parents before
// children, and the number of blocks that no event can build.
func (e *Engine) tell(rank uint32) (told []events.RouterEvent, untold int) {
	r := e.ranks[rank]
	var there [tiers]map[uint64]bool // the blocks that the events make
	for t := range there {
		there[t] = make(map[uint64]bool)
		for _, at := range slices.SortedFunc(maps.Keys(r.places), func(a, b place) int { return a.group - b.group }) {
			if int(at.tier) != t {
				continue
			}
			blocks, seen := r.places[at], make(map[uint64]bool)
			var add func(hash uint64) bool // reports whether the events build the block here
			add = func(hash uint64) bool {
				k := blocks[hash]
				if seen[hash] || !k.published {
					return seen[hash] && there[t][hash]
				}
				seen[hash] = true // ends a circle, which no engine has
				if k.hasParent && !add(k.parent) && !slices.ContainsFunc(there[:t+1], func(known map[uint64]bool) bool { return known[k.parent] }) {
					return false
				}
				there[t][hash] = true
				ev := indexer.Event{Kind: indexer.Stored, Tier: at.tier, Parent: k.parent, HasParent: k.hasParent, Blocks: appendBlocks(nil, hash, &k)}
				if n := len(told); n == 0 || !events.Join(&told[n-1], rank, &ev) {
					told = append(told, events.RouterEvent{DPRank: rank, Event: ev})
				}
				return true
			}
			for _, hash := range slices.Sorted(maps.Keys(blocks)) {
				if k := blocks[hash]; k.published && !add(hash) && !there[t][hash] {
					untold += k.weight()
				}
			}
			for hash, k := range blocks {
				if k.published && !there[t][hash] {
					e.blocks += 1 - k.weight()
					k.more.unregister(hash)
					blocks[hash] = known{count: k.count}
				}
			}
		}
	}
	return told, untold
}
