// SPDX-License-Identifier: Apache-2.0

// Package confirm compares the token ids of requests with the blocks that workers store.
//
// A router that makes token ids expects that the worker of a request stores the blocks of its prompt, or has them
// already. The events of the worker's cache show both. A [Table] remembers the expected blocks of each request until
// the worker's events had time to arrive. Then it judges the request, and keeps a verdict on each class of
// requests and each worker.
//
// # Guarantees
//
// A missing block alone contradicts nothing, since a worker may not have computed the prompt, or may have evicted
// it. A request is contradicted only if its worker stored another sequence of blocks since the request was booked.
// The sequence differs from the prompt at the first missing block or before, and no other request to that worker
// explains it. A request explains the blocks of its prompt and of what it generates, from its booking until its end
// plus the delay of the worker's events. A request is not judged if the worker's events are incomplete or if the
// worker had the missing block since then. Where blocks depend on a salt or an adapter, the hash or the token ids of
// a stored block must also show that the engine used the same ones.
//
// A worker that claims other tokens than it served changes the verdict on a class only if no other worker
// confirms the class.
//
// # Invariants
//
//   - A request is judged or dropped once. It is then no longer open.
//   - The hashes of an open request stay in memory: a chunk is replaced only when no open request has hashes in it.
//   - open of a worker and of a chunk is the number of its open requests.
//   - Memory is bounded, whatever events and requests come: see the constants.
//   - While a judgement or a search reads hashes, events and token ids without the lock, they are not overwritten.
//
// # Concurrency
//
// A [Table] has no clock and no goroutine. Its methods may be called by any number of goroutines. They hold a lock of
// the table while no function of the caller runs, and take no other lock. [Table.Judge] compares without the lock: its
// work grows linearly with the requests that it judges and the blocks that their workers stored.
package confirm

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Worker names one rank of a worker process.
type Worker struct {
	ID   uint64
	Rank uint32
}

const (
	// places is the number of requests that are remembered. A later request takes the place of an earlier one.
	places = 4096
	// chunkWords and chunks limit the hashes of requests, to 8 MB. A prompt has at most chunkWords judged blocks.
	chunkWords = 1 << 15
	chunks     = 32
	// maxWorkers limits the workers, maxRows the pairs of worker and class of a model: a later pair replaces one without
	// contradictions.
	maxWorkers = 1 << 16
	maxRows    = 4096
	// suspects limits the requests whose token ids are kept, idsOfOne the ids of one of them, and idsOfAll of all: 4 MB.
	suspects = 16
	idsOfOne = 1 << 18
	idsOfAll = 1 << 20
	// delay is the time from the first token to the first judgement. conclusion is the least time to a judgement
	// against a request, giveUp the most. unseen is the most time from the booking to the first token.
	delay      = time.Second
	conclusion = 2 * time.Second
	giveUp     = 10 * time.Second
	unseen     = 10 * time.Minute
)

// Request is a request that was booked on a worker.
type Request struct {
	Number    uint64 // of the decision: unique and growing
	Worker    Worker
	Class     chat.Class
	BlockSize int
	// Local are the local hashes of the prompt's blocks that the engine must store; see [Blocks].
	Local []uint64
	// Had is how many leading blocks the worker has by its events.
	Had int
	// Seed is the seed of Local; see [indexer.Seed]. If it is of a salt or an adapter, the engine may use another one.
	Seed uint64
	// IDs are the token ids. They are copied if the class is suspected.
	IDs []uint32
}

// Blocks returns how many blocks of a prompt an engine stores for certain: the block with the last token may be
// incomplete in some engines.
func Blocks(tokens, blockSize int) int { return max(0, tokens-1) / blockSize }

// Cache reads what workers have by their events. Its functions are called without a lock, and may be called
// at the same time.
type Cache struct {
	// Held returns the number of leading blocks that a worker has, on any tier. ok is false if its events are
	// incomplete.
	Held func(w Worker, model *Model, local []uint64) (n int, ok bool)
	// AppendChain appends the local hashes of a sequence up to the block that a worker has under an external hash;
	// none if the worker does not have it.
	AppendChain func(dst []uint64, w Worker, model *Model, external uint64) []uint64
}

// Table has the requests that are to be judged, of all models. The zero value is an empty table.
type Table struct {
	mu sync.Mutex
	// mu guards the fields below, and those of the models.
	slots    []slot // by number; nil before the first request
	chunks   [chunks]*chunk
	at       int // the chunk that takes hashes
	workers  map[Worker]*worker
	words    int // of the logs of all workers
	suspects int // open requests with ids
	ids      int // of these requests
	judging  int // judgements that read hashes without the lock

	tokens tokens // has a lock of its own
}

// slot is the place of a request. It stays when the request is no longer open, to explain blocks.
type slot struct {
	number   uint64 // 0 = empty
	model    *Model
	worker   *worker
	chunk    int
	from, to int      // of the hashes in the chunk
	age      uint32   // of the chunk when the hashes were written
	ids      []uint32 // nil unless wanted
	seed     uint64
	mark     uint64 // worker.stored at the booking
	breaks   uint32 // worker.breaks at the booking
	had      int32
	size     int32 // block size
	class    chat.Class
	open     bool
	late     bool  // its events came after the first judgement
	booked   int64 // unix ns
	first    int64 // first token; 0 = not yet
	ended    int64 // end of the response; 0 = not yet
	due      int64 // next judgement
}

// keyed reports whether the hashes depend on a salt or an adapter.
func (s *slot) keyed() bool { return s.seed != indexer.Seed("", "") }

// local returns the hashes of a request, or nil if they are no longer kept.
func (t *Table) local(s *slot) []uint64 {
	c := t.chunks[s.chunk]
	if c == nil || c.age != s.age {
		return nil
	}
	return c.words[s.from:s.to:s.to]
}

// chunk has the hashes of some requests.
type chunk struct {
	words [chunkWords]uint64
	used  int
	open  int
	age   uint32
}

// worker is what is remembered of a worker. It stays until [Table.Forget].
type worker struct {
	Worker
	log

	open   int
	breaks uint32 // how often events were lost, or the cache was cleared
	// delay is the time from a first token to its events: giveUp until a request is confirmed by events that came
	// after its booking, 0 if they were in time for the first judgement.
	delay   time.Duration
	timed   bool // such a request was confirmed
	unheard int  // judged requests while no block was stored
}

// enoughUnheard is how many requests without any stored block show that a worker's events have nothing to compare.
const enoughUnheard = 8

// Compared reports whether the events of a worker have no blocks that can be compared: several requests had to store
// blocks, and none was stored. suspect reports whether one of the last judgements of a class, or the verdict on the
// worker, is a contradiction.
func (t *Table) Compared(of Worker, m *Model, c chat.Class) (silent, suspect bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w, k, r := t.workers[of], m.classes[c], m.rows[rowKey{c, of}]
	silent = w != nil && w.stored == 0 && w.unheard >= enoughUnheard
	return silent, k != nil && (k.unconfirmed || k.bits != 0) || r != nil && r.named
}

// Answered judges a request by the ids that its worker made of the client's body. at is the number of the first id
// that differs from kvroute's; -1 if none does. A difference behind the blocks that an engine stores for certain does
// not count, and a request without such a block is not judged.
func (t *Table) Answered(m *Model, c chat.Class, of Worker, blockSize, at int, ours, theirs []uint32) []Change {
	blocks := Blocks(len(ours), blockSize)
	if blocks == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if at < 0 || at >= blocks*blockSize {
		m.count(c, Confirmed)
		return m.confirmed(c, of, blocks, true)
	}
	m.count(c, Unmatched)
	excerpt := func(ids []uint32) []uint32 { return slices.Clone(ids[max(0, at-around):min(len(ids), at+around)]) }
	return m.contradicted(c, blocks, Difference{
		Worker: of, Block: at / blockSize, Position: at, Ours: excerpt(ours), Theirs: excerpt(theirs),
	})
}

// Outcome is what became of a request.
type Outcome uint8

// The outcomes. All but the first two mean that the request was not judged.
const (
	Confirmed Outcome = iota
	Unmatched         // the worker stored other blocks
	Cancelled         // the request was cancelled, failed, or went to another worker
	Lost              // events of the worker are missing, or its cache was cleared
	Evicted           // the missing block was evicted
	Unseen            // the worker stored no other block in the place of the missing one
	Full              // no room, or no first token for 10 minutes
	outcomes          // the number of outcomes
	undecided = outcomes
)

// String returns the name of the outcome.
func (o Outcome) String() string {
	return [...]string{"confirmed", "unconfirmed", "cancelled", "lost", "evicted", "unseen", "full", ""}[o]
}

// Expect remembers a request. now is the time of its booking.
func (t *Table) Expect(now time.Time, m *Model, r *Request) {
	if len(r.Local) == 0 {
		return
	}
	local := r.Local[:min(len(r.Local), chunkWords)]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.slots == nil {
		t.slots, t.workers = make([]slot, places), make(map[Worker]*worker)
	}
	s := &t.slots[r.Number%places]
	if s.open {
		t.end(s, Full)
	}
	*s = slot{}
	w := t.workers[r.Worker]
	if w == nil {
		if len(t.workers) >= maxWorkers {
			m.count(r.Class, Full)
			return
		}
		w = &worker{Worker: r.Worker, delay: giveUp}
		t.workers[r.Worker] = w
	}
	c := t.room(len(local))
	if c == nil {
		m.count(r.Class, Full)
		return
	}
	from := c.used
	c.used += copy(c.words[from:], local)
	c.open++
	w.open++
	w.apart = true
	*s = slot{
		number: r.Number, model: m, worker: w, chunk: t.at, from: from, to: c.used, age: c.age, seed: r.Seed,
		mark: w.stored, breaks: w.breaks, had: int32(r.Had), size: int32(r.BlockSize), class: r.Class,
		open: true, booked: now.UnixNano(),
	}
	k, n := m.class(r.Class), len(r.IDs)
	if k.suspected() && k.last.Ours == nil && t.suspects < suspects && 0 < n && n <= min(idsOfOne, idsOfAll-t.ids) {
		s.ids = slices.Clone(r.IDs)
		t.suspects++
		t.ids += n
	}
}

// room returns a chunk with room for some hashes, as t.at. It returns nil if all chunks have open requests.
func (t *Table) room(n int) *chunk {
	for i := range chunks {
		at := (t.at + i) % chunks
		c := t.chunks[at]
		switch {
		case c == nil:
			c = new(chunk)
			t.chunks[at] = c
		case i > 0 && c.open == 0 && t.judging > 0: // a judgement may still read the old one
			c = &chunk{age: c.age + 1}
			t.chunks[at] = c
		case i > 0 && c.open == 0:
			c.used = 0
			c.age++
		}
		if chunkWords-c.used >= n {
			t.at = at
			return c
		}
	}
	return nil
}

// end ends a request with an outcome.
func (t *Table) end(s *slot, o Outcome) {
	s.open = false
	t.chunks[s.chunk].open--
	if s.worker.open--; s.worker.open == 0 {
		t.words -= s.worker.drop()
	}
	if s.ids != nil {
		t.suspects--
		t.ids -= len(s.ids)
		s.ids = nil
	}
	s.model.count(s.class, o)
}

// find returns the slot of an open request, or nil.
func (t *Table) find(number uint64) *slot {
	if t.slots == nil {
		return nil
	}
	if s := &t.slots[number%places]; s.number == number && s.open {
		return s
	}
	return nil
}

// FirstToken notes the first token of a request, or its end: the worker has computed the prompt by then. A
// repetition has no effect.
func (t *Table) FirstToken(number uint64, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.find(number); s != nil && s.first == 0 {
		s.first = at.UnixNano()
		s.due = s.first + int64(delay)
	}
}

// End notes the end of a request's response, whatever became of the request: blocks that its worker stores later are
// not those of the request.
func (t *Table) End(number uint64, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.slots == nil {
		return
	}
	if s := &t.slots[number%places]; s.number == number && s.ended == 0 {
		s.ended = at.UnixNano()
	}
}

// Drop forgets a request that its worker may not have computed.
func (t *Table) Drop(number uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.find(number); s != nil {
		t.end(s, Cancelled)
	}
}

// Interrupt notes that events of a worker are missing, or that its cache was cleared: its open requests are not
// contradicted.
func (t *Table) Interrupt(of Worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w := t.workers[of]; w != nil {
		w.breaks++
	}
}

// InterruptAll is [Table.Interrupt] for all workers.
func (t *Table) InterruptAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, w := range t.workers {
		w.breaks++
	}
}

// Forget forgets a worker process, with all ranks, in all models.
func (t *Table) Forget(id uint64, models ...*Model) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.slots {
		if s := &t.slots[i]; s.number != 0 && s.worker.ID == id {
			if s.open {
				t.end(s, Cancelled)
			}
			*s = slot{}
		}
	}
	maps.DeleteFunc(t.workers, func(of Worker, _ *worker) bool { return of.ID == id })
	for _, m := range models {
		m.forget(id)
	}
}

// Stored notes blocks that a worker stored. Call it before the index has them.
func (t *Table) Stored(now time.Time, of Worker, ev *indexer.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w, n := t.workers[of], len(ev.Blocks)
	switch {
	case w == nil || w.open == 0 || n == 0:
	case !w.fits(n) || t.words+n+eventWords > allWords:
		w.stored++ // the log misses an event
		t.words -= w.drop()
	default:
		t.words += w.append(now.UnixNano(), ev)
	}
}

// StoredTokens notes the token ids of blocks that a worker stored, as the engine names them. They are copied.
func (t *Table) StoredTokens(ids []uint32) {
	if len(ids) <= allTokens/4 {
		t.tokens.append(ids)
	}
}
