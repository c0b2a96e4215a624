// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/beat"
	"github.com/kvroute/kvroute/slots"
)

// MarkPrefillCompleted notes the first token of a booked request, or of a request that
// another replica booked: its prompt tokens no longer wait to be computed. It returns false
// for an id without a slot and for a repetition, which are both harmless.
func (r *Router) MarkPrefillCompleted(id string) bool { return r.FirstToken(id, SignTold) }

// FirstToken is [Router.MarkPrefillCompleted] with the way in which the first token was
// noticed. [SignEnd] means that the first token came earlier, at an unknown time.
func (r *Router) FirstToken(id string, by Sign) bool {
	fl := r.flights.confirm(id)
	if fl.pool == nil {
		return false
	}
	if fl.leg {
		r.endLeg(id, true)
	}
	now := r.conf.Now()
	r.computed(fl.number, by, now)
	var news, inferred bool
	var bound SessionBinding
	fl.pool.update(now, func(c *core) {
		news, inferred = c.prefillCompleted(now, id, fl.session, fl.rebind, by)
		if news && fl.name != nil {
			ord, _ := c.sessions.worker(now, fl.session)
			bound.Worker = c.entries[ord].worker
		}
	})
	if r.conf.Pull.On {
		r.endPull(&fl, id, now, pullFirstToken)
	}
	switch {
	case !news:
		return false
	case fl.peer != 0:
		r.tellPeers(Change{Kind: FirstToken, ID: id, Owner: fl.peer, Worker: fl.first()})
		return true
	}
	if fl.name != nil {
		bound.Session = *fl.name
		if fl.rebind { // other replicas may have the old binding
			r.conf.Hooks.TellSession(SessionBinding{Session: bound.Session, Worker: bound.Worker, Over: true})
		}
		r.conf.Hooks.TellSession(bound)
	}
	r.note(&fl, later{firstToken: now, firstTokenBy: by})
	r.tellPeers(Change{Kind: FirstToken, ID: id})
	if !inferred {
		r.metrics.firstTokens.AddTo(fl.pool.labels.signs[by], 1)
	}
	return true
}

// AddOutputTokens notes that a booked request has k more tokens of output, which
// fill blocks on its worker. It is optional, and a sign of life of requests that
// are not owned. It reports whether the request has a slot.
func (r *Router) AddOutputTokens(id string, k int) (taken bool) {
	fl := r.flights.get(id)
	if fl.pool == nil || fl.peer != 0 {
		return false
	}
	now := r.conf.Now()
	fl.pool.read(func(c *core) { taken = c.slots.AddOutputTokens(now, id, k) })
	return taken
}

// Free gives the slot of a booked request back. It reports whether the request was
// in flight: false for an unknown id and for a repetition, both harmless.
func (r *Router) Free(id string) bool { return r.free(r.flights.end(id, 0, 0), id, endServed) }

// Abandon is [Router.Free] for a request that its worker did not serve. The prediction that the worker has
// its blocks cached is withdrawn, unless its first token was noted.
func (r *Router) Abandon(id string) bool {
	fl := r.flights.end(id, 0, 0)
	fl.guess.withdraw()
	return r.free(fl, id, endAbandoned)
}

// Leave is [Router.Abandon] for a request whose client left before the worker answered. The worker may hang,
// so the load of the request stays there as [slots.Table.Leave] says; the worker's health does not change.
// sent says that the request may have reached the worker. If not, only the load of its prefill leg stays.
func (r *Router) Leave(id string, sent bool) bool {
	fl := r.flights.end(id, 0, 0)
	fl.guess.withdraw()
	if fl.leg {
		r.Leave(legID(id), true)
		fl.leg = false
	}
	if sent {
		return r.free(fl, id, endLeft)
	}
	return r.free(fl, id, endAbandoned)
}

// ending is how a request ended.
type ending uint8

const (
	endServed    ending = iota
	endAbandoned        // no worker served it
	endLeft             // the same, and its load stays on the worker
)

func (r *Router) free(fl flight, id string, by ending) bool {
	if fl.pool == nil {
		return false
	}
	if fl.leg {
		r.endLeg(id, by == endServed)
	}
	now := r.conf.Now()
	r.confirms.End(fl.number, now)
	if by == endServed {
		r.computed(fl.number, SignEnd, now)
	} else {
		r.confirms.Drop(fl.number)
	}
	if r.conf.Pull.On {
		r.endPull(&fl, id, now, [...]pullEnd{endServed: pullServed, endAbandoned: pullError, endLeft: pullLeft}[by])
	}
	var silent bool
	var inferred time.Time
	fl.pool.update(now, func(c *core) {
		if w := c.waiting[id]; w != nil {
			c.remove(w, ErrFreed)
		} else {
			silent, inferred = c.end(now, id, by)
		}
	})
	end := later{freed: now}
	if !inferred.IsZero() {
		end.firstToken, end.firstTokenBy = inferred, SignRate
	}
	if silent && by == endServed {
		end.firstTokenBy = SignEnd
		r.metrics.firstTokens.AddTo(fl.pool.labels.signs[SignEnd], 1)
	}
	r.finish(&fl, id, end, by == endServed)
	r.tellPeers(Change{Kind: SlotFreed, ID: id, Abandoned: by != endServed, Left: by == endLeft})
	return true
}

// note adds later events to the kept decision of a request in flight, and to its outcome.
func (r *Router) note(fl *flight, l later) {
	r.kept.change(fl.number, func(d *keptDecision) { d.add(l) })
	fl.outcome.change(func(o *Outcome) { o.add(l) })
}

// finish reports the outcome of a request that has ended. No lock is held.
func (r *Router) finish(fl *flight, id string, end later, served bool) {
	if parent, isLeg := strings.CutSuffix(id, legSuffix); isLeg {
		r.flights.get(parent).outcome.change(func(o *Outcome) { o.LegEnded = end.freed })
		return
	}
	r.note(fl, end)
	var done Outcome
	fl.outcome.change(func(o *Outcome) {
		o.Abandoned = !served
		done = *o
	})
	if fl.outcome != nil {
		r.conf.Hooks.Finished(done)
	}
}

// Run calls [Router.Tick] and [Router.Judge] until ctx ends.
func (r *Router) Run(ctx context.Context) error {
	const every = 15 * time.Second // less than the 30 s between two searches for expired slots
	t := time.NewTimer(beat.Wait(every))
	defer t.Stop()
	judge := time.NewTimer(beat.Wait(time.Second))
	defer judge.Stop()
	var due <-chan time.Time
	if r.conf.InferFirstTokens && r.conf.Queue.Threshold != nil {
		// Requests in the queue wait for prefills, which may end without any report.
		due = time.Tick(inferQueued)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
			t.Reset(beat.Wait(every))
			r.Tick()
		case <-judge.C:
			judge.Reset(beat.Wait(time.Second))
			r.Judge()
		case <-due:
			now := r.conf.Now()
			for _, p := range r.allPools() {
				p.update(now, func(c *core) {
					if c.queue.Len() > 0 { // else the next decision infers
						c.infer(now)
					}
				})
			}
		}
	}
}

// Tick applies the passing of time: slots that are not owned, sessions, ids and waiting requests
// expire, and models that had no workers for an hour are forgotten, unless they have a card. It may be
// called at any rate. Without calls, slots that are not owned stay, and old
// sessions and models stay in memory; see [Router.Run].
func (r *Router) Tick() {
	now := r.conf.Now()
	for _, p := range r.allPools() {
		p.update(now, func(c *core) {
			c.expired += c.slots.Expire(now)
			c.sessions.expire(now)
			c.infer(now)
			c.expire(now)
		})
	}
	r.given.expire(now)
	for _, id := range r.flights.sweep() {
		r.tellPeers(Change{Kind: SlotFreed, ID: id})
	}
	r.forgetModels(now)
}

func (r *Router) allPools() []*pool {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	return slices.Collect(maps.Values(r.pools))
}

// noteInferred notes first tokens that a pool has inferred. No lock is held.
func (r *Router) noteInferred(p *pool, list []slots.Inference) {
	for _, i := range list {
		if i.Number >= peerNumbers {
			continue // counted by the replica that booked it
		}
		if fl := r.flights.get(i.ID); fl.number == i.Number {
			r.computed(i.Number, Sign(i.By), i.At)
			r.note(&fl, later{firstToken: i.At, firstTokenBy: Sign(i.By)})
		}
		r.metrics.firstTokens.AddTo(p.labels.signs[Sign(i.By)], 1)
		r.tellPeers(Change{Kind: FirstToken, ID: i.ID})
	}
}
