// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// pool has the state of the workers of one base model with blocks of one size: their index,
// their slots, their queue.
//
// Decisions read the index before they take the lock. The lock covers the reading
// of the load, the choice and the booking, so no two requests can see the same
// empty worker. Code that holds the lock never blocks.
type pool struct {
	// Set once.
	poolKey
	known      *known
	labels     *labels
	onInferred func(*pool, []slots.Inference) // called without the lock

	view atomic.Pointer[poolView] // replaced, never changed
	// panics says that the last plain request (see [decisionInput.plain]) went to an unhealthy worker.
	panics atomic.Bool
	// Decisions read the fields above while others write those below: they must not share a line of the
	// processor's cache.
	_ [64]byte

	// Guarded by Router.fleet.
	card  string            // name of the model's card, one of cards
	cards map[string]int    // names of cards that workers registered, with the number of workers
	names map[modelName]int // number of workers that registered each name; empty without workers
	empty time.Time         // when Tick saw first that the pool has no workers; zero with workers
	since time.Time         // when the pool was made

	mu sync.Mutex
	// mu guards the fields below.
	core core
	// undelivered has the woken requests of [Router.Submit], in their order. A request may be
	// listed twice: to count its overlap again, and when it has left the queue.
	undelivered []*waiter
}

// poolView is the part of the core that decisions read without the lock. If a view is outdated, a
// decision may miss an overlap; nothing else is wrong.
type poolView struct {
	needsPrompts bool     // whether the prompts of requests matter
	changes      uint64   // core.changes
	size         int      // one more than the largest ordinal
	groups       []string // names of the router groups among the workers
}

// poolKey names a pool.
type poolKey struct {
	model     string
	blockSize int
}

func (k poolKey) compare(l poolKey) int {
	return cmp.Or(cmp.Compare(k.model, l.model), cmp.Compare(k.blockSize, l.blockSize))
}

func newPool(conf *Config, key poolKey) *pool {
	p := &pool{poolKey: key, known: newKnown(conf, key.blockSize), core: newCore(conf, key.blockSize), labels: newLabels(key.model), since: conf.Now()}
	p.names, p.cards = make(map[modelName]int), make(map[string]int)
	p.update(time.Time{}, p.updateView)
	return p
}

// match counts the overlap of a prompt, without the lock, and leaves it in s.
func (p *pool) match(now time.Time, h *hashes, s *scratch) {
	s.overlap.matchedAt = now
	if !p.known.used || s.request.Uncached {
		s.overlap = overlap{matchedAt: now}
		return
	}
	view := p.view.Load()
	s.overlap.version = view.changes
	p.known.match(now, h, view.size, s)
}

// errQueued says that [Router.Decided] will return the decision later.
var errQueued = errors.New("the request waits in the queue")

// admit counts the overlap of the request in s, and decides. Load, cost, choice and booking are one
// critical section. If the request must wait, admit returns when the request has left the queue, or
// errQueued at once if the request is one of [Router.Submit].
func (p *pool) admit(ctx context.Context, r *Router, s *scratch) error {
	now := r.conf.Now
	p.countOverlap(now, s)
	start := s.input.completeAt
	p.mu.Lock()
	w, err := p.core.submit(start, &s.input, &s.choices, &s.result)
	waits := w != nil && !w.done
	queued := w != nil && s.submitted
	if queued {
		w.submitted = s
		s.pickTime = now().Sub(start)
	}
	p.unlock()
	if queued {
		return errQueued // s may belong to Decided by now
	}
	s.pickTime = now().Sub(start)
	switch {
	case waits:
		return p.wait(ctx, now, r.flights, w, s)
	case w != nil:
		return w.err
	}
	return err
}

// update passes an input to the core, and admits the requests of the queue that need not wait any
// more.
func (p *pool) update(now time.Time, input func(*core)) {
	p.mu.Lock()
	input(&p.core)
	p.core.pump(now)
	p.unlock()
}

// unlock releases the pool's lock. Then it wakes the callers of requests that left the
// queue or must count their overlap again, and hands on the inferred first tokens.
func (p *pool) unlock() {
	woken, inferred := p.core.woken, p.core.slots.TakeInferred()
	p.core.woken = nil
	for _, w := range woken {
		if w.submitted != nil {
			p.undelivered = append(p.undelivered, w)
		}
	}
	p.mu.Unlock()
	for _, w := range woken {
		select {
		case w.wake <- struct{}{}:
		default: // it was woken before and has not looked yet
		}
	}
	if len(inferred) > 0 {
		p.onInferred(p, inferred)
	}
}

// read calls a function with the core, under the lock. The function must not change anything that may
// admit requests from the queue; see update.
func (p *pool) read(f func(*core)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.core)
}

// each visits the workers in their order, under the lock.
func (p *pool) each(visit func(ord int, e *entry)) {
	p.read(func(c *core) {
		for _, ord := range c.order {
			visit(ord, &c.entries[ord])
		}
	})
}

// holds says whether a request has a slot.
func (p *pool) holds(id string) (taken bool) {
	p.read(func(c *core) { _, taken = c.slots.Worker(id) })
	return taken
}

// has says whether the pinned worker is in the pool. bound says whether a session is bound
// to a worker of the pool.
func (p *pool) has(req *Request) (there bool) {
	p.read(func(c *core) { from, to := c.pin(req); there = from < to })
	return there
}

func (p *pool) bound(now time.Time, session uint64) (bound bool) {
	p.read(func(c *core) { _, bound = c.sessions.worker(now, session) })
	return bound
}

// setWorker adds or changes a worker. No event of the worker and no other change of the
// pool may happen until it returns. It returns the ranks that have lost their blocks.
func (p *pool) setWorker(now time.Time, info *WorkerInfo) (emptied []Worker) {
	var outdated []int
	p.read(func(c *core) {
		outdated = c.outdated(info)
		for _, ord := range outdated {
			emptied = append(emptied, c.entries[ord].worker)
		}
	})
	p.purge(outdated)
	p.update(now, func(c *core) {
		c.setWorker(info)
		c.noteHealth(now, info.ID)
		p.known.begin(c, info)
		p.updateView(c)
	})
	return emptied
}

// removeWorker removes a worker, under the conditions of setWorker.
func (p *pool) removeWorker(now time.Time, id uint64) {
	var ordinals []int
	p.read(func(c *core) { ordinals = c.ordinals(id) })
	p.purge(ordinals)
	p.update(now, func(c *core) {
		c.removeWorker(id)
		p.updateView(c)
	})
}

// updateView replaces the view of the pool.
func (p *pool) updateView(c *core) {
	v := poolView{needsPrompts: c.conf.Mode == KV || c.queue != nil || *c.thresholds != scorer.Thresholds{}, changes: c.changes, size: c.size()}
	for _, ord := range c.order {
		if c.counts.group == 0 {
			break // most pools have workers only, and a change of one must not read all
		}
		if name := c.entries[ord].info.Group; name != "" {
			v.groups = append(v.groups, name)
		}
	}
	p.view.Store(&v)
}

// purge removes the blocks of ordinals from the index, while the ordinals are still in use: decisions
// find no overlap there meanwhile, and no other worker can get an ordinal that has blocks.
func (p *pool) purge(ordinals []int) {
	for _, ord := range ordinals {
		p.known.removeWorker(ord)
	}
}

// applyEvent applies an event of a worker that is in the pool. It returns false
// if the worker has no such rank.
func (p *pool) applyEvent(now time.Time, w Worker, ev indexer.Event) (out indexer.Outcome, known bool) {
	p.mu.Lock()
	ord, known := p.core.find(w)
	silent := known && p.core.entries[ord].info.BlockSize == 0 || p.core.conf.NoEvents
	if known && ev.Kind != indexer.Cleared {
		p.core.entries[ord].hasEvents = true
	}
	p.mu.Unlock()
	switch {
	case !known:
		return out, false
	case silent:
		// The hashes of events match no prompt if the worker has no block size. With NoEvents the
		// caches are predicted from requests: events would count the same blocks twice.
		return indexer.Outcome{Invalid: len(ev.Blocks) + len(ev.Externals)}, true
	case !p.known.used:
		return out, true
	}
	return p.known.apply(now, ord, ev), true
}

// expireEvents drops events that waited too long for their parents, and returns their
// workers and the number of blocks.
func (p *pool) expireEvents(now time.Time) (whose []Worker, blocks int) {
	for ord, n := range p.known.events.Load().parked.Expire(now) {
		blocks += n
		if p.known.index().Truncated(ord) {
			continue // the parents are missing because there was no room for them
		}
		p.mu.Lock()
		if ord < len(p.core.entries) {
			whose = append(whose, p.core.entries[ord].worker)
		}
		p.mu.Unlock()
	}
	return whose, blocks
}

func resize[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n, n+n/2)
	}
	return s[:n]
}
