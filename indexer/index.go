// SPDX-License-Identifier: Apache-2.0

// Package indexer remembers which worker holds which KV-cache blocks.
//
// A block is a fixed number of consecutive tokens. Its local hash covers its own
// tokens; its sequence hash covers everything before it too, so equal sequence
// hashes mean equal prefixes. The tail that does not fill a block has no hash.
// Engines name blocks by ids of their own, the external hashes; they mean
// nothing to anyone but the worker that sent them.
//
// # Guarantees
//
// After any sequence of events the blocks of a worker are exactly those that it
// stored and has not removed, each at the place in its chain where it was stored:
// nothing is guessed. A worker's overlap with a prompt is the number of leading
// blocks that it holds; a hole ends the count, and what lies behind the hole
// counts again when the hole is filled.
//
// The index does not order events, and it knows neither addresses nor models:
// workers are small numbers that the caller hands out, and events reach it in
// the order in which they happened.
//
// # Invariants
//
//   - An owner is a worker's cache on one tier. It holds a block exactly if a live cell of one of
//     its columns stands for the block. A cell is live exactly if an owner uses it.
//   - The table has one entry for each live cell. An external hash has at most one shared entry,
//     and at most one private entry for each owner. So finding a hash takes two searches,
//     however many owners use it.
//   - Every node but the root has a holder or a child.
//   - Blocks() is the sum of the nodes' holders, and never above a bound.
//   - When a bound evicts blocks of a worker, these are ends of its chains.
//
// # Concurrency
//
// An [Index] may be used by any number of goroutines. A Match waits for at most
// the one event being applied.
package indexer

import (
	"iter"
	"sync"
	"sync/atomic"
)

// Config sizes an [Index]. The zero value of each field means its default.
type Config struct {
	// MaxBlocks limits the (block, owner) pairs in the index; an owner is a worker's
	// cache on one tier. At the limit the index removes the ends of the chains that were
	// matched or stored least recently. bench/README.md has the memory for each pair.
	// Default 1<<24: 500 MB if no blocks are shared, less if many are, up to 4 GB if
	// sequences have, or are left with, a single block. See also [Index.SetLimit]. Blocks of side groups are counted
	// apart, at 32 to 45 bytes each: at most MaxBlocks, and 2,097,152 of one worker. Further ones are refused.
	MaxBlocks int

	// DumpWords limits the memory for changes during a running dump, in words of 8 bytes;
	// see [Index.Dump]. Default 1<<23, 64 MB.
	DumpWords int
}

// Outcome counts the results of one event, in blocks.
type Outcome struct {
	Stored    int // now held
	Removed   int // external hashes no longer held
	Duplicate int // stored again in the same place: no change
	Conflict  int // stored under an external hash of another place: that place is kept
	Orphan    int // dropped, since their parent is unknown
	Parked    int // wait for their parent (see [Parked])
	Unknown   int // removed, but not in the index
	Evicted   int // (block, owner) pairs removed for lack of room: of any worker at MaxBlocks, of this one at its limit
	Refused   int // dropped, since they alone exceed a limit
	OtherTier int // those of Stored that are not on the device
	Invalid   int // dropped, since the event contradicts itself or has an unknown kind
}

// Index maps chains of local hashes to the workers that hold them. Workers are dense
// numbers from 0 that the caller assigns. Before a number is used for another worker,
// [Index.RemoveWorker] must have been called for it.
type Index struct {
	maxBlocks int
	dumpWords int

	// gate is read-locked by matches, and locked by changes of the tree.
	gate  sync.RWMutex
	clock atomic.Uint64 // numbers the matches

	// mu is locked before gate, by all methods except matches. It guards the fields
	// below; those of the tree change only under gate, too.
	mu      sync.Mutex
	root    node
	columns pages[column]
	table   table
	held    [tiers][]holdings // by tier and worker
	nodes   pages[*node]
	leaves  leaves
	dump    *dump // the running dump, or nil
	dumps   uint32
	blocks  atomic.Int64
	lower   atomic.Int64 // pairs that are not on the device
	sides   []*sides     // by worker; nil for all but hybrid ones
	shaped  atomic.Bool  // sides has had an entry

	sideEntries int // see sides
	sideLimit   int

	dumping sync.Mutex // held during a dump, before mu

	// Scratch memory of one event.
	known       []cell // of each block
	view        view
	hashes      []uint64
	seen        []int32
	pending     []entry // in order; see pendingRemovals
	dropped     bool    // a column that pending may name was dropped
	ends        []int32
	maybeUnused []*column // shared columns that an owner no longer uses; see endUnused
}

// holdings is the state of an owner outside the tree.
type holdings struct {
	externals int
	private   int      // number of externals in private columns
	nodes     int      // number of nodes in which the owner holds something
	log       []uint32 // ids of those nodes, and of some former ones
	limit     int      // limit of externals; 0 means no limit
	truncated bool     // a limit has removed blocks of the owner

	// near and cell are the place of the block that was removed last: engines remove
	// neighbours one after the other.
	cell uint8
	near uint32 // a column id, which may be reused by now; 0 means none
}

// An owner is a worker's cache on one tier. Its number is the worker's, with the
// tier above: on the device it is the worker's.
const (
	tiers     = int(External) + 1
	tierShift = 20
	// maxWorker bounds the memory that a worker number which is not dense could take.
	maxWorker = 1<<tierShift - 1
)

func ownerOf(worker int, t Tier) int32 { return int32(t)<<tierShift | int32(worker) }

// owners yields the owners of a worker's caches that have holdings, the device's first. It yields
// none for a number out of range.
func (x *Index) owners(worker int) iter.Seq2[int32, *holdings] {
	return func(yield func(int32, *holdings) bool) {
		for t := Device; t <= External && 0 <= worker && worker <= maxWorker; t++ {
			if owner := ownerOf(worker, t); x.has(owner) && !yield(owner, x.of(owner)) {
				return
			}
		}
	}
}

// of returns an owner's holdings, which must have been made.
func (x *Index) of(owner int32) *holdings { return &x.held[owner>>tierShift][owner&maxWorker] }

// make returns an owner's holdings.
func (x *Index) make(owner int32) *holdings {
	list := &x.held[owner>>tierShift]
	for len(*list) <= int(owner&maxWorker) {
		*list = append(*list, holdings{})
	}
	return x.of(owner)
}

// has reports whether there are holdings of an owner.
func (x *Index) has(owner int32) bool { return int(owner&maxWorker) < len(x.held[owner>>tierShift]) }

// count adds to the number of blocks of an owner.
func (x *Index) count(owner int32, blocks int) {
	x.blocks.Add(int64(blocks))
	if owner > maxWorker {
		x.lower.Add(int64(blocks))
	}
}

// cell is the place of an external hash. Its column is nil if the hash was not found.
type cell struct {
	column *column
	cell   int32
	mine   bool // the owner of the search holds the block by this cell
}

// entry is a change of the table that is made after gate is unlocked.
type entry struct {
	hash   uint64
	column uint32
	cell   uint8
	remove bool
}

// place is a block of the tree: block number block of node n. Number -1 is the place
// before the node's first block.
type place struct {
	n     *node
	block int
}

// New returns an empty index.
func New(c Config) *Index {
	if c.MaxBlocks <= 0 {
		c.MaxBlocks = 1 << 24
	}
	if c.DumpWords <= 0 {
		c.DumpWords = 1 << 23
	}
	return &Index{maxBlocks: c.MaxBlocks, dumpWords: c.DumpWords, sideLimit: maxSideBlocks}
}

// Apply applies one event of a worker and returns its outcome. The event's slices are not
// retained. A Cleared event clears all tiers. The parent of blocks stored on another tier
// than the device may be on any of the worker's tiers.
func (x *Index) Apply(worker int, ev Event) Outcome {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case worker < 0 || worker > maxWorker || ev.Tier > External:
	case ev.Kind == Cleared:
		return Outcome{Removed: x.clearLocked(worker)}
	case ev.Kind > Cleared:
		return x.applySide(worker, &ev)
	case ev.Kind == Stored:
		return x.storeLocked(ownerOf(worker, ev.Tier), &ev)
	case ev.Kind == Removed:
		return x.removeLocked(ownerOf(worker, ev.Tier), ev.Externals)
	}
	return Outcome{Invalid: len(ev.Blocks) + len(ev.Externals)}
}

// applySide applies an event of a hybrid model.
func (x *Index) applySide(worker int, ev *Event) Outcome {
	switch {
	case ev.Tier != Device:
	case ev.Kind == Shaped && x.shape(worker, ev.Shape):
		return Outcome{}
	case ev.Kind == Shaped:
		return Outcome{Refused: 1}
	case ev.Kind == SideStored:
		return x.storeSides(worker, ev)
	case ev.Kind == SideRemoved:
		return x.removeSides(worker, ev)
	}
	return Outcome{Invalid: len(ev.Blocks) + len(ev.Externals)}
}

func (x *Index) storeLocked(owner int32, ev *Event) (out Outcome) {
	h := x.make(owner)
	x.hash(len(ev.Blocks), func(i int) uint64 { return ev.Blocks[i].External })
	if x.contradictory(ev) {
		return Outcome{Invalid: len(ev.Blocks)}
	}
	at := place{&x.root, -1}
	if ev.HasParent {
		parent := x.parent(owner, ev.Parent)
		if !parent.mine {
			return Outcome{Orphan: len(ev.Blocks)}
		}
		at = parent.place()
	}
	unknown := x.findAll(owner, ev.Blocks)
	if h.limit > 0 && h.externals+unknown > h.limit {
		out.Evicted = x.shrink(owner, unknown, at.n)
		x.findAll(owner, ev.Blocks)
	}
	if x.blocks.Load()+int64(unknown) > int64(x.maxBlocks) || x.crowded(unknown) {
		out.Evicted += x.makeRoom(unknown, at.n)
		x.findAll(owner, ev.Blocks)
	}

	x.gate.Lock()
	for i := 0; i < len(ev.Blocks); {
		if k := x.known[i]; k.mine {
			p := k.place()
			if p.before() == at && p.n.local[p.block] == ev.Blocks[i].Local {
				out.Duplicate++
			} else {
				out.Conflict++
			}
			// The next blocks follow this one, wherever it is.
			at = p
			i++
			continue
		}
		to := i + 1
		for to < len(ev.Blocks) && !x.known[to].mine {
			to++
		}
		// Blocks held under another external hash need no room.
		for i < to {
			room := x.maxBlocks - int(x.blocks.Load())
			if h.limit > 0 {
				room = min(room, h.limit-h.externals)
			}
			if room <= 0 || x.crowded(to-i) {
				out.Refused += len(ev.Blocks) - i
				i = len(ev.Blocks)
				break
			}
			n := min(room, to-i)
			at = x.store(owner, at, ev.Blocks[i:i+n], x.known[i:i+n], x.hashes[i:i+n])
			out.Stored += n
			h.externals += n
			i += n
		}
	}
	at.n.used.Store(x.clock.Add(1))
	x.gate.Unlock()
	x.applyPending()
	x.tidyLog(owner)
	if owner > maxWorker {
		out.OtherTier = out.Stored
	}
	return out
}

// removeLocked removes an owner's external hashes.
func (x *Index) removeLocked(owner int32, externals []uint64) (out Outcome) {
	if !x.has(owner) || len(externals) == 0 {
		return Outcome{Unknown: len(externals)}
	}
	h := x.of(owner)
	x.hash(len(externals), func(i int) uint64 { return externals[i] })
	k := x.lastRemoved(owner, h, externals)
	near := k.column != nil
	if !near && len(externals) > 1 { // for one hash the search itself is as fast
		x.touchRemoved()
	}
	x.known, x.view = x.known[:0], view{}
	for i, e := range externals {
		k = x.find(owner, e, x.hashes[i], k)
		x.known = append(x.known, k)
	}
	if k.mine {
		h.near, h.cell = k.column.id, uint8(k.cell)
		x.table.touched += k.column.node.touch()
	}
	x.gate.Lock()
	for i := 0; i < len(externals); {
		n := x.release(owner, i)
		out.Removed += n
		if i += n; n == 0 {
			out.Unknown++
			i++
		}
	}
	x.gate.Unlock()
	h.externals -= out.Removed
	if !near || len(x.pending) >= pendingRemovals || x.dropped {
		if near || len(x.pending) > out.Removed {
			x.table.touch(len(x.pending), func(i int) uint64 { return x.pending[i].hash })
		}
		x.applyPending()
	}
	x.tidyLog(owner)
	return out
}

// RemoveWorker removes all blocks of a worker, and its limit. Its number may be used
// again.
func (x *Index) RemoveWorker(worker int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.clearLocked(worker)
	for _, h := range x.owners(worker) {
		h.limit = 0
	}
}

// clearLocked lets matches run in between, so a match may see some of the blocks removed
// and others not yet.
func (x *Index) clearLocked(worker int) (removed int) {
	const atOnce = 16 // nodes; some 10 µs
	x.dropSides(worker)
	for owner, h := range x.owners(worker) {
		log := h.log
		h.log = nil
		removed += h.externals
		// Once the tree is empty the rest of the log is outdated.
		for len(log) > 0 && x.blocks.Load() > 0 {
			part := log[:min(atOnce, len(log))]
			log = log[len(part):]
			x.gate.Lock()
			for _, id := range part {
				if n := x.nodes.at(id); n != nil && *n != nil {
					x.leave(owner, *n, (*n).all())
				}
			}
			x.gate.Unlock()
			x.applyPending()
		}
		*h = holdings{limit: h.limit}
	}
	return removed
}

// SetLimit limits the worker's blocks on the device to the size of its cache. At the
// limit the ends of its chains that were matched or stored least recently are removed. It
// returns how many blocks were removed now. 0 means no limit for this worker.
func (x *Index) SetLimit(worker, blocks int) (evicted int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if worker < 0 || worker > maxWorker {
		return 0
	}
	owner := int32(worker)
	h := x.make(owner)
	if h.limit = max(blocks, 0); h.limit > 0 && h.externals > h.limit {
		x.known = x.known[:0]
		evicted = x.shrink(owner, 0, &x.root)
	}
	return evicted
}

// Truncated reports whether a limit has removed blocks of a worker since it was last
// cleared. If so, events may contain unknown blocks, as parents or as removed ones,
// although no event was lost.
func (x *Index) Truncated(worker int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, h := range x.owners(worker) {
		if h.truncated {
			return true
		}
	}
	return false
}

// Blocks returns the number of (block, owner) pairs in the index.
func (x *Index) Blocks() int { return int(x.blocks.Load()) }

// WorkerBlocks returns the number of a worker's external hashes in the index, on all
// tiers.
func (x *Index) WorkerBlocks(worker int) (n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, h := range x.owners(worker) {
		n += h.externals
	}
	return n
}
