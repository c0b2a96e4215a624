// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
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

// avoidance is what a worker's failures have led to. A worker that fails gets no requests
// for a while. A failure within a minute after that makes the next time twice as long, up to
// 16 times the first. While no better worker is left, the worker is a candidate all the same.
type avoidance struct {
	until    time.Time // the worker is avoided before
	strikes  int       // failures that began an avoidance
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

// answer notes a response of the worker. It returns the same as fail.
func (a *avoidance) answer(now time.Time, status int, first time.Duration) bool {
	switch {
	case status == 502 || status == 503 || status == 504:
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

// second finds the next best of the candidates for the request just decided: the
// one of another process that costs least, or if costs are equal, has the fewest tokens to
// compute. If the request names the rank, the second choice has the same rank. If the request has a
// prefill leg, whose parameters it contains, the second choice has the leg's engine, and is not its worker.
func (c *core) second(chosen int, leg *Decision) (s Second) {
	chosenEntry := &c.entries[c.candidates[chosen]]
	first := chosenEntry.worker
	named := chosenEntry.info.wantsRank(first.DPRank)
	best := -1
	less := func(i, j int) bool {
		a, b := &c.inputs[i], &c.inputs[j]
		return c.costs[i] < c.costs[j] || c.costs[i] == c.costs[j] && cmp.Or(cmp.Compare(a.PendTokens, b.PendTokens), cmp.Compare(a.ActiveRequests, b.ActiveRequests)) < 0
	}
	for i, ord := range c.candidates {
		if best >= 0 && !less(i, best) {
			continue // before the entries are read: there may be thousands
		}
		e := &c.entries[ord]
		switch {
		case e.worker.ID == first.ID:
		case leg != nil && (e.worker.ID == leg.Worker.ID || e.info.Engine != leg.Engine):
		case named && (e.worker.DPRank != first.DPRank || !e.info.wantsRank(e.worker.DPRank)):
			// The request names one rank for both workers.
		default:
			best = i
		}
	}
	if best < 0 {
		return s
	}
	e := &c.entries[c.candidates[best]]
	return Second{Worker: e.worker, WorkerName: e.info.Name, Address: e.info.rankAddress(e.worker.DPRank), OverlapBlocks: c.inputs[best].OverlapBlocks}
}

// serving is what a response led to.
type serving struct {
	avoided []Worker // from now on

	moved  bool   // the slot moved; the other fields are about that
	to     int    // ordinal
	since  uint64 // generation of to
	worker Worker // worker of to
	cached int    // tokens of the prompt that the worker has cached
}

// moveSlot moves the slot of a request to another worker, which has so many tokens of the
// prompt cached. blocks of the foreign load that it reported lately are the request's.
func (c *core) moveSlot(now time.Time, id string, to, cached, blocks int, s *serving) {
	if s.moved = c.slots.Move(now, id, to, cached); s.moved {
		c.disclose(now, to, blocks, reportLife)
		e := &c.entries[to]
		s.to, s.since, s.worker, s.cached = to, e.since, e.worker, cached
	}
}

// served notes which worker answered a request. The slot follows that worker.
//
// A worker that has answered another request since this one was booked is not blamed for a
// connection that was refused, lost or too slow: on a busy machine this happens to healthy
// workers. If the worker did fail, the next request shows it.
func (c *core) served(now time.Time, id string, fl *flight, r Response) (s serving) {
	age, _ := c.slots.Age(now, id)
	strike := func(ord int, local bool) {
		e := &c.entries[ord]
		if local || r.Status >= 500 {
			e.failures++
		}
		var news bool
		switch {
		case !local:
			news = e.avoid.answer(now, r.Status, c.conf.AvoidFailing)
		case !e.avoid.answered.After(now.Add(-age)):
			news = e.avoid.fail(now, c.conf.AvoidFailing)
		}
		if news {
			c.changes++
			s.avoided = append(s.avoided, e.worker)
		}
	}
	ord, booked := c.slots.Worker(id)
	if !booked {
		return s
	}
	if c.entries[ord].worker != fl.first {
		return s // the slot moved before
	}
	at := c.at(ord, r.Address, fl.second)
	if at == ord || at < 0 {
		if at < 0 && r.Asked == 1 {
			return s // the proxy tried an unknown worker instead
		}
		if r.Local || r.Address.IsValid() {
			strike(ord, r.Local)
		}
		return s
	}
	if r.Asked != 1 {
		strike(ord, true) // the proxy tried another worker after it
	} // else the proxy did not try this worker
	strike(at, r.Local)
	cached := 0
	if c.entries[at].worker == fl.second {
		cached = int(fl.held) * c.blockSize
	}
	if c.moveSlot(now, id, at, cached, 0, &s); s.moved {
		c.entries[at].routed++
	}
	return s
}

// at returns the ordinal of the worker with an address: ord if it has that address, −1 if
// no worker has it.
func (c *core) at(ord int, a netip.AddrPort, second Worker) int {
	has := func(ord int) bool {
		e := &c.entries[ord]
		return e.info.rankAddress(e.worker.DPRank) == a
	}
	if !a.IsValid() || has(ord) {
		return ord
	}
	if other, known := c.find(second); known && has(other) {
		return other
	}
	for _, other := range c.order {
		if has(other) {
			return other
		}
	}
	return -1
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
	r.note(&fl, func(d *Decision) { d.Served = resp.Address })
	r.guessMoved(now, id, fl, s)
	r.tellPeers(Change{Kind: SlotMoved, ID: id, Worker: s.worker, CachedTokens: s.cached})
	return true, s.avoided
}

// guessMoved moves the guess of a request to the worker that its slot moved to.
func (r *Router) guessMoved(now time.Time, id string, fl flight, s serving) {
	if g := fl.guess; g.in != nil {
		fl.guess.stamp, fl.guess.last = g.in.Move(now, g.ordinal, g.generation, g.stamp, g.last, s.to, s.since)
		if fl.guess.ordinal, fl.guess.generation = s.to, s.since; fl.guess.stamp == 0 {
			fl.guess = guess{}
		}
	}
	if !r.flights.change(id, fl) {
		fl.guess.withdraw() // the request ended meanwhile, without this guess
	}
}
