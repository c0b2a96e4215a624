// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/xxh3"

	"github.com/kvroute/kvroute/indexer"
)

// The values follow NVIDIA Dynamo's scheme; each was computed with a Go and a C
// implementation of XXH3.
func TestHashVectors(t *testing.T) {
	for _, c := range []struct {
		name       string
		tokens     []uint32
		blockSize  int
		lora, salt string
		local      []uint64
		last       uint64 // sequence hash of the last block; 0 = not checked
	}{
		{name: "H2 H3 H4 H5", tokens: run(1, 12), blockSize: 4, local: []uint64{14643705804678351452, 16777012769546811212, 483935686894639516}, last: 12583592247330656132},
		{name: "H5 second", tokens: run(1, 8), blockSize: 4, local: []uint64{14643705804678351452, 16777012769546811212}, last: 4945711292740353085},
		{name: "H6", tokens: run(0, 8), blockSize: 4, local: []uint64{9143094415614847814, 12124091508212882195}, last: 9510318385840434533},
		{name: "H7 lora", tokens: run(1, 4), blockSize: 4, lora: "alpha-7b", local: []uint64{16548428770143335509}},
		{name: "H8 salt", tokens: run(1, 4), blockSize: 4, salt: "tenant-a", local: []uint64{5738685477468498325}},
		{name: "H9 both", tokens: run(1, 4), blockSize: 4, lora: "alpha-7b", salt: "tenant-a", local: []uint64{14539708548553096745}},
		{name: "H13", tokens: run(1, 32), blockSize: 16, local: []uint64{16863443419780771464, 2287610619914608821}, last: 12466389667045779788},
		{name: "H14", tokens: run(1, 64), blockSize: 32, local: []uint64{6399025751206689338, 8774225238254794491}, last: 5363944788349247025},
		{name: "H15", tokens: run(1, 128), blockSize: 64, local: []uint64{17732852320395450624, 16977986247603081716}, last: 1050256074108617503},
		{name: "H16", tokens: run(1, 256), blockSize: 128, local: []uint64{9108660569462882936, 9857817186083658409}, last: 3567918185176555655},
		{name: "H17", tokens: run(1, 512), blockSize: 256, local: []uint64{6483570558441252529, 4491991907239856085}, last: 4746021824150214572},
		{name: "H18 largest token", tokens: repeat(4294967295, 16), blockSize: 16, local: []uint64{9046446989928805549}},
		{name: "tail has no hash", tokens: run(1, 7), blockSize: 4, local: []uint64{14643705804678351452}},
		{name: "shorter than a block", tokens: run(1, 3), blockSize: 4, local: []uint64{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			local := indexer.AppendLocalHashes([]uint64{}, c.tokens, c.blockSize, indexer.Seed(c.lora, c.salt))
			if diff := cmp.Diff(c.local, local); diff != "" {
				t.Errorf("local hashes (-want +got):\n%s", diff)
			}
			sequence := indexer.AppendSequenceHashes(nil, local)
			if c.last != 0 && sequence[len(sequence)-1] != c.last {
				t.Errorf("last sequence hash is %d, want %d", sequence[len(sequence)-1], c.last)
			}
		})
	}
}

func TestHashVectorsOfLongPrompts(t *testing.T) {
	local := indexer.AppendLocalHashes(nil, run(0, 1024), 16, indexer.Seed("", ""))
	sequence := indexer.AppendSequenceHashes(nil, local)
	if got, want := sequence[63], uint64(11606098466009050563); len(sequence) != 64 || got != want { // H19
		t.Errorf("%d blocks, the last one %d; want 64 and %d", len(sequence), got, want)
	}
	// Blocks are larger than the stack buffer.
	big := indexer.AppendLocalHashes(nil, run(0, 2000), 1000, indexer.Seed("", ""))
	if len(big) != 2 || big[0] == big[1] {
		t.Errorf("blocks of 1000 tokens: %d, want two different hashes", big)
	}
}

func TestSeedVectors(t *testing.T) {
	for _, c := range []struct {
		lora, salt string
		want       uint64
	}{
		{"", "", 1337},
		{"alpha-7b", "", 723495307357893745},
		{"", "tenant-a", 1948188790972764086},
		{"alpha-7b", "tenant-a", 2671684098330656494},
	} {
		if got := indexer.Seed(c.lora, c.salt); got != c.want {
			t.Errorf("Seed(%q, %q) = %d, want %d", c.lora, c.salt, got, c.want)
		}
	}
}

func TestHashingDoesNotAllocate(t *testing.T) {
	tokens := run(0, 8192)
	local, sequence := make([]uint64, 0, 512), make([]uint64, 0, 512)
	if n := testing.AllocsPerRun(10, func() {
		local = indexer.AppendLocalHashes(local[:0], tokens, 16, 1337)
		sequence = indexer.AppendSequenceHashes(sequence[:0], local)
	}); n != 0 {
		t.Errorf("hashing a prompt makes %v allocations, want 0", n)
	}
}

func run(first uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = first + uint32(i)
	}
	return tokens
}

func repeat(token uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = token
	}
	return tokens
}

func TestVectorsOfVariants(t *testing.T) {
	plain := indexer.Seed("", "")
	if got, want := xxh3.HashStringSeed("test data", plain), uint64(13226331709069118873); got != want { // H1
		t.Errorf("XXH3 of test data is %d, want %d", got, want)
	}
	block := run(1, 4)
	for _, c := range []struct { // H10
		objects []uint64
		want    uint64
	}{{[]uint64{42}, 14000361058806882387}, {[]uint64{42, 7}, 6295130183325757331}, {[]uint64{7, 42}, 6295130183325757331}, {nil, 14643705804678351452}} {
		if got := indexer.ObjectHash(block, c.objects, plain); got != c.want {
			t.Errorf("block with objects %d: %d, want %d", c.objects, got, c.want)
		}
	}
	const object = 0xfedcba9876543210
	if got := indexer.PadToken(object); got != 912487504 { // H11
		t.Errorf("pad token %d, want 912487504", got)
	}
	padded := []uint32{1, 2, 99, 99}
	indexer.ReplacePlaceholders(padded, 99, []uint64{object})
	if got, want := indexer.AppendLocalHashes(nil, padded, 4, plain), []uint64{12120013481557396188}; !slices.Equal(got, want) {
		t.Errorf("padded block %d: %d, want %d", padded, got, want)
	}
}

func TestReplacePlaceholders(t *testing.T) {
	a, b := indexer.PadToken(1), indexer.PadToken(2)
	for _, c := range []struct {
		block   []uint32
		objects []uint64
		want    []uint32
	}{
		{[]uint32{9, 9, 5, 9}, []uint64{1, 2}, []uint32{a, a, 5, b}},
		{[]uint32{9, 5, 9, 5, 9}, []uint64{1, 2}, []uint32{a, 5, b, 5, b}},
		{[]uint32{9, 5}, nil, []uint32{9, 5}},
		{[]uint32{5, 6}, []uint64{1}, []uint32{5, 6}},
	} {
		got := slices.Clone(c.block)
		if indexer.ReplacePlaceholders(got, 9, c.objects); !slices.Equal(got, c.want) {
			t.Errorf("%d with objects %d becomes %d, want %d", c.block, c.objects, got, c.want)
		}
	}
}

// The prompts are from 127 requests that three versions of real Dynamo frontends hashed.
func TestCapturedRequests(t *testing.T) {
	dir := os.Getenv("KVROUTE_SHARED")
	if dir == "" {
		dir = "../../shared"
	}
	files, err := filepath.Glob(filepath.Join(dir, "data/vectors/dynamo-*/requests.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		if os.Getenv("KVROUTE_SHARED_REQUIRED") != "" {
			t.Fatal("captured requests are required")
		}
		t.Log("no captured requests at hand; the vectors above are what is tested")
		return
	}
	requests := 0
	for _, name := range files {
		file, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		lines := bufio.NewScanner(file)
		lines.Buffer(nil, 1<<24)
		for lines.Scan() {
			var r struct {
				ID        string   `json:"id"`
				Tokens    []uint32 `json:"prompt_token_ids"`
				BlockSize int      `json:"block_size"`
				Local     []uint64 `json:"tokens_hash"`
				Sequence  []uint64 `json:"sequence_hash"`
			}
			if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
				t.Fatal(err)
			}
			requests++
			local := indexer.AppendLocalHashes(nil, r.Tokens, r.BlockSize, indexer.Seed("", ""))
			if !slices.Equal(local, r.Local) || !slices.Equal(indexer.AppendSequenceHashes(nil, local), r.Sequence) {
				t.Errorf("%s: request %s hashes differently", name, r.ID)
			}
		}
		if err := lines.Err(); err != nil {
			t.Fatal(err)
		}
	}
	if requests != 127 {
		t.Errorf("%d captured requests, want 127", requests)
	}
}
