// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// question is a request, prepared for the core: what the locks need not cover.
type question struct {
	*Request

	lora     string        // adapter of the request
	adapter  string        // the same, if workers say which ones they have
	tokens   int           // length of the prompt; 0 if unknown
	local    []uint64      // local hashes of its full blocks
	sequence []uint64      // their sequence hashes
	overlap  []int32       // by ordinal, counted at version
	lower    [3][]int32    // blocks behind these in host memory, on disk, in external storage
	cached   []int         // blocks held of whatever prompt, by ordinal; only for rules
	version  uint64        // value of core.changes when overlap was counted
	matched  time.Time     // when that was
	session  uint64        // hash of the session's name; 0 = none that matters
	rebind   bool          // it is bound, to a worker that is not to take this request
	taints   []taint       // Request.PreferredTaints, sorted
	reason   Reason        // of the decision, unless there is a better one
	number   uint64        // of a booking, in the ring
	explain  bool          // fill in workspace.workers
	guessed  bool          // hashes that no engine has
	answers  []ProbeAnswer // of router groups that were asked
	probed   time.Time     // when they were

	workspace *workspace

	flights *flights // where its ticket is good; nil for a request without an id
	ticket  ticket

	// Of a booking.
	ordinal    int
	generation uint64 // entry.since of the worker
	untold     bool   // nobody tells what the worker holds
}

// landed says whether a request that is being decided was freed already.
func (q *question) landed() bool { return q.flights != nil && !q.flights.holds(q.ticket) }

// taint is one of Request.PreferredTaints. They are added up in one order, or the
// same request could round to another cost.
type taint struct {
	name   string
	weight float64
}

// errMustWait is an outcome of a decision that is not told to anybody.
var errMustWait = errors.New("the request must wait")

// decide chooses a worker for q and, if q has an id, takes its slot. d gets the
// choice, and q.workspace its inputs. The caller has filled in what
// it knows. wait says that others wait already: then so must q, if
// anybody could take it at all. After an error nothing is booked.
//
// The order is fixed: who may take the request, what each has to do, who is busy,
// whether to wait, where its session is bound, and only then what is best.
func (c *core) decide(now time.Time, q *question, d *Decision, wait bool) error {
	c.workspace = q.workspace
	settings, err := c.settingsFor(q)
	if err != nil {
		return err
	}
	if c.conf.Mode == Direct && q.Pinned == nil {
		return ErrPinMissing
	}
	if err := c.eligible(now, q); err != nil {
		return err
	}
	c.grow(now)
	c.measure(now, q, settings)
	mayWait := c.queue != nil && q.ID != ""
	if err := c.leaveOutBusy(now, q); err != nil {
		if mayWait {
			return errMustWait
		}
		return err
	}
	if mayWait && (wait || scorer.MustWait(c.inputs, *c.conf.Queue.Threshold)) {
		return errMustWait
	}
	c.eligibles = len(c.candidates)
	bound, err := c.followSession(now, q)
	if err != nil {
		return err
	}

	d.Time, d.Reason, d.Cost, d.Policy, d.Equal, d.Second = now, q.reason, 0, "", 0, Second{}
	d.BlockSize, d.Draw, d.Turn = c.blockSize, c.request.U, c.request.Turn
	d.Settings, d.Thresholds = settings, c.thresholds
	var chosen int
	c.costs = slices.Grow(c.costs[:0], len(c.inputs))[:len(c.inputs)]
	clear(c.costs)
	switch {
	case q.Pinned != nil:
		d.Reason = ReasonPinned
		if len(c.candidates) > 1 {
			chosen = c.choose(settings, d)
		}
	case bound:
		d.Reason = ReasonSession
	default:
		chosen = c.choose(settings, d)
		if at := c.preferred(q); at >= 0 {
			chosen, d.Reason = at, ReasonPreferred
			if d.Cost = c.costs[at]; d.Equal > 0 {
				d.Equal = scorer.Equals(c.costs, at)
			}
		}
	}

	ord := c.candidates[chosen]
	e, in := &c.entries[ord], &c.inputs[chosen]
	d.OverlapBlocks = in.OverlapBlocks
	d.CachedTokens = in.OverlapBlocks * c.blockSize
	// The engine computes the last token of a prompt even if it holds them all.
	d.PrefillTokens = max(min(1, q.tokens), q.tokens-d.CachedTokens)
	d.CoarseTTFT = scorer.CoarseTTFT(d.PrefillTokens, in.ActiveRequests, c.throughput(e))
	d.EstimatedTTFT = settings.ModelTTFT(&c.request, in)
	d.Worker, d.WorkerName, d.Address = e.worker, e.info.Name, e.info.rankAddress(e.worker.DPRank)
	d.Engine, d.NameRank, d.Group = e.info.Engine, e.info.wantsRank(e.worker.DPRank), e.info.Group
	if q.WantSecond && q.Pinned == nil && !(bound && c.conf.Sessions.Hard) {
		d.Second = c.second(chosen, !bound && c.compares())
	}
	d.Member = c.member(q, ord)
	if q.ID != "" {
		if !c.slots.Add(now, q.ID, &scorer.Booking{
			Worker: ord, Blocks: q.sequence, BlockSize: c.blockSize,
			PromptTokens: q.tokens, CachedTokens: q.tokens - d.PrefillTokens,
			ExpectedOutput: q.ExpectedOutput, Owned: q.Owned, Unseen: q.Unseen, Number: q.number,
			BlocksUntracked: c.conf.NoActiveBlocks, PrefillUntracked: !settings.TrackPrefill, NoReuse: !settings.AssumeKVReuse,
			Reports: e.info.Group != "",
		}) {
			return ErrDuplicate
		}
		c.turn++
		e.routed++
		if q.tokens > 0 {
			c.typical.note(q.tokens, d.PrefillTokens)
		}
		q.ordinal, q.generation = ord, e.since
		q.untold = c.unknown(e)
		if in.OverlapBlocks == 0 && !c.anyOverlap() {
			e.cold = c.turn
		}
		c.sessions.touch(now, q.session, q.SessionFinal)
	}
	if q.explain {
		c.explain(now, q)
	}
	return nil
}

// settingsFor works out the settings of one decision.
func (c *core) settingsFor(q *question) (*scorer.Settings, error) {
	if q.Override == nil {
		return c.settings, nil
	}
	if c.conf.Mode != KV || c.conf.Rule != nil {
		return nil, fmt.Errorf("%w: nothing is compared that it could change: the mode is %s", ErrBadOverride, c.conf.Mode)
	}
	if q.Pinned != nil && !q.AnyRank && q.Override.Compares() {
		return nil, fmt.Errorf("%w: nothing is compared that it could change: the request names its worker", ErrBadOverride)
	}
	s, err := c.settings.With(q.Override)
	if err == nil {
		err = heard(&s)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadOverride, err)
	}
	return &s, nil
}

// eligible collects the ordinals that may take a request: the healthy workers, or
// the degraded ones, and those that failed lately, while there are no healthy ones.
// A pinned worker may be any of them.
func (c *core) eligible(now time.Time, q *question) error {
	c.candidates = c.candidates[:0]
	if q.Pinned != nil {
		return c.pinned(now, q)
	}
	c.verdicts = slices.Grow(c.verdicts[:0], len(c.order))[:len(c.order)]
	var degraded bool
	for i, ord := range c.order {
		e := &c.entries[ord]
		if c.verdicts[i] = c.exclude(e, q); c.verdicts[i] != "" {
			continue
		}
		h, why := c.standing(now, e)
		switch a := q.answer(e); {
		case a == nil:
		case a.Busy && h == Healthy:
			h, why = Degraded, ExcludedBusy
		case !a.Busy && why == ExcludedStale:
			h, why = Healthy, "" // it was heard just now
		}
		c.verdicts[i] = why
		if h == Healthy {
			c.candidates = append(c.candidates, ord)
		}
		degraded = degraded || h == Degraded
	}
	if len(c.candidates) > 0 {
		return nil
	}
	if !degraded {
		return ErrNoWorkers
	}
	for i, ord := range c.order {
		switch c.verdicts[i] {
		case ExcludedFailing, ExcludedHealth, ExcludedStale, ExcludedBusy:
		default:
			continue
		}
		if h, _ := c.standing(now, &c.entries[ord]); h == Degraded || h == Healthy {
			c.candidates = append(c.candidates, ord)
			c.verdicts[i] = ""
		}
	}
	return nil
}

// pinned makes the pinned worker the only candidate, or its ranks, or says why not.
// In the mode Direct a worker that does not exist is also a lack of workers.
func (c *core) pinned(now time.Time, q *question) error {
	from, to := c.pin(q)
	if from == to {
		err := ErrPinnedUnknown
		if c.conf.Mode == Direct {
			err = fmt.Errorf("%w: %w", ErrPinnedUnknown, ErrNoWorkers)
		}
		return q.pinError(err)
	}
	c.verdicts = slices.Grow(c.verdicts[:0], len(c.order))[:len(c.order)]
	for i := range c.verdicts {
		c.verdicts[i] = ExcludedPin
	}
	var err error
	for at := from; at < to; at++ {
		ord := c.order[at]
		e := &c.entries[ord]
		why := c.exclude(e, q)
		if h, _ := c.standing(now, e); why == "" && h != Healthy && h != Degraded {
			why = ExcludedHealth
		}
		switch c.verdicts[at] = why; why {
		case "":
			c.candidates = append(c.candidates, ord)
		case ExcludedDraining, ExcludedHealth:
			err = fmt.Errorf("%w: %s", ErrNoWorkers, why)
		default:
			err = fmt.Errorf("%w: %s", ErrPinnedNotAllowed, why)
		}
	}
	if len(c.candidates) > 0 {
		return nil
	}
	return q.pinError(err)
}

// pin returns where the pinned worker stands in the order, or its ranks.
func (c *core) pin(q *question) (from, to int) {
	if !q.AnyRank {
		at, known := c.search(*q.Pinned)
		if !known {
			return 0, 0
		}
		return at, at + 1
	}
	from, _ = c.search(Worker{ID: q.Pinned.ID})
	for to = from; to < len(c.order) && c.entries[c.order[to]].worker.ID == q.Pinned.ID; to++ {
	}
	return from, to
}

// lane is where a request waits.
func (c *core) lane(q *question) int {
	if q.Pinned == nil {
		return scorer.AnyWorker
	}
	if from, to := c.pin(q); from < to {
		return c.order[from]
	}
	return scorer.AnyWorker
}

func (q *question) pinError(err error) error {
	if q.AnyRank {
		return fmt.Errorf("worker %d: %w", q.Pinned.ID, err)
	}
	return fmt.Errorf("worker %d, rank %d: %w", q.Pinned.ID, q.Pinned.DPRank, err)
}

// exclude says why a worker may not take a request, whatever its health and load.
func (c *core) exclude(e *entry, q *question) Exclusion {
	switch info := e.info; {
	case info.Draining:
		return ExcludedDraining
	case info.Role == Prefill:
		return ExcludedRole
	case q.adapter != "" && !slices.Contains(info.LoRA, q.adapter):
		return ExcludedAdapter
	case q.Allowed != nil && !slices.Contains(q.Allowed, e.worker):
		return ExcludedAllowed
	case q.AllowedAddresses != nil && !allows(q.AllowedAddresses, info.rankAddress(e.worker.DPRank)):
		return ExcludedAllowed
	}
	for _, t := range q.RequiredTaints {
		if !slices.Contains(e.info.Taints, t) {
			return ExcludedTaint
		}
	}
	return ""
}

func allows(list []netip.AddrPort, a netip.AddrPort) bool {
	return slices.ContainsFunc(list, func(l netip.AddrPort) bool {
		return l.Addr() == a.Addr() && (l.Port() == 0 || l.Port() == a.Port())
	})
}

// measure fills in what the request and each candidate bring to the decision.
func (c *core) measure(now time.Time, q *question, s *scorer.Settings) {
	c.request = scorer.Request{
		PromptTokens: q.tokens, BlockSize: c.blockSize, Sequence: q.sequence,
		U: c.draw(q.ID), Turn: c.turn, Session: q.session,
		PrefillUntracked: !s.TrackPrefill, Pinned: q.Pinned != nil, EmbeddingHit: q.EmbeddingHit,
	}
	if c.conf.Rule != nil && q.Session != "" {
		// A rule may look at the session where nothing is bound to it.
		c.request.Session = sessionKey(q.Session)
	}
	c.inputs = slices.Grow(c.inputs[:0], len(c.candidates))[:len(c.candidates)]
	for i, ord := range c.candidates {
		e, in := &c.entries[ord], &c.inputs[i]
		c.load(now, ord, in)
		switch {
		case c.conf.NoActiveBlocks:
		case s.AssumeKVReuse:
			in.AdditionalBlocks = c.slots.AdditionalBlocks(ord, q.sequence)
		default:
			in.AdditionalBlocks = len(q.sequence)
		}
		if e.since <= q.version {
			if ord < len(q.overlap) {
				in.OverlapBlocks = int(q.overlap[ord])
			}
			if ord < len(q.lower[0]) {
				in.HostBlocks, in.DiskBlocks = int(q.lower[0][ord]), int(q.lower[1][ord]+q.lower[2][ord])
			}
			if ord < len(q.cached) {
				in.CachedBlocks = q.cached[ord]
			}
		}
		c.heed(q, ord, i)
		for _, t := range q.taints {
			if slices.Contains(e.info.Taints, t.name) {
				in.TaintWeight += t.weight
			}
		}
	}
}

// load fills in what a worker is and does, whatever the request.
func (c *core) load(now time.Time, ord int, in *scorer.Input) {
	e, load := &c.entries[ord], c.slots.Load(ord)
	// Field by field, since a literal would be made elsewhere and copied here.
	*in = scorer.Input{}
	in.PendTokens, in.DecodeTokens = load.PendTokens, load.DecodeTokens
	in.ActiveRequests, in.WaitingRequests, in.ActiveBlocks = load.Requests, load.Waiting, load.Blocks
	info := e.info
	in.CPU, in.DecodeOnly = info.CPU, info.Role == Decode
	in.MaxBatchedTokens, in.MaxRequests = info.MaxBatchedTokens, info.MaxNumSeqs
	in.LastCold, in.Key = e.cold, e.key
	if info.Group != "" {
		c.groupLoad(now, ord, in)
		return
	}
	f := c.foreign(now, e, c.request.PromptTokens)
	in.PendTokens += f.Tokens
	in.ActiveRequests += f.Requests
	in.WaitingRequests += f.Waiting
	in.ActiveBlocks += f.Blocks
	in.DecodeTokens += f.Blocks * c.blockSize
	if info.TotalKVBlocks > 0 {
		in.KVUse = min(1, float64(max(in.ActiveBlocks, e.reported(now)))/float64(info.TotalKVBlocks))
	} else if fresh(now, e.report.usedAt) {
		in.KVUse = min(1, e.report.usage)
	}
}

// reportLife is how long an engine's own report counts. An engine that stops reporting
// must not stay busy for ever.
const reportLife = 10 * time.Second

// reported returns the blocks in use by the engine's own report, 0 if that is too
// old.
func (e *entry) reported(now time.Time) int {
	if !fresh(now, e.report.usedAt) {
		return 0
	}
	return e.report.usedBlocks
}

// throughput returns how many prompt tokens a worker computes a second.
func (c *core) throughput(e *entry) float64 {
	return cmp.Or(e.info.PrefillThroughput, c.conf.PrefillThroughput)
}

// leaveOutBusy takes the candidates out that are above a threshold. That none are
// left is an error.
func (c *core) leaveOutBusy(now time.Time, q *question) error {
	if *c.thresholds == (scorer.Thresholds{}) {
		return nil
	}
	kept, at := 0, 0
	for i, ord := range c.candidates {
		e, in := &c.entries[ord], &c.inputs[i]
		busy, skipped := c.busy(now, e, in.ActiveBlocks, in.PendTokens, max(1, in.Members))
		c.skipped += uint64(skipped)
		if !busy {
			c.candidates[kept], c.inputs[kept] = ord, *in
			kept++
			continue
		}
		for c.order[at] != ord { // both are in worker order
			at++
		}
		c.verdicts[at] = ExcludedBusy
	}
	if kept > 0 {
		c.candidates, c.inputs = c.candidates[:kept], c.inputs[:kept]
		return nil
	}
	if q.Pinned == nil {
		return ErrAllBusy
	}
	if c.conf.Mode == Direct {
		return q.pinError(fmt.Errorf("%w: %w", ErrPinnedBusy, ErrAllBusy))
	}
	return q.pinError(ErrPinnedBusy)
}

// busy says whether a worker is above a threshold, or the mean of the members of a
// group, and how many thresholds could not be applied.
func (c *core) busy(now time.Time, e *entry, blocks, pend, members int) (busy bool, skipped int) {
	total := e.info.TotalKVBlocks
	if e.group != nil {
		total = e.group.load.TotalBlocks
	}
	return c.thresholds.Busy(scorer.Occupancy{
		ActiveBlocks: blocks, PendTokens: pend / members,
		EngineBlocks: e.reported(now),
		TotalBlocks:  total, MaxBatchedTokens: e.info.MaxBatchedTokens,
	})
}

// followSession makes the worker that q's session is bound to the only candidate
// if it is one, and may be.
func (c *core) followSession(now time.Time, q *question) (bound bool, err error) {
	q.rebind = false
	if q.session == 0 || q.Pinned != nil {
		return false, nil
	}
	ord, known := c.sessions.worker(now, q.session)
	if !known {
		return false, nil
	}
	at := slices.Index(c.candidates, ord)
	switch {
	case at < 0 && c.conf.Sessions.Hard:
		return false, c.sessionLost(ord)
	case at < 0 || !c.conf.Sessions.Hard && scorer.SessionOverloaded(c.inputs, at):
		q.rebind = true
		return false, nil
	}
	for i, other := range c.order {
		if other != ord && c.verdicts[i] == "" {
			c.verdicts[i] = ExcludedSession
		}
	}
	c.candidates[0], c.candidates[at] = ord, c.candidates[0]
	c.inputs[0], c.inputs[at] = c.inputs[at], c.inputs[0]
	c.candidates, c.inputs = c.candidates[:1], c.inputs[:1]
	return true, nil
}

// sessionLost says why the worker of a session cannot take its request.
func (c *core) sessionLost(ord int) error {
	w := c.entries[ord].worker
	at, _ := c.search(w)
	err := ErrNoWorkers
	if c.verdicts[at] == ExcludedBusy {
		err = ErrAllBusy
	}
	return fmt.Errorf("the session's worker %d, rank %d (%s): %w", w.ID, w.DPRank, c.verdicts[at], err)
}

// choose returns the candidate that the mode says, which must exist.
func (c *core) choose(s *scorer.Settings, d *Decision) (chosen int) {
	reason := ReasonMode
	switch c.conf.Mode {
	case RoundRobin:
		reason = ReasonRoundRobin
		chosen = scorer.RoundRobin(len(c.candidates), c.turn)
	case Random:
		chosen = scorer.Random(len(c.candidates), c.request.U)
	case LeastLoaded:
		chosen = scorer.LeastLoaded(c.inputs, c.request.U)
	case PowerOfTwo:
		chosen = scorer.PowerOfTwo(c.inputs, c.request.U)
	case DeviceAware:
		chosen = scorer.DeviceAware(&c.request, c.inputs, c.conf.DeviceRatio)
		d.DeviceRatio = c.conf.DeviceRatio
	case KV, Direct: // Direct has only pinned workers
		if reason = ReasonLoad; c.anyOverlap() {
			reason = ReasonKV
		}
		if c.conf.Rule != nil {
			chosen = c.conf.Rule(&c.request, c.inputs, c.costs)
			chosen = max(0, min(chosen, len(c.candidates)-1)) // a caller's rule may err
			scorer.Bound(c.costs)
		} else {
			chosen = s.Choose(&c.request, c.inputs, c.costs)
			d.Policy = s.Policy
		}
		d.Cost, d.Equal = c.costs[chosen], scorer.Equals(c.costs, chosen)
	}
	if d.Reason == "" {
		d.Reason = reason
	}
	return chosen
}

// preferred returns where the preferred worker stands among the candidates, -1 if it is
// none, or there is none.
func (c *core) preferred(q *question) int {
	if q.Preferred == nil {
		return -1
	}
	return slices.IndexFunc(c.candidates, func(ord int) bool { return c.entries[ord].worker == *q.Preferred })
}

// compares says whether a choice leaves a cost for each candidate.
func (c *core) compares() bool { return c.conf.Mode == KV }

func (c *core) anyOverlap() bool {
	for i := range c.inputs {
		if c.inputs[i].OverlapBlocks > 0 {
			return true
		}
	}
	return false
}

// draw returns the one random number of the decision for a request, uniform in
// [0, 1). It depends on the seed and the id alone, not on other requests.
func (c *core) draw(id string) float64 {
	key := c.turn
	if id != "" {
		key = scorer.DrawKey(id)
	}
	return scorer.Draw(c.conf.Seed, key)
}

// explain puts down every worker of the pool as the decision saw it.
func (c *core) explain(now time.Time, q *question) {
	c.workers = c.workers[:0]
	next := 0 // candidate, in the same order
	for i, ord := range c.order {
		e, at := &c.entries[ord], next
		if c.verdicts[i] == "" {
			next++
		} else {
			at = len(c.inputs)
			c.inputs = append(c.inputs, scorer.Input{})
			c.load(now, ord, &c.inputs[at])
		}
		c.workers = append(c.workers, seen{e.worker, e.info, c.verdicts[i], at, e.reported(now), c.foreign(now, e, c.request.PromptTokens), e.group.age(now), c.verdicts[i] == "" && q.heard(e) != nil})
	}
}
