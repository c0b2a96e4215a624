// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"cmp"
	"iter"
	"slices"
)

// Chain is a piece of a worker's blocks, as a stored event.
type Chain struct {
	Worker int
	// Start is the number of earlier blocks of the sequence. If Start is above 0 and the
	// event has no parent, the worker does not hold the block before the chain: Apply
	// cannot find the chain's place; only [Restore] can, from the run.
	Start int
	Event Event
}

// Chains turns the runs of a dump into stored events. A worker's events are in an order
// in which they can be applied: parents before their children. It keeps no state between
// two runs, and sorts the runs' holders. The slices of an event are valid until the next
// one.
func Chains(runs iter.Seq[Run]) iter.Seq[Chain] {
	return func(yield func(Chain) bool) {
		var blocks []Block
		for r := range runs {
			// The parent of a piece is in a piece that begins earlier.
			slices.SortStableFunc(r.Holders, func(a, b Holder) int {
				return cmp.Or(a.Worker-b.Worker, a.Start-b.Start, int(a.Tier)-int(b.Tier))
			})
			worker := 0 // the first piece of the same worker
			for i := range r.Holders {
				h := &r.Holders[i]
				if h.Worker != r.Holders[worker].Worker {
					worker = i
				}
				if len(h.Externals) == 0 {
					continue
				}
				c := Chain{Worker: h.Worker, Start: r.Depth + h.Start, Event: Event{Kind: Stored, Tier: h.Tier}}
				if h.Start == 0 {
					c.Event.Parent, c.Event.HasParent = h.Parent, h.HasParent
				} else {
					c.Event.Parent, c.Event.HasParent = externalIn(r.Holders[worker:i], h.Tier, h.Start-1)
				}
				blocks = blocks[:0]
				for j, e := range h.Externals {
					blocks = append(blocks, Block{External: e, Local: r.Local[h.Start+j]})
				}
				c.Event.Blocks = blocks
				if !yield(c) {
					return
				}
			}
		}
	}
}

// externalIn returns a parent for a worker's blocks on a tier: the worker's block with
// the given number on that tier or, unless that is the device, on any other tier.
func externalIn(pieces []Holder, t Tier, block int) (external uint64, ok bool) {
	for _, p := range pieces {
		if at := block - p.Start; at >= 0 && at < len(p.Externals) && (p.Tier == t || t != Device && !ok) {
			external, ok = p.Externals[at], true
			if p.Tier == t {
				break
			}
		}
	}
	return external, ok
}
