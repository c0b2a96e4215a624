// SPDX-License-Identifier: Apache-2.0

// Package localindex is the local indexer of a worker. It holds the cached blocks and the last
// events of each rank, and answers queries about them.
package localindex

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// Limits of the events that a worker keeps.
const (
	// ringEvents is the number of a rank's latest events that can be requested individually: some
	// seconds of a busy worker. A router that missed more receives a dump.
	ringEvents = 1024
	ringBlocks = 1 << 20 // 16 MB
)

// Index holds the cached blocks and the last events of each rank of a worker. One goroutine at a
// time may use it.
//
// Invariants, for each rank:
//
//   - The ring holds the events of consecutive ids up to last, at most ringEvents,
//     and at most ringBlocks blocks unless it is one event.
//   - The index is the result of the events 1 to last.
type Index struct{ ranks map[uint32]*rank }

type rank struct {
	index  *indexer.Index
	parked *indexer.Parked
	last   uint64

	ring   []events.RouterEvent // oldest first
	blocks int
}

// New returns an empty Index.
func New() *Index { return &Index{ranks: make(map[uint32]*rank)} }

func (l *Index) rank(dpRank uint32) *rank {
	r := l.ranks[dpRank]
	if r == nil {
		x := indexer.New(indexer.Config{})
		r = &rank{index: x, parked: indexer.NewParked(x)}
		l.ranks[dpRank] = r
	}
	return r
}

// Remember adds a final event. The ids of a rank must be consecutive.
func (l *Index) Remember(now time.Time, ev events.RouterEvent) {
	r := l.rank(ev.DPRank)
	r.parked.Expire(now)
	r.parked.Apply(now, 0, ev.Event)
	r.last = ev.EventID
	r.ring = append(r.ring, ev)
	r.blocks += events.Weight(&ev.Event)
	drop := 0
	for len(r.ring)-drop > ringEvents || r.blocks > ringBlocks && len(r.ring)-drop > 1 {
		r.blocks -= events.Weight(&r.ring[drop].Event)
		r.ring[drop] = events.RouterEvent{} // releases the memory that the event refers to
		drop++
	}
	r.ring = r.ring[drop:]
}

// Answer returns a function that makes the answer to a query as of now. The function must be
// called; it needs no lock. A dump has the worker's blocks, and then the events that wait for
// their parents.
func (l *Index) Answer(q *events.Query) func() events.Answer {
	r := l.ranks[q.DPRank]
	if r == nil {
		r = &rank{}
	}
	a := events.Answer{Kind: events.AnswerDump, LastEventID: r.last}
	first := r.last + 1 - uint64(len(r.ring))
	switch start := q.Start; {
	case q.HasStart && q.End > 0 && q.End < start:
		a = events.Answer{Kind: events.AnswerInvalidRange, Start: start, End: q.End}
	case q.HasStart && start > r.last:
		a.Kind, a.Start, a.End = events.AnswerTooNew, start, q.End
	case q.HasStart && max(start, 1) >= first:
		a.Kind, a.Events = events.AnswerEvents, slices.Clone(r.ring[max(start, 1)-first:])
	case r.index != nil:
		runs, stop := r.index.DumpNow()
		waiting := r.parked.Events()[0]
		return func() events.Answer {
			defer stop()
			evs, err := events.RankEvents(runs, 0)
			if err != nil {
				return events.Answer{Kind: events.AnswerDumpFailed, LastEventID: a.LastEventID, Message: err.Error()}
			}
			if i := slices.IndexFunc(waiting, func(ev indexer.Event) bool { return ev.Kind == indexer.Shaped }); i >= 0 {
				// Without it the blocks of a hybrid model would count in full until the last ones arrive.
				evs = slices.Insert(evs, 0, waiting[i])
			}
			a.Events = make([]events.RouterEvent, 0, len(evs)+len(waiting))
			for _, ev := range append(evs, waiting...) {
				a.Events = append(a.Events,
					events.RouterEvent{WorkerID: q.WorkerID, DPRank: q.DPRank, EventID: uint64(len(a.Events)) + 1, Event: ev})
			}
			return a
		}
	}
	return func() events.Answer { return a }
}

// Split splits an answer into parts. Each encoded part is small enough not to delay other messages
// of the connection.
func Split(a *events.Answer) []events.Answer {
	const maxPart = 512 << 10
	if a.Kind != events.AnswerEvents && a.Kind != events.AnswerDump {
		return []events.Answer{*a}
	}
	var parts []events.Answer
	evs := a.Events
	for {
		n, size := 0, 0
		for n < len(evs) {
			// An event takes up to 180 bytes, a block up to 64, a block id up to 9.
			s := 180 + 64*len(evs[n].Event.Blocks) + 9*len(evs[n].Event.Externals)
			if n > 0 && size+s > maxPart-1024 {
				break
			}
			size += s
			n++
		}
		part := *a
		part.Events = evs[:n:n]
		parts = append(parts, part)
		if evs = evs[n:]; len(evs) == 0 {
			return parts
		}
	}
}
