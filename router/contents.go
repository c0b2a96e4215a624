// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"iter"
	"maps"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// Contents is what a router knows of its workers' caches at one moment.
type Contents struct {
	Pools []PoolContents
	// Holders are the workers that the runs name by number.
	Holders []Worker
	// Workers are the processes that the holders belong to.
	Workers []WorkerInfo
	// Runs are the runs of the pools, one pool after the other, each with the
	// number of its pool; see [indexer.Run]. They can be read once.
	Runs iter.Seq2[int, indexer.Run]
	// Keep tells of workers that the contents say nothing of, whatever is in there:
	// a restoration leaves what is known of them as it is. Nil is for none.
	Keep func(id uint64) bool

	stays map[uint64]bool
}

// PoolContents names a pool and the size of its blocks in tokens.
type PoolContents struct {
	Model     string
	BlockSize int
}

// Dump is a router's contents, being read. It must be closed.
type Dump struct {
	Contents

	router *Router
	pools  []poolDump
}

// poolDump is the dump of a pool under way. Its first run is what made it begin.
type poolDump struct {
	next    func() (indexer.Run, bool)
	stop    func()
	first   indexer.Run
	any     bool
	numbers []int // of the holders, by ordinal
}

// Dump begins a dump of all pools as they are at this moment. Events and decisions
// go on meanwhile. There can be one at a time: ok is false while another one has
// not been closed.
func (r *Router) Dump() (d *Dump, ok bool) {
	if !r.dumping.TryLock() {
		return nil, false
	}
	d = &Dump{router: r}
	// Nobody applies an event or changes a worker until all dumps have begun.
	r.fleet.Lock()
	defer r.fleet.Unlock()
	for _, key := range slices.SortedFunc(maps.Keys(r.pools), poolKey.compare) {
		p := r.pools[key]
		if p.known == nil {
			continue
		}
		d.Pools = append(d.Pools, PoolContents{key.model, key.blockSize})
		p.mu.Lock()
		pd := poolDump{numbers: make([]int, p.core.size())}
		for i, ord := range p.core.order {
			e := &p.core.entries[ord]
			pd.numbers[ord] = len(d.Holders)
			d.Holders = append(d.Holders, e.worker)
			if i == 0 || p.core.entries[p.core.order[i-1]].worker.ID != e.worker.ID {
				d.Workers = append(d.Workers, *e.info)
			}
		}
		p.mu.Unlock()
		pd.next, pd.stop = iter.Pull(p.known.index().Dump())
		pd.first, pd.any = pd.next()
		d.pools = append(d.pools, pd)
	}
	d.Runs = d.runs
	return d, true
}

// Close ends the dump, read or not.
func (d *Dump) Close() {
	if d.router == nil {
		return
	}
	for _, p := range d.pools {
		p.stop()
	}
	d.router.dumping.Unlock()
	d.router = nil
}

func (d *Dump) runs(yield func(int, indexer.Run) bool) {
	for i := range d.pools {
		p := &d.pools[i]
		for run, ok := p.first, p.any; ok; run, ok = p.next() {
			for j := range run.Holders {
				run.Holders[j].Worker = p.numbers[run.Holders[j].Worker]
			}
			if !yield(i, run) {
				return
			}
		}
	}
}

// DumpedEvent stands for blocks that a worker holds: applied in their order to an
// empty index, the events of a dump make one that equals the one dumped, but for
// the blocks behind a hole.
type DumpedEvent struct {
	Worker   Worker
	Position int // of the first block in its sequence
	// Hole: the worker does not hold the block before the first one, so Event has
	// no parent although Position is not 0.
	Hole  bool
	Event indexer.Event // Stored

	sequence uint64 // of the first block
}

// Events turns the runs into events, parents before children; they are read once,
// and an event's slices are good until the next one. Sorted gives one event for
// each block, ordered by worker, tier, position and sequence hash: two routers that know
// the same give the same, up to the engines' hashes. It keeps some 100 bytes for
// each block.
func (d *Dump) Events(sorted bool) iter.Seq[DumpedEvent] {
	if !sorted {
		return d.events
	}
	return func(yield func(DumpedEvent) bool) {
		var all []DumpedEvent
		for ev := range d.events {
			blocks, seq := slices.Clone(ev.Event.Blocks), ev.sequence
			for i := range blocks {
				one := ev
				one.Position, one.Event.Blocks = ev.Position+i, blocks[i:i+1:i+1]
				if i > 0 {
					seq = indexer.NextSequenceHash(seq, blocks[i].Local)
					one.Hole, one.Event.HasParent, one.Event.Parent = false, true, blocks[i-1].External
				}
				one.sequence = seq
				all = append(all, one)
			}
		}
		slices.SortFunc(all, func(a, b DumpedEvent) int {
			return cmp.Or(a.Worker.Compare(b.Worker), cmp.Compare(a.Event.Tier, b.Event.Tier), cmp.Compare(a.Position, b.Position), cmp.Compare(a.sequence, b.sequence),
				cmp.Compare(a.Event.Blocks[0].External, b.Event.Blocks[0].External))
		})
		for _, ev := range all {
			if !yield(ev) {
				return
			}
		}
	}
}

// tail is a worker's hash of the last block of a run.
type tail struct {
	holder   int
	tier     indexer.Tier
	external uint64
}

// behind is what must be known of a run when its children come.
type behind struct {
	depth    int
	sequence uint64
	tails    []tail // sorted by holder and tier
}

func (d *Dump) events(yield func(DumpedEvent) bool) {
	asEvents(d.Runs, func(holder int, ev *DumpedEvent) bool {
		ev.Worker = d.Holders[holder]
		return yield(*ev)
	})
}

// asEvents turns runs into events, but for their workers.
func asEvents(runs iter.Seq2[int, indexer.Run], yield func(holder int, ev *DumpedEvent) bool) {
	var before []behind // by run, from 1 on
	var seq []uint64
	var blocks []indexer.Block
	pool := -1
	for p, r := range runs {
		if p != pool {
			pool, before = p, append(before[:0], behind{})
		}
		parent := before[r.Parent]
		seq = seq[:0]
		at := parent.sequence
		for i, l := range r.Local {
			if parent.depth+i == 0 {
				at = l
			} else {
				at = indexer.NextSequenceHash(at, l)
			}
			seq = append(seq, at)
		}
		own := behind{depth: parent.depth + len(r.Local), sequence: at}
		slices.SortStableFunc(r.Holders, func(a, b indexer.Holder) int {
			return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Tier, b.Tier), cmp.Compare(a.Start, b.Start))
		})
		for i, h := range r.Holders {
			if len(h.Externals) == 0 {
				continue
			}
			if n := len(own.tails); h.Start+len(h.Externals) == len(r.Local) && (n == 0 || own.tails[n-1].holder != h.Worker || own.tails[n-1].tier != h.Tier) {
				own.tails = append(own.tails, tail{h.Worker, h.Tier, h.Externals[len(h.Externals)-1]})
			}
			ev := DumpedEvent{Position: parent.depth + h.Start, sequence: seq[h.Start]}
			ev.Event = indexer.Event{Kind: indexer.Stored, Tier: h.Tier}
			if ev.Position > 0 {
				ev.Event.Parent, ev.Event.HasParent = heldBefore(parent.tails, r.Holders[:i], h)
				ev.Hole = !ev.Event.HasParent
			}
			blocks = blocks[:0]
			for j, e := range h.Externals {
				blocks = append(blocks, indexer.Block{External: e, Local: r.Local[h.Start+j]})
			}
			ev.Event.Blocks = blocks
			if !yield(h.Worker, &ev) {
				return
			}
		}
		before = append(before, own)
	}
}

// heldBefore finds the worker's hash of the block before those of h: in the run
// before, or under an earlier holder of the same run; on the same tier, or, if that
// is not the device, on a faster one, which comes earlier.
func heldBefore(parent []tail, earlier []indexer.Holder, h indexer.Holder) (external uint64, ok bool) {
	if h.Start == 0 {
		i, same := slices.BinarySearchFunc(parent, h, func(t tail, h indexer.Holder) int {
			return cmp.Or(cmp.Compare(t.holder, h.Worker), cmp.Compare(t.tier, h.Tier))
		})
		if !same {
			i-- // the slowest tier that is faster
		}
		if i < 0 || parent[i].holder != h.Worker {
			return 0, false
		}
		return parent[i].external, true
	}
	for i := len(earlier) - 1; i >= 0 && earlier[i].Worker == h.Worker; i-- {
		if at := h.Start - 1 - earlier[i].Start; at >= 0 && at < len(earlier[i].Externals) {
			return earlier[i].Externals[at], true
		}
	}
	return 0, false
}
