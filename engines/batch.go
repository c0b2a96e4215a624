// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// DropReason says why blocks of an engine's events are left out.
type DropReason int

// The reasons. Blocks are counted, and an event that names none as one.
const (
	DropBad      DropReason = iota // cannot be read
	DropKind                       // a kind of event that nobody knows
	DropMedium                     // kept on a medium that nobody knows
	DropForeign                    // kept elsewhere, or not this worker's
	DropGroup                      // no prefix cache: sliding window, mamba, a smaller window
	DropKeys                       // hashed with keys that nobody knows
	DropLoRA                       // of an adapter without a name
	DropParent                     // after a block that is not known, so with a salt that is not known
	DropBlock                      // moved between tiers without being known
	DropSize                       // of a size that does not fit the scope's
	DropTokens                     // without their tokens, or with more than theirs
	DropConflict                   // stored again with other tokens behind it; what was said first stands
	DropFull                       // beyond the bounds of what is kept
	DropLost                       // an event id is missing, and what was known is forgotten
	DropReasons                    // how many reasons there are
)

// String returns a word for metrics.
func (r DropReason) String() string {
	return [...]string{
		"bad", "kind", "medium", "foreign", "group", "keys", "lora", "parent", "block", "size", "tokens", "conflict", "full", "lost", "",
	}[min(max(r, 0), DropReasons)]
}

// Drops counts what was left out, by reason.
type Drops [DropReasons]int

// EngineKind says what an engine says.
type EngineKind uint8

// The kinds of engine event.
const (
	EngineStored  EngineKind = iota + 1
	EngineRemoved            // on Tier, or wherever the blocks are if AnyTier is set
	EngineCleared
	EngineMoved   // from tier From to Tier; GoneTo says that no tier is known there
	EngineStarted // empty, with attention windows of WindowSize
)

// EngineEvent is one event of an engine in the engine's own terms. Only an
// [Engine] knows what it means for the index.
type EngineEvent struct {
	Kind    EngineKind
	Rank    uint32
	HasRank bool

	Tier, From      indexer.Tier
	AnyTier, GoneTo bool

	// Hashes are the engine's ids of the blocks; each one's parent is the one
	// before it.
	Hashes    []uint64
	Parent    uint64
	HasParent bool

	Tokens    []uint32
	BlockSize int
	// Window means that the tokens are those of the blocks and the one behind
	// them: the engine drafts tokens and hashes windows.
	Window bool
	// Lookahead has, for each block, the token behind it, if that is known.
	Lookahead []Lookahead

	LoRA      string
	LoRAID    int64
	HasLoRAID bool
	// Salt is the cache salt, if HasSalt says that this event names it. Else it is
	// the parent's.
	Salt    string
	HasSalt bool
	// Objects are the hashes of each block's images and the like; shorter than
	// Hashes if the last blocks have none.
	Objects [][]uint64
	// Usable is how many leading blocks have no keys beyond what is understood.
	Usable int

	Group int    // of the engine's KV cache
	Spec  string // the group's kind, "" if not said

	// ID and WindowSize are TensorRT-LLM's. SameID is set if the event before this
	// one has the same id, being the rest of what it says.
	ID         uint64
	HasID      bool
	SameID     bool
	WindowSize int
}

// Lookahead is a token behind a block, if Known.
type Lookahead struct {
	Token uint32
	Known bool
}

// EngineBatch is one message of an engine.
type EngineBatch struct {
	Time   float64 // unix seconds; 0 if not said
	Events []EngineEvent
	Drops  Drops
}

// maxGroup bounds the groups of a KV cache; engines have a handful.
const maxGroup = 256

// saltTag is what Dynamo writes before a salt among the extra keys.
const saltTag = "dynamo-cache-salt:"

// DecodeBatch reads a batch as vLLM, SGLang and Dynamo's mock engine send it,
// with events as arrays or as maps. Each event is read by itself: what cannot be
// read, and what is not the index's business, is counted. An error means that the
// message as a whole is no batch.
func DecodeBatch(data []byte) (EngineBatch, error) {
	var b EngineBatch
	var events, rank []byte
	var hasEvents bool
	field := func(key string, value []byte) (err error) {
		switch key {
		case "ts":
			b.Time, err = readFloat(value)
		case "events":
			events, hasEvents = value, true
		case "data_parallel_rank", "attn_dp_rank":
			rank = value
		}
		return err
	}
	var err error
	if msgp.NextType(data) == msgp.MapType {
		_, err = msgpack.EachField(data, func(key, value []byte) error { return field(string(key), value) })
	} else {
		err = msgpack.EachElement(data, func(i int, value []byte) error {
			if i < 3 {
				return field([...]string{"ts", "events", "data_parallel_rank"}[i], value)
			}
			return nil
		})
	}
	if err == nil && !hasEvents {
		err = fmt.Errorf("%w: no events", msgpack.ErrShape)
	}
	if err != nil {
		return b, fmt.Errorf("events: decode engine batch: %w", err)
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(events)
	if err != nil {
		return b, fmt.Errorf("events: decode engine batch: %w", err)
	}
	// The events are all there, or the array would not have been found.
	b.Events = make([]EngineEvent, 0, min(int(n), 256))
	for range n {
		element := rest
		if rest, err = msgp.Skip(rest); err != nil {
			return b, fmt.Errorf("events: decode engine batch: %w", err)
		}
		readEngineEvent(element[:len(element)-len(rest)], &b)
	}
	if rank != nil && !msgp.IsNil(rank) {
		r, err := msgpack.Rank(rank)
		if err != nil {
			return b, fmt.Errorf("events: decode engine batch: rank: %w", err)
		}
		for i := range b.Events {
			b.Events[i].Rank, b.Events[i].HasRank = r, true
		}
	}
	return b, nil
}

// rawEvent holds the encodings of an event's fields, nil where it has none.
type rawEvent struct {
	hashes, parent, tokens, size, loraID, medium, lora, keys, group, spec,
	locality, ownership, lookahead, salt, objects []byte
}

func (r *rawEvent) set(key string, value []byte) {
	if msgp.IsNil(value) {
		return
	}
	switch key {
	case "block_hashes":
		r.hashes = value
	case "parent_block_hash":
		r.parent = value
	case "token_ids":
		r.tokens = value
	case "block_size":
		r.size = value
	case "lora_id":
		r.loraID = value
	case "medium":
		r.medium = value
	case "lora_name":
		r.lora = value
	case "extra_keys":
		r.keys = value
	case "group_idx":
		r.group = value
	case "kv_cache_spec_kind":
		r.spec = value
	case "locality":
		r.locality = value
	case "ownership":
		r.ownership = value
	case "lookahead_token_ids":
		r.lookahead = value
	case "cache_salt":
		r.salt = value
	case "block_mm_infos":
		r.objects = value
	}
}

// The fields of events that are arrays, by index. Behind the stored ones come
// more, which differ by version and are told apart by type.
//
//nolint:gochecknoglobals // tables
var (
	storedFields  = [...]string{"", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"}
	removedFields = [...]string{"", "block_hashes", "medium", "group_idx"}
)

// setAt takes the i-th element of an event that is an array.
func (r *rawEvent) setAt(tag string, i int, value []byte) {
	switch {
	case tag == "BlockRemoved":
		if i < len(removedFields) {
			r.set(removedFields[i], value)
		}
	case i < len(storedFields):
		r.set(storedFields[i], value)
	default:
		switch msgp.NextType(value) {
		case msgp.ArrayType:
			r.set("block_mm_infos", value)
		case msgp.StrType:
			if r.spec == nil {
				r.set("kv_cache_spec_kind", value)
			}
		case msgp.IntType, msgp.UintType:
			if r.group == nil && r.spec == nil { // behind the kind: its window
				r.set("group_idx", value)
			}
		default: // a later version's
		}
	}
}

// readEngineEvent adds an event to the batch, or counts it.
func readEngineEvent(data []byte, b *EngineBatch) {
	var tag string
	var raw rawEvent
	var err error
	if msgp.NextType(data) == msgp.ArrayType {
		err = msgpack.EachElement(data, func(i int, value []byte) (err error) {
			if i == 0 {
				tag, _, err = msgp.ReadStringBytes(value)
				return err
			}
			raw.setAt(tag, i, value)
			return nil
		})
	} else {
		_, err = msgpack.EachField(data, func(key, value []byte) (err error) {
			if string(key) == "type" {
				tag, _, err = msgp.ReadStringBytes(value)
			} else {
				raw.set(string(key), value)
			}
			return err
		})
	}
	ev := EngineEvent{}
	switch tag {
	case "BlockStored":
		ev.Kind = EngineStored
	case "BlockRemoved":
		ev.Kind = EngineRemoved
	case "AllBlocksCleared":
		ev.Kind = EngineCleared
	default:
		if err != nil || tag == "" {
			b.Drops[DropBad]++
		} else {
			b.Drops[DropKind]++
		}
		return
	}
	reason := DropBad
	if err == nil {
		reason, err = raw.read(&ev)
	}
	switch {
	case err != nil:
		b.Drops[DropBad] += max(1, len(ev.Hashes))
	case reason != DropReasons:
		b.Drops[reason] += max(1, len(ev.Hashes))
	default:
		b.Events = append(b.Events, ev)
	}
}

// read fills in ev. It returns a reason to leave the event out, or [DropReasons].
func (r *rawEvent) read(ev *EngineEvent) (DropReason, error) {
	if ev.Kind == EngineCleared {
		return DropReasons, nil
	}
	var err error
	if ev.Hashes, err = msgpack.List(r.hashes, 1, readHash); err != nil {
		return 0, fmt.Errorf("block_hashes: %w", err)
	}
	if r.group != nil {
		group, err := msgpack.Uint(r.group)
		if err != nil || group >= maxGroup {
			return 0, fmt.Errorf("%w: group_idx", msgpack.ErrShape)
		}
		ev.Group = int(group)
	}
	reason, err := r.place(ev)
	if err != nil || reason != DropReasons || ev.Kind == EngineRemoved {
		return reason, err
	}
	if r.parent != nil {
		ev.HasParent = true
		if ev.Parent, err = readHash(r.parent); err != nil {
			return 0, fmt.Errorf("parent_block_hash: %w", err)
		}
	}
	if err := r.readTokens(ev); err != nil {
		return 0, err
	}
	return DropReasons, r.readNames(ev)
}

// place says where the blocks are, and whether that is any business of ours.
func (r *rawEvent) place(ev *EngineEvent) (DropReason, error) {
	if r.spec != nil {
		var err error
		if ev.Spec, _, err = msgp.ReadStringBytes(r.spec); err != nil {
			return 0, fmt.Errorf("kv_cache_spec_kind: %w", err)
		}
	}
	if r.ownership != nil {
		return DropForeign, nil
	}
	if r.locality != nil {
		locality, _, err := msgp.ReadStringBytes(r.locality)
		if err != nil || !strings.EqualFold(locality, "LOCAL") {
			return DropForeign, nil //nolint:nilerr // what is not said to be here is not here
		}
	}
	if r.medium != nil {
		medium, _, err := msgp.ReadStringBytes(r.medium)
		tier, ok := mediumTier(medium)
		if err != nil || !ok {
			return DropMedium, nil //nolint:nilerr // no text is no medium that we know
		}
		ev.Tier = tier
	}
	return DropReasons, nil
}

func mediumTier(medium string) (indexer.Tier, bool) {
	switch strings.ToUpper(medium) {
	case "", "GPU", "DEVICE":
		return indexer.Device, true
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return indexer.HostPinned, true
	case "CPU_TIER2", "DISK", "NVME", "STORAGE", "FS":
		return indexer.Disk, true
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED", "OBJ":
		return indexer.External, true
	default:
		return 0, false
	}
}

func (r *rawEvent) readTokens(ev *EngineEvent) error {
	if r.size != nil {
		size, err := msgpack.Uint(r.size)
		if err != nil || size > math.MaxInt32 {
			return fmt.Errorf("%w: block_size", msgpack.ErrShape)
		}
		ev.BlockSize = int(size)
	}
	if r.tokens != nil {
		var last uint32
		tokens, err := msgpack.List(r.tokens, 1, func(data []byte) (token uint32, err error) {
			if msgp.NextType(data) != msgp.ArrayType {
				return readToken(data)
			}
			// A pair: a token and the one behind it.
			ev.Window = true
			err = msgpack.EachElement(data, func(i int, value []byte) (err error) {
				switch i {
				case 0:
					token, err = readToken(value)
				case 1:
					last, err = readToken(value)
				}
				return err
			})
			return token, err
		})
		if err != nil {
			return fmt.Errorf("token_ids: %w", err)
		}
		if ev.Tokens = tokens; ev.Window {
			ev.Tokens = append(tokens, last)
		}
	}
	if r.lookahead != nil {
		var err error
		ev.Lookahead, err = msgpack.List(r.lookahead, 1, func(data []byte) (l Lookahead, err error) {
			if msgp.IsNil(data) {
				return l, nil
			}
			err = msgpack.EachElement(data, func(i int, value []byte) (err error) {
				if i == 0 {
					l.Known = true
					l.Token, err = readToken(value)
				}
				return err
			})
			return l, err
		})
		if err != nil {
			return fmt.Errorf("lookahead_token_ids: %w", err)
		}
	}
	return nil
}

// readNames reads what else decides over a block's hash: adapter, salt, objects.
func (r *rawEvent) readNames(ev *EngineEvent) (err error) {
	if r.lora != nil {
		if ev.LoRA, _, err = msgp.ReadStringBytes(r.lora); err != nil {
			return fmt.Errorf("lora_name: %w", err)
		}
	}
	if r.loraID != nil {
		id, err := msgpack.Uint(r.loraID)
		if err != nil {
			return fmt.Errorf("lora_id: %w", err)
		}
		ev.LoRAID, ev.HasLoRAID = int64(id), true
	}
	ev.Usable = len(ev.Hashes)
	if r.keys != nil {
		if err := readExtraKeys(r.keys, ev); err != nil {
			return fmt.Errorf("extra_keys: %w", err)
		}
	}
	if r.salt != nil {
		ev.HasSalt = true
		if ev.Salt, _, err = msgp.ReadStringBytes(r.salt); err != nil {
			return fmt.Errorf("cache_salt: %w", err)
		}
	}
	if r.objects != nil {
		// The same objects as among the keys, with better names.
		if ev.Objects, err = msgpack.List(r.objects, 1, readObjects); err != nil {
			return fmt.Errorf("block_mm_infos: %w", err)
		}
	}
	return nil
}

// readExtraKeys reads, block by block, what the engine hashed besides tokens. It
// stops at the first block with something that nobody knows: to hash that block
// without it would be a false hit for others.
func readExtraKeys(data []byte, ev *EngineEvent) error {
	objects := false
	lists := make([][]uint64, 0, len(ev.Hashes))
	err := msgpack.EachElement(data, func(i int, value []byte) error {
		if i >= ev.Usable {
			return nil
		}
		keys := blockKeys{lora: ev.LoRA}
		if !msgp.IsNil(value) {
			if err := msgpack.EachElement(value, keys.take); err != nil {
				return err
			}
		}
		switch {
		case keys.odd, len(keys.names) > 0 && ev.LoRA == "" && ev.HasLoRAID:
			// The latter may be the adapter's name or a salt.
			ev.Usable = i
			return nil
		case len(keys.names) == 1:
			salt, tagged := strings.CutPrefix(keys.names[0], saltTag)
			switch {
			case i == 0 && (tagged || !ev.HasParent):
				ev.Salt, ev.HasSalt = salt, true
			case !ev.HasSalt || salt != ev.Salt:
				// A salt stands on the first block only, or says the same again.
				ev.Usable = i
				return nil
			}
		}
		objects = objects || len(keys.objects) > 0
		lists = append(lists, keys.objects)
		return nil
	})
	if objects {
		ev.Objects = lists
	}
	return err
}

// blockKeys are the extra keys of a block.
type blockKeys struct {
	lora    string
	names   []string // which nobody knows yet
	objects []uint64
	odd     bool
}

func (k *blockKeys) take(i int, value []byte) error {
	switch msgp.NextType(value) {
	case msgp.NilType:
		return nil
	case msgp.StrType:
		text, _, err := msgp.ReadStringBytes(value)
		if err != nil {
			return err
		}
		if i == 0 && k.lora != "" && text == k.lora {
			return nil
		}
		if hash, ok := objectHash(text); ok {
			k.objects = append(k.objects, hash)
		} else if k.names = append(k.names, text); len(k.names) > 1 {
			k.odd, k.names = true, k.names[:1]
		}
		return nil
	case msgp.ArrayType:
		// An object and its place: the place is not hashed.
		found := false
		err := msgpack.EachElement(value, func(i int, value []byte) error {
			if i > 0 || msgp.NextType(value) != msgp.StrType {
				return nil
			}
			text, _, err := msgp.ReadStringBytes(value)
			if hash, ok := objectHash(text); ok {
				k.objects, found = append(k.objects, hash), true
			}
			return err
		})
		k.odd = k.odd || !found
		return err
	default:
		k.odd = true
		return nil
	}
}

// objectHash reads the name of an image or the like, 64 hex digits.
func objectHash(text string) (uint64, bool) {
	if len(text) != 64 {
		return 0, false
	}
	for i := range len(text) {
		if c := text[i] | 0x20; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return 0, false
		}
	}
	hash, err := strconv.ParseUint(text[:16], 16, 64)
	return hash, err == nil
}

// readObjects reads a block's entry of block_mm_infos.
func readObjects(data []byte) (hashes []uint64, err error) {
	if msgp.IsNil(data) {
		return nil, nil
	}
	_, err = msgpack.EachField(data, func(key, value []byte) error {
		if string(key) != "mm_objects" || msgp.IsNil(value) {
			return nil
		}
		hashes, err = msgpack.List(value, 1, func(data []byte) (hash uint64, err error) {
			found := false
			_, err = msgpack.EachField(data, func(key, value []byte) (err error) {
				if string(key) == "mm_hash" {
					found = true
					hash, err = msgpack.Uint(value)
				}
				return err
			})
			if err == nil && !found {
				err = fmt.Errorf("%w: no mm_hash", msgpack.ErrShape)
			}
			return hash, err
		})
		return err
	})
	return hashes, err
}

// readHash reads a block's id. Of a byte string the last eight count: engines cut
// their hashes to them as well where ids must be integers.
func readHash(data []byte) (uint64, error) {
	if msgp.NextType(data) != msgp.BinType {
		return msgpack.Uint(data)
	}
	b, _, err := msgp.ReadBytesZC(data)
	if err != nil {
		return 0, err
	}
	if len(b) < 8 {
		return 0, fmt.Errorf("%w: a hash of %d bytes", msgpack.ErrShape, len(b))
	}
	return binary.BigEndian.Uint64(b[len(b)-8:]), nil
}

func readToken(data []byte) (uint32, error) {
	token, _, err := msgp.ReadUint32Bytes(data)
	return token, err
}

func readFloat(data []byte) (float64, error) {
	switch msgp.NextType(data) {
	case msgp.Float64Type, msgp.Float32Type:
		f, _, err := msgp.ReadFloat64Bytes(data)
		return f, err
	case msgp.NilType:
		return 0, nil
	default:
		n, err := msgpack.Uint(data)
		return float64(n), err
	}
}
