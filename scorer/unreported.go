// SPDX-License-Identifier: Apache-2.0

package scorer

import "time"

// Some workers, such as router groups, report their load. The present load of such a worker
// is the reported load, plus the requests booked since the report, minus the reported
// requests that have ended since. This file keeps the latter two.
//
// Invariants, for slots with [Booking.Reports]:
//
//   - The unreported slots of a worker are those that were taken after the latest
//     [Slots.Reported] and have not ended.
//   - unreported.requests is their number, unreported.pend the prefill tokens of those
//     without a first token.
//   - unreported.over is the load of reported slots that has ended since that report:
//     requests that were freed, and prefill tokens of requests that got their first token
//     or were freed without one.

// unreported is the load that a worker's last report does not contain.
type unreported struct {
	requests, pend int
	arrivals       []arrival // in order; may contain slots that have ended

	reported time.Duration // the latest report
	some     bool          // there was one
	over     load
	ends     []ending // after the latest report
}

type load struct{ requests, pend int }

// ending is load that a slot lost at a time.
type ending struct {
	load
	arrived, at time.Duration
}

// mostEndings bounds the endings that are kept of a worker. Older ones are only in the sums,
// so they are lost if the next report is of a time before them.
const mostEndings = 4096

// arrival is a slot that was taken. If the slot has another turn, the request has ended.
type arrival struct {
	slot int32
	turn uint64
	at   time.Duration
}

// arrive adds a slot that was just taken.
func (s *Slots) arrive(n int32, now time.Duration) {
	t := &s.slots[n]
	for len(s.later) <= int(t.worker) {
		s.later = append(s.later, unreported{})
	}
	u := &s.later[t.worker]
	if len(u.arrivals) >= 64 && len(u.arrivals) > 2*u.requests {
		s.tidyArrivals(u)
	}
	t.unreported, t.arrived = true, now
	u.requests++
	u.pend += t.pend
	u.arrivals = append(u.arrivals, arrival{n, t.turn, now})
}

// tidyArrivals removes slots that have ended.
func (s *Slots) tidyArrivals(u *unreported) {
	kept := u.arrivals[:0]
	for _, a := range u.arrivals {
		if s.slots[a.slot].turn == a.turn {
			kept = append(kept, a)
		}
	}
	u.arrivals = kept
}

// settle takes a slot out of the unreported ones.
func (s *Slots) settle(t *slot) {
	if !t.unreported {
		return
	}
	u := &s.later[t.worker]
	t.unreported = false
	u.requests--
	if !t.started {
		u.pend -= t.pend
	}
}

// ended notes load that a slot loses, on a worker that reports its load.
func (s *Slots) ended(t *slot, at time.Duration, was load) {
	u := &s.later[t.worker]
	if len(u.ends) >= mostEndings {
		u.ends = u.ends[:copy(u.ends, u.ends[mostEndings/2:])]
	}
	u.ends = append(u.ends, ending{was, t.arrived, at})
	if u.some && t.arrived <= u.reported && at > u.reported {
		u.over.requests += was.requests
		u.over.pend += was.pend
	}
}

// Reported notes that a worker reported its load. The report contains the requests that the
// worker got up to the given time.
func (s *Slots) Reported(worker int, until time.Time) {
	if worker < 0 || worker >= len(s.later) {
		return
	}
	u, since := &s.later[worker], until.Sub(s.epoch)
	old := 0
	for ; old < len(u.arrivals) && u.arrivals[old].at <= since; old++ {
		if t := &s.slots[u.arrivals[old].slot]; t.turn == u.arrivals[old].turn {
			s.settle(t)
		}
	}
	u.arrivals = u.arrivals[:copy(u.arrivals, u.arrivals[old:])]
	u.reported, u.some, u.over = since, true, load{}
	kept := u.ends[:0]
	for _, e := range u.ends {
		if e.at <= since {
			continue
		}
		kept = append(kept, e)
		if e.arrived <= since {
			u.over.requests += e.requests
			u.over.pend += e.pend
		}
	}
	u.ends = kept
}

// Over returns how many of the reported requests of a worker have ended since its report,
// and the reported prefill tokens that it need not compute any more.
func (s *Slots) Over(worker int) (requests, pend int) {
	if worker < 0 || worker >= len(s.later) {
		return 0, 0
	}
	over := &s.later[worker].over
	return over.requests, over.pend
}

// Unreported returns the requests that a worker got since its last report and still has,
// and the prefill tokens of those without a first token.
func (s *Slots) Unreported(worker int) (requests, pend int) {
	if worker < 0 || worker >= len(s.later) {
		return 0, 0
	}
	u := &s.later[worker]
	return u.requests, u.pend
}

// UnreportedSince is [Slots.Unreported] of the requests that came after a time.
func (s *Slots) UnreportedSince(worker int, after time.Time) (requests, pend int) {
	if worker < 0 || worker >= len(s.later) {
		return 0, 0
	}
	u, since := &s.later[worker], after.Sub(s.epoch)
	for i := len(u.arrivals) - 1; i >= 0 && u.arrivals[i].at > since; i-- {
		t := &s.slots[u.arrivals[i].slot]
		if t.turn != u.arrivals[i].turn || !t.unreported {
			continue
		}
		if requests++; !t.started {
			pend += t.pend
		}
	}
	return requests, pend
}
