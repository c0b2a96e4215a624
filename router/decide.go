// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// purpose is what a choice is made for.
type purpose uint8

const (
	look       purpose = iota // only to show or to compare: nothing is booked, and the request does not wait
	take                      // to be booked; the request may wait in the queue first
	takeBehind                // the same, and requests of the same lane (the pinned worker's, or the common one) wait already
)

// choice is the choice of a worker for one part of a request. [core.choose] makes it. A candidate is an
// index of the slices candidates, inputs and costs.
type choice struct {
	part          part
	time          time.Time
	settings      *scorer.Settings // with the request's override
	request       scorer.Request
	exclusions    []Exclusion // in the order of ranks.order; empty strings for candidates
	candidates    []int       // ordinals, in worker order
	inputs        []scorer.Input
	costs         []float64
	overlapBlocks int  // sum of the inputs' OverlapBlocks
	allInputs     bool // inputs have all fields; if false, [core.complete] can fill in the others

	mode         Mode
	chosen       int // candidate
	reason       Reason
	policy       scorer.Policy // empty if no costs were compared
	equal        int           // candidates with the chosen one's cost
	deviceRatio  float64       // of the mode DeviceAware
	sessionMoves bool          // the session is bound to a worker that does not take this request
	panics       bool          // the candidates are unhealthy; see [Decision.Panic]
	tries        bool          // some candidates are not healthy, and a request tries them
}

// choices are the choices for a request: of its worker and, in a split model, of the prefill leg's.
type choices struct {
	worker choice
	noLeg  NoLeg // why there is no leg, in a split model
	hasLeg bool
	leg    choice
	// The workers that people see, if the input asks for them.
	list, legList listing
	// The input of the leg, and its request.
	legInput   decisionInput
	legRequest Request
}

// result is what a decision leads to.
type result struct {
	decision          Decision
	booked, legBooked booking // where the request and its prefill leg are booked
}

// submit decides for a request, or puts it into the queue and returns its waiter. The waiter may
// have its decision already when submit returns.
func (c *core) submit(now time.Time, in *decisionInput, ch *choices, to *result) (*waiter, error) {
	c.infer(now)
	why, lane := take, slots.AnyWorker
	if c.queue != nil {
		if lane = c.lane(in.Request); c.queue.Waits(lane) {
			why = takeBehind
		}
	}
	err := c.decide(now, in, why, 0, ch, to)
	if err == nil || !errors.Is(err, errMustWait) {
		return nil, err
	}
	return c.enqueue(now, lane, in, ch, to)
}

// decide chooses a worker for a request, makes the decision, and books a slot if the request has an id;
// in a split model also for the prefill leg. After an error nothing is booked. errMustWait means that the
// request must wait in the queue. queued is how long it has waited there.
func (c *core) decide(now time.Time, in *decisionInput, why purpose, queued time.Duration, ch *choices, to *result) error {
	if in.ID == "" {
		why = look
	}
	if err := c.chooseWorkers(now, in, why, ch); err != nil {
		return err
	}
	if in.listCandidates {
		c.list(in, &ch.worker, &ch.list)
	}
	var leg *Decision
	if ch.hasLeg {
		if in.listCandidates {
			c.list(&ch.legInput, &ch.leg, &ch.legList)
		}
		leg = new(Decision)
		c.makeDecision(&ch.legInput, &ch.leg, &ch.legList, nil, "", 0, leg)
	}
	c.makeDecision(in, &ch.worker, nil, leg, ch.noLeg, queued, &to.decision)
	if why == look {
		return nil
	}
	return c.book(in, ch, to)
}

// chooseWorkers chooses the worker of a request, and that of its prefill leg in a split model.
func (c *core) chooseWorkers(now time.Time, in *decisionInput, why purpose, ch *choices) error {
	s, err := c.settingsFor(in)
	if err != nil {
		return err
	}
	if c.conf.Mode == Direct && in.Pinned == nil {
		return ErrPinMissing
	}
	ch.hasLeg, ch.noLeg = false, ""
	if c.splits || in.Split == SplitAlways || in.PrefillPinned != nil {
		err = c.chooseSplit(now, in, s, why, ch)
	} else {
		err = c.choose(now, in, whole, s, why, &ch.worker)
	}
	if err != nil {
		return err
	}
	if why == look {
		c.looks++
	}
	return nil
}

// settingsFor returns the settings of one decision.
func (c *core) settingsFor(in *decisionInput) (*scorer.Settings, error) {
	if in.Override == nil {
		return c.settings, nil
	}
	if c.conf.Mode != KV || c.conf.Rule != nil {
		return nil, fmt.Errorf("%w: nothing is compared that it could change: the mode is %s", ErrBadOverride, c.conf.Mode)
	}
	if in.Pinned != nil && !in.AnyRank && !in.pinnedByID() && in.Override.Compares() {
		return nil, fmt.Errorf("%w: nothing is compared that it could change: the request names its worker", ErrBadOverride)
	}
	s, err := c.settings.With(in.Override)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadOverride, err)
	}
	return &s, nil
}

// begin resets a choice, for another part of a request.
func (ch *choice) begin(now time.Time, p part, s *scorer.Settings) {
	ch.part, ch.time, ch.settings = p, now, s
	ch.reason, ch.policy, ch.equal, ch.deviceRatio, ch.sessionMoves, ch.panics, ch.tries = "", "", 0, 0, false, false, false
}

// choose chooses a worker for a part of a request. The order of the steps is fixed: the workers that may
// take the part, their loads, the busy ones, whether to wait, the session's worker, and then the best one.
//
// A booking need not follow: choose stores nothing about the request in the core. It changes what depends on
// the time (estimates of outputs, speeds), the remembered candidates, and the counter of skipped thresholds.
func (c *core) choose(now time.Time, in *decisionInput, p part, s *scorer.Settings, why purpose, ch *choice) error {
	ch.begin(now, p, s)
	if ch.mode = c.conf.Mode; in.holdout.side == SideRoundRobin {
		ch.mode = RoundRobin
	}
	if err := c.eligible(in, ch); err != nil {
		return err
	}
	if c.conf.Sessions.Hard && in.session != 0 && in.Pinned == nil {
		c.addBound(in, ch)
	}
	c.advanceTime(now)
	c.measure(in, why, ch)
	mayWait := c.queue != nil && why != look
	if err := c.leaveOutBusy(in, ch); err != nil {
		if mayWait {
			return errMustWait
		}
		return err
	}
	if mayWait && (why == takeBehind || scorer.MustWait(ch.inputs, *c.conf.Queue.Threshold)) {
		return errMustWait
	}
	ch.costs = slices.Grow(ch.costs[:0], len(ch.inputs))[:len(ch.inputs)]
	clear(ch.costs)
	bound := -1
	if in.session != 0 && in.Pinned == nil && in.holdout.side != SideRoundRobin {
		var err error
		if bound, err = c.sessions.follow(in, ch, &c.ranks, c.conf.Sessions.Hard); err != nil {
			return err
		}
	}
	ch.reason = in.prompt.fallback
	switch in.holdout.side { // each side has its own turns, so that both are alike in the mode RoundRobin
	case SideRoundRobin:
		ch.reason, ch.request.Turn = ReasonHoldout, c.heldTurn
	case SideRouted:
		ch.request.Turn -= c.heldTurn
	}
	switch {
	case bound >= 0:
		ch.chosen, ch.reason = bound, ReasonSession
		return nil
	case in.Pinned != nil:
		if ch.reason = ReasonPinned; in.pinnedByID() {
			ch.reason = ReasonSession
		}
		if len(ch.candidates) == 1 {
			ch.chosen = 0
			return nil
		}
	}
	c.chooseByMode(ch)
	if in.Preferred != nil && in.Pinned == nil {
		c.prefer(in, ch)
	}
	return nil
}

// eligible collects the ordinals that may take a request: the healthy workers, or the degraded ones if no
// worker is healthy, and so on (see [Health]). A worker that failed lately and a router group without a recent
// summary count as degraded. A pinned worker may be healthy or degraded, or as the workers are that another
// request would get. Plain requests have the same candidates, so eligible uses the last list again while it is
// valid.
func (c *core) eligible(in *decisionInput, ch *choice) error {
	ch.exclusions = slices.Grow(ch.exclusions[:0], len(c.order))[:len(c.order)]
	if in.Pinned != nil {
		if c.collect(in, ch, Degraded); len(ch.candidates) == 0 {
			c.collectPinned(in, ch)
		}
		return c.pinError(in, ch)
	}
	now, plain := ch.time, in.plain()
	p := &c.plain[ch.part]
	if plain && p.changes == c.changes && !now.Before(p.from) && now.Before(p.until) {
		ch.candidates = append(ch.candidates[:0], p.candidates...)
		copy(ch.exclusions, p.exclusions)
		return nil
	}
	if until := c.collect(in, ch, Healthy); len(ch.candidates) == 0 {
		c.collectWorse(in, ch)
	} else if c.addTries(ch) {
		return nil
	} else if plain && now.Before(until) {
		p.changes, p.from, p.until = c.changes, now, until
		p.candidates = append(p.candidates[:0], ch.candidates...)
		p.exclusions = append(p.exclusions[:0], ch.exclusions...)
	}
	if len(ch.candidates) == 0 {
		return ErrNoWorkers
	}
	return nil
}

// plainCandidates are the candidates that [core.eligible] found for a plain request, to be used again for
// later plain requests; see [decisionInput.plain].
type plainCandidates struct {
	changes     uint64    // ranks.changes when they were found
	from, until time.Time // valid from the first until before the second
	candidates  []int
	exclusions  []Exclusion
}

// collect makes candidates of the workers that may take the request and whose health is
// not worse than worst. The list is valid before the time until, unless a worker or a report changes.
func (c *core) collect(in *decisionInput, ch *choice, worst Health) (until time.Time) {
	now := ch.time
	ch.candidates, until = ch.candidates[:0], now.Add(time.Second)
	for i, ord := range c.order {
		e := &c.entries[ord]
		excluded := e.exclude(in, ch.part)
		if excluded == "" {
			var h Health
			if h, excluded = c.healthNow(now, e); excluded == ExcludedFailing {
				if ends, waits := e.avoid.ends(c.bookings(e)); now.Before(ends) {
					until = earlier(until, ends)
				} else if waits {
					until = now // do not keep the list: the next booking may end the back-off
				}
			} else if e.info.Group != "" {
				until = now // do not keep the list: a group's health depends on the age of its summary
			}
			switch a := in.probeAnswer(e); {
			case a == nil:
			case a.Busy && h == Healthy:
				h, excluded = Degraded, ExcludedBusy
			case !a.Busy && excluded == ExcludedStale:
				h, excluded = Healthy, "" // the group answered just now
			}
			if h <= worst {
				excluded = ""
				ch.candidates = append(ch.candidates, ord)
			}
		}
		ch.exclusions[i] = excluded
	}
	return until
}

// lists reports whether the worker has an adapter, or a name that its engine lists.
func (i *WorkerInfo) lists(name string) bool {
	return slices.Contains(i.LoRA, name) || slices.Contains(i.ListedLoRA, name) || slices.Contains(i.ListedAliases, name)
}

// exclude returns why a worker may not take a part of a request, apart from its health and load.
func (e *entry) exclude(in *decisionInput, p part) Exclusion {
	switch info := e.info; {
	case in.Pinned != nil && (e.worker.ID != in.Pinned.ID || !in.AnyRank && e.worker != *in.Pinned):
		return ExcludedPin
	case info.Draining && !in.pinnedByID():
		return ExcludedDraining
	case !info.takes(p),
		in.decode != nil && (info.ID == in.decode.ID || info.Engine != in.decode.Engine):
		return ExcludedRole
	case in.adapter != "" && !info.lists(in.adapter):
		return ExcludedAdapter
	case in.Allowed != nil && !slices.Contains(in.Allowed, e.worker):
		return ExcludedAllowed
	case !Allows(in.AllowedAddresses, info.rankAddress(e.worker.DPRank)):
		return ExcludedAllowed
	case slices.ContainsFunc(in.RequiredTaints, func(t string) bool { return !slices.Contains(info.Taints, t) }):
		return ExcludedTaint
	}
	return ""
}

// measure fills in ch.request, and the scorer.Input of each candidate.
func (c *core) measure(in *decisionInput, why purpose, ch *choice) {
	s, sequence := ch.settings, in.hashes.sequence
	turn := c.turn
	if why == look { // without it, every look gets the same worker until the next booking
		turn += c.looks
	}
	key := turn
	if why != look {
		key = scorer.DrawKey(in.ID)
	}
	ch.request = scorer.Request{
		PromptTokens: in.prompt.tokens, BlockSize: c.blockSize, OutputTokens: c.outputs.expected(in, ch.part),
		// The draw for a booking depends on the seed and the id alone, not on other requests.
		U: scorer.Draw(c.conf.Seed, key), Turn: turn,
		PrefillUntracked: !s.TrackPrefill, Pinned: in.Pinned != nil, EmbeddingHit: in.EmbeddingHit,
	}
	ch.inputs = slices.Grow(ch.inputs[:0], len(ch.candidates))[:len(ch.candidates)]
	idle, holder, most := false, -1, 0 // holder is the candidate with most computed blocks of the prompt
	ch.overlapBlocks = 0
	ch.allInputs = c.conf.Rule != nil || in.Explain || s.UsesMemory()
	cached := &in.overlap
	for i, ord := range ch.candidates {
		e, to := &c.entries[ord], &ch.inputs[i]
		c.load(ch.time, ord, in.prompt.tokens, to)
		to.DecodeOnly = to.DecodeOnly || ch.part == decodePart
		if ch.allInputs {
			c.complete(ch, ord, sequence, to)
		}
		if e.since <= cached.version {
			if ord < len(cached.blocks) {
				to.OverlapBlocks = int(cached.blocks[ord])
			}
			if ord < len(cached.pending) {
				to.PendingBlocks = int(cached.pending[ord])
			}
			if ord < len(cached.whole) || e.learned.rule != ruleNone {
				e.learned.lower(cached, ord, in.prompt.tokens, c.blockSize, to)
			}
			if ord < len(cached.lower[0]) {
				to.HostBlocks = int(cached.lower[0][ord])
				to.DiskBlocks = int(cached.lower[1][ord] + cached.lower[2][ord])
			}
		}
		if len(in.probed.answers) > 0 {
			in.applyProbe(e, &c.slots, ord, to)
		}
		ch.overlapBlocks += to.OverlapBlocks
		idle = idle || to.ActiveRequests == 0
		if n := to.OverlapBlocks - to.PendingBlocks; n > most {
			holder, most = i, n
		}
		for _, t := range in.taints {
			if slices.Contains(e.info.Taints, t.name) {
				to.TaintWeight += t.weight
			}
		}
	}
	// ActivePrefix changes only the cost of an idle candidate, and only if the holder is not idle.
	if idle && holder >= 0 && ch.inputs[holder].ActiveRequests > 0 && s.Policy == scorer.Tokens && s.TrackPrefill {
		ch.request.Sharers = ch.inputs[holder].ActiveRequests
		active := len(sequence) - c.slots.AdditionalBlocks(ch.candidates[holder], sequence)
		ch.request.ActivePrefix = min(most, active) * c.blockSize
	}
}

// leaveOutBusy removes the candidates that are above a threshold. It returns an error if it would remove
// all of them.
func (c *core) leaveOutBusy(in *decisionInput, ch *choice) error {
	if *c.thresholds == (scorer.Thresholds{}) || in.pinnedByID() && in.ID == "" { // see [Router.Holder]
		return nil
	}
	kept := 0
	for i, ord := range ch.candidates {
		e, load := &c.entries[ord], &ch.inputs[i]
		busy, skipped := c.busy(ch.time, e, load, max(1, load.Members))
		c.skipped += skipped
		if !busy {
			ch.candidates[kept], ch.inputs[kept] = ord, *load
			kept++
			continue
		}
		ch.overlapBlocks -= load.OverlapBlocks
		at, _ := c.search(e.worker)
		ch.exclusions[at] = ExcludedBusy
	}
	if kept > 0 {
		ch.candidates, ch.inputs = ch.candidates[:kept], ch.inputs[:kept]
		return nil
	}
	if in.Pinned == nil || in.pinnedByID() {
		return ErrAllBusy
	}
	if c.conf.Mode == Direct {
		return in.pinnedError(fmt.Errorf("%w: %w", ErrPinnedBusy, ErrAllBusy))
	}
	return in.pinnedError(ErrPinnedBusy)
}

// chooseByMode chooses a candidate as the mode says.
func (c *core) chooseByMode(ch *choice) {
	reason := ReasonMode
	switch r := &ch.request; ch.mode {
	case RoundRobin:
		reason = ReasonRoundRobin
		ch.chosen = scorer.RoundRobin(len(ch.candidates), r.Turn)
	case Random:
		ch.chosen = scorer.Random(len(ch.candidates), r.U)
	case LeastLoaded:
		ch.chosen = scorer.LeastLoaded(ch.inputs, r.U)
	case PowerOfTwo:
		ch.chosen = scorer.PowerOfTwo(ch.inputs, r.U)
	case DeviceAware:
		ch.chosen = scorer.DeviceAware(r, ch.inputs, c.conf.DeviceRatio)
		ch.deviceRatio = c.conf.DeviceRatio
	case KV, Direct: // Direct has only pinned workers
		if reason = ReasonLoad; ch.overlapBlocks > 0 {
			reason = ReasonKV
		}
		if c.conf.Rule != nil && ch.part != decodePart {
			chosen := c.conf.Rule(r, ch.inputs, ch.costs)
			ch.chosen = max(0, min(chosen, len(ch.candidates)-1)) // a caller's rule may return a wrong index
			scorer.Bound(ch.costs)
		} else {
			ch.chosen = ch.settings.Choose(r, ch.inputs, ch.costs)
			ch.policy = ch.settings.Policy
		}
		ch.equal = scorer.Equals(ch.costs, ch.chosen)
	}
	ch.reason = cmp.Or(ch.reason, reason)
}

// prefer chooses the worker that the request prefers, if it is a candidate.
func (c *core) prefer(in *decisionInput, ch *choice) {
	at := slices.IndexFunc(ch.candidates, func(ord int) bool { return c.entries[ord].worker == *in.Preferred })
	if at < 0 {
		return
	}
	ch.chosen, ch.reason = at, ReasonPreferred
	if ch.equal > 0 {
		ch.equal = scorer.Equals(ch.costs, at)
	}
}
