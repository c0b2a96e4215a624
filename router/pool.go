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

	mu sync.Mutex
	// mu guards the fields below.
	core core
}

// cache is the index of a pool with the size of the blocks in it.
type cache struct {
	blockSize int
	index     *indexer.Index
}

// scratch is the memory of one decision, kept between requests.
type scratch struct {
	tokens   []uint32
	local    []uint64
	sequence []uint64
	overlap  []int32
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
		c.index.Match(s.overlap, s.local)
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

// setWorker tells the pool of a worker. The caller keeps events of the worker and
// other changes of the pool away until it returns.
func (p *pool) setWorker(info *WorkerInfo, blockSize int) {
	p.mu.Lock()
	if p.core.blockSizes() == 0 {
		blockSize = cmp.Or(blockSize, info.BlockSize, 16)
		if c := p.cache.Load(); c == nil || c.blockSize != blockSize {
			p.cache.Store(&cache{blockSize: blockSize, index: indexer.New(indexer.Config{})})
		}
	}
	outdated := p.core.outdated(info)
	p.mu.Unlock()

	p.purge(outdated)
	p.mu.Lock()
	p.core.setWorker(info)
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
		p.cache.Load().index.RemoveWorker(ord)
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
	case !fits:
		// Its blocks would be found under hashes that no prompt has.
		return indexer.Outcome{Invalid: len(ev.Blocks) + len(ev.Externals)}, true
	}
	return c.index.Apply(ord, ev), true
}

func resize(s []int32, n int) []int32 {
	if cap(s) < n {
		return make([]int32, n, n+n/2)
	}
	return s[:n]
}
