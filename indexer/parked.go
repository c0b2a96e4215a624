// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"slices"
	"sync"
	"time"
)

const (
	// parkedEvents is how many events of one worker may wait.
	parkedEvents = 1024
	// parkedFor is how long an event waits: far longer than events overtake each
	// other, and short enough that what is missing is fetched soon.
	parkedFor = 30 * time.Second
)

// Parked applies events to an index, and lets those wait whose parent is not there
// yet: until the parent comes, for up to 30 s, up to 1,024 events of a worker. It
// may be used by any number of goroutines. Times must not go back.
//
// Invariant: no block is both in the index and among the removed ones of an event that
// waits, of one worker and tier.
type Parked struct {
	x *Index

	mu sync.Mutex
	// mu guards the field below.
	workers map[int]*lot
}

// lot is the events of one worker that wait, the first come first.
type lot struct {
	waiting []*parked
}

type parked struct {
	event   Event
	until   time.Time
	removed []uint64 // of its blocks, since
}

// NewParked returns a Parked in front of an index, all of whose events should come
// this way.
func NewParked(x *Index) *Parked { return &Parked{x: x, workers: map[int]*lot{}} }

// Apply is [Index.Apply]. What waits counts as [Outcome.Parked], and once more as
// what becomes of it, in the outcome of the event that ended its wait.
func (p *Parked) Apply(now time.Time, worker int, ev Event) Outcome {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.x.Apply(worker, ev)
	l := p.workers[worker]
	switch {
	case ev.Kind == Cleared && l != nil:
		out.Orphan += l.blocks()
		delete(p.workers, worker)
	case out.Orphan > 0:
		if l == nil {
			l = &lot{}
			p.workers[worker] = l
		}
		if len(l.waiting) < parkedEvents {
			ev.Blocks = slices.Clone(ev.Blocks)
			l.waiting = append(l.waiting, &parked{event: ev, until: now.Add(parkedFor)})
			out.Parked, out.Orphan = out.Orphan, 0
		}
	case l == nil:
	case ev.Kind == Removed && out.Unknown > 0:
		l.remove(ev.Tier, ev.Externals)
	case ev.Kind == Stored && out.Invalid == 0:
		p.wake(worker, l, ev.Tier, ev.Blocks, &out)
		if len(l.waiting) == 0 {
			delete(p.workers, worker)
		}
	}
	return out
}

// wake applies what waited for one of the blocks, and for what comes with that.
func (p *Parked) wake(worker int, l *lot, tier Tier, blocks []Block, out *Outcome) {
	var arrived [tiers]map[uint64]bool
	arrive := func(tier Tier, b Block) {
		if arrived[tier] == nil {
			arrived[tier] = map[uint64]bool{}
		}
		arrived[tier][b.External] = true
		for _, w := range l.waiting {
			if w.event.Tier == tier { // it was stored again after it had been removed
				w.removed = slices.DeleteFunc(w.removed, func(e uint64) bool { return e == b.External })
			}
		}
	}
	for _, b := range blocks {
		arrive(tier, b)
	}
	for again := true; again; {
		again = false
		for i := 0; i < len(l.waiting); i++ {
			w := l.waiting[i]
			there := arrived[w.event.Tier][w.event.Parent]
			for t := Device; !there && w.event.Tier != Device && t <= External; t++ {
				there = arrived[t][w.event.Parent]
			}
			if !there {
				continue
			}
			l.waiting = slices.Delete(l.waiting, i, i+1)
			i--
			out.add(p.x.Apply(worker, w.event))
			if len(w.removed) > 0 {
				out.add(p.x.Apply(worker, Event{Kind: Removed, Tier: w.event.Tier, Externals: w.removed}))
			}
			for _, b := range w.event.Blocks {
				if !slices.Contains(w.removed, b.External) {
					arrive(w.event.Tier, b)
				}
			}
			again = true
		}
	}
}

// remove remembers removals of blocks that wait.
func (l *lot) remove(tier Tier, externals []uint64) {
	for _, w := range l.waiting {
		if w.event.Tier != tier {
			continue
		}
		for _, b := range w.event.Blocks {
			if slices.Contains(externals, b.External) && !slices.Contains(w.removed, b.External) {
				w.removed = append(w.removed, b.External)
			}
		}
	}
}

func (l *lot) blocks() (n int) {
	for _, w := range l.waiting {
		n += len(w.event.Blocks)
	}
	return n
}

// Waiting returns what waits, by worker: events that bring an empty Parked in front of
// the same index into the same state, but for the time that they have waited.
func (p *Parked) Waiting() map[int][]Event {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[int][]Event, len(p.workers))
	for worker, l := range p.workers {
		for _, w := range l.waiting {
			all[worker] = append(all[worker], w.event)
			if len(w.removed) > 0 {
				all[worker] = append(all[worker], Event{Kind: Removed, Tier: w.event.Tier, Externals: slices.Sorted(slices.Values(w.removed))})
			}
		}
	}
	return all
}

// Expire drops what has waited too long, and returns how many blocks that were, by
// worker: what these workers hold is not known for certain any more, unless a bound
// has taken the parents (see [Index.Truncated]).
func (p *Parked) Expire(now time.Time) map[int]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	var dropped map[int]int
	for worker, l := range p.workers {
		n := 0
		for n < len(l.waiting) && !now.Before(l.waiting[n].until) {
			n++
		}
		if n == 0 {
			continue
		}
		if dropped == nil {
			dropped = map[int]int{}
		}
		dropped[worker] = (&lot{l.waiting[:n]}).blocks()
		if l.waiting = slices.Delete(l.waiting, 0, n); len(l.waiting) == 0 {
			delete(p.workers, worker)
		}
	}
	return dropped
}

// RemoveWorker is [Index.RemoveWorker]; what waits of the worker goes, too.
func (p *Parked) RemoveWorker(worker int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.workers, worker)
	p.x.RemoveWorker(worker)
}

func (o *Outcome) add(p Outcome) {
	o.Stored += p.Stored
	o.Removed += p.Removed
	o.Duplicate += p.Duplicate
	o.Conflict += p.Conflict
	o.Orphan += p.Orphan
	o.Unknown += p.Unknown
	o.Evicted += p.Evicted
	o.Refused += p.Refused
	o.OtherTier += p.OtherTier
	o.Invalid += p.Invalid
}
