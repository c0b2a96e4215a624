// SPDX-License-Identifier: Apache-2.0

package events

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// answer applies the whole answer to a query. publisher is the one whose event ids it counts,
// or 0 if it does not name one.
func (t *tracker) answer(now time.Time, id, publisher uint64, a *Answer) {
	r := t.repairs.asked[id]
	if r == nil {
		t.count(0, "stale", 1)
		return
	}
	t.cancelQuery(r)
	delete(t.repairs.timers, r)
	t.dropOthers(r, a)
	t.count(r.WorkerID, a.Kind.String(), 1)
	if src := t.workers[r.WorkerID]; publisher != 0 && !src.accepts(publisher) {
		t.count(r.WorkerID, "foreign", 1) // the record does not name it yet, or another process answers
		t.retryOrGiveUp(now, r)
		return
	}
	if a.Kind == AnswerDump {
		t.replace(now, r, id, publisher, a)
		return
	}
	c := r.cursor()
	foreign := publisher != 0 && publisher != r.newest
	switch {
	case r.repair.dump:
		t.retryOrGiveUp(now, r)
	case foreign && (a.Kind == AnswerEvents || a.Kind == AnswerTooNew),
		a.Kind == AnswerTooNew && a.LastEventID < c.id:
		// The publisher restarted.
		t.requestDump(now, r)
	case a.Kind == AnswerTooNew && a.LastEventID == c.id:
		t.continueRepair(now, r, false)
	case a.Kind == AnswerEvents && c.continues(a):
		for i := range a.Events {
			if ev := &a.Events[i]; ev.EventID > r.cursor().id {
				t.advance(r, ev)
			}
		}
		t.continueRepair(now, r, r.cursor() != c)
	case a.Kind == AnswerEvents:
		t.count(r.WorkerID, "broken", 1)
		r.repair.dump = true
		t.retryOrGiveUp(now, r)
	default:
		t.retryOrGiveUp(now, r)
	}
}

// dropOthers removes the events of other ranks from an answer.
func (t *tracker) dropOthers(r *rank, a *Answer) {
	n := len(a.Events)
	a.Events = slices.DeleteFunc(a.Events,
		func(ev RouterEvent) bool { return ev.WorkerID != r.WorkerID || ev.DPRank != r.DPRank })
	if n -= len(a.Events); n > 0 {
		t.count(r.WorkerID, "lie", n)
		a.Bad += n
	}
}

// continues reports whether an answer has all events after the cursor. Events before a
// clear may be missing.
func (c cursor) continues(a *Answer) bool {
	next := c.id + 1
	for i := range a.Events {
		switch ev := &a.Events[i]; {
		case ev.EventID < next:
		case ev.EventID == next, ev.Event.Kind == indexer.Cleared:
			next = ev.EventID + 1
		default:
			return false
		}
	}
	return a.Bad == 0 && a.LastEventID == next-1
}

// continueRepair ends a repair if no event is held any more. Held events show another gap.
func (t *tracker) continueRepair(now time.Time, r *rank, moved bool) {
	before := r.cursor()
	if t.applyHeld(r) == 0 {
		t.repaired(now, r)
		return
	}
	rp := r.repair
	if !moved && r.cursor() == before {
		t.retryOrGiveUp(now, r)
		return
	}
	rp.tries = 0
	rp.dump, rp.step = !r.cursor().set, stepDelayed
	t.repairs.timers[r] = now.Add(t.repairs.jitter(gapSpread))
}

// replace makes a dump the content of a rank.
func (t *tracker) replace(now time.Time, r *rank, id, publisher uint64, a *Answer) {
	rp := r.repair
	if publisher != 0 && rp.newerPublisher(id, publisher) {
		t.retryOrGiveUp(now, r)
		return
	}
	if publisher == 0 {
		publisher = r.newest
		if n := len(rp.held); n > 0 {
			publisher = rp.held[n-1].publisher
		}
	}
	before := r.cursor()
	t.reject(now, r, publisher)
	r.newest, r.many = publisher, false
	clear(r.cursors)
	if a.LastEventID > 0 {
		r.cursors[publisher] = a.LastEventID
	}
	t.wipe(r)
	for i := range a.Events {
		if ev := &a.Events[i]; ev.Event.Kind != indexer.Cleared {
			t.deliver(r, ev)
		}
	}
	rp.reread = false
	if a.Bad > 0 {
		t.miss(now, r, indexer.StateSuspect)
	} else {
		t.set(r, indexer.StateOK)
	}
	t.continueRepair(now, r, r.cursor() != before)
}

// newerPublisher reports whether a publisher other than the given one sent its first event after
// query id. Then the process that answered the query may have ended.
func (rp *repair) newerPublisher(id, publisher uint64) bool {
	for i, h := range rp.held {
		if h.publisher != publisher && h.after >= id &&
			!slices.ContainsFunc(rp.held[:i], func(o heldEvent) bool { return o.publisher == h.publisher }) {
			return true
		}
	}
	return false
}

// reject ignores all publishers of a rank except the given one, for some time.
func (t *tracker) reject(now time.Time, r *rank, publisher uint64) {
	if r.rejected == nil {
		r.rejected = make(map[uint64]time.Time)
	}
	put := func(other uint64) {
		if other == 0 || other == publisher {
			return
		}
		if len(r.rejected) >= maxRejected {
			clear(r.rejected)
		}
		r.rejected[other] = now.Add(rejectFor)
	}
	put(r.newest)
	for _, h := range r.repair.held {
		put(h.publisher)
	}
	delete(r.rejected, publisher)
}
