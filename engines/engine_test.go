// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
)

// Batches of engines, in the formats of vLLM 0.8.5, vLLM of 2026-05, vLLM with maps, and SGLang
// from 0.5.9 on. Each batch stores the tokens 1 to 4, removes the block and clears the cache.
const (
	batchZ1 = "92cb41da26cb302000009396ab426c6f636b53746f72656491d3cf97adeedb59e05bc0940102030404c092ac426c6f636b52656d6f76656491d3cf97adeedb59e05b91b0416c6c426c6f636b73436c6561726564"
	batchZ2 = "93cb41da26cb30200000939cab426c6f636b53746f72656491cf6896072ae8b31325c0940102030404c0a3475055c0c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76656491cf6896072ae8b31325a34750550091b0416c6c426c6f636b73436c656172656400"
	batchZ3 = "93cb41da26cb30200000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf6896072ae8b31325b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf6896072ae8b31325a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
	batchZ4 = "93cb41da26cb302000009397ab426c6f636b53746f72656491d3cf97adeedb59e05bc0940102030404c0a347505593ac426c6f636b52656d6f76656491d3cf97adeedb59e05baa4350555f50494e4e454491b0416c6c426c6f636b73436c656172656400"
)

// list and fields are inputs of encode besides scalars; fields are pairs.
type (
	list   []any
	fields []any
)

// encode writes a value as MessagePack, maps in the order of their fields.
func encode(dst []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return msgp.AppendNil(dst)
	case list:
		dst = msgp.AppendArrayHeader(dst, uint32(len(v)))
		for _, e := range v {
			dst = encode(dst, e)
		}
		return dst
	case fields:
		dst = msgp.AppendMapHeader(dst, uint32(len(v)/2))
		for _, e := range v {
			dst = encode(dst, e)
		}
		return dst
	case []uint32:
		dst = msgp.AppendArrayHeader(dst, uint32(len(v)))
		for _, e := range v {
			dst = msgp.AppendUint32(dst, e)
		}
		return dst
	case string:
		return msgp.AppendString(dst, v)
	case []byte:
		return msgp.AppendBytes(dst, v)
	case int:
		return msgp.AppendInt(dst, v)
	case uint64:
		return msgp.AppendUint64(dst, v)
	case float64:
		return msgp.AppendFloat64(dst, v)
	case bool:
		return msgp.AppendBool(dst, v)
	}
	panic(fmt.Sprintf("%T", v))
}

// blockStored is a BlockStored event as a map, with further fields after the usual ones.
func blockStored(hashes list, parent any, tokens any, size int, further ...any) fields {
	return append(fields{"type", "BlockStored", "block_hashes", hashes, "parent_block_hash", parent, "token_ids", tokens, "block_size", size}, further...)
}

func blockRemoved(hashes list, further ...any) fields {
	return append(fields{"type", "BlockRemoved", "block_hashes", hashes}, further...)
}

var cleared = fields{"type", "AllBlocksCleared"}

// seq returns n token ids.
func seq(from, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(from + i)
	}
	return tokens
}

func locals(tokens []uint32, size int, seed uint64) []uint64 {
	return indexer.AppendLocalHashes(nil, tokens, size, seed)
}

// apply applies the events of one batch, and returns the resulting events, one per line.
func apply(t testing.TB, e *engines.Engine, evs ...any) (string, engines.Drops) {
	t.Helper()
	return applyData(t, e, encode(nil, list{1755000000.5, list(evs), 0}))
}

func applyData(t testing.TB, e *engines.Engine, data []byte) (string, engines.Drops) {
	t.Helper()
	batch, err := engines.DecodeBatch(data)
	if err != nil {
		t.Fatal(err)
	}
	out, drops := e.Apply(&batch)
	return describe(out), drops
}

func describe(evs []events.RouterEvent) string {
	var b strings.Builder
	for _, r := range evs {
		fmt.Fprintf(&b, "%d/%d ", r.DPRank, r.Event.Tier)
		switch ev := r.Event; ev.Kind {
		case indexer.Stored:
			b.WriteString("stored")
			if ev.HasParent {
				fmt.Fprintf(&b, " after %d", ev.Parent)
			}
			for _, block := range ev.Blocks {
				fmt.Fprintf(&b, " %d=%d", block.External, block.Local)
			}
		case indexer.Removed:
			fmt.Fprintf(&b, "removed %d", ev.Externals)
		case indexer.Shaped:
			fmt.Fprintf(&b, "shape %v", *ev.Shape)
		case indexer.SideStored, indexer.SideRemoved:
			fmt.Fprintf(&b, "group %d: %s %d", ev.Group, map[bool]string{true: "stored", false: "removed"}[ev.Kind == indexer.SideStored], ev.Externals)
		default:
			b.WriteString("cleared")
		}
		b.WriteString("\n")
	}
	return b.String()
}

// dropped formats the counts that are not zero.
func dropped(d engines.Drops) string {
	var words []string
	for r, n := range d {
		if n != 0 {
			words = append(words, fmt.Sprintf("%s=%d", engines.DropReason(r), n))
		}
	}
	return strings.Join(words, " ")
}

func TestBatchVectors(t *testing.T) {
	const vllm, sglang = "7536218907325174565", "14958615928728313947"
	for name, c := range map[string]struct{ batch, want string }{
		"Z1": {batchZ1, "0/0 stored " + sglang + "=14643705804678351452\n0/0 removed [" + sglang + "]\n0/0 cleared\n"},
		"Z2": {batchZ2, "0/0 stored " + vllm + "=14643705804678351452\n0/0 removed [" + vllm + "]\n0/0 cleared\n"},
		"Z3": {batchZ3, "0/0 stored " + vllm + "=14643705804678351452\n0/0 removed [" + vllm + "]\n0/0 cleared\n"},
		"Z4": {batchZ4, "0/0 stored " + sglang + "=14643705804678351452\n0/1 removed [" + sglang + "]\n0/0 cleared\n"},
	} {
		e := engines.NewEngine(engines.EngineOptions{BlockSize: 4})
		got, drops := applyData(t, e, unhex(t, c.batch))
		if got != c.want || drops != (engines.Drops{}) || e.Blocks() != 0 {
			t.Errorf("%s: %d blocks kept, dropped %q, got\n%swant\n%s", name, e.Blocks(), dropped(drops), got, c.want)
		}
	}
}

// TestStored has the events of one block and the resulting events for the index. It is the table
// of the edge cases that Dynamo treats in the same way or otherwise.
func TestStored(t *testing.T) {
	tokens := seq(1000, 16)
	plain := locals(tokens, 16, indexer.Seed("", ""))[0]
	store := func(tier int, local uint64) string { return fmt.Sprintf("0/%d stored 5=%d\n", tier, local) }
	image := strings.Repeat("ab", 32)
	object := indexer.ObjectHash(tokens, []uint64{0xabababababababab}, indexer.Seed("", ""))
	pairs := list{}
	for i := range 16 {
		pairs = append(pairs, list{i, i + 1})
	}
	bytes := func(n int) []byte {
		b := make([]byte, n)
		b[n-1] = 5
		return b
	}
	for _, c := range []struct {
		name  string
		opt   engines.EngineOptions
		event any
		want  string
		drops string
	}{
		{"plain", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16), store(0, plain), ""},
		{"unknown fields", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "new", fields{"a", list{1}}), store(0, plain), ""},
		{"session", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "session_id", "s"), store(0, plain), ""},
		{"medium nil", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "medium", nil), store(0, plain), ""},
		{"medium GPU, group 0", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "medium", "GPU", "group_idx", 0), store(0, plain), ""},
		{"medium CPU", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "medium", "CPU"), store(1, plain), ""},
		{"medium cpu_tier2", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "medium", "cpu_tier2"), store(2, plain), ""},
		{"medium STORAGE, local", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "medium", "STORAGE", "locality", "LOCAL"), store(2, plain), ""},
		{"medium EXTERNAL", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "medium", "EXTERNAL"), store(3, plain), ""},
		{"medium unknown", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "medium", "WEIRD"), "", "medium=1"},
		{"medium a number", engines.EngineOptions{}, blockStored(list{5, 6}, nil, tokens, 16, "medium", 3), "", "medium=2"},
		{"remote", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "locality", "REMOTE"), "", "foreign=1"},
		{"owned", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "ownership", "tier1"), "", "foreign=1"},
		{"group 1 without kind", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "group_idx", 1), "", "group=1"},
		{"group 1, full", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "group_idx", 1, "kv_cache_spec_kind", "full_attention"), store(0, plain), ""},
		{"mla", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "group_idx", 0, "kv_cache_spec_kind", "mla_attention"), store(0, plain), ""},
		{"sliding window", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "kv_cache_spec_kind", "sliding_window", "kv_cache_spec_sliding_window", 128), "0/0 shape {16 16 [{0 1 16 128}]}\n0/0 group 0: stored [5]\n0/0 shape {16 16 []}\n", "group_kind=1"},
		{"group out of bounds", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "group_idx", 1<<40), "", "bad=1"},

		{"salt of vLLM", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "extra_keys", list{list{"tenant-a"}}), store(0, locals(tokens, 16, indexer.Seed("", "tenant-a"))[0]), ""},
		{"salt of Dynamo", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "extra_keys", list{list{"dynamo-cache-salt:tenant-a"}}), store(0, locals(tokens, 16, indexer.Seed("", "tenant-a"))[0]), ""},
		{"salt of SGLang", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "cache_salt", "tenant-a", "lora_name", "adapter-a"), store(0, locals(tokens, 16, indexer.Seed("adapter-a", "tenant-a"))[0]), ""},
		{"adapter", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "lora_id", 3, "lora_name", "adapter-a", "extra_keys", list{list{"adapter-a"}}), store(0, locals(tokens, 16, indexer.Seed("adapter-a", ""))[0]), ""},
		{"adapter and salt", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "lora_id", 3, "lora_name", "adapter-a", "extra_keys", list{list{"adapter-a", "s1"}}), store(0, locals(tokens, 16, indexer.Seed("adapter-a", "s1"))[0]), ""},
		{"adapter by number", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "lora_id", 3), "", "lora=1"},
		{"adapter by number, a name that may be it", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "lora_id", 3, "extra_keys", list{list{"adapter-a"}}), "", "lora=1"},
		{"two names", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "extra_keys", list{list{"a", "b"}}), "", "keys=1"},
		{"bytes among the keys", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "extra_keys", list{list{[]byte("embeds")}}), "", "keys=1"},
		{"an image with a short name", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "extra_keys", list{list{list{"a1b2c3", 4}}}), "", "keys=1"},
		{"an image", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "extra_keys", list{list{list{image, 2}}}), store(0, object), ""},
		{"an image without place", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "extra_keys", list{list{image}}), store(0, object), ""},
		{"an image of Dynamo", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "block_mm_infos", list{fields{"mm_objects", list{fields{"mm_hash", uint64(0xabababababababab), "offsets", list{}}}}}), store(0, object), ""},
		{"an image with its placeholder", engines.EngineOptions{Placeholder: 1003}, blockStored(list{5}, nil, tokens, 16, "extra_keys", list{list{list{image, 2}}}), store(0, func() uint64 {
			padded := slices.Clone(tokens)
			indexer.ReplacePlaceholders(padded, 1003, []uint64{0xabababababababab})
			return locals(padded, 16, indexer.Seed("", ""))[0]
		}()), ""},

		{"a hash of 8 bytes", engines.EngineOptions{}, blockStored(list{bytes(8)}, nil, tokens, 16), store(0, plain), ""},
		{"a hash of 32 bytes", engines.EngineOptions{}, blockStored(list{bytes(32)}, nil, tokens, 16), store(0, plain), ""},
		{"a hash of 4 bytes", engines.EngineOptions{}, blockStored(list{bytes(4)}, nil, tokens, 16), "", "bad=1"},
		{"a hash that is text", engines.EngineOptions{}, blockStored(list{"5"}, nil, tokens, 16), "", "bad=1"},
		{"a negative hash", engines.EngineOptions{}, blockStored(list{-5}, nil, tokens, 16), strings.Replace(store(0, plain), " 5=", " 18446744073709551611=", 1), ""},
		{"no hashes", engines.EngineOptions{}, blockStored(list{}, nil, list{}, 16), "", ""},
		{"unknown parent", engines.EngineOptions{}, blockStored(list{5}, 999, tokens, 16), "", "parent=1"},
		{"unknown parent, known salt", engines.EngineOptions{}, blockStored(list{5}, 999, tokens, 16, "cache_salt", ""), strings.Replace(store(0, plain), "stored", "stored after 999", 1), ""},
		{"two blocks, tokens of one", engines.EngineOptions{}, blockStored(list{5, 6}, nil, tokens, 16), store(0, plain), "tokens=1"},
		{"more tokens than blocks", engines.EngineOptions{}, blockStored(list{5}, nil, seq(0, 32), 16), "", "tokens=1"},
		{"unknown block without tokens", engines.EngineOptions{}, blockStored(list{5}, nil, list{}, 0), "", "block=1"},
		{"token ids beyond 32 bits", engines.EngineOptions{}, blockStored(list{5}, nil, list{1 << 40}, 1), "", "bad=1"},

		{"pairs", engines.EngineOptions{}, blockStored(list{5}, nil, pairs, 16), store(0, indexer.AppendLocalHashes(nil, seq(0, 16), 16, indexer.Seed("", ""))[0]), ""},
		{"lookahead", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 16, "lookahead_token_ids", list{list{7}}), store(0, plain), ""},
		{"a token more", engines.EngineOptions{}, blockStored(list{5}, nil, append(slices.Clone(tokens), 7), 16), "", "tokens=1"},
		{"a pair of three", engines.EngineOptions{}, blockStored(list{5}, nil, list{list{1, 2, 3}}, 1), "", "bad=1"},

		{"size 24", engines.EngineOptions{}, blockStored(list{5}, nil, seq(0, 24), 24), "", "size=1"},
		{"size 5", engines.EngineOptions{}, blockStored(list{5}, nil, seq(0, 5), 5), "", "size=1"},
		{"size 0", engines.EngineOptions{}, blockStored(list{5}, nil, tokens, 0), "", "size=1"},
		{"three pages of size 1", engines.EngineOptions{}, blockStored(list{5, 6, 7}, nil, seq(0, 3), 1), "", ""},

		{"a kind nobody knows", engines.EngineOptions{}, fields{"type", "BlockMelted"}, "", "kind=1"},
		{"no kind", engines.EngineOptions{}, fields{"kind", "x"}, "", "bad=1"},
		{"a number", engines.EngineOptions{}, 7, "", "bad=1"},
		{"an empty array", engines.EngineOptions{}, list{}, "", "bad=1"},
		{"positional, with images before the group", engines.EngineOptions{}, list{"BlockStored", list{5}, nil, tokens, 16, nil, "GPU", nil, nil, list{fields{"mm_objects", list{fields{"mm_hash", uint64(0xabababababababab)}}}}, 0, "full_attention", 4096}, store(0, object), ""},
		{"positional, group 2 of windows", engines.EngineOptions{}, list{"BlockStored", list{5}, nil, tokens, 16, nil, "GPU", nil, nil, 2, "sliding_window", 4096}, "0/0 shape {16 16 [{2 1 16 4096}]}\n0/0 group 2: stored [5]\n", ""},
		{"group of an unknown kind", engines.EngineOptions{}, blockStored(list{5, 6}, nil, seq(0, 32), 16, "group_idx", 1, "kv_cache_spec_kind", "new"), "0/0 shape {16 16 [{1 0 16 0}]}\n", "group_kind=2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.opt.BlockSize = 16
			e := engines.NewEngine(c.opt)
			// Other blocks must not be affected.
			after := seq(5000, 16)
			got, drops := apply(t, e, c.event, blockStored(list{77}, nil, after, 16))
			want := c.want + fmt.Sprintf("0/0 stored 77=%d\n", locals(after, 16, indexer.Seed("", ""))[0])
			if diff := cmp.Diff(want, got); diff != "" || dropped(drops) != c.drops {
				t.Errorf("dropped %q, want %q; (-want +got):\n%s", dropped(drops), c.drops, diff)
			}
		})
	}
}

// Only the first block of a sequence carries a salt; later blocks inherit it.
func TestSaltIsInherited(t *testing.T) {
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 4})
	apply(t, e, blockStored(list{1, 2}, nil, seq(0, 8), 4, "extra_keys", list{list{"s"}, nil}))
	got, drops := apply(t, e, blockStored(list{3}, 2, seq(8, 4), 4, "extra_keys", list{nil}))
	if want := fmt.Sprintf("0/0 stored after 2 3=%d\n", locals(seq(8, 4), 4, indexer.Seed("", "s"))[0]); got != want || dropped(drops) != "" {
		t.Errorf("got %q, dropped %q; want %q", got, dropped(drops), want)
	}
	// A block after an ignored block is ignored, and so is its removal.
	got, drops = apply(t, e, blockStored(list{7, 8}, nil, seq(0, 8), 4, "extra_keys", list{nil, list{"a", "b"}}))
	if dropped(drops) != "keys=1" || !strings.Contains(got, "7=") || strings.Contains(got, "8=") {
		t.Errorf("got %q, dropped %q", got, dropped(drops))
	}
	if got, drops = apply(t, e, blockStored(list{9}, 8, seq(8, 4), 4)); got != "" || dropped(drops) != "parent=1" {
		t.Errorf("got %q, dropped %q", got, dropped(drops))
	}
	if got, _ = apply(t, e, blockRemoved(list{9, 8, 7})); got != "0/0 removed [7]\n" {
		t.Errorf("got %q", got)
	}
	// Ranks are separate.
	batch, err := engines.DecodeBatch(encode(nil, list{1.5, list{blockStored(list{4}, 3, seq(12, 4), 4)}, 1}))
	if err != nil {
		t.Fatal(err)
	}
	if out, drops := e.Apply(&batch); len(out) != 0 || dropped(drops) != "parent=1" {
		t.Errorf("got %v, dropped %q", out, dropped(drops))
	}
}

// vLLM reports each copy of a block, and the removal of each copy.
func TestCopiesAreCounted(t *testing.T) {
	block := blockStored(list{1}, nil, seq(0, 4), 4)
	for _, setLike := range []bool{false, true} {
		e := engines.NewEngine(engines.EngineOptions{BlockSize: 4, SetLike: setLike})
		apply(t, e, block, block, block)
		if e.Copies() != 3 {
			t.Errorf("%d copies, want 3", e.Copies())
		}
		got, _ := apply(t, e, blockRemoved(list{1}), blockRemoved(list{1}))
		want := ""
		if setLike {
			want = "0/0 removed [1 1]\n"
		}
		if got != want {
			t.Errorf("set-like %v: two removals give %q, want %q", setLike, got, want)
		}
		if got, _ := apply(t, e, blockRemoved(list{1})); got != "0/0 removed [1]\n" {
			t.Errorf("set-like %v: the third gives %q", setLike, got)
		}
	}
	// The same block with another last token: the first content stays.
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 4})
	first, _ := apply(t, e, blockStored(list{1}, nil, list{0, 1, 2, 3}, 4))
	again, drops := apply(t, e, blockStored(list{1}, nil, list{0, 1, 2, 9}, 4))
	if first != again || dropped(drops) != "conflict=1" {
		t.Errorf("first %q, again %q, dropped %q", first, again, dropped(drops))
	}
}

func TestBlocksMoveWithoutTheirTokens(t *testing.T) {
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 4})
	apply(t, e, blockStored(list{1, 2, 3}, nil, seq(0, 12), 4))
	l := locals(seq(0, 12), 4, indexer.Seed("", ""))
	got, drops := apply(t, e, blockStored(list{1, 3, 9, 2}, nil, list{}, 0, "medium", "CPU"))
	want := fmt.Sprintf("0/1 stored 1=%d\n0/1 stored after 2 3=%d\n0/1 stored after 1 2=%d\n", l[0], l[2], l[1])
	if got != want || dropped(drops) != "block=1" {
		t.Errorf("dropped %q, got\n%swant\n%s", dropped(drops), got, want)
	}
	if got, _ = apply(t, e, blockRemoved(list{2}), blockRemoved(list{2, 9}, "medium", "CPU"), cleared); got != "0/0 removed [2]\n0/1 removed [2]\n0/0 cleared\n" {
		t.Errorf("got %q", got)
	}
	if e.Blocks() != 0 {
		t.Errorf("%d blocks kept of an empty engine", e.Blocks())
	}
}

// A rank whose side group turns out to have full attention is that of a plain model again.
func TestASideGroupBecomesFull(t *testing.T) {
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 4})
	full := blockStored(list{1}, nil, seq(0, 4), 4, "group_idx", 0, "kv_cache_spec_kind", "full_attention")
	l := locals(seq(0, 4), 4, indexer.Seed("", ""))
	got, _ := apply(t, e, blockStored(list{1}, nil, seq(0, 4), 4, "group_idx", 0, "kv_cache_spec_kind", "mamba"), full)
	if want := fmt.Sprintf("0/0 shape {4 4 [{0 2 4 0}]}\n0/0 group 0: stored [1]\n0/0 shape {4 4 []}\n0/0 stored 1=%d\n", l[0]); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// A saved state gives the index the shape of a rank, too: without it, too many blocks would count.
func TestARestoredEngineHasItsShape(t *testing.T) {
	opt := engines.EngineOptions{BlockSize: 4}
	e := engines.NewEngine(opt)
	apply(t, e, blockStored(list{1}, nil, seq(0, 8), 8))
	_, evs, _ := engines.SaveAndRestore(e, opt)
	if got := describe(evs); !strings.HasPrefix(got, "0/0 shape {4 8 []}\n0/0 stored ") {
		t.Errorf("got %s", got)
	}
}

// Blocks of groups that are not prefixes have the same ids as blocks that are.
func TestGroupsAreApart(t *testing.T) {
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 4})
	_, drops := apply(t, e,
		blockStored(list{1}, nil, seq(0, 4), 4, "group_idx", 0, "kv_cache_spec_kind", "full_attention"),
		blockStored(list{1}, nil, seq(0, 4), 4, "group_idx", 1, "kv_cache_spec_kind", "sliding_window"))
	if dropped(drops) != "" {
		t.Errorf("dropped %q", dropped(drops))
	}
	if got, drops := apply(t, e, blockRemoved(list{1}, "group_idx", 1), blockRemoved(list{1}, "group_idx", 2)); got != "0/0 group 1: removed [1]\n" || dropped(drops) != "group=1" {
		t.Errorf("got %q, dropped %q", got, dropped(drops))
	}
	if got, _ := apply(t, e, blockRemoved(list{1}, "group_idx", 0)); got != "0/0 removed [1]\n" {
		t.Errorf("got %q", got)
	}
}

func TestLargerBlocksAreSplit(t *testing.T) {
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 4})
	l := locals(seq(0, 24), 4, indexer.Seed("", ""))
	got, drops := apply(t, e, blockStored(list{101}, nil, seq(0, 12), 12), blockStored(list{102}, 101, seq(12, 12), 12))
	const p0, p2 = "4196272989686853791", "16421512084444240679" // of a block in four parts
	if !strings.HasPrefix(got, fmt.Sprintf("0/0 shape {4 12 []}\n0/0 stored %s=%d ", p0, l[0])) || !strings.Contains(got, fmt.Sprintf(" 101=%d ", l[2])) || dropped(drops) != "" {
		t.Errorf("dropped %q, got\n%s", dropped(drops), got)
	}
	if e.Blocks() != 6 {
		t.Errorf("%d blocks, want 6", e.Blocks())
	}
	apply(t, e, blockStored(list{101}, nil, list{}, 0, "medium", "CPU"))
	if got, _ = apply(t, e, blockRemoved(list{101}), blockRemoved(list{101}, "medium", "CPU")); !strings.HasPrefix(got, "0/0 removed ["+p0+" ") || !strings.Contains(got, " 101]\n0/1 removed ["+p0) {
		t.Errorf("got %q", got)
	}
	e = engines.NewEngine(engines.EngineOptions{BlockSize: 4})
	if got, _ = apply(t, e, blockStored(list{101}, nil, seq(0, 16), 16)); !strings.Contains(got, " "+p2+"=") {
		t.Errorf("got %q", got)
	}
}

func TestSmallerBlocksAreJoined(t *testing.T) {
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 4})
	seed := indexer.Seed("", "s")
	l := locals(seq(0, 12), 4, seed)
	// Two tokens a block, salted; the parts come in any number.
	salt := []any{"cache_salt", "s"}
	got, drops := apply(t, e,
		blockStored(list{1}, nil, seq(0, 2), 2, salt...),
		blockStored(list{2, 3}, 1, seq(2, 4), 2),
		blockStored(list{4, 5, 6}, 3, seq(6, 6), 2))
	want := fmt.Sprintf("0/0 stored 2=%d 4=%d 6=%d\n", l[0], l[1], l[2])
	if got != want || dropped(drops) != "" {
		t.Errorf("dropped %q, got\n%swant\n%s", dropped(drops), got, want)
	}
	// Store another second half of the middle block, then remove the first half.
	got, _ = apply(t, e, blockStored(list{14}, 3, seq(50, 2), 2))
	if want = fmt.Sprintf("0/0 stored after 2 14=%d\n", locals([]uint32{4, 5, 50, 51}, 4, seed)[0]); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, _ = apply(t, e, blockRemoved(list{3})); got != "0/0 removed [4 14]\n" {
		t.Errorf("got %q", got)
	}
	if got, _ = apply(t, e, blockRemoved(list{14, 4})); got != "" {
		t.Errorf("got %q: both were gone already", got)
	}
	if got, _ = apply(t, e, blockRemoved(list{6, 5, 2, 1})); got != "0/0 removed [6 2]\n" || e.Blocks() != 0 {
		t.Errorf("got %q, %d blocks kept", got, e.Blocks())
	}
	// A part whose parent is unknown cannot be hashed.
	if got, drops = apply(t, e, blockStored(list{9}, 8, seq(0, 2), 2, salt...)); got != "" || dropped(drops) != "parent=1" {
		t.Errorf("got %q, dropped %q", got, dropped(drops))
	}
}

func TestMemoryIsBounded(t *testing.T) {
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 4, MaxBlocks: 10})
	hashes := list{}
	for i := range 12 {
		hashes = append(hashes, i+1)
	}
	got, drops := apply(t, e, blockStored(hashes, nil, seq(0, 48), 4))
	if strings.Count(got, "=") != 10 || dropped(drops) != "full=2" || e.Blocks() != 10 {
		t.Errorf("%d blocks kept, dropped %q, got %q", e.Blocks(), dropped(drops), got)
	}
	// A block that is already known needs no room.
	if _, drops = apply(t, e, blockStored(list{1}, nil, seq(0, 4), 4), blockStored(list{99}, nil, seq(9, 4), 4)); dropped(drops) != "full=1" {
		t.Errorf("dropped %q", dropped(drops))
	}
	for rank := range 2000 {
		batch, err := engines.DecodeBatch(encode(nil, list{1.5, list{cleared}, rank}))
		if err != nil {
			t.Fatal(err)
		}
		if _, drops := e.Apply(&batch); (dropped(drops) == "full=1") != (rank >= 1024) {
			t.Fatalf("rank %d: dropped %q", rank, dropped(drops))
		}
	}
}

func TestBatchForms(t *testing.T) {
	block := blockStored(list{1}, nil, seq(0, 4), 4)
	for name, c := range map[string]struct {
		batch any
		rank  uint32
	}{
		"no rank":         {list{1.5, list{block}}, 7},
		"rank nil":        {list{1.5, list{block}, nil}, 7},
		"rank 3":          {list{1.5, list{block}, 3}, 3},
		"more":            {list{1.5, list{block}, 3, "x", nil}, 3},
		"a map":           {fields{"ts", 1.5, "events", list{block}, "data_parallel_rank", 3}, 3},
		"a map of SGLang": {fields{"events", list{block}, "attn_dp_rank", 3, "new", 1}, 3},
	} {
		batch, err := engines.DecodeBatch(encode(nil, c.batch))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		out, drops := engines.NewEngine(engines.EngineOptions{BlockSize: 4, Rank: 7}).Apply(&batch)
		if len(out) != 1 || out[0].DPRank != c.rank || dropped(drops) != "" {
			t.Errorf("%s: %+v, dropped %q", name, out, dropped(drops))
		}
	}
	// If the rank cannot be read, it is unknown whose events the batch has.
	for name, v := range map[string]any{
		"nothing": list{}, "no events": list{1.5}, "events no list": list{1.5, 3, 0}, "rank no number": list{1.5, list{block}, "x"},
		"a number": 3, "a map without events": fields{"ts", 1.5}, "time no number": list{"now", list{}},
	} {
		if _, err := engines.DecodeBatch(encode(nil, v)); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	whole := encode(nil, list{1.5, list{block}, 0})
	for i := range whole {
		if _, err := engines.DecodeBatch(whole[:i]); err == nil {
			t.Errorf("%d bytes of %d are accepted", i, len(whole))
		}
	}
}

// checkPublished fails if the index may have blocks that the engine does not have, or if the engine
// remembers more blocks than its limit.
func checkPublished(t *testing.T, e *engines.Engine, index map[uint32]map[indexer.Tier]map[uint64]bool, out []events.RouterEvent, limit int) {
	t.Helper()
	for _, r := range out {
		if index[r.DPRank] == nil || r.Event.Kind == indexer.Cleared {
			index[r.DPRank] = map[indexer.Tier]map[uint64]bool{}
		}
		tier := index[r.DPRank][r.Event.Tier]
		if tier == nil {
			tier = map[uint64]bool{}
			index[r.DPRank][r.Event.Tier] = tier
		}
		for _, b := range r.Event.Blocks {
			tier[b.External] = true
		}
		for _, h := range r.Event.Externals {
			delete(tier, h)
		}
	}
	blocks, weight := e.Published()
	if weight != e.Blocks() || weight > limit {
		t.Fatalf("%d blocks counted, %d kept, at most %d", e.Blocks(), weight, limit)
	}
	for rank, tiers := range index {
		for tier, ids := range tiers {
			for id := range ids {
				if !blocks[rank][tier][id] {
					t.Fatalf("rank %d, tier %d: block %d is published and not remembered", rank, tier, id)
				}
			}
		}
	}
	for rank, tiers := range blocks {
		for tier, ids := range tiers {
			for id := range ids {
				if !index[rank][tier][id] {
					t.Fatalf("rank %d, tier %d: block %d would come back after a restart", rank, tier, id)
				}
			}
		}
	}
}

// For any sequence of events, even a contradictory one: after an engine has removed all copies of
// a block, the index has received the removal.
func TestRemovalsReachTheIndex(t *testing.T) {
	for seed := range seeds(300) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		e := engines.NewEngine(engines.EngineOptions{BlockSize: 4, MaxBlocks: 24, SetLike: seed%3 == 0})
		index := map[uint32]map[indexer.Tier]map[uint64]bool{}
		for range 200 {
			hashes := list{}
			for range 1 + rnd.IntN(3) {
				hashes = append(hashes, 1+rnd.IntN(12))
			}
			further := []any{"medium", []any{"GPU", "CPU", nil}[rnd.IntN(3)], "group_idx", rnd.IntN(2), "kv_cache_spec_kind", "full_attention"}
			var parent any
			if rnd.IntN(2) == 0 {
				parent = 1 + rnd.IntN(12)
			}
			var ev any
			switch rnd.IntN(10) {
			case 0, 1, 2, 3, 4:
				size := []int{2, 2, 2, 4, 8, 1}[rnd.IntN(6)]
				ev = blockStored(hashes, parent, seq(rnd.IntN(3), size*len(hashes)+rnd.IntN(2)), size, further...)
			case 5:
				ev = blockStored(hashes, nil, list{}, 0, further...)
			case 6, 7, 8:
				ev = blockRemoved(hashes, further[:4]...)
			default:
				if ev = blockRemoved(hashes); rnd.IntN(5) == 0 {
					ev = cleared
				}
			}
			batch, err := engines.DecodeBatch(encode(nil, list{1.5, list{ev}, rnd.IntN(2)}))
			if err != nil {
				t.Fatal(err)
			}
			out, _ := e.Apply(&batch)
			checkPublished(t, e, index, out, 24)
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
	}
}

func FuzzBatch(f *testing.F) {
	for _, s := range []string{batchZ1, batchZ2, batchZ3, batchZ4} {
		f.Add(unhex(f, s), uint8(4))
	}
	image := strings.Repeat("ab", 32)
	f.Add(encode(nil, list{1.5, list{
		blockStored(list{1, 2}, nil, seq(0, 4), 2, "cache_salt", "s"), blockStored(list{3, 4}, 2, seq(4, 4), 2), blockRemoved(list{3}), blockStored(list{1}, nil, list{}, 0, "medium", "CPU"),
	}, 0}), uint8(4))
	f.Add(encode(nil, list{1.5, list{
		blockStored(list{1, 2}, nil, seq(0, 16), 8, "extra_keys", list{list{"s"}, list{list{image, 1}}}, "lookahead_token_ids", list{list{1}, nil}), blockRemoved(list{1}, "group_idx", 1), cleared,
	}, 0}), uint8(8))
	f.Fuzz(func(t *testing.T, data []byte, size uint8) {
		batch, err := engines.DecodeBatch(data)
		if err != nil {
			return
		}
		const limit = 64
		for _, opt := range []engines.EngineOptions{{}, {SetLike: true, Placeholder: 3}} {
			opt.BlockSize, opt.MaxBlocks = int(size), limit
			e := engines.NewEngine(opt)
			index := map[uint32]map[indexer.Tier]map[uint64]bool{}
			for range 2 {
				out, _ := e.Apply(&batch)
				checkPublished(t, e, index, out, limit)
			}
		}
	})
}

// An engine that evicts leaves first is saved and restored. It continues in the same state, and
// the restored events give the index the same blocks.
func TestAnEngineComesBack(t *testing.T) {
	for _, opt := range []engines.EngineOptions{
		{BlockSize: 4},
		{BlockSize: 4, SetLike: true},
		{BlockSize: 8}, // joined
		{BlockSize: 2}, // split
	} {
		blocks := 0
		for seed := range seeds(100) {
			rng := rand.New(rand.NewPCG(seed, uint64(opt.BlockSize)))
			a, x := engineAfter(rng, opt, leafFirst)
			b, restored, orphans := engines.SaveAndRestore(a, opt)
			if orphans > 0 {
				t.Fatalf("seed %d, blocks of %d: %d are behind holes", seed, opt.BlockSize, orphans)
			}
			y := index(t, restored)
			if a, b := natstest.Holdings(x), natstest.Holdings(y); !slices.Equal(a, b) {
				t.Fatalf("seed %d, blocks of %d: %s", seed, opt.BlockSize, firstDifference(b, a))
			}
			blocks += len(natstest.Holdings(x))
			for step := range 40 {
				batch := leafFirst(rng)
				if was, is := means(a, x, batch), means(b, y, batch); was != is {
					t.Fatalf("seed %d, step %d, blocks of %d: %+v\nmeant %s\nmeans %s", seed, step, opt.BlockSize, batch, was, is)
				}
				if _, weight := b.Published(); weight != b.Blocks() {
					t.Fatalf("seed %d: %d blocks are counted, %d are kept", seed, b.Blocks(), weight)
				}
			}
		}
		if blocks < 5*int(seeds(100)) {
			t.Errorf("blocks of %d: %d were restored", opt.BlockSize, blocks)
		}
	}
}

// Known blocks after a hole are not restored to the index, and no event restores a block that the
// engine does not have. A cleared engine behaves like any other.
func TestAnEngineWithHolesComesBack(t *testing.T) {
	for seed := range seeds(300) {
		rng := rand.New(rand.NewPCG(seed, 8))
		opt := engines.EngineOptions{BlockSize: []int{4, 8, 2}[seed%3]}
		a, x := engineAfter(rng, opt, anyhow)
		b, restored, orphans := engines.SaveAndRestore(a, opt)
		y := index(t, restored)
		if lost := published(a) - published(b); lost != orphans {
			t.Fatalf("seed %d: %d blocks are behind holes, %d are said to be", seed, lost, orphans)
		}
		for range 30 {
			was, _ := a.Published()
			is, weight := b.Published()
			if weight != b.Blocks() {
				t.Fatalf("seed %d: %d blocks are counted, %d are kept", seed, b.Blocks(), weight)
			}
			for r := range y.Dump() {
				for _, h := range r.Holders {
					for _, id := range h.Externals {
						if !is[uint32(h.Worker)][h.Tier][id] || !was[uint32(h.Worker)][h.Tier][id] {
							t.Fatalf("seed %d: the index has block %d of rank %d on %v, which the engine does not have", seed, id, h.Worker, h.Tier)
						}
					}
				}
			}
			batch := anyhow(rng)
			means(a, x, batch)
			means(b, y, batch)
		}
		for rank := range uint32(2) {
			wipe := engines.EngineBatch{Events: []engines.EngineEvent{{Kind: engines.EngineCleared, Rank: rank, HasRank: true}}}
			means(a, x, wipe)
			means(b, y, wipe)
		}
		for range 10 {
			batch := anyhow(rng)
			if was, is := means(a, x, batch), means(b, y, batch); was != is {
				t.Fatalf("seed %d: %+v\nmeant %s\nmeans %s", seed, batch, was, is)
			}
		}
	}
}

// published returns the number of blocks that the index must have.
func published(e *engines.Engine) (n int) {
	blocks, _ := e.Published()
	for _, tiers := range blocks {
		for _, ids := range tiers {
			n += len(ids)
		}
	}
	return n
}

// means applies a batch, and describes the resulting events.
func means(e *engines.Engine, x *indexer.Index, b engines.EngineBatch) string {
	evs, drops := e.Apply(&b)
	for _, ev := range evs {
		x.Apply(int(ev.DPRank), ev.Event)
	}
	evs = slices.DeleteFunc(evs, func(ev events.RouterEvent) bool { return ev.Event.Kind == indexer.Shaped })
	return fmt.Sprint(evs, drops)
}

func engineAfter(rng *rand.Rand, opt engines.EngineOptions, batch func(*rand.Rand) engines.EngineBatch) (*engines.Engine, *indexer.Index) {
	e, x := engines.NewEngine(opt), indexer.New(indexer.Config{})
	for range rng.IntN(80) {
		means(e, x, batch(rng))
	}
	return e, x
}

// index returns an index built from events, which must all be valid.
func index(t *testing.T, list []events.RouterEvent) *indexer.Index {
	t.Helper()
	y := indexer.New(indexer.Config{})
	for _, ev := range list {
		if out := y.Apply(int(ev.DPRank), ev.Event); out.Orphan+out.Conflict+out.Invalid > 0 {
			t.Fatalf("event %+v: %+v", ev, out)
		}
	}
	return y
}

// Three sequences, one block a level: ids are branch*100 + level + 1.

func levels(branch uint64, from, to int) (ev engines.EngineEvent) {
	ev = engines.EngineEvent{Kind: engines.EngineStored, BlockSize: 4, HasRank: true, Usable: 8}
	if from > 0 {
		ev.HasParent, ev.Parent = true, branch*100+uint64(from)
	} else {
		ev.HasSalt, ev.Salt = true, fmt.Sprint(branch)
	}
	for ; from < to; from++ {
		ev.Hashes = append(ev.Hashes, branch*100+uint64(from)+1)
		for i := range 4 {
			ev.Tokens = append(ev.Tokens, uint32(branch)*1000+uint32(from*4+i))
		}
	}
	return ev
}

// leafFirst returns a random batch of an engine that leaves no holes.
func leafFirst(rng *rand.Rand) (b engines.EngineBatch) {
	for range 1 + rng.IntN(3) {
		branch, rank, tier := rng.Uint64N(3), uint32(rng.IntN(2)), indexer.Tier(rng.IntN(2))
		ev := levels(branch, 0, 1+rng.IntN(6))
		if rng.IntN(3) == 0 {
			ev.Kind = engines.EngineRemoved
			ev.Hashes = nil
			for level := 5; level >= rng.IntN(6); level-- {
				ev.Hashes = append(ev.Hashes, branch*100+uint64(level)+1)
			}
		}
		ev.Rank, ev.Tier = rank, tier
		b.Events = append(b.Events, ev)
	}
	return b
}

// anyhow returns a random batch, with holes.
func anyhow(rng *rand.Rand) (b engines.EngineBatch) {
	for range 1 + rng.IntN(3) {
		branch, from := rng.Uint64N(3), rng.IntN(6)
		ev := levels(branch, from, min(6, from+1+rng.IntN(4)))
		ev.Rank, ev.Tier = uint32(rng.IntN(2)), indexer.Tier(rng.IntN(2))
		switch rng.IntN(6) {
		case 0:
			ev.Kind = engines.EngineRemoved
		case 1:
			ev.Kind, ev.From, ev.Tier = engines.EngineMoved, indexer.Device, indexer.HostPinned
		}
		b.Events = append(b.Events, ev)
	}
	return b
}
