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
	size        int    // of the text, for what lies behind the last step
	hash        cacheKey
}

// NewCache returns a cache of about limit bytes. It covers about half as many bytes of chats: an id stands
// for about four bytes and takes four, and the text of messages takes as much.
func NewCache(limit int) *Cache {
	c := &Cache{seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}, limit: limit, step: cacheStep}
	// A size of 1 or more is valid.
	c.lru, _ = simplelru.NewLRU(max(1, limit/chunkCost), func(_ cacheKey, old entry) { c.bytes -= old.cost() })
	return c
}

// Append is t.Append with the ids of known prefixes copied. reused is the number of bytes of text
// whose ids were copied.
func (c *Cache) Append(
	ctx context.Context, dst []uint32, t *Tokenizer, text []byte, special bool,
) (ids []uint32, reused int, err error) {
	return c.append(ctx, dst, t, text, formOf(special))
}

func (c *Cache) append(
	ctx context.Context, dst []uint32, t *Tokenizer, text []byte, f form,
) (ids []uint32, reused int, err error) {
	if c == nil || len(text) < c.step {
		ids, err = t.encode(ctx, dst, text, f, nil)
		return ids, 0, err
	}
	var buf [64]cacheKey
	keys := c.keys(buf[:0], cacheKey{t.identity + uint64(f), t.identity}, text)
	base := len(dst)
	step, known := resume{start: true}, 0 // where the last known step ends
	for _, e := range c.find(keys) {
		ch := e.(*chunk)
		if ch.after != step {
			break
		}
		dst, step = append(dst, ch.ids...), ch.from
		known++
	}
	rec := recorder{
		step: c.step, next: (known + 1) * c.step, mark: known * c.step, last: step, size: len(text),
		ends: make([]resume, 0, len(keys)-known),
	}
	var old cacheKey
	if known > 0 {
		old = tailKey(keys[known-1])
		for _, e := range c.find([]cacheKey{old}) {
			if ch := e.(*chunk); ch.after == step && ch.size <= len(text) && c.mix(old, text[known*c.step:ch.size]) == ch.hash {
				dst, rec.last, rec.mark = append(dst, ch.ids...), ch.from, ch.size
			}
		}
	}
	rec.tail, reused = rec.last, rec.last.at
	dst, err = t.encode(ctx, dst, text, f, &rec)
	fresh := make([]entry, len(rec.ends))
	cut := func(end resume) *chunk {
		ch := &chunk{ids: slices.Clone(dst[base+step.ids : base+end.ids]), after: step, from: end}
		step = end
		return ch
	}
	for k, end := range rec.ends {
		fresh[k] = cut(end)
	}
	c.store(keys[known:], fresh)
	if known += len(fresh); known > 0 && err == nil && rec.tail.at > step.at {
		key := tailKey(keys[known-1])
		tail := cut(rec.tail)
		tail.size, tail.hash = len(text), c.mix(key, text[known*c.step:])
		c.replace(old, key, tail)
	}
	return dst, reused, err
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
	for _, key := range slices.Backward(keys[:len(dst)]) {
		c.lru.Get(key)
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

// tailKey is the key of what lies behind the last step of a text.
func tailKey(step cacheKey) cacheKey { return cacheKey{step[0], ^step[1]} }

// replace stores what lies behind the last step of a text, instead of what was known behind an earlier step.
func (c *Cache) replace(old, key cacheKey, e entry) {
	if key != old {
		c.mu.Lock()
		c.lru.Remove(old)
		c.mu.Unlock()
	}
	c.store([]cacheKey{key}, []entry{e})
}

func (ch *chunk) cost() int { return chunkCost + 4*cap(ch.ids) }
