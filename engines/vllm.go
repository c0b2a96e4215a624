// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// DecodeBatch reads a batch of vLLM, SGLang or Dynamo's mock engine. A batch, and each
// event, is a map or an array. An event that cannot be read, or that is irrelevant for the
// index, is counted, and the others are read. An error means that the message is not a
// batch, or that its rank cannot be read.
func DecodeBatch(data []byte) (EngineBatch, error) {
	var b EngineBatch
	err := b.decode(data)
	return b, err
}

// decode replaces the batch by the one that [DecodeBatch] describes, and reuses its memory.
func (b *EngineBatch) decode(data []byte) error {
	b.Events, b.Drops, b.hashes, b.tokens, b.removal, b.time = b.Events[:0], Drops{}, b.hashes[:0], b.tokens[:0], nil, 0
	var rank []byte
	hasEvents := false
	field := func(key, data []byte) (rest []byte, err error) {
		switch string(key) {
		case "ts":
			b.time, rest, err = readTime(data)
		case "events":
			hasEvents = true
			rest, err = msgpack.Each(data, func(_ int, event []byte) ([]byte, error) { return b.readEvent(event) })
		case "data_parallel_rank", "attn_dp_rank":
			rank, rest, err = msgpack.Cut(data)
		default:
			rest, err = msgp.Skip(data)
		}
		return rest, err
	}
	_, err := walk(data, func(i int, _ []byte) []byte { return batchFields[min(i, 3)] }, field)
	if err == nil && !hasEvents {
		err = fmt.Errorf("%w: no events", msgpack.ErrShape)
	}
	if err == nil && rank != nil && !msgp.IsNil(rank) {
		var n uint32
		n, err = msgpack.Rank(rank)
		for i := range b.Events {
			b.Events[i].Rank, b.Events[i].HasRank = n, true
		}
	}
	if err != nil {
		return fmt.Errorf("engines: decode engine batch: %w", err)
	}
	return nil
}

// readEvent appends an event to the batch, or counts it.
func (b *EngineBatch) readEvent(data []byte) (rest []byte, err error) {
	if rest := b.readRemoval(data); rest != nil {
		return rest, nil
	}
	n := len(b.Events)
	b.Events = append(b.Events, EngineEvent{})
	r := eventReader{b: b, ev: &b.Events[n], size: len(data)}
	if rest, err = walk(data, r.name, r.field); err == nil {
		r.ev.Usable = len(r.ev.Hashes)
		err = r.readExtraKeys()
	}
	switch {
	case r.ev.Kind == EngineCleared:
		r.drop = DropNone
	case r.ev.Kind == 0 && r.tagged:
		r.drop = DropKind
	case r.ev.Kind == 0:
		r.drop = DropBad
	}
	if err != nil && r.drop != DropKind {
		r.drop = DropBad
	}
	if r.drop != DropNone {
		b.Drops[r.drop] += max(1, len(r.ev.Hashes))
		b.Events = b.Events[:n]
	}
	if err != nil {
		return msgp.Skip(data)
	}
	if r.drop == DropNone && r.ev.Kind == EngineRemoved && r.hash > 0 {
		b.removal, b.hash, b.removed = data[:len(data)-len(rest)], r.hash, n
	}
	return rest, nil
}

// readRemoval reads an event that differs from an earlier removal only in the removed block: vLLM
// sends an event for each one. It returns what follows the event, or nil if this is another event.
func (b *EngineBatch) readRemoval(data []byte) (rest []byte) {
	at, size := b.hash, len(b.removal)
	if size == 0 || size > len(data) || string(data[:at]) != string(b.removal[:at]) || string(data[at+8:size]) != string(b.removal[at+8:]) {
		return nil
	}
	ev, n := b.Events[b.removed], len(b.hashes)
	b.hashes = append(b.hashes, binary.BigEndian.Uint64(data[at:]))
	ev.Hashes = b.hashes[n:]
	b.Events = append(b.Events, ev)
	return data[size:]
}

// eventReader reads one event.
type eventReader struct {
	b         *EngineBatch
	ev        *EngineEvent
	size      int    // of the event and what follows it
	hash      int    // where the block's id is in the event, if it is one number of 8 bytes
	extraKeys []byte // read when all other fields are known
	tagged    bool   // the event names its kind, perhaps an unknown one
	hasGroup  bool
	drop      DropReason
}

// walk calls field for each value of a map or an array, with the name of the array's element.
func walk(
	data []byte, name func(i int, data []byte) []byte, field func(key, data []byte) ([]byte, error),
) (rest []byte, err error) {
	if msgp.NextType(data) == msgp.MapType {
		return msgpack.WalkFields(data, field)
	}
	return msgpack.Each(data, func(i int, data []byte) ([]byte, error) { return field(name(i, data), data) })
}

// The names of the elements of batches and events that are arrays, and of kinds and tiers.
//
//nolint:gochecknoglobals // tables
var (
	batchFields   = bytes.Fields([]byte("ts events data_parallel_rank -"))
	storedFields  = bytes.Fields([]byte("type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys"))
	removedFields = bytes.Fields([]byte("type block_hashes medium group_idx"))
	laterFields   = bytes.Fields([]byte("block_mm_infos kv_cache_spec_kind group_idx kv_cache_spec_sliding_window"))

	engineKinds = map[string]EngineKind{
		"BlockStored": EngineStored, "BlockRemoved": EngineRemoved, "AllBlocksCleared": EngineCleared,
	}
	media = map[string]indexer.Tier{
		"": indexer.Device, "GPU": indexer.Device, "DEVICE": indexer.Device,
		"CPU": indexer.HostPinned, "CPU_PINNED": indexer.HostPinned, "CPU_TIER1": indexer.HostPinned,
		"CPU_TIER2": indexer.Disk, "DISK": indexer.Disk, "NVME": indexer.Disk, "STORAGE": indexer.Disk, "FS": indexer.Disk,
		"EXTERNAL": indexer.External, "NETWORK": indexer.External, "REMOTE": indexer.External, "SHARED": indexer.External,
		"OBJ": indexer.External,
	}
)

// name returns the name of the i-th element of an event that is an array. Behind the named
// fields of a stored event there are more, which differ by version: their types tell them
// apart.
func (r *eventReader) name(i int, data []byte) []byte {
	fields, removed := storedFields, r.ev.Kind == EngineRemoved
	if removed {
		fields = removedFields
	}
	kind := msgp.NextType(data)
	switch {
	case i < len(fields):
		return fields[i]
	case removed:
		return nil
	case kind == msgp.ArrayType:
		return laterFields[0]
	case kind == msgp.StrType && r.ev.Spec == "":
		return laterFields[1]
	case (kind == msgp.IntType || kind == msgp.UintType) && !r.hasGroup && r.ev.Spec == "": // the window follows the kind
		return laterFields[2]
	case (kind == msgp.IntType || kind == msgp.UintType) && r.ev.Spec != "":
		return laterFields[3]
	default:
		return nil
	}
}

// field reads the value of a field, and returns what follows it.
func (r *eventReader) field(key, data []byte) (rest []byte, err error) {
	if msgp.IsNil(data) {
		return data[1:], nil
	}
	ev := r.ev
	var word []byte
	switch string(key) {
	case "type":
		word, rest, err = msgp.ReadStringZC(data)
		ev.Kind, r.tagged = engineKinds[string(word)], len(word) > 0
	case "block_hashes":
		if r.hash = 0; len(data) > 1 && data[0] == 0x91 && data[1] == 0xcf {
			r.hash = r.size - len(data) + 2
		}
		first := len(r.b.hashes)
		r.b.hashes, rest, err = msgpack.AppendList(r.b.hashes, data, 1, readHash)
		ev.Hashes = r.b.hashes[first:]
	case "parent_block_hash":
		ev.HasParent = true
		ev.Parent, rest, err = readHash(data)
	case "token_ids":
		first := len(r.b.tokens)
		r.b.tokens, rest, err = msgpack.AppendIDs(r.b.tokens, data, readToken)
		ev.Tokens = r.b.tokens[first:]
	case "block_size":
		ev.BlockSize, rest, err = msgpack.IntRest(data, math.MaxInt32)
	case "group_idx":
		r.hasGroup = true
		ev.Group, rest, err = msgpack.IntRest(data, maxGroup-1)
	case "kv_cache_spec_kind":
		word, rest, err = msgp.ReadStringZC(data)
		if ev.Spec = fullAttention; string(word) != fullAttention {
			ev.Spec = string(word)
		}
	case "kv_cache_spec_sliding_window":
		ev.Window, rest, err = msgpack.IntRest(data, math.MaxInt32)
	case "medium":
		word, rest, err = msgpack.Word(data)
		tier, known := media[string(word)]
		if !known {
			tier, known = media[strings.ToUpper(string(word))]
		}
		if ev.Tier = tier; !known {
			r.drop = DropMedium
		}
	case "locality":
		if word, rest, err = msgpack.Word(data); !strings.EqualFold(string(word), "LOCAL") {
			r.drop = DropForeign
		}
	case "ownership":
		r.drop = DropForeign
		rest, err = msgp.Skip(data)
	case "lora_name":
		ev.LoRA, rest, err = msgp.ReadStringBytes(data)
	case "lora_id":
		ev.HasLoRAID = true
		_, rest, err = msgpack.UintRest(data)
	case "cache_salt":
		ev.HasSalt = true
		ev.Salt, rest, err = msgp.ReadStringBytes(data)
	case "block_mm_infos":
		ev.Objects, rest, err = msgpack.AppendList([][]uint64{}, data, 1, readObjects)
	case "extra_keys":
		r.extraKeys, rest, err = msgpack.Cut(data)
	default:
		rest, err = msgp.Skip(data)
	}
	return rest, err
}

// fullAttention is the most frequent kind of a cache group.
const fullAttention = "full_attention"

// readToken reads a token id. If the model drafts tokens, it is a pair of a token and the one after
// it; the first one counts, as in a prompt.
func readToken(data []byte) (id uint32, rest []byte, err error) {
	if msgp.NextType(data) != msgp.ArrayType {
		return msgp.ReadUint32Bytes(data)
	}
	pair, rest, err := msgpack.AppendList(make([]uint32, 0, 2), data, 1, msgp.ReadUint32Bytes)
	if err == nil && len(pair) != 2 {
		err = fmt.Errorf("%w: %d tokens, want a pair", msgpack.ErrShape, len(pair))
	}
	return append(pair, 0)[0], rest, err
}

// saltTag stands before a salt among the extra keys of Dynamo's engines.
const saltTag = "dynamo-cache-salt:"

// readExtraKeys reads, for each block, what the engine hashed besides tokens. Usable ends
// before the first block with unknown keys: hashed without them it would be a false hit
// for other requests. Fields of their own overrule salt and objects among the keys.
func (r *eventReader) readExtraKeys() error {
	if n, keys, _ := msgp.ReadArrayHeaderBytes(r.extraKeys); len(keys) == int(n) && bytes.Count(keys, []byte{0xc0}) == len(keys) {
		return nil // there are none, or all are nil
	}
	ev := r.ev
	salt, salted, hasObjects := "", false, false
	objects := make([][]uint64, 0, len(ev.Hashes))
	_, err := msgpack.Each(r.extraKeys, func(i int, data []byte) ([]byte, error) {
		value, rest, err := msgpack.Cut(data)
		if err != nil || i >= ev.Usable {
			return rest, err
		}
		keys := blockKeys{lora: ev.LoRA}
		if !msgp.IsNil(value) {
			if _, err := msgpack.Each(value, keys.read); err != nil {
				return rest, err
			}
		}
		text, tagged := strings.CutPrefix(keys.name, saltTag)
		switch {
		case keys.unknown, keys.name != "" && ev.LoRA == "" && ev.HasLoRAID: // an adapter's name, or a salt
			ev.Usable = i
			return rest, nil
		case keys.name == "", salted && text == salt: // later blocks may repeat the salt
		case i == 0 && (tagged || !ev.HasParent):
			salt, salted = text, true
		default: // no salt: those stand on the first block of a sequence
			ev.Usable = i
			return rest, nil
		}
		hasObjects = hasObjects || len(keys.objects) > 0
		objects = append(objects, keys.objects)
		return rest, nil
	})
	if salted && !ev.HasSalt {
		ev.Salt, ev.HasSalt = salt, true
	}
	if hasObjects && ev.Objects == nil {
		ev.Objects = objects
	}
	return err
}

// blockKeys are the extra keys of a block.
type blockKeys struct {
	lora    string // the adapter's name, which is not kept in name
	name    string // a salt, or an adapter
	objects []uint64
	unknown bool // there are others
}

// read reads the i-th key of a block: nil, a text, or an array of an object's hash and its
// place, which is not hashed.
func (k *blockKeys) read(i int, data []byte) (rest []byte, err error) {
	value, rest, err := msgpack.Cut(data)
	if err != nil || msgp.IsNil(value) {
		return rest, err
	}
	placed := msgp.NextType(value) == msgp.ArrayType
	if placed {
		_, value, _ = msgp.ReadArrayHeaderBytes(value) // Cut has read it
	}
	text, _, err := msgp.ReadStringBytes(value)
	hash, isObject := objectHash(text)
	switch {
	case err == nil && !placed && i == 0 && k.lora != "" && text == k.lora:
	case err == nil && isObject:
		k.objects = append(k.objects, hash)
	case err != nil, placed, k.name != "":
		k.unknown = true
	default:
		k.name = text
	}
	return rest, nil
}

// objectHash reads the hash of an image or another object: 64 hex digits, of which the
// first 16 count.
func objectHash(text string) (uint64, bool) {
	if len(text) != 64 || strings.Trim(text, "0123456789abcdefABCDEF") != "" {
		return 0, false
	}
	hash, err := strconv.ParseUint(text[:16], 16, 64)
	return hash, err == nil
}

// readObjects reads a block's entry of block_mm_infos.
func readObjects(data []byte) (hashes []uint64, rest []byte, err error) {
	if msgp.IsNil(data) {
		return nil, data[1:], nil
	}
	rest, err = msgpack.ReadFields(data, []msgpack.Field{{Key: "mm_objects", Value: func(data []byte) (rest []byte, err error) {
		if msgp.IsNil(data) {
			return data[1:], nil
		}
		hashes, rest, err = msgpack.AppendList(nil, data, 1, readObject)
		return rest, err
	}}})
	return hashes, rest, err
}

func readObject(data []byte) (hash uint64, rest []byte, err error) {
	rest, err = msgpack.ReadFields(data, []msgpack.Field{{Key: "mm_hash", Value: &hash, Required: true}})
	return hash, rest, err
}

// readHash reads a block's id. The last eight bytes of a byte string count: engines cut
// their hashes to them as well where ids must be integers.
func readHash(data []byte) (hash uint64, rest []byte, err error) {
	if len(data) >= 9 && data[0] == 0xcf {
		return binary.BigEndian.Uint64(data[1:]), data[9:], nil
	}
	if msgp.NextType(data) != msgp.BinType {
		return msgpack.UintRest(data)
	}
	b, rest, err := msgp.ReadBytesZC(data)
	if err == nil && len(b) < 8 {
		err = fmt.Errorf("%w: a hash of %d bytes", msgpack.ErrShape, len(b))
	}
	if err != nil {
		return 0, rest, err
	}
	return binary.BigEndian.Uint64(b[len(b)-8:]), rest, nil
}

// readTime reads a batch's time, in seconds since 1970; 0 if it is a whole number or absent. Another
// type shows that the message is not a batch.
func readTime(data []byte) (seconds float64, rest []byte, err error) {
	switch kind := msgp.NextType(data); kind {
	case msgp.Float64Type:
		return msgp.ReadFloat64Bytes(data)
	case msgp.Float32Type, msgp.IntType, msgp.UintType, msgp.NilType:
		rest, err = msgp.Skip(data)
		return 0, rest, err
	default:
		return 0, data, fmt.Errorf("%w: a time of type %v", msgpack.ErrShape, kind)
	}
}
