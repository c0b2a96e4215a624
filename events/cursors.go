// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Cursor is the last applied event of a publisher of a rank. If a rank has several publishers, the
// newest comes last.
type Cursor struct {
	RankName

	PublisherID uint64
	EventID     uint64
}

// RankState is a rank that is partial or suspect, and the time of its last loss.
type RankState struct {
	RankName

	State  indexer.State
	Missed time.Time // to the ms
}

// Waiting is an event that waits for its worker, with its publisher. It has changed no
// cursor.
type Waiting struct {
	PublisherID uint64
	Event       RouterEvent
}

// streamed reports whether the stream stores the events of a worker. That holds for unknown
// workers as well.
func (t *tracker) streamed(worker uint64) bool { return t.workers[worker].takes(FeedDurable) }

// sources returns the workers whose events the stream stores, or the others; the Feed of the rest is
// FeedNone.
func (t *tracker) sources(streamed bool) map[uint64]Source {
	all := maps.Clone(t.restored)
	maps.Copy(all, t.workers)
	for id, src := range all {
		if t.streamed(id) != streamed {
			src.Feed = FeedNone
			all[id] = src
		}
	}
	return all
}

// export fills in the Cursors, States and Waiting of a snapshot, in a fixed order: those of the
// workers whose events the stream stores, or of the others. The cursor of a rank under repair is
// that of the last applied event: the reader finds the same gap, and requests the missing events.
func (t *tracker) export(s *Snapshot, streamed bool) {
	for _, r := range slices.SortedFunc(maps.Values(t.ranks), compareRanks) {
		key := r.RankName
		if t.streamed(key.WorkerID) != streamed {
			continue
		}
		for _, p := range slices.Sorted(maps.Keys(r.cursors)) {
			if p != r.newest {
				s.Cursors = append(s.Cursors, Cursor{key, p, r.cursors[p]})
			}
		}
		id, known := r.cursors[r.newest]
		if known {
			s.Cursors = append(s.Cursors, Cursor{key, r.newest, id})
		}
		state, missed := r.state, r.missed
		if rp := r.repair; rp != nil && rp.dump && known && !rp.reread {
			state = indexer.StateSuspect // until the dump arrives
		}
		if state != indexer.StateOK {
			s.States = append(s.States, RankState{key, state, missed})
		}
	}
	for _, worker := range slices.Sorted(maps.Keys(t.waiting)) {
		for _, h := range t.waiting[worker].events {
			if streamed && h.feed == FeedDurable {
				s.Waiting = append(s.Waiting, Waiting{h.publisher, h.ev})
			}
		}
	}
}

// restore replaces the tracker's state of the workers whose events the stream stores. Two
// publishers of one rank are detected again when the older one sends. Waiting events count as if
// they arrived now.
func (t *tracker) restore(now time.Time, s *Snapshot) {
	for _, r := range slices.Collect(maps.Values(t.ranks)) {
		if t.streamed(r.WorkerID) {
			t.drop(r)
		}
	}
	for worker, q := range t.waiting {
		q.events = slices.DeleteFunc(q.events, func(h heldEvent) bool { return h.feed == FeedDurable })
		if len(q.events) == 0 {
			delete(t.waiting, worker)
		}
	}
	t.current = false
	others := t.restoreWorkers(s)
	known := func(key RankName) *rank {
		_, other := others[key.WorkerID]
		if other || !t.streamed(key.WorkerID) || !t.workers[key.WorkerID].has(key.DPRank) {
			return nil
		}
		return t.rank(key)
	}
	s.setCursors(known)
	for _, r := range slices.Collect(maps.Values(t.ranks)) {
		if t.streamed(r.WorkerID) && !r.isOnlyFrom(t.workers[r.WorkerID].Publisher) {
			t.wipe(r) // of a process that is gone
			t.drop(r)
		}
	}
	for _, w := range s.Waiting {
		if _, registered := t.workers[w.Event.WorkerID]; registered {
			t.accept(now, FeedDurable, w.PublisherID, w.Event, true)
		} else {
			t.wait(now, FeedDurable, w.PublisherID, w.Event)
		}
	}
	t.setStates(now, s, known)
	t.clearUnsure(now)
}

// restoreWorkers notes which workers are known from a snapshot only. It returns the workers of which the
// snapshot has another process than the one that is known: the sink has skipped the blocks of that process.
func (t *tracker) restoreWorkers(s *Snapshot) (others map[uint64]struct{}) {
	others = make(map[uint64]struct{})
	for _, w := range s.Workers {
		saved := Source{StartedMS: w.StartedMS, Home: w.Home}
		known, registered := t.workers[w.ID]
		if !registered {
			known = cmp.Or(t.restored[w.ID], saved)
			t.restored[w.ID] = known
		}
		if saved != (Source{}) && !known.sameProcess(saved) {
			others[w.ID] = struct{}{}
		}
	}
	return others
}

// load adds the state of workers that an earlier process saved and that are not registered yet. It
// returns the number of their ranks. The state is used or dropped when the workers are registered.
func (t *tracker) load(now time.Time, s *Snapshot) (ranks int) {
	var saved []uint64
	for _, w := range s.Workers {
		if _, known := t.workers[w.ID]; !known {
			t.workers[w.ID] = Source{Feed: feedSaved, StartedMS: w.StartedMS, Home: w.Home}
			saved = append(saved, w.ID)
		}
	}
	known := func(key RankName) *rank {
		if t.workers[key.WorkerID].Feed != feedSaved {
			return nil
		}
		return t.rank(key)
	}
	s.setCursors(known)
	t.setStates(now, s, known)
	for _, id := range saved {
		ranks += len(t.owned[id])
	}
	return ranks
}

func (s *Snapshot) setCursors(known func(RankName) *rank) {
	for _, c := range s.Cursors {
		if r := known(c.RankName); r != nil && len(r.cursors) < maxPublishers {
			r.cursors[c.PublisherID], r.newest = c.EventID, c.PublisherID
		}
	}
}

func (t *tracker) setStates(now time.Time, s *Snapshot, known func(RankName) *rank) {
	for _, was := range s.States {
		if r := known(was.RankName); r != nil {
			t.miss(was.Missed, r, was.State)
			if r.repair != nil {
				t.requestDump(now, r)
			}
		}
	}
}

// clearUnsure clears the workers that changed while the snapshot was read: the sink may have
// their state in the snapshot, or may have lost later events.
func (t *tracker) clearUnsure(now time.Time) {
	unsure := t.unsure
	t.unsure = nil
	for _, id := range slices.Sorted(maps.Keys(unsure)) {
		src, registered := t.workers[id]
		for n := range src.DPSize {
			t.sink(RankName{id, src.DPStart + n}, indexer.Event{Kind: indexer.Cleared})
		}
		for _, r := range t.ranksOf(id) {
			t.wipe(r)
			t.drop(r)
		}
		if registered {
			delete(t.workers, id)
			t.setWorker(now, id, src)
		}
	}
}

// repairAtStreamEnd is called when the stream was read to its end. Workers with a local indexer are queried
// for events that the stream has lost, or that are older than the stream. If messages may be
// lost, ranks of other workers become partial.
func (t *tracker) repairAtStreamEnd(now time.Time, lost bool) {
	t.current = true
	for _, id := range slices.Sorted(maps.Keys(t.workers)) {
		src := t.workers[id]
		if src.Feed != FeedDurable || !src.Queries && !lost {
			continue
		}
		for n := range src.DPSize {
			r := t.rank(RankName{id, src.DPStart + n})
			switch {
			case r == nil:
				t.count(id, "no_room", 1)
			case !src.Queries:
				t.miss(now, r, indexer.StatePartial)
			case r.repair == nil:
				t.startRepair(now, r, !r.cursor().set || r.state != indexer.StateOK, t.repairs.jitter(auditSpread))
			}
		}
	}
	for _, r := range t.ranks {
		if lost && t.streamed(r.WorkerID) && !t.workers[r.WorkerID].Queries {
			t.miss(now, r, indexer.StatePartial)
		}
	}
}
