// SPDX-License-Identifier: Apache-2.0

package events

import (
	"iter"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// placeholder is the base of hashes for blocks that a worker does not hold, although it holds
// blocks after them. The same list of events stores and removes these blocks, so no index keeps
// them. The probability that an engine's hash is equal to one is that of two equal random numbers.
const placeholder = 0x9d3f5c1b7a64e82d

// RankEvents returns events that make an empty index hold the blocks that the worker with the
// given number holds in a dumped index: parents before children, the device before other tiers.
// Blocks before a hole are stored and, at the end, removed.
func RankEvents(runs iter.Seq2[indexer.Run, error], worker int) ([]indexer.Event, error) {
	all := []indexer.Run{{}} // by ID, without holders: any of them may become the parent of another
	var trees [len(tiers)]tierTree
	for i := range trees {
		trees[i] = tierTree{tier: indexer.Tier(i), device: &trees[indexer.Device], runs: make(map[uint32]*heldRun)}
	}
	for r, err := range runs {
		if err != nil {
			return nil, err
		}
		r.Local = slices.Clone(r.Local)
		holders := r.Holders
		r.Holders = nil
		all = append(all, r)
		for i := range trees {
			trees[i].all = all
			trees[i].add(r.ID, slices.DeleteFunc(slices.Clone(holders),
				func(h indexer.Holder) bool { return h.Worker != worker || int(h.Tier) != i }))
		}
	}
	var events []indexer.Event
	for i := range trees {
		events = append(events, trees[i].events...)
	}
	for i := range trees {
		if holes := trees[i].holes; len(holes) > 0 {
			Parts(indexer.Event{Kind: indexer.Removed, Tier: indexer.Tier(i), Externals: holes},
				func(part indexer.Event) { events = append(events, part) })
		}
	}
	return events, nil
}

// tierTree makes the events of one tier.
type tierTree struct {
	tier   indexer.Tier
	device *tierTree
	all    []indexer.Run
	runs   map[uint32]*heldRun // where the worker holds a block, or a placeholder is
	events []indexer.Event
	holes  []uint64 // placeholders
}

// heldRun holds a worker's part of a run.
type heldRun struct {
	indexer.Run

	external []uint64
	named    []bool // external is set
}

func (t *tierTree) run(id uint32) *heldRun {
	b := t.runs[id]
	if b == nil {
		r := t.all[id]
		b = &heldRun{r, make([]uint64, len(r.Local)), make([]bool, len(r.Local))}
		t.runs[id] = b
	}
	return b
}

// add adds the worker's part of a run.
func (t *tierTree) add(id uint32, holders []indexer.Holder) {
	if len(holders) == 0 {
		return
	}
	b := t.run(id)
	type second struct {
		at       int
		external uint64
	}
	var seconds []second // further hashes of blocks that have one
	for _, h := range holders {
		for i, e := range h.Externals {
			if at := h.Start + i; b.named[at] {
				seconds = append(seconds, second{at, e})
			} else {
				b.external[at], b.named[at] = e, true
			}
		}
	}
	for from := 0; from < len(b.Local); {
		to := from
		for to < len(b.Local) && b.named[to] {
			to++
		}
		if to > from {
			t.store(b, from, to)
		}
		from = to + 1
	}
	for _, s := range seconds {
		ev := indexer.Event{
			Kind: indexer.Stored, Tier: t.tier, Blocks: []indexer.Block{{External: s.external, Local: b.Local[s.at]}},
		}
		ev.Parent, ev.HasParent = t.before(b, s.at)
		t.events = append(t.events, ev)
	}
}

// store adds an event for the blocks from one to before another. All of them have hashes.
func (t *tierTree) store(b *heldRun, from, to int) {
	ev := indexer.Event{Kind: indexer.Stored, Tier: t.tier, Blocks: make([]indexer.Block, 0, to-from)}
	ev.Parent, ev.HasParent = t.before(b, from)
	for i := from; i < to; i++ {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: b.external[i], Local: b.Local[i]})
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

// before returns the hash of the block before the one at a place of a run. If the worker does not
// hold that block, it is a placeholder.
func (t *tierTree) before(b *heldRun, at int) (external uint64, has bool) {
	if at > 0 {
		return t.hash(b, at-1), true
	}
	if b.Parent == 0 {
		return 0, false
	}
	p := t.run(b.Parent)
	return t.hash(p, len(p.Local)-1), true
}

func (t *tierTree) hash(b *heldRun, at int) uint64 {
	if b.named[at] {
		return b.external[at]
	}
	// A block on the device may be the parent of one on another tier.
	if d := t.device.runs[b.ID]; d != nil && d.named[at] {
		return d.external[at]
	}
	from := at
	for from > 0 && !b.named[from-1] {
		from-- // if the device has it, a placeholder does no harm
	}
	for i := from; i <= at; i++ {
		hole := placeholder * uint64((len(t.holes)+1)*len(tiers)+int(t.tier)) // unique among the tiers
		t.holes = append(t.holes, hole)
		b.external[i], b.named[i] = hole, true
	}
	t.store(b, from, at+1)
	return b.external[at]
}
