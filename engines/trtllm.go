// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// trtEvent is an event of TensorRT-LLM.
type trtEvent struct {
	EventID *uint64 `json:"event_id"`
	Window  int     `json:"window_size"`
	Rank    *uint32 `json:"attention_dp_rank"`
	Data    struct {
		Type   string          `json:"type"`
		Parent *trtHash        `json:"parent_hash"`
		Blocks []trtBlock      `json:"blocks"`
		Hashes []trtHash       `json:"block_hashes"`
		Hash   *trtHash        `json:"block_hash"`
		Level  json.RawMessage `json:"cache_level"`
	} `json:"data"`
}

type trtBlock struct {
	Hash   *trtHash `json:"block_hash"`
	Tokens []struct {
		ID    *uint32 `json:"token_id"`
		Extra uint64  `json:"token_extra_id"`
	} `json:"tokens"`
	Level   int        `json:"cache_level"`
	LoRA    *int64     `json:"lora_id"`
	Salt    *string    `json:"cache_salt"`
	Objects []trtMMKey `json:"mm_keys"`
}

type trtMMKey struct {
	Hash string `json:"hash"`
}

// trtHash is a block's id: a positive or negative number, or hex digits, of which the first 16 are
// used.
type trtHash uint64

// UnmarshalJSON reads either form.
func (h *trtHash) UnmarshalJSON(data []byte) error {
	text, isText := strings.CutPrefix(string(data), `"`)
	base := 10
	switch {
	case isText && len(text) < 17:
		return fmt.Errorf("%w: a hash of %d digits", msgpack.ErrShape, len(text)-1)
	case isText:
		text, base = text[:16], 16
	case strings.HasPrefix(text, "-"):
		n, err := strconv.ParseInt(text, base, 64) // keeps its bits
		*h = trtHash(n)
		return err
	}
	n, err := strconv.ParseUint(text, base, 64)
	*h = trtHash(n)
	return err
}

// decodeTRTLLM reads the answer of TensorRT-LLM's /kv_cache_events: a JSON list. An event that
// cannot be read does not affect the others, as in [DecodeBatch].
func decodeTRTLLM(data []byte) (EngineBatch, error) {
	var b EngineBatch
	var list []json.RawMessage
	if err := json.Unmarshal(data, &list); err != nil {
		return b, fmt.Errorf("engines: decode TensorRT-LLM events: %w", err)
	}
	for _, element := range list {
		var ev trtEvent
		if err := json.Unmarshal(element, &ev); err != nil || ev.EventID == nil || ev.Window < 0 {
			b.Drops[DropBad]++
			continue
		}
		ev.appendTo(&b)
	}
	return b, nil
}

// appendTo appends the event to a batch. An event that cannot be used is appended with its id
// only, so that it does not count as lost.
func (t *trtEvent) appendTo(b *EngineBatch) {
	base := EngineEvent{ID: *t.EventID, HasID: true, WindowSize: t.Window}
	if t.Rank != nil {
		base.Rank, base.HasRank = *t.Rank, true
	}
	before := len(b.Events)
	switch t.Data.Type {
	case "created":
		base.Kind = EngineStarted
	case "stored":
		t.stored(base, b)
	case "removed":
		base.Kind, base.AnyTier = EngineRemoved, true
		for _, h := range t.Data.Hashes {
			base.Hashes = append(base.Hashes, uint64(h))
		}
	case "updated":
		t.updated(base, b)
	case "":
		b.Drops[DropBad]++
	default:
		b.Drops[DropKind]++
	}
	if len(b.Events) == before {
		b.Events = append(b.Events, base) // perhaps with an unknown kind
	}
}

// stored adds one event for each run of blocks on one tier.
func (t *trtEvent) stored(base EngineEvent, b *EngineBatch) {
	base.Kind = EngineStored
	defer func(first int) {
		// All runs have the event's id.
		for i := first + 1; i < len(b.Events); i++ {
			b.Events[i].SameID = true
		}
	}(len(b.Events))
	if t.Data.Parent != nil {
		base.Parent, base.HasParent = uint64(*t.Data.Parent), true
	}
	ev, cut := base, false
	for i := range t.Data.Blocks {
		block := &t.Data.Blocks[i]
		tier, ok := trtTier(block.Level)
		if block.Hash == nil || len(block.Tokens) == 0 || !ok || cut {
			// Blocks after an unreadable block have no known parent.
			reason := DropBad
			if block.Hash != nil && !ok {
				reason = DropMedium
			}
			b.Drops[reason] += len(t.Data.Blocks) - i
			break
		}
		if n := len(ev.Hashes); n > 0 && tier != ev.Tier {
			b.Events = append(b.Events, ev)
			base.Parent, base.HasParent = ev.Hashes[n-1], true
			ev = base
		}
		if len(ev.Hashes) == 0 {
			ev.Tier, ev.BlockSize, ev.HasLoRAID = tier, len(block.Tokens), block.LoRA != nil
			if block.Salt != nil {
				ev.Salt, ev.HasSalt = *block.Salt, true
			}
		}
		// Only the last block may be shorter, because it is not full.
		cut = len(block.Tokens) != ev.BlockSize
		if cut && len(block.Tokens) > ev.BlockSize {
			b.Drops[DropBad] += len(t.Data.Blocks) - i
			break
		}
		objects, usable := block.read(&ev)
		ev.Hashes = append(ev.Hashes, uint64(*block.Hash))
		if usable && ev.Usable == len(ev.Hashes)-1 {
			ev.Usable++
		}
		ev.Objects = append(ev.Objects, objects)
	}
	if len(ev.Hashes) > 0 {
		b.Events = append(b.Events, ev)
	}
}

// read adds the block's tokens. It returns the block's objects. usable is false if a token or an
// object cannot be read, or if tokens have extra ids without objects.
func (t *trtBlock) read(ev *EngineEvent) (objects []uint64, usable bool) {
	usable = true
	extra := false
	for _, token := range t.Tokens {
		if token.ID == nil {
			usable = false
			ev.Tokens = append(ev.Tokens, 0)
			continue
		}
		extra = extra || token.Extra != 0
		ev.Tokens = append(ev.Tokens, *token.ID)
	}
	for _, key := range t.Objects {
		hash, ok := objectHash(key.Hash)
		usable = usable && ok
		objects = append(objects, hash)
	}
	return objects, usable && (!extra || len(objects) > 0)
}

func (t *trtEvent) updated(base EngineEvent, b *EngineBatch) {
	var diff struct {
		Old *int `json:"old_value"`
		New *int `json:"new_value"`
	}
	if len(t.Data.Level) == 0 || string(t.Data.Level) == "null" {
		return // only the priority changed
	}
	if err := json.Unmarshal(t.Data.Level, &diff); err != nil || t.Data.Hash == nil || diff.Old == nil || diff.New == nil {
		b.Drops[DropBad]++
		return
	}
	from, ok := trtTier(*diff.Old)
	if !ok {
		b.Drops[DropMedium]++
		return
	}
	base.Kind, base.From, base.Hashes = EngineMoved, from, []uint64{uint64(*t.Data.Hash)}
	if base.Tier, ok = trtTier(*diff.New); !ok {
		base.GoneTo = true
	}
	b.Events = append(b.Events, base)
}

// trtTier returns the tier of a cache level: 0 is the device, 1 the host.
func trtTier(level int) (tier indexer.Tier, known bool) {
	tiers := [...]indexer.Tier{indexer.Device, indexer.HostPinned}
	if known = level >= 0 && level < len(tiers); known {
		tier = tiers[level]
	}
	return tier, known
}
