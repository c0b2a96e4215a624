// SPDX-License-Identifier: Apache-2.0

package slots

import "time"

// Wait returns how long a request has its slot, 0 without a slot, and the time to the first token that was expected when
// it took the slot: 0 if unknown, and after a move to another worker.
func (s *Table) Wait(now time.Time, id string) (waited, expected time.Duration) {
	n, taken := s.ids[id]
	if !taken {
		return 0, 0
	}
	return now.Sub(s.epoch) - s.slots[n].added, s.slots[n].ExpectedTTFT
}

// Free gives the slot of a request back, at the latest time of an input. It returns false,
// and changes nothing, if the id has no slot.
func (s *Table) Free(id string) bool {
	return s.Finish(s.epoch.Add(s.latest), id).Existed
}

// Ended is a request that has given its slot back.
type Ended struct {
	Existed bool // it had a slot; else all fields are 0
	Started bool // its first token is known
	Worker  int
	// OutputTokens is the length of its output: as reported, or as estimated by the last [Table.Grow], which
	// was Unestimated ago. Unestimated is 0 if the length was reported. If the first token was noticed only
	// at the end, Unestimated is the time since the slot was taken, without the expected prefill.
	OutputTokens float64
	Unestimated  time.Duration
}

// Finish is [Table.Free] at a time. It returns what is known of the request.
func (s *Table) Finish(now time.Time, id string) (e Ended) {
	n, exists := s.ids[id]
	if !exists {
		return Ended{}
	}
	since, t := s.at(now), &s.slots[n]
	e = Ended{Existed: true, Started: t.started, Worker: t.Worker}
	switch {
	case t.outputReported:
		e.OutputTokens = float64(t.out)
	case t.atEnd:
		e.Unestimated = max(0, since-t.added-t.ExpectedTTFT)
	case t.started:
		e.OutputTokens, e.Unestimated = t.estimate, max(0, since-t.grown)
	}
	s.drop(n)
	return e
}
