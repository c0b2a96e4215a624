// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"slices"
	"time"
)

// Some workers, such as router groups, report their load. The present load of such a worker
// is the reported load and the changes since: the requests booked after the report count,
// and the reported requests that have ended do not. This file keeps the changes.
//
// Invariants, for slots with [Booking.Reports]:
//
//   - unreported.booked is the load of the slots that were taken after the latest
//     [Table.Reported] and have not ended.
//   - unreported.ended is the load of reported slots that has ended since that report:
//     requests that were freed, with their prompts, and prefill tokens of requests that got their
//     first token or were freed without one.
//   - Both follow from unreported.changes, unless there were more than maxChanges.

// unreported is what changed on a worker since its last report.
type unreported struct {
	at            time.Duration // of the latest report
	some          bool          // there was one
	changes       []change      // after the latest report, in order
	booked, ended ReportLoad
}

// ReportLoad is the part of a load that reports contain.
type ReportLoad struct {
	Requests   int
	PendTokens int // prefill tokens of requests before their first token
	HeldTokens int // prompts of all requests; outputs are left out
}

func (l *ReportLoad) add(m ReportLoad, sign int) {
	l.Requests += sign * m.Requests
	l.PendTokens += sign * m.PendTokens
	l.HeldTokens += sign * m.HeldTokens
}

// positive is the load without negative numbers.
func (l ReportLoad) positive() ReportLoad {
	return ReportLoad{max(0, l.Requests), max(0, l.PendTokens), max(0, l.HeldTokens)}
}

// change is a change of the load of a slot that was taken at a time.
type change struct {
	ReportLoad
	taken, at time.Duration
}

// maxChanges bounds the changes that are kept of a worker. Older ones are only in the sums.
// They count as reported by the next report, whatever its time.
const maxChanges = 4096

// arrive notes that a slot was taken: after the last report, even if both have the same time.
func (s *Table) arrive(t *slot) {
	t.arrived = s.latest
	if u := &s.histories[t.Worker].unreported; u.some {
		t.arrived = max(s.latest, u.at+1)
	}
	s.changed(t, ReportLoad{1, t.pend, t.PromptTokens})
}

// changed notes that the load of a slot changes now.
func (s *Table) changed(t *slot, by ReportLoad) {
	u := &s.histories[t.Worker].unreported
	if len(u.changes) >= maxChanges {
		u.changes = u.changes[:copy(u.changes, u.changes[maxChanges/2:])]
	}
	c := change{by, t.arrived, max(s.latest, t.arrived)}
	u.changes = append(u.changes, c)
	u.add(c)
}

// add adds a change to the sums.
func (u *unreported) add(c change) {
	switch {
	case !u.some || c.taken > u.at:
		u.booked.add(c.ReportLoad, 1)
	case c.at > u.at:
		u.ended.add(c.ReportLoad, -1)
	}
}

// Reported notes that a worker reported its load. The report contains the requests that the
// worker got up to the given time; a request that is booked after the call is not in it, and
// counts as one of 1 ns later at least.
func (s *Table) Reported(worker int, until time.Time) {
	u := &s.history(worker).unreported
	u.at, u.some, u.booked, u.ended = s.at(until), true, ReportLoad{}, ReportLoad{}
	kept := u.changes[:0]
	for _, c := range u.changes {
		if c.at > u.at {
			kept = append(kept, c)
			u.add(c)
		}
	}
	u.changes = kept
}

// Over returns the part of a worker's report that is over since: requests that have ended, and
// prefill tokens that the worker need not compute any more.
func (s *Table) Over(worker int) ReportLoad { return s.history(worker).unreported.ended }

// Unreported returns the load of the requests that a worker got since its last report and still has.
func (s *Table) Unreported(worker int) ReportLoad {
	return s.history(worker).unreported.booked.positive()
}

// UnreportedSince is [Table.Unreported] of the requests that came after a time.
func (s *Table) UnreportedSince(worker int, after time.Time) (l ReportLoad) {
	u, since := &s.history(worker).unreported, after.Sub(s.epoch)
	if u.some {
		since = max(since, u.at)
	}
	for _, c := range slices.Backward(u.changes) {
		if c.at < since {
			break
		}
		if c.taken > since {
			l.add(c.ReportLoad, 1)
		}
	}
	return l.positive()
}

// PeakSpan is how old an engine's report of its load may be when it arrives. [Table.Peak]
// looks back at least that far.
const PeakSpan = time.Second

// peak holds the largest loads of a worker in two consecutive spans of PeakSpan.
//
// Invariant: since the start of the earlier span, the load was never above the larger of
// the two fields and the present load. Only a decrease can lose a maximum, so the load is
// noted before each decrease.
type peak struct {
	since         time.Duration // start of the present span
	earlier, late Load
}

// Peak returns the largest Requests, Waiting and Blocks of a worker in the last PeakSpan.
// It looks back at most twice as far.
//
// An engine's report may miss requests that were sent after the measurement, and may
// contain requests that ended since. The peak contains both, so what a report has above
// the peak was not sent by the owners of these slots.
func (s *Table) Peak(now time.Time, worker int) Load {
	s.at(now)
	s.note(worker)
	p := &s.history(worker).peak
	return p.earlier.max(p.late)
}

// note records the present load of a worker before the load decreases.
func (s *Table) note(worker int) {
	p, l := &s.history(worker).peak, s.Load(worker)
	switch passed := s.latest - p.since; {
	case passed >= 2*PeakSpan: // nothing decreased in the span before the present one
		*p = peak{s.latest - passed%PeakSpan, l, l}
	case passed >= PeakSpan:
		*p = peak{p.since + PeakSpan, p.late.max(l), l}
	default:
		p.late = p.late.max(l)
	}
}

// max returns the larger value of each field that [Table.Peak] returns.
func (l Load) max(m Load) Load {
	return Load{
		Requests: max(l.Requests, m.Requests), Waiting: max(l.Waiting, m.Waiting), Blocks: max(l.Blocks, m.Blocks),
	}
}
