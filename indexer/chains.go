// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"cmp"
	"iter"
	"slices"
)

// Chain is a piece of what a worker holds, as a stored event.
type Chain struct {
	Worker int
	// Start is how many blocks of the sequence come before. If there are any and
	// the event has no parent, the worker does not hold the last of them: Apply
	// cannot tell where the event belongs, only [Restore] can tell of the run.
	Start int
	Event Event
}

// Chains turns the runs of a dump into stored events. Those of a worker come in an
// order in which they can be applied: parents before their children. It keeps
// what every run ends with, some 16 bytes for each run and worker. The events'
// externals are not shared.
func Chains(runs iter.Seq[Run]) iter.Seq[Chain] {
	return func(yield func(Chain) bool) {
		ends := []runEnd{{}} // by run
		for r := range runs {
			before := &ends[r.Parent]
			pieces := slices.SortedFunc(slices.Values(r.Holders), func(a, b Holder) int {
				return cmp.Or(a.Worker-b.Worker, a.Start-b.Start, int(a.Tier)-int(b.Tier))
			})
			end := runEnd{start: before.start + len(r.Local)}
			worker := 0 // the first piece of the same worker
			for i, p := range pieces {
				if p.Worker != pieces[worker].Worker {
					worker = i
				}
				c := Chain{Worker: p.Worker, Start: before.start + p.Start, Event: Event{Kind: Stored, Tier: p.Tier}}
				if p.Start == 0 {
					c.Event.Parent, c.Event.HasParent = before.external(p.Worker, p.Tier)
				} else {
					c.Event.Parent, c.Event.HasParent = externalIn(pieces[worker:i], p.Tier, p.Start-1)
				}
				c.Event.Blocks = make([]Block, len(p.Externals))
				for j, e := range p.Externals {
					c.Event.Blocks[j] = Block{External: e, Local: r.Local[p.Start+j]}
				}
				if len(p.Externals) > 0 && p.Start+len(p.Externals) == len(r.Local) {
					end.owners = append(end.owners, ownerOf(p.Worker, p.Tier))
					end.externals = append(end.externals, p.Externals[len(p.Externals)-1])
				}
				if !yield(c) {
					return
				}
			}
			ends = append(ends, end)
		}
	}
}

// runEnd is the last block of a run: how far into the sequence it ends, and under
// which external hashes it is held by whom, ordered by worker.
type runEnd struct {
	start     int
	owners    []int32
	externals []uint64
}

// external returns a parent for what a worker holds on a tier: the block there, or,
// unless that is the device, on any other.
func (e *runEnd) external(worker int, t Tier) (external uint64, ok bool) {
	from, _ := slices.BinarySearchFunc(e.owners, worker, func(o int32, w int) int {
		return int(o&maxWorker) - w
	})
	for i := from; i < len(e.owners) && int(e.owners[i]&maxWorker) == worker; i++ {
		if o := e.owners[i]; o == ownerOf(worker, t) || t != Device && !ok {
			external, ok = e.externals[i], true
			if o == ownerOf(worker, t) {
				break
			}
		}
	}
	return external, ok
}

// externalIn is external for a block within a run.
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
