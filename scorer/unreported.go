// SPDX-License-Identifier: Apache-2.0

package scorer

import "time"

// Some workers report their load by themselves, as router groups do: what they do by
// their last report, and what they got since, less what has ended since, is what they do
// now. This file keeps the latter two.
//
// Invariants, of slots that were taken with [Booking.Reports]:
//
//   - The unreported slots of a worker are those that were taken there after the latest
//     [Slots.Reported], and are still there.
//   - unreported.requests is their number, unreported.pend the prefill tokens of those
//     without a first token.
//   - unreported.over is what the other ones were at that report and are no more: requests
//     that were freed since, and prefill tokens of those that had their first token, or
//     were freed without one, since.

// unreported is what a worker got since its last report.
type unreported struct {
	requests, pend int
	arrivals       []arrival // in order; those of slots that are gone are among them

	reported time.Duration // the latest report
	some     bool          // there was one
	over     load
	ends     []ending // those before the latest report are not among them
}

type load struct{ requests, pend int }

// ending is what a slot ceased to be at a time.
type ending struct {
	load
	arrived, at time.Duration
}

// mostEndings is how many are kept of a worker. The older ones are in the sums; they are
// missed if the next report is of a time before them.
const mostEndings = 4096

// arrival is a slot taken. Another turn than the slot's means that this one is gone.
type arrival struct {
	slot int32
	turn uint64
	at   time.Duration
}

// arrive notes a slot that was just taken.
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

// tidyArrivals forgets slots that are gone.
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

// ended notes what a slot of a worker that reports ceases to be.
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

// Reported notes that a worker reported its load as it was at a time: what it got up to
// then is in there.
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

// Over returns how many of the requests that a worker has reported are over since, and
// the prefill tokens that it has computed, or need not compute any more, since.
func (s *Slots) Over(worker int) (requests, pend int) {
	if worker < 0 || worker >= len(s.later) {
		return 0, 0
	}
	over := &s.later[worker].over
	return over.requests, over.pend
}

// Unreported returns how many requests a worker got since its last report that it still
// has, and the prefill tokens of those without a first token.
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
