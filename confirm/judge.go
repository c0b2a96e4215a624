// SPDX-License-Identifier: Apache-2.0

package confirm

import (
	"cmp"
	"slices"
	"time"
)

const (
	// mostSteps limits the work of one call of [Table.Judge] against requests: the blocks that it reads. What is
	// left is judged by the next call.
	mostSteps = 1 << 21
	// mostSearches limits how often a call searches the token ids of a block.
	mostSearches = 8
	// slotsAtOnce is how many slots are read under the lock at once.
	slotsAtOnce = 512
)

// Judge judges the requests whose worker's events had time to arrive, and returns the verdicts that changed. Call
// it about once a second.
func (t *Table) Judge(now time.Time, c Cache) []Change { return t.judge(now, c).changes }

func (t *Table) judge(now time.Time, c Cache) *judge {
	t.begin(1)
	defer t.begin(-1)
	j := &judge{t: t, cache: c, now: now, searches: mostSearches}
	for _, number := range t.due(now) {
		j.look(number)
	}
	j.compare()
	slices.SortFunc(j.results, func(a, b result) int { return cmp.Compare(a.number, b.number) })
	for i := range j.results {
		j.changes = append(j.changes, j.end(&j.results[i])...)
	}
	return j
}

// begin notes that judgements begin or end.
func (t *Table) begin(judgements int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.judging += judgements
}

// eachSlot calls f with each slot that had a request. The lock is held for a few slots at a time.
func (t *Table) eachSlot(f func(s *slot)) {
	for from := 0; from < places; from += slotsAtOnce {
		t.mu.Lock()
		if t.slots == nil {
			t.mu.Unlock()
			return
		}
		for i := range t.slots[from : from+slotsAtOnce] {
			if s := &t.slots[from+i]; s.number != 0 {
				f(s)
			}
		}
		t.mu.Unlock()
	}
}

// due returns the numbers of the requests to judge now, and ends those without a first token.
func (t *Table) due(now time.Time) (numbers []uint64) {
	at := now.UnixNano()
	t.eachSlot(func(s *slot) {
		switch {
		case !s.open:
		case s.first == 0 && at-s.booked > int64(unseen):
			t.end(s, Full)
		case s.first != 0 && s.due <= at:
			numbers = append(numbers, s.number)
		}
	})
	return numbers
}

// judge judges requests.
type judge struct {
	t        *Table
	cache    Cache
	now      time.Time
	subjects []subject
	results  []result
	changes  []Change
	steps    int // blocks that were read so far
	searches int // that are left
}

// result is the outcome of a request.
type result struct {
	number uint64
	Outcome
	Difference // if Unmatched
}

// look confirms a request, ends it, has it judged again later, or appends it to the subjects.
func (j *judge) look(number uint64) {
	t := j.t
	t.mu.Lock()
	s := t.find(number)
	if s == nil {
		t.mu.Unlock()
		return
	}
	q := subject{slot: *s, of: s.worker.Worker, local: t.local(s)}
	t.mu.Unlock()

	var sure bool
	if q.held, sure = j.cache.Held(q.of, q.model, q.local); q.held >= len(q.local) {
		j.results = append(j.results, result{number: number, Outcome: Confirmed})
		return
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if s = t.find(number); s == nil {
		return
	}
	waited, conclusion := j.now.Sub(time.Unix(0, s.first)), min(conclusion+2*s.worker.delay, giveUp)
	if waited < conclusion {
		s.late, s.due = true, s.first+int64(min(2*waited, conclusion))
		return
	}
	switch {
	case !sure || s.worker.breaks != s.breaks:
		t.end(s, Lost)
	case q.held < int(s.had):
		t.end(s, Evicted)
	case s.mark < s.worker.log.first:
		t.end(s, Full)
	default:
		j.subjects = append(j.subjects, q)
	}
}

// compare compares the subjects with what their workers stored, one worker after the other.
func (j *judge) compare() {
	slices.SortStableFunc(j.subjects, func(a, b subject) int {
		return cmp.Or(cmp.Compare(a.of.ID, b.of.ID), cmp.Compare(a.of.Rank, b.of.Rank))
	})
	var groups [][]subject
	from := 0
	for i := range j.subjects {
		if i+1 == len(j.subjects) || j.subjects[i+1].of != j.subjects[i].of {
			groups = append(groups, j.subjects[from:i+1])
			from = i + 1
		}
	}
	if len(groups) == 0 {
		return
	}
	peers := j.peers()
	first := int(j.now.Unix()) % len(groups) // if there is too much work, each worker has its turn
	for i := range groups {
		if j.steps >= mostSteps {
			return
		}
		group := groups[(first+i)%len(groups)]
		j.group(group, peers[group[0].of])
	}
}

// peers returns the requests that may explain blocks, by worker: those of the subjects' workers.
func (j *judge) peers() map[Worker][]peer {
	peers := make(map[Worker][]peer)
	for i := range j.subjects {
		peers[j.subjects[i].of] = nil
	}
	j.t.eachSlot(func(s *slot) {
		of, local := s.worker.Worker, j.t.local(s)
		if list, wanted := peers[of]; wanted && local != nil {
			p := peer{local: local, span: span{s.booked, always}}
			if s.ended != 0 {
				p.until = s.ended + int64(delay+s.worker.delay)
			}
			peers[of] = append(list, p)
		}
	})
	return peers
}

// group compares the subjects of one worker.
func (j *judge) group(subjects []subject, peers []peer) {
	of, model := subjects[0].of, subjects[0].model
	j.t.mu.Lock()
	w := j.t.workers[of]
	if w == nil {
		j.t.mu.Unlock()
		return
	}
	stored := w.log
	w.apart = true
	j.t.mu.Unlock()

	tree, mark := newTree(), stored.stored
	for i := range subjects {
		if tree.full() {
			subjects = subjects[:i] // the next call judges the others
			break
		}
		tree.addSubject(&subjects[i])
		mark = min(mark, subjects[i].mark)
	}
	tree.addEnds(peers)
	tree.addEvents(&stored, mark, func(dst []uint64, external uint64) []uint64 {
		return j.cache.AppendChain(dst, of, model, external)
	})
	tree.finish(peers)
	j.steps += tree.steps
	for i := range subjects {
		j.results = append(j.results, j.conclude(tree, &subjects[i]))
	}
}

// conclude returns the outcome of a subject.
func (j *judge) conclude(t *tree, s *subject) result {
	r := result{number: s.number, Outcome: Unseen}
	if t.storedMissing(s) {
		r.Outcome = Evicted
		return r
	}
	at := t.differs(s)
	if at < 0 {
		return r
	}
	d := Difference{Worker: s.of, Block: at, Position: -1}
	// A common block shows that the engine used the same salt and adapter; else only the ids of another block can.
	sameSeed := at > 0 || !s.keyed()
	from := at * int(s.size)
	if wanted := from+int(s.size) <= len(s.ids); j.searches > 0 && (wanted || !sameSeed) {
		j.searches--
		theirs := t.others(s, at)
		if sameSeed = j.t.tokens.find(theirs, int(s.size), s.seed) || sameSeed; wanted {
			d.locate(s.ids[from:from+int(s.size)], theirs, from)
		}
	}
	if sameSeed {
		r.Outcome, r.Difference = Unmatched, d
	}
	return r
}

// locate sets the position of the first different id of a block that begins at one, and the ids around it. Of several
// blocks that the worker stored instead, the one counts that agrees for longest.
func (d *Difference) locate(ours []uint32, others map[uint64][]uint32, from int) {
	for _, theirs := range others {
		n := 0
		for n < len(theirs) && ours[n] == theirs[n] {
			n++
		}
		if n < len(theirs) && from+n > d.Position {
			d.Position = from + n
			d.Ours = slices.Clone(ours[max(0, n-around):min(len(ours), n+around)])
			d.Theirs = theirs[max(0, n-around):min(len(ours), n+around)]
		}
	}
}

// around is how many ids before the first different one, and from it on, are kept.
const around = 8

// end ends a request with its outcome.
func (j *judge) end(r *result) []Change {
	t := j.t
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.find(r.number)
	if s == nil {
		return nil
	}
	m, class, blocks, had, w := s.model, s.class, s.to-s.from, int(s.had), s.worker
	t.end(s, r.Outcome)
	switch waited := min(j.now.Sub(time.Unix(0, s.first)), giveUp); {
	case r.Outcome == Unmatched:
		return m.contradicted(class, blocks, r.Difference)
	case r.Outcome != Confirmed:
		w.unheard++
		return nil
	case had == blocks: // no event had to come
	case !w.timed && !s.late:
		w.timed, w.delay = true, 0
	case !w.timed:
		w.timed, w.delay = true, waited
	case s.late:
		w.delay = max(w.delay, waited)
	default:
		w.delay -= w.delay / 16
	}
	return m.confirmed(class, w.Worker, blocks, had < blocks)
}
