// SPDX-License-Identifier: Apache-2.0

package scorer

import (
	"math"
	"time"
)

// Slots keeps account of the requests in flight: one slot each, from the decision
// to the end of the response. What a worker is busy with is predicted from these,
// at once, and never waits for the engine's own report.
//
// # Invariants
//
//   - The load of a worker equals the load recomputed from the slots on it: its
//     requests are their number, its pending tokens the sum of the prefill tokens
//     of those without a first token, its active blocks the distinct blocks of
//     their prompts, and the blocks that their output has filled.
//   - Nothing is negative, and after all slots are freed nothing is left.
//   - Adding a slot raises the active blocks by exactly the additional blocks
//     that were asked for before, unless lengths of output are expected.
//   - The order in which slots came and went does not matter.
//
// Sequence hashes name their whole prefix, so the active prompts of a worker are
// a tree, kept by what they have in common: a request costs as much as it has
// branches, not blocks.
//
// The zero value is empty and ready. A Slots may not be used by two goroutines at
// once. Time only matters for slots that nobody owns and those of replicas.
type Slots struct {
	ids     map[string]int32 // index into slots
	slots   []slot
	vacant  []int32 // slots to hand out again
	workers []account
	rates   []float64 // by worker: output tokens a second of a request, as told; 0 = nobody has
	paces   []pace    // by worker
	peaks   []peak    // by worker
	tree    prefixTree
	later   []unreported  // by worker
	latest  time.Duration // that was told of

	epoch time.Time // of the first slot: the slots' times count from there
	swept time.Time // last sweep of Expire

	// Slots of replicas that were freed lately, by the moment when that is
	// forgotten, and in the order it happened.
	freed map[string]time.Time
	order []string

	infers   bool   // first tokens
	turn     uint64 // bookings so far
	inferred []Inference
}

const (
	ownerlessLife = 300 * time.Second // of a slot without an owner or a sign of life
	sweepEvery    = 30 * time.Second
	freedLife     = 60 * time.Second // for which the end of a replica's request is remembered
)

// Booking is what a slot is taken with.
type Booking struct {
	Worker       int
	Blocks       []uint64 // sequence hashes of the prompt's full blocks; copied
	PromptTokens int
	CachedTokens int // of the prompt; the rest is prefill
	BlockSize    int // below 1: output fills no blocks

	// ExpectedOutput is how many tokens the response will have, 0 if nobody
	// knows. The nearer the end, the less the request's own blocks count.
	ExpectedOutput int

	// Reports says that the worker reports its load by itself; see [Slots.Reported].
	Reports bool

	// Owned says that a live stream will free the slot, so it never expires.
	Owned bool
	// Replica is the router replica that the request is on; 0 = this one. Who owns
	// such a request tells of it in order; of others, one whose end has come before
	// its beginning gets no slot.
	Replica uint64

	// Unseen says that nobody will tell of the first token when it comes. Number
	// means nothing here: an [Inference] has it.
	Unseen bool
	Number uint64

	BlocksUntracked  bool // for workers whose blocks do not matter: prefill only
	PrefillUntracked bool // the prompt arrives computed
	NoReuse          bool // the engine shares no blocks between requests
}

// Load is what the slots on one worker add up to.
type Load struct {
	Requests     int // slots on the worker
	Waiting      int // those before their first token
	PendTokens   int // prefill tokens of those
	Blocks       int // distinct blocks of all slots
	DecodeTokens int // prompt and output of those that have their first token
}

// slot is one request. Its prompt's blocks are the nodes from leaf up to the root
// of its worker's tree, or, if they are not shared, plain numbers.
type slot struct {
	id        string
	worker    int32
	blockSize int32
	leaf      int32
	lone      int // blocks of the prompt that no other slot has
	output    int // blocks filled by the output
	pend      int
	prompt    int
	out       int // output tokens
	expected  int
	off       int64 // what expected output takes off the blocks, in 1/fraction
	replica   uint64
	added     time.Duration
	seen      time.Duration // last sign of life
	first     time.Duration // its first token, if started
	started   bool
	confirmed bool // its first token was told

	// Of a prefill: its booking's number and that of its caller, and when it began to wait.
	turn, number uint64
	listed       time.Duration
	unseen       bool // nobody will tell of its first token
	counted      bool // its work is in a queue's account already
	overtaken    bool // its first token was inferred by order

	// The slot's neighbours in the list of its worker's waiting slots, and after the first
	// token in that of the slots whose output is estimated; see [list].
	next, previous int32
	// Of an output that is estimated: how long it is, and until when that holds.
	estimate float64
	grown    time.Duration
	linked   bool
	told     bool // somebody tells of the output

	owned      bool
	free       bool // its prompt arrives computed
	blocks     bool // tracked
	taken      bool // not vacant
	reports    bool // its worker does, of its load
	unreported bool // its worker did not, since
	arrived    time.Duration
}

// list is a list of slots, through their next and previous. Every number is one more than a
// slot's; 0 = none.
type list struct{ head, tail int32 }

// link puts a slot at the end of a list.
func (s *Slots) link(l *list, n int32) {
	if l.head == 0 {
		l.head = n + 1
	} else {
		s.slots[l.tail-1].next = n + 1
	}
	s.slots[n].previous, l.tail = l.tail, n+1
}

// unlink takes a slot out of the list that it is in.
func (s *Slots) unlink(l *list, n int32) {
	t := &s.slots[n]
	if t.previous != 0 {
		s.slots[t.previous-1].next = t.next
	} else {
		l.head = t.next
	}
	if t.next != 0 {
		s.slots[t.next-1].previous = t.previous
	} else {
		l.tail = t.previous
	}
	t.next, t.previous = 0, 0
}

// account is the sum over the slots of a worker.
type account struct {
	requests, waiting, pend, decode int
	blocks                          int
	off                             int64 // what expected output takes off blocks, in 1/fraction
	root                            int32
	untold                          list // slots whose output Grow estimates
	queue                           queue
}

// MostTokens is the most that a prompt or an output counts as, far above what any
// engine holds: no sum over a worker's slots overflows, whatever callers tell.
const MostTokens = 1 << 30

// fraction is the unit of what expected output takes off: sums of integers do not
// depend on the order of their terms.
const fraction = 1 << 20

// Add takes a slot for the request id. It returns false, and changes nothing, if
// the id has a slot already, if the worker is no worker, or if the request is a
// replica's that has ended before.
func (s *Slots) Add(now time.Time, id string, b *Booking) bool {
	if _, exists := s.ids[id]; exists || b.Worker < 0 {
		return false
	}
	if b.Replica != 0 && !b.Owned {
		if s.forget(now); len(s.freed) > 0 {
			if _, ended := s.freed[id]; ended {
				return false
			}
		}
	}
	for len(s.workers) <= b.Worker {
		s.workers = append(s.workers, account{})
	}
	if s.ids == nil {
		s.ids = make(map[string]int32)
	}
	if s.epoch.IsZero() {
		s.epoch = now
	}
	n, since := s.vacancy(), s.at(now)
	s.ids[id] = n
	t, w := &s.slots[n], &s.workers[b.Worker]
	// It is empty.
	t.id, t.worker, t.blockSize, t.taken = id, int32(b.Worker), int32(b.BlockSize), true
	t.prompt, t.expected = min(max(0, b.PromptTokens), MostTokens), min(max(0, b.ExpectedOutput), MostTokens)
	t.replica, t.number, t.unseen, t.owned = b.Replica, b.Number, b.Unseen, b.Owned
	t.added, t.seen = since, since
	t.free, t.blocks, t.reports = b.PrefillUntracked, !b.BlocksUntracked, b.Reports
	if !b.PrefillUntracked {
		t.pend = max(0, t.prompt-max(0, b.CachedTokens))
	}
	w.requests++
	w.waiting++
	w.pend += t.pend
	s.enqueue(n)
	if b.Reports {
		s.arrive(n, since)
	}
	switch {
	case !t.blocks:
	case b.NoReuse:
		t.lone = len(b.Blocks)
		w.blocks += t.lone
	case len(b.Blocks) > 0:
		if w.root == 0 {
			w.root = s.tree.newRoot()
		}
		t.leaf = s.tree.add(w.root, b.Blocks, n, s.share)
	}
	s.reweigh(n)
	return true
}

func (s *Slots) vacancy() int32 {
	if last := len(s.vacant) - 1; last >= 0 {
		n := s.vacant[last]
		s.vacant = s.vacant[:last]
		return n
	}
	s.slots = append(s.slots, slot{})
	return int32(len(s.slots) - 1)
}

// share takes note that some blocks of the slot n are shared with another one
// (delta < 0), or no longer (delta > 0).
func (s *Slots) share(n int32, delta int) {
	s.slots[n].lone += delta
	s.reweigh(n)
}

// reweigh counts anew what a slot's expected output takes off its own blocks.
func (s *Slots) reweigh(n int32) {
	t := &s.slots[n]
	if t.expected == 0 {
		return
	}
	done := min(float64(t.out)/float64(t.expected), 1)
	off := int64(math.Round(done * float64(t.lone+t.output) * fraction))
	s.workers[t.worker].off += off - t.off
	t.off = off
}

// AddOutputTokens notes that a request has k more tokens of output. Each block
// that they begin, beyond the prompt's last one, is one more on the worker. What
// [Slots.Grow] took the output for counts no more. It returns false, and changes
// nothing, if the id has no slot.
func (s *Slots) AddOutputTokens(now time.Time, id string, k int) bool {
	n, exists := s.ids[id]
	if !exists {
		return false
	}
	t := &s.slots[n]
	t.seen = now.Sub(s.epoch)
	if k <= 0 {
		return true
	}
	k = min(k, MostTokens)
	if !t.told {
		if t.told = true; t.linked {
			s.unlink(&s.workers[t.worker].untold, n)
			t.linked = false
		}
		k -= t.out
	}
	s.lengthen(n, min(k, MostTokens-t.out))
	s.learn(t)
	return true
}

// Age returns how long ago a request took its slot.
func (s *Slots) Age(now time.Time, id string) (age time.Duration, taken bool) {
	n, taken := s.ids[id]
	if !taken {
		return 0, false
	}
	return now.Sub(s.epoch) - s.slots[n].added, true
}

// Free gives the slot of a request back, at the latest time that was told of. It returns
// false, and changes nothing, if the id has none.
func (s *Slots) Free(id string) bool {
	existed, _ := s.End(s.epoch.Add(s.latest), id)
	return existed
}

// End is [Slots.Free] at a time, and says whether the request was still waiting for its
// first token, as far as is known.
func (s *Slots) End(now time.Time, id string) (existed, waited bool) {
	n, exists := s.ids[id]
	if !exists {
		return false, false
	}
	s.at(now)
	waited = !s.slots[n].started
	s.drop(n)
	return true, waited
}

// FreeRemote is [Slots.Free] for what a replica tells. Its messages may arrive in
// any order, so the end is remembered for 60 s, and a beginning that comes after
// it ignored.
func (s *Slots) FreeRemote(now time.Time, id string) bool {
	s.forget(now)
	if s.freed == nil {
		s.freed = make(map[string]time.Time)
	}
	if _, known := s.freed[id]; !known {
		s.freed[id] = now.Add(freedLife)
		s.order = append(s.order, id)
	}
	existed, _ := s.End(now, id)
	return existed
}

// forget drops what was remembered for long enough.
func (s *Slots) forget(now time.Time) {
	old := 0
	for old < len(s.order) && !now.Before(s.freed[s.order[old]]) {
		delete(s.freed, s.order[old])
		old++
	}
	s.order = s.order[old:]
	if len(s.order) == 0 {
		s.order = nil
	}
}

// at is a time that was told of, as the slots count it.
func (s *Slots) at(now time.Time) time.Duration {
	since := now.Sub(s.epoch)
	s.latest = max(s.latest, since)
	return since
}

func (s *Slots) drop(n int32) {
	t := &s.slots[n]
	w := &s.workers[t.worker]
	delete(s.ids, t.id)
	s.note(int(t.worker))
	if t.linked {
		s.unlink(&w.untold, n)
	}
	if t.reports {
		was := load{requests: 1}
		if !t.started {
			was.pend = t.pend
		}
		s.ended(t, s.latest, was)
	}
	s.settle(t)
	w.requests--
	if t.started {
		w.decode -= t.prompt + t.out
	} else {
		if t.previous == 0 {
			w.queue.broken = true
		}
		s.unlink(&w.queue.list, n)
		w.queue.due = 0
		w.waiting--
		w.pend -= t.pend
	}
	w.blocks -= t.output
	w.off -= t.off
	t.expected, t.off = 0, 0 // the tree need not reweigh it
	if t.leaf == 0 {
		w.blocks -= t.lone
	} else {
		s.tree.remove(t.leaf, n, s.share)
	}
	if w.requests == 0 {
		s.tree.dropRoot(w.root)
		*w = account{}
	}
	*t = slot{}
	s.vacant = append(s.vacant, n)
}

// dropIf drops all slots that meet the condition, and returns how many.
func (s *Slots) dropIf(condition func(*slot) bool) (dropped int) {
	for n := range s.slots {
		if t := &s.slots[n]; t.taken && condition(t) {
			s.drop(int32(n))
			dropped++
		}
	}
	return dropped
}

// RemoveWorker drops every slot on a worker. Its number may be used again.
func (s *Slots) RemoveWorker(worker int) {
	s.dropIf(func(t *slot) bool { return int(t.worker) == worker })
	if worker >= 0 && worker < len(s.rates) {
		s.rates[worker] = 0
	}
	if worker >= 0 && worker < len(s.paces) {
		s.paces[worker] = pace{}
	}
	if worker >= 0 && worker < len(s.later) {
		s.later[worker] = unreported{}
	}
	if worker >= 0 && worker < len(s.peaks) {
		s.peaks[worker] = peak{since: s.latest}
	}
}

// RemoveReplica drops every slot of another router replica, gone silent.
func (s *Slots) RemoveReplica(replica uint64) {
	s.dropIf(func(t *slot) bool { return replica != 0 && t.replica == replica })
}

// Expire drops the slots without an owner that have shown no sign of life for
// 300 s, and returns how many. It looks at most every 30 s, so it may be called
// as often as is handy.
func (s *Slots) Expire(now time.Time) int {
	s.forget(now)
	if now.Sub(s.swept) < sweepEvery {
		return 0
	}
	s.swept = now
	since := now.Sub(s.epoch)
	return s.dropIf(func(t *slot) bool { return !t.owned && since-t.seen >= ownerlessLife })
}

// Load returns what the slots on a worker add up to.
func (s *Slots) Load(worker int) Load {
	if worker < 0 || worker >= len(s.workers) {
		return Load{}
	}
	w := &s.workers[worker]
	l := Load{Requests: w.requests, Waiting: w.waiting, PendTokens: w.pend, DecodeTokens: w.decode, Blocks: w.blocks}
	if w.root != 0 {
		l.Blocks += s.tree.nodes[w.root].below
	}
	if w.off != 0 {
		l.Blocks = int(math.Round(float64(int64(l.Blocks)*fraction-w.off) / fraction))
	}
	return l
}

// AdditionalBlocks returns how many of the blocks a request with these sequence
// hashes would add to a worker: those behind the longest prefix that is active
// there. Where nothing is re-used it is all of them, which needs no question.
func (s *Slots) AdditionalBlocks(worker int, blocks []uint64) int {
	if worker < 0 || worker >= len(s.workers) || s.workers[worker].root == 0 {
		return len(blocks)
	}
	return len(blocks) - s.tree.match(s.workers[worker].root, blocks)
}

// Worker returns the worker that a request has its slot on.
func (s *Slots) Worker(id string) (worker int, taken bool) {
	n, taken := s.ids[id]
	if !taken {
		return 0, false
	}
	return int(s.slots[n].worker), true
}

// Len returns the number of slots taken.
func (s *Slots) Len() int { return len(s.ids) }
