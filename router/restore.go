// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

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

// seat is the place of a holder's blocks in a pool.
type seat struct {
	pool      *pool // nil: the blocks have no place
	ord       int
	since     uint64
	startedMS int64
}

// seatOf returns the place of a worker's blocks. The fleet is locked.
func (r *Router) seatOf(w Worker) (s seat) {
	p := r.owners[w.ID]
	if p == nil || !p.known.used {
		return seat{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if ord, known := p.core.find(w); known {
		e := &p.core.entries[ord]
		s = seat{p, ord, e.since, e.info.StartedMS}
	}
	return s
}

// Restore replaces the indexes of all pools by c. Decisions use the old indexes until all of c
// is read and whole then returns nil. After an error everything is as before. Until Restore returns,
// the caller must hold back the events of workers that are not kept: they would be lost.
// The error is [ErrDumping] while a dump is running; no dump can begin before Restore returns.
func (r *Router) Restore(c Contents, whole func() error) (out Restored, err error) {
	select {
	case r.dumping <- struct{}{}:
	default:
		return out, fmt.Errorf("router: restore: %w", ErrDumping)
	}
	defer func() { <-r.dumping }()
	r.findKept(&c)
	seats := r.reserve(&c, &out)
	indexes, err := r.build(&c, seats, &out)
	if whole != nil {
		// whole checks the file itself, so its error is more precise.
		err = cmp.Or(whole(), err)
	}
	if err == nil {
		r.park(&c, seats, indexes)
		r.install(&c, seats, indexes, &out)
		return out, nil
	}
	r.RemoveExpected(out.Expected)
	return Restored{}, fmt.Errorf("router: restore: %w", err)
}

// findKept calls Keep without a lock, for all known workers and those in the contents.
func (r *Router) findKept(c *Contents) {
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
	c.kept = make(map[uint64]bool)
	for _, id := range ids {
		if c.Keep(id) {
			c.kept[id] = true
		}
	}
}

// reserve finds the place of each holder's blocks. It adds unknown workers.
func (r *Router) reserve(c *Contents, out *Restored) []seat {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	started := make(map[uint64]int64, len(c.Workers))
	for i := range c.Workers {
		info := c.Workers[i]
		info.Health = expected
		started[info.ID] = info.StartedMS
		if r.owners[info.ID] != nil || info.Check() != nil || c.kept[info.ID] {
			continue
		}
		if _, err := r.setWorkerLocked(&info); err == nil {
			out.Expected = append(out.Expected, info.ID)
		}
	}
	r.renameLocked()
	seats := make([]seat, len(c.Holders))
	for i, w := range c.Holders {
		s := r.seatOf(w)
		if was, known := started[w.ID]; s.pool != nil && !c.kept[w.ID] && (!known || was == s.startedMS) {
			seats[i] = s
		}
	}
	return seats
}

// build makes an index of each pool's runs. The runs of a pool follow each other.
func (r *Router) build(c *Contents, seats []seat, out *Restored) (map[poolKey]*eventIndex, error) {
	indexes := make(map[poolKey]*eventIndex)
	if c.Runs == nil {
		return indexes, nil
	}
	next, stop := iter.Pull2(c.Runs)
	defer stop()
	n, run, ok := next()
	for ok {
		number := n
		if number < 0 || number >= len(c.Pools) {
			return nil, fmt.Errorf("pool %d of %d is not named", number, len(c.Pools))
		}
		key := poolKey{c.Pools[number].Model, c.Pools[number].BlockSize}
		if indexes[key] != nil {
			return nil, fmt.Errorf("pool %d of %d is there twice", number, len(c.Pools))
		}
		x, outcome, err := indexer.Restore(indexer.Config{MaxBlocks: r.conf.MaxBlocks}, func(yield func(indexer.Run, error) bool) {
			for ok && n == number {
				kept := run.Holders[:0]
				for _, h := range run.Holders {
					if h.Worker < 0 || h.Worker >= len(seats) {
						yield(run, fmt.Errorf("run %d names holder %d of %d", run.ID, h.Worker, len(seats)))
						return
					}
					if at := &seats[h.Worker]; at.pool != nil && at.pool.poolKey == key {
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
		indexes[key] = newEventIndex(x)
	}
	return indexes, nil
}

// park applies the events that are in no run, before decisions use the indexes: without the shape of a hybrid worker
// all its blocks would count.
func (r *Router) park(c *Contents, seats []seat, indexes map[poolKey]*eventIndex) {
	c.heard = make(map[Worker]bool)
	of := make(map[Worker]seat, len(seats))
	for i, s := range seats {
		of[c.Holders[i]] = s
	}
	for i := range c.Parked {
		s := of[c.Parked[i].Worker]
		if s.pool == nil || s.pool.blockSize == 0 || r.conf.NoEvents { // as for an event that comes now
			continue
		}
		c.heard[c.Parked[i].Worker] = true
		x := indexes[s.pool.poolKey]
		if x == nil {
			x = newEventIndex(indexer.New(indexer.Config{MaxBlocks: r.conf.MaxBlocks}))
			indexes[s.pool.poolKey] = x
		}
		r.metrics.applied(x.parked.Apply(r.conf.Now(), s.ord, c.Parked[i].Event))
	}
}

// install replaces the indexes.
func (r *Router) install(c *Contents, seats []seat, indexes map[poolKey]*eventIndex, out *Restored) {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	r.confirms.InterruptAll()
	for i, s := range seats {
		if s.pool == nil || r.seatOf(c.Holders[i]) == s {
			continue
		}
		if x := indexes[s.pool.poolKey]; x != nil { // the worker left or restarted meanwhile
			x.parked.RemoveWorker(s.ord)
		}
	}
	for key, p := range r.pools {
		x := indexes[key]
		if x == nil {
			x = newEventIndex(indexer.New(indexer.Config{MaxBlocks: r.conf.MaxBlocks}))
		}
		p.carry(c.kept, r.conf.Now(), x)
		p.each(func(ord int, e *entry) {
			p.known.shrunk.Add(int64(x.index.SetLimit(ord, e.info.TotalKVBlocks)))
			e.hasEvents = e.hasEvents || x.index.WorkerBlocks(ord) > 0 || c.heard[e.worker]
		})
		p.known.events.Store(x)
		out.Blocks += x.index.Blocks()
	}
}

// carry copies the blocks of kept workers to another index, except those behind a block that
// the worker does not hold, and their side groups and waiting events.
func (p *pool) carry(kept map[uint64]bool, now time.Time, to *eventIndex) {
	ordinals := make(map[int]bool)
	p.each(func(ord int, e *entry) {
		if kept[e.worker.ID] {
			ordinals[ord] = true
		}
	})
	if len(ordinals) == 0 {
		return
	}
	for c := range indexer.Chains(func(yield func(indexer.Run) bool) {
		for run, err := range p.known.index().Dump() {
			if err != nil {
				return // not possible: no event is applied while the fleet is locked
			}
			run.Holders = slices.DeleteFunc(run.Holders, func(h indexer.Holder) bool { return !ordinals[h.Worker] })
			if !yield(run) {
				return
			}
		}
	}) {
		if c.Start == 0 || c.Event.HasParent {
			to.index.Apply(c.Worker, c.Event)
		}
	}
	for ord, evs := range p.known.events.Load().parked.Events() {
		for i := range evs {
			if ordinals[ord] {
				to.parked.Apply(now, ord, evs[i])
			}
		}
	}
}

// RemoveExpected removes the workers that are still known from a restore only, and returns
// them.
func (r *Router) RemoveExpected(ids []uint64) (removed []uint64) {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	for _, id := range ids {
		if p := r.owners[id]; p != nil && p.infoOf(id).Health == expected {
			r.removeWorkerLocked(id)
			removed = append(removed, id)
		}
	}
	return removed
}
