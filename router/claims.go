// SPDX-License-Identifier: Apache-2.0

package router

import (
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"github.com/kvroute/kvroute/indexer"
)

// claims is what workers say of their caches without events: router groups in their
// summaries, and workers in their heartbeats.
type claims struct {
	some atomic.Bool // there are any, so that other fleets pay nothing

	mu sync.RWMutex
	// mu guards the field below.
	of map[int]claim // by ordinal
}

// claim is what one worker says.
type claim struct {
	// filter has what a router group holds: checkpoints every stride blocks. Nil if it
	// does not say.
	filter *indexer.Filter
	stride int
	// cached are tokens by the hash of a whole beginning of a prompt. It is never changed.
	cached map[uint64]int
}

// change replaces what a worker says. Nothing is left of a claim that is empty.
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

// match raises overlaps to what workers claim of a prompt. plain says that nothing sets
// the prompt's blocks apart, neither adapter nor salt: then the hashes of beginnings in
// heartbeats are of its tokens.
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
		most := 0 // tokens: a beginning is worth its own length at most
		for i, h := range hashes {
			if n, held := c.cached[h]; held {
				most = max(most, min(n, (i+1)*prefixStep))
			}
		}
		overlap[ord] = max(overlap[ord], int32(most/blockSize))
	}
}

// prefixStep is how many tokens lie between the beginnings of a prompt that workers
// may name.
const prefixStep = 16

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

// SetCachedPrefixes replaces all that a worker was said to hold in this form: tokens by
// the first 8 bytes, big endian, of the SHA-256 of a beginning of a prompt (token ids as
// u32, little endian) of a multiple of 16 tokens. All ranks of the worker hold it. It
// returns false if the worker is not known. The map is kept and must not be changed.
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
