// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// parkedEvents is how many events of one worker may wait, parkedBlocks how many
	// blocks of one, and parkedInAll how many of all: some 60 MB.
	parkedEvents = 1024
	parkedBlocks = 1 << 16
	parkedInAll  = 1 << 19
	// parkedFor is how long an event waits: far longer than events overtake each
	// other, and short enough that what is missing is fetched soon.
	parkedFor = 30 * time.Second
)

// Parked applies events to an index, and lets those wait whose parent is not there
// yet: until the parent comes, for up to 30 s, up to 1,024 events and 65,536 blocks of a
// worker, 524,288 blocks of all. It may be used by any number of goroutines. Times must
// not go back. An event looks only at those that wait for its blocks, or have them.
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
	workers map[int]*lot
	blocks  int // of the events that wait
}

// lot is the events of one worker that wait.
type lot struct {
	queue  []*parked // the first come first; some have gone
	n      int       // those that have not
	blocks int
	last   int                  // number of the event that came last
	behind map[uint64][]*parked // by parent
	has    map[parkedBlock]*mentions
	ready  []*parked // whose parent is there, the next one last
}

type parked struct {
	event   Event
	until   time.Time
	number  int
	gone    bool
	round   int             // in which it is applied, once it is ready; 0 before
	removed map[uint64]bool // of its blocks, since
}

type parkedBlock struct {
	tier     Tier
	external uint64
}

// mentions are the events that wait and have a block; of so many it was removed.
type mentions struct {
	in      []*parked
	removed int
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
		out.Orphan += l.blocks
		p.forget(worker)
	case out.Orphan > 0:
		if l == nil {
			l = &lot{behind: map[uint64][]*parked{}, has: map[parkedBlock]*mentions{}}
		}
		n := len(ev.Blocks)
		if l.n < parkedEvents && l.blocks+n <= parkedBlocks && p.blocks+n <= parkedInAll {
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

// add lets an event wait.
func (p *Parked) add(l *lot, w *parked) {
	l.last++
	w.number = l.last
	l.queue = append(l.queue, w)
	l.n++
	l.blocks += len(w.event.Blocks)
	p.blocks += len(w.event.Blocks)
	l.behind[w.event.Parent] = append(l.behind[w.event.Parent], w)
	for _, b := range w.event.Blocks {
		key := parkedBlock{w.event.Tier, b.External}
		m := l.has[key]
		if m == nil {
			m = &mentions{}
			l.has[key] = m
		}
		m.in = append(m.in, w)
	}
}

// take ends the wait of an event.
func (p *Parked) take(worker int, l *lot, w *parked) {
	w.gone = true
	l.n--
	l.blocks -= len(w.event.Blocks)
	p.blocks -= len(w.event.Blocks)
	is := func(o *parked) bool { return o == w }
	if rest := slices.DeleteFunc(l.behind[w.event.Parent], is); len(rest) > 0 {
		l.behind[w.event.Parent] = rest
	} else {
		delete(l.behind, w.event.Parent)
	}
	for _, b := range w.event.Blocks {
		key := parkedBlock{w.event.Tier, b.External}
		m := l.has[key]
		if m.in = slices.DeleteFunc(m.in, is); len(m.in) == 0 {
			delete(l.has, key)
		} else if w.removed[b.External] {
			m.removed--
		}
	}
	if len(l.queue) > 2*l.n+16 {
		l.queue = slices.DeleteFunc(l.queue, func(o *parked) bool { return o.gone })
	}
	if l.n == 0 {
		p.forget(worker)
	}
}

// forget lets nothing of a worker wait any more.
func (p *Parked) forget(worker int) {
	if l := p.workers[worker]; l != nil {
		p.blocks -= l.blocks
		delete(p.workers, worker)
	}
}

// wake applies what waited for one of the blocks, and for what comes with that: in
// rounds, each in the order in which the events came.
func (p *Parked) wake(worker int, l *lot, tier Tier, blocks []Block, out *Outcome) {
	at := &parked{round: 1}
	for _, b := range blocks {
		l.arrive(at, tier, b.External)
	}
	for len(l.ready) > 0 {
		last := len(l.ready) - 1
		at, l.ready = l.ready[last], l.ready[:last]
		p.take(worker, l, at)
		out.add(p.x.Apply(worker, at.event))
		if len(at.removed) > 0 {
			out.add(p.x.Apply(worker, at.removal()))
		}
		for _, b := range at.event.Blocks {
			if !at.removed[b.External] {
				l.arrive(at, at.event.Tier, b.External)
			}
		}
	}
}

// arrive notes that an event has stored a block: what waited behind it is ready, and
// where it was removed it was stored again after that.
func (l *lot) arrive(by *parked, tier Tier, external uint64) {
	if m := l.has[parkedBlock{tier, external}]; m != nil && m.removed > 0 {
		for _, w := range m.in {
			delete(w.removed, external)
		}
		m.removed = 0
	}
	for _, w := range l.behind[external] {
		if w.round > 0 || w.event.Tier == Device && tier != Device {
			continue
		}
		if w.round = by.round; w.number < by.number {
			w.round++
		}
		i, _ := slices.BinarySearchFunc(l.ready, w, func(a, b *parked) int {
			return cmp.Or(cmp.Compare(b.round, a.round), cmp.Compare(b.number, a.number))
		})
		l.ready = slices.Insert(l.ready, i, w)
	}
}

// remove remembers removals of blocks that wait.
func (l *lot) remove(tier Tier, externals []uint64) {
	for _, e := range externals {
		m := l.has[parkedBlock{tier, e}]
		if m == nil || m.removed == len(m.in) {
			continue
		}
		for _, w := range m.in {
			if w.removed == nil {
				w.removed = map[uint64]bool{}
			}
			w.removed[e] = true
		}
		m.removed = len(m.in)
	}
}

// removal is what was removed of an event while it waited.
func (w *parked) removal() Event {
	return Event{Kind: Removed, Tier: w.event.Tier, Externals: slices.Sorted(maps.Keys(w.removed))}
}

// Waiting returns what waits, by worker: events that bring an empty Parked in front of
// the same index into the same state, but for the time that they have waited.
func (p *Parked) Waiting() map[int][]Event {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[int][]Event, len(p.workers))
	for worker, l := range p.workers {
		for _, w := range l.queue {
			if w.gone {
				continue
			}
			all[worker] = append(all[worker], w.event)
			if len(w.removed) > 0 {
				all[worker] = append(all[worker], w.removal())
			}
		}
	}
	return all
}

// Bytes returns about what the waiting events take of the heap.
func (p *Parked) Bytes() int {
	const (
		event = 160 + 90 // and its places in queue and behind
		block = 16 + 96  // and its place in has
	)
	p.mu.Lock()
	defer p.mu.Unlock()
	total := 0
	for _, l := range p.workers {
		total += event*l.n + block*l.blocks
	}
	return total
}

// Expire drops what has waited too long, and returns how many blocks that were, by
// worker: what these workers hold is not known for certain any more, unless a bound
// has taken the parents (see [Index.Truncated]).
func (p *Parked) Expire(now time.Time) map[int]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	var dropped map[int]int
	for worker, l := range p.workers {
		late := 0
		for late < len(l.queue) && !now.Before(l.queue[late].until) {
			late++
		}
		blocks := l.blocks
		for _, w := range slices.Clone(l.queue[:late]) {
			if !w.gone {
				p.take(worker, l, w)
			}
		}
		if blocks > l.blocks {
			if dropped == nil {
				dropped = map[int]int{}
			}
			dropped[worker] = blocks - l.blocks
		}
	}
	return dropped
}

// RemoveWorker is [Index.RemoveWorker]; what waits of the worker goes, too.
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
