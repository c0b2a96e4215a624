// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"cmp"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"maps"
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
	sourceMagic   = "KVRSRCS5"
	sourceVersion = 1

	maxSavedRanks = 1 << 18
	savedFor      = time.Minute // workers must register again within this time
)

// savedRank is the state of a rank after the last applied batch. It does not contain the index:
// its blocks are the published blocks of the engine's state.
type savedRank struct {
	Worker  uint64
	Rank    uint32
	Started int64
	Options EngineOptions

	// Of the follower.
	Last             uint64
	Digest           uint64
	Partial, Suspect bool

	Ranks map[uint32]*engineRank
}

// Save writes the state of the engines and the last batch of each, so that [Sources.Load] of a
// later process can continue from it. The error is w's.
func (s *Sources) Save(w io.Writer) error {
	s.mu.Lock()
	ranks := slices.Collect(maps.Keys(s.ranks))
	if time.Since(s.loaded) >= savedFor {
		clear(s.saved)
	}
	saved := slices.Collect(maps.Values(s.saved)) // of workers that may still come
	s.mu.Unlock()
	out := records.NewWriter(w, records.Header{Magic: sourceMagic, Version: sourceVersion})
	enc, n := gob.NewEncoder(out), uint64(0)
	for i := range len(saved) + len(ranks) {
		var state *savedRank
		if i < len(saved) {
			state = saved[i]
		} else if state = ranks[i-len(saved)].save(); state == nil {
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
	for _, r := range s.endRanks(w) {
		s.mute(s.same.remove(r))
	}
	s.conf.Faulty(w.ID)
}

func (s *Sources) endRanks(w EngineWorker) (ended []*rankSource) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stays := s.wanted[w.ID] == w
	for r := range s.ranks {
		if r.worker.ID != w.ID {
			continue
		}
		delete(s.ranks, r)
		ended = append(ended, r)
		if state := r.save(); state != nil && stays {
			s.saved[events.RankName{WorkerID: w.ID, DPRank: r.at.rank}], s.loaded = state, time.Now()
		}
	}
	return ended
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

func readSources(in io.Reader) (map[events.RankName]*savedRank, error) {
	file, _, err := records.NewReader(in, sourceMagic, sourceVersion)
	if err != nil {
		return nil, err
	}
	saved := make(map[events.RankName]*savedRank)
	for dec := gob.NewDecoder(file); ; {
		r := new(savedRank)
		err := dec.Decode(r)
		switch n := uint64(len(saved)); {
		case errors.Is(err, io.EOF) && n == file.Count():
			return saved, nil
		case err == nil && n < maxSavedRanks:
			saved[events.RankName{WorkerID: r.Worker, DPRank: r.Rank}] = r
		case file.Err() != nil:
			return nil, file.Err()
		default:
			return nil, fmt.Errorf("%w: rank %d of %d cannot be read: %w", events.ErrSnapshot, n+1, file.Count(),
				cmp.Or(err, errTooManyRanks))
		}
	}
}

var errTooManyRanks = fmt.Errorf("more than %d ranks", maxSavedRanks)

// save returns the rank's state between two batches, or nil if a later process could not find
// out whether the engine is still the same, or lacks something of it: the blocks of side groups are only in
// the index.
func (r *rankSource) save() *savedRank {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, digest, known := r.follower.Last()
	if !known || !r.at.replays && r.at.url == "" || r.engine.hybrid() {
		return nil
	}
	state := r.follower.State()
	return &savedRank{
		Worker: r.worker.ID, Rank: r.at.rank, Started: r.worker.Started, Options: r.engine.opt,
		Last: last, Digest: digest, Partial: state == indexer.StatePartial, Suspect: state == indexer.StateSuspect,
		Ranks: r.engine.save(),
	}
}

// hybrid reports whether the model of any rank has side groups.
func (e *Engine) hybrid() bool {
	for _, r := range e.ranks {
		if len(r.layers.Sides) > 0 {
			return true
		}
	}
	return false
}

// restore begins the rank with the saved state, if the settings are the same, and gives its
// blocks to the index.
func (r *rankSource) restore() {
	key := events.RankName{WorkerID: r.worker.ID, DPRank: r.at.rank}
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
	evs, orphans := r.engine.restore(saved.Ranks)
	for i := range evs {
		r.namedRanks[evs[i].DPRank] = struct{}{}
		r.fits = true
		r.deliver(&evs[i])
	}
	r.follower.Continue(saved.Last, saved.Digest)
	if orphans > 0 {
		r.follower.Recheck()
	}
	switch {
	case saved.Suspect || orphans > 0:
		r.follower.Miss(time.Now(), indexer.StateSuspect)
	case saved.Partial:
		r.follower.Miss(time.Now(), indexer.StatePartial)
	}
	r.count(sourceRestored, 1)
	r.log.Info("the saved state of an engine is used", "blocks", r.engine.Blocks(), "behind_holes", orphans,
		"sequence", saved.Last)
}

// save returns a copy of the state. It may be read while the engine changes.
func (e *Engine) save() map[uint32]*engineRank {
	all := make(map[uint32]*engineRank, len(e.ranks))
	for rank, r := range e.ranks {
		saved := new(*r)
		saved.Places = nil
		for _, p := range r.Places {
			saved.Places = append(saved.Places, &placeBlocks{p.At, p.Blocks.clone()})
		}
		all[rank] = saved
	}
	return all
}

// restore replaces the state by a saved one, and returns the events that give its blocks to
// the index. No event has an orphan, a block after a removed one, because its place is unknown;
// it is published when the engine stores it again.
func (e *Engine) restore(saved map[uint32]*engineRank) (evs []events.RouterEvent, orphans int) {
	for rank, in := range saved {
		if len(e.ranks) >= maxEngineRanks {
			break
		}
		r, full := new(*in), 0
		e.ranks[rank] = r
		r.Places = nil
		for _, p := range in.Places {
			for hash, k := range p.Blocks.all() {
				if count := k.Count; int(p.At.Tier) < tiers && e.put(r, p.At, hash, &k) == DropNone {
					k.Count = count
					r.blocks(p.At).set(hash, &k)
				}
			}
		}
		for _, p := range r.Places {
			for hash, k := range p.Blocks.all() {
				if k.Resized != nil {
					full = max(full, len(k.Resized.Locals)*e.opt.BlockSize)
				}
				if k.Published {
					r.register(p.At, hash, &k, true)
				}
			}
		}
		r.layers = layers{Full: full}
		shape := output{rank: rank}
		r.tell(e.opt.BlockSize, &shape)
		evs = append(evs, shape.events...)
		stored, n := e.storedEvents(rank)
		evs, orphans = append(evs, stored...), orphans+n
	}
	return evs, orphans
}

// storedEvents returns the events that build a rank's blocks, the faster tiers first and parents
// before children, and the number of orphans, which are not published any more.
func (e *Engine) storedEvents(rank uint32) (evs []events.RouterEvent, orphans int) {
	r := e.ranks[rank]
	var built [tiers]map[uint64]bool // the blocks that the events make
	for t := range built {
		built[t] = make(map[uint64]bool)
		for _, p := range slices.SortedFunc(slices.Values(r.Places), func(a, b *placeBlocks) int { return a.At.Group - b.At.Group }) {
			if int(p.At.Tier) != t {
				continue
			}
			blocks, seen := &p.Blocks, make(map[uint64]bool)
			var add func(hash uint64) bool // reports whether the events build the block here
			add = func(hash uint64) bool {
				k, _ := blocks.get(hash)
				if seen[hash] || !k.Published {
					return seen[hash] && built[t][hash]
				}
				seen[hash] = true // ends a circle, which no engine has
				if k.HasParent && !add(k.Parent) && !slices.ContainsFunc(built[:t+1], func(on map[uint64]bool) bool { return on[k.Parent] }) {
					return false
				}
				built[t][hash] = true
				ev := indexer.Event{
					Kind: indexer.Stored, Tier: p.At.Tier, Parent: k.Parent, HasParent: k.HasParent,
					Blocks: appendBlocks(nil, hash, &k),
				}
				if n := len(evs); n == 0 || !events.Join(&evs[n-1], rank, &ev) {
					evs = append(evs, events.RouterEvent{DPRank: rank, Event: ev})
				}
				return true
			}
			for hash, k := range blocks.all() {
				if k.Published && !add(hash) && !built[t][hash] {
					orphans += k.weight()
				}
			}
			for hash, k := range blocks.all() {
				if k.Published && !built[t][hash] {
					e.blocks += 1 - k.weight()
					r.register(p.At, hash, &k, false)
					blocks.set(hash, &cachedBlock{blockState: blockState{Count: k.Count}})
				}
			}
		}
	}
	return evs, orphans
}
