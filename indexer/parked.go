// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// parkedEvents limits the parked events of one worker, parkedBlocks the blocks of
	// one worker, and parkedInAll the blocks of all workers: some 60 MB.
	parkedEvents = 1024
	parkedBlocks = 1 << 16
	parkedInAll  = 1 << 19
	// parkedFor is how long an event waits: far longer than events arrive out of order,
	// and short enough that missing events are requested soon.
	parkedFor = 30 * time.Second
)

// Parked applies events to an index. An event whose parent is not in the index yet waits
// for it: for up to 30 s, up to 1,024 events and 65,536 blocks of a worker, 524,288 blocks
// of all. It may be used by any number of goroutines. Times must not go back.
//
// Invariants:
//
//   - No block is both in the index and among the removed ones of an event that waits,
//     of one worker and tier.
//   - An event that waits is in behind under its parent, and in has under each of its
//     blocks.
type Parked struct {
	x *Index

	mu sync.Mutex
	// mu guards the fields below.
	workers map[int]*lot // those with events that wait
	blocks  int          // of the events that wait
}

// lot has the parked events of one worker.
type lot struct {
	queue  []*parked // in order of arrival
	blocks int
	behind map[uint64][]*parked // by parent
	has    map[parkedBlock][]*parked
}

// parked is one parked event.
type parked struct {
	event   Event
	until   time.Time
	ready   bool            // its parent is in the index
	removed map[uint64]bool // blocks of the event that were removed since it came
}

type parkedBlock struct {
	tier     Tier
	external uint64
}

// NewParked returns a Parked in front of an index. All events of the index should pass
// through it.
func NewParked(x *Index) *Parked { return &Parked{x: x, workers: map[int]*lot{}} }

// Apply is [Index.Apply]. Blocks that wait count as [Outcome.Parked], and later as
// stored or dropped, in the outcome of the event that ends their wait.
func (p *Parked) Apply(now time.Time, worker int, ev Event) Outcome {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.x.Apply(worker, ev)
	l := p.workers[worker]
	switch {
	case ev.Kind == Cleared && l != nil:
		out.Orphan += l.blocks
		p.forget(worker)
	case out.Orphan > 0:
		if l == nil {
			l = &lot{behind: map[uint64][]*parked{}, has: map[parkedBlock][]*parked{}}
		}
		n := len(ev.Blocks)
		if len(l.queue) < parkedEvents && l.blocks+n <= parkedBlocks && p.blocks+n <= parkedInAll {
			ev.Blocks = slices.Clone(ev.Blocks)
			p.workers[worker] = l
			p.add(l, &parked{event: ev, until: now.Add(parkedFor)})
			out.Parked, out.Orphan = out.Orphan, 0
		}
	case l == nil:
	case ev.Kind == Removed && out.Unknown > 0:
		l.remove(ev.Tier, ev.Externals)
	case ev.Kind == Stored && out.Invalid == 0:
		p.wake(worker, l, ev.Tier, ev.Blocks, &out)
	}
	return out
}

// add adds an event.
func (p *Parked) add(l *lot, w *parked) {
	l.queue = append(l.queue, w)
	l.blocks += len(w.event.Blocks)
	p.blocks += len(w.event.Blocks)
	l.behind[w.event.Parent] = append(l.behind[w.event.Parent], w)
	for _, b := range w.event.Blocks {
		key := parkedBlock{w.event.Tier, b.External}
		l.has[key] = append(l.has[key], w)
	}
}

// removeAt removes the event at a place in the queue, and returns it.
func (p *Parked) removeAt(worker int, l *lot, at int) *parked {
	w := l.queue[at]
	l.queue = slices.Delete(l.queue, at, at+1)
	l.blocks -= len(w.event.Blocks)
	p.blocks -= len(w.event.Blocks)
	without(l.behind, w.event.Parent, w)
	for _, b := range w.event.Blocks {
		without(l.has, parkedBlock{w.event.Tier, b.External}, w)
	}
	if len(l.queue) == 0 {
		p.forget(worker)
	}
	return w
}

// without removes an event from one of a map's lists.
func without[K comparable](m map[K][]*parked, key K, w *parked) {
	if rest := slices.DeleteFunc(m[key], func(o *parked) bool { return o == w }); len(rest) > 0 {
		m[key] = rest
	} else {
		delete(m, key)
	}
}

// forget drops the parked events of a worker.
func (p *Parked) forget(worker int) {
	if l := p.workers[worker]; l != nil {
		p.blocks -= l.blocks
		delete(p.workers, worker)
	}
}

// wake applies the events that wait for one of the blocks, and the events that wait for
// those, and so on. It walks over the queue in order until no event in it is ready.
func (p *Parked) wake(worker int, l *lot, tier Tier, blocks []Block, out *Outcome) {
	for _, b := range blocks {
		l.arrive(tier, b.External)
	}
	for at := 0; ; {
		next := slices.IndexFunc(l.queue[at:], func(w *parked) bool { return w.ready })
		switch {
		case next < 0 && at == 0:
			return
		case next < 0:
			at = 0
			continue
		}
		at += next
		w := p.removeAt(worker, l, at)
		out.add(p.x.Apply(worker, w.event))
		if len(w.removed) > 0 {
			out.add(p.x.Apply(worker, w.removal()))
		}
		for _, b := range w.event.Blocks {
			if !w.removed[b.External] {
				l.arrive(w.event.Tier, b.External)
			}
		}
	}
}

// arrive notes that an event has stored a block. Events that wait for it are ready. If a
// parked event has the block too, its removal no longer counts: the block was stored
// again.
func (l *lot) arrive(tier Tier, external uint64) {
	for _, w := range l.has[parkedBlock{tier, external}] {
		delete(w.removed, external)
	}
	for _, w := range l.behind[external] {
		if w.event.Tier != Device || tier == Device {
			w.ready = true
		}
	}
}

// remove notes the removal of blocks of parked events.
func (l *lot) remove(tier Tier, externals []uint64) {
	for _, e := range externals {
		for _, w := range l.has[parkedBlock{tier, e}] {
			if w.removed == nil {
				w.removed = map[uint64]bool{}
			}
			w.removed[e] = true
		}
	}
}

// removal returns the removals of an event's blocks while it waited.
func (w *parked) removal() Event {
	return Event{Kind: Removed, Tier: w.event.Tier, Externals: slices.Sorted(maps.Keys(w.removed))}
}

// Events returns what no run of a dump of the index has, by worker: the blocks of side groups, and the parked events.
// Applied to an empty Parked in front of an index with the runs, they result in the same state, except for the time
// that the parked events have waited.
func (p *Parked) Events() map[int][]Event {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[int][]Event, len(p.workers))
	for worker := range p.x.sidesLen() {
		if evs := p.x.Sides(worker); evs != nil {
			all[worker] = evs
		}
	}
	for worker, l := range p.workers {
		for _, w := range l.queue {
			all[worker] = append(all[worker], w.event)
			if len(w.removed) > 0 {
				all[worker] = append(all[worker], w.removal())
			}
		}
	}
	return all
}

// Bytes estimates the heap memory of the parked events.
func (p *Parked) Bytes() int {
	const (
		event = 160 + 90 // with its entries in queue and behind
		block = 16 + 96  // with its entry in has
	)
	p.mu.Lock()
	defer p.mu.Unlock()
	total := 0
	for _, l := range p.workers {
		total += event*len(l.queue) + block*l.blocks
	}
	return total
}

// Expire drops events that have waited too long, and returns how many blocks they had, by
// worker. From then on the index may miss blocks of these workers, unless a limit has
// removed the parents (see [Index.Truncated]).
func (p *Parked) Expire(now time.Time) map[int]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	var dropped map[int]int
	for worker, l := range p.workers {
		for len(l.queue) > 0 && !now.Before(l.queue[0].until) {
			if dropped == nil {
				dropped = map[int]int{}
			}
			dropped[worker] += len(p.removeAt(worker, l, 0).event.Blocks)
		}
	}
	return dropped
}

// RemoveWorker is [Index.RemoveWorker], and drops the worker's parked events.
func (p *Parked) RemoveWorker(worker int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forget(worker)
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
