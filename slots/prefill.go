// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"cmp"
	"math"
	"time"
)

// First tokens that are not reported can be inferred: of responses that are no streams, of
// streams that nobody observes, and of streams whose observer was lost.
//
// A slot is waiting, then started, then confirmed:
//
//	from     to         when
//	waiting  confirmed  its first token is reported
//	waiting  started    by order: a later request on the worker has its first token
//	waiting  started    by rate: the worker should have computed its prefill tokens, and those before it
//	started  confirmed  its first token is reported after all
//	any      removed    it is freed, or its worker or replica is removed
//
// By order: engines compute prompts first come, first served. Nothing is inferred on a
// worker that is registered as reordering, or of whose last 16 first tokens a quarter came
// more than 250 ms after that of a later request.
//
// By rate: only for requests whose first token will not be reported (Booking.Unseen), and
// only if no request before them will have its first token reported: so nothing is inferred
// of a worker that hangs. If the first waiting request is freed, the worker is assumed to
// begin with the next one at the next call. The rate is the median of the worker's last 15
// samples, at least 5; with fewer it is the request's own Booking.AssumedRate, if it has one.
// A sample is the number of tokens that the worker computed between two first tokens (or
// since it was idle) and the time for it. The request's own tokens in the time since its
// booking are a lower bound. Samples below 256 tokens or 5 ms are not taken: the first tokens
// of requests in one batch come together, and count with the next sample.
//
// # Invariants
//
//   - The waiting slots of a worker are in one list, in the order of their booking.
//   - The slots of other replicas are never inferred here: their own router infers them and
//     sends the result. So all replicas have the same state after all messages. Reports of
//     other replicas are no evidence for other slots, because they may be inferred.
//   - A slot is confirmed at most once, by a report.
//   - TakeInferred returns each inference once.

const (
	orderGrace  = 250 * time.Millisecond // a first token that is late by less is in order
	leastSample = 256                    // tokens
	leastTime   = 5 * time.Millisecond
	leastRate   = 1. // tokens a second; lower rates are raised to it
	never       = time.Duration(math.MaxInt64)
)

// How a first token was inferred.
const (
	ByOrder = "order"
	ByRate  = "rate"
)

// Inference is a first token that was inferred.
type Inference struct {
	ID     string
	Number uint64 // of the booking
	By     string
	At     time.Time
}

// queue holds the prefills of a worker.
type queue struct {
	list // of the waiting slots

	// The worker has computed the waiting slots since began, and done tokens of them.
	began time.Duration
	done  int
	// broken says that the first slot was freed while it waited: it is not known when the
	// worker began with the next one.
	broken bool
	due    time.Duration // no first token is inferred by rate before; 0 = unknown

	// The turn of the latest booking whose first token was seen, and when it was seen.
	newest   uint64
	newestAt time.Duration
}

// InferFirstTokens switches inference on. Call it before the first slot is taken.
func (s *Table) InferFirstTokens() { s.infers = true }

// SetReorders notes whether a worker registered that it computes prompts in another order.
func (s *Table) SetReorders(worker int, reorders bool) {
	if worker >= 0 {
		s.grow(worker)
		s.histories[worker].pace.registered = reorders
	}
}

// PrefillRate returns the prompt tokens a second that a worker computes, 0 if unknown, and
// whether it reorders prompts.
func (s *Table) PrefillRate(worker int) (rate float64, reorders bool) {
	p := &s.history(worker).pace
	return p.rate, p.reorders()
}

// PrefillTime returns the time that a worker needs for each further token of a prompt, and the time that a prompt needs
// besides, both in seconds. perToken is 0 until prompts of different lengths were measured.
func (s *Table) PrefillTime(worker int) (perToken, fixed float64) {
	f := &s.history(worker).pace.fit
	return f.perToken, f.fixed
}

// TakeInferred returns the inferences since the last call, nil for none.
func (s *Table) TakeInferred() []Inference {
	taken := s.inferred
	s.inferred = nil
	return taken
}

// FirstToken notes that a request has its first token: now, if it is exact, or at some
// time before. news is false, and nothing changes, if the id has no slot or its first token
// was noted before. inferred says that the first token was inferred before.
func (s *Table) FirstToken(now time.Time, id string, exact bool) (news, inferred bool) {
	n, exists := s.ids[id]
	if !exists {
		return false, false
	}
	t := &s.slots[n]
	t.seen = s.at(now)
	if t.confirmed {
		return false, true
	}
	t.confirmed, inferred = true, t.started
	s.Answered(t.Worker)
	if s.infers {
		s.evidence(n, exact)
	}
	if inferred {
		t.first = t.seen
	} else {
		t.atEnd = !exact
		s.start(n, t.seen)
	}
	return true, inferred
}

// evidence infers earlier first tokens, and measures the rate, by a reported first token.
func (s *Table) evidence(n int32, exact bool) {
	t := &s.slots[n]
	q, p := &s.workers[t.Worker].queue, &s.histories[t.Worker].pace
	q.due = 0
	if t.Replica != 0 {
		if !t.started {
			q.done += t.work()
		}
		return
	}
	if exact {
		since := q.newestAt
		if t.byOrder {
			since = t.first
		}
		if p.late <<= 1; (t.byOrder || t.turn < q.newest) && t.seen-since > orderGrace {
			p.late |= 1
		}
		if t.turn > q.newest {
			q.newest, q.newestAt = t.turn, t.seen
		}
	}
	if p.reorders() {
		return
	}
	work := 0
	for next := q.head; next != 0; {
		o := &s.slots[next-1]
		if o.turn >= t.turn {
			break
		}
		work += o.work()
		o.counted = true
		m := next - 1
		if next = o.next; o.Replica == 0 {
			s.infer(m, ByOrder, t.seen)
		}
	}
	if !t.started {
		work += t.work()
		t.counted = true
	}
	q.done += work
	took := t.seen - q.began
	if !exact || t.started || took < leastTime {
		return
	}
	if !q.broken {
		tokens, seconds := float64(q.done), took.Seconds()
		if own, stay := float64(t.pend), t.seen-t.listed; t.pend >= leastSample && stay >= leastTime {
			if own*seconds > tokens*stay.Seconds() {
				tokens, seconds = own, stay.Seconds()
			}
		}
		if q.done >= leastSample {
			p.sample(max(tokens/seconds, leastRate))
		}
		p.fit.add(tokens, seconds)
	}
	q.began, q.done, q.broken = t.seen, 0, false
}

// work is the number of tokens that a slot adds to its worker's prefill.
func (t *slot) work() int {
	if t.counted {
		return 0
	}
	return t.pend
}

// infer starts a waiting slot without a report.
func (s *Table) infer(n int32, by string, at time.Duration) {
	t := &s.slots[n]
	s.start(n, at)
	t.byOrder = by == ByOrder
	s.inferred = append(s.inferred, Inference{ID: t.id, Number: t.Number, By: by, At: s.epoch.Add(at)})
}

// start moves a slot from the waiting ones to the decoding ones.
func (s *Table) start(n int32, at time.Duration) {
	t := &s.slots[n]
	s.note(t.Worker)
	w := &s.workers[t.Worker]
	s.unlink(&w.queue.list, n)
	w.queue.due = 0
	t.started, t.first, t.grown = true, at, at
	if t.Reports {
		s.changed(t, ReportLoad{PendTokens: -t.pend})
	}
	w.Waiting--
	w.PendTokens -= t.pend
	w.WaitingTokens -= t.PromptTokens
	w.DecodeTokens += t.PromptTokens + t.out
	if t.linked = !t.outputReported; t.linked {
		s.link(&w.estimated, n)
	}
}

// InferByRate infers the first tokens on a worker that are due, and returns how many. If
// none is due, it costs one comparison, so it may be called for each decision.
func (s *Table) InferByRate(now time.Time, worker int) (inferred int) {
	if !s.infers || worker < 0 || worker >= len(s.workers) {
		return 0
	}
	q := &s.workers[worker].queue
	since := now.Sub(s.epoch)
	if q.head == 0 || since < q.due {
		return 0
	}
	q.due = never // until a slot changes
	if q.broken {
		q.began, q.done, q.broken = since, 0, false
	}
	p := &s.histories[worker].pace
	if p.reorders() {
		return 0
	}
	done := q.done
	for next := q.head; next != 0; {
		t := &s.slots[next-1]
		rate := cmp.Or(p.rate, t.AssumedRate)
		if !t.Unseen || rate == 0 {
			break
		}
		done += t.work()
		at := q.began + time.Duration(float64(done)/rate*float64(time.Second))
		if since < at {
			q.due = at
			break
		}
		m := next - 1
		if next = t.next; t.Replica != 0 {
			continue
		}
		q.done += t.work()
		t.counted = true
		s.infer(m, ByRate, max(at, t.listed))
		inferred++
	}
	return inferred
}

// SetUnseen sets [Booking.Unseen] of a request, if it has a slot.
func (s *Table) SetUnseen(id string) {
	if n, exists := s.ids[id]; exists {
		s.slots[n].Unseen = true
		s.workers[s.slots[n].Worker].queue.due = 0
	}
}

// InferOwn is [Table.InferByRate] for the worker of a request. It returns the first token of this request if that is
// inferred now, else the zero time.
func (s *Table) InferOwn(now time.Time, id string) (first time.Time) {
	n, exists := s.ids[id]
	if !exists || s.slots[n].started || s.InferByRate(now, s.slots[n].Worker) == 0 || !s.slots[n].started {
		return first
	}
	return s.epoch.Add(s.slots[n].first)
}

// enqueue puts a new slot behind those that wait on its worker.
func (s *Table) enqueue(n int32) {
	t := &s.slots[n]
	q := &s.workers[t.Worker].queue
	s.turn++
	t.turn, t.listed = s.turn, t.seen
	if q.head == 0 {
		q.began, q.done, q.broken = t.seen, 0, false
	}
	s.link(&q.list, n)
	q.due = 0
}
