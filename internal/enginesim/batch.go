// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// batch encodes changes as an engine does: [time, events, rank], each event a map with its type.
func batch(changes []Change, rank uint32, sglang bool) []byte {
	list := []any{}
	for i := 0; i < len(changes); i++ {
		switch c := &changes[i]; c.Kind {
		case indexer.Stored, indexer.SideStored:
			step := *c
			if c.Spec != "" {
				step.Blocks, step.Tokens = slices.Clone(c.Blocks), slices.Clone(c.Tokens)
				for ; i+1 < len(changes) && changes[i+1].follows(&step); i++ {
					step.Blocks, step.Tokens = append(step.Blocks, changes[i+1].Blocks...), append(step.Tokens, changes[i+1].Tokens...)
				}
			}
			list = append(list, stored(&step, sglang))
		case indexer.Removed, indexer.SideRemoved:
			for _, name := range blockNames(c.Externals, sglang) { // one each, as vLLM does
				ev := map[string]any{"type": "BlockRemoved", "block_hashes": []any{name}, "medium": "GPU"}
				if c.Spec != "" {
					ev["group_idx"] = c.Group
				}
				list = append(list, ev)
			}
		default:
			list = append(list, map[string]any{"type": "AllBlocksCleared"})
		}
	}
	b, err := msgp.AppendIntf(nil, []any{float64(time.Now().UnixMicro()) / 1e6, list, rank})
	if err != nil {
		panic(err) // all values are plain data
	}
	return b
}

// follows reports whether a change stores the blocks behind those of another change. vLLM publishes the blocks of a
// step as one event, new blocks and copies.
func (c *Change) follows(o *Change) bool {
	return c.Kind == indexer.Stored && o.Kind == indexer.Stored && c.HasParent && c.Parent == o.Blocks[len(o.Blocks)-1].External
}

func stored(c *Change, sglang bool) map[string]any {
	names := c.Externals
	for _, b := range c.Blocks {
		names = append(names, b.External)
	}
	var size int
	if c.Kind == indexer.SideStored {
		size = c.Shape.Full
	} else {
		size = len(c.Tokens) / len(c.Blocks)
	}
	ev := map[string]any{
		"type": "BlockStored", "block_hashes": blockNames(names, sglang), "parent_block_hash": nil,
		"token_ids": c.Tokens, "block_size": size, "lora_id": nil, "medium": "GPU", "lora_name": nil,
	}
	if c.HasParent {
		ev["parent_block_hash"] = blockNames([]uint64{c.Parent}, sglang)[0]
	}
	if c.LoRA != "" {
		ev["lora_name"] = c.LoRA
	}
	switch {
	case sglang && c.Salt != "":
		ev["cache_salt"] = c.Salt
	case !sglang && (c.LoRA != "" || c.Salt != "" && !c.HasParent):
		ev["extra_keys"] = extraKeys(c, len(names))
	}
	if c.Spec != "" {
		ev["group_idx"], ev["kv_cache_spec_kind"], ev["kv_cache_spec_sliding_window"] = c.Group, c.Spec, nil
		if c.Window > 0 {
			ev["kv_cache_spec_sliding_window"] = c.Window
		}
	}
	return ev
}

// extraKeys returns the keys of each block that vLLM hashes besides its tokens: the adapter of
// every block, and the salt of the first block of a prompt.
func extraKeys(c *Change, blocks int) []any {
	all := make([]any, blocks)
	for i := range all {
		var keys []any
		if c.LoRA != "" {
			keys = append(keys, c.LoRA)
		}
		if c.Salt != "" && i == 0 && !c.HasParent {
			keys = append(keys, c.Salt)
		}
		if keys != nil {
			all[i] = keys
		}
	}
	return all
}

// blockNames returns the names of blocks as an engine writes them: SGLang as signed numbers.
func blockNames(names []uint64, sglang bool) []any {
	all := make([]any, len(names))
	for i, name := range names {
		if all[i] = name; sglang {
			all[i] = int64(name)
		}
	}
	return all
}

// PlaneFrames returns the frames of an envelope on the ZeroMQ sockets of Dynamo's event plane.
func PlaneFrames(e events.Envelope) [4][]byte {
	body := events.AppendEnvelope([]byte{1, 0, 0, 0, 0}, e) // the version and the size
	binary.BigEndian.PutUint32(body[1:], uint32(len(body)-5))
	return [4][]byte{
		[]byte(e.Topic), binary.BigEndian.AppendUint64(nil, e.PublisherID), binary.BigEndian.AppendUint64(nil, e.Sequence), body,
	}
}
