// SPDX-License-Identifier: Apache-2.0

package events

import (
	"iter"

	"github.com/kvroute/kvroute/indexer"
)

// placeholder numbers stand for blocks that a worker does not hold, but blocks
// behind them. They are told and taken back within one dump, so nobody keeps them;
// a hash of the engine equals one with the chance of equal random numbers.
const placeholder = 0x9d3f5c1b7a64e82d

// RankEvents returns events that make an empty index hold what the worker with the
// given number holds in a dumped one: parents before children. Blocks before a hole
// are stored and, in the end, removed.
func RankEvents(runs iter.Seq[indexer.Run], worker int) []indexer.Event {
	t := tree{runs: make(map[uint32]*branch)}
	for r := range runs {
		t.add(&r, worker)
	}
	return t.finish()
}

// AllRankEvents is [RankEvents] for every worker that holds anything.
func AllRankEvents(runs iter.Seq[indexer.Run]) map[int][]indexer.Event {
	// Those who only begin somewhere need what is before it, so every tree sees
	// each run that one of its own may hang on: that is all of them. They share
	// the runs' hashes.
	all := make(map[uint32]*trunk)
	trees := make(map[int]*tree)
	for r := range runs {
		all[r.ID] = &trunk{parent: r.Parent, local: r.Local}
		for _, h := range r.Holders {
			if trees[h.Worker] == nil {
				trees[h.Worker] = &tree{runs: make(map[uint32]*branch), trunks: all}
			}
		}
		for _, h := range r.Holders {
			// A holder that is there several times is added once, whole.
			if t := trees[h.Worker]; t.last != r.ID {
				t.add(&r, h.Worker)
			}
		}
	}
	events := make(map[int][]indexer.Event, len(trees))
	for w, t := range trees {
		events[w] = t.finish()
	}
	return events
}

// tree makes the events of one worker.
type tree struct {
	runs   map[uint32]*branch // where the worker holds something, or a placeholder
	trunks map[uint32]*trunk  // all runs; nil if they are added to runs
	last   uint32             // run that was added last
	events []indexer.Event
	holes  []uint64 // placeholders
}

// trunk is a run without its holders.
type trunk struct {
	parent uint32
	local  []uint64
}

// branch is what a worker holds of a run.
type branch struct {
	trunk
	external []uint64
	named    []bool // external is set
}

func (t *tree) add(r *indexer.Run, worker int) {
	t.last = r.ID
	b := &branch{trunk: trunk{r.Parent, r.Local}}
	held := 0
	for _, h := range r.Holders {
		if h.Worker == worker {
			held += len(h.Externals)
		}
	}
	if held > 0 || t.trunks == nil {
		t.runs[r.ID] = b
	}
	if held == 0 {
		return
	}
	b.external, b.named = make([]uint64, len(r.Local)), make([]bool, len(r.Local))
	type second struct {
		at       int
		external uint64
	}
	var seconds []second // further names of blocks that have one
	for _, h := range r.Holders {
		if h.Worker != worker {
			continue
		}
		for i, e := range h.Externals {
			if at := h.Start + i; b.named[at] {
				seconds = append(seconds, second{at, e})
			} else {
				b.external[at], b.named[at] = e, true
			}
		}
	}
	for from := 0; from < len(b.local); {
		if !b.named[from] {
			from++
			continue
		}
		to := from + 1
		for to < len(b.local) && b.named[to] {
			to++
		}
		t.store(b, from, to)
		from = to
	}
	for _, s := range seconds {
		ev := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: s.external, Local: b.local[s.at]}}}
		ev.Parent, ev.HasParent = t.before(b, s.at)
		t.events = append(t.events, ev)
	}
}

// store tells of blocks from one to before another, all of them named.
func (t *tree) store(b *branch, from, to int) {
	ev := indexer.Event{Kind: indexer.Stored, Blocks: make([]indexer.Block, 0, to-from)}
	ev.Parent, ev.HasParent = t.before(b, from)
	for i := from; i < to; i++ {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: b.external[i], Local: b.local[i]})
	}
	if n := len(t.events); n > 0 {
		last := RouterEvent{Event: t.events[n-1]}
		if join(&last, 0, &ev) {
			t.events[n-1] = last.Event
			return
		}
	}
	t.events = append(t.events, ev)
}

// before returns the name of the block before the one at a place of a run, which
// gets one if it has none.
func (t *tree) before(b *branch, at int) (external uint64, has bool) {
	if at > 0 {
		return t.name(b, at-1), true
	}
	if b.parent == 0 {
		return 0, false
	}
	p := t.runs[b.parent]
	if p == nil {
		p = &branch{trunk: *t.trunks[b.parent]}
		t.runs[b.parent] = p
	}
	return t.name(p, len(p.local)-1), true
}

func (t *tree) name(b *branch, at int) uint64 {
	if b.named == nil {
		b.external, b.named = make([]uint64, len(b.local)), make([]bool, len(b.local))
	}
	if b.named[at] {
		return b.external[at]
	}
	from := at
	for from > 0 && !b.named[from-1] {
		from--
	}
	for i := from; i <= at; i++ {
		hole := placeholder * uint64(len(t.holes)+1)
		t.holes = append(t.holes, hole)
		b.external[i], b.named[i] = hole, true
	}
	t.store(b, from, at+1)
	return b.external[at]
}

// finish returns the events, the placeholders taken back.
func (t *tree) finish() []indexer.Event {
	if len(t.holes) > 0 {
		Parts(indexer.Event{Kind: indexer.Removed, Externals: t.holes}, func(part indexer.Event) { t.events = append(t.events, part) })
	}
	return t.events
}
