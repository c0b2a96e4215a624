// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bufio"
	"cmp"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/records"
)

const (
	maxSavedRanks = 1 << 18
	savedFor      = time.Minute // workers must register again within this time
)

// savedRank is the state of a rank after the last applied batch. It does not contain the index:
// its blocks are the published blocks of the engine's state, and those of side groups.
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
	sides []events.RouterEvent // build the blocks of side groups
}

// Save writes the state of the engines and the last batch of each, so that [Sources.Load] of a
// later process can continue from it. The error is w's.
func (s *Sources) Save(w io.Writer) error {
	s.mu.Lock()
	ranks := slices.Collect(maps.Keys(s.ranks))
	if time.Since(s.loaded) >= savedFor {
		clear(s.saved)
	}
	waiting := slices.Collect(maps.Values(s.saved)) // of workers that may still come
	s.mu.Unlock()
	_, err := saved.Write(w, s.conf.Scope, &events.Snapshot{
		Created: time.Now(),
		Owners: func(yield func(*events.Owner) bool) {
			for i := range len(waiting) + len(ranks) {
				var state *savedRank
				if i < len(waiting) {
					state = waiting[i]
				} else if state = ranks[i-len(waiting)].save(); state == nil {
					continue
				}
				if !yield(state.owner()) {
					return
				}
			}
		},
	})
	return err
}

// owner is the form in which the rank is saved.
func (r *savedRank) owner() *events.Owner {
	info, _ := json.Marshal(r) // numbers and names, so there is no error
	return &events.Owner{Info: info, Events: r.sides, Blocks: func(yield func(events.Place, *events.OwnedBlock) bool) {
		for rank, e := range r.Ranks {
			for _, p := range e.Places {
				for id, k := range p.table.all() {
					b := events.OwnedBlock{
						ID: id, Local: k.Local, Seed: k.Seed, Parent: k.Parent, HasParent: k.HasParent,
						Copies: k.Count, Published: k.Published,
					}
					if x := k.Resized; x != nil {
						b.Part, b.Tokens, b.Parts, b.Locals = x.Part, x.Tokens, x.Parts, x.Locals
					}
					if !yield(events.Place{DPRank: rank, Tier: p.At.Tier, Group: p.At.Group}, &b) {
						return
					}
				}
			}
		}
	}}
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
	for r := range s.ranks {
		if r.worker.ID == w.ID {
			delete(s.ranks, r)
			ended = append(ended, r)
		}
	}
	stays := s.wanted[w.ID] == w
	s.mu.Unlock()
	for _, r := range ended {
		if state := r.save(); state != nil && stays {
			s.mu.Lock()
			s.saved[events.RankName{WorkerID: w.ID, DPRank: r.at.rank}], s.loaded = state, time.Now()
			s.mu.Unlock()
		}
	}
	return ended
}

// Load reads the state that an earlier process saved. It must be called before Run. The state of a
// rank is used when its worker is followed within a minute, with the same settings. The error
// wraps [events.ErrSnapshot], unless it is in's; then nothing is loaded.
func (s *Sources) Load(in io.Reader) (ranks int, err error) {
	file, read := bufio.NewReader(in), s.readSaved
	if magic, _ := file.Peek(len(oldMagic)); string(magic) == oldMagic {
		read = readOld
	}
	all, err := read(file)
	if err != nil {
		return 0, fmt.Errorf("engines: load: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saved, s.loaded = all, time.Now()
	return len(all), nil
}

func (s *Sources) readSaved(in io.Reader) (map[events.RankName]*savedRank, error) {
	snapshot, whole, err := saved.Read(in, s.conf.Scope)
	if err != nil {
		return nil, err
	}
	for range snapshot.Runs {
	}
	all := make(map[events.RankName]*savedRank)
	for o := range snapshot.Owners {
		r, err := loadRank(o)
		if err != nil || len(all) >= maxSavedRanks {
			return nil, badRank(len(all), err)
		}
		all[events.RankName{WorkerID: r.Worker, DPRank: r.Rank}] = r
	}
	return all, whole()
}

// loadRank reads a rank of a file.
func loadRank(o *events.Owner) (*savedRank, error) {
	r := &savedRank{sides: o.Events}
	if err := json.Unmarshal(o.Info, r); err != nil {
		return nil, err
	}
	maps.DeleteFunc(r.Ranks, func(_ uint32, e *engineRank) bool { return e == nil })
	for at, b := range o.Blocks {
		if e := r.Ranks[at.DPRank]; e != nil {
			e.load(place{at.Tier, at.Group}, b)
		}
	}
	return r, nil
}

// load adds a block of a file.
func (r *engineRank) load(at place, b *events.OwnedBlock) {
	k := cachedBlock{blockState: blockState{
		Local: b.Local, Seed: b.Seed, Parent: b.Parent, HasParent: b.HasParent, Count: b.Copies, Published: b.Published,
	}}
	if b.Part || len(b.Locals) > 0 {
		k.Resized = &resizedBlock{Part: b.Part, Tokens: b.Tokens, Parts: b.Parts, Locals: b.Locals}
	}
	r.placed(at).set(b.ID, &k)
}

// The file of release 0.1.0 is a gob stream of savedRank. The count at its end is the number of ranks.
const (
	oldMagic   = "KVRSRCS5"
	oldVersion = 1
)

// readOld reads a file of release 0.1.0.
func readOld(in io.Reader) (map[events.RankName]*savedRank, error) {
	file, _, err := records.NewReader(in, oldMagic, oldVersion)
	if err != nil {
		return nil, err
	}
	all := make(map[events.RankName]*savedRank)
	for dec := gob.NewDecoder(file); ; {
		r := new(savedRank)
		err := dec.Decode(r)
		switch n := uint64(len(all)); {
		case errors.Is(err, io.EOF) && n == file.Count():
			return all, nil
		case err == nil && n < maxSavedRanks:
			for _, e := range r.Ranks {
				for _, p := range e.Places {
					p.convert()
				}
			}
			all[events.RankName{WorkerID: r.Worker, DPRank: r.Rank}] = r
		case file.Err() != nil:
			return nil, file.Err()
		default:
			return nil, badRank(len(all), err)
		}
	}
}

// oldBlocks is a table of blocks in a file of release 0.1.0.
type oldBlocks struct {
	Slots []struct {
		Block blockState
		ID    uint64
	}
	Resized map[uint64]*resizedBlock
}

// convert moves the blocks of a file of release 0.1.0 into the table.
func (p *placeBlocks) convert() {
	for _, s := range p.Blocks.Slots {
		if s.Block.Count > 0 {
			p.table.set(s.ID, &cachedBlock{s.Block, p.Blocks.Resized[s.ID]})
		}
	}
	p.Blocks = oldBlocks{}
}

var errTooManyRanks = fmt.Errorf("more than %d ranks", maxSavedRanks)

func badRank(n int, err error) error {
	return fmt.Errorf("%w: rank %d cannot be read: %w", events.ErrSnapshot, n+1, cmp.Or(err, errTooManyRanks))
}

// save returns the rank's state between two batches, or nil if a later process could not find
// out whether the engine is still the same, or if the blocks of side groups are unknown.
func (r *rankSource) save() *savedRank {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, digest, known := r.follower.Last()
	if !known || !r.at.replays && r.at.url == "" {
		return nil
	}
	var sides []events.RouterEvent
	for rank, e := range r.engine.ranks {
		before := len(sides)
		if len(e.Layers.Sides) == 0 || e.Layers.Shape() == nil {
			continue // the index has no side groups of it
		}
		for _, ev := range r.s.conf.Sides(r.worker.ID, rank) {
			sides = append(sides, events.RouterEvent{WorkerID: r.worker.ID, DPRank: rank, Event: ev})
		}
		if len(sides) == before {
			return nil
		}
	}
	state := r.follower.State()
	return &savedRank{
		Worker: r.worker.ID, Rank: r.at.rank, Started: r.worker.Started, Options: r.engine.opt,
		Last: last, Digest: digest, Partial: state == indexer.StatePartial, Suspect: state == indexer.StateSuspect,
		Ranks: r.engine.save(), sides: sides,
	}
}

// restore begins the rank with the saved state, if the settings are the same, and gives its
// blocks to the index.
func (r *rankSource) restore() {
	key := events.RankName{WorkerID: r.worker.ID, DPRank: r.at.rank}
	r.s.mu.Lock()
	state := r.s.saved[key]
	delete(r.s.saved, key)
	late := time.Since(r.s.loaded) >= savedFor
	r.s.mu.Unlock()
	if state == nil || late {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if state.Options != r.engine.opt || state.Started != r.worker.Started {
		r.log.Info("the saved state of an engine is not used: the engine or its settings are different")
		return
	}
	evs, orphans := r.engine.restore(state.Ranks)
	evs = append(evs, state.sides...)
	for i := range evs {
		r.namedRanks[evs[i].DPRank] = struct{}{}
		r.fits = true
		r.deliver(&evs[i])
	}
	r.follower.Continue(state.Last, state.Digest)
	if orphans > 0 {
		r.follower.Recheck()
	}
	switch {
	case state.Suspect || orphans > 0:
		r.follower.Miss(time.Now(), indexer.StateSuspect)
	case state.Partial:
		r.follower.Miss(time.Now(), indexer.StatePartial)
	}
	r.count(sourceRestored, 1)
	r.log.Info("the saved state of an engine is used", "blocks", r.engine.Blocks(), "behind_holes", orphans,
		"sequence", state.Last)
}

// save returns a copy of the state. It may be read while the engine changes.
func (e *Engine) save() map[uint32]*engineRank {
	all := make(map[uint32]*engineRank, len(e.ranks))
	for rank, r := range e.ranks {
		copied := new(*r)
		copied.Places = nil
		copied.Layers = indexer.Layers{Full: r.Layers.Full, Sides: slices.Clone(r.Layers.Sides)}
		for _, p := range r.Places {
			copied.Places = append(copied.Places, &placeBlocks{At: p.At, table: p.table.clone()})
		}
		all[rank] = copied
	}
	return all
}

// restore replaces the state by a saved one, and returns the events that give its blocks to
// the index. No event has an orphan, a block after a removed one, because its place is unknown;
// it is published when the engine stores it again.
func (e *Engine) restore(from map[uint32]*engineRank) (evs []events.RouterEvent, orphans int) {
	for rank, in := range from {
		if len(e.ranks) >= maxEngineRanks {
			break
		}
		r := new(*in)
		e.ranks[rank] = r
		r.Places = nil
		for _, p := range in.Places {
			for hash, k := range p.table.all() {
				if count := k.Count; int(p.At.Tier) < tiers && e.put(r, p.At, hash, &k) == DropNone {
					k.Count = count
					r.blocks(p.At).set(hash, &k)
				}
			}
		}
		for _, p := range r.Places {
			for hash, k := range p.table.all() {
				if k.Published {
					r.register(p.At, hash, &k, true)
				}
			}
		}
		shape := output{rank: rank}
		r.sendShape(e.opt.BlockSize, &shape)
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
			blocks, seen := &p.table, make(map[uint64]bool)
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
					e.hide(r, p, hash, &k)
				}
			}
		}
	}
	return evs, orphans
}
