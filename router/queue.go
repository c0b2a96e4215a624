// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvroute/kvroute/slots"
)

// errMustWait is the outcome of a decision that puts the request into the queue.
var errMustWait = errors.New("the request must wait")

// waiter is a request in the queue. It is never used for a second request, because it may be woken after its
// caller has returned.
type waiter struct {
	// While the request waits, the core uses these values under the pool's lock.
	in *decisionInput // replaced when the overlap is counted again
	ch *choices
	to *result

	item     *slots.Item[*waiter]
	since    time.Time
	deadline time.Time // the request must leave the queue then; zero: no deadline
	done     bool      // the request has left the queue: booked, or with err
	stale    bool      // the caller must count the overlap again before the request is admitted
	err      error     // if done
	split    bool      // the request may have a prefill leg

	submitted *scratch // of a request of Submit; nil if the caller waits in BestWorker, or has the decision

	wake chan struct{} // with room for one value
}

// enqueue puts a request that must wait into the queue, and returns its waiter. The waiter may have left the
// queue when enqueue returns.
func (c *core) enqueue(now time.Time, lane int, in *decisionInput, ch *choices, to *result) (*waiter, error) {
	w := &waiter{in: in, ch: ch, to: to, since: now, wake: make(chan struct{}, 1), split: c.splits && in.Split != SplitNever}
	if t := in.mayWait(); t > 0 {
		w.deadline = now.Add(t)
	}
	least := in.prompt.tokens // the tokens to compute on the candidate with the fewest
	for i := range ch.worker.inputs {
		least = min(least, c.settings.UncachedTokens(&ch.worker.request, &ch.worker.inputs[i]))
	}
	var err error
	if w.item, err = c.queue.Push(slots.Waiting{
		Strict: in.StrictPriority, Jump: in.Priority, Lane: lane, Arrival: time.Duration(now.UnixNano()), Uncached: least,
	}, w); err != nil {
		return nil, fmt.Errorf("%d requests wait: %w", c.queue.Len(), err)
	}
	c.waiting[in.ID] = w
	c.pump(now)
	return w, nil
}

// rematchAfter is how old the overlap of an admitted request may be.
const rematchAfter = 10 * time.Second

// pump admits requests that need not wait any more. It runs after each input that may
// have made room.
func (c *core) pump(now time.Time) {
	if c.queue == nil || c.queue.Len() == 0 {
		return
	}
	c.queue.Admit(func(it *slots.Item[*waiter]) bool {
		w := it.Value
		switch {
		case w.stale:
			return false
		case w.late(now):
			w.err = ErrTooLate
		case w.in.hashes.sequence != nil && now.Sub(w.in.overlap.matchedAt) >= rematchAfter:
			w.stale = true
			c.woken = append(c.woken, w)
			return false
		default:
			w.err = c.decide(now, w.in, take, now.Sub(w.since), w.ch, w.to)
		}
		if errors.Is(w.err, errMustWait) {
			w.err = nil
			return false
		}
		c.leave(w, w.err)
		return true
	})
}

func (w *waiter) late(now time.Time) bool { return !w.deadline.IsZero() && !now.Before(w.deadline) }

// expire removes requests that have waited too long.
func (c *core) expire(now time.Time) {
	var late []*waiter
	for _, w := range c.waiting {
		if w.late(now) {
			late = append(late, w)
		}
	}
	// In the order of their arrival, so that equal inputs give equal outputs.
	slices.SortFunc(late, func(a, b *waiter) int { return cmp.Compare(a.in.number, b.in.number) })
	for _, w := range late {
		c.remove(w, ErrTooLate)
	}
}

// remove takes a request out of the queue with an error, unless it has left already.
func (c *core) remove(w *waiter, err error) {
	if !w.done {
		c.queue.Remove(w.item)
		c.leave(w, err)
	}
}

// giveUp removes a request whose caller stopped waiting. If the request was booked in the
// meantime, its slot is freed.
func (c *core) giveUp(w *waiter) {
	if w.done && w.err == nil {
		c.slots.Free(w.in.ID)
		if w.ch.hasLeg {
			c.slots.Free(w.ch.legInput.ID)
		}
	}
	c.remove(w, context.Canceled)
}

// leave notes that a waiter has left the queue, and wakes its caller.
func (c *core) leave(w *waiter, err error) {
	w.done, w.err = true, err
	c.woken = append(c.woken, w)
	if c.waiting[w.in.ID] == w { // else another request has this id now
		delete(c.waiting, w.in.ID)
	}
}

// wait returns when w has left the queue, or removes it from the queue when ctx ends.
func (p *pool) wait(ctx context.Context, now func() time.Time, flights *flights, w *waiter, s *scratch) error {
	left := false
	defer func() {
		if !left { // also if Waiting panics
			p.update(now(), func(c *core) { c.giveUp(w) })
		}
	}()
	if w.in.Waiting != nil {
		w.in.Waiting(w.split)
	}
	if flights.get(w.in.ID).number != w.in.number {
		return ErrFreed // Free was called before the request was in the queue
	}
	var late <-chan time.Time
	if t := w.in.mayWait(); t > 0 {
		timer := time.NewTimer(t)
		defer timer.Stop()
		late = timer.C
	}
	for {
		select {
		case <-w.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late:
			// The timer decides, not the pool's clock, which may differ from it.
			p.update(now(), func(c *core) { c.remove(w, ErrTooLate) })
		}
		var err error
		if left, err = p.hasLeft(now, w, s); left {
			return err
		}
	}
}

// hasLeft says whether w has left the queue, and with which error. If the request must count
// its overlap again first, hasLeft does so, and w is woken again when it has left.
func (p *pool) hasLeft(now func() time.Time, w *waiter, s *scratch) (left bool, err error) {
	var stale bool
	p.read(func(*core) { left, stale, err = w.done, w.stale, w.err })
	if !left && stale {
		p.recount(now, w, s)
	}
	return left, err
}

// recount counts the overlap again for a request that has waited for long. The request is
// the first of its lane, so the whole lane waits for recount.
func (p *pool) recount(now func() time.Time, w *waiter, s *scratch) {
	// The core does not read the overlap of a stale waiter, but it reads w.in: so w.in is
	// replaced under the lock.
	in := *w.in
	took := in.overlap.took
	p.match(now(), &in.hashes, s)
	in.overlap = s.overlap
	in.overlap.took = took // the wait is not part of a decision's time
	p.update(now(), func(*core) {
		w.in = &in
		w.stale = false
	})
}
