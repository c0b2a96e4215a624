// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// admit decides for the request in s, whose hashes are made. It counts the overlap without
// the pool's lock; load, cost, choice and booking are one critical section. If the request
// must wait, admit returns when the request has left the queue, or errQueued at once if the
// request is one of [Router.Submit].
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
	queued := w != nil && s.submitted
	if queued {
		w.submitted, d.PickTime = s, now().Sub(matched)
	}
	p.unlock()
	pick := now().Sub(matched)
	switch {
	case queued:
		return errQueued // s may belong to Decided by now
	case waits:
		err = p.wait(ctx, now, w, s)
	case w != nil:
		err = w.err
	}
	if err != nil {
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
	w = &waiter{q: q, d: d, since: now, wake: make(chan struct{}, 1), split: c.splits && q.Split != SplitNever}
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

// decide chooses a worker for q and, if q has an id, takes a slot on it; in a split model also
// for the prefill leg. d gets the choice. othersWait says that requests wait already in
// the lane of q: then q must wait, too, if any worker may take it. After an error nothing
// is booked.
func (c *core) decide(now time.Time, q *question, d *Decision, othersWait bool) error {
	settings, err := c.settingsFor(q)
	if err != nil {
		return err
	}
	if c.conf.Mode == Direct && q.Pinned == nil {
		return ErrPinMissing
	}
	chosen, err := c.pickWorkers(now, q, settings, d, othersWait)
	if err != nil {
		return err
	}
	if q.ID == "" {
		c.asked++
	}
	if q.explain {
		c.explain(now, q, chosen, d)
	}
	if q.ID != "" && !c.takeSlot(now, q, chosen, d) {
		return ErrDuplicate
	}
	if d.Prefill != nil && !c.bookLeg(now, q, d) {
		c.slots.Free(q.ID)
		return ErrDuplicate
	}
	return nil
}

// pick chooses a worker for a part of q. It returns the candidate, and the choice in d. q.workspace
// gets the inputs of the choice.
//
// The order of the steps is fixed: the workers that may take the part, their loads, the
// busy ones, whether to wait, the session's worker, and then the best one.
func (c *core) pick(now time.Time, q *question, p part, settings *scorer.Settings, d *Decision, othersWait bool) (chosen int, err error) {
	c.workspace = q.workspace
	c.part = p
	if err := c.eligible(now, q); err != nil {
		return 0, err
	}
	c.grow(now)
	c.refreshSpeeds(now)
	c.measure(now, q, settings)
	mayWait := c.queue != nil && q.ID != ""
	if err := c.leaveOutBusy(now, q); err != nil {
		if mayWait {
			return 0, errMustWait
		}
		return 0, err
	}
	if mayWait && (othersWait || scorer.MustWait(c.inputs, *c.conf.Queue.Threshold)) {
		return 0, errMustWait
	}
	bound, err := c.followSession(now, q)
	if err != nil {
		return 0, err
	}
	d.Time, d.Second = now, Second{}
	d.BlockSize, d.Draw, d.Turn = c.blockSize, c.request.U, c.request.Turn
	d.ExpectedOutput, d.ActivePrefix, d.Sharers = c.request.OutputTokens, c.request.ActivePrefix, c.request.Sharers
	d.Settings, d.Thresholds = settings, c.thresholds
	chosen = c.choose(q, settings, bound, d)
	c.describe(q, chosen, d)
	if q.WantSecond && q.Pinned == nil && !(bound >= 0 && c.conf.Sessions.Hard) {
		d.Second = c.second(chosen, nil)
	}
	return chosen, nil
}
