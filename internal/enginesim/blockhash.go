// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// blockID is the complete hash of a block. Events contain eight bytes of it.
type blockID [32]byte

// keys are the values that are hashed besides tokens.
type keys struct{ lora, salt string }

// blockHash computes the hash and the name of a block. parent is nil for the first block of a
// sequence. sequence is the router's hash of all tokens up to the block's end.
type blockHash func(parent *blockID, sequence uint64, tokens []uint32, k keys) (blockID, uint64)

// simSalt makes the names of "sim" differ from the router's hashes, as in real engines.
const simSalt = 0x656e67696e65

func newBlockHash(kind string) (blockHash, error) {
	switch kind {
	case "sim":
		return mixed(simSalt), nil
	case "random":
		return mixed(rand.Uint64()), nil
	case "sequence":
		return func(_ *blockID, sequence uint64, _ []uint32, _ keys) (blockID, uint64) { return blockID{}, sequence }, nil
	case "vllm":
		return vllmHash, nil
	case "sglang":
		return sglangHash, nil
	default:
		return nil, fmt.Errorf("enginesim: BlockHash is %q, want sim, vllm, sglang, sequence or random", kind)
	}
}

func mixed(salt uint64) blockHash {
	return func(_ *blockID, sequence uint64, _ []uint32, _ keys) (blockID, uint64) {
		return blockID{}, indexer.NextSequenceHash(sequence, salt)
	}
}

// vllmRoot is the parent hash of a first block.
const vllmRoot = "vllm-none-hash"

// vllmHash is vLLM's sha256_cbor: SHA-256 of the CBOR of parent, tokens and extra keys. Events
// contain the last eight bytes.
func vllmHash(parent *blockID, _ uint64, tokens []uint32, k keys) (blockID, uint64) {
	salted := parent == nil && k.salt != ""
	above := blockID(sha256.Sum256(cborText(nil, vllmRoot)))
	if parent != nil {
		above = *parent
	}
	b := append(cborHead([]byte{0x83}, 2, uint64(len(above))), above[:]...)
	b = cborHead(b, 4, uint64(len(tokens)))
	for _, t := range tokens {
		b = cborHead(b, 0, uint64(t))
	}
	switch {
	case k.lora != "" && salted:
		b = append(b, 0x82)
	case k.lora != "" || salted:
		b = append(b, 0x81)
	default:
		b = append(b, 0xf6) // null
	}
	if k.lora != "" { // without the path of the adapter's files, because the simulator has no files
		b = cborText(cborText(cborText(append(b, 0x83), "lora"), k.lora), "")
	}
	if salted {
		b = cborText(cborText(append(b, 0x82), "cache_salt"), k.salt)
	}
	id := blockID(sha256.Sum256(b))
	return id, binary.BigEndian.Uint64(id[24:])
}

func cborHead(dst []byte, major byte, n uint64) []byte {
	major <<= 5
	switch {
	case n < 24:
		return append(dst, major|byte(n))
	case n < 1<<8:
		return append(dst, major|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(dst, major|25), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(dst, major|26), uint32(n))
	}
}

func cborText(dst []byte, s string) []byte { return append(cborHead(dst, 3, uint64(len(s))), s...) }

// sglangHash is SGLang's hash: SHA-256 of the parent's hash and the tokens. Events contain the
// first eight bytes; with a salt or an adapter, the first eight bytes of a hash over these and
// them.
func sglangHash(parent *blockID, _ uint64, tokens []uint32, k keys) (blockID, uint64) {
	var b []byte
	if parent != nil {
		b = slices.Clone(parent[:])
	}
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	id := blockID(sha256.Sum256(b))
	shown := id
	if k != (keys{}) {
		space := sha256.Sum256([]byte(k.lora + "\x00" + k.salt))
		shown = sha256.Sum256(append(space[:], id[:8]...))
	}
	return id, binary.BigEndian.Uint64(shown[:])
}
