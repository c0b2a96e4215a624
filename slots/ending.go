// SPDX-License-Identifier: Apache-2.0

package slots

import "time"

const (
	ownerlessLife = 300 * time.Second // of a slot without an owner or a sign of life
	leftLife      = 30 * time.Second  // of a slot whose request was left
	mostLeft      = 1024              // such slots of a worker; the oldest ones go first
	sweepEvery    = 30 * time.Second
)

// Wait returns how long a request has its slot, 0 without a slot, and the time to the first token that was expected
// when it took the slot: 0 if unknown, and after a move to another worker.
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

// Expire drops the slots that are not owned and had no sign of life for 300 s, and returns
// how many. It works at most every 30 s, so it may be called at any rate. At each call it also drops
// the slots of requests that were left 30 s ago or earlier; it does not count them.
func (s *Table) Expire(now time.Time) int {
	s.expireLeft(now)
	if now.Sub(s.swept) < sweepEvery {
		return 0
	}
	s.swept = now
	since := now.Sub(s.epoch)
	return s.dropIf(func(t *slot) bool { return !t.Owned && since-t.seen >= ownerlessLife })
}

// A client may leave while its request waits for a worker that hangs, or whose machine is lost. If the slot
// were freed, the worker would look idle and get the next request. So the slot of such a request stays.
//
//	from     to       when
//	waiting  left     the client leaves
//	started  removed  the client leaves: the worker has computed the prompt
//	left     removed  the worker answers any request: it sends a first token, or a response that is no stream
//	left     removed  30 s later, by the next Expire; earlier if the worker has more than 1,024 of them
//	left     removed  the worker is removed
//
// # Invariants
//
//   - A slot of a request that was left counts as load of its worker like a waiting slot.
//   - It belongs to no request and no replica: the id may have another slot. It never starts, and it
//     never moves.
//   - Load.Left is the number of these slots on a worker, and history.left lists them in the order of
//     their time.
//   - After an answer of a worker, the worker has none.

// Leave is [Table.Finish] for a request whose client left before the worker answered. Unless the first token
// is known, the load stays on the worker until [Table.Answered], a reported first token there, or an
// [Table.Expire] after 30 s.
func (s *Table) Leave(now time.Time, id string) Ended {
	n, exists := s.ids[id]
	if !exists || s.slots[n].started {
		return s.Finish(now, id)
	}
	t := &s.slots[n]
	e := Ended{Existed: true, Worker: t.Worker}
	delete(s.ids, id)
	t.id, t.left, t.seen = "", true, s.at(now)
	t.Owned, t.Replica = true, 0
	t.Unseen = false // no later first token is inferred: the worker may hang
	w, h := &s.workers[t.Worker], &s.histories[t.Worker]
	w.queue.due = 0
	w.Left++
	w.LeftTokens += t.pend
	if h.left = append(h.left, n); len(h.left) > mostLeft {
		s.dropLeft(h)
	}
	return e
}

// Answered notes that a worker answered a request: it does not hang, so the load of the requests that were
// left there ends.
func (s *Table) Answered(worker int) {
	left := s.history(worker).left
	if len(left) == 0 {
		return
	}
	s.histories[worker].left = nil
	for _, n := range left {
		s.drop(n)
	}
}

// expireLeft drops the slots of requests that were left leftLife ago or earlier.
func (s *Table) expireLeft(now time.Time) {
	since := now.Sub(s.epoch)
	for worker := range s.histories {
		for h := &s.histories[worker]; len(h.left) > 0 && since-s.slots[h.left[0]].seen >= leftLife; {
			s.dropLeft(h)
		}
	}
}

// dropLeft drops the slot that was left first.
func (s *Table) dropLeft(h *history) {
	n := h.left[0]
	h.left = h.left[1:]
	s.drop(n)
}
