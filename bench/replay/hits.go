// SPDX-License-Identifier: Apache-2.0

package replay

// Hits are block hits of a trace without time, an upper bound for each rule.
type Hits struct {
	Blocks, Hit int // blocks of all requests, and those found
	// In tokens, those of the last block cut to the prompt.
	Tokens, HitTokens int
}

// HitRate plays the requests in their order against LRU caches of capacity blocks
// each, request i against cache i modulo workers. A request uses
// all its blocks, the tail is evicted first; hit are the leading blocks that were
// there before. Capacity 0 stands for no bound.
func (t *Trace) HitRate(workers, capacity int) (h Hits) {
	if capacity <= 0 {
		capacity = t.Distinct()
	}
	caches := make([]*cache, workers)
	for i := range caches {
		caches[i] = newCache(capacity, t.Distinct())
	}
	for i := range t.Requests {
		r, c := &t.Requests[i], caches[i%workers]
		hit := c.leading(r.Blocks)
		h.Blocks += len(r.Blocks)
		h.Hit += hit
		h.Tokens += r.Input
		h.HitTokens += min(hit*t.BlockSize, r.Input)
		c.acquire(r.Blocks)
		c.computed(r.Blocks)
		c.release(r.Blocks)
		c.trim(capacity)
	}
	return h
}
