// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bytes"
	"math"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvroute/kvroute/indexer"
)

// Follower puts the batches of one rank of an engine in order: the live batches, and those that the
// engine sends again on request. It has no sockets, clock or lock. Gaps are repaired as those of a
// worker with a local indexer: tries, times, states and the order of events are the tracker's.
//
// Engines number batches from 0 in each process, name no publisher, and send nothing when a process ends. A new
// process is detected in three ways. A live number is not above the previous one of its connection, or not above the
// last known number when the connection began. An answer begins with the last known batch, but its content differs. An
// answer does not contain that batch, and the port was closed or the answer has no batch. Therefore requests begin
// with the last known batch, not with the next one.
//
// A proxy in front of the engine can hide that the port was closed. Then an answer that begins after
// the last known batch leaves open whose batches these are, and the rank becomes suspect. Without
// requests, a new process that continues the old one's numbers is not detected.
//
// An answer is applied while it arrives: it may have 10,000 batches. A long answer may lack batches that the engine
// has, because its socket drops messages that do not fit into its queue. Therefore a gap inside an answer is requested
// once more, from the last known batch. Batches that are missing again are lost.
//
// # Invariants
//
//   - The batches applied between two clears are a subsequence of those that one process published, in
//     order, without duplicates; behind a proxy, of several processes if the rank is suspect.
//   - No batch is missing between them unless the rank is suspect, and none before them unless it is
//     partial or suspect.
//   - While an answer is expected, live batches wait: at most maxHeldEvents with at most 64 MB. If a faulty rank is
//     read again, they are applied at once, and copies wait until the answer has replaced the known blocks.
type Follower struct {
	conf FollowerConfig
	t    *tracker // of one rank
	r    *rank

	digest uint64 // of the last batch
	// unavailable: the engine no longer has the missing batches: none is requested again until a clear or a restart.
	unavailable bool
	recheck     bool // request everything after the next answer, if possible

	// The connection.
	fresh  bool   // no batch arrived on it yet
	floor  uint64 // the newest id that arrived on it, or the last one when it began: a process sends only larger ones
	closed bool   // the port was closed before it, and no answer came since

	replaced int // answers over it that were another process's than expected

	// The request to the engine, while the rank has a repair.
	requests int    // so far
	from     uint64 // the last known id when it was sent, from which on it requests batches; 0 for all
	rebuild  bool   // an answer from 0 replaces the known blocks
	renews   bool   // such an answer has begun, the rank was faulty, and the answer lacks no batch
	answered bool   // the answer had a requested batch
	again    int    // requests since the rank was last in order, for a gap in the batches that wait
	holes    int    // requests since then because of a gap inside an answer
	hole     bool   // the last of them began at the batch that is still the last
}

// FollowerConfig configures a [Follower]. All fields are required.
type FollowerConfig struct {
	Replays bool // the engine answers requests
	// Apply applies a batch, and reports whether the engine cleared its cache in it.
	Apply func(body []byte) (cleared bool)
	// Clear forgets the blocks of the rank.
	Clear func()
	// Count counts a happening by its name in docs/metrics.md.
	Count func(what string, n int)
	// GaveUp is called when an engine has not answered several tries, or the only try to read a faulty rank again.
	GaveUp func()
}

const (
	// maxAgain limits the requests for a gap that an answer did not fill.
	maxAgain = 2
	// maxHoles limits the requests because of gaps inside an answer. After that many, the engine
	// is assumed not to have the missing batches. An engine's queue of 1,000 messages loses some
	// of its 10,000 batches ten times at most.
	maxHoles = 50
	// blockBytes is the memory of a batch that counts as a block.
	blockBytes = 64
)

// NewFollower returns a follower without a connection.
func NewFollower(conf FollowerConfig) *Follower {
	f := &Follower{conf: conf, t: newTracker(nil)}
	f.t.workers[0] = Source{Queries: conf.Replays}
	f.t.gaveUp = func(RankName) {
		if !f.r.repair.reread { // otherwise the rank was faulty before
			conf.Count("given_up", 1)
		}
		conf.GaveUp()
	}
	f.t.count = func(_ uint64, what string, n int) {
		switch what {
		case "ask_range":
			conf.Count("replay", n)
		case "timeout", "unanswered":
			conf.Count("replay_failed", n)
		case "retry":
			conf.Count(what, n)
		}
	}
	f.r = f.t.rank(RankName{})
	f.r.engine = f
	return f
}

// State returns how well the cache is known.
func (f *Follower) State() indexer.State { return f.r.state }

// Last returns the number and the digest of the last applied batch, if any since the last clear.
func (f *Follower) Last() (sequence, digest uint64, known bool) {
	return f.last() - 1, f.digest, f.last() > 0
}

// last returns the id of the last batch, or 0. The id of a batch is its number plus one.
func (f *Follower) last() uint64 { return f.r.cursors[0] }

// Requests returns the number of requests so far. If it has changed, Tick is due.
func (f *Follower) Requests() int { return f.requests }

// Continue makes a batch, which an earlier process of kvroute has applied, the last one.
func (f *Follower) Continue(sequence, digest uint64) { f.r.cursors[0], f.digest = sequence+1, digest }

// Recheck requests all batches after the next answer, if the rank is faulty then.
func (f *Follower) Recheck() { f.recheck = true }

// Miss notes that events are missing. A suspect rank does not become partial.
func (f *Follower) Miss(now time.Time, s indexer.State) { f.t.miss(now, f.r, s) }

// Connected starts a new connection. closed means that the engine's port was closed since the previous connection.
func (f *Follower) Connected(now time.Time, closed bool) {
	f.fresh, f.floor, f.replaced = true, f.last(), 0
	f.closed = f.floor > 0 && (closed || f.closed)
	if rp := f.r.repair; rp != nil {
		f.t.release(rp) // the answer must contain these batches again; otherwise they are missing
	}
	switch {
	case f.conf.Replays:
		f.again, f.holes, f.hole, f.rebuild = 0, 0, false, false
		f.request(now)
	case f.closed:
		f.Restart()
	}
}

// request plans a request for the batches after the cursor, or for all of them. It replaces the one under way.
func (f *Follower) request(now time.Time) {
	if f.r.repair != nil {
		f.t.cancelQuery(f.r)
		f.r.repair.tries = 0
	} else {
		f.r.repair = &repair{}
	}
	f.r.repair.reread = f.rebuild && f.r.state != indexer.StateOK
	f.t.repairs.timers[f.r] = now
	f.answered = false
	f.requests++
}

// RequestMore plans a request for later batches, unless one is due or under way.
func (f *Follower) RequestMore(now time.Time) {
	if f.conf.Replays && f.r.repair == nil {
		f.request(now)
	}
}

// RequestAll plans a request for all batches, to replace a faulty state, if the engine may have them.
func (f *Follower) RequestAll(now time.Time) {
	if f.r.state != indexer.StateOK {
		f.Reread(now)
	}
}

// Reread is RequestAll, although no batch is known to be missing: the known blocks seem wrong. The rank becomes
// suspect if the engine does not answer. It reports whether a request is due or under way.
func (f *Follower) Reread(now time.Time) (requested bool) {
	if f.conf.Replays && !f.unavailable && f.r.repair == nil {
		f.rebuild, f.again = true, 0
		f.request(now)
	}
	return f.r.repair != nil
}

// Tick does what is due. It returns the request to send now, if any: its number, and the sequence from which on
// batches are requested. wait is the time until the next Tick is due.
func (f *Follower) Tick(now time.Time) (id, from uint64, wait time.Duration) {
	f.t.tick(now)
	f.plan(now) // before expire: a partial rank that is still requested stays partial
	f.t.expire(now)
	for _, a := range f.t.queries(now, func(uint64) bool { return true }) {
		if id, f.answered, f.from = a.id, false, f.last(); f.rebuild {
			f.from = 0
		}
	}
	wait = partialFor
	if at, planned := f.t.repairs.timers[f.r]; planned {
		wait = at.Sub(now)
	} else if f.r.state == indexer.StatePartial {
		wait = f.r.missed.Add(partialFor).Sub(now)
	}
	return id, max(f.from, 1) - 1, wait
}

// plan plans the next reading of a faulty rank, unless one is planned.
func (f *Follower) plan(now time.Time) {
	if f.r.repair != nil {
		return
	}
	_, planned := f.t.repairs.timers[f.r]
	switch needed := f.r.state != indexer.StateOK && f.conf.Replays && !f.unavailable; {
	case !needed:
		delete(f.t.repairs.timers, f.r)
	case !planned:
		f.t.planRereading(now, f.r)
	}
}

func (f *Follower) asks(id uint64) bool { return f.t.repairs.asked[id] != nil }

// Restart forgets the batches of the previous process.
func (f *Follower) Restart() {
	f.conf.Count("restart", 1)
	f.forget()
	f.conf.Clear()
}

// replace is Restart after an answer, and requests the batches of the new process. Only an engine whose answers
// contradict each other is replaced several times over one connection: then the request waits.
func (f *Follower) replace(now time.Time) {
	f.Restart()
	f.request(now)
	if f.replaced > 0 {
		f.t.repairs.timers[f.r] = now.Add(min(firstBackoff<<min(f.replaced-1, 8), lastBackoff))
	}
	f.replaced++
}

func (f *Follower) forget() {
	clear(f.r.cursors)
	f.closed, f.rebuild, f.renews, f.holes, f.hole = false, false, false, 0, false
	if f.fresh {
		f.floor = 0
	}
	f.Whole()
}

// Whole marks the rank as complete.
func (f *Follower) Whole() {
	f.t.set(f.r, indexer.StateOK)
	f.unavailable = false
}

// Live handles a batch that the engine has just published. The caller may change the body afterwards.
func (f *Follower) Live(now time.Time, sequence uint64, body []byte) {
	ev := RouterEvent{EventID: sequence + 1, Body: body}
	if ev.EventID <= f.floor {
		f.t.endRepair(f.r) // the batches that wait are of the old process
		f.Restart()
	}
	f.fresh, f.floor = false, ev.EventID
	switch {
	case f.r.repair != nil && !f.r.repair.reread:
		f.hold(now, ev)
	case ev.EventID <= f.last():
		f.conf.Count("duplicate", 1)
	case f.r.repair != nil:
		if f.accept(now, &ev); f.r.state != indexer.StateOK {
			f.hold(now, ev) // the answer replaces the known blocks
			return
		}
		f.rebuild = false // the engine cleared its cache: nothing is missing any more
		f.t.endRepair(f.r)
	case ev.EventID == f.last()+1 || !f.conf.Replays, f.r.state == indexer.StateSuspect && !f.unavailable:
		f.accept(now, &ev) // a suspect rank is read again in any case
	default:
		f.conf.Count("gap", 1)
		f.again = 0
		f.request(now)
		f.hold(now, ev)
	}
}

func (f *Follower) hold(now time.Time, ev RouterEvent) {
	ev.Body = bytes.Clone(ev.Body)
	rp := f.r.repair
	if f.t.add(rp, heldEvent{ev: ev}); len(rp.held) > maxHeldEvents || rp.blocks > maxHeldBlocks {
		f.conf.Count("buffer_full", 1)
		f.giveUp(now)
	}
}

// accept applies a batch. Batches missing before it are lost.
func (f *Follower) accept(now time.Time, ev *RouterEvent) {
	if n := ev.EventID - f.last() - 1; n > 0 {
		f.conf.Count("lost", int(min(n, math.MaxInt32)))
	}
	f.t.applyAcrossGap(now, f.r, 0, *ev)
}

// take applies a batch whose place is known. The tracker calls it.
func (f *Follower) take(body []byte) {
	f.digest, f.hole = xxh3.Hash(body), false
	if f.conf.Apply(body) {
		f.Whole()
	}
}

// Part handles a batch of the answer to a request. It reports whether more batches of the answer are needed.
func (f *Follower) Part(now time.Time, id, sequence uint64, body []byte) (more bool) {
	if f.asks(id) {
		f.part(now, sequence, body)
	}
	return f.asks(id)
}

func (f *Follower) part(now time.Time, sequence uint64, body []byte) {
	ev, first := RouterEvent{EventID: sequence + 1, Body: body}, !f.answered
	switch {
	case first && f.from > 0 && ev.EventID == f.from: // the id of number 2^64-1 is 0, which is no batch's
		f.answered, f.closed = true, false
		if xxh3.Hash(body) != f.digest {
			f.replace(now)
		}
		return
	case first && ev.EventID > f.from && f.closed:
		// The last known batch is missing from the answer and the port was closed: this is another process.
		f.replace(now)
		return
	case first && f.from > 0 && ev.EventID > f.from:
		// Another process behind a proxy, or the engine no longer has the last known batch.
		f.unavailable, f.renews = true, false
		f.t.miss(now, f.r, indexer.StateSuspect)
	case first && f.rebuild && sequence > 0: // the engine no longer has the first batches; keep the known blocks
		if f.unavailable = true; f.r.state == indexer.StateOK {
			f.applyHeld(now, false) // no batch is known to be missing
		} else {
			f.giveUp(now)
		}
		return
	case first && f.rebuild:
		was := f.r.state
		f.r.repair.reread = false
		f.forget()
		f.conf.Clear()
		f.renews = was != indexer.StateOK
		f.t.set(f.r, was) // until the end of the answer
	case ev.EventID <= f.last():
		return
	}
	f.answered = true
	if ev.EventID > f.last()+1 {
		if !first && !f.hole && f.holes < maxHoles {
			f.conf.Count("replay_cut", 1)
			f.request(now)
			f.hole = true
			f.holes++
			return
		}
		f.unavailable, f.renews = true, false // the engine has no further batches
	}
	f.conf.Count("replayed", 1)
	f.accept(now, &ev)
}

// End handles the end of the answer to a request.
func (f *Follower) End(now time.Time, id uint64) {
	if !f.asks(id) {
		return
	}
	switch {
	case f.from > 0 && !f.answered:
		// The engine does not have the last known batch: this is another process.
		f.replace(now)
		return
	case f.rebuild && !f.answered:
		f.Restart() // the engine has no batches, so the known ones belong to another process
	}
	if f.renews {
		f.Whole()
	}
	f.holes, f.hole = 0, false
	f.conf.Count("events", 1)
	f.applyHeld(now, f.again >= maxAgain)
	if f.recheck {
		f.recheck = false
		f.RequestAll(now)
	}
}

// Fail handles the failure of a request. cut means that the rest of a long answer may have been dropped: if the
// answer had batches, later ones are requested at once.
func (f *Follower) Fail(now time.Time, id uint64, cut bool) {
	switch {
	case !f.asks(id):
	case cut && !f.rebuild && f.last() > max(f.from, 1):
		f.conf.Count("replay_cut", 1)
		f.request(now)
	default:
		f.t.queryFailed(now, id, "unanswered")
	}
}

// giveUp ends a request without an answer.
func (f *Follower) giveUp(now time.Time) {
	if f.closed && !f.answered {
		f.Restart()
	}
	switch { // it is unknown which batches the answer would have contained
	case f.r.repair.reread:
		f.t.release(f.r.repair) // they were applied at once
	case f.last() > 0:
		f.t.miss(now, f.r, indexer.StateSuspect)
	default:
		f.t.miss(now, f.r, indexer.StatePartial)
	}
	f.requests++ // Tick is due: the next request is about a minute away
	f.applyHeld(now, true)
}

// applyHeld ends a request and applies the batches that wait. A gap in them is requested, unless last is set.
func (f *Follower) applyHeld(now time.Time, last bool) {
	f.rebuild, f.renews = false, false
	f.t.cancelQuery(f.r)
	for i := range f.r.repair.held {
		if f.r.repair.held[i].ev.EventID <= f.last() {
			f.conf.Count("duplicate", 1) // the answer contained it
		}
	}
	if f.t.applyHeld(f.r) > 0 && !last {
		f.again++
		f.request(now)
		return
	}
	held := f.r.repair.held
	f.t.endRepair(f.r)
	for i := range held {
		if held[i].ev.EventID > f.last() {
			f.accept(now, &held[i].ev)
		}
	}
	f.again = 0
}
