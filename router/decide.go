// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// admit decides for the request in s, whose hashes are made. It counts the overlap without
// the pool's lock; load, cost, choice and booking are one critical section. If the request
// must wait, admit returns when the request has left the queue.
func (p *pool) admit(ctx context.Context, now func() time.Time, s *scratch) error {
	q, d := &s.question, &s.decision
	start := s.hashed
	if start.IsZero() {
		start = now()
	}
	matched := start
	if q.sequence != nil {
		p.match(start, q, s)
		matched = now()
	}
	d.MatchTime = matched.Sub(start)

	p.mu.Lock()
	w, err := p.core.submit(matched, q, d)
	waits := w != nil && !w.done
	p.unlock()
	pick := now().Sub(matched)
	switch {
	case waits:
		err = p.wait(ctx, now, w, s)
	case w != nil:
		err = w.err
	}
	if err != nil {
		if waits || isCrowded(err) {
			p.mu.Lock()
			err = p.core.crowded(now(), q, err)
			p.mu.Unlock()
		}
		return err
	}
	d.PickTime = pick
	return nil
}

// submit decides for q, or puts it into the queue and returns its waiter, which may have
// left the queue again.
func (c *core) submit(now time.Time, q *question, d *Decision) (w *waiter, err error) {
	c.infer(now)
	lane := c.lane(q)
	err = c.decide(now, q, d, c.queue != nil && c.queue.Waits(lane))
	if !errors.Is(err, errMustWait) {
		return nil, err
	}
	w = &waiter{q: q, d: d, since: now, wake: make(chan struct{}, 1)}
	if t := q.mayWait(); t > 0 {
		w.deadline = now.Add(t)
	}
	least := q.tokens // to compute, on the best candidate
	for i := range c.inputs {
		least = min(least, c.settings.UncachedTokens(&c.request, &c.inputs[i]))
	}
	place := scorer.Waiting{Strict: q.StrictPriority, Jump: q.Priority, Lane: lane, Arrival: time.Duration(now.UnixNano()), Uncached: least}
	if w.item, err = c.queue.Push(place, w); err != nil {
		return nil, fmt.Errorf("%d requests wait: %w", c.queue.Len(), err)
	}
	c.waiting[q.ID] = w
	c.pump(now)
	return w, nil
}

// decide chooses a worker for q and, if q has an id, takes a slot on it. d gets the choice,
// and q.workspace the inputs of the choice. othersWait says that requests wait already in
// the lane of q: then q must wait, too, if any worker may take it. After an error nothing
// is booked.
//
// The order of the steps is fixed: the workers that may take the request, their loads, the
// busy ones, whether to wait, the session's worker, and then the best one.
func (c *core) decide(now time.Time, q *question, d *Decision, othersWait bool) error {
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
	if mayWait && (othersWait || scorer.MustWait(c.inputs, *c.conf.Queue.Threshold)) {
		return errMustWait
	}
	bound, err := c.followSession(now, q)
	if err != nil {
		return err
	}
	d.Time, d.Second = now, Second{}
	d.BlockSize, d.Draw, d.Turn = c.blockSize, c.request.U, c.request.Turn
	d.Settings, d.Thresholds = settings, c.thresholds
	chosen := c.choose(q, settings, bound, d)
	c.describe(q, chosen, d)
	if q.WantSecond && q.Pinned == nil && !(bound >= 0 && c.conf.Sessions.Hard) {
		d.Second = c.second(chosen)
	}
	if q.ID != "" && !c.takeSlot(now, q, chosen, d) {
		return ErrDuplicate
	}
	if q.explain {
		c.explain(now, q, d)
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
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadOverride, err)
	}
	return &s, nil
}

// choose returns the chosen candidate, and the reason in d. bound is the candidate that the
// session is bound to, or -1. There is a candidate.
func (c *core) choose(q *question, s *scorer.Settings, bound int, d *Decision) (chosen int) {
	d.Reason, d.Cost, d.Policy, d.Equal = q.reason, 0, "", 0
	c.costs = slices.Grow(c.costs[:0], len(c.inputs))[:len(c.inputs)]
	clear(c.costs)
	switch {
	case bound >= 0:
		d.Reason = ReasonSession
		return bound
	case q.Pinned != nil:
		if d.Reason = ReasonPinned; len(c.candidates) == 1 {
			return 0
		}
	}
	chosen = c.best(s, d)
	if q.Preferred == nil || q.Pinned != nil {
		return chosen
	}
	at := slices.IndexFunc(c.candidates, func(ord int) bool { return c.entries[ord].worker == *q.Preferred })
	if at < 0 {
		return chosen
	}
	d.Reason, d.Cost = ReasonPreferred, c.costs[at]
	if d.Equal > 0 {
		d.Equal = scorer.Equals(c.costs, at)
	}
	return at
}

// best returns the candidate that the mode chooses.
func (c *core) best(s *scorer.Settings, d *Decision) (chosen int) {
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

// describe fills in the decision's fields about the chosen candidate.
func (c *core) describe(q *question, chosen int, d *Decision) {
	ord, in := c.candidates[chosen], &c.inputs[chosen]
	e := &c.entries[ord]
	d.OverlapBlocks = in.OverlapBlocks
	d.CachedTokens = in.OverlapBlocks * c.blockSize
	// The engine computes the last token of a prompt even if it holds them all.
	d.PrefillTokens = max(min(1, q.tokens), q.tokens-d.CachedTokens)
	d.CoarseTTFT = scorer.CoarseTTFT(d.PrefillTokens, in.ActiveRequests, c.throughput(e))
	d.EstimatedTTFT = d.Settings.ModelTTFT(&c.request, in)
	d.Worker, d.WorkerName, d.Address = e.worker, e.info.Name, e.info.rankAddress(e.worker.DPRank)
	d.Engine, d.NameRank, d.Group = e.info.Engine, e.info.wantsRank(e.worker.DPRank), e.info.Group
	d.Member = c.member(q, ord)
}

// takeSlot books a slot on the chosen candidate. It returns false if a request with this
// id has a slot.
func (c *core) takeSlot(now time.Time, q *question, chosen int, d *Decision) bool {
	ord := c.candidates[chosen]
	e := &c.entries[ord]
	if !c.slots.Add(now, q.ID, &scorer.Booking{
		Worker: ord, Blocks: q.sequence, BlockSize: c.blockSize,
		PromptTokens: q.tokens, CachedTokens: q.tokens - d.PrefillTokens,
		ExpectedOutput: q.ExpectedOutput, Owned: q.Owned, Unseen: q.Unseen, Number: q.number,
		BlocksUntracked: c.conf.NoActiveBlocks, PrefillUntracked: !d.Settings.TrackPrefill, NoReuse: !d.Settings.AssumeKVReuse,
		Reports: e.info.Group != "",
	}) {
		return false
	}
	c.turn++
	e.routed++
	if q.tokens > 0 {
		c.typical.note(q.tokens, d.PrefillTokens)
	}
	q.ordinal, q.generation = ord, e.since
	q.unreported = c.unknown(e)
	if d.OverlapBlocks == 0 && !c.anyOverlap() {
		e.cold = c.turn
	}
	c.sessions.touch(now, q.session, q.SessionFinal)
	return true
}

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
