// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"slices"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/kvroute/kvroute/indexer"
)

// cache is a paged prefix cache: full blocks by sequence hash, counted references,
// and an LRU of those that nobody uses. What happens to blocks is said to publish.
//
// Invariants:
//
//   - A block is in the LRU exactly if it has no references.
//   - cached blocks + reserved ≤ capacity whenever that can be had by evicting.
//   - Events replayed give the set of blocks.
type cache struct {
	capacity int // blocks
	reserved int // blocks that running requests may still fill
	blocks   map[uint64]*block
	unused   *simplelru.LRU[uint64, *block]
	publish  func(indexer.Event)
}

type block struct {
	local, external uint64
	refs            int
}

// externalSalt makes the engine's own block hashes differ from the router's, as
// they do in real engines.
const externalSalt = 0x656e67696e65

func external(sequence uint64) uint64 { return indexer.NextSequenceHash(sequence, externalSalt) }

func newCache(capacity int, publish func(indexer.Event)) *cache {
	// The LRU's own bound is never reached: eviction is our decision.
	unused, err := simplelru.NewLRU[uint64, *block](capacity+1, nil)
	if err != nil {
		panic(err) // capacity was checked
	}
	return &cache{capacity: capacity, blocks: make(map[uint64]*block), unused: unused, publish: publish}
}

// hit counts the leading blocks that are cached, and how many of those nobody uses.
func (c *cache) hit(sequence []uint64) (blocks, unused int) {
	for _, h := range sequence {
		b := c.blocks[h]
		if b == nil {
			break
		}
		blocks++
		if b.refs == 0 {
			unused++
		}
	}
	return blocks, unused
}

// used counts blocks that cannot be evicted.
func (c *cache) used() int { return len(c.blocks) - c.unused.Len() + c.reserved }

// acquire references cached blocks.
func (c *cache) acquire(sequence []uint64) {
	for _, h := range sequence {
		b := c.blocks[h]
		if b.refs == 0 {
			c.unused.Remove(h)
		}
		b.refs++
	}
}

// fill references all of a prompt's blocks behind those that it has already, and
// caches the ones that are new. Each takes the place of a reserved one.
func (c *cache) fill(local, sequence []uint64, have int) {
	ev := indexer.Event{Kind: indexer.Stored}
	flush := func() {
		if len(ev.Blocks) > 0 {
			c.publish(ev)
		}
		ev.Blocks = nil
	}
	for i := have; i < len(sequence); i++ {
		h := sequence[i]
		c.reserved--
		if c.blocks[h] != nil { // another request was faster
			flush()
			c.acquire(sequence[i : i+1])
			continue
		}
		b := &block{local: local[i], external: external(h), refs: 1}
		c.blocks[h] = b
		if len(ev.Blocks) == 0 {
			ev.HasParent = i > 0
			ev.Parent = 0
			if i > 0 {
				ev.Parent = external(sequence[i-1])
			}
		}
		ev.Blocks = append(ev.Blocks, indexer.Block{External: b.external, Local: b.local})
	}
	flush()
}

// release gives references back, the tail first, so that it is evicted first.
func (c *cache) release(sequence []uint64) {
	for _, h := range slices.Backward(sequence) {
		b := c.blocks[h]
		if b.refs--; b.refs == 0 {
			c.unused.Add(h, b)
		}
	}
}

// evict makes room until everything fits or nothing unused is left.
func (c *cache) evict() {
	var ev indexer.Event
	for len(c.blocks)+c.reserved > c.capacity {
		h, b, ok := c.unused.RemoveOldest()
		if !ok {
			break
		}
		delete(c.blocks, h)
		ev.Externals = append(ev.Externals, b.external)
	}
	if len(ev.Externals) > 0 {
		ev.Kind = indexer.Removed
		c.publish(ev)
	}
}

// reset empties the cache. It returns false, and does nothing, while blocks are in
// use.
func (c *cache) reset() bool {
	if c.used() > 0 {
		return false
	}
	clear(c.blocks)
	c.unused.Purge()
	c.publish(indexer.Event{Kind: indexer.Cleared})
	return true
}
