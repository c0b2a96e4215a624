// SPDX-License-Identifier: Apache-2.0

package router

import (
	"errors"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"time"
)

// Response is what the proxy knows when the response to a booked request begins.
type Response struct {
	// Address is the address of the last worker that the proxy tried; invalid if unknown.
	Address netip.AddrPort
	// Host is the Host header of the request. [Router.Attempted] needs it to tell workers at one address apart that
	// answer one Host header only.
	Host string
	// Asked is the number of workers that the proxy tried; 0 if unknown.
	Asked int
	// Status is the response's HTTP status.
	Status int
	// Local says that the proxy made the response, not a worker.
	Local bool
	// Nowhere says that the proxy made the response, and that the request reached no worker. The other
	// fields but Status are unknown then.
	Nowhere bool
	// TokenAwaited says that the response is a stream whose first token will be reported. Its headers alone do not
	// show that the worker computes: the load of requests that were left there stays, see [Router.Leave].
	TokenAwaited bool
	// TokenUnseen says that the first token of that stream will not be reported. It can be inferred from now on: no
	// worker sends it before the headers. See [Decision.Inferred].
	TokenUnseen bool
	// RetryAfter is the time for which a response with status 429 or 503 asks to send no further request; 0
	// without one. The worker is avoided for that time, at most a minute.
	RetryAfter time.Duration
	// Late says that the proxy made the response, because the worker's did not begin in time. Unlike a
	// failed connection, one such failure begins no back-off: the request itself may be too long.
	Late bool
}

// MayBeRepeated says whether the proxy may send a request to another worker after a response of this status. It logs
// these responses, and they may have Retry-After.
func MayBeRepeated(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable
}

// ReadRetryAfter reads the header Retry-After: seconds, or a date. A text that is neither, and a date in the past,
// is 0.
func ReadRetryAfter(text string, now time.Time) time.Duration {
	seconds, err := strconv.ParseUint(text, 10, 31)
	switch {
	case err == nil:
		return time.Duration(seconds) * time.Second
	case errors.Is(err, strconv.ErrRange):
		return math.MaxInt64
	}
	date, err := http.ParseTime(text)
	if err != nil {
		return 0
	}
	return max(0, date.Sub(now))
}

// Avoided is a worker that gets no requests from now on, because it fails.
type Avoided struct {
	Worker
	// Failed is the number of its latest responses, about 33, that had the status of the last one or one of the
	// same class; 0 if there was no response.
	Failed int
}

// Served notes which worker answered a booked request, when its response begins. If it is
// not the chosen worker but the second choice, or another worker of the fleet, the slot
// moves there, and Served returns true. Workers that refuse or fail are avoided for a while
// (see [Config.AvoidFailing]); Served returns those that are avoided from now on. Unknown
// ids are no error.
func (r *Router) Served(id string, resp Response) (moved bool, avoided []Avoided) {
	fl := r.flights.get(id)
	if fl.pool == nil || fl.peer != 0 {
		return false, nil
	}
	now := r.conf.Now()
	fl.outcome.change(func(o *Outcome) { o.Answered, o.Status = now, resp.Status })
	if resp.Nowhere || resp.Local || resp.Status >= 300 {
		r.confirms.Drop(fl.number)
	}
	if resp.Nowhere {
		return false, nil
	}
	var s serving
	fl.pool.update(now, func(c *core) {
		if s = c.served(now, id, &fl, resp); resp.TokenUnseen {
			c.slots.SetUnseen(id)
		}
	})
	if s.sign != 0 && r.conf.Hooks.Answered != nil {
		r.conf.Hooks.Answered(s.sign)
	}
	if len(s.avoided) > 0 {
		r.metrics.avoidances.AddTo(fl.pool.labels.pool, len(s.avoided))
	}
	switch {
	case !r.conf.Pull.On:
	case s.moved:
		r.endPull(&fl, id, now, pullMoved)
	case resp.Status >= http.StatusInternalServerError && !resp.Local:
		r.endPull(&fl, id, now, pullError)
	}
	if !s.moved {
		return false, s.avoided
	}
	if !resp.Local && !resp.Late { // else no worker has served it
		r.metrics.failovers.AddTo(fl.pool.labels.pool, 1)
		r.note(&fl, later{served: resp.Address})
	}
	r.guessMoved(now, id, fl, s)
	r.confirms.Drop(fl.number)
	r.tellPeers(Change{Kind: SlotMoved, ID: id, Worker: s.worker, CachedTokens: s.cached})
	return true, s.avoided
}

// BrokeOff notes that the worker at an address broke off a response that had begun. It is one of the failures in
// [WorkerState]; the worker is not avoided. An address that is not of exactly one worker is ignored.
func (r *Router) BrokeOff(address netip.AddrPort) {
	at, found := r.poolAt(address, "")
	if !found {
		return
	}
	at.update(r.conf.Now(), func(c *core) {
		for _, ord := range c.order {
			if e := &c.entries[ord]; e.address() == address {
				e.failures++
			}
		}
	})
}

// Probed notes the result of a probe of a worker's health. A good probe may end a back-off; it never begins one.
// Unknown ids are ignored. It may be called by any number of goroutines.
func (r *Router) Probed(id uint64, good bool) {
	if p := r.poolOf(id); p != nil {
		now := r.conf.Now()
		p.update(now, func(c *core) { c.probed(now, id, good) })
	}
}

// Unanswered notes why a worker gave no response to a request, in words such as "connection refused", for
// [WorkerState]. Nothing changes if the worker has responded since, or is unknown. It may be called by any number of
// goroutines.
func (r *Router) Unanswered(id uint64, why string) {
	if p := r.poolOf(id); p != nil {
		p.update(r.conf.Now(), func(c *core) {
			for _, ord := range c.ordinals(id) {
				if a := &c.entries[ord].avoid; !a.refused.IsZero() {
					a.why = why
				}
			}
		})
	}
}

// poolAt returns the pool of the worker at an address, if there is exactly one; see [ranks.workersAt].
func (r *Router) poolAt(address netip.AddrPort, host string) (at *pool, found bool) {
	workers := 0
	for _, p := range r.allPools() {
		p.read(func(c *core) {
			if n := len(c.workersAt(address, host)); n > 0 {
				workers, at = workers+n, p
			}
		})
	}
	return at, workers == 1
}

// Attempted notes that a worker answered an attempt of a booked request with status 429 or 503. The proxy may have
// sent the request to another worker then, so that [Router.Served] does not tell it. Only Address, Host, Status and
// RetryAfter of the response count. Attempted returns the workers that are avoided from now on. All requests of
// unknown ids count as those of one client. An address of no worker is ignored, and so is one of several workers
// that Host does not tell apart.
func (r *Router) Attempted(id string, resp Response) (avoided []Avoided) {
	fl := r.flights.get(id)
	now := r.conf.Now()
	at, found := r.poolAt(resp.Address, resp.Host)
	if !found {
		return nil
	}
	var s serving
	at.update(now, func(c *core) { s = c.attempted(now, &fl, resp) })
	if s.sign != 0 && r.conf.Hooks.Answered != nil {
		r.conf.Hooks.Answered(s.sign)
	}
	if len(s.avoided) > 0 {
		r.metrics.avoidances.AddTo(at.labels.pool, len(s.avoided))
	}
	return s.avoided
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
