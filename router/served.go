// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net/netip"
	"time"
)

// Response is what the proxy knows when the response to a booked request begins.
type Response struct {
	// Address is the address of the last worker that the proxy tried; invalid if unknown.
	Address netip.AddrPort
	// Asked is the number of workers that the proxy tried; 0 if unknown.
	Asked int
	// Status is the response's HTTP status.
	Status int
	// Local says that the proxy made the response, not a worker.
	Local bool
	// Nowhere says that the proxy made the response, and that the request reached no worker. The other
	// fields but Status are unknown then.
	Nowhere bool
}

// avoidance is the state of a worker that fails. The worker gets no requests for a period. If it fails
// again within a minute after the period, the next period is twice as long, up to 16 times the
// first. While there is no better worker, the worker is a candidate anyway.
type avoidance struct {
	until    time.Time // the end of the latest period
	strikes  int       // periods so far, each begun at most a minute after the one before
	errors   int       // server errors in a row
	answered time.Time // its last response below 500
}

const (
	strikesForgotten = time.Minute
	mostStrikes      = 5 // 2⁴ times the first period
	// errorsInRow is the number of consecutive responses of 500 and above that count as a
	// failure of the worker. A single one may be caused by its request.
	errorsInRow = 5
)

// fail notes a failure. It reports whether the worker is avoided now and was not
// before.
func (a *avoidance) fail(now time.Time, first time.Duration) bool {
	a.errors = 0
	if first <= 0 || now.Before(a.until) {
		return false // another request that failed for the same reason
	}
	if now.Sub(a.until) > strikesForgotten {
		a.strikes = 0
	}
	a.strikes = min(a.strikes+1, mostStrikes)
	a.until = now.Add(first << (a.strikes - 1))
	return true
}

// answer notes a response of the worker. Like fail, it reports whether the worker is avoided now and was not
// before.
func (a *avoidance) answer(now time.Time, status int, first time.Duration) bool {
	switch {
	case status >= 502 && status <= 504:
		return a.fail(now, first) // the worker cannot serve
	case status >= 500:
		if a.errors++; a.errors >= errorsInRow {
			return a.fail(now, first)
		}
	default:
		a.errors, a.answered = 0, now
	}
	return false
}

// Served notes which worker answered a booked request, when its response begins. If it is
// not the chosen worker but the second choice, or another worker of the fleet, the slot
// moves there, and Served returns true. Workers that refuse or fail are avoided for a while
// (see [Config.AvoidFailing]); Served returns those that are avoided from now on. Unknown
// ids are no error.
func (r *Router) Served(id string, resp Response) (moved bool, avoided []Worker) {
	fl := r.flights.get(id)
	if fl.pool == nil || fl.peer != 0 {
		return false, nil
	}
	now := r.conf.Now()
	fl.outcome.change(func(o *Outcome) { o.Answered, o.Status = now, resp.Status })
	if resp.Nowhere {
		return false, nil
	}
	var s serving
	fl.pool.update(now, func(c *core) { s = c.served(now, id, &fl, resp) })
	if len(s.avoided) > 0 {
		r.metrics.avoidances.AddTo(fl.pool.labels.pool, len(s.avoided))
	}
	if !s.moved {
		return false, s.avoided
	}
	r.metrics.failovers.AddTo(fl.pool.labels.pool, 1)
	r.note(&fl, later{served: resp.Address})
	r.guessMoved(now, id, fl, s)
	r.tellPeers(Change{Kind: SlotMoved, ID: id, Worker: s.worker, CachedTokens: s.cached})
	return true, s.avoided
}

// guessMoved moves the guess of a request to the worker that its slot moved to.
func (r *Router) guessMoved(now time.Time, id string, fl flight, s serving) {
	if g := &fl.guess; g.in != nil {
		g.stamp, g.last = g.in.Move(now, g.ordinal, g.generation, g.stamp, g.last, s.to, s.since)
		if g.ordinal, g.generation = s.to, s.since; g.stamp == 0 {
			*g = guess{}
		}
	}
	if !r.flights.change(id, fl) {
		fl.guess.withdraw() // the request ended meanwhile, without this guess
	}
}
