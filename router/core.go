// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"time"

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// core is the state machine of one pool: the workers that serve one base model
// with blocks of one size, the slots of the requests on them, the requests that
// wait for one, and the sessions bound to them. Inputs are worker changes,
// requests and what becomes of them, engines' reports and the passing of time,
// each with the time it happened; outputs are decisions and requests that need
// not wait any more. It has no clock, no lock, no goroutine and no randomness of
// its own, so the same inputs give the same decisions. What belongs to one request
// is in values of that request; see decisionInput.
//
// Invariants:
//
//   - A waiting request is in the queue once, and leaves the queue once: admitted, with an
//     error, removed by its caller, or freed. waiting has the same requests.
//   - After each input, the first request of each lane must still wait, or its caller
//     has been asked to count the overlap again.
type core struct {
	// Set once.
	conf      *Config
	blockSize int

	// Replaced, never changed: kept decisions refer to them.
	settings   *scorer.Settings // conf.Scoring with the model's attention
	thresholds *scorer.Thresholds

	ranks
	slots    slots.Table
	sessions sessions
	queue    *slots.Queue[*waiter] // nil without a queue
	waiting  map[string]*waiter    // the requests in the queue, by id
	woken    []*waiter             // requests that left the queue, or must count their overlap again

	looks   uint64 // choices so far that were not to be booked
	expired int    // slots so far that expired: without an owner, and not freed
	skipped int    // thresholds so far that could not be applied

	plain [prefillPart + 1]plainCandidates // by part

	pulls pulls

	typical    typical // average of this router's requests
	outputs    outputs // of this router's requests
	speeds     speeds
	grown      time.Time // when outputs were estimated last
	inferredAt time.Time // when first tokens were inferred last
}

func newCore(conf *Config, blockSize int) core {
	c := core{conf: conf, blockSize: blockSize, settings: &conf.Scoring, thresholds: new(conf.Thresholds)}
	c.sessions = newSessions(conf.Sessions)
	if conf.Pull.On {
		c.pulls = newPulls()
	}
	if conf.InferFirstTokens {
		c.slots.InferFirstTokens()
	}
	if conf.Queue.Threshold != nil {
		c.queue = slots.NewQueue[*waiter](conf.Queue.Policy, conf.Queue.Limit)
		c.waiting = make(map[string]*waiter)
	}
	return c
}

// setWorker adds or updates the ranks of a worker process, and drops those that info does not
// have, with their slots.
func (c *core) setWorker(info *WorkerInfo) {
	for _, ord := range c.ordinals(info.ID) {
		e := &c.entries[ord]
		if !info.hasRank(e.worker.DPRank) {
			c.dropRank(ord)
			continue
		}
		if e.info.StartedMS != info.StartedMS {
			e.avoid, e.report, e.speed = avoidance{}, engineReport{}, speed{} // it is another process
			e.learned, e.audit = learned{}, audit{}
			c.speeds.changed = true
		}
		c.speeds.changed = c.speeds.changed || e.info.PrefillThroughput != info.PrefillThroughput
		c.inform(ord, info)
		c.slots.SetReorders(ord, info.Reorders)
	}
	for i := range max(1, info.DPSize) {
		w := Worker{ID: info.ID, DPRank: info.DPStart + i}
		if _, known := c.find(w); !known {
			c.slots.SetReorders(c.add(w, info), info.Reorders)
			c.speeds.changed = true
		}
	}
	c.changed()
}

// inform replaces the information about the rank with an ordinal.
func (r *ranks) inform(ord int, info *WorkerInfo) {
	e := &r.entries[ord]
	r.count(e.info, -1)
	r.count(info, 1)
	e.setInfo(info)
}

// count adds a rank with this information to the counts, or removes it (by = -1).
func (r *ranks) count(info *WorkerInfo, by int) {
	if info.Role.takes(prefillPart) {
		r.counts.prefill += by
	}
	if !info.Role.aggregated() && info.Role.takes(decodePart) {
		r.counts.decode += by
	}
	if info.Group != "" {
		r.counts.group += by
	}
}

// removeWorker drops all ranks of a worker process with their slots. The caller
// has purged their ordinals from the index.
func (c *core) removeWorker(id uint64) {
	for _, ord := range c.ordinals(id) {
		c.dropRank(ord)
	}
	c.changed()
}

func (c *core) dropRank(ord int) {
	c.slots.RemoveWorker(ord)
	c.sessions.removeWorker(ord)
	c.drop(ord)
}

// pinError says why the pinned worker is not a candidate; nil if it is one.
// In the mode Direct a worker that does not exist is also a lack of workers.
func (c *core) pinError(in *decisionInput, ch *choice) error {
	from, to := c.pin(in.Request)
	switch {
	case len(ch.candidates) > 0:
		return nil
	case in.pinnedByID(): // it left, or its health changed, just now
		return ErrNoWorkers
	case from == to && c.conf.Mode == Direct:
		return in.pinnedError(fmt.Errorf("%w: %w", ErrPinnedUnknown, ErrNoWorkers))
	case from == to:
		return in.pinnedError(ErrPinnedUnknown)
	}
	switch why := ch.exclusions[to-1]; why {
	case ExcludedDraining, ExcludedHealth:
		return in.pinnedError(fmt.Errorf("%w: %s", ErrNoWorkers, why))
	default:
		return in.pinnedError(fmt.Errorf("%w: %s", ErrPinnedNotAllowed, why))
	}
}

// booking is where a request has its slot. A prediction of the worker's cache needs it.
type booking struct {
	ordinal    int
	generation uint64 // entry.since of the worker
	unreported bool   // neither events nor summaries report the worker's blocks
}

// book takes the slots of a request and of its prefill leg. If the request already has a slot, book returns
// [ErrDuplicate] and books nothing.
func (c *core) book(in *decisionInput, ch *choices, to *result) error {
	d := &to.decision
	if !c.takeSlot(in, &ch.worker, d, ch.hasLeg, &to.booked) {
		return ErrDuplicate
	}
	if ch.hasLeg && !c.takeSlot(&ch.legInput, &ch.leg, d.Prefill, false, &to.legBooked) {
		c.slots.Free(in.ID)
		return ErrDuplicate
	}
	if d.Source != nil {
		c.pulls.begin(in.ID, d)
	}
	return nil
}

// takeSlot takes the slot of a choice. It returns false if a request with this id already has a slot. hasLeg
// says that a prefill leg computes the prompt.
func (c *core) takeSlot(in *decisionInput, ch *choice, d *Decision, hasLeg bool, at *booking) bool {
	ord := ch.candidates[ch.chosen]
	e := &c.entries[ord]
	assumed := 0.
	if d.Inferred {
		assumed = 1000 / c.settings.Engine.PrefillTime(1)
	}
	reuse := ch.settings.AssumeKVReuse
	if hasLeg {
		reuse = c.settings.AssumeKVReuse // decodeSettings turn it off, but only for the choice
	}
	if !c.slots.Add(ch.time, in.ID, &slots.Booking{
		Worker: ord, Blocks: in.hashes.sequence, BlockSize: c.blockSize,
		PromptTokens: in.prompt.tokens, CachedTokens: in.prompt.tokens - d.PrefillTokens,
		ExpectedOutput: in.ExpectedOutput, ExpectedTTFT: expectedTTFT(d, &ch.inputs[ch.chosen]),
		Owned: in.Owned, Unseen: in.Unseen && !hasLeg, AssumedRate: assumed, Number: in.number,
		BlocksUntracked:  c.conf.NoActiveBlocks || in.decode != nil,
		PrefillUntracked: !ch.settings.TrackPrefill, NoReuse: !reuse,
		Reports: e.info.Group != "",
	}) {
		return false
	}
	if !in.Unseen && !d.Inferred {
		e.observed = ch.time
	}
	c.turn++
	if in.holdout.side == SideRoundRobin && ch.part != prefillPart {
		c.heldTurn++
	}
	if ch.part == prefillPart {
		c.legs++
	}
	e.routed++
	if ch.tries && e.info.Health > Degraded {
		e.tries.begin(ch.time)
	}
	if e.avoid.try(ch.time, c.conf.trialPeriod(e.info.Role), c.bookings(e), e.info.Role == Prefill) {
		c.changes++
	}
	if in.prompt.tokens > 0 && !hasLeg {
		c.typical.note(in.prompt.tokens, d.PrefillTokens)
	}
	*at = booking{ord, e.since, e.unreported(c.conf.NoEvents)}
	if ch.overlapBlocks == 0 {
		e.properties.LastCold = c.turn
	}
	if in.session != 0 {
		c.sessions.touch(ch.time, in.session, in.SessionFinal)
	}
	return true
}

// expectedTTFT is the time to the first token that a booking expects. It is 0 if the time says nothing about
// the worker's speed: the worker has pending tokens, it is a router group, or prefill tokens are not tracked.
func expectedTTFT(d *Decision, in *scorer.Input) time.Duration {
	if in.Members > 0 || in.PendTokens > 0 || !d.Settings.TrackPrefill {
		return 0
	}
	return time.Duration(d.EstimatedTTFT * float64(time.Millisecond))
}

// prefillCompleted notes the first token of a request, and binds its session. news and inferred are those of
// [slots.Table.FirstToken].
func (c *core) prefillCompleted(now time.Time, id string, session uint64, rebind bool, by Sign) (news, inferred bool) {
	waited, expected := c.slots.Wait(now, id)
	news, inferred = c.slots.FirstToken(now, id, by != SignEnd)
	ord, _ := c.slots.Worker(id)
	if news && by != SignEnd && expected > 0 && !c.conf.NoSpeeds {
		c.entries[ord].speed.note(expected, waited)
	}
	if news && session != 0 {
		c.sessions.bind(now, session, ord, rebind)
	}
	return news, inferred
}

// end frees the slot of a request, and learns the length of its output. silent says that the request had a
// slot and no first token. inferred is the first token if end infers it, else the
// zero time.
func (c *core) end(now time.Time, id string, by ending) (silent bool, inferred time.Time) {
	if by == endServed {
		inferred = c.slots.InferOwn(now, id)
	}
	finish := c.slots.Finish
	if by == endLeft {
		finish = c.slots.Leave
	}
	e := finish(now, id)
	if e.Started {
		if e.Unestimated > 0 {
			e.OutputTokens += e.Unestimated.Seconds() * c.outputRate(e.Worker)
		}
		c.outputs.note(e.OutputTokens)
	}
	return e.Existed && !e.Started, inferred
}

// noteUsage takes the number of output tokens that a response reported. If the request is in flight, the
// number replaces the estimate. If the request has ended, the worker's output rate is learnt from it.
func (c *core) noteUsage(now time.Time, d *Decision, tokens int) {
	ord, known := c.find(d.Worker)
	switch {
	case !known:
	case d.Freed.IsZero():
		c.slots.ReportOutput(now, d.ID, tokens)
	case !d.FirstToken.IsZero():
		c.slots.LearnOutputRate(ord, tokens, d.Freed.Sub(d.FirstToken))
	}
}

// serving is what [core.served] changed because of a response.
type serving struct {
	avoided []Avoided // workers that are avoided from now on
	sign    uint64    // id of the worker that answered, if [Hooks.Answered] is to be called; otherwise 0

	moved  bool   // the slot moved; the fields below are about its new worker
	to     int    // ordinal
	since  uint64 // entry.since
	worker Worker
	cached int // tokens of the prompt that the worker has cached
}

// moveSlot moves the slot of a request to the worker with the ordinal to, which has cached tokens of the
// prompt cached. blocks are the request's blocks: if the worker reported its load lately, the request is no
// foreign load any more.
func (c *core) moveSlot(now time.Time, id string, to, cached, blocks int, s *serving) {
	if s.moved = c.slots.Move(now, id, to, cached); s.moved {
		e := &c.entries[to]
		e.report.disclose(now, blocks, reportLife)
		s.to, s.since, s.worker, s.cached = to, e.since, e.worker, cached
	}
}

// answered notes the response of a worker, or that none came in time: whether it is a sign of life, and whether it is
// a failure. A failure begins a back-off if the worker asks for a pause, or if it fails far more often than the others.
func (c *core) answered(now time.Time, ord int, fl *flight, r Response, s *serving) {
	e := &c.entries[ord]
	a := &e.avoid
	class, failed := classOf(r.Status)
	switch {
	case r.Late:
		class, failed, r.Status = late, true, 0
	case r.Status < 500:
		if e.signed(now) {
			s.sign = e.worker.ID
		}
		if a.gaveResponse(); class != tooMany {
			a.answered = now
		}
	default:
		a.gaveResponse()
	}
	if MayBeRepeated(r.Status) && !a.tells(-1) {
		return // attempted noted it
	}
	c.judge(now, ord, answerOrigin{class, fl.origin}, r, failed, s)
}

// judge notes a response of a worker, and avoids the worker if it fails.
func (c *core) judge(now time.Time, ord int, from answerOrigin, r Response, failed bool, s *serving) {
	a := &c.entries[ord].avoid
	a.answers = a.answers.note(now, from, r.Status, failed)
	a.counts(failed)
	switch {
	case failed:
		c.backOff(now, ord, c.errsMore(now, ord, from.class), r.RetryAfter, s)
	case a.served(now):
		c.changes++
	}
}

// backOff avoids a worker that failed with a response, for as long as it asked for, and if fails is set for as long as
// a worker that gives no response.
func (c *core) backOff(now time.Time, ord int, fails bool, pause time.Duration, s *serving) {
	if c.conf.AvoidFailing <= 0 {
		return
	}
	e := &c.entries[ord]
	booked := c.bookings(e)
	begins := fails && e.avoid.fail(now, c.conf.AvoidFailing, booked, false)
	if e.avoid.pause(now, pause, booked) || begins {
		c.changes++
		failed := 0.
		if a := e.avoid.answers; a != nil {
			class := late
			if a.status != 0 {
				class, _ = classOf(a.status)
			}
			failed = a.failed[class]
		}
		s.avoided = append(s.avoided, Avoided{e.worker, int(failed + 0.5)})
	}
}

// attempted notes that the worker at an address answered an attempt of the request in fl with 429 or 503. fl is the
// zero value if the request is not known. [core.served] receives the same response if the proxy passed it on; it
// counts once.
func (c *core) attempted(now time.Time, fl *flight, r Response) (s serving) {
	for _, ord := range c.order {
		e := &c.entries[ord]
		if !e.isAt(r.Address, r.Host) {
			continue
		}
		a := &e.avoid
		a.answered = now
		if a.absolve(now, fl.number) {
			c.changes++
		}
		a.gaveResponse()
		if r.Status < 500 && e.signed(now) {
			s.sign = e.worker.ID
		}
		if class, failed := classOf(r.Status); a.tells(1) {
			c.judge(now, ord, answerOrigin{class, fl.origin}, r, failed, &s)
		} else {
			c.backOff(now, ord, false, r.RetryAfter, &s)
		}
	}
	return s
}

// probed notes the result of a probe of a worker's health.
func (r *ranks) probed(now time.Time, id uint64, good bool) {
	for _, ord := range r.ordinals(id) {
		if e := &r.entries[ord]; e.avoid.probed(now, good, r.bookings(e)) {
			r.changes++
		}
	}
}

// served notes which worker answered a request. The slot follows that worker.
//
// A worker that has answered another request since this one was booked is not blamed for a
// connection that was refused, lost or too slow: on a busy machine this happens to healthy
// workers. If the worker did fail, the next request shows it.
func (c *core) served(now time.Time, id string, fl *flight, r Response) (s serving) {
	age, _ := c.slots.Wait(now, id)
	strike := func(ord int, local bool) {
		e := &c.entries[ord]
		if local || r.Status >= 500 {
			e.failures++
		}
		if (local || r.Late) && e.avoid.answered.After(now.Add(-age)) {
			return
		}
		if !local {
			if r.Late && e.info.Role == Prefill && e.avoid.fail(now, c.conf.AvoidFailing, c.bookings(e), true) {
				c.changes++
				s.avoided = append(s.avoided, Avoided{Worker: e.worker})
			}
			c.answered(now, ord, fl, r, &s)
			return
		}
		e.avoid.gaveNone(now)
		e.avoid.counts(true)
		if e.avoid.fail(now, c.conf.AvoidFailing, c.bookings(e), false) {
			c.changes++
			e.avoid.blamed = fl.number // until the log of attempts says that it responded
			s.avoided = append(s.avoided, Avoided{Worker: e.worker})
		}
	}
	ord, booked := c.slots.Worker(id)
	if !booked {
		return s
	}
	if c.entries[ord].worker != fl.first() {
		return s // the slot moved before
	}
	at := c.at(ord, r.Address, fl.second(), r.Asked)
	if at >= 0 && !r.Local && !r.Late && !r.TokenAwaited {
		c.slots.Answered(at)
	}
	if at == ord || at < 0 {
		if at < 0 && r.Asked == 1 {
			return s // the proxy tried an unknown worker instead
		}
		if r.Local || r.Address.IsValid() {
			strike(ord, r.Local)
		}
		return s
	}
	if r.Asked != 1 {
		strike(ord, true) // the proxy tried another worker after it
	} // else the proxy did not try this worker
	if second, known := c.find(fl.second()); known && r.Asked > 2 && second != at {
		strike(second, true)
	}
	strike(at, r.Local)
	cached := 0
	if c.entries[at].worker == fl.second() {
		cached = int(fl.held) * c.blockSize
	}
	if c.moveSlot(now, id, at, cached, 0, &s); s.moved {
		c.entries[at].routed++
	}
	return s
}
