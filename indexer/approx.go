// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// ApproxConfig limits how long and how many blocks an [Approx] predicts. The zero value
// of each field means its default.
type ApproxConfig struct {
	// TTL is how long a block counts after the last request that used it, in
	// whole steps of 100 ms, rounded up. Default 120 s.
	TTL time.Duration
	// MaxBlocks limits the predicted (block, worker) pairs. At the limit the worker that
	// gets a request loses its least recently used blocks. Default 1<<22.
	MaxBlocks int
}

// Approx predicts which blocks workers hold, from the requests that were sent to them
// lately. It is used for engines that publish no events, and until the events of a
// request arrive.
//
// Each worker has a list of the prompts that it got, the least recently used first; the
// blocks of all are in one tree. A prompt that comes again moves to the list's end. A
// block counts while a prompt in the list has it. So the cost of a request depends on its
// new blocks, not on those that it shares.
//
// # Invariants
//
//   - The list is ordered by use, and a prompt expires a fixed time after its use: the
//     first prompt expires next.
//   - A worker holds the nodes of the tree on the paths to the ends of the prompts in its
//     list, and no others.
//
// # Concurrency
//
// The methods may be called by any number of goroutines, except that a worker must not be
// used before [Approx.Begin]. There is no goroutine: expired prompts are removed at the
// next call.
type Approx struct {
	conf   ApproxConfig
	tree   guessTree
	next   atomic.Int64 // step at which the next prompt expires; math.MaxInt64 = never
	blocks atomic.Int64 // sum of the workers'

	mu sync.RWMutex
	// mu guards the tree and the fields below.
	now     int64 // the latest time seen, in ns; it never goes back
	stamp   uint64
	evicted int // blocks removed for lack of room
	workers []guesses
	line    []*node // scratch memory of find
}

// guesses are the predictions for one worker.
type guesses struct {
	generation uint64
	limit      int
	blocks     int
	prompts    *simplelru.LRU[uint64, *guess] // by the sequence hash of their last block
}

// guess is a prompt in a worker's list.
type guess struct {
	end   *guessNode // the node whose last block is the prompt's last
	dies  int64      // expires at this step
	stamp uint64     // of the insertion that made it
}

const step = int64(100 * time.Millisecond)

// NewApprox returns an index without predictions.
func NewApprox(c ApproxConfig) *Approx {
	if c.TTL <= 0 {
		c.TTL = 120 * time.Second
	}
	if c.MaxBlocks <= 0 {
		c.MaxBlocks = 1 << 22
	}
	a := &Approx{conf: c}
	a.next.Store(math.MaxInt64)
	return a
}

// Begin prepares a worker's number for an owner, without any blocks. Insertions under
// another generation are ignored, so that a late one cannot be stored for the wrong
// owner. limit is the number of blocks that the worker's cache holds; below 1 there is no
// limit. With the present generation, Begin changes only the limit.
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

// Clear removes all of a worker's blocks.
func (a *Approx) Clear(worker int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.clear(worker)
}

func (a *Approx) clear(worker int) {
	g := a.of(worker)
	if g == nil || g.prompts == nil {
		return
	}
	for _, p := range g.prompts.Values() {
		a.drop(worker, g, p)
	}
	g.prompts = nil
}

func (a *Approx) of(worker int) *guesses {
	if worker < 0 || worker >= len(a.workers) {
		return nil
	}
	return &a.workers[worker]
}

// Insert predicts that a worker holds a prompt from now on, given by the sequence hashes
// of its blocks. If these are more blocks than the worker's cache has, the leading ones
// count. The results are for [Approx.Withdraw]: a stamp, 0 if nothing was inserted that
// could be withdrawn, and the sequence hash of the last block that counts.
func (a *Approx) Insert(now time.Time, worker int, generation uint64, sequence []uint64) (stamp, last uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	g := a.of(worker)
	if g == nil || g.generation != generation || len(sequence) == 0 {
		return 0, 0
	}
	n := min(len(sequence), g.limit, a.conf.MaxBlocks)
	return a.insert(worker, g, sequence[:n], ceil(a.now+int64(a.conf.TTL), step)), sequence[n-1]
}

// InsertWhole is [Approx.Insert] of a prompt and, with a junction above 0, of its first junction blocks as a prompt of
// their own; see [Approx.End]. It inserts nothing of a prompt with more blocks than the worker's cache has.
func (a *Approx) InsertWhole(
	now time.Time, worker int, generation uint64, sequence []uint64, junction int,
) (stamp, last uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	g := a.of(worker)
	if n := len(sequence); g == nil || g.generation != generation || n == 0 || n > min(g.limit, a.conf.MaxBlocks) {
		return 0, 0
	}
	dies := ceil(a.now+int64(a.conf.TTL), step)
	stamp, last = a.insert(worker, g, sequence, dies), sequence[len(sequence)-1]
	if junction > 0 && a.insert(worker, g, sequence[:junction], dies) > 0 {
		if p, known := g.prompts.Peek(sequence[junction-1]); known {
			p.stamp = stamp
		}
	}
	return stamp, last
}

// insert puts a prompt at the list's end. It returns 0 if it was in the list.
func (a *Approx) insert(worker int, g *guesses, sequence []uint64, dies int64) uint64 {
	if g.prompts == nil {
		// The list itself is not bounded: trim removes prompts, and their blocks.
		g.prompts, _ = simplelru.NewLRU[uint64, *guess](math.MaxInt, nil)
	}
	last := sequence[len(sequence)-1]
	if p, known := g.prompts.Get(last); known && p.end.sequence[len(p.end.sequence)-1] == last {
		p.dies = dies
		return 0
	} else if known {
		a.drop(worker, g, p) // the prompt lost its last blocks
	}
	a.stamp++
	end, more := a.tree.use(worker, sequence)
	a.count(g, more)
	g.prompts.Add(last, &guess{end: end, dies: dies, stamp: a.stamp})
	if a.next.Load() > dies {
		a.next.Store(dies)
	}
	a.trim(worker, g)
	return a.stamp
}

// count adds to the number of a worker's blocks.
func (a *Approx) count(g *guesses, more int) {
	g.blocks += more
	a.blocks.Add(int64(more))
}

// drop removes the blocks of a prompt that has left the list, except those that another
// prompt has, too.
func (a *Approx) drop(worker int, g *guesses, p *guess) {
	a.count(g, -a.tree.leave(worker, p.end))
}

// trim removes the least recently used blocks of a worker above its limit, ends first.
func (a *Approx) trim(worker int, g *guesses) {
	before := a.Blocks()
	defer func() { a.evicted += before - a.Blocks() }()
	for g.prompts != nil && g.prompts.Len() > 0 {
		over := max(g.blocks-g.limit, a.Blocks()-a.conf.MaxBlocks)
		if over <= 0 {
			return
		}
		_, p, _ := g.prompts.GetOldest()
		n := p.end
		at, _ := n.holder(worker)
		alone := n.holders[at].uses == 1
		if !alone || n.parent == &a.tree.root && len(n.sequence) <= over {
			g.prompts.RemoveOldest()
			a.drop(worker, g, p)
			continue
		}
		if k := len(n.sequence) - over; k > 0 {
			a.tree.split(n, k)
		}
		p.stamp, p.end = 0, n.parent
		a.count(g, -a.tree.shift(worker, n, p.end))
	}
}

// Withdraw reverts an insertion: the blocks that only it had are removed. last is the
// sequence hash of its last block. A prompt that was known before the insertion, or was
// shortened since, stays until it expires.
func (a *Approx) Withdraw(worker int, generation, stamp, last uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := a.of(worker)
	if g == nil || g.generation != generation || g.prompts == nil {
		return
	}
	p, known := g.prompts.Peek(last)
	if !known || stamp == 0 || p.stamp != stamp {
		return
	}
	for n := p.end.parent; n != &a.tree.root; n = n.parent {
		key := n.sequence[len(n.sequence)-1]
		if junction, known := g.prompts.Peek(key); known && junction.stamp == stamp {
			g.prompts.Remove(key)
			a.drop(worker, g, junction)
			break
		}
	}
	g.prompts.Remove(last)
	a.drop(worker, g, p)
}

// Move reverts an insertion, as [Approx.Withdraw] does, and repeats it for another
// worker, which got the request instead of the first one. It returns the stamp and the
// last block of the new insertion, as [Approx.Insert] does: a stamp of 0 if there is
// nothing to move. The generation has the same meaning as in Insert.
func (a *Approx) Move(
	now time.Time, from int, generation, stamp, last uint64, to int, toGeneration uint64,
) (newStamp, newLast uint64) {
	a.mu.Lock()
	g := a.of(from)
	var sequence []uint64
	if g != nil && g.generation == generation && g.prompts != nil {
		if p, known := g.prompts.Peek(last); known && stamp > 0 && p.stamp == stamp {
			sequence = p.end.path()
		}
	}
	a.mu.Unlock()
	if sequence == nil {
		return 0, 0
	}
	a.Withdraw(from, generation, stamp, last)
	return a.Insert(now, to, toGeneration, sequence)
}

// Forget removes blocks that the worker has removed, and all blocks after them. The
// blocks are given by the worker's external hashes; x has their places on the device.
// Call Forget before the removal is applied to x.
func (a *Approx) Forget(worker int, x *Index, externals []uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range externals {
		g := a.of(worker)
		if g == nil || g.prompts == nil {
			return
		}
		n, block := a.find(x, worker, e)
		if n == nil {
			continue
		}
		if block > 0 {
			a.tree.split(n, block)
		}
		a.forget(worker, g, n)
	}
}

// find returns the node of a worker's block that x has under an external hash, and the
// block's number in the node. It returns nil if the block is not predicted for the
// worker.
func (a *Approx) find(x *Index, worker int, external uint64) (n *guessNode, block int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if worker > maxWorker || !x.has(int32(worker)) {
		return nil, 0
	}
	x.view = view{}
	k := x.find(int32(worker), external, spread(external), cell{})
	if !k.mine {
		return nil, 0
	}
	p := k.place()
	defer func() { clear(a.line) }()
	a.line = a.line[:0]
	for m := p.n; m != &x.root; m = m.parent {
		a.line = append(a.line, m)
	}
	n, depth := &a.tree.root, 0 // depth counts the blocks in n
	var s uint64
	for i, m := range slices.Backward(a.line) {
		local := m.local
		if i == 0 {
			local = local[:p.block+1]
		}
		for j, l := range local {
			if s = NextSequenceHash(s, l); m.parent == &x.root && j == 0 {
				s = l
			}
			if n, depth = n.follow(depth, s); n == nil {
				return nil, 0
			}
		}
	}
	if _, held := n.holder(worker); !held {
		return nil, 0
	}
	return n, depth - 1
}

// forget removes a node, and all nodes behind it, from a worker that holds it. Prompts
// through the node then end before it.
func (a *Approx) forget(worker int, g *guesses, n *guessNode) {
	for _, key := range g.prompts.Keys() {
		p, _ := g.prompts.Peek(key)
		if !p.end.within(n) {
			continue
		}
		if n.parent == &a.tree.root {
			g.prompts.Remove(key)
			a.drop(worker, g, p)
			continue
		}
		end := p.end
		p.stamp, p.end = 0, n.parent
		a.count(g, -a.tree.shift(worker, end, p.end))
	}
}

// Match is [Index.Match] for the predicted blocks at a time.
func (a *Approx) Match(now time.Time, dst []int32, sequence []uint64) {
	a.Expire(now)
	a.mu.RLock()
	defer a.mu.RUnlock()
	a.tree.match(dst, sequence)
}

// End returns how many leading blocks of a prompt are a whole prompt in a worker's list, the longest one whose number
// of blocks is a multiple of step. It is 0 if there is none.
func (a *Approx) End(worker int, sequence []uint64, step int) (blocks int) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	g := a.of(worker)
	if g == nil || g.prompts == nil {
		return 0
	}
	for n, at := &a.tree.root, 0; at < len(sequence); {
		n = n.children.get(sequence[at])
		if n == nil || common(n.sequence, sequence[at:]) < len(n.sequence) {
			break
		}
		at += len(n.sequence)
		if p, known := g.prompts.Peek(sequence[at-1]); known && p.end == n && at%step == 0 {
			blocks = at
		}
	}
	return blocks
}

// Expire removes the prompts that have expired. Match and Insert do so, too; Expire is
// for times without requests.
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
		for g.prompts != nil {
			_, p, some := g.prompts.GetOldest()
			if !some {
				g.prompts = nil // a map does not shrink
				break
			}
			if p.dies > a.now/step {
				next = min(next, p.dies)
				break
			}
			g.prompts.RemoveOldest()
			a.drop(worker, g, p)
		}
	}
	a.next.Store(next)
}

// Blocks returns the number of (block, worker) pairs that count.
func (a *Approx) Blocks() int { return int(a.blocks.Load()) }

// Evicted returns how many blocks were removed for lack of room: because of a worker's
// cache size, or because of [ApproxConfig.MaxBlocks] for all workers.
func (a *Approx) Evicted() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.evicted
}

// Bytes estimates the heap memory of the predictions; see [Index.Bytes]. It reads the
// workers, not the tree.
func (a *Approx) Bytes() int {
	const prompt = 80 + 24 + 27 // an entry of the list, a guess, and a place in a map that is two thirds full
	a.mu.Lock()
	defer a.mu.Unlock()
	total := heapSize(int(unsafe.Sizeof(*a))) + heapSize(int(unsafe.Sizeof(guesses{}))*cap(a.workers)) + a.tree.bytes
	for i := range a.workers {
		if g := &a.workers[i]; g.prompts != nil {
			total += g.prompts.Len() * prompt
		}
	}
	return total
}

// WorkerBlocks returns the number of blocks that count for a worker.
func (a *Approx) WorkerBlocks(worker int) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g := a.of(worker); g != nil {
		return g.blocks
	}
	return 0
}

func ceil(a, unit int64) int64 { return (a + unit - 1) / unit }
