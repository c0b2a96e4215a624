// SPDX-License-Identifier: Apache-2.0

package router

import (
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"github.com/kvroute/kvroute/indexer"
)

// claims are reports of caches without events: by router groups in their summaries, and by
// workers in their heartbeats.
type claims struct {
	some atomic.Bool // whether there are claims: match returns at once without them

	mu sync.RWMutex
	// mu guards the field below.
	of map[int]claim // by ordinal
}

// claim is the report of one worker.
type claim struct {
	// filter has the blocks of a router group: checkpoints every stride blocks. Nil if
	// unknown.
	filter *indexer.Filter
	stride int
	// cached has the number of cached tokens by the hash of a prefix. It is never changed.
	cached map[uint64]int
}

// change replaces the claim of a worker, and removes an empty one.
func (x *claims) change(ord int, change func(*claim)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := x.of[ord]
	change(&c)
	if c.filter == nil && len(c.cached) == 0 {
		delete(x.of, ord)
	} else {
		if x.of == nil {
			x.of = make(map[int]claim)
		}
		x.of[ord] = c
	}
	x.some.Store(len(x.of) > 0)
}

// match raises overlaps to the claims about a prompt. plain says that the prompt has neither
// adapter nor salt: only then the hashes of prefixes in heartbeats apply.
func (x *claims) match(overlap []int32, sequence []uint64, tokens []uint32, plain bool, blockSize int) {
	if !x.some.Load() {
		return
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	var hashes []uint64
	for ord, c := range x.of {
		if ord >= len(overlap) {
			continue
		}
		if c.filter != nil {
			overlap[ord] = max(overlap[ord], int32(c.filter.Overlap(sequence, c.stride)))
		}
		if len(c.cached) == 0 || !plain {
			continue
		}
		if hashes == nil {
			hashes = prefixHashes(tokens)
		}
		most := 0 // cached tokens
		for i, h := range hashes {
			if n, held := c.cached[h]; held {
				most = max(most, min(n, (i+1)*prefixStep))
			}
		}
		overlap[ord] = max(overlap[ord], int32(most/blockSize))
	}
}

// prefixStep is the number of tokens between two prefixes that workers may report.
const prefixStep = 16

// prefixHashes returns the hash of each prefix of a prompt that workers may report.
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

// SetCachedPrefixes replaces the cached prefixes of a worker: the number of cached tokens by
// the first 8 bytes, big endian, of the SHA-256 of a prefix (token ids as u32, little
// endian) of a multiple of 16 tokens. It applies to all ranks of the worker. It returns
// false if the worker is not known. The map is kept and must not be changed.
func (r *Router) SetCachedPrefixes(id uint64, cached map[uint64]int) (known bool) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[id]
	if p == nil || p.known == nil {
		return p != nil
	}
	p.mu.Lock()
	ordinals := p.core.ordinals(id)
	p.mu.Unlock()
	for _, ord := range ordinals {
		p.known.claims.change(ord, func(c *claim) { c.cached = cached })
	}
	return true
}
