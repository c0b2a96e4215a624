// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"errors"
	"fmt"
	"iter"
	"math/bits"
	"slices"
)

// Run is a piece of an index: consecutive blocks, behind the last block of another
// run, and who holds which of them.
type Run struct {
	ID      uint32 // from 1, one more each
	Parent  uint32 // a run before this one, or 0: the run begins a sequence
	Local   []uint64
	Holders []Holder
}

// Holder is a worker that holds, on a tier, len(Externals) blocks of a run from
// block Start on, under these external hashes. Who has holes, or several external
// hashes for a block, is there several times. Slices may be shared.
type Holder struct {
	Worker    int
	Tier      Tier
	Start     int
	Externals []uint64
}

// dump is a dump under way. It walks over all nodes; whoever is about to change a
// node that it has not come to hands it over first, after those before it.
type dump struct {
	id   uint32
	last uint32 // number of the last run
	runs []Run  // to be handed out
}

// Dump yields the index as it is when the loop begins. Events and matches go on
// meanwhile; what they change is kept as it was until the loop has had it. A
// second dump waits for the first.
func (x *Index) Dump() iter.Seq[Run] {
	return func(yield func(Run) bool) {
		x.dumping.Lock()
		defer x.dumping.Unlock()
		x.mu.Lock()
		x.dumps++
		d := &dump{id: x.dumps}
		x.dump = d
		end := x.nodes.end()
		x.mu.Unlock()
		defer func() {
			x.mu.Lock()
			x.dump = nil
			x.mu.Unlock()
		}()
		const atOnce = 64 // nodes; events wait for 64 * 64 * workers hashes at most
		for i := uint32(1); i < end; {
			x.mu.Lock()
			for to := i + atOnce; i < min(to, end); i++ {
				if n := x.nodes.at(i); n != nil && *n != nil {
					x.preserve(*n)
				}
			}
			runs := d.runs
			d.runs = nil
			x.mu.Unlock()
			for _, r := range runs {
				if !yield(r) {
					return
				}
			}
		}
		x.mu.Lock()
		runs := d.runs // of nodes that are gone
		x.mu.Unlock()
		for _, r := range runs {
			if !yield(r) {
				return
			}
		}
	}
}

// preserve gives a dump under way what a node is, before it changes.
func (x *Index) preserve(n *node) {
	if d := x.dump; d != nil && n.dumped != d.id && n != &x.root {
		d.take(&x.root, n)
	}
}

func (d *dump) take(root, n *node) {
	var line []*node // from n up to what is known
	for ; n != root && n.dumped != d.id; n = n.parent {
		line = append(line, n)
	}
	parent := n.number // the root's is 0
	for _, n := range slices.Backward(line) {
		d.last++
		n.dumped, n.number = d.id, d.last
		d.runs = append(d.runs, n.run(parent))
		parent = n.number
	}
}

func (n *node) run(parent uint32) Run {
	r := Run{ID: n.number, Parent: parent, Local: append([]uint64(nil), n.local...)}
	var main Holder // of the workers that hold all by the main column
	add := func(w int32, c *column, cells uint64) {
		for cells != 0 {
			from := bits.TrailingZeros64(cells)
			length := bits.TrailingZeros64(^(cells >> from))
			cells &^= ones(length) << from
			h := Holder{Worker: int(w & maxWorker), Tier: Tier(w >> tierShift), Start: from - int(n.shift)}
			if c == n.main && length == len(n.local) && main.Externals != nil {
				h.Externals = main.Externals
			} else {
				at := from - int(c.base)
				h.Externals = append([]uint64(nil), c.ext[at:at+length]...)
			}
			if c == n.main && length == len(n.local) {
				main = h
			}
			r.Holders = append(r.Holders, h)
		}
	}
	holder := func(w int32, cells uint64) {
		i, owns := n.findOwn(w)
		if !owns {
			add(w, n.main, cells)
		}
		for ; i < len(n.own) && n.own[i].who == w; i++ {
			add(w, n.own[i].column, n.own[i].cells)
		}
	}
	for w := range n.full.all() {
		holder(w, n.all())
	}
	for _, p := range n.part {
		holder(p.who, p.cells)
	}
	return r
}

// ErrDump means that runs do not make an index.
var ErrDump = errors.New("indexer: not a dump of an index")

// Restore makes an index of the runs of a dump. The outcome counts external
// hashes: those above the bound are refused, and a worker's second use of one is a
// conflict.
func Restore(c Config, runs iter.Seq2[Run, error]) (*Index, Outcome, error) {
	x := New(c)
	var out Outcome
	ends := []lastCell{{&x.root, -1}} // by run
	for r, err := range runs {
		if err == nil {
			err = x.restore(&r, &ends, &out)
		}
		if err != nil {
			return nil, out, err
		}
	}
	for n := range x.nodes.all() {
		if *n != nil {
			x.tidy(*n) // a run that nobody holds
		}
	}
	x.settle()
	return x, out, nil
}

// lastCell is the cell of a restored run's last block. The node may be split before
// it is asked for; the root, of cell -1, is not.
type lastCell struct {
	n    *node
	cell int
}

func (l lastCell) place() place {
	n := l.n
	if n.parent != nil {
		n = n.with(l.cell)
	}
	return place{n, l.cell - int(n.shift)}
}

func (x *Index) restore(r *Run, ends *[]lastCell, out *Outcome) error {
	if int(r.ID) != len(*ends) || int(r.Parent) >= len(*ends) || len(r.Local) == 0 {
		return fmt.Errorf("%w: run %d of %d blocks behind run %d, want run %d", ErrDump, r.ID, len(r.Local), r.Parent, len(*ends))
	}
	blocks := make([]Block, len(r.Local))
	for i, l := range r.Local {
		blocks[i].Local = l
	}
	before := (*ends)[r.Parent]
	end := x.store(-1, before.place(), blocks, nil, nil)
	*ends = append(*ends, lastCell{end.n, end.block + int(end.n.shift)})
	for _, h := range r.Holders {
		if h.Worker < 0 || h.Worker > maxWorker || h.Tier > External || h.Start < 0 || h.Start+len(h.Externals) > len(r.Local) {
			return fmt.Errorf("%w: run %d, worker %d holds %d blocks from %d on, on tier %d", ErrDump, r.ID, h.Worker, len(h.Externals), h.Start, h.Tier)
		}
		x.restoreHolder(before.place(), blocks, h, out)
		x.settle()
	}
	return nil
}

// restoreHolder stores what a worker holds of the blocks behind begin.
func (x *Index) restoreHolder(begin place, blocks []Block, h Holder, out *Outcome) {
	who := ownerOf(h.Worker, h.Tier)
	o := x.make(who)
	held := blocks[h.Start : h.Start+len(h.Externals)]
	for i, e := range h.Externals {
		held[i].External = e
	}
	ev := Event{Blocks: held}
	x.hash(len(held), func(i int) uint64 { return held[i].External })
	if len(held) == 0 {
		return
	}
	if x.contradictory(&ev) || x.findAll(who, held) < len(held) {
		out.Conflict += len(held)
		return
	}
	if x.blocks.Load()+int64(len(held)) > int64(x.maxBlocks) || x.crowded(len(held)) {
		out.Refused += len(held)
		return
	}
	at := x.store(-1, begin, blocks[:h.Start], nil, nil)
	x.store(who, at, held, x.known, x.hashes)
	out.Stored += len(held)
	o.externals += len(held)
}
