// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Bounds and times of repairs.
const (
	maxQueries = 64
	maxDumps   = 8
	// The back-off doubles from firstBackoff to lastBackoff: 17 s for maxTries, and up to queryTimeout for each query.
	maxTries     = 8
	firstBackoff = 200 * time.Millisecond
	lastBackoff  = 5 * time.Second
	queryTimeout = 30 * time.Second
	suspectEvery = time.Minute // a suspect rank is read again

	// Random delays of queries. Replicas that see the same gap do not send queries at the same
	// time, and an event that is only late arrives before the query.
	gapSpread       = 50 * time.Millisecond
	discoverySpread = 100 * time.Millisecond
	auditSpread     = 2 * time.Second

	// maxHeldEvents and maxHeldBlocks bound the events after a gap of one rank, maxAllHeld those of all ranks.
	maxHeldEvents = 4096
	maxHeldBlocks = 1 << 20
	maxAllHeld    = 8 << 20 // blocks: 128 MB

	// rejectFor is how long a publisher is ignored after an answer of the worker named
	// another one. A later process of the worker may have the ignored one.
	rejectFor   = 10 * time.Second
	maxRejected = 8
)

// repair brings the index of a rank back to the content of its worker. Its steps:
//
//	delayed ──time──► ready ──a query is free──► asked ──answer──► done, or delayed again
//	   ▲                                           │
//	   └──────────── failure, backoff ─────────────┘   after maxTries: given up
//
// A range becomes a dump when the answer does not continue after the cursor, when another
// publisher sends, or when too many events are held.
type repair struct {
	dump   bool // a query for the whole content, else for the events after the cursor
	step   step
	id     uint64 // of the query, if asked
	tries  int
	reread bool // of a faulty rank: one try; events are applied at once, and again after the whole content
	held   []heldEvent
	blocks int // in held
}

type step uint8

const (
	stepDelayed step = iota
	stepReady
	stepAsked
)

// repairs is the state of all repairs.
type repairs struct {
	rng    *rand.Rand
	timers map[*rank]time.Time // when the next step of a rank is due
	ready  []*rank             // ready, or no longer
	asked  map[uint64]*rank    // by query
	queued int                 // number of dumps in asked
	last   uint64              // id of a query
	blocks int                 // held
}

func (p *repairs) jitter(spread time.Duration) time.Duration {
	return time.Duration(p.rng.Int64N(int64(spread)))
}

// ask is a query to send.
type ask struct {
	id    uint64
	query Query
}

// cursor is the id of the last event applied; not set before the first one.
type cursor struct {
	id  uint64
	set bool
}

// rejects reports whether events of a publisher are ignored for some time.
func (r *rank) rejects(now time.Time, publisher uint64) bool {
	return publisher != r.newest && now.Before(r.rejected[publisher])
}

func (r *rank) cursor() cursor {
	id, set := r.cursors[r.newest]
	return cursor{id, set}
}

// next reports whether no event is missing before id. The first id is 1, or 0.
func (c cursor) next(id uint64) bool {
	if c.set {
		return id == c.id+1
	}
	return id <= 1
}

// follow accepts an event of a rank whose worker answers queries.
func (t *tracker) follow(now time.Time, r *rank, publisher uint64, ev RouterEvent) (v verdict) {
	rp := r.repair
	if rp != nil && !rp.reread {
		return t.hold(now, r, publisher, ev)
	}
	if r.state == indexer.StateSuspect {
		// The worker does not answer: treat it like a worker without a local indexer.
		v = t.applyAcrossGap(now, r, publisher, ev)
		switch {
		case r.state == indexer.StateOK:
			// The cache was cleared, so nothing before this event is missing any more. A
			// dump that was requested before would put the rank back to before it.
			t.endRepair(r)
		case rp != nil && v.outcome != outcomeDuplicate:
			t.addHeld(now, r, publisher, ev)
		}
		return v
	}
	if r.newest == 0 && publisher != 0 {
		// The dump did not name the publisher whose ids it counts.
		if id, ok := r.cursors[0]; ok {
			r.cursors[publisher] = id
			delete(r.cursors, 0)
		}
		r.newest = publisher
	}
	c := r.cursor()
	switch {
	case r.rejects(now, publisher):
		return verdict{outcome: outcomeMany}
	case publisher != r.newest:
		// The answer shows whether the worker restarted, or the event is forged.
		t.startRepair(now, r, true, t.repairs.jitter(gapSpread))
		v = t.hold(now, r, publisher, ev)
		v.outcome = outcomeRestart
		return v
	case c.next(ev.EventID):
		t.advance(r, &ev)
		return verdict{outcome: outcomeAccepted}
	case c.set && ev.EventID <= c.id:
		return verdict{outcome: outcomeDuplicate}
	}
	t.startRepair(now, r, !c.set, gapSpread/5+t.repairs.jitter(gapSpread))
	v = t.hold(now, r, publisher, ev)
	v.outcome, v.gap = outcomeGap, true
	return v
}

// advance applies the next event.
func (t *tracker) advance(r *rank, ev *RouterEvent) {
	r.cursors[r.newest] = ev.EventID
	t.deliver(r, ev)
}

// hold keeps an event until the end of the repair, or until no event is missing before it.
func (t *tracker) hold(now time.Time, r *rank, publisher uint64, ev RouterEvent) verdict {
	rp := r.repair
	if !rp.dump {
		c := r.cursor()
		switch {
		case r.rejects(now, publisher):
			return verdict{outcome: outcomeMany}
		case publisher != r.newest:
			t.requestDump(now, r)
		case ev.EventID <= c.id:
			return verdict{outcome: outcomeDuplicate}
		case ev.EventID == c.id+1:
			t.advance(r, &ev)
			if t.applyHeld(r) == 0 {
				t.repaired(now, r) // the missing event was only late
			}
			return verdict{outcome: outcomeAccepted}
		}
	}
	t.addHeld(now, r, publisher, ev)
	return verdict{outcome: outcomeHeld, held: true}
}

// addHeld adds a held event.
func (t *tracker) addHeld(now time.Time, r *rank, publisher uint64, ev RouterEvent) {
	rp, h := r.repair, heldEvent{publisher: publisher, ev: ev, after: t.repairs.last}
	if w := h.weight(); len(rp.held) >= maxHeldEvents || rp.blocks+w > maxHeldBlocks || t.repairs.blocks+w > maxAllHeld {
		t.count(r.WorkerID, "spilled", len(rp.held))
		t.release(rp) // this event shows later that they are missing
		t.requestDump(now, r)
	}
	t.add(rp, h)
}

func (t *tracker) add(rp *repair, h heldEvent) {
	rp.held = append(rp.held, h)
	rp.blocks += h.weight()
	t.repairs.blocks += h.weight()
}

func (t *tracker) release(rp *repair) {
	t.repairs.blocks -= rp.blocks
	rp.held, rp.blocks = nil, 0
}

// startRepair begins a repair of a rank, or turns a running one into a dump.
func (t *tracker) startRepair(now time.Time, r *rank, dump bool, delay time.Duration) {
	switch {
	case r.repair == nil:
		r.repair = &repair{dump: dump}
		t.repairs.timers[r] = now.Add(delay)
	case dump:
		t.requestDump(now, r)
	}
}

// requestDump makes a repair request a dump instead of a range.
func (t *tracker) requestDump(now time.Time, r *rank) {
	rp := r.repair
	if rp.dump {
		return
	}
	t.cancelQuery(r)
	rp.dump, rp.step = true, stepDelayed
	t.repairs.timers[r] = now.Add(t.repairs.jitter(gapSpread))
}

// cancelQuery drops the query of a repair.
func (t *tracker) cancelQuery(r *rank) {
	rp := r.repair
	if rp.step != stepAsked {
		return
	}
	delete(t.repairs.asked, rp.id)
	if rp.dump {
		t.repairs.queued--
	}
	rp.step = stepDelayed
}

// endRepair ends a repair in any step.
func (t *tracker) endRepair(r *rank) {
	if rp := r.repair; rp != nil {
		t.cancelQuery(r)
		t.release(rp)
		r.repair = nil
	}
	delete(t.repairs.timers, r)
}

// repaired ends a repair that has succeeded.
func (t *tracker) repaired(now time.Time, r *rank) {
	t.endRepair(r)
	if r.state == indexer.StateSuspect { // part of the answer could not be read
		t.planRereading(now, r)
	}
	if r.state == indexer.StatePartial { // its first events are missing, too
		t.startRepair(now, r, true, t.repairs.jitter(gapSpread))
	}
}

func sortByID(held []heldEvent) {
	slices.SortStableFunc(held, func(a, b heldEvent) int { return cmp.Compare(a.ev.EventID, b.ev.EventID) })
}

// applyHeld applies the held events that follow the cursor, and returns how many still wait.
func (t *tracker) applyHeld(r *rank) int {
	rp := r.repair
	held := slices.DeleteFunc(rp.held, func(h heldEvent) bool { return h.publisher != r.newest })
	sortByID(held)
	n := 0
	for ; n < len(held); n++ {
		ev := &held[n].ev
		c := r.cursor()
		if c.next(ev.EventID) {
			t.advance(r, ev)
		} else if !c.set || ev.EventID > c.id {
			break
		}
	}
	held = slices.Clone(held[n:])
	t.release(rp)
	rp.held = held
	for i := range held {
		rp.blocks += held[i].weight()
	}
	t.repairs.blocks += rp.blocks
	return len(held)
}

// tick does what is due: repairs become ready, queries without an answer fail, and suspect ranks are read again.
func (t *tracker) tick(now time.Time) {
	var due []*rank
	for r, at := range t.repairs.timers {
		if !now.Before(at) {
			due = append(due, r)
		}
	}
	slices.SortFunc(due, func(a, b *rank) int {
		return cmp.Or(t.repairs.timers[a].Compare(t.repairs.timers[b]), compareRanks(a, b))
	})
	for _, r := range due {
		delete(t.repairs.timers, r)
		rp := r.repair
		switch {
		case rp == nil && r.engine != nil:
			r.engine.RequestAll(now)
		case rp == nil:
			r.repair = &repair{dump: true, reread: true}
			t.ready(r)
		case rp.step == stepAsked:
			t.count(r.WorkerID, "timeout", 1)
			t.cancelQuery(r)
			t.retryOrGiveUp(now, r)
		default:
			t.ready(r)
		}
	}
}

func (t *tracker) ready(r *rank) {
	r.repair.step = stepReady
	if !r.listed {
		r.listed = true
		t.repairs.ready = append(t.repairs.ready, r)
	}
}

// queries returns the queries to send now to reachable workers.
func (t *tracker) queries(now time.Time, reached func(worker uint64) bool) (asks []ask) {
	p := &t.repairs
	p.ready = slices.DeleteFunc(p.ready, func(r *rank) bool {
		if rp := r.repair; rp != nil && rp.step == stepReady {
			if len(p.asked) >= maxQueries || rp.dump && p.queued >= maxDumps || !reached(r.WorkerID) {
				return false
			}
			asks = append(asks, t.query(now, r))
		}
		r.listed = false
		return true
	})
	return asks
}

func (t *tracker) query(now time.Time, r *rank) ask {
	p, rp := &t.repairs, r.repair
	p.last++
	rp.step, rp.id = stepAsked, p.last
	p.asked[rp.id] = r
	p.timers[r] = now.Add(queryTimeout)
	q := Query{WorkerID: r.WorkerID, DPRank: r.DPRank}
	if rp.dump {
		p.queued++
		t.count(r.WorkerID, "ask_dump", 1)
	} else {
		q.HasStart, q.Start = true, r.cursor().id+1
		t.count(r.WorkerID, "ask_range", 1)
	}
	if rp.tries > 0 {
		t.count(r.WorkerID, "retry", 1)
	}
	return ask{rp.id, q}
}

// queryFailed ends a query without an answer.
func (t *tracker) queryFailed(now time.Time, id uint64, why string) {
	if r := t.repairs.asked[id]; r != nil {
		t.count(r.WorkerID, why, 1)
		t.cancelQuery(r)
		t.retryOrGiveUp(now, r)
	}
}

// retryOrGiveUp plans the next try of a repair, or gives the repair up. A rereading has one try.
func (t *tracker) retryOrGiveUp(now time.Time, r *rank) {
	rp := r.repair
	switch rp.tries++; {
	case rp.tries < maxTries && !rp.reread:
		backoff := min(firstBackoff<<(rp.tries-1), lastBackoff)
		rp.step = stepDelayed
		t.repairs.timers[r] = now.Add(backoff*3/4 + t.repairs.jitter(backoff/2))
	case r.engine != nil:
		t.gaveUp(r.RankName)
		r.engine.giveUp(now)
	case rp.reread:
		t.endRepair(r)
		t.planRereading(now, r)
	default:
		t.giveUp(now, r)
	}
}

// planRereading plans the next reading of a suspect rank.
func (t *tracker) planRereading(now time.Time, r *rank) {
	t.repairs.timers[r] = now.Add(suspectEvery*3/4 + t.repairs.jitter(suspectEvery/2))
}

// giveUp applies the held events across the gap. The rank is suspect then.
func (t *tracker) giveUp(now time.Time, r *rank) {
	held := r.repair.held
	t.endRepair(r)
	for _, h := range slices.Backward(held) {
		if h.publisher != r.newest && !r.rejects(now, h.publisher) {
			// A new publisher, and no answer contradicts it.
			clear(r.cursors)
			r.newest = h.publisher
			t.wipe(r)
			break
		}
	}
	sortByID(held)
	for i := range held {
		if c := r.cursor(); held[i].publisher == r.newest && (!c.set || held[i].ev.EventID > c.id) {
			t.advance(r, &held[i].ev)
		}
	}
	t.count(r.WorkerID, "given_up", 1)
	t.gaveUp(r.RankName)
	t.miss(now, r, indexer.StateSuspect)
	t.planRereading(now, r)
}

// audit queries the ranks of workers with a local indexer, except suspect ones and those under
// repair: any event may have been lost.
func (t *tracker) audit(now time.Time) {
	var steady []*rank
	for _, r := range t.ranks {
		if t.workers[r.WorkerID].Queries && r.repair == nil && r.state != indexer.StateSuspect {
			steady = append(steady, r)
		}
	}
	slices.SortFunc(steady, compareRanks)
	for _, r := range steady {
		t.startRepair(now, r, !r.cursor().set, t.repairs.jitter(auditSpread))
	}
}

// missed queries a rank at once: it is reachable again, and events may have been lost before.
func (t *tracker) missed(now time.Time, worker uint64, dpRank uint32) {
	r := t.ranks[RankName{worker, dpRank}]
	if r == nil || !t.workers[worker].Queries {
		return
	}
	soon := now.Add(t.repairs.jitter(gapSpread))
	switch rp := r.repair; {
	case rp == nil && r.state == indexer.StateSuspect: // the timer of its next reading
		t.repairs.timers[r] = soon
	case rp == nil:
		t.startRepair(now, r, !r.cursor().set, soon.Sub(now))
	case rp.step == stepDelayed:
		rp.tries = 0
		t.repairs.timers[r] = soon
	}
}

// doubt reads a rank again: the sink could not apply an event.
func (t *tracker) doubt(now time.Time, worker uint64, dpRank uint32) {
	r := t.ranks[RankName{worker, dpRank}]
	switch {
	case r == nil:
	case !t.workers[worker].Queries:
		t.miss(now, r, indexer.StateSuspect)
	case r.state != indexer.StateSuspect:
		t.startRepair(now, r, true, t.repairs.jitter(discoverySpread))
	}
}
