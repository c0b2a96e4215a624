// SPDX-License-Identifier: Apache-2.0

package router

import (
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"sync/atomic"
)

// prefixStep is how many tokens lie between the beginnings of a prompt that workers
// may name.
const prefixStep = 16

// prefixes is what workers say of their caches in their heartbeats: whole beginnings of
// prompts, each with so many tokens. It is the smallest form of a KV index, of workers
// without events.
type prefixes struct {
	some atomic.Bool // whether there are any, so that others pay nothing

	mu sync.RWMutex
	// mu guards the field below. The inner maps are never changed.
	of map[int]map[uint64]int // tokens, by ordinal and hash
}

// SetCachedPrefixes replaces all that a worker was said to hold in this form: tokens by
// the first 8 bytes, big endian, of the SHA-256 of a beginning of a prompt (token ids as
// u32, little endian) of a multiple of 16 tokens. All ranks of the worker hold it. It
// returns false if the worker is not known. The map is kept and must not be changed.
func (r *Router) SetCachedPrefixes(id uint64, cached map[uint64]int) (known bool) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[id]
	if p == nil {
		return false
	}
	if p.known == nil {
		return true
	}
	p.mu.Lock()
	ordinals := p.core.ordinals(id)
	p.mu.Unlock()
	for _, ord := range ordinals {
		p.known.prefixes.set(ord, cached)
	}
	return true
}

func (x *prefixes) set(ord int, cached map[uint64]int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(cached) == 0 {
		delete(x.of, ord)
	} else {
		if x.of == nil {
			x.of = make(map[int]map[uint64]int)
		}
		x.of[ord] = cached
	}
	x.some.Store(len(x.of) > 0)
}

// match raises overlaps to what workers say of a prompt's beginnings: the most that one
// of them gives, which is at most its own length.
func (x *prefixes) match(overlap []int32, tokens []uint32, blockSize int) {
	if !x.some.Load() || len(tokens) < prefixStep {
		return
	}
	hashes := prefixHashes(tokens)
	x.mu.RLock()
	defer x.mu.RUnlock()
	for ord, cached := range x.of {
		if ord >= len(overlap) {
			continue
		}
		most := 0
		for i, h := range hashes {
			if n, held := cached[h]; held {
				most = max(most, min(n, (i+1)*prefixStep))
			}
		}
		overlap[ord] = max(overlap[ord], int32(most/blockSize))
	}
}

// prefixHashes returns the hash of each beginning of a prompt that workers may name.
func prefixHashes(tokens []uint32) []uint64 {
	hashes := make([]uint64, 0, len(tokens)/prefixStep)
	h := sha256.New()
	var piece [prefixStep * 4]byte
	var sum [sha256.Size]byte
	for at := prefixStep; at <= len(tokens); at += prefixStep {
		for i, id := range tokens[at-prefixStep : at] {
			binary.LittleEndian.PutUint32(piece[4*i:], id)
		}
		_, _ = h.Write(piece[:]) // never fails
		hashes = append(hashes, binary.BigEndian.Uint64(h.Sum(sum[:0])))
	}
	return hashes
}
