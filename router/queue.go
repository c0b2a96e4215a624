// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// waiter is a request in the queue. Its memory is not used again: it is woken after the
// pool's lock is free, when its caller may have returned.
type waiter struct {
	// Of the caller; while the request waits the core changes them, under the pool's lock.
	q *question
	d *Decision

	item  *scorer.Item[*waiter]
	since time.Time
	done  bool  // it has left the queue: booked, or with err
	stale bool  // its overlap is to be counted anew before it is admitted
	err   error // if done

	wake chan struct{} // set once; has room for one
}

const (
	// rematchAfter is how old the overlap of a request may be that is admitted.
	rematchAfter = 10 * time.Second
	// safetyNet is how often a queue is looked at if nothing happens.
	safetyNet = 60 * time.Second
)

// leastUncached returns what the best candidate of the last decision would have to
// compute.
func (c *core) leastUncached() int {
	least := c.request.PromptTokens
	for i := range c.inputs {
		least = min(least, c.settings.UncachedTokens(&c.request, &c.inputs[i]))
	}
	return least
}

// pump admits requests that need not wait any more. It is called after each input that may
// have made room.
func (c *core) pump(now time.Time) (woken []*waiter) {
	if c.queue == nil || c.queue.Len() == 0 {
		return nil
	}
	c.queue.Admit(func(it *scorer.Item[*waiter]) bool {
		w := it.Value
		switch {
		case w.stale:
			return false // its caller counts
		case it.Deadline != 0 && it.Deadline <= now.Sub(c.epoch):
			w.err = ErrTooLate
		case w.q.sequence != nil && now.Sub(w.q.matched) >= rematchAfter:
			w.stale = true
			woken = append(woken, w)
			return false
		default:
			w.err = c.decide(now, w.q, w.d, false)
		}
		if errors.Is(w.err, errMustWait) {
			w.err = nil
			return false
		}
		c.leave(w, w.err)
		w.d.QueueTime = now.Sub(w.since)
		woken = append(woken, w)
		return true
	})
	return woken
}

// expire removes requests that have waited too long.
func (c *core) expire(now time.Time) (woken []*waiter) {
	if c.queue == nil || c.queue.Len() == 0 {
		return nil
	}
	for _, it := range c.queue.Expire(now.Sub(c.epoch)) {
		c.leave(it.Value, ErrTooLate)
		woken = append(woken, it.Value)
	}
	return append(woken, c.pump(now)...)
}

// timeOut removes a request whose timer has fired, unless it has left the queue already. The
// timer decides, not the pool's clock, which may differ from it.
func (c *core) timeOut(now time.Time, w *waiter) (woken []*waiter) {
	if !w.done {
		c.queue.Remove(w.item)
		c.leave(w, ErrTooLate)
	}
	return c.pump(now)
}

// giveUp removes a request whose caller stopped waiting. If the request was booked in the
// meantime, its slot is freed.
func (c *core) giveUp(now time.Time, w *waiter) (woken []*waiter) {
	switch {
	case !w.done:
		c.queue.Remove(w.item)
	case w.err == nil:
		c.slots.Free(w.q.ID)
	}
	c.leave(w, context.Canceled)
	return c.pump(now)
}

// dismiss removes the request with an id from the queue because it was freed. It returns
// its waiter, nil if the request does not wait.
func (c *core) dismiss(id string) *waiter {
	w := c.waiting[id]
	if w != nil {
		c.queue.Remove(w.item)
		c.leave(w, ErrFreed)
	}
	return w
}

// leave notes that a waiter has left the queue, and how.
func (c *core) leave(w *waiter, err error) {
	w.done, w.err = true, err
	if c.waiting[w.q.ID] == w { // else another request has its id by now
		delete(c.waiting, w.q.ID)
	}
}

// wakeAll wakes the callers of requests that were admitted, refused or made stale. The
// pool's lock is free.
func wakeAll(woken []*waiter) {
	for _, w := range woken {
		select {
		case w.wake <- struct{}{}:
		default: // it was woken before and has not looked yet
		}
	}
}

// wait returns when w has left the queue, or takes it out when ctx ends.
func (p *pool) wait(ctx context.Context, now func() time.Time, w *waiter, s *scratch) error {
	left := false
	defer func() {
		if !left { // also if Waiting panics
			p.update(func(c *core) []*waiter { return c.giveUp(now(), w) })
		}
	}()
	if w.q.Waiting != nil {
		w.q.Waiting()
	}
	if w.q.landed() {
		return ErrFreed // before it stood in the queue, where that is seen
	}
	var late <-chan time.Time
	if t := w.q.mayWait(); t > 0 {
		timer := time.NewTimer(t)
		defer timer.Stop()
		late = timer.C
	}
	net := time.NewTicker(safetyNet)
	defer net.Stop()
	for {
		select {
		case <-w.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late:
			p.update(func(c *core) []*waiter { return c.timeOut(now(), w) })
		case <-net.C:
			p.update(func(c *core) []*waiter { return c.pump(now()) })
			continue
		}
		p.mu.Lock()
		done, stale := w.done, w.stale
		p.mu.Unlock()
		switch {
		case done:
			left = true
			return w.err
		case stale:
			p.recount(now, w, s)
		}
	}
}

// recount counts the overlap of a request again that has waited for long. The request is
// at the head of its lane, which waits for it.
func (p *pool) recount(now func() time.Time, w *waiter, s *scratch) {
	// The core does not read the overlap of a stale waiter, but it reads w.q: so w.q is
	// replaced under the lock.
	q := *w.q
	p.match(now(), &q, s)
	p.update(func(c *core) []*waiter {
		*w.q = q
		w.stale = false
		return c.pump(now())
	})
}

// update gives the core an input, and wakes requests that need not wait any more.
func (p *pool) update(input func(*core) []*waiter) {
	p.mu.Lock()
	woken := input(&p.core)
	inferred := p.core.slots.TakeInferred()
	p.mu.Unlock()
	wakeAll(woken)
	p.inferred(inferred)
}
