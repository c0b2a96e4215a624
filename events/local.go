// SPDX-License-Identifier: Apache-2.0

package events

import (
	"iter"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Bounds of what a worker keeps of its own events.
const (
	// ringEvents is how many events of a rank can be asked for one by one: some
	// seconds of a busy worker. Who missed more gets a dump.
	ringEvents = 1024
	ringBlocks = 1 << 20 // 16 MB
)

// local is the local indexer of a worker: what each rank holds, and its last
// events. It belongs to one goroutine at a time, except for the dumps that it
// hands out.
//
// Invariants, for each rank:
//
//   - The ring holds the events of consecutive ids up to last, at most ringEvents,
//     and at most ringBlocks blocks unless it is one event.
//   - The index is what events 1 to last make.
type local struct{ ranks map[uint32]*localRank }

type localRank struct {
	index  *indexer.Index
	parked *indexer.Parked
	last   uint64

	ring   []RouterEvent // oldest first
	blocks int
}

func newLocal() *local { return &local{ranks: make(map[uint32]*localRank)} }

func (l *local) rank(dpRank uint32) *localRank {
	r := l.ranks[dpRank]
	if r == nil {
		x := indexer.New(indexer.Config{})
		r = &localRank{index: x, parked: indexer.NewParked(x)}
		l.ranks[dpRank] = r
	}
	return r
}

// remember takes an event that got its final form. The ids of a rank come in
// order, with none left out.
func (l *local) remember(now time.Time, ev RouterEvent) {
	r := l.rank(ev.DPRank)
	r.parked.Expire(now)
	r.parked.Apply(now, 0, ev.Event)
	r.last = ev.EventID
	r.ring = append(r.ring, ev)
	r.blocks += weight(&ev.Event)
	drop := 0
	for len(r.ring)-drop > ringEvents || r.blocks > ringBlocks && len(r.ring)-drop > 1 {
		r.blocks -= weight(&r.ring[drop].Event)
		r.ring[drop] = RouterEvent{} // what it refers to can go
		drop++
	}
	r.ring = r.ring[drop:]
}

// weight is what an event weighs in memory, in blocks.
func weight(ev *indexer.Event) int { return 1 + len(ev.Blocks) + len(ev.Externals) }

// answer answers a query. What makes up a dump comes in content, to be read when
// nobody has to wait for it any more: it is what the worker holds now. Behind it
// belongs what is in the answer already: events that wait for their parents.
func (l *local) answer(q *Query) (a Answer, content *frozen) {
	r := l.ranks[q.DPRank]
	if r == nil {
		r = &localRank{}
	}
	first := r.last + 1 - uint64(len(r.ring))
	switch start := q.Start; {
	case q.HasStart && q.End > 0 && q.End < start:
		return Answer{Kind: AnswerInvalidRange, Start: start, End: q.End}, nil
	case q.HasStart && start > r.last:
		return Answer{Kind: AnswerTooNew, Start: start, End: q.End, LastEventID: r.last, HasLast: true}, nil
	case q.HasStart && max(start, 1) >= first:
		return Answer{Kind: AnswerEvents, Events: slices.Clone(r.ring[max(start, 1)-first:]), LastEventID: r.last, HasLast: true}, nil
	case r.index != nil:
		content = freeze(r.index)
		for _, ev := range r.parked.Waiting()[0] {
			a.Events = append(a.Events, RouterEvent{Event: ev})
		}
	}
	a.Kind, a.LastEventID, a.HasLast = AnswerDump, r.last, true
	return a, content
}

// frozen is what an index of one rank held at one moment. It must be read.
type frozen struct {
	runs iter.Seq2[indexer.Run, error]
	stop func()
}

func freeze(x *indexer.Index) *frozen {
	runs, stop := x.DumpNow()
	return &frozen{runs, stop}
}

// events returns events that make it.
func (f *frozen) events() ([]indexer.Event, error) {
	defer f.stop()
	return RankEvents(f.runs, 0)
}

// complete makes the content of a dump, if there is one, the events of an answer, in
// front of those that are there.
func (a *Answer) complete(q *Query, content *frozen) {
	if content == nil {
		return
	}
	evs, err := content.events()
	if err != nil {
		*a = Answer{Kind: AnswerDumpFailed, LastEventID: a.LastEventID, HasLast: a.HasLast, Message: err.Error()}
		return
	}
	waiting := a.Events
	a.Events = make([]RouterEvent, 0, len(evs)+len(waiting))
	for _, ev := range evs {
		a.Events = append(a.Events, RouterEvent{Event: ev})
	}
	a.Events = append(a.Events, waiting...)
	for i := range a.Events {
		ev := &a.Events[i]
		ev.WorkerID, ev.DPRank, ev.EventID = q.WorkerID, q.DPRank, uint64(i)+1
	}
}

// parts cuts an answer into parts whose encodings stay below the size at which
// they would have to wait for each other on a connection.
func (a *Answer) parts() []Answer {
	const maxPart = 512 << 10
	if a.Kind != AnswerEvents && a.Kind != AnswerDump {
		return []Answer{*a}
	}
	var parts []Answer
	evs := a.Events
	for {
		n, size := 0, 0
		for n < len(evs) {
			// An event takes up to 180 bytes, a block up to 64, a name up to 9.
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
