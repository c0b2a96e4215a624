// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/zeebo/xxh3"
)

// baseSeed seeds every hash of the scheme. The value is NVIDIA Dynamo's, so
// that our hashes equal those in its workers' events.
const baseSeed = 1337

// Seed returns the seed of the local hashes of a prompt that runs with the
// named LoRA adapter and cache salt. Both are optional: the empty string counts
// as absent. Prompts with different seeds never share a block.
func Seed(lora, salt string) uint64 {
	seed := uint64(baseSeed)
	if lora != "" {
		seed += xxh3.HashStringSeed(lora, 0)
	}
	if salt != "" {
		seed += xxh3.HashStringSeed(salt, 1)
	}
	return seed
}

// AppendLocalHashes appends to dst the local hash of each full block of
// blockSize tokens, each hashed alone: XXH3-64 with the seed over the tokens as
// little-endian 32-bit numbers. A tail that does not fill a block has no hash.
// It allocates only what dst must grow. blockSize must be positive.
func AppendLocalHashes(dst []uint64, tokens []uint32, blockSize int, seed uint64) []uint64 {
	if blockSize < leastMixed || blockSize > mostMixed {
		return appendLocalHashes(dst, tokens, blockSize, seed)
	}
	n := len(tokens) / blockSize
	dst = slices.Grow(dst, n)
	m := newMixer(seed)
	if blockSize == 16 { // what engines use most
		for range n {
			dst = append(dst, m.hash16((*[16]uint32)(tokens)))
			tokens = tokens[16:]
		}
		return dst
	}
	for range n {
		dst = append(dst, m.hash(tokens[:blockSize]))
		tokens = tokens[blockSize:]
	}
	return dst
}

// AppendHashes is [AppendLocalHashes] and [AppendSequenceHashes] of the whole prompt at
// once, each to a slice of its own: a processor works on the one while it waits for the
// other, of which each depends on the one before.
func AppendHashes(local, sequence []uint64, tokens []uint32, blockSize int, seed uint64) (locals, sequences []uint64) {
	n := len(tokens) / max(1, blockSize)
	if blockSize != 16 || n == 0 {
		at := len(local)
		local = AppendLocalHashes(local, tokens, blockSize, seed)
		return local, AppendSequenceHashes(sequence, local[at:])
	}
	local, sequence = slices.Grow(local, n), slices.Grow(sequence, n)
	m := newMixer(seed)
	prev := m.hash16((*[16]uint32)(tokens))
	local, sequence = append(local, prev), append(sequence, prev)
	for range n - 1 {
		tokens = tokens[16:]
		own := m.hash16((*[16]uint32)(tokens))
		prev = NextSequenceHash(prev, own)
		local, sequence = append(local, own), append(sequence, prev)
	}
	return local, sequence
}

// appendLocalHashes is the same for blocks of any size.
func appendLocalHashes(dst []uint64, tokens []uint32, blockSize int, seed uint64) []uint64 {
	var stack [1024]byte // blocks of up to 256 tokens need no heap
	buf := stack[:]
	if n := blockSize * 4; n > len(buf) {
		buf = make([]byte, n)
	} else {
		buf = buf[:n]
	}
	for len(tokens) >= blockSize {
		for i, t := range tokens[:blockSize] {
			binary.LittleEndian.PutUint32(buf[i*4:], t)
		}
		dst = append(dst, xxh3.HashSeed(buf, seed))
		tokens = tokens[blockSize:]
	}
	return dst
}

// AppendSequenceHashes appends to dst the sequence hash of each block of a
// chain of local hashes: the first is the local hash itself, each further one is
// XXH3-64 over its predecessor and the block's local hash. The seed is the base
// seed always; LoRA and salt take part through the local hashes.
func AppendSequenceHashes(dst, local []uint64) []uint64 {
	dst = slices.Grow(dst, len(local))
	var prev uint64
	for i, b := range local {
		if i == 0 {
			prev = b
		} else {
			prev = NextSequenceHash(prev, b)
		}
		dst = append(dst, prev)
	}
	return dst
}

// NextSequenceHash returns the sequence hash of the block with the given local
// hash that follows the block with sequence hash prev.
func NextSequenceHash(prev, local uint64) uint64 {
	low := prev ^ (secret024 ^ secret032 + baseSeed)
	high := local ^ (secret040 ^ secret048 - baseSeed)
	return avalanche(16 + bits.ReverseBytes64(low) + high + fold(low, high))
}
