// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
)

// Submit is [Router.BestWorker] for a caller that must not block, such as a simulation on a
// virtual clock. If the request must wait, Submit returns waits at once, and [Router.Decided]
// hands over the decision or the error, once. Until then the caller must not change what the
// request refers to, and [Router.Free] ends the wait with [ErrFreed].
//
// Submit does not call [Request.Waiting], and has no timer: the end of [Request.TTFTTarget] and
// [Request.QueueWait] is noticed at the next change of the queue or [Router.Tick].
func (r *Router) Submit(ctx context.Context, req Request) (d Decision, waits bool, err error) {
	s := r.scratch.Get().(*scratch)
	s.request, s.submitted = req, true
	if err = r.decide(ctx, s, &d); errors.Is(err, errQueued) {
		return d, true, nil // s belongs to Decided
	}
	r.release(s)
	return d, false, err
}

// Decided calls a function for each request of [Router.Submit] that has left the queue, in the
// order in which the requests of a pool left. No lock is held during the calls. The caller must
// call [Router.Free] for each request without an error, as after BestWorker. Only one goroutine
// may call Decided at a time.
func (r *Router) Decided(ctx context.Context, each func(id string, d Decision, err error)) {
	for _, p := range r.allPools() {
		for w, s := p.nextDecided(); s != nil; w, s = p.nextDecided() {
			left, err := p.hasLeft(r.conf.Now, w, s)
			if !left {
				continue // nextDecided returns it again
			}
			p.read(func(*core) { w.submitted = nil })
			if err == nil {
				err = r.booked(p, s)
			} else {
				r.flights.end(s.request.ID, 0, s.input.number)
			}
			id := s.request.ID
			var d Decision
			err = r.answer(ctx, s, err, &d)
			r.release(s)
			each(id, d, err)
		}
	}
}

// nextDecided takes the first undelivered request; s is nil if there is none.
func (p *pool) nextDecided() (w *waiter, s *scratch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s == nil && len(p.undelivered) > 0 {
		w, p.undelivered = p.undelivered[0], p.undelivered[1:]
		s = w.submitted
	}
	return w, s
}
