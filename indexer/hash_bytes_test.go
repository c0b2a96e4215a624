// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
)

// Blocks of every size hash like their bytes, and so do pairs of hashes.
func TestHashesOfTokensAreThoseOfBytes(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for size := 1; size <= 70; size++ {
		for range 50 {
			tokens := make([]uint32, size*3+rnd.IntN(size))
			for i := range tokens {
				tokens[i] = rnd.Uint32()
			}
			seed := rnd.Uint64()
			var want []uint64
			for block := range slices.Chunk(tokens[:size*3], size) {
				want = append(want, xxh3.HashSeed(appendTokens(nil, block), seed))
			}
			if got := AppendLocalHashes(nil, tokens, size, seed); !slices.Equal(got, want) {
				t.Fatalf("blocks of %d tokens: %x, want %x", size, got, want)
			}
			b := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, seed), want[0])
			if got, want := NextSequenceHash(seed, want[0]), xxh3.HashSeed(b, baseSeed); got != want {
				t.Fatalf("pair: %x, want %x", got, want)
			}
		}
	}
}

func BenchmarkHashes(b *testing.B) {
	tokens := make([]uint32, 640)
	for i := range tokens {
		tokens[i] = uint32(i * 7)
	}
	var local, sequence []uint64
	b.Run("local", func(b *testing.B) {
		for b.Loop() {
			local = AppendLocalHashes(local[:0], tokens, 16, 1337)
		}
	})
	b.Run("sequence", func(b *testing.B) {
		for b.Loop() {
			sequence = AppendSequenceHashes(sequence[:0], local)
		}
	})
}
