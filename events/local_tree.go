// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"iter"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// placeholder numbers stand for blocks that a worker does not hold, but blocks
// behind them. They are told and taken back within one dump, so nobody keeps them;
// a hash of the engine equals one with the chance of equal random numbers.
const placeholder = 0x9d3f5c1b7a64e82d

// RankEvents returns events that make an empty index hold what the worker with the
// given number holds in a dumped one: parents before children, the device before
// other tiers. Blocks before a hole are stored and, in the end, removed. It keeps
// what it returns, and the hashes of all runs.
func RankEvents(runs iter.Seq2[indexer.Run, error], worker int) ([]indexer.Event, error) {
	all, err := AllRankEvents(func(yield func(indexer.Run, error) bool) {
		for r, err := range runs {
			r.Holders = slices.DeleteFunc(r.Holders, func(h indexer.Holder) bool { return h.Worker != worker })
			if !yield(r, err) {
				return
			}
		}
	})
	return all[worker], err
}

// AllRankEvents is [RankEvents] for every worker that holds anything.
func AllRankEvents(runs iter.Seq2[indexer.Run, error]) (map[int][]indexer.Event, error) {
	// What is behind a hole needs what is before it, so every tree may have to look
	// at any run. They share the runs' hashes.
	all := make(map[uint32]*trunk)
	trees := make(map[int]*[len(tiers)]tree)
	for r, err := range runs {
		if err != nil {
			return nil, err
		}
		r.Local = slices.Clone(r.Local)
		all[r.ID] = &trunk{parent: r.Parent, local: r.Local}
		slices.SortStableFunc(r.Holders, func(a, b indexer.Holder) int {
			return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Tier, b.Tier))
		})
		for rest := r.Holders; len(rest) > 0; {
			n := 1
			for n < len(rest) && rest[n].Worker == rest[0].Worker && rest[n].Tier == rest[0].Tier {
				n++
			}
			w, tier := rest[0].Worker, rest[0].Tier
			ts := trees[w]
			if ts == nil {
				ts = new([len(tiers)]tree)
				for i := range ts {
					ts[i] = tree{tier: indexer.Tier(i), device: &ts[indexer.Device], runs: make(map[uint32]*branch), trunks: all}
				}
				trees[w] = ts
			}
			ts[tier].add(&r, rest[:n])
			rest = rest[n:]
		}
	}
	events := make(map[int][]indexer.Event, len(trees))
	for w, ts := range trees {
		var evs []indexer.Event
		for i := range ts {
			evs = append(evs, ts[i].events...)
		}
		for i := range ts {
			if holes := ts[i].holes; len(holes) > 0 {
				Parts(indexer.Event{Kind: indexer.Removed, Tier: indexer.Tier(i), Externals: holes}, func(part indexer.Event) { evs = append(evs, part) })
			}
		}
		events[w] = evs
	}
	return events, nil
}

// tree makes the events of one worker's tier.
type tree struct {
	tier   indexer.Tier
	device *tree              // of the same worker
	runs   map[uint32]*branch // where the worker holds something, or a placeholder
	trunks map[uint32]*trunk  // all runs
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
	id uint32
	trunk
	external []uint64
	named    []bool // external is set
}

// add adds what the worker holds of a run, on the tree's tier.
func (t *tree) add(r *indexer.Run, holders []indexer.Holder) {
	b := &branch{id: r.ID, trunk: trunk{r.Parent, r.Local}, external: make([]uint64, len(r.Local)), named: make([]bool, len(r.Local))}
	t.runs[r.ID] = b
	type second struct {
		at       int
		external uint64
	}
	var seconds []second // further names of blocks that have one
	for _, h := range holders {
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
		ev := indexer.Event{Kind: indexer.Stored, Tier: t.tier, Blocks: []indexer.Block{{External: s.external, Local: b.local[s.at]}}}
		ev.Parent, ev.HasParent = t.before(b, s.at)
		t.events = append(t.events, ev)
	}
}

// store tells of blocks from one to before another, all of them named.
func (t *tree) store(b *branch, from, to int) {
	ev := indexer.Event{Kind: indexer.Stored, Tier: t.tier, Blocks: make([]indexer.Block, 0, to-from)}
	ev.Parent, ev.HasParent = t.before(b, from)
	for i := from; i < to; i++ {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: b.external[i], Local: b.local[i]})
	}
	if n := len(t.events); n > 0 {
		last := RouterEvent{Event: t.events[n-1]}
		if Join(&last, 0, &ev) {
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
		p = &branch{id: b.parent, trunk: *t.trunks[b.parent]}
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
	// What is on the device may be the parent of what is elsewhere.
	if d := t.device.runs[b.id]; d != nil && d.named != nil && d.named[at] {
		return d.external[at]
	}
	from := at
	for from > 0 && !b.named[from-1] {
		from-- // if the device has it, a placeholder does no harm
	}
	for i := from; i <= at; i++ {
		hole := placeholder * uint64((len(t.holes)+1)*len(tiers)+int(t.tier)) // not that of another tier
		t.holes = append(t.holes, hole)
		b.external[i], b.named[i] = hole, true
	}
	t.store(b, from, at+1)
	return b.external[at]
}
