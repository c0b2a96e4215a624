// SPDX-License-Identifier: Apache-2.0

// Package events carries what happens in the workers' caches from where it happens
// to where it counts: a [Publisher] beside each worker, a [Subscriber] in each
// router replica, NATS between them.
//
// A publisher numbers the events of each rank from 1 and batches them; the bytes
// are those of NVIDIA Dynamo's event plane from 1.6 on, so its workers are
// understood as they are. A subscriber brings each rank's events to the sink in
// order, once, and says what it missed.
//
// # What is promised
//
// For each (worker, rank), what the sink gets is a subsequence of what was
// published, in the same order, with no event twice. Events are missing only where
// they were lost on the way; then the rank counts as suspect: what was known of it
// stays, and may be partly wrong. When a worker's publisher starts anew its rank is
// cleared first: an empty process caches nothing. Events of a worker that the sink
// does not know yet wait for it, up to a bound.
//
// Nothing is repaired: what NATS core loses stays lost until the worker clears or
// stores it again.
//
// # Invariants of the subscriber
//
//   - The cursor of a (worker, rank, publisher) is the largest event id seen from
//     it, and only larger ids get through.
//   - While events of a worker wait, later ones of it wait behind them.
//   - Waiting events are at most 1,024 a worker, of at most 256 workers, for at
//     most 60 seconds; cursors are kept of at most 262,144 ranks.
//
// # Concurrency
//
// The methods of both types may be called by any number of goroutines. The sink is
// called by one at a time.
package events

import (
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Topic is the name of the event plane's topic for cache events.
const Topic = "kv-events"

// Sink takes an event of a worker's rank. It returns false, and does nothing, if it
// does not know the worker.
type Sink func(workerID uint64, dpRank uint32, ev indexer.Event) (known bool)

const (
	maxWaitingEvents  = 1024
	maxWaitingWorkers = 256
	maxWait           = 60 * time.Second
	// maxRanks is far above any fleet; it bounds what liars can make us keep.
	maxRanks = 1 << 18
)

// tracker keeps the cursors of all ranks and the events that wait. It is the
// subscriber without NATS, clock and lock.
type tracker struct {
	sink    Sink
	ranks   map[rankKey]*rank
	waiting map[uint64]*queue // by worker; never empty
}

type rankKey struct {
	worker uint64
	rank   uint32
}

type rank struct {
	cursors map[uint64]uint64 // by publisher
	newest  uint64            // the publisher that was heard first last
	many    bool              // two publishers at a time: nothing is cleared any more
}

// maxPublishers bounds the cursors of a rank. More than two are somebody's mistake.
const maxPublishers = 8

type queue struct {
	since  time.Time
	events []RouterEvent
}

// verdict says what became of an event.
type verdict struct {
	duplicate bool // dropped
	gap       bool // events before it are missing
	restart   bool // of a new publisher: its rank was cleared first
	many      bool // an older publisher of the rank was heard again
	waiting   bool // the worker is not known yet
	dropped   bool // there was no room to wait
}

func newTracker(sink Sink) *tracker {
	return &tracker{sink: sink, ranks: make(map[rankKey]*rank), waiting: make(map[uint64]*queue)}
}

// accept takes one event from a publisher.
func (t *tracker) accept(now time.Time, publisher uint64, ev RouterEvent) verdict {
	var v verdict
	key := rankKey{ev.WorkerID, ev.DPRank}
	r := t.ranks[key]
	if r == nil {
		if len(t.ranks) >= maxRanks {
			v.dropped = true
			return v
		}
		r = &rank{cursors: make(map[uint64]uint64, 1)}
		t.ranks[key] = r
	}
	cursor, heard := r.cursors[publisher]
	switch {
	case heard && ev.EventID <= cursor:
		v.duplicate = true
		// An old publisher that says old things is none.
		return v
	case heard:
		v.gap = ev.EventID > cursor+1
		if publisher != r.newest && !r.many {
			r.many, v.many = true, true
		}
	case len(r.cursors) == 0:
		v.gap = ev.EventID > 1 // we came late
	case !r.many:
		v.restart = true
	}
	if !heard {
		if len(r.cursors) >= maxPublishers {
			clear(r.cursors)
		}
		r.newest = publisher
	}
	r.cursors[publisher] = ev.EventID

	if v.restart {
		t.deliver(now, &v, RouterEvent{WorkerID: ev.WorkerID, DPRank: ev.DPRank, Event: indexer.Event{Kind: indexer.Cleared}})
	}
	if !ev.Foreign && ev.Event.Kind != 0 {
		t.deliver(now, &v, ev)
	}
	if v.dropped && t.waiting[ev.WorkerID] == nil {
		delete(t.ranks, key) // nothing of it is kept, so its cursor means nothing
	}
	return v
}

// deliver gives an event to the sink, or lets it wait for its worker.
func (t *tracker) deliver(now time.Time, v *verdict, ev RouterEvent) {
	q := t.waiting[ev.WorkerID]
	if q == nil {
		if t.sink(ev.WorkerID, ev.DPRank, ev.Event) {
			return
		}
		if len(t.waiting) >= maxWaitingWorkers {
			v.dropped = true
			return
		}
		q = &queue{since: now}
		t.waiting[ev.WorkerID] = q
	}
	if len(q.events) >= maxWaitingEvents {
		v.dropped = true
		return
	}
	v.waiting = true
	q.events = append(q.events, ev)
}

// known delivers what waited for a worker.
func (t *tracker) known(worker uint64) {
	q := t.waiting[worker]
	if q == nil {
		return
	}
	delete(t.waiting, worker)
	for _, ev := range q.events {
		// A rank that the worker does not have keeps nobody waiting.
		t.sink(ev.WorkerID, ev.DPRank, ev.Event)
	}
}

// forget drops cursors and waiting events of a worker.
func (t *tracker) forget(worker uint64) {
	delete(t.waiting, worker)
	for key := range t.ranks {
		if key.worker == worker {
			delete(t.ranks, key)
		}
	}
}

// expire forgets workers that nobody got to know in time, and returns how many
// events went with them.
func (t *tracker) expire(now time.Time) (dropped int) {
	for worker, q := range t.waiting {
		if now.Sub(q.since) >= maxWait {
			dropped += len(q.events)
			t.forget(worker)
		}
	}
	return dropped
}
