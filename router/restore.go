// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// Restored is the result of a [Router.Restore].
type Restored struct {
	Blocks int // pairs of block and worker in the indexes
	// Expected are the workers that are known from the contents only. Their events are
	// applied, but they get no requests until [Router.SetWorker] is called for them. The
	// caller should remove those for which that does not happen.
	Expected []uint64
	// Skipped is the number of pairs left out: of workers that are in another pool now,
	// have restarted since, or stay as they are.
	Skipped int
}

// seat is the place of a holder's blocks.
type seat struct {
	worker    Worker
	startedMS int64
	since     uint64
	pool      int
	ord       int // -1: nowhere
}

// Restore replaces the indexes of all pools by c. Decisions use the old indexes until all of c
// is read and whole then returns nil. After an error everything is as before. The caller holds
// back events of workers that are not kept until Restore returns: they would be lost. There
// can be no dump meanwhile: the error is [ErrDumping] if one is running.
func (r *Router) Restore(c Contents, whole func() error) (out Restored, err error) {
	select {
	case r.dumping <- struct{}{}:
	default:
		return out, fmt.Errorf("router: restore: %w", ErrDumping)
	}
	defer func() { <-r.dumping }()
	r.whoStays(&c)
	places := r.reserve(&c, &out)
	indexes, err := build(indexer.Config{MaxBlocks: r.conf.MaxBlocks}, &c, places, &out)
	if whole != nil {
		// whole checks the file itself, so its error is more precise.
		if bad := whole(); bad != nil {
			err = bad
		}
	}
	if err == nil {
		r.install(&c, places, indexes, &out)
		return out, nil
	}
	for _, id := range out.Expected {
		r.removeExpected(id)
	}
	return Restored{}, fmt.Errorf("router: restore: %w", err)
}

// numbers returns the number of each pool of the contents.
func (c *Contents) numbers() map[poolKey]int {
	numbers := make(map[poolKey]int, len(c.Pools))
	for i, p := range c.Pools {
		numbers[poolKey{p.Model, p.BlockSize}] = i
	}
	return numbers
}

func (c *Contents) keeps(id uint64) bool { return c.stays[id] }

// whoStays calls Keep without a lock, for all known workers and those in the contents.
func (r *Router) whoStays(c *Contents) {
	if c.Keep == nil {
		return
	}
	r.fleet.RLock()
	ids := slices.Collect(maps.Keys(r.owners))
	r.fleet.RUnlock()
	for i := range c.Workers {
		ids = append(ids, c.Workers[i].ID)
	}
	for _, w := range c.Holders {
		ids = append(ids, w.ID)
	}
	c.stays = make(map[uint64]bool)
	for _, id := range ids {
		if c.Keep(id) {
			c.stays[id] = true
		}
	}
}

// reserve finds an ordinal for each holder. It adds unknown workers.
func (r *Router) reserve(c *Contents, out *Restored) []seat {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	numbers := c.numbers()
	processes := make(map[uint64]*WorkerInfo, len(c.Workers))
	for i := range c.Workers {
		info := c.Workers[i]
		info.Health = expected
		processes[info.ID] = &info
		if r.owners[info.ID] != nil || info.Check() != nil || c.keeps(info.ID) {
			continue
		}
		if _, err := r.setWorkerLocked(&info); err == nil {
			out.Expected = append(out.Expected, info.ID)
		}
	}
	r.renameLocked()
	places := make([]seat, len(c.Holders))
	for i, w := range c.Holders {
		places[i] = seat{worker: w, ord: -1}
		p := r.owners[w.ID]
		if p == nil || p.known == nil || c.keeps(w.ID) {
			continue
		}
		n, named := numbers[poolKey{p.model, p.blockSize}]
		if !named {
			continue
		}
		p.mu.Lock()
		if ord, ok := p.core.find(w); ok {
			e := &p.core.entries[ord]
			if was := processes[w.ID]; was == nil || was.StartedMS == e.info.StartedMS {
				places[i] = seat{worker: w, startedMS: e.info.StartedMS, since: e.since, pool: n, ord: ord}
			}
		}
		p.mu.Unlock()
	}
	return places
}

// build makes an index of each pool's runs. The runs of a pool follow each other.
func build(config indexer.Config, c *Contents, places []seat, out *Restored) ([]*indexer.Index, error) {
	indexes := make([]*indexer.Index, len(c.Pools))
	if c.Runs == nil {
		return indexes, nil
	}
	next, stop := iter.Pull2(c.Runs)
	defer stop()
	n, run, ok := next()
	for ok {
		pool := n
		if pool < 0 || pool >= len(indexes) || indexes[pool] != nil {
			return nil, fmt.Errorf("pool %d of %d is there twice or not named", pool, len(indexes))
		}
		x, outcome, err := indexer.Restore(config, func(yield func(indexer.Run, error) bool) {
			for ok && n == pool {
				kept := run.Holders[:0]
				for _, h := range run.Holders {
					if h.Worker < 0 || h.Worker >= len(places) {
						yield(run, fmt.Errorf("run %d names holder %d of %d", run.ID, h.Worker, len(places)))
						return
					}
					if at := &places[h.Worker]; at.ord >= 0 && at.pool == pool {
						h.Worker = at.ord
						kept = append(kept, h)
					} else {
						out.Skipped += len(h.Externals)
					}
				}
				run.Holders = kept
				if !yield(run, nil) {
					return
				}
				n, run, ok = next()
			}
		})
		if err != nil {
			return nil, err
		}
		out.Skipped += outcome.Refused + outcome.Conflict
		indexes[pool] = x
	}
	return indexes, nil
}

// install replaces the indexes.
func (r *Router) install(c *Contents, places []seat, indexes []*indexer.Index, out *Restored) {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	// Workers may have left or restarted meanwhile.
	for _, at := range places {
		if at.ord < 0 || indexes[at.pool] == nil {
			continue
		}
		still := false
		if p := r.pools[poolKey{c.Pools[at.pool].Model, c.Pools[at.pool].BlockSize}]; p != nil {
			p.mu.Lock()
			if ord, ok := p.core.find(at.worker); ok {
				e := &p.core.entries[ord]
				still = ord == at.ord && e.since == at.since && e.info.StartedMS == at.startedMS
			}
			p.mu.Unlock()
		}
		if !still {
			indexes[at.pool].RemoveWorker(at.ord)
		}
	}
	numbers := c.numbers()
	for key, p := range r.pools {
		if p.known == nil {
			continue
		}
		x := indexer.New(indexer.Config{MaxBlocks: r.conf.MaxBlocks})
		if n, ok := numbers[key]; ok && indexes[n] != nil {
			x = indexes[n]
		}
		p.carry(c, x)
		p.mu.Lock()
		for _, ord := range p.core.order {
			e := &p.core.entries[ord]
			p.known.shrunk.Add(int64(x.SetLimit(ord, e.info.TotalKVBlocks)))
			e.hasEvents = e.hasEvents || x.WorkerBlocks(ord) > 0
		}
		p.mu.Unlock()
		p.known.events.Store(newEventIndex(x))
		out.Blocks += x.Blocks()
	}
}

// carry copies the blocks of kept workers to another index, except those behind a block that
// the worker does not hold.
func (p *pool) carry(c *Contents, to *indexer.Index) {
	keep := make(map[int]bool)
	p.mu.Lock()
	for _, ord := range p.core.order {
		if c.keeps(p.core.entries[ord].worker.ID) {
			keep[ord] = true
		}
	}
	p.mu.Unlock()
	if len(keep) == 0 {
		return
	}
	for c := range indexer.Chains(func(yield func(indexer.Run) bool) {
		for run, err := range p.known.index().Dump() {
			if err != nil {
				return // not possible: no event is applied while the fleet is locked
			}
			run.Holders = slices.DeleteFunc(run.Holders, func(h indexer.Holder) bool { return !keep[h.Worker] })
			if !yield(run) {
				return
			}
		}
	}) {
		if c.Start == 0 || c.Event.HasParent {
			to.Apply(c.Worker, c.Event)
		}
	}
}

// removeExpected removes a worker that is still known from a restore only.
func (r *Router) removeExpected(id uint64) bool {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	p := r.owners[id]
	if p == nil {
		return false
	}
	p.mu.Lock()
	ords := p.core.ordinals(id)
	still := len(ords) > 0 && p.core.entries[ords[0]].info.Health == expected
	p.mu.Unlock()
	if still {
		r.removeWorkerLocked(id)
	}
	return still
}

// RemoveExpected removes the workers that are still known from a restore only, and returns
// them.
func (r *Router) RemoveExpected(ids []uint64) (removed []uint64) {
	for _, id := range ids {
		if r.removeExpected(id) {
			removed = append(removed, id)
		}
	}
	return removed
}
