// SPDX-License-Identifier: Apache-2.0

// Package events receives the workers' cache events, keeps them in order, repairs gaps, and
// passes them to a sink. A [Subscriber] runs in each router replica and reads NATS; the publishers
// are in package engines and in Dynamo's workers. A [Follower] does the same for the batches of
// one rank of an engine, which package engines reads from the engine's sockets.
//
// A publisher numbers the events of each rank from 1 and batches them. The bytes are those of
// NVIDIA Dynamo's event plane from 1.6 on. A subscriber gives each rank's events to the sink
// once and in order.
//
// # Guarantees
//
// Each worker has one [Source]: the feed of its events, and whether a local indexer answers
// queries about them. An engine's replay socket answers requests in place of a local indexer.
//
// If a source answers, the sink ends up with the worker's true cache, whatever NATS loses,
// repeats or delays:
//
//   - The rank is read when the worker is discovered or connected, and when its publisher restarts.
//   - Events after a gap are held while the missing ones are requested, in at most eight tries.
//   - If no answer arrives, the held events are applied across the gap, and the rank is suspect,
//     or partial if nothing was known of an engine. About once a minute it is read again in one
//     try, until that succeeds or the worker clears its cache. Meanwhile events are applied at once.
//   - An engine that no longer has the missing batches is not read again before it clears its cache.
//
// If a JetStream stream has a worker's events, it is read at discovery instead of the ranks. At
// its end each rank is queried for later events.
//
// Without an answering source the sink gets a subsequence of the published events, in order and
// without duplicates. A rank with a gap is suspect: its known blocks stay, and may be partly
// wrong, until it is cleared. A rank whose first events are unknown is partial, for ten minutes
// after the last loss. When a publisher restarts, its rank is cleared first: a new process has an
// empty cache.
//
// Events of a worker that the sink does not know yet wait for the worker, up to a bound. If the
// worker's record names its publisher, events of any other publisher wait as well, until a
// record names that publisher.
//
// # Invariants of the subscriber
//
//   - The cursor of a (worker, rank, publisher) is the largest event id applied of it, and only
//     larger ids get through. With a local indexer each id up to the cursor is in what the sink
//     got, as an event or in a dump, unless the rank is suspect.
//   - A rank that is ok and has no repair lacks no event that is known to be missing.
//   - A rank is steady, or has one repair; a repair has at most one query under way.
//   - Events of an unknown worker wait undecoded and change no cursor.
//   - At most 1,024 events wait for each worker, for at most 256 workers, for at most 60 seconds.
//     Cursors are kept for at most 262,144 ranks. At most 4,096 events are held after a gap of a rank,
//     and their blocks are bounded over all ranks.
//   - At most 64 queries are under way, at most 8 of them for dumps.
//
// # Concurrency
//
// The methods of a [Subscriber] may be called by any number of goroutines, those of a [Follower]
// by one at a time. The sink is called by one at a time, while no lock of the subscriber is held.
package events

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Topic is the name of the event plane's topic for cache events.
const Topic = "kv-events"

// Sink applies an event of a worker's rank. It ignores events of unknown workers.
type Sink func(workerID uint64, dpRank uint32, ev indexer.Event)

const (
	maxWaitingEvents  = 1024
	maxWaitingWorkers = 256
	maxWait           = 60 * time.Second
	// maxRanks is far above any fleet. It bounds the memory that forged events can take.
	maxRanks = 1 << 18
	// partialFor is how long a rank whose first events are unknown is partial if no later
	// event is missing: by then its worker has evicted most of the unknown blocks.
	partialFor = 10 * time.Minute
)

// tracker has the cursors of all ranks, the waiting events, and the repairs. It is the
// subscriber without NATS, clock and lock: its inputs are events, answers, failures and the
// time, its outputs are events for the sink and queries. The same inputs give the same
// outputs.
type tracker struct {
	sink func(r RankName, ev indexer.Event)
	// changed is called when the state of a rank changes, gaveUp when a repair of a rank
	// has failed, and count for everything else that is counted.
	changed func(r RankName, s indexer.State)
	gaveUp  func(r RankName)
	count   func(worker uint64, what string, n int)

	ranks   map[RankName]*rank
	owned   map[uint64]map[uint32]*rank // the same, by worker and rank; never empty
	workers map[uint64]Source           // by setWorker or load
	waiting map[uint64]*queue           // by worker; never empty
	// restored are the workers that are known from a snapshot of the stream only, with StartedMS
	// and Home if the snapshot has them.
	restored map[uint64]Source
	repairs  repairs
	current  bool // the stream was read to its end since it was opened
	stalled  bool // the stream stores no events: its ranks are suspect
	// unsure are the workers that left, or changed their feed or process, while a snapshot is
	// read. It is nil while no snapshot is read.
	unsure map[uint64]struct{}
}

type rank struct {
	RankName

	cursors  map[uint64]uint64 // by publisher
	newest   uint64            // the current publisher: the last one that was new; 0 = unknown, or without an id
	many     bool              // two publishers send at the same time: the rank is not cleared any more
	state    indexer.State
	reported indexer.State // worse than state while the stream takes no events
	missed   time.Time     // when the last loss was noticed

	// Of ranks with a local indexer:
	repair   *repair              // nil if steady
	listed   bool                 // in the list of ready ranks
	rejected map[uint64]time.Time // publishers that are ignored, and until when

	engine *Follower // of an engine's rank
}

// maxPublishers bounds the cursors of a rank. More than two are a mistake in the fleet.
const maxPublishers = 8

type queue struct {
	since  time.Time
	events []heldEvent
}

// heldEvent is an event that waits for its worker, or is held after a gap, with its publisher.
type heldEvent struct {
	feed      Feed // while its worker is unknown
	publisher uint64
	ev        RouterEvent
	after     uint64 // number of the last query sent before the event arrived
}

// weight is the memory of the event, in blocks.
func (h *heldEvent) weight() int { return Weight(&h.ev.Event) + len(h.ev.Body)/blockBytes }

// verdict is the result of an event.
type verdict struct {
	outcome string
	gap     bool // events before it are missing
	held    bool // until the missing events before it arrive
	second  bool // it shows that the rank has two publishers
	unnamed bool // the first one that waits because its worker's record names another publisher
}

func newTracker(sink func(r RankName, ev indexer.Event)) *tracker {
	return &tracker{
		sink:    sink,
		changed: func(RankName, indexer.State) {},
		ranks:   make(map[RankName]*rank),
		owned:   make(map[uint64]map[uint32]*rank),
		workers: make(map[uint64]Source),
		waiting: make(map[uint64]*queue),

		restored: make(map[uint64]Source),
		repairs: repairs{
			rng: rand.New(rand.NewPCG(rand.Uint64(), 0)), timers: make(map[*rank]time.Time), asked: make(map[uint64]*rank),
		},
	}
}

// accept takes one event of a feed from a publisher. sinkKnows reports whether the sink knows
// the worker; it matters for workers without a call of setWorker.
func (t *tracker) accept(now time.Time, feed Feed, publisher uint64, ev RouterEvent, sinkKnows bool) verdict {
	src, registered := t.workers[ev.WorkerID]
	switch {
	case src.Feed == feedSaved:
		return t.wait(now, feed, publisher, ev)
	case registered && !src.takes(feed):
		return verdict{outcome: outcomeOther}
	case !registered:
		if t.waiting[ev.WorkerID] != nil {
			return t.wait(now, feed, publisher, ev)
		}
		if _, restored := t.restored[ev.WorkerID]; restored && feed != FeedDurable {
			return verdict{outcome: outcomeOther} // the stream brings it, too
		}
		if !sinkKnows {
			return t.wait(now, feed, publisher, ev)
		}
	case src.has(ev.DPRank) && !src.accepts(publisher):
		first := t.waiting[ev.WorkerID] == nil
		v := t.wait(now, feed, publisher, ev)
		if v.unnamed = first; v.outcome == outcomeWaiting {
			v.outcome = outcomeMany
		}
		return v
	}
	return t.apply(now, src, publisher, ev)
}

// apply takes an event of a worker's feed and publisher.
func (t *tracker) apply(now time.Time, src Source, publisher uint64, ev RouterEvent) verdict {
	if !src.has(ev.DPRank) {
		return verdict{outcome: outcomeDropped}
	}
	r := t.rank(RankName{ev.WorkerID, ev.DPRank})
	switch {
	case r == nil:
		return verdict{outcome: outcomeDropped}
	case src.Queries:
		return t.follow(now, r, publisher, ev)
	}
	return t.applyAcrossGap(now, r, publisher, ev)
}

// past reports whether a message is from a publisher that the worker's record does not name,
// and older than the worker's process, by the publisher's clock.
func (t *tracker) past(e Envelope, worker uint64) bool {
	src, registered := t.workers[worker]
	return registered && !src.accepts(e.PublisherID) && e.PublishedAt > 0 && e.PublishedAt < uint64(max(0, src.StartedMS))
}

// rank returns a rank, which it creates if needed, or nil if there are too many.
func (t *tracker) rank(key RankName) *rank {
	r := t.ranks[key]
	if r == nil && len(t.ranks) < maxRanks {
		r = &rank{RankName: key, state: indexer.StateOK, reported: indexer.StateOK, cursors: make(map[uint64]uint64, 1)}
		t.ranks[key] = r
		if t.owned[key.WorkerID] == nil {
			t.owned[key.WorkerID] = make(map[uint32]*rank, 1)
		}
		t.owned[key.WorkerID][key.DPRank] = r
		t.report(r)
	}
	return r
}

// drop removes a rank.
func (t *tracker) drop(r *rank) {
	t.endRepair(r)
	if r.state = indexer.StateOK; r.reported != indexer.StateOK {
		t.changed(r.RankName, indexer.StateOK)
	}
	delete(t.ranks, r.RankName)
	delete(t.owned[r.WorkerID], r.DPRank)
	if len(t.owned[r.WorkerID]) == 0 {
		delete(t.owned, r.WorkerID)
	}
}

// ranksOf returns a worker's ranks in order.
func (t *tracker) ranksOf(worker uint64) []*rank {
	return slices.SortedFunc(maps.Values(t.owned[worker]), compareRanks)
}

func compareRanks(a, b *rank) int {
	return cmp.Or(cmp.Compare(a.WorkerID, b.WorkerID), cmp.Compare(a.DPRank, b.DPRank))
}

// applyAcrossGap applies a new event, even if events before it are missing.
func (t *tracker) applyAcrossGap(now time.Time, r *rank, publisher uint64, ev RouterEvent) verdict {
	cursor, known := r.cursors[publisher]
	if known && ev.EventID <= cursor {
		return verdict{outcome: outcomeDuplicate}
	}
	v := verdict{outcome: outcomeAccepted}
	restart := false
	switch {
	case known:
		v.gap = ev.EventID > cursor+1
	case len(r.cursors) == 0:
		v.gap = ev.EventID > 1 // its first events are unknown
	default:
		restart = !r.many
	}
	switch {
	case known && publisher != r.newest && !r.many:
		// The older publisher is alive, so it was wrong to clear the rank.
		r.many, v.outcome, v.second = true, outcomeMany, true
		t.miss(now, r, indexer.StateSuspect)
	case restart:
		v.outcome = outcomeRestart
	case v.gap:
		v.outcome = outcomeGap
	}
	if !known {
		if len(r.cursors) >= maxPublishers {
			clear(r.cursors)
		}
		r.newest = publisher
	}
	r.cursors[publisher] = ev.EventID
	switch {
	case restart && ev.EventID <= 1, ev.Event.Kind == indexer.Cleared && !ev.Foreign:
		t.set(r, indexer.StateOK)
	case restart, v.gap && known:
		t.miss(now, r, indexer.StateSuspect)
	case v.gap:
		t.miss(now, r, indexer.StatePartial)
	}
	if restart {
		t.wipe(r)
	}
	t.deliver(r, &ev)
	return v
}

// deliver passes an event to the sink, unless the event has no effect.
func (t *tracker) deliver(r *rank, ev *RouterEvent) {
	switch {
	case ev.Body != nil:
		r.engine.take(ev.Body)
	case !ev.Foreign && ev.Event.Kind != 0:
		t.sink(r.RankName, ev.Event)
	}
}

// wipe clears a rank in the sink.
func (t *tracker) wipe(r *rank) {
	t.sink(r.RankName, indexer.Event{Kind: indexer.Cleared})
}

// miss notes a loss. A suspect rank does not become partial.
func (t *tracker) miss(now time.Time, r *rank, s indexer.State) {
	r.missed = now
	t.set(r, indexer.Worst(s, r.state))
}

func (t *tracker) set(r *rank, s indexer.State) {
	if r.state != s {
		r.state = s
		t.report(r)
	}
}

// report calls changed if the state to report is a new one.
func (t *tracker) report(r *rank) {
	s := r.state
	if t.stalled && t.streamed(r.WorkerID) {
		s = indexer.StateSuspect
	}
	if r.reported != s {
		r.reported = s
		t.changed(r.RankName, s)
	}
}

// stall notes whether the stream stores no events. Ranks without any event count as well:
// their content is unknown.
func (t *tracker) stall(now bool) {
	t.stalled = now
	if now {
		for _, id := range slices.Sorted(maps.Keys(t.workers)) {
			if src := t.workers[id]; src.Feed == FeedDurable {
				for n := range src.DPSize {
					t.rank(RankName{id, src.DPStart + n})
				}
			}
		}
	}
	for _, r := range t.ranks {
		t.report(r)
	}
}

// wait keeps an event until its worker is known.
func (t *tracker) wait(now time.Time, feed Feed, publisher uint64, ev RouterEvent) verdict {
	q := t.waiting[ev.WorkerID]
	if q == nil {
		if len(t.waiting) >= maxWaitingWorkers {
			return verdict{outcome: outcomeDropped}
		}
		q = &queue{since: now}
		t.waiting[ev.WorkerID] = q
	}
	if len(q.events) >= maxWaitingEvents {
		return verdict{outcome: outcomeDropped}
	}
	q.events = append(q.events, heldEvent{feed: feed, publisher: publisher, ev: ev})
	return verdict{outcome: outcomeWaiting}
}

// applyWaiting applies the events that waited for a worker.
func (t *tracker) applyWaiting(now time.Time, worker uint64) {
	q, src := t.waiting[worker], t.workers[worker]
	if q == nil {
		return
	}
	delete(t.waiting, worker)
	for _, h := range q.events {
		if src.takes(h.feed) && src.accepts(h.publisher) {
			t.apply(now, src, h.publisher, h.ev)
		}
	}
}

// forget removes a worker.
func (t *tracker) forget(worker uint64) {
	t.markUnsure(worker)
	delete(t.waiting, worker)
	delete(t.restored, worker)
	for _, r := range t.ranksOf(worker) {
		t.drop(r)
	}
	delete(t.workers, worker)
}

// markUnsure notes that the state of a worker in the snapshot that is read must not be
// used.
func (t *tracker) markUnsure(worker uint64) {
	if t.unsure != nil {
		t.unsure[worker] = struct{}{}
	}
}

// expire drops the events that waited too long for their worker, and returns their number.
// It ends the state partial of ranks without a recent loss, unless their missing events are still requested.
func (t *tracker) expire(now time.Time) (dropped map[Feed]int) {
	dropped = make(map[Feed]int)
	for key, q := range t.waiting {
		if now.Sub(q.since) >= maxWait {
			for i := range q.events {
				dropped[q.events[i].feed]++
			}
			delete(t.waiting, key)
		}
	}
	for _, r := range t.ranks {
		_, planned := t.repairs.timers[r]
		if r.state == indexer.StatePartial && r.repair == nil && !planned && now.Sub(r.missed) >= partialFor {
			t.set(r, indexer.StateOK)
		}
	}
	return dropped
}
