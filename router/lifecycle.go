// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// AddOutputTokens notes that a booked request has k more tokens of output, which
// fill blocks on its worker. It is optional, and a sign of life of requests that
// nobody owns. It reports whether the request has a slot.
func (r *Router) AddOutputTokens(id string, k int) bool {
	fl, _ := r.flights.get(id)
	if fl.pool == nil || fl.peer != 0 {
		return false
	}
	now := r.conf.Now()
	fl.pool.mu.Lock()
	defer fl.pool.mu.Unlock()
	return fl.pool.core.slots.AddOutputTokens(now, id, k)
}

// Free gives the slot of a booked request back. It reports whether the request was
// in flight: false for an unknown id and for a repetition, both harmless.
func (r *Router) Free(id string) bool { return r.free(r.flights.end(id, 0), id, true) }

// Abandon is [Router.Free] for a request that its worker did not serve: its blocks
// do not count as cached there because of it, unless its first token was noted.
func (r *Router) Abandon(id string) bool {
	fl := r.flights.end(id, 0)
	fl.guess.withdraw()
	return r.free(fl, id, false)
}

func (r *Router) free(fl flight, id string, served bool) bool {
	if fl.pool == nil {
		return false
	}
	now := r.conf.Now()
	var silent bool
	fl.pool.update(func(c *core) []*waiter {
		var woken []*waiter
		if w := c.dismiss(id); w != nil {
			woken = append(woken, w)
		} else {
			silent = c.end(now, id)
		}
		return append(woken, c.pump(now)...)
	})
	if silent && served {
		r.noteFirstToken(fl.number, time.Time{}, SignEnd)
		r.metrics.firstToken(fl.pool.labels, SignEnd)
	}
	r.kept.change(fl.number, func(d *Decision) { d.Freed = now })
	r.tellPeers(Change{Kind: SlotFreed, ID: id, Abandoned: !served})
	return true
}

// Sign is how a first token was noticed.
type Sign string

// The signs.
const (
	SignTold     Sign = "told"             // its caller said so: [Router.MarkPrefillCompleted]
	SignObserver Sign = "observer"         // it was seen in the response
	SignHeaders  Sign = "response-headers" // the headers of a stream came, which its worker sends with it
	SignOrder    Sign = scorer.ByOrder     // inferred: one that was booked later on the worker has its own
	SignRate     Sign = scorer.ByRate      // inferred: its worker should have computed its prompt by now
	SignEnd      Sign = "end"              // only by the whole response, or by its end
)

// MarkPrefillCompleted notes the first token of a booked request, or of one that
// another replica booked: its prompt tokens no longer wait to be computed. It reports
// whether that was news: false for an id without a slot and for a repetition, both
// harmless.
func (r *Router) MarkPrefillCompleted(id string) bool { return r.FirstToken(id, SignTold) }

// FirstToken is [Router.MarkPrefillCompleted] with the way in which the first token was
// noticed. With [SignEnd] the first token came at some time before.
func (r *Router) FirstToken(id string, by Sign) bool {
	fl := r.flights.confirm(id)
	if fl.pool == nil {
		return false
	}
	now := r.conf.Now()
	var news, inferred bool
	bound := SessionBinding{Session: fl.name}
	fl.pool.update(func(c *core) []*waiter {
		if news, inferred = c.prefillCompleted(now, id, fl.session, fl.anew, by); !news {
			return nil
		}
		if fl.name != "" {
			ord, _ := c.sessions.worker(now, fl.session)
			bound.Worker = c.entries[ord].worker
		}
		return c.pump(now)
	})
	switch {
	case !news:
		return false
	case fl.peer != 0:
		r.tellPeers(Change{Kind: FirstToken, ID: id, Owner: fl.peer, Worker: fl.first})
		return true
	}
	if fl.name != "" {
		if fl.anew { // others may have it where it was
			r.conf.TellSession(SessionBinding{Session: fl.name, Worker: bound.Worker, Over: true})
		}
		r.conf.TellSession(bound)
	}
	r.noteFirstToken(fl.number, now, by)
	r.tellPeers(Change{Kind: FirstToken, ID: id})
	if !inferred {
		r.metrics.firstToken(fl.pool.labels, by)
	}
	return news
}

func (r *Router) noteFirstToken(number uint64, at time.Time, by Sign) {
	r.kept.change(number, func(d *Decision) { d.FirstToken, d.FirstTokenBy = at, by })
}

func (m *metrics) firstToken(l *labels, by Sign) {
	m.firstTokens.Add(context.Background(), 1, l.signs[by]...)
}

// Tick does what time alone brings: slots that nobody owns end, and so does
// waiting that has lasted too long. It may be called as often as is handy, and
// must be once in a while if such slots or sessions are used; see [Router.Run].
func (r *Router) Tick() {
	now := r.conf.Now()
	ended := r.tick(now)
	r.tellInferred()
	for _, id := range ended {
		r.tellPeers(Change{Kind: SlotFreed, ID: id})
	}
}

// tick returns our requests that ended without having been freed.
func (r *Router) tick(now time.Time) (ended []string) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	for _, p := range r.pools {
		p.update(func(c *core) []*waiter {
			c.expired += uint64(c.slots.Expire(now))
			c.sessions.expire(now)
			return append(c.infer(now), c.expire(now)...)
		})
	}
	return r.flights.sweep()
}

// Run calls Tick until ctx ends.
func (r *Router) Run(ctx context.Context) error {
	const every = 15 * time.Second // slots are looked at every 30 s at most
	t := time.NewTicker(every)
	defer t.Stop()
	var due <-chan time.Time
	if r.conf.InferFirstTokens && r.conf.Queue.Threshold != nil {
		// Requests in the queue wait for prefills, which may end without any report.
		i := time.NewTicker(inferQueued)
		defer i.Stop()
		due = i.C
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
			r.Tick()
		case <-due:
			r.infer()
		}
	}
}

// inferEvery is how old the account may be of prefills that are due: much less than
// one takes that matters.
const inferEvery = time.Millisecond

// inferQueued is how often prefills are looked at while requests wait in a queue.
const inferQueued = 50 * time.Millisecond

// infer starts the requests whose prefill should be done by now. It is called before
// loads are read.
//
// Every rank is looked at, since the decision that follows looks at every rank, too: to
// keep them in the order of what is due next would cost more than the comparison saves.
func (c *core) infer(now time.Time) (woken []*waiter) {
	if !c.conf.InferFirstTokens || now.Sub(c.looked) < inferEvery {
		return nil
	}
	c.looked = now
	inferred := 0
	for _, ord := range c.order {
		inferred += c.slots.InferByRate(now, ord)
	}
	if inferred == 0 {
		return nil
	}
	return c.pump(now)
}

// prefillCompleted notes the first token of a request, and binds its session. inferred
// says that it was noted before, by itself.
func (c *core) prefillCompleted(now time.Time, id string, session uint64, anew bool, by Sign) (news, inferred bool) {
	if news, inferred = c.slots.FirstToken(now, id, by != SignEnd); news && session != 0 {
		ord, _ := c.slots.Worker(id)
		c.sessions.bind(now, session, ord, anew)
	}
	return news, inferred
}

// noteInferred notes what a pool has inferred; the fleet's lock may be held.
func (r *Router) noteInferred(p *pool, list []scorer.Inference) {
	for _, i := range list {
		if i.Number >= peerNumbers {
			continue // it counts where it was decided
		}
		r.noteFirstToken(i.Number, i.At, Sign(i.By))
		r.metrics.firstToken(p.labels, Sign(i.By))
		if r.conf.Tell != nil {
			r.inferredMu.Lock()
			r.inferred = append(r.inferred, i.ID)
			r.inferredMu.Unlock()
		}
	}
}

// tellInferred tells other replicas of the first tokens that were inferred. No lock is held.
func (r *Router) tellInferred() {
	if r.conf.Tell == nil {
		return
	}
	r.inferredMu.Lock()
	ids := r.inferred
	r.inferred = nil
	r.inferredMu.Unlock()
	for _, id := range ids {
		r.conf.Tell(Change{Kind: FirstToken, ID: id})
	}
}

// infer admits requests that wait in a queue for prefills which should be done by now.
func (r *Router) infer() {
	now := r.conf.Now()
	defer r.tellInferred()
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	for _, p := range r.pools {
		p.update(func(c *core) []*waiter {
			if c.queue == nil || c.queue.Len() == 0 {
				return nil // the next decision looks
			}
			return c.infer(now)
		})
	}
}
