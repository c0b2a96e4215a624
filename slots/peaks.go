// SPDX-License-Identifier: Apache-2.0

package slots

import "time"

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

// Peak returns the largest load of a worker in the last PeakSpan, each field for itself.
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

// max returns the larger value of each field that a report is compared with.
func (l Load) max(m Load) Load {
	return Load{
		Requests: max(l.Requests, m.Requests), Waiting: max(l.Waiting, m.Waiting),
		PendTokens: max(l.PendTokens, m.PendTokens), Blocks: max(l.Blocks, m.Blocks),
		DecodeTokens: max(l.DecodeTokens, m.DecodeTokens), WaitingTokens: max(l.WaitingTokens, m.WaitingTokens),
	}
}
