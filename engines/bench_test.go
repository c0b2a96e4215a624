// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"testing"

	"github.com/kvroute/kvroute/engines"
)

// BenchmarkBatch measures one message of an engine: 8 events of 4 blocks of 16 tokens, as maps and
// as arrays, decoded, applied and removed again.
func BenchmarkBatch(b *testing.B) {
	for _, form := range []string{"maps", "arrays"} {
		var stored, removed list
		for i := range 8 {
			hashes, parent := list{}, any(nil)
			for j := range 4 {
				hashes = append(hashes, uint64(1<<60+100*i+j))
			}
			tokens := seq(100_000*(i+1), 64)
			if form == "maps" {
				stored = append(stored, blockStored(hashes, parent, tokens, 16, "lora_id", nil, "medium", "GPU", "lora_name", nil, "extra_keys", list{nil, nil, nil, nil}, "group_idx", 0, "kv_cache_spec_kind", "full_attention"))
				removed = append(removed, blockRemoved(hashes, "medium", "GPU", "group_idx", 0))
			} else {
				stored = append(stored, list{"BlockStored", hashes, parent, tokens, 16, nil, "GPU", nil})
				removed = append(removed, list{"BlockRemoved", hashes, "GPU"})
			}
		}
		batches := [][]byte{encode(nil, list{1.5, stored, 0}), encode(nil, list{1.5, removed, 0})}
		b.Run(form, func(b *testing.B) {
			b.ReportAllocs()
			e := engines.NewEngine(engines.EngineOptions{BlockSize: 16})
			for b.Loop() {
				for _, data := range batches {
					batch, err := engines.DecodeBatch(data)
					if err != nil {
						b.Fatal(err)
					}
					e.Apply(&batch)
				}
			}
		})
	}
}
