// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"context"
	"hash/maphash"
	"slices"
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// cacheStep is the length in bytes of the text that one entry of a [Cache] covers: about 450 ids of
// English or code. Smaller steps save less text than their entries cost.
const cacheStep = 2 << 10

// chunkCost is the memory of an entry in bytes without its ids: the chunk, the key twice, and the
// links of the list and the map.
const chunkCost = 256

// Cache keeps the ids of text prefixes, and the messages at the beginning of request bodies.
//
// If the first n·2 KiB of a text were encoded before, encoding
// it costs a hash of these and the encoding of the rest. The ids are always those of
// [Tokenizer.Append]: an entry holds only ids that do not depend on the text behind it. Texts with
// equal prefixes share entries. The same holds for lists of messages; see [Cache.Messages].
//
// Any number of goroutines may use one Cache, with any number of tokenizers.
type Cache struct {
	seeds [2]maphash.Seed
	limit int
	step  int

	mu    sync.Mutex
	lru   *simplelru.LRU[cacheKey, entry]
	bytes int
}

// cacheKey identifies a tokenizer, the treatment of special tokens, and the first n·2 KiB of a text; or
// the first n·2 KiB of a list of messages.
// Its hash has seeds of this process, so nobody outside can make two texts collide.
type cacheKey [2]uint64

// entry is immutable. cost returns its memory in bytes.
type entry interface{ cost() int }

// chunk holds the ids that the last step of a prefix adds. Where encoding can go on also depends on the text
// behind the step, so chunks of two texts may not fit together.
type chunk struct {
	ids         []uint32
	after, from resume // where the ids begin and end
}

// NewCache returns a cache of about limit bytes. It covers about half as many bytes of chats: an id stands
// for about four bytes and takes four, and the text of messages takes as much.
func NewCache(limit int) *Cache {
	c := &Cache{seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}, limit: limit, step: cacheStep}
	var err error
	c.lru, err = simplelru.NewLRU(max(1, limit/chunkCost), func(_ cacheKey, old entry) { c.bytes -= old.cost() })
	if err != nil {
		panic(err) // a size below 1
	}
	return c
}

// Bytes returns the memory of all entries in bytes.
func (c *Cache) Bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

// Append is t.Append with the ids of known prefixes copied. reused is the number of bytes of text
// whose ids were copied.
func (c *Cache) Append(ctx context.Context, dst []uint32, t *Tokenizer, text []byte, special bool) (ids []uint32, reused int, err error) {
	return c.append(ctx, dst, t, text, formOf(special))
}

func (c *Cache) append(ctx context.Context, dst []uint32, t *Tokenizer, text []byte, f form) (ids []uint32, reused int, err error) {
	if len(text) < c.step {
		ids, err = t.encode(ctx, dst, text, f, nil)
		return ids, 0, err
	}
	var buf [64]cacheKey
	keys := c.keys(buf[:0], cacheKey{t.identity + uint64(f), t.identity}, text)
	base := len(dst)
	from := resume{start: true}
	known := 0
	for _, e := range c.find(keys) {
		ch := e.(*chunk)
		if ch.after != from {
			break
		}
		dst, from = append(dst, ch.ids...), ch.from
		known++
	}
	rec := recorder{step: c.step, next: (known + 1) * c.step, mark: known * c.step, last: from, ends: make([]resume, 0, len(keys)-known)}
	dst, err = t.encode(ctx, dst, text, f, &rec)
	fresh := make([]entry, len(rec.ends))
	last := from
	for k, end := range rec.ends {
		fresh[k] = &chunk{slices.Clip(slices.Clone(dst[base+last.ids : base+end.ids])), last, end}
		last = end
	}
	c.store(keys[known:], fresh)
	return dst, from.at, err
}

// keys appends the keys of the text's steps. The first depends on at.
func (c *Cache) keys(dst []cacheKey, at cacheKey, text []byte) []cacheKey {
	for dst = slices.Grow(dst, len(text)/c.step); len(text) >= c.step; text = text[c.step:] {
		at = c.mix(at, text[:c.step])
		dst = append(dst, at)
	}
	return dst
}

// mix returns the key of at's text with more text behind it.
func (c *Cache) mix(at cacheKey, text []byte) cacheKey {
	for k, seed := range c.seeds {
		h := maphash.Bytes(seed, text)
		at[k] = (at[k]^h)*0x9e3779b97f4a7c15 ^ (at[k]>>29 | h<<35)
	}
	return at
}

// find returns the entries of the known steps.
func (c *Cache) find(keys []cacheKey) []entry {
	dst := make([]entry, 0, len(keys))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range keys {
		e, ok := c.lru.Peek(key)
		if !ok {
			break
		}
		dst = append(dst, e)
	}
	// In this order the last step of a text is evicted before its first.
	for k := len(dst) - 1; k >= 0; k-- {
		c.lru.Get(keys[k])
	}
	return dst
}

// store adds the entries of steps behind the known ones.
func (c *Cache) store(keys []cacheKey, fresh []entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, e := range slices.Backward(fresh) {
		if old, ok := c.lru.Peek(keys[k]); ok { // another goroutine was as quick
			c.bytes -= old.cost()
		}
		c.lru.Add(keys[k], e)
		c.bytes += e.cost()
	}
	for c.bytes > c.limit && c.lru.Len() > 0 {
		c.lru.RemoveOldest()
	}
}

// remove removes an entry, if it is there.
func (c *Cache) remove(key cacheKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lru.Remove(key)
}

func (ch *chunk) cost() int { return chunkCost + 4*cap(ch.ids) }
