// SPDX-License-Identifier: Apache-2.0

// Package indexer remembers which worker holds which KV-cache blocks.
//
// A block is a fixed number of consecutive tokens. Its local hash covers its own
// tokens; its sequence hash covers everything before it too, so equal sequence
// hashes mean equal prefixes. The tail that does not fill a block has no hash.
// Engines name blocks by ids of their own, the external hashes; they mean
// nothing to anyone but the worker that sent them.
//
// # What the index promises
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
//   - A block is in worker w's table of external hashes exactly if its node
//     counts at least one external hash for w, and as many as the table has.
//   - Every node but the root has a holder or a child.
//   - Blocks() is the sum of the nodes' holders.
//
// # Concurrency
//
// An [Index] may be used by any number of goroutines. A Match waits for at most
// the one event being applied.
package indexer

import (
	"slices"
	"sync"
)

// Config sizes an [Index]. The zero value of each field means its default.
type Config struct {
	// MaxBlocks bounds the (block, worker) pairs remembered. At the bound new
	// blocks are refused and counted in [Outcome.Refused]. Default 1<<24, about
	// 3 GB.
	MaxBlocks int
}

// Outcome counts what one event did, in blocks.
type Outcome struct {
	Stored    int // now held
	Removed   int // external hashes no longer held
	Duplicate int // stored again where they already were: nothing to do
	Conflict  int // stored under an external hash that already names another place: kept there
	Orphan    int // dropped, since the worker never announced their parent
	Unknown   int // removed without having been known
	Refused   int // dropped at MaxBlocks
	OtherTier int // dropped, since only blocks on the device are indexed
	Invalid   int // dropped, since the event contradicts itself or has no known kind
}

// Index maps chains of local hashes to the workers that hold them. Workers are
// numbers from 0, dense, handed out by the caller; before a number is used for
// another worker, [Index.RemoveWorker] must have been called for it.
type Index struct {
	maxBlocks int

	mu sync.RWMutex
	// mu guards the fields below.
	root    node
	workers []map[uint64]*node // by worker: external hash -> block
	blocks  int
}

// node is one block of a chain.
type node struct {
	local    uint64
	parent   *node // nil once the node has left the tree
	children map[uint64]*node
	holders  []holder
}

// holder is a worker that holds a node's block under count external hashes.
type holder struct {
	worker int32
	count  int32
}

// New returns an empty index.
func New(c Config) *Index {
	if c.MaxBlocks <= 0 {
		c.MaxBlocks = 1 << 24
	}
	return &Index{maxBlocks: c.MaxBlocks}
}

// Apply applies one event of a worker and tells what it did. The event's slices
// are not kept.
func (x *Index) Apply(worker int, ev Event) Outcome {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case worker < 0:
		return Outcome{Invalid: len(ev.Blocks) + len(ev.Externals)}
	case ev.Kind == Cleared:
		return Outcome{Removed: x.clearLocked(worker)}
	case ev.Tier != Device:
		return Outcome{OtherTier: len(ev.Blocks) + len(ev.Externals)}
	case ev.Kind == Stored:
		return x.storeLocked(worker, ev)
	case ev.Kind == Removed:
		return x.removeLocked(worker, ev.Externals)
	}
	return Outcome{Invalid: len(ev.Blocks) + len(ev.Externals)}
}

func (x *Index) storeLocked(worker int, ev Event) Outcome {
	if contradictory(ev) {
		return Outcome{Invalid: len(ev.Blocks)}
	}
	for len(x.workers) <= worker {
		x.workers = append(x.workers, nil)
	}
	held := x.workers[worker]
	at := &x.root
	if ev.HasParent {
		if at = held[ev.Parent]; at == nil {
			return Outcome{Orphan: len(ev.Blocks)}
		}
	}
	if held == nil {
		held = make(map[uint64]*node)
		x.workers[worker] = held
	}
	var out Outcome
	for i, b := range ev.Blocks {
		if known := held[b.External]; known != nil {
			if known.parent == at && known.local == b.Local {
				out.Duplicate++
			} else {
				out.Conflict++
			}
			// What follows was computed behind this block, wherever it is.
			at = known
			continue
		}
		if x.blocks >= x.maxBlocks {
			out.Refused += len(ev.Blocks) - i
			break
		}
		at = at.child(b.Local)
		held[b.External] = at
		if at.hold(int32(worker)) {
			x.blocks++
		}
		out.Stored++
	}
	return out
}

// contradictory reports whether a stored event names a block twice, or a block
// as its own parent.
func contradictory(ev Event) bool {
	if len(ev.Blocks) <= 16 {
		for i, b := range ev.Blocks {
			if ev.HasParent && b.External == ev.Parent {
				return true
			}
			for _, c := range ev.Blocks[:i] {
				if b.External == c.External {
					return true
				}
			}
		}
		return false
	}
	seen := make(map[uint64]struct{}, len(ev.Blocks)+1)
	if ev.HasParent {
		seen[ev.Parent] = struct{}{}
	}
	for _, b := range ev.Blocks {
		if _, twice := seen[b.External]; twice {
			return true
		}
		seen[b.External] = struct{}{}
	}
	return false
}

func (x *Index) removeLocked(worker int, externals []uint64) Outcome {
	var out Outcome
	var held map[uint64]*node
	if worker < len(x.workers) {
		held = x.workers[worker]
	}
	for _, e := range externals {
		n := held[e]
		if n == nil {
			out.Unknown++
			continue
		}
		delete(held, e)
		out.Removed++
		if n.release(int32(worker)) {
			x.blocks--
			n.prune()
		}
	}
	return out
}

// RemoveWorker forgets all that a worker holds. Its number may be used again.
func (x *Index) RemoveWorker(worker int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.clearLocked(worker)
}

func (x *Index) clearLocked(worker int) (removed int) {
	if worker >= len(x.workers) {
		return 0
	}
	held := x.workers[worker]
	x.workers[worker] = nil
	for _, n := range held {
		if n.release(int32(worker)) {
			x.blocks--
			n.prune()
		}
	}
	return len(held)
}

// Match counts, for each worker, how many leading blocks of the prompt with the
// given local hashes it holds: dst[w] is the count of worker w, and dst must be
// as long as the caller's largest worker number plus one. What dst held before
// is lost. Match does not allocate.
func (x *Index) Match(dst []int32, local []uint64) {
	clear(dst)
	x.mu.RLock()
	defer x.mu.RUnlock()
	n := &x.root
	for depth, h := range local {
		if n = n.children[h]; n == nil {
			return
		}
		alive := false
		for _, o := range n.holders {
			// A worker counts as long as it held every block so far.
			if int(o.worker) < len(dst) && int(dst[o.worker]) == depth {
				dst[o.worker]++
				alive = true
			}
		}
		if !alive {
			return
		}
	}
}

// Blocks returns the number of (block, worker) pairs remembered.
func (x *Index) Blocks() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.blocks
}

// WorkerBlocks returns the number of external hashes remembered of a worker.
func (x *Index) WorkerBlocks(worker int) int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if worker < 0 || worker >= len(x.workers) {
		return 0
	}
	return len(x.workers[worker])
}

func (n *node) child(local uint64) *node {
	if c := n.children[local]; c != nil {
		return c
	}
	c := &node{local: local, parent: n}
	if n.children == nil {
		n.children = make(map[uint64]*node, 1)
	}
	n.children[local] = c
	return c
}

// hold counts one more external hash of a worker and reports whether it is the
// worker's first.
func (n *node) hold(worker int32) bool {
	if i := n.holder(worker); i >= 0 {
		n.holders[i].count++
		return false
	}
	n.holders = append(n.holders, holder{worker: worker, count: 1})
	return true
}

// release takes back one external hash of a worker and reports whether none is left.
func (n *node) release(worker int32) bool {
	i := n.holder(worker)
	n.holders[i].count--
	if n.holders[i].count > 0 {
		return false
	}
	last := len(n.holders) - 1
	n.holders[i] = n.holders[last]
	n.holders = n.holders[:last]
	return true
}

func (n *node) holder(worker int32) int {
	return slices.IndexFunc(n.holders, func(h holder) bool { return h.worker == worker })
}

// prune removes n, and then each of its ancestors, while neither a worker nor a
// child keeps it.
func (n *node) prune() {
	for n.parent != nil && len(n.holders) == 0 && len(n.children) == 0 {
		parent := n.parent
		delete(parent.children, n.local)
		n.parent = nil
		n = parent
	}
}
