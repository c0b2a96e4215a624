// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"encoding/binary"
	"slices"

	"github.com/zeebo/xxh3"
)

// PadToken returns the token id that replaces each placeholder token of an image or
// another object with the given hash: prompts with different objects must not share
// blocks, although their placeholders are the same.
func PadToken(mmHash uint64) uint32 { return 1_000_000 + uint32(mmHash&0x3FFF_FFFF) }

// ReplacePlaceholders replaces the placeholders of one block by pad tokens, in place: its
// first run of placeholders stands for the first object, and so on; surplus runs stand
// for the last object. Without objects nothing changes.
func ReplacePlaceholders(block []uint32, placeholder uint32, mmHashes []uint64) {
	if len(mmHashes) == 0 {
		return
	}
	run, inside := -1, false
	for i, t := range block {
		if t != placeholder {
			inside = false
			continue
		}
		if !inside {
			run, inside = run+1, true
		}
		block[i] = PadToken(mmHashes[min(run, len(mmHashes)-1)])
	}
}

// ObjectHash returns the local hash of a block with objects, for a model whose
// placeholder token is unknown: the objects' hashes, ascending, count as bytes behind the
// tokens.
func ObjectHash(block []uint32, mmHashes []uint64, seed uint64) uint64 {
	buf := appendTokens(make([]byte, 0, 4*len(block)+8*len(mmHashes)), block)
	for _, h := range slices.Sorted(slices.Values(mmHashes)) {
		buf = binary.LittleEndian.AppendUint64(buf, h)
	}
	return xxh3.HashSeed(buf, seed)
}

func appendTokens(buf []byte, tokens []uint32) []byte {
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	return buf
}
