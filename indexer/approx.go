// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// ApproxConfig says how long and how much an [Approx] believes. The zero value of
// each field means its default.
type ApproxConfig struct {
	// TTL is how long a block counts after the last request that used it, in
	// whole steps of 100 ms, rounded up. Default 120 s.
	TTL time.Duration
	// MaxBlocks bounds the (block, worker) pairs remembered; at the bound the
	// worker that gets a request forgets its oldest blocks. Default 1<<22.
	MaxBlocks int
	// Forgettable makes [Approx.Forget] work, for some 40 bytes a block.
	Forgettable bool
}

// Approx guesses what workers hold: the blocks of the requests that were sent to
// them lately. It serves where engines do not tell, and while what they tell is
// on its way.
//
// # Invariants
//
//   - A worker's blocks are ordered by their last use; whatever is in front of a
//     block in its prompt was used no earlier. So the oldest block is always the
//     end of a chain, and forgetting the oldest leaves no holes.
//   - Use fixes the end of life, so the oldest block is also the next to die.
//   - The index holds a block for a worker exactly if the worker's list does,
//     but for what the index itself refused.
//
// # Concurrency
//
// The methods may be called by any number of goroutines, except that a worker must
// not be used before [Approx.Begin]. No goroutine belongs to it: what has died
// goes at the next call.
type Approx struct {
	conf  ApproxConfig
	index *Index
	next  atomic.Int64 // step at which the next block dies; math.MaxInt64 = never

	mu sync.Mutex
	// mu guards the fields below.
	now     int64 // the latest time seen, in ns; it never goes back
	stamp   uint64
	blocks  int
	workers []guesses
	event   Event // scratch
}

// guesses are one worker's.
type guesses struct {
	generation uint64
	limit      int
	lru        *simplelru.LRU[uint64, guess] // by sequence hash
	byLocal    map[uint64]uint64             // newest sequence hash of a local one; nil if not asked for
}

type guess struct {
	local  uint64
	parent uint64 // sequence hash of the block before; none if first
	stamp  uint64 // of the last request that used it
	dies   int64  // at this step
	first  bool
	fresh  bool // no request used it before that one
}

const step = int64(100 * time.Millisecond)

// NewApprox returns an empty index of guesses.
func NewApprox(c ApproxConfig) *Approx {
	if c.TTL <= 0 {
		c.TTL = 120 * time.Second
	}
	if c.MaxBlocks <= 0 {
		c.MaxBlocks = 1 << 22
	}
	// Before the oldest blocks go, those of one more request are there.
	a := &Approx{conf: c, index: New(Config{MaxBlocks: 2 * c.MaxBlocks})}
	a.next.Store(math.MaxInt64)
	return a
}

// Begin makes a worker's number ready for an owner, of which nothing is known yet.
// Insertions under another generation are ignored, so that a late one cannot end
// up with the wrong owner. limit is the number of blocks that the worker's cache
// holds; below 1 it is not limited. With the generation that there is already,
// Begin changes only the limit.
func (a *Approx) Begin(worker int, generation uint64, limit int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.workers) <= worker {
		a.workers = append(a.workers, guesses{})
	}
	if limit < 1 {
		limit = math.MaxInt
	}
	g := &a.workers[worker]
	if g.generation != generation {
		a.clear(worker)
		g.generation = generation
	}
	g.limit = limit
	a.trim(worker, g)
}

// Clear forgets all of a worker's blocks.
func (a *Approx) Clear(worker int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.clear(worker)
}

func (a *Approx) clear(worker int) {
	g := a.of(worker)
	if g == nil || g.lru == nil {
		return
	}
	a.blocks -= g.lru.Len()
	g.lru, g.byLocal = nil, nil
	a.index.RemoveWorker(worker)
}

func (a *Approx) of(worker int) *guesses {
	if worker < 0 || worker >= len(a.workers) {
		return nil
	}
	return &a.workers[worker]
}

// Insert takes a worker to hold a prompt from now on, given by the local and
// sequence hashes of its blocks. Of more blocks than the worker's cache has, the
// leading ones count. The result is for [Approx.Withdraw]; 0 if nothing was
// inserted.
func (a *Approx) Insert(now time.Time, worker int, generation uint64, local, sequence []uint64) (stamp uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	g := a.of(worker)
	if g == nil || g.generation != generation || len(local) == 0 {
		return 0
	}
	if g.lru == nil {
		g.open(&a.conf)
	}
	n := min(len(local), g.limit, a.conf.MaxBlocks)
	ev := &a.event
	ev.Kind, ev.HasParent, ev.Blocks = Stored, false, ev.Blocks[:0]
	for i := range n {
		ev.Blocks = append(ev.Blocks, Block{External: sequence[i], Local: local[i]})
	}
	a.index.Apply(worker, *ev)

	a.stamp++
	before := g.lru.Len()
	dies := ceil(a.now+int64(a.conf.TTL), step)
	for i := n - 1; i >= 0; i-- {
		_, known := g.lru.Peek(sequence[i])
		v := guess{local: local[i], stamp: a.stamp, dies: dies, first: i == 0, fresh: !known}
		if i > 0 {
			v.parent = sequence[i-1]
		}
		g.lru.Add(sequence[i], v)
		if g.byLocal != nil {
			g.byLocal[local[i]] = sequence[i]
		}
	}
	a.blocks += g.lru.Len() - before
	if a.next.Load() > dies {
		a.next.Store(dies)
	}
	a.trim(worker, g)
	return a.stamp
}

func (g *guesses) open(c *ApproxConfig) {
	// The bound is held by trim, which tells the index what goes.
	g.lru, _ = simplelru.NewLRU[uint64, guess](math.MaxInt, nil)
	if c.Forgettable {
		g.byLocal = make(map[uint64]uint64)
	}
}

// trim forgets the oldest blocks of a worker that has too many.
func (a *Approx) trim(worker int, g *guesses) {
	if g.lru == nil {
		return
	}
	ev := a.removal()
	for g.lru.Len() > 0 && (g.lru.Len() > g.limit || a.blocks > a.conf.MaxBlocks) {
		sequence, v, _ := g.lru.RemoveOldest()
		a.gone(g, sequence, v.local)
	}
	a.apply(worker, ev)
}

func (a *Approx) removal() *Event {
	ev := &a.event
	ev.Kind, ev.HasParent, ev.Externals = Removed, false, ev.Externals[:0]
	return ev
}

// gone notes that a block has left the worker's list.
func (a *Approx) gone(g *guesses, sequence, local uint64) {
	a.blocks--
	a.event.Externals = append(a.event.Externals, sequence)
	if g.byLocal[local] == sequence {
		delete(g.byLocal, local)
	}
}

func (a *Approx) apply(worker int, ev *Event) {
	if len(ev.Externals) > 0 {
		a.index.Apply(worker, *ev)
	}
}

// Withdraw takes an insertion back: blocks that only it knew, and that no later
// one used, are forgotten, from its last block back to the first that must stay.
// last is the sequence hash of that last block; if it has been forgotten already,
// the rest stays to die by itself.
func (a *Approx) Withdraw(worker int, generation, stamp, last uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.of(worker)
	if g == nil || g.generation != generation || g.lru == nil {
		return
	}
	ev := a.removal()
	for {
		v, known := g.lru.Peek(last)
		if !known || v.stamp != stamp || !v.fresh {
			break
		}
		g.lru.Remove(last)
		a.gone(g, last, v.local)
		if last = v.parent; v.first {
			break
		}
	}
	a.apply(worker, ev)
}

// Forget forgets a worker's blocks with these local hashes, because the worker said
// that they are gone; what lies behind them no longer counts. Of several blocks
// with one local hash the newest goes.
func (a *Approx) Forget(worker int, local []uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.of(worker)
	if g == nil || g.lru == nil {
		return
	}
	ev := a.removal()
	for _, l := range local {
		if sequence, known := g.byLocal[l]; known {
			g.lru.Remove(sequence)
			a.gone(g, sequence, l)
		}
	}
	a.apply(worker, ev)
}

// Match is [Index.Match] for what workers are taken to hold at a time.
func (a *Approx) Match(now time.Time, dst []int32, local []uint64) {
	a.Expire(now)
	a.index.Match(dst, local)
}

// Expire forgets what has died. The other methods do so too; it is for the times
// when none is called.
func (a *Approx) Expire(now time.Time) {
	if now.UnixNano()/step < a.next.Load() {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
}

func (a *Approx) expire(now time.Time) {
	a.now = max(a.now, now.UnixNano())
	if at := a.now / step; at < a.next.Load() {
		return
	}
	next := int64(math.MaxInt64)
	for worker := range a.workers {
		g := &a.workers[worker]
		if g.lru == nil {
			continue
		}
		ev := a.removal()
		for {
			sequence, v, some := g.lru.GetOldest()
			if !some {
				break
			}
			if v.dies > a.now/step {
				next = min(next, v.dies)
				break
			}
			g.lru.RemoveOldest()
			a.gone(g, sequence, v.local)
		}
		a.apply(worker, ev)
	}
	a.next.Store(next)
}

// Blocks returns the number of (block, worker) pairs that count.
func (a *Approx) Blocks() int { return a.index.Blocks() }

// WorkerBlocks returns the number of blocks that count for a worker.
func (a *Approx) WorkerBlocks(worker int) int { return a.index.WorkerBlocks(worker) }

// Guess is a block that a worker is taken to hold.
type Guess struct {
	Sequence, Local uint64
	Parent          uint64 // sequence hash of the block before it, if not First
	First           bool
	Left            time.Duration // of its life
}

// Guesses returns a worker's blocks, the last used first, so that a block comes
// behind the one before it in its prompt.
func (a *Approx) Guesses(now time.Time, worker int) []Guess {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	g := a.of(worker)
	if g == nil || g.lru == nil {
		return nil
	}
	list := make([]Guess, 0, g.lru.Len())
	for _, sequence := range slices.Backward(g.lru.Keys()) {
		v, _ := g.lru.Peek(sequence)
		list = append(list, Guess{
			Sequence: sequence, Local: v.local, Parent: v.parent, First: v.first,
			Left: time.Duration(v.dies*step - a.now),
		})
	}
	return list
}

// Restore adds blocks to a worker's, as [Approx.Guesses] gave them, maybe in an
// earlier process. They count as used before all that the worker has. Blocks
// without the block before them, without time left, or out of order are left out.
// It returns how many were taken.
func (a *Approx) Restore(now time.Time, worker int, generation uint64, list []Guess) (taken int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	g := a.of(worker)
	if g == nil || g.generation != generation {
		return 0
	}
	if g.lru == nil {
		g.open(&a.conf)
	}
	newer := g.lru
	g.lru, _ = simplelru.NewLRU[uint64, guess](math.MaxInt, nil)

	// The oldest of what is there lives shortest; what is older must not live longer.
	limit := ceil(a.now+int64(a.conf.TTL), step)
	if _, v, some := newer.GetOldest(); some {
		limit = min(limit, v.dies)
	}
	var keys []uint64
	var values []guess
	for _, x := range list {
		dies := min(limit, ceil(a.now+int64(x.Left), step))
		if x.Left <= 0 || newer.Contains(x.Sequence) {
			continue
		}
		if len(keys)+newer.Len() >= g.limit || a.blocks+len(keys) >= a.conf.MaxBlocks {
			break
		}
		out := a.index.Apply(worker, Event{Kind: Stored, HasParent: !x.First, Parent: x.Parent, Blocks: []Block{{External: x.Sequence, Local: x.Local}}})
		if out.Stored == 0 {
			continue
		}
		limit = dies
		keys = append(keys, x.Sequence)
		values = append(values, guess{local: x.Local, parent: x.Parent, first: x.First, dies: dies})
	}
	for i, key := range slices.Backward(keys) {
		g.lru.Add(key, values[i])
		if g.byLocal != nil {
			g.byLocal[values[i].local] = key
		}
	}
	for _, key := range newer.Keys() {
		v, _ := newer.Peek(key)
		g.lru.Add(key, v)
	}
	a.blocks += len(keys)
	if len(values) > 0 {
		a.next.Store(min(a.next.Load(), values[len(values)-1].dies))
	}
	return len(keys)
}

// AppendLocals appends to dst the local hashes of those of a worker's blocks that
// the index knows by these external hashes.
func (x *Index) AppendLocals(dst []uint64, worker int, externals []uint64) []uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, e := range externals {
		if k := x.find(int32(worker), e, spread(e), cell{}); k.column != nil {
			p := k.place()
			dst = append(dst, p.n.local[p.block])
		}
	}
	return dst
}

func ceil(a, unit int64) int64 { return (a + unit - 1) / unit }
