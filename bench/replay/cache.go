// SPDX-License-Identifier: Apache-2.0

package replay

import "slices"

// cache is the KV cache of an engine: blocks that running requests refer to, and
// cached ones without references, which are evicted in the order of their last use.
//
// # Invariants
//
//   - A block is in the list of the unused exactly if it is cached and has no
//     references.
//   - live is the number of blocks with references, cached that of the cached ones.
//   - A request acquires a block together with its whole prefix and releases them in
//     reverse order, so a block is never evicted before one that follows it.
type cache struct {
	capacity int
	pages    [][]cacheBlock // by number / pageBlocks; nil where nothing was ever held
	live     int
	reserved int // blocks kept for output
	cached   int
	// The unused blocks, by when they were released; none if empty.
	oldest, newest int32

	evicted []int32 // by the last call of trim
}

type cacheBlock struct {
	older, newer int32
	refs         int32
	cached       bool
}

const (
	none       = int32(-1)
	pageBlocks = 256
)

func newCache(capacity, distinct int) *cache {
	return &cache{capacity: capacity, pages: make([][]cacheBlock, (distinct+pageBlocks-1)/pageBlocks), oldest: none, newest: none}
}

func (c *cache) block(n int32) *cacheBlock {
	p := c.pages[n/pageBlocks]
	if p == nil {
		p = make([]cacheBlock, pageBlocks)
		c.pages[n/pageBlocks] = p
	}
	return &p[n%pageBlocks]
}

// leading returns how many of the leading blocks are cached.
func (c *cache) leading(blocks []int32) int {
	for i, n := range blocks {
		if p := c.pages[n/pageBlocks]; p == nil || !p[n%pageBlocks].cached {
			return i
		}
	}
	return len(blocks)
}

// missing returns how many of the blocks have no references.
func (c *cache) missing(blocks []int32) (n int) {
	for _, b := range blocks {
		if p := c.pages[b/pageBlocks]; p == nil || p[b%pageBlocks].refs == 0 {
			n++
		}
	}
	return n
}

// acquire refers to the blocks.
func (c *cache) acquire(blocks []int32) {
	for _, n := range blocks {
		b := c.block(n)
		if b.refs == 0 {
			c.live++
			if b.cached {
				c.unlink(b)
			}
		}
		b.refs++
	}
}

// computed notes that acquired blocks are cached now and returns how many of the
// leading ones were before.
func (c *cache) computed(blocks []int32) (known int) {
	known = c.leading(blocks)
	for _, n := range blocks[known:] {
		b := c.block(n)
		if !b.cached {
			b.cached = true
			c.cached++
		}
	}
	return known
}

// release gives acquired blocks back, the last one first.
func (c *cache) release(blocks []int32) {
	for _, n := range slices.Backward(blocks) {
		b := c.block(n)
		if b.refs--; b.refs > 0 {
			continue
		}
		c.live--
		if b.cached {
			c.link(n, b)
		}
	}
}

// trim evicts unused blocks until at most want blocks are cached. Their numbers are in
// c.evicted until the next call.
func (c *cache) trim(want int) {
	c.evicted = c.evicted[:0]
	for c.cached > want && c.oldest != none {
		n := c.oldest
		b := c.block(n)
		c.unlink(b)
		b.cached = false
		c.cached--
		c.evicted = append(c.evicted, n)
	}
}

func (c *cache) link(n int32, b *cacheBlock) {
	b.older, b.newer = c.newest, none
	if c.newest != none {
		c.block(c.newest).newer = n
	} else {
		c.oldest = n
	}
	c.newest = n
}

func (c *cache) unlink(b *cacheBlock) {
	if b.older != none {
		c.block(b.older).newer = b.newer
	} else {
		c.oldest = b.newer
	}
	if b.newer != none {
		c.block(b.newer).older = b.older
	} else {
		c.newest = b.older
	}
}
