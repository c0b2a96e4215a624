// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"slices"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/kvroute/kvroute/indexer"
)

// cache is a paged prefix cache: full blocks by sequence hash, counted references, and an LRU of
// unused blocks. publish is called with each change.
//
// vLLM computes the last block of a prompt of whole blocks each time, stores it in another place,
// and publishes each store. The places are evicted one by one, and the block is cached until its
// last place is evicted. With copies this cache does the same.
//
// Invariants:
//
//   - A block is in the LRU exactly if it has no references.
//   - cached blocks + copies + reserved ≤ capacity whenever that can be had by evicting.
//   - Events replayed give the set of blocks.
type cache struct {
	capacity int // blocks
	reserved int // blocks that running requests may still fill
	blocks   map[uint64]*block
	unused   *simplelru.LRU[uint64, *block]
	hash     blockHash
	publish  func(Change)

	copies bool
	spare  []*block // places of further copies of a block, the oldest first
}

type block struct {
	local    uint64
	id       blockID
	external uint64
	refs     int
}

// Change is a change of a cache.
type Change struct {
	indexer.Event
	// Tokens are the tokens of the stored blocks. LoRA and Salt are the adapter and the salt of
	// their request.
	Tokens     []uint32
	LoRA, Salt string
	// Copy means that the block has another copy, so the change does not affect whether it is
	// cached.
	Copy bool
}

func newCache(capacity int, hash blockHash, publish func(Change)) *cache {
	// The LRU's own limit is never reached, because evict removes blocks.
	unused, err := simplelru.NewLRU[uint64, *block](capacity+1, nil)
	if err != nil {
		panic(err) // capacity was checked
	}
	return &cache{capacity: capacity, blocks: make(map[uint64]*block), unused: unused, hash: hash, publish: publish}
}

// hit returns the number of leading blocks that are cached, and how many of those are unused.
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

// used returns the number of blocks that cannot be evicted.
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

// fill references the blocks of a prompt after the first have ones, and caches new ones. Each
// takes the place of a reserved block.
func (c *cache) fill(r *request, have int) {
	sequence := r.sequence
	ev := Change{Event: indexer.Event{Kind: indexer.Stored}, LoRA: r.keys.lora, Salt: r.keys.salt}
	flush := func() {
		if len(ev.Blocks) > 0 {
			c.publish(ev)
		}
		ev.Blocks, ev.Tokens = nil, nil
	}
	size := 0
	if len(sequence) > 0 {
		size = len(r.tokens) / len(sequence)
	}
	for i := have; i < len(sequence); i++ {
		h := sequence[i]
		c.reserved--
		var parent *block
		if i > 0 {
			parent = c.blocks[sequence[i-1]]
		}
		tokens := r.tokens[i*size : (i+1)*size]
		if b := c.blocks[h]; b != nil { // the whole prompt is cached, or another request stored the block
			flush()
			c.acquire(sequence[i : i+1])
			if c.copies {
				c.spare = append(c.spare, b)
				again := Change{Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: b.external, Local: b.local}}}, Tokens: tokens, LoRA: ev.LoRA, Salt: ev.Salt, Copy: true}
				if again.HasParent = parent != nil; parent != nil {
					again.Parent = parent.external
				}
				c.publish(again)
			}
			continue
		}
		b := &block{local: r.local[i], refs: 1}
		b.id, b.external = c.hash(parent, h, tokens, r.keys)
		c.blocks[h] = b
		if len(ev.Blocks) == 0 {
			if ev.HasParent, ev.Parent = parent != nil, 0; parent != nil {
				ev.Parent = parent.external
			}
		}
		ev.Tokens = append(ev.Tokens, tokens...)
		ev.Blocks = append(ev.Blocks, indexer.Block{External: b.external, Local: b.local})
	}
	flush()
}

// release removes references, from the last block on, so that the last block is evicted first.
func (c *cache) release(sequence []uint64) {
	for _, h := range slices.Backward(sequence) {
		b := c.blocks[h]
		if b.refs--; b.refs == 0 {
			c.unused.Add(h, b)
		}
	}
}

// evict evicts blocks until everything fits or no unused block is left.
func (c *cache) evict() {
	for len(c.spare) > 0 && len(c.blocks)+len(c.spare)+c.reserved > c.capacity {
		c.publish(Change{Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{c.spare[0].external}}, Copy: true})
		c.spare = c.spare[1:]
	}
	var ev Change
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

// reset empties the cache and publishes nothing. While blocks are in use it does nothing and
// returns false.
func (c *cache) reset() bool {
	if c.used() > 0 {
		return false
	}
	clear(c.blocks)
	c.unused.Purge()
	c.spare = nil
	return true
}
