// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// XXH3-64 of blocks of 5 to 32 tokens, and of two sequence hashes: the same as that
// of their bytes, which need not be written down for it. Hashing is most of what a
// decision costs that is made from token ids.

// leastMixed and mostMixed are the tokens of the blocks that [mixer] hashes: XXH3
// goes another way about fewer than 17 bytes, and about more than 128.
const (
	leastMixed = 5
	mostMixed  = 32
)

// The primes and the beginning of the secret of XXH3, as little-endian words.
const (
	prime64 = 0x9E3779B185EBCA87
	primeMX = 0x165667919E3779F9

	secret000, secret008 = 0xBE4BA423396CFEB8, 0x1CAD21F72C81017C
	secret016, secret024 = 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072
	secret032, secret040 = 0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82
	secret048, secret056 = 0x8E2443F7744608B8, 0x4C263A81E69035E0
	secret064, secret072 = 0xCB00C391BB52283C, 0xA32E531B8B65D088
	secret080, secret088 = 0x4EF90DA297486471, 0xD8ACDEA946EF1938
	secret096, secret104 = 0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9
	secret112, secret120 = 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8
)

// mixer is the secret of XXH3 with one seed: pairs of words, in the order in which
// blocks are mixed with them from both ends.
type mixer [16]uint64

func newMixer(seed uint64) mixer {
	return mixer{
		secret000 + seed, secret008 - seed, secret016 + seed, secret024 - seed,
		secret032 + seed, secret040 - seed, secret048 + seed, secret056 - seed,
		secret064 + seed, secret072 - seed, secret080 + seed, secret088 - seed,
		secret096 + seed, secret104 - seed, secret112 + seed, secret120 - seed,
	}
}

// hash returns the hash of a block of leastMixed to mostMixed tokens.
func (m *mixer) hash(block []uint32) uint64 {
	n := len(block)
	sum := uint64(n)*4*prime64 + mix(block, m[0], m[1]) + mix(block[n-4:], m[2], m[3])
	if n > 8 {
		sum += mix(block[4:], m[4], m[5]) + mix(block[n-8:], m[6], m[7])
	}
	if n > 16 {
		sum += mix(block[8:], m[8], m[9]) + mix(block[n-12:], m[10], m[11])
	}
	if n > 24 {
		sum += mix(block[12:], m[12], m[13]) + mix(block[n-16:], m[14], m[15])
	}
	return avalanche(sum)
}

// hash16 is hash for 16 tokens.
func (m *mixer) hash16(t *[16]uint32) uint64 {
	return avalanche(64*prime64%(1<<64) +
		mix(t[0:4], m[0], m[1]) + mix(t[12:16], m[2], m[3]) + mix(t[4:8], m[4], m[5]) + mix(t[8:12], m[6], m[7]))
}

// mix mixes four tokens with two words of the secret.
func mix(tokens []uint32, low, high uint64) uint64 {
	t := (*[4]uint32)(tokens)
	return fold((uint64(t[0])|uint64(t[1])<<32)^low, (uint64(t[2])|uint64(t[3])<<32)^high)
}

func fold(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return high ^ low
}

func avalanche(h uint64) uint64 {
	h ^= h >> 37
	h *= primeMX
	return h ^ h>>32
}
