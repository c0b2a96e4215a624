// SPDX-License-Identifier: Apache-2.0

package events

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Tracker lets tests drive the subscriber's bookkeeping without NATS.
type Tracker struct {
	t     *tracker
	knows func(worker uint64) bool // whether the sink knows a worker
}

// NewTracker returns an empty Tracker.
func NewTracker(sink Sink) Tracker {
	t := newTracker(func(r RankName, ev indexer.Event) { sink(r.WorkerID, r.DPRank, ev) })
	t.gaveUp, t.count = func(RankName) {}, func(uint64, string, int) {}
	return Tracker{t, func(uint64) bool { return true }}
}

// Knows sets which workers the sink knows. Default: all.
func (t Tracker) Knows(knows func(worker uint64) bool) Tracker {
	t.knows = knows
	return t
}

// Accept passes an event to the tracker and returns its outcome, "" if it was accepted, and
// whether the event waits for missing ones.
func (t Tracker) Accept(now time.Time, publisher uint64, ev RouterEvent) string {
	v := t.t.accept(now, FeedCore, publisher, ev, t.knows(ev.WorkerID))
	switch {
	case v.outcome == outcomeAccepted:
		return ""
	case v.held && v.outcome != outcomeHeld:
		return v.outcome + " held"
	}
	return v.outcome
}

// AcceptStream passes an event of the stream. Export, Restored and CaughtUp call the tracker's
// methods.
func (t Tracker) AcceptStream(now time.Time, publisher uint64, ev RouterEvent) {
	t.t.accept(now, FeedDurable, publisher, ev, t.knows(ev.WorkerID))
}

func (t Tracker) Export() *Snapshot {
	s := &Snapshot{}
	t.t.export(s, true)
	for id, src := range t.t.sources(true) {
		if src.Feed != FeedNone {
			s.Workers = append(s.Workers, SnapshotWorker{ID: id, StartedMS: src.StartedMS, Home: src.Home})
		}
	}
	return s
}
func (t Tracker) Restored(now time.Time, s *Snapshot) { t.t.restore(now, s) }
func (t Tracker) CaughtUp(now time.Time, lost bool)   { t.t.repairAtStreamEnd(now, lost) }

// Known, Forget and Expire call the tracker's methods.
func (t Tracker) Known(worker uint64)  { t.t.applyWaiting(time.Time{}, worker) }
func (t Tracker) Forget(worker uint64) { t.t.forget(worker) }
func (t Tracker) Expire(now time.Time) (dropped int) {
	for _, n := range t.t.expire(now) {
		dropped += n
	}
	return dropped
}

func (t Tracker) Waiting() (workers, evs int) {
	for _, q := range t.t.waiting {
		evs += len(q.events)
	}
	return len(t.t.waiting), evs
}

// Ranks returns the number of ranks whose cursors are kept.
func (t Tracker) Ranks() int { return len(t.t.ranks) }

// SetWorker, Tick, Answer, Failed, Audit and Doubt call the tracker's methods.
func (t Tracker) SetWorker(now time.Time, id uint64, src Source) { t.t.setWorker(now, id, src) }
func (t Tracker) Audit(now time.Time)                            { t.t.audit(now) }
func (t Tracker) Missed(now time.Time, id uint64, dpRank uint32) { t.t.missed(now, id, dpRank) }
func (t Tracker) Doubt(now time.Time, id uint64, dpRank uint32)  { t.t.doubt(now, id, dpRank) }
func (t Tracker) Failed(now time.Time, id uint64)                { t.t.queryFailed(now, id, "nobody") }

func (t Tracker) Answer(now time.Time, id, publisher uint64, a Answer) {
	a.Events = slices.Clone(a.Events)
	t.t.answer(now, id, publisher, &a)
}

// Told returns the last reported state of a worker's rank.
func (t Tracker) Told(id uint64, dpRank uint32) (s indexer.State) {
	s = indexer.StateOK
	if r := t.t.ranks[RankName{id, dpRank}]; r != nil {
		s = r.reported
	}
	return s
}

// LimitPending limits the messages that may wait in the subscriber's queue.
func (s *Subscriber) LimitPending(n int) { s.pending, s.maxQueue = n, n }

// Follow applies one event with the given id of a worker's rank 0.
func (s *Subscriber) Follow(worker, publisher, id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.applyWaiting(time.Time{}, worker)
	s.tracker.accept(time.Time{}, FeedCore, publisher, RouterEvent{WorkerID: worker, EventID: id, Event: indexer.Event{Kind: indexer.Removed}}, true)
}

// Ranks returns the number of steady ranks, and of ranks under repair or in doubt.
func (s *Subscriber) Ranks() (steady, others int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.tracker.ranks {
		if r.repair == nil && r.state == indexer.StateOK {
			steady++
		} else {
			others++
		}
	}
	return steady, others
}

// Counting makes the subscriber count its events in a map, and returns a function that copies the
// map.
func (s *Subscriber) Counting() func() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := map[string]int{}
	before := s.tracker.count
	s.tracker.count = func(worker uint64, what string, n int) {
		before(worker, what, n)
		counts[what] += n
	}
	return func() map[string]int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return maps.Clone(counts)
	}
}

// Ask is a query that a tracker sends.
type Ask struct {
	ID    uint64
	Query Query
}

// Tick advances the time and returns the queries that are sent then.
func (t Tracker) Tick(now time.Time) (asks []Ask) {
	t.t.tick(now)
	for _, a := range t.t.queries(now, func(uint64) bool { return true }) {
		asks = append(asks, Ask{a.id, a.query})
	}
	return asks
}

// Seed makes jitter reproducible. Count receives counted events, Changed receives states.
func (t Tracker) Seed(seed uint64) Tracker {
	t.t.repairs.rng = rand.New(rand.NewPCG(seed, 9))
	return t
}

func (t Tracker) Count(count func(string, int)) {
	t.t.count = func(_ uint64, what string, n int) { count(what, n) }
}

func (t Tracker) Changed(changed func(uint64, uint32, indexer.State)) {
	t.t.changed = func(r RankName, s indexer.State) { changed(r.WorkerID, r.DPRank, s) }
}
func (t Tracker) Asked() int { return len(t.t.repairs.asked) }

// Load restores the state that an earlier process saved of a worker.
func (t Tracker) Load(now time.Time, w SnapshotWorker, c Cursor) {
	t.t.load(now, &Snapshot{Workers: []SnapshotWorker{w}, Cursors: []Cursor{c}})
}

func (t Tracker) State(id uint64, dpRank uint32) (s indexer.State) {
	s = indexer.StateOK
	if r := t.t.ranks[RankName{id, dpRank}]; r != nil {
		s = r.state
	}
	return s
}

func (t Tracker) Cursor(id uint64, dpRank uint32) (last uint64) {
	if r := t.t.ranks[RankName{id, dpRank}]; r != nil {
		last = r.cursor().id
	}
	return last
}

// Repairs returns the number of ranks under repair, and the number of blocks that wait for them,
// counted in two ways that must agree.
func (t Tracker) Repairs() (ranks, blocks, sum int) {
	for _, r := range t.t.ranks {
		if r.repair != nil {
			ranks++
			for _, h := range r.repair.held {
				sum += Weight(&h.ev.Event)
			}
		}
	}
	return ranks, t.t.repairs.blocks, sum
}

// Limits of repairs.
const (
	MaxHeldEvents = maxHeldEvents
	MaxHeldBlocks = maxHeldBlocks
	MaxQueries    = maxQueries
	MaxDumps      = maxDumps
	MaxTries      = maxTries
)

// MaxWaitingEvents and MaxWaitingWorkers are limits.
const (
	MaxWaitingEvents  = maxWaitingEvents
	MaxWaitingWorkers = maxWaitingWorkers
	MaxRanks          = maxRanks
)

// Repairing reports whether a rank is under repair, other than the repeated reading of a suspect one.
func (t Tracker) Repairing(id uint64, dpRank uint32) bool {
	r := t.t.ranks[RankName{id, dpRank}]
	return r != nil && r.repair != nil && !r.repair.reread
}

// Seed makes the times of repeated requests reproducible.
func (f *Follower) Seed(seed uint64) { Tracker{t: f.t}.Seed(seed) }

// Waits reports whether a request is due or under way.
func (f *Follower) Waits() bool { return f.r.repair != nil }
