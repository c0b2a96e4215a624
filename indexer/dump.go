// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"math/bits"
	"slices"
	"unsafe"
)

// Run is a piece of an index: consecutive blocks after the last block of another run,
// and the workers that hold some of them.
type Run struct {
	ID      uint32 // from 1, consecutive
	Parent  uint32 // an earlier run, or 0: the run begins a sequence
	Depth   int    // blocks of the sequence before this run
	Local   []uint64
	Holders []Holder
}

// Holder is a worker that holds, on a tier, len(Externals) blocks of a run from
// block Start on, under these external hashes. A worker with holes, or with several
// external hashes for a block, has several holders. Slices may be shared.
type Holder struct {
	Worker    int
	Tier      Tier
	Start     int
	Externals []uint64

	// Parent is an external hash of the last block of the run before, for a Start of 0:
	// on the same tier or, unless that is the device, on any. HasParent is false if the
	// worker does not hold that block there. [Restore] needs neither.
	Parent    uint64
	HasParent bool
}

// ErrOvertaken means that a dump was aborted: while it was read, the index changed more
// than [Config.DumpWords] allows to keep for it.
var ErrOvertaken = errors.New("indexer: the index changed faster than its dump was read")

// dump is a running dump. It walks over all nodes. Before a node changes that the walk
// has not reached, the change itself copies the node into the dump, after its parents.
//
// Invariants, while the dump is not aborted:
//
//   - A node that is not copied is as it was when the dump began. So are the nodes above
//     it; if one of those was copied and changed since, its former ends are in tails.
//   - Runs are yielded in the order of their numbers, a run after its parent.
//   - fill and tails together have at most limit words, plus one batch and one change.
type dump struct {
	id   uint32
	last uint32 // number of the last run
	fill batch  // copied, and not yielded
	// tails has the ends, when the dump began, of runs whose nodes changed since they
	// were copied: nodes after them may still be copied.
	tails map[uint32][]tail
	kept  int // words of tails
	limit int
	over  bool // the dump was aborted: limit was exceeded

	line    []*node  // reused by copyNode
	holders []Holder // reused by add
	ends    []tail   // reused by add
}

// tail is the last block of a run for an owner.
type tail struct {
	owner    int32
	external uint64
}

// batch is a list of runs and their memory, which is reused.
type batch struct {
	runs    []Run
	holders []Holder
	words   []uint64
	size    int // in words, roughly
}

func (b *batch) reset() {
	*b = batch{runs: b.runs[:0], holders: b.holders[:0], words: b.words[:0]}
}

// keep appends a copy of s to all, and returns the copy. Earlier copies stay valid when all moves.
func keep[T any](all *[]T, s []T) []T {
	from := len(*all)
	*all = append(*all, s...)
	return (*all)[from:len(*all):len(*all)]
}

const (
	// dumpBatch is how many words are copied at once: some 50 µs. The caller of a dump
	// may hold a lock until the dump has begun, so the first batches are smaller.
	dumpBatch = 1 << 14
	// runWords and holderWords are the words of a run and a holder without the hashes.
	runWords    = int(unsafe.Sizeof(Run{})) / 8
	holderWords = int(unsafe.Sizeof(Holder{})) / 8
)

// Dump yields the whole index, all workers together, as it is when the loop begins: the
// exact result of the events applied by then, and of no later ones. A run and its slices
// are valid until the next one.
//
// Events and matches continue meanwhile. An event waits for at most one batch of some 50
// µs, or for the copy of the longest sequence with all its holders. The first event that
// changes a node copies it. These copies take at most [Config.DumpWords] until the loop
// has read them; beyond that the dump ends with [ErrOvertaken]. Apart from the copies a
// dump takes less than 3 MB, however large the index is. A second dump waits for the
// first.
func (x *Index) Dump() iter.Seq2[Run, error] {
	return func(yield func(Run, error) bool) {
		x.dumping.Lock()
		defer x.dumping.Unlock()
		x.mu.Lock()
		x.dumps++
		d := &dump{id: x.dumps, limit: x.dumpWords, tails: make(map[uint32][]tail)}
		x.dump = d
		end := x.nodes.end()
		x.mu.Unlock()
		defer func() {
			x.mu.Lock()
			x.dump = nil
			x.mu.Unlock()
		}()
		var out batch
		for i, size, more := uint32(1), 1, true; more; size = min(2*size, dumpBatch) {
			out.reset()
			x.mu.Lock()
			for from := i; i < end && d.fill.size < size && i-from < dumpBatch; i++ {
				if n := x.nodes.at(i); n != nil && *n != nil {
					d.copyNode(&x.root, *n)
				}
			}
			more = i < end
			over := d.over
			out, d.fill = d.fill, out
			x.mu.Unlock()
			if over {
				yield(Run{}, ErrOvertaken)
				return
			}
			for _, r := range out.runs {
				if !yield(r, nil) {
					return
				}
			}
		}
	}
}

// DumpNow is [Index.Dump] of the moment when it is called. The runs can be read once.
// Stop must be called, whether they were read or not. Other dumps wait until stop is
// called or the runs have been read.
func (x *Index) DumpNow() (runs iter.Seq2[Run, error], stop func()) {
	next, stop := iter.Pull2(x.Dump())
	r, err, ok := next()
	return func(yield func(Run, error) bool) {
		for ; ok && yield(r, err); r, err, ok = next() {
			continue
		}
	}, stop
}

// preserve copies a node into a running dump, before the node changes.
func (x *Index) preserve(n *node) {
	d := x.dump
	if d == nil || n == &x.root {
		return
	}
	if n.dumped != d.id {
		d.copyNode(&x.root, n)
	}
	if n.kids.len() > 0 {
		if _, has := d.tails[n.number]; !has {
			ends := n.ends(nil)
			d.tails[n.number] = ends
			d.kept += len(ends)*int(unsafe.Sizeof(tail{}))/8 + runWords
		}
	}
	if d.fill.size+d.kept > d.limit {
		// The dump is aborted: its memory can be freed.
		*d = dump{id: d.id, over: true}
		x.dump = nil
	}
}

// copyNode copies a node after the nodes above it, each unless it is copied already.
func (d *dump) copyNode(root, n *node) {
	d.line = d.line[:0]
	for ; n != root && n.dumped != d.id; n = n.parent {
		d.line = append(d.line, n)
	}
	depth := 0
	for p := n; p != root; p = p.parent {
		depth += len(p.local)
	}
	for _, n := range slices.Backward(d.line) {
		d.last++
		n.dumped, n.number = d.id, d.last
		d.add(root, n, depth)
		depth += len(n.local)
	}
}

// add adds a node to the next batch. If the nodes above it were split since they were
// copied, that changes neither its depth nor the owners of the block before it.
func (d *dump) add(root, n *node, depth int) {
	b := &d.fill
	r := Run{ID: n.number, Depth: depth, Local: keep(&b.words, n.local)}
	words := runWords + len(n.local)
	var before []tail
	if n.parent != root {
		r.Parent = n.parent.number
		var changed bool
		if before, changed = d.tails[r.Parent]; !changed {
			d.ends = n.parent.ends(d.ends[:0])
			before = d.ends
		}
	}
	d.holders = d.holders[:0]
	var main Holder // of the workers that hold all by the main column
	piece := func(w int32, c *column, cells uint64) {
		for cells != 0 {
			from := bits.TrailingZeros64(cells)
			length := bits.TrailingZeros64(^(cells >> from))
			cells &^= ones(length) << from
			h := Holder{Worker: int(w & maxWorker), Tier: Tier(w >> tierShift), Start: from - int(n.shift)}
			if all := c == n.main && length == len(n.local); all && main.Externals != nil {
				h.Externals = main.Externals
			} else {
				at := from - int(c.base)
				h.Externals = keep(&b.words, c.ext[at:at+length])
				words += length
				if all {
					main = h
				}
			}
			if h.Start == 0 {
				h.Parent, h.HasParent = parentIn(before, w)
			}
			words += holderWords
			d.holders = append(d.holders, h)
		}
	}
	holder := func(w int32, cells uint64) {
		_, own := n.listings(w)
		if own == nil {
			piece(w, n.main, cells)
		}
		for _, o := range own {
			piece(w, o.column, o.cells)
		}
	}
	for w := range n.full.all() {
		holder(w, n.all())
	}
	for _, p := range n.part {
		holder(p.owner, p.cells)
	}
	r.Holders = keep(&b.holders, d.holders)
	b.runs = append(b.runs, r)
	b.size += words
}

// ends appends the owners that hold the node's last block to a list, by owner.
func (n *node) ends(ends []tail) []tail {
	last := len(n.local) - 1
	for w := range n.full.all() {
		ends = append(ends, tail{w, n.external(w, last)})
	}
	for _, p := range n.part {
		if p.cells>>(last+int(n.shift))&1 != 0 {
			ends = append(ends, tail{p.owner, n.external(p.owner, last)})
		}
	}
	slices.SortFunc(ends, func(a, b tail) int { return cmp.Compare(a.owner, b.owner) })
	return ends
}

// parentIn returns a hash of the previous block that may be the parent of an owner's
// blocks, given the owners that hold the previous block.
func parentIn(before []tail, owner int32) (external uint64, ok bool) {
	for w := range parents(owner) {
		if i, ok := slices.BinarySearchFunc(before, w, func(t tail, w int32) int { return cmp.Compare(t.owner, w) }); ok {
			return before[i].external, true
		}
	}
	return 0, false
}

// parents yields the owners whose blocks may be the parent of an owner's blocks, the
// owner itself first. On the device, only a block on the device can be a parent.
func parents(owner int32) iter.Seq[int32] {
	return func(yield func(int32) bool) {
		if !yield(owner) || owner <= maxWorker {
			return
		}
		for t := Device; t <= External; t++ {
			if w := ownerOf(int(owner&maxWorker), t); w != owner && !yield(w) {
				return
			}
		}
	}
}

// ErrDump means that runs are not a valid dump of an index.
var ErrDump = errors.New("indexer: not a dump of an index")

// Restore makes an index from the runs of a dump. The outcome counts external hashes:
// hashes above the limit are refused, and a worker's second use of a hash is a conflict.
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
			x.tidy(*n) // a run without holders
		}
	}
	x.applyPending()
	return x, out, nil
}

// lastCell is the cell of a restored run's last block. The node may be split before the
// cell is read; the root, of cell -1, is not split.
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
		return fmt.Errorf("%w: run %d of %d blocks behind run %d, want run %d", ErrDump, r.ID, len(r.Local),
			r.Parent, len(*ends))
	}
	blocks := make([]Block, len(r.Local))
	for i, l := range r.Local {
		blocks[i].Local = l
	}
	before := (*ends)[r.Parent]
	end := x.store(-1, before.place(), blocks, nil, nil)
	*ends = append(*ends, lastCell{end.n, end.block + int(end.n.shift)})
	for _, h := range r.Holders {
		if h.Worker < 0 || h.Worker > maxWorker || h.Tier > External || h.Start < 0 || h.Start > len(r.Local)-len(h.Externals) {
			return fmt.Errorf("%w: run %d, worker %d holds %d blocks from %d on, on tier %d", ErrDump, r.ID, h.Worker,
				len(h.Externals), h.Start, h.Tier)
		}
		x.restoreHolder(before.place(), blocks, h, out)
		x.applyPending()
	}
	return nil
}

// restoreHolder stores the blocks of a worker behind begin.
func (x *Index) restoreHolder(begin place, blocks []Block, h Holder, out *Outcome) {
	owner := ownerOf(h.Worker, h.Tier)
	o := x.make(owner)
	held := blocks[h.Start : h.Start+len(h.Externals)]
	for i, e := range h.Externals {
		held[i].External = e
	}
	ev := Event{Blocks: held}
	x.hash(len(held), func(i int) uint64 { return held[i].External })
	if len(held) == 0 {
		return
	}
	if x.contradictory(&ev) || x.findAll(owner, held) < len(held) {
		out.Conflict += len(held)
		return
	}
	if x.blocks.Load()+int64(len(held)) > int64(x.maxBlocks) || x.crowded(len(held)) {
		out.Refused += len(held)
		return
	}
	at := x.store(-1, begin, blocks[:h.Start], nil, nil)
	x.store(owner, at, held, x.known, x.hashes)
	out.Stored += len(held)
	o.externals += len(held)
}
