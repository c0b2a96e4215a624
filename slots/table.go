// SPDX-License-Identifier: Apache-2.0

// Package slots keeps what the requests in flight hold: a slot on a worker ([Table]), or a place in
// the queue ([Queue]).
//
// It is plain bookkeeping: no I/O, clock, lock, goroutine or randomness of its own. Workers are small
// dense numbers that the caller assigns. The time is an argument. The owner of a Table and of a Queue
// guards them, together with the reads that a decision makes before it books.
package slots

import (
	"math"
	"time"
)

// Table holds one slot for each request in flight, from the decision to the end of the
// response. The load of a worker follows from its slots at once, without waiting for the
// engine's own report.
//
// # Invariants
//
//   - The load of a worker equals the load recomputed from the slots on it: its
//     requests are their number, its pending tokens the sum of the prefill tokens
//     of those without a first token, its active blocks the distinct blocks of
//     their prompts, and the blocks that their output has filled.
//   - No load is negative, and after all slots are freed all loads are 0.
//   - Adding a slot raises the active blocks by exactly [Table.AdditionalBlocks],
//     unless lengths of output are expected.
//   - The order in which slots were added and freed does not matter.
//
// A sequence hash stands for the whole prefix of its block, so the active prompts of a worker
// are a tree. The cost of a request depends on the number of its branches, not of its blocks.
//
// The zero value is empty and ready to use. Only one goroutine at a time may use a Table.
type Table struct {
	ids    map[string]int32 // index into slots
	slots  []slot
	vacant []int32 // slots to hand out again
	tree   prefixTree
	latest time.Duration // latest time of an input

	// By worker, of the same length.
	workers   []account
	histories []history

	epoch time.Time // time of the first input; all times are relative to it
	swept time.Time // last sweep of Expire

	infers   bool   // first tokens
	turn     uint64 // bookings so far
	inferred []Inference
	foreign  map[uint64]int // stored blocks of each other replica's slots, and under 0 of all of them
}

// Booking describes a slot to be taken.
type Booking struct {
	Worker       int
	Blocks       []uint64 // sequence hashes of the prompt's full blocks; copied
	PromptTokens int
	CachedTokens int // of the prompt; the rest is prefill
	BlockSize    int // below 1: output fills no blocks

	// ExpectedOutput is the number of tokens of the response, 0 if unknown. The nearer
	// the end, the less the request's own blocks count.
	ExpectedOutput int

	// Reports says that the worker reports its load; see [Table.Reported].
	Reports bool

	// Owned says that a live stream will free the slot, so the slot never expires.
	Owned bool
	// Replica is the router replica that booked the request; 0 = this one.
	Replica uint64

	// ExpectedTTFT is the time to the first token that the decision expects, 0 = unknown; see
	// [Table.Wait].
	ExpectedTTFT time.Duration

	// Unseen says that the first token will not be reported when it comes. Number is the
	// caller's; an [Inference] returns it.
	Unseen bool
	Number uint64
	// AssumedRate is the number of tokens a second that stands for the worker's rate while that is not measured, of
	// an Unseen request; 0 infers nothing by rate until then.
	AssumedRate float64

	BlocksUntracked  bool // the worker's blocks do not matter: it only computes prefills
	PrefillUntracked bool // the prompt arrives computed
	NoReuse          bool // the engine shares no blocks between requests
}

// Load is the sum of the slots on one worker.
type Load struct {
	Requests     int // slots on the worker
	Waiting      int // those before their first token
	PendTokens   int // prefill tokens of those
	Blocks       int // distinct blocks of all slots
	DecodeTokens int // prompt and output of those that have their first token

	WaitingTokens int // prompts of the waiting ones

	// Of the waiting ones: the slots of requests that were left, and their prefill tokens; see [Table.Leave].
	Left, LeftTokens int
}

// slot is one request. Its prompt's blocks are the nodes from leaf up to the root
// of its worker's tree, or, if they are not shared, plain numbers.
type slot struct {
	Booking   // without Blocks
	id        string
	leaf      int32
	lone      int    // blocks of the prompt that no other slot has
	stored    int    // blocks of the prompt in the tree, if another replica booked the request
	owner     uint64 // that replica
	output    int    // blocks filled by the output
	pend      int
	out       int   // output tokens
	off       int64 // subtracted from the blocks because of expected output, in 1/fraction
	added     time.Duration
	seen      time.Duration // last sign of life
	first     time.Duration // its first token, if started
	started   bool
	confirmed bool // its first token was reported
	atEnd     bool // it was reported only with the end of the response

	// Of a prefill: the number of its booking, and when it began to wait.
	turn    uint64
	listed  time.Duration
	counted bool // its tokens are in queue.done
	byOrder bool // its first token was inferred by order

	// The slot's neighbours in the list of its worker's waiting slots, and after the first
	// token in that of the slots whose output is estimated; see [list].
	next, previous int32
	// An estimated output: its length, and the time of the estimate.
	estimate       float64
	grown          time.Duration
	linked         bool
	outputReported bool // not estimated

	taken   bool          // not vacant
	left    bool          // its request was left, at the time seen
	arrived time.Duration // when the worker got it, if the worker reports its load
}

// list is a list of slots, linked by next and previous. Each number is one more than the
// slot's index; 0 = none.
type list struct{ head, tail int32 }

// link puts a slot at the end of a list.
func (s *Table) link(l *list, n int32) {
	if l.head == 0 {
		l.head = n + 1
	} else {
		s.slots[l.tail-1].next = n + 1
	}
	s.slots[n].previous, l.tail = l.tail, n+1
}

// unlink takes a slot out of the list that it is in.
func (s *Table) unlink(l *list, n int32) {
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
	Load            // without off
	off       int64 // sum of slot.off
	root      int32
	estimated list // slots whose output Grow estimates
	queue     queue
}

// history is what is known of a worker beside the sums of its slots. It outlives them.
type history struct {
	outputRate float64 // output tokens a second of a request, as reported; 0 = unknown
	pace       pace
	peak       peak
	unreported unreported
	left       []int32 // slots of requests that were left, in this order
}

// history returns the history of a worker; an empty one, that is not kept, of an unknown worker.
func (s *Table) history(worker int) *history {
	if worker < 0 || worker >= len(s.histories) {
		return new(history)
	}
	return &s.histories[worker]
}

// grow makes room for a worker.
func (s *Table) grow(worker int) {
	for len(s.workers) <= worker {
		s.workers, s.histories = append(s.workers, account{}), append(s.histories, history{})
	}
}

// MostTokens bounds the length of a prompt or an output, far above what any engine
// holds: so no sum over a worker's slots overflows.
const MostTokens = 1 << 30

// fraction is the unit of slot.off. It is an integer, because sums of integers do not
// depend on the order of their terms.
const fraction = 1 << 20

// Other replicas' slots store at most this many blocks, of 8 bytes each: a program on the bus may make up any number
// of requests. The blocks of further requests are only counted, as if no request shared them.
const (
	MostReplicaBlocks = 8 << 20 // of one replica
	mostForeignBlocks = 16 << 20
)

// isFull says whether a booking's blocks can only be counted.
func (s *Table) isFull(b *Booking) bool {
	n := len(b.Blocks)
	return b.Replica != 0 && (s.foreign[b.Replica]+n > MostReplicaBlocks || s.foreign[0]+n > mostForeignBlocks)
}

// countForeign notes that the slot stores n more blocks for another replica, or fewer (n < 0).
func (s *Table) countForeign(t *slot, n int) {
	if t.owner == 0 {
		return
	}
	if s.foreign == nil {
		s.foreign = make(map[uint64]int)
	}
	t.stored += n
	s.foreign[0] += n
	if s.foreign[t.owner] += n; s.foreign[t.owner] == 0 {
		delete(s.foreign, t.owner)
	}
}

// Add takes a slot for the request id. It returns false, and changes nothing, if
// the id has a slot already, or if the worker's number is negative.
func (s *Table) Add(now time.Time, id string, b *Booking) bool {
	if _, exists := s.ids[id]; exists || b.Worker < 0 {
		return false
	}
	s.grow(b.Worker)
	if s.ids == nil {
		s.ids = make(map[string]int32)
	}
	n, since := s.vacancy(), s.at(now)
	s.ids[id] = n
	t, w := &s.slots[n], &s.workers[b.Worker]
	// The slot is empty.
	t.Booking, t.id, t.taken, t.added, t.seen = *b, id, true, since, since
	t.Blocks = nil // the caller's
	t.PromptTokens, t.ExpectedOutput = min(max(0, b.PromptTokens), MostTokens), min(max(0, b.ExpectedOutput), MostTokens)
	if !b.PrefillUntracked {
		t.pend = max(0, t.PromptTokens-max(0, b.CachedTokens))
	}
	w.Requests++
	w.Waiting++
	w.PendTokens += t.pend
	w.WaitingTokens += t.PromptTokens
	s.enqueue(n)
	if b.Reports {
		s.arrive(t)
	}
	switch {
	case b.BlocksUntracked:
	case b.NoReuse, s.isFull(b):
		t.lone = len(b.Blocks)
		w.Blocks += t.lone
	case len(b.Blocks) > 0:
		if w.root == 0 {
			w.root = s.tree.newNode(node{})
		}
		var added int
		t.leaf, added = s.tree.add(w.root, b.Blocks, n, s.share)
		w.Blocks += added
		t.owner = b.Replica
		s.countForeign(t, len(b.Blocks))
	}
	s.reweigh(n)
	return true
}

func (s *Table) vacancy() int32 {
	if last := len(s.vacant) - 1; last >= 0 {
		n := s.vacant[last]
		s.vacant = s.vacant[:last]
		return n
	}
	s.slots = append(s.slots, slot{})
	return int32(len(s.slots) - 1)
}

// share notes that blocks of the slot n are shared with another slot (delta < 0), or no
// longer (delta > 0).
func (s *Table) share(n int32, delta int) {
	s.slots[n].lone += delta
	s.reweigh(n)
}

// reweigh computes slot.off again.
func (s *Table) reweigh(n int32) {
	t := &s.slots[n]
	if t.ExpectedOutput == 0 {
		return
	}
	done := min(float64(t.out)/float64(t.ExpectedOutput), 1)
	off := int64(math.Round(done * float64(t.lone+t.output) * fraction))
	s.workers[t.Worker].off += off - t.off
	t.off = off
}

// ComputePrompt notes that the worker computes the prompt of a request that was booked with
// PrefillUntracked. It returns false, and changes nothing, if the id has no such slot, and after the
// first token.
func (s *Table) ComputePrompt(id string) bool {
	n, exists := s.ids[id]
	if !exists || s.slots[n].started || !s.slots[n].PrefillUntracked {
		return false
	}
	t := &s.slots[n]
	w := &s.workers[t.Worker]
	t.PrefillUntracked, t.pend = false, t.PromptTokens
	w.PendTokens += t.pend
	w.queue.due = 0
	return true
}

// at converts the time of an input.
func (s *Table) at(now time.Time) time.Duration {
	if s.epoch.IsZero() {
		s.epoch = now
	}
	since := now.Sub(s.epoch)
	s.latest = max(s.latest, since)
	return since
}

func (s *Table) drop(n int32) {
	t := &s.slots[n]
	w := &s.workers[t.Worker]
	if !t.left {
		delete(s.ids, t.id)
	}
	s.note(t.Worker)
	if t.linked {
		s.unlink(&w.estimated, n)
	}
	if t.Reports {
		by := ReportLoad{Requests: -1, HeldTokens: -t.PromptTokens}
		if !t.started {
			by.PendTokens = -t.pend
		}
		s.changed(t, by)
	}
	w.Requests--
	if t.started {
		w.DecodeTokens -= t.PromptTokens + t.out
	} else {
		if t.previous == 0 {
			w.queue.broken = true
		}
		s.unlink(&w.queue.list, n)
		w.queue.due = 0
		w.Waiting--
		w.PendTokens -= t.pend
		w.WaitingTokens -= t.PromptTokens
	}
	if t.left {
		w.Left--
		w.LeftTokens -= t.pend
	}
	w.Blocks -= t.output
	w.off -= t.off
	t.ExpectedOutput, t.off = 0, 0 // so that share does not change w.off again
	if t.leaf == 0 {
		w.Blocks -= t.lone
	} else {
		w.Blocks -= s.tree.remove(t.leaf, n, s.share)
		s.countForeign(t, -t.stored)
	}
	if w.Requests == 0 {
		if w.root != 0 {
			s.tree.retire(w.root)
		}
		*w = account{}
	}
	*t = slot{}
	s.vacant = append(s.vacant, n)
}

// dropIf drops all slots that meet the condition, and returns how many.
func (s *Table) dropIf(condition func(*slot) bool) (dropped int) {
	for n := range s.slots {
		if t := &s.slots[n]; t.taken && condition(t) {
			s.drop(int32(n))
			dropped++
		}
	}
	return dropped
}

// RemoveWorker drops all slots on a worker. Its number may then be used again.
func (s *Table) RemoveWorker(worker int) {
	s.dropIf(func(t *slot) bool { return t.Worker == worker })
	*s.history(worker) = history{}
}

// RemoveReplica drops all slots of another router replica.
func (s *Table) RemoveReplica(replica uint64) {
	s.dropIf(func(t *slot) bool { return replica != 0 && t.Replica == replica })
}

// Load returns the sum of the slots on a worker.
func (s *Table) Load(worker int) Load {
	if worker < 0 || worker >= len(s.workers) {
		return Load{}
	}
	l := s.workers[worker].Load
	if off := s.workers[worker].off; off != 0 {
		l.Blocks = int(math.Round(float64(int64(l.Blocks)*fraction-off) / fraction))
	}
	return l
}

// AdditionalBlocks returns how many of these blocks a request would add to a worker: those
// behind the longest prefix that is active there. It assumes that the engine reuses blocks.
func (s *Table) AdditionalBlocks(worker int, blocks []uint64) int {
	if worker < 0 || worker >= len(s.workers) || s.workers[worker].root == 0 {
		return len(blocks)
	}
	return len(blocks) - s.tree.match(s.workers[worker].root, blocks)
}

// Worker returns the worker that a request has its slot on.
func (s *Table) Worker(id string) (worker int, taken bool) {
	n, taken := s.ids[id]
	if !taken {
		return 0, false
	}
	return s.slots[n].Worker, true
}

// Len returns the number of slots taken.
func (s *Table) Len() int { return len(s.ids) }
