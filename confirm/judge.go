// SPDX-License-Identifier: Apache-2.0

package confirm

import (
	"slices"
	"time"
)

// Judge judges the requests whose worker's events had time to arrive, and returns the verdicts that changed. Call
// it about once a second.
func (t *Table) Judge(now time.Time, c Cache) (changes []Change) {
	j := judge{t: t, cache: c, now: now}
	for _, number := range t.due(now) {
		j.one(number)
	}
	return j.changes
}

// due returns the numbers of the requests to judge now, and ends those without a first token.
func (t *Table) due(now time.Time) (numbers []uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := now.UnixNano()
	for i := range t.slots {
		switch s := &t.slots[i]; {
		case !s.open:
		case s.first == 0 && at-s.booked > int64(unseen):
			t.end(s, Full)
		case s.first != 0 && s.due <= at:
			numbers = append(numbers, s.number)
		}
	}
	return numbers
}

// judge judges requests.
type judge struct {
	t       *Table
	cache   Cache
	now     time.Time
	changes []Change

	local []uint64 // of the request: a copy
	// What the worker stored since the booking: copies.
	events []storedEvent
	hashes []uint64
	others [][]uint64 // chains of blocks that the worker stored instead
	chain  []uint64   // a buffer
}

// subject is a copy of the request that is judged.
type subject struct {
	slot

	of   Worker
	held int // leading blocks that the worker has
}

// one judges a request.
func (j *judge) one(number uint64) {
	t := j.t
	t.mu.Lock()
	s := t.find(number)
	if s == nil {
		t.mu.Unlock()
		return
	}
	q := subject{slot: *s, of: s.worker.Worker}
	j.local = append(j.local[:0], s.local...)
	t.mu.Unlock()
	q.local = j.local

	var sure bool
	q.held, sure = j.cache.Held(q.of, q.model, q.local)
	if q.held < len(q.local) && !j.mayContradict(&q, sure) {
		return
	}
	if q.held < len(q.local) {
		j.findOthers(&q)
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if s = t.find(number); s == nil {
		return
	}
	m, class, blocks, had := s.model, s.class, len(q.local), int(s.had)
	if q.held < blocks {
		others := t.unexplained(s, j.others)
		if len(others) == 0 {
			t.end(s, Unseen)
			return
		}
		d := t.locate(s, others)
		t.end(s, Unmatched)
		j.changes = append(j.changes, m.contradicted(class, blocks, d)...)
		return
	}
	switch w := s.worker; {
	case had == blocks: // no event had to come
	case !w.timed && !s.late:
		w.timed, w.delay = true, 0
	case !w.timed:
		w.timed, w.delay = true, min(j.now.Sub(time.Unix(0, s.first)), giveUp)
	case s.late:
		w.delay = max(w.delay, min(j.now.Sub(time.Unix(0, s.first)), giveUp))
	default:
		w.delay -= w.delay / 16
	}
	t.end(s, Confirmed)
	j.changes = append(j.changes, m.confirmed(class, q.of, blocks, had < blocks)...)
}

// mayContradict reports whether a missing block may contradict the request, and copies what its worker stored since
// the booking. Otherwise it ends the request, or has it judged again later.
func (j *judge) mayContradict(q *subject, sure bool) bool {
	t := j.t
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.find(q.number)
	if s == nil {
		return false
	}
	w := s.worker
	waited, conclusion := j.now.Sub(time.Unix(0, s.first)), min(conclusion+2*w.delay, giveUp)
	if waited < conclusion {
		s.late, s.due = true, s.first+int64(min(2*waited, conclusion))
		return false
	}
	missing := q.local[q.held]
	since := w.events[min(uint64(len(w.events)), max(s.mark, w.first)-w.first):]
	from := len(w.hashes)
	if len(since) > 0 {
		from = since[0].from
	}
	var why Outcome
	switch {
	case !sure || w.breaks != s.breaks:
		why = Lost
	case q.held < int(s.had) || slices.Contains(w.hashes[from:], missing):
		why = Evicted
	case s.mark < w.first:
		why = Full
	case s.keyed:
		why = Unseen
	default:
		j.events = append(j.events[:0], since...)
		j.hashes = append(j.hashes[:0], w.hashes[from:]...)
		for i := range j.events {
			j.events[i].from -= from
			j.events[i].to -= from
		}
		return true
	}
	t.end(s, why)
	return false
}

// common returns how many leading blocks of two chains are equal.
func common(a, b []uint64) (n int) {
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// findOthers finds the chains that the worker stored instead of the request's: they differ from it at the missing
// block, or before it if another request has stored the blocks before.
func (j *judge) findOthers(q *subject) {
	j.others = j.others[:0]
	for _, ev := range j.events[:min(len(j.events), eventsOfOne)] {
		j.chain = j.chain[:0]
		if ev.hasParent {
			if j.chain = j.cache.AppendChain(j.chain, q.of, q.model, ev.parent); len(j.chain) == 0 {
				continue
			}
		}
		j.chain = append(j.chain, j.hashes[ev.from:ev.to]...)
		if n := common(j.chain, q.local); n < len(j.chain) && n <= q.held && len(j.others) < chainsOfOne {
			j.others = append(j.others, slices.Clone(j.chain))
		}
	}
}

// unexplained returns the other chains that belong to no other request that went to the worker. A chain may go on
// behind the prompt of its request, for a while after the booking.
func (t *Table) unexplained(s *slot, others [][]uint64) [][]uint64 {
	return slices.DeleteFunc(others, func(other []uint64) bool {
		for i := range t.slots {
			o := &t.slots[i]
			if o == s || o.number == 0 || o.worker != s.worker || o.age != t.chunks[o.chunk].age {
				continue
			}
			n := common(o.local, other)
			if n == len(other) || n == len(o.local) && o.booked > s.booked-int64(generates) {
				return true
			}
		}
		return false
	})
}

// around is how many ids before the first different one, and from it on, are kept.
const around = 8

// locate returns where the ids of a request and the stored blocks differ first. Of several chains the one that
// agrees for longest counts. The position is -1 if the ids of one side are not known.
func (t *Table) locate(s *slot, others [][]uint64) Difference {
	best, size := Difference{Worker: s.worker.Worker, Position: -1}, int(s.size)
	for _, other := range others {
		best.Block = max(best.Block, common(other, s.local))
	}
	from := best.Block * size
	if from+size > len(s.ids) {
		return best
	}
	ours := s.ids[from : from+size]
	for _, other := range others {
		if common(other, s.local) < best.Block {
			continue
		}
		theirs, n := t.blockOf(other[best.Block], size), 0
		for n < len(theirs) && ours[n] == theirs[n] {
			n++
		}
		if n < len(theirs) && from+n > best.Position {
			best.Position = from + n
			best.Ours = slices.Clone(ours[max(0, n-around):min(size, n+around)])
			best.Theirs = theirs[max(0, n-around):min(size, n+around)]
		}
	}
	return best
}
