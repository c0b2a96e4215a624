// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"unsafe"

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

// AppendLocalHashes appends to dst the local hash of each full block of blockSize tokens,
// each hashed alone: XXH3-64 with the seed over the tokens as little-endian 32-bit
// numbers. A partial block at the end has no hash. It allocates only to enlarge dst.
// blockSize must be positive.
func AppendLocalHashes(dst []uint64, tokens []uint32, blockSize int, seed uint64) []uint64 {
	dst = slices.Grow(dst, len(tokens)/blockSize)
	for bytes := littleEndian(tokens); len(bytes) >= 4*blockSize; bytes = bytes[4*blockSize:] {
		dst = append(dst, xxh3.HashSeed(bytes[:4*blockSize], seed))
	}
	return dst
}

// littleEndian returns the bytes of tokens, without copying on little-endian processors.
func littleEndian(tokens []uint32) []byte {
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens))
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		return bytes
	}
	return appendTokens(nil, tokens)
}

// AppendSequenceHashes appends to dst the sequence hash of each block of a chain of local
// hashes: the first is the local hash itself, each further one is XXH3-64 over its
// predecessor and the block's local hash. The seed is always the base seed; the local
// hashes contain LoRA and salt.
func AppendSequenceHashes(dst, local []uint64) []uint64 {
	dst = slices.Grow(dst, len(local))
	for i, hash := range local {
		if i > 0 {
			hash = NextSequenceHash(dst[len(dst)-1], hash)
		}
		dst = append(dst, hash)
	}
	return dst
}

// NextSequenceHash returns the sequence hash of the block with the given local hash that
// follows the block with sequence hash prev. It is XXH3-64 of 16 bytes, inlined: each
// hash of a chain waits for the previous one, and [xxh3.HashSeed] takes twice as long.
func NextSequenceHash(prev, local uint64) uint64 {
	// Words of XXH3's secret, from its bytes 24, 32, 40 and 48.
	const flipLow = 0x1F67B3B7A4A44072 ^ 0x78E5C0CC4EE679CB + baseSeed
	const flipHigh = 0x2172FFCC7DD05A82 ^ 0x8E2443F7744608B8 - baseSeed
	low, high := prev^flipLow, local^flipHigh
	productHigh, productLow := bits.Mul64(low, high)
	hash := 16 + bits.ReverseBytes64(low) + high + (productHigh ^ productLow)
	hash ^= hash >> 37
	hash *= 0x165667919E3779F9
	return hash ^ hash>>32
}
