// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
)

// trtTokens formats tokens as TensorRT-LLM does.
func trtTokens(from, n int) string {
	words := make([]string, n)
	for i := range words {
		words[i] = fmt.Sprintf(`{"type":"unique_token","token_id":%d,"token_extra_id":0}`, from+i)
	}
	return "[" + strings.Join(words, ",") + "]"
}

func trtStored(id int, parent string, blocks ...string) string {
	return fmt.Sprintf(`{"event_id":%d,"data":{"type":"stored","parent_hash":%s,"blocks":[%s]}}`, id, parent, strings.Join(blocks, ","))
}

func trtBlock(hash string, tokens string, further string) string {
	return fmt.Sprintf(`{"type":"stored_block","block_hash":%s,"tokens":%s,"priority":35%s}`, hash, tokens, further)
}

func applyTRT(t *testing.T, e *engines.Engine, list ...string) (string, string) {
	t.Helper()
	batch, err := engines.DecodeTRTLLM([]byte("[" + strings.Join(list, ",") + "]"))
	if err != nil {
		t.Fatal(err)
	}
	out, drops := e.Apply(&batch)
	return describe(out), dropped(drops)
}

func TestTRTLLM(t *testing.T) {
	l := indexer.AppendLocalHashes(nil, seq(1, 12), 4, indexer.Seed("", ""))
	salted := indexer.AppendLocalHashes(nil, seq(1, 4), 4, indexer.Seed("", "s"))[0]
	const created = `{"event_id":0,"data":{"type":"created","num_blocks_per_cache_level":[100,20]},"window_size":4096}`
	for _, c := range []struct {
		name        string
		events      []string
		want, drops string
	}{
		{"stored, removed", []string{
			created, trtStored(1, "null", trtBlock("11", trtTokens(1, 4), ""), trtBlock("12", trtTokens(5, 4), `,"cache_level":0`)),
			trtStored(2, "12", trtBlock("13", trtTokens(9, 4), "")), `{"event_id":3,"data":{"type":"removed","block_hashes":[13,99]}}`,
		}, fmt.Sprintf("0/0 stored 11=%d 12=%d 13=%d\n0/0 removed [13 99]\n", l[0], l[1], l[2]), ""},
		{"moved and removed there", []string{
			created, trtStored(1, "null", trtBlock("11", trtTokens(1, 4), ""), trtBlock("12", trtTokens(5, 4), "")),
			`{"event_id":2,"data":{"type":"updated","block_hash":12,"cache_level":{"type":"event_diff","new_value":1,"old_value":0},"priority":null}}`,
			`{"event_id":3,"data":{"type":"updated","block_hash":12,"cache_level":null,"priority":{"new_value":1,"old_value":0}}}`,
			`{"event_id":4,"data":{"type":"removed","block_hashes":[12]}}`,
		}, fmt.Sprintf("0/0 stored 11=%d 12=%d\n0/0 removed [12]\n0/1 stored after 11 12=%d\n0/1 removed [12]\n", l[0], l[1], l[1]), ""},
		{"moved to a level that nobody knows", []string{
			trtStored(1, "null", trtBlock("11", trtTokens(1, 4), "")),
			`{"event_id":2,"data":{"type":"updated","block_hash":11,"cache_level":{"new_value":7,"old_value":0}}}`,
			`{"event_id":3,"data":{"type":"updated","block_hash":99,"cache_level":{"new_value":1,"old_value":0}}}`,
		}, fmt.Sprintf("0/0 stored 11=%d\n0/0 removed [11 99]\n", l[0]), "medium=1 block=1"},
		{"two levels in one event", []string{
			trtStored(1, "null", trtBlock("11", trtTokens(1, 4), ""), trtBlock("12", trtTokens(5, 4), `,"cache_level":1`)), trtStored(2, "12", trtBlock("13", trtTokens(9, 4), "")),
		}, fmt.Sprintf("0/0 stored 11=%d\n0/1 stored after 11 12=%d\n0/0 stored after 12 13=%d\n", l[0], l[1], l[2]), ""},
		{"a block that is not full, and its end", []string{
			trtStored(1, "null", trtBlock("11", trtTokens(1, 4), ""), trtBlock("12", trtTokens(5, 3), "")), `{"event_id":2,"data":{"type":"removed","block_hashes":[12]}}`,
			trtStored(3, "11", trtBlock("14", trtTokens(5, 3), "")), `{"event_id":4,"data":{"type":"removed","block_hashes":[14]}}`,
		}, fmt.Sprintf("0/0 stored 11=%d\n", l[0]), "size=1 tokens=1"},
		{"salt", []string{trtStored(1, "null", trtBlock("11", trtTokens(1, 4), `,"cache_salt":"s"`))}, fmt.Sprintf("0/0 stored 11=%d\n", salted), ""},
		{"adapter", []string{trtStored(1, "null", trtBlock("11", trtTokens(1, 4), `,"lora_id":3`))}, "", "lora=1"},
		{"hex and negative hashes", []string{
			trtStored(1, "null", trtBlock(`"00000000000000ff`+strings.Repeat("a", 48)+`"`, trtTokens(1, 4), "")), trtStored(2, "255", trtBlock("-1", trtTokens(5, 4), "")),
		}, fmt.Sprintf("0/0 stored 255=%d 18446744073709551615=%d\n", l[0], l[1]), ""},
		{
			"image",
			[]string{trtStored(1, "null", trtBlock("11", trtTokens(1, 4), `,"mm_keys":[{"type":"mm_key","hash":"`+strings.Repeat("ab", 32)+`","start_offset":0}]`))},
			fmt.Sprintf("0/0 stored 11=%d\n", indexer.ObjectHash(seq(1, 4), []uint64{0xabababababababab}, indexer.Seed("", ""))), "",
		},
		{"image without name", []string{trtStored(1, "null", trtBlock("11", strings.Replace(trtTokens(1, 4), `"token_extra_id":0`, `"token_extra_id":9`, 1), ""))}, "", "keys=1"},
		{"smaller window", []string{
			created, `{"event_id":1,"window_size":512,"data":{"type":"created"}}`,
			strings.Replace(trtStored(2, "null", trtBlock("11", trtTokens(1, 4), "")), `"data"`, `"window_size":512,"data"`, 1),
			strings.Replace(trtStored(3, "null", trtBlock("12", trtTokens(1, 4), "")), `"data"`, `"window_size":4096,"data"`, 1),
		}, fmt.Sprintf("0/0 stored 12=%d\n", l[0]), "group=2"},
		{"larger window after all", []string{
			strings.Replace(trtStored(2, "null", trtBlock("11", trtTokens(1, 4), "")), `"data"`, `"window_size":512,"data"`, 1),
			strings.Replace(trtStored(3, "null", trtBlock("12", trtTokens(1, 4), "")), `"data"`, `"window_size":4096,"data"`, 1),
		}, fmt.Sprintf("0/0 stored 11=%d\n0/0 cleared\n0/0 stored 12=%d\n", l[0], l[0]), ""},
		{
			"a gap",
			[]string{trtStored(1, "null", trtBlock("11", trtTokens(1, 4), "")), trtStored(3, "null", trtBlock("12", trtTokens(5, 4), ""))},
			fmt.Sprintf("0/0 stored 11=%d\n0/0 cleared\n0/0 stored 12=%d\n", l[0], l[1]), "lost=1",
		},
		{
			"a restart",
			[]string{created, trtStored(1, "null", trtBlock("11", trtTokens(1, 4), "")), created, trtStored(1, "11", trtBlock("12", trtTokens(5, 4), ""))},
			fmt.Sprintf("0/0 stored 11=%d\n0/0 cleared\n", l[0]), "parent=1 lost=1",
		},
		{"ranks count apart", []string{
			strings.Replace(trtStored(1, "null", trtBlock("11", trtTokens(1, 4), "")), `"data"`, `"attention_dp_rank":0,"data"`, 1),
			strings.Replace(trtStored(1, "null", trtBlock("11", trtTokens(1, 4), "")), `"data"`, `"attention_dp_rank":1,"data"`, 1),
		}, fmt.Sprintf("0/0 stored 11=%d\n1/0 stored 11=%d\n", l[0], l[0]), ""},
		{"what nobody knows costs nothing else", []string{
			trtStored(1, "null", trtBlock("11", trtTokens(1, 4), "")), `{"event_id":2,"data":{"type":"melted"}}`, `7`, `{"data":{}}`, `{"event_id":3,"data":{}}`,
			trtStored(4, "11", trtBlock("12", trtTokens(5, 4), `,"cache_level":9`)), trtStored(5, "11", trtBlock("12", "[]", "")), trtStored(6, "11", trtBlock("13", trtTokens(5, 4), "")),
		}, fmt.Sprintf("0/0 stored 11=%d 13=%d\n", l[0], l[1]), "bad=4 kind=1 medium=1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, drops := applyTRT(t, engines.NewEngine(engines.EngineOptions{BlockSize: 4}), c.events...)
			if got != c.want || drops != c.drops {
				t.Errorf("dropped %q, want %q; got\n%swant\n%s", drops, c.drops, got, c.want)
			}
		})
	}
	for _, s := range []string{"", "{}", "[", "7", `[{]`} {
		if _, err := engines.DecodeTRTLLM([]byte(s)); err == nil {
			t.Errorf("%q is accepted", s)
		}
	}
	if batch, err := engines.DecodeTRTLLM([]byte("null")); err != nil || len(batch.Events) != 0 {
		t.Errorf("an empty answer gives %+v, %v", batch, err)
	}
}

func FuzzTRTLLM(f *testing.F) {
	f.Add([]byte("["+trtStored(1, "null", trtBlock("11", trtTokens(1, 4), ""), trtBlock("12", trtTokens(5, 4), `,"cache_level":1`))+`,{"event_id":2,"data":{"type":"updated","block_hash":12,"cache_level":{"new_value":0,"old_value":1}}},{"event_id":3,"data":{"type":"removed","block_hashes":[11]}}]`), uint8(4))
	f.Add([]byte("["+trtStored(1, "null", trtBlock("11", trtTokens(1, 2), `,"cache_salt":"s"`), trtBlock("12", trtTokens(3, 2), ""))+"]"), uint8(4))
	f.Fuzz(func(t *testing.T, data []byte, size uint8) {
		batch, err := engines.DecodeTRTLLM(data)
		if err != nil {
			return
		}
		const limit = 64
		e := engines.NewEngine(engines.EngineOptions{BlockSize: int(size), MaxBlocks: limit})
		index := map[uint32]map[indexer.Tier]map[uint64]bool{}
		for range 2 {
			out, _ := e.Apply(&batch)
			checkPublished(t, e, index, out, limit)
		}
	})
}
