// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// pool is all that one base model owns: its workers, their index and their slots.
//
// Decisions read the index before they take the lock; the lock covers the reading
// of the load, the choice and the booking, so no two requests can see the same
// empty worker. Nothing blocks under it.
type pool struct {
	model string
	card  string // the name of the model's card, as its workers say; guarded by Router.fleet

	// cache is never nil once the pool has had a worker. It changes only while no
	// worker of the pool has blocks.
	cache atomic.Pointer[cache]

	guessing guessing

	mu sync.Mutex
	// mu guards the fields below.
	core core
}

// cache is what a pool knows of its workers' caches, with the size of the blocks
// in it. What a worker holds of a prompt is the most that one of the indexes says.
type cache struct {
	blockSize int
	index     *indexer.Index // what events say
	// history is what was routed, for workers without events and for prompts
	// whose hashes no engine has; predicted is what was routed and is about to
	// come as an event; nil for none.
	history, predicted *indexer.Approx
}

// guessing says what a router believes without being told.
type guessing struct {
	noEvents    bool
	ttl, expect time.Duration // lifetimes in history and predicted; expect <= 0: none
}

func newCache(blockSize int, g guessing) *cache {
	c := &cache{
		blockSize: blockSize,
		index:     indexer.New(indexer.Config{}),
		history:   indexer.NewApprox(indexer.ApproxConfig{TTL: g.ttl}),
	}
	if g.expect > 0 && !g.noEvents {
		c.predicted = indexer.NewApprox(indexer.ApproxConfig{TTL: g.expect})
	}
	return c
}

// guesses returns the indexes of guesses that there are.
func (c *cache) guesses() []*indexer.Approx {
	if c.predicted == nil {
		return []*indexer.Approx{c.history}
	}
	return []*indexer.Approx{c.history, c.predicted}
}

// guess is what a booking left in an index of guesses.
type guess struct {
	in         *indexer.Approx // nil for nothing
	ordinal    int
	generation uint64
	stamp      uint64
	last       uint64 // sequence hash of the prompt's last block
}

// scratch is the memory of one decision, kept between requests.
type scratch struct {
	tokens   []uint32
	local    []uint64
	sequence []uint64
	overlap  []int32
	guessed  []int32
	decision Decision
}

// decide answers q for the prompt whose hashes are in s: overlap without the
// lock, then load, cost, choice and booking under it.
func (p *pool) decide(now func() time.Time, c *cache, q *question, s *scratch) error {
	d := &s.decision
	start := now()
	if q.sequence != nil {
		p.mu.Lock()
		size := p.core.size()
		q.version = p.core.changes
		p.mu.Unlock()
		s.overlap = resize(s.overlap, size)
		c.match(start, s)
		q.overlap = s.overlap
	}
	matched := now()
	d.MatchTime = matched.Sub(start)

	p.mu.Lock()
	err := p.core.decide(matched, q, d)
	p.mu.Unlock()
	d.PickTime = now().Sub(matched)
	return err
}

// match fills in the overlap of every ordinal.
func (c *cache) match(now time.Time, s *scratch) {
	c.index.Match(s.overlap, s.local)
	for _, a := range [...]*indexer.Approx{c.history, c.predicted} {
		if a == nil || a.Blocks() == 0 {
			continue
		}
		s.guessed = resize(s.guessed, len(s.overlap))
		a.Match(now, s.guessed, s.local)
		for i, n := range s.guessed {
			s.overlap[i] = max(s.overlap[i], n)
		}
	}
}

// guess remembers a booking as something that its worker will hold.
func (p *pool) guess(now time.Time, c *cache, q *question, s *scratch) guess {
	if len(q.sequence) == 0 {
		return guess{}
	}
	g := guess{in: c.predicted, ordinal: q.ordinal, generation: q.generation, last: q.sequence[len(q.sequence)-1]}
	if q.guessed || q.silent || p.guessing.noEvents {
		g.in = c.history
	}
	if g.in == nil {
		return guess{}
	}
	if g.stamp = g.in.Insert(now, g.ordinal, g.generation, s.local, s.sequence); g.stamp == 0 {
		return guess{}
	}
	return g
}

// withdraw forgets what a booking left.
func (g *guess) withdraw() {
	if g.in != nil {
		g.in.Withdraw(g.ordinal, g.generation, g.stamp, g.last)
	}
}

// setWorker tells the pool of a worker. The caller keeps events of the worker and
// other changes of the pool away until it returns.
func (p *pool) setWorker(info *WorkerInfo, blockSize int) {
	p.mu.Lock()
	if p.core.blockSizes() == 0 {
		blockSize = cmp.Or(blockSize, info.BlockSize, 16)
		if c := p.cache.Load(); c == nil || c.blockSize != blockSize {
			p.cache.Store(newCache(blockSize, p.guessing))
		}
	}
	outdated := p.core.outdated(info)
	p.mu.Unlock()

	p.purge(outdated)
	p.mu.Lock()
	p.core.setWorker(info)
	c := p.cache.Load()
	for _, ord := range p.core.ordinals(info.ID) {
		for _, a := range c.guesses() {
			a.Begin(ord, p.core.entries[ord].since, info.TotalKVBlocks)
		}
	}
	p.mu.Unlock()
}

// removeWorker is to setWorker what its name says.
func (p *pool) removeWorker(id uint64) {
	p.mu.Lock()
	ordinals := p.core.ordinals(id)
	p.mu.Unlock()

	p.purge(ordinals)
	p.mu.Lock()
	p.core.removeWorker(id)
	p.mu.Unlock()
}

// purge empties the index for ordinals that are still taken: decisions made
// meanwhile find no overlap there, and nobody can get the ordinal early.
func (p *pool) purge(ordinals []int) {
	for _, ord := range ordinals {
		c := p.cache.Load()
		c.index.RemoveWorker(ord)
		for _, a := range c.guesses() {
			a.Clear(ord)
		}
	}
}

// applyEvent applies an event of a worker that is in the pool. It returns false
// if the worker has no such rank.
func (p *pool) applyEvent(w Worker, ev indexer.Event) (out indexer.Outcome, known bool) {
	c := p.cache.Load()
	p.mu.Lock()
	ord, known := p.core.find(w)
	fits := known && p.core.entries[ord].info.BlockSize == c.blockSize
	p.mu.Unlock()
	switch {
	case !known:
		return out, false
	case !fits || p.guessing.noEvents:
		// Blocks of another size would be found under hashes that no prompt has,
		// and events do not mix with guesses that cover the same.
		return indexer.Outcome{Invalid: len(ev.Blocks) + len(ev.Externals)}, true
	}
	if c.predicted != nil && c.predicted.WorkerBlocks(ord) > 0 {
		switch ev.Kind {
		case indexer.Removed:
			for _, e := range ev.Externals {
				c.predicted.Forget(ord, c.index.AppendPath(nil, ord, e))
			}
		case indexer.Cleared:
			c.predicted.Clear(ord)
		case indexer.Stored:
		}
	}
	return c.index.Apply(ord, ev), true
}

func resize(s []int32, n int) []int32 {
	if cap(s) < n {
		return make([]int32, n, n+n/2)
	}
	return s[:n]
}
