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
	hybrid   *hybrid // nil: the model has full attention only

	copies bool
	spare  []*block // places of further copies of a block, the oldest first
}

type block struct {
	indexer.Block

	id    blockID
	refs  int
	group int // 0 = full attention
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
	// Spec is vLLM's name of the kind of a hybrid model's group, Window the size of its window.
	Spec   string
	Window int
}

// prefix is the part of a prompt that can be cached: its full blocks.
type prefix struct {
	size            int      // tokens in a block
	tokens          []uint32 // of the full blocks
	keys            keys
	local, sequence []uint64 // the router's hashes of the blocks
}

func newPrefix(tokens []uint32, size int, k keys) prefix {
	local := indexer.AppendLocalHashes(nil, tokens, size, indexer.Seed(k.lora, k.salt))
	return prefix{size, tokens[:len(local)*size], k, local, indexer.AppendSequenceHashes(nil, local)}
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

// fill references the blocks of a prompt from number have up to number end, and caches new ones.
// Each takes the place of a reserved block. Consecutive new blocks are published together.
func (c *cache) fill(p *prefix, have, end int) {
	var fresh Change
	publish := func() {
		if len(fresh.Blocks) > 0 {
			c.publish(fresh)
		}
		fresh = Change{}
	}
	var parent *block
	if have > 0 {
		parent = c.blocks[p.sequence[have-1]]
	}
	for i := have; i < end; i++ {
		h, last := p.sequence[i], (i+1)*p.size
		stored := Change{
			Event: indexer.Event{Kind: indexer.Stored}, Tokens: p.tokens[last-p.size : last : last],
			LoRA: p.keys.lora, Salt: p.keys.salt, Spec: c.hybrid.spec(0),
		}
		var above *blockID
		if parent != nil {
			stored.HasParent, stored.Parent, above = true, parent.External, &parent.id
		}
		c.reserved--
		b := c.blocks[h]
		isNew := b == nil
		if isNew {
			b = &block{refs: 1}
			b.Local = p.local[i]
			b.id, b.External = c.hash(above, h, stored.Tokens, p.keys)
			c.blocks[h] = b
		} else { // the whole prompt is cached, or another request stored the block
			publish()
			c.acquire(p.sequence[i : i+1])
		}
		stored.Blocks = []indexer.Block{b.Block}
		switch {
		case !isNew && c.copies:
			c.spare = append(c.spare, b)
			stored.Copy = true
			c.publish(stored)
		case !isNew:
		case len(fresh.Blocks) == 0:
			fresh = stored
		default:
			fresh.Blocks, fresh.Tokens = append(fresh.Blocks, b.Block), append(fresh.Tokens, stored.Tokens...)
		}
		parent = b
	}
	publish()
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
		ev := c.removed(c.spare[0])
		ev.Copy = ev.Group == 0 // the index counts the copies of side groups
		c.publish(ev)
		c.spare = c.spare[1:]
	}
	var ev Change
	for len(c.blocks)+c.reserved > c.capacity {
		h, b, ok := c.unused.RemoveOldest()
		if !ok {
			break
		}
		delete(c.blocks, h)
		next := c.removed(b)
		if ev.Group == next.Group {
			next.Externals = append(ev.Externals, next.Externals...)
		} else if len(ev.Externals) > 0 {
			c.publish(ev)
		}
		ev = next
	}
	if len(ev.Externals) > 0 {
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
