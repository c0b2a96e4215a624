// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"net/netip"
	"testing"
)

func counting(from, to uint32) (tokens []uint32) {
	for i := from; i <= to; i++ {
		tokens = append(tokens, i)
	}
	return tokens
}

// The expected hashes are test vectors of the router whose heartbeat format this is.
func TestPrefixHashes(t *testing.T) {
	for _, c := range []struct {
		tokens []uint32
		want   uint64
	}{
		{counting(1000, 1511), 0xc9bfd41410669565},
		{counting(2000, 2255), 0x6b4eb61037fc84a6},
		{counting(1000, 1015), 0x4faa8bd53eda3d89},
		{counting(1, 16), 0x77d735ce838418aa},
	} {
		hashes := prefixHashes(c.tokens)
		if len(hashes) != len(c.tokens)/16 || hashes[len(hashes)-1] != c.want {
			t.Errorf("%d tokens: %d hashes, the last %x, want %x", len(c.tokens), len(hashes), hashes[len(hashes)-1], c.want)
		}
	}
	if len(prefixHashes(counting(1, 33))) != 2 || len(prefixHashes(counting(1, 15))) != 0 {
		t.Error("other beginnings than those of multiples of 16 tokens have hashes")
	}
}

func TestWorkersNameWhatTheyHold(t *testing.T) {
	r, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	for id := range uint64(3) {
		if err := r.SetWorker(WorkerInfo{
			ID: id + 1, Address: netip.MustParseAddrPort("10.0.0.1:80"), Models: []string{"m"}, LoRA: []string{"l"}, BlockSize: 32, DPSize: 2, NoEvents: true,
		}); err != nil {
			t.Fatal(err)
		}
	}
	overlap := func(w Worker, req Request) int {
		t.Helper()
		if req.Model == "" {
			req.Model = "m"
		}
		req.Pinned = &w
		d, err := r.BestWorker(context.Background(), req)
		if err != nil {
			t.Fatal(err)
		}
		return d.OverlapBlocks
	}
	prompt := counting(1000, 1511)
	if !r.SetCachedPrefixes(2, map[uint64]int{0xc9bfd41410669565: 512, 0x4faa8bd53eda3d89: 16}) || r.SetCachedPrefixes(9, nil) {
		t.Fatal("the wrong workers are known")
	}
	for what, c := range map[string]struct {
		worker Worker
		req    Request
		want   int
	}{
		"all of it":               {Worker{2, 0}, Request{Tokens: prompt}, 16},
		"the other rank":          {Worker{2, 1}, Request{Tokens: prompt}, 16},
		"a longer prompt":         {Worker{2, 0}, Request{Tokens: append(counting(1000, 1511), 7, 8, 9)}, 16},
		"less than a block":       {Worker{2, 0}, Request{Tokens: counting(1000, 1031)}, 0},
		"another worker":          {Worker{1, 0}, Request{Tokens: prompt}, 0},
		"another prompt":          {Worker{2, 0}, Request{Tokens: counting(1001, 1512)}, 0},
		"of another tenant":       {Worker{2, 0}, Request{Tokens: prompt, Salt: "s"}, 0},
		"of another adapter":      {Worker{2, 0}, Request{Tokens: prompt, Model: "l"}, 0},
		"hashes without a prompt": {Worker{2, 0}, Request{Blocks: &Blocks{Local: []uint64{1}, Sequence: []uint64{1}, Tokens: 32}}, 0},
	} {
		if got := overlap(c.worker, c.req); got != c.want {
			t.Errorf("%s: overlap %d, want %d", what, got, c.want)
		}
	}
	// A report may exceed the length of its prefix or be shorter than it.
	r.SetCachedPrefixes(2, map[uint64]int{0xc9bfd41410669565: 9999})
	if got := overlap(Worker{2, 0}, Request{Tokens: prompt}); got != 16 {
		t.Errorf("more tokens than the prompt: overlap %d", got)
	}
	r.SetCachedPrefixes(2, map[uint64]int{0xc9bfd41410669565: 100})
	if got := overlap(Worker{2, 0}, Request{Tokens: prompt}); got != 3 {
		t.Errorf("100 of 512 tokens: overlap %d", got)
	}
	// A prefix that a report no longer names is removed; a worker's prefixes are removed
	// with the worker.
	r.SetCachedPrefixes(2, map[uint64]int{})
	if got := overlap(Worker{2, 0}, Request{Tokens: prompt}); got != 0 {
		t.Errorf("nothing is named: overlap %d", got)
	}
	r.SetCachedPrefixes(2, map[uint64]int{0xc9bfd41410669565: 512})
	r.RemoveWorker(2)
	p := r.pools[poolKey{"m", 32}]
	if p.known.claims.some.Load() {
		t.Error("the prefixes of a worker that is gone are kept")
	}
	if allocs := testing.AllocsPerRun(100, func() { p.known.claims.match(nil, nil, prompt, true, 32) }); allocs != 0 {
		t.Errorf("without such workers a match allocates %v times", allocs)
	}
}
