// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// stateMagic begins the file of what is known of the workers' caches. It is a
// snapshot (see [WriteSnapshot]) of the ranks that no stream keeps, under a name of
// its own since its parts mean other things: an owner is a rank that is saved, once
// for each tier; there is one cursor for each rank; a worker is a [savedWorker]; the
// position is not used; the names of the pools are not looked at.
const stateMagic = "KVREVTS2"

// savedWorker tells whether a worker is still the same.
type savedWorker struct {
	ID        uint64 `json:"id"`
	StartedMS int64  `json:"started_ms"`
	Home      string `json:"home,omitempty"`
}

// maxText bounds a name in the file; longer ones are cut.
const maxText = 1 << 10

// RankName names a rank of a worker.
type RankName struct {
	WorkerID uint64
	DPRank   uint32
}

// Held is what the sink holds at one moment.
type Held struct {
	Pools []SnapshotPool
	Ranks []RankName // by worker number in Runs
	// Runs are the pools' runs, as in a [Snapshot], by worker and tier. Failed is
	// asked when they have ended whether that was too early.
	Runs   iter.Seq2[int, indexer.Run]
	Failed func() error
	Parked []RouterEvent // applied, and waiting for their parents
}

// Save writes what is known of the workers' caches and up to which event, so that
// [Subscriber.Load] of a later process can go on with it: everything as it was at
// one moment. The sink is asked then for what it holds, and has no event meanwhile;
// it is read and written run by run while events go on. Left out are ranks that are
// suspect or about to be read anew, and those whose events a stream keeps. The error
// is that of w or of what is held.
func (s *Subscriber) Save(w io.Writer, hold func() (Held, error)) error {
	var known map[rankKey]Saved
	resume := s.pause(func() { known = s.tracker.savable() })
	held, err := hold()
	resume()
	if err != nil {
		return err
	}
	state := Snapshot{Created: s.conf.Now()}
	var broken error
	state.Failed = func() error {
		if broken == nil && held.Failed != nil {
			return held.Failed()
		}
		return broken
	}
	state.Meta.Pools = append(slices.Clone(held.Pools), SnapshotPool{}) // the last is of those not back yet
	owners := make(map[rankKey]int, len(known))                         // the first of each rank
	workers := make(map[uint64]savedWorker)
	for _, key := range slices.SortedFunc(maps.Keys(known), func(a, b rankKey) int {
		return cmp.Or(cmp.Compare(a.worker, b.worker), cmp.Compare(a.rank, b.rank))
	}) {
		r := known[key]
		info, is := workers[key.worker], savedWorker{key.worker, r.StartedMS, r.Home[:min(len(r.Home), maxText)]}
		switch {
		case info == is:
		case info.ID == 0 && info.StartedMS == 0 && len(workers) < maxSnapshotWorkers:
			line, err := json.Marshal(is)
			if err != nil {
				return fmt.Errorf("events: save: %w", err)
			}
			workers[key.worker] = is
			state.Workers = append(state.Workers, line)
		default:
			continue // one process has all ranks of a worker
		}
		owners[key] = len(state.Owners)
		for t := range tiers {
			state.Owners = append(state.Owners, Owner{key.worker, key.rank, indexer.Tier(t)})
		}
		state.Cursors = append(state.Cursors, Cursor{WorkerID: key.worker, DPRank: key.rank, PublisherID: r.Publisher, EventID: r.Cursor})
	}
	for _, ev := range held.Parked {
		if _, ok := owners[rankKey{ev.WorkerID, ev.DPRank}]; ok {
			state.Parked = append(state.Parked, ev)
		}
	}
	back, waiting := notBack(known, owners)
	state.Parked = append(state.Parked, waiting...)
	state.Runs = func(yield func(int, indexer.Run) bool) {
		first := make([]int, len(held.Ranks)) // by number in the held runs
		for i, r := range held.Ranks {
			first[i] = -1
			if o, ok := owners[rankKey{r.WorkerID, r.DPRank}]; ok {
				first[i] = o
			}
		}
		if held.Runs != nil {
			for p, run := range held.Runs {
				own(&run, first)
				if !yield(p, run) {
					return
				}
			}
		}
		for run, err := range back.Dump() {
			own(&run, nil)
			if broken = err; err != nil || !yield(len(held.Pools), run) {
				return
			}
		}
	}
	_, err = writeState(w, stateMagic, s.conf.Scope, &state)
	return err
}

// own names the holders of a run by their owner: the first one of each worker, or
// its number if there is none, and its tier behind it. Those without are left out.
func own(run *indexer.Run, first []int) {
	kept := run.Holders[:0]
	for _, h := range run.Holders {
		if first != nil {
			if h.Worker >= len(first) || first[h.Worker] < 0 {
				continue
			}
			h.Worker = first[h.Worker]
		}
		h.Worker, h.Tier = h.Worker+int(h.Tier), indexer.Device
		kept = append(kept, h)
	}
	run.Holders = kept
}

// notBack makes an index of what an earlier process saved of workers that are not
// known yet, by their first owners, and returns it with what waits in front of it.
func notBack(known map[rankKey]Saved, owners map[rankKey]int) (x *indexer.Index, waiting []RouterEvent) {
	x = indexer.New(indexer.Config{MaxBlocks: math.MaxInt})
	parked := indexer.NewParked(x)
	for key, r := range known {
		if o, ok := owners[key]; ok {
			for i := range r.Events {
				parked.Apply(time.Time{}, o, r.Events[i])
			}
		}
	}
	all := parked.Waiting()
	for key, o := range owners {
		for _, ev := range all[o] {
			waiting = append(waiting, RouterEvent{WorkerID: key.worker, DPRank: key.rank, Event: ev})
		}
	}
	return x, waiting
}

// Load takes what an earlier process saved, and returns of how many ranks. Each is
// used when its worker is told of, if that is still the same process, within a
// minute; until then its blocks take about as much memory as in the index. The
// error wraps [ErrSnapshot], unless it is in's; then nothing is taken.
func (s *Subscriber) Load(in io.Reader) (ranks int, err error) {
	state, whole, err := readState(in, stateMagic, s.conf.Scope)
	if err != nil {
		return 0, err
	}
	saved, err := state.saved()
	if bad := whole(); bad != nil {
		err = bad // it knows more of what is wrong than whoever stumbled over it
	}
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.load(s.conf.Now(), saved)
	return len(saved), nil
}

// saved returns the ranks of a file of what is known.
func (s *Snapshot) saved() ([]Saved, error) {
	workers := make(map[uint64]savedWorker, len(s.Workers))
	for _, line := range s.Workers {
		var w savedWorker
		if err := json.Unmarshal(line, &w); err != nil {
			return nil, badSnapshot("a worker cannot be read: %w", err)
		}
		workers[w.ID] = w
	}
	if len(s.Cursors) > maxRanks || len(s.Owners) != len(s.Cursors)*len(tiers) {
		return nil, badSnapshot("it has %d ranks and %d owners", len(s.Cursors), len(s.Owners))
	}
	ranks := make([]Saved, len(s.Cursors))
	for i, c := range s.Cursors {
		w := workers[c.WorkerID]
		ranks[i] = Saved{WorkerID: c.WorkerID, DPRank: c.DPRank, StartedMS: w.StartedMS, Home: w.Home, Publisher: c.PublisherID, Cursor: c.EventID}
		for t := range tiers {
			if o := s.Owners[i*len(tiers)+t]; o != (Owner{c.WorkerID, c.DPRank, indexer.Tier(t)}) {
				return nil, badSnapshot("owner %d is %+v, and no tier of rank %d of worker %d", i*len(tiers)+t, o, c.DPRank, c.WorkerID)
			}
		}
	}
	next, stop := iter.Pull2(s.Runs)
	defer stop()
	for pool, run, ok := next(); ok; {
		this := pool
		all, err := AllRankEvents(func(yield func(indexer.Run, error) bool) {
			for ok && pool == this {
				for i := range run.Holders {
					h := &run.Holders[i]
					h.Tier, h.Worker = indexer.Tier(h.Worker%len(tiers)), h.Worker/len(tiers)
				}
				if !yield(run, nil) {
					return
				}
				pool, run, ok = next()
			}
		})
		if err != nil {
			return nil, err
		}
		for n, evs := range all {
			ranks[n].Events = append(ranks[n].Events, evs...)
		}
	}
	numbers := make(map[rankKey]int, len(ranks))
	for n := range ranks {
		numbers[rankKey{ranks[n].WorkerID, ranks[n].DPRank}] = n
	}
	for _, ev := range s.Parked {
		if n, ok := numbers[rankKey{ev.WorkerID, ev.DPRank}]; ok {
			ranks[n].Events = append(ranks[n].Events, ev.Event)
		}
	}
	return ranks, nil
}

// savable returns the ranks that can be saved; without what they hold, unless only
// an earlier process knew it.
func (t *tracker) savable() map[rankKey]Saved {
	known := make(map[rankKey]Saved, len(t.ranks))
	for key, r := range t.ranks {
		src := t.workers[key.worker]
		c := r.cursor()
		if r.state == StateSuspect || r.many || !c.set || r.repair != nil && r.repair.dump || src.Feed == FeedDurable {
			continue
		}
		known[key] = Saved{WorkerID: key.worker, DPRank: key.rank, StartedMS: src.StartedMS, Home: src.Home, Publisher: r.newest, Cursor: c.id}
	}
	// Who has not come back yet may come still.
	for key, s := range t.saved {
		if t.ranks[key] == nil {
			known[key] = *s
		}
	}
	return known
}
