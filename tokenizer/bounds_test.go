// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvroute/kvroute/tokenizer"
)

// lateContext is a context whose deadline passes after a number of looks at it.
type lateContext struct {
	context.Context //nolint:containedctx // it stands for one
	looks           int
}

func (c *lateContext) Err() error {
	if c.looks--; c.looks < 0 {
		return context.DeadlineExceeded
	}
	return nil
}

// allocated returns how many MiB f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return (after.TotalAlloc - before.TotalAlloc) >> 20
}

// loadWith loads a tokenizer of the golden data with other sections.
func loadWith(t *testing.T, sections map[string]any) *tokenizer.Tokenizer {
	t.Helper()
	b, err := os.ReadFile("testdata/golden/bytelevel-gpt2.json")
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	maps.Copy(file, sections)
	if b, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Load(fstest.MapFS{"tokenizer.json": {Data: b}}, tokenizer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// The search for added tokens stops at the deadline, whatever their length, and what was
// encoded until then is right. Loading them takes memory in proportion to the file.
func TestAddedTokensHonourTheDeadline(t *testing.T) {
	for _, normalized := range []bool{false, true} {
		added := []map[string]any{{"id": 5000, "content": "<+>", "normalized": normalized}}
		for k := range 20 {
			added = append(added, map[string]any{"id": 5001 + k, "content": strings.Repeat("<", 60_000) + string(rune('a'+k)), "normalized": normalized})
		}
		var tok *tokenizer.Tokenizer
		if n := allocated(func() { tok = loadWith(t, map[string]any{"added_tokens": added}) }); n > 200 { // 124 with the race detector
			t.Errorf("loading allocates %d MiB", n)
		}
		want, err := tok.Append(t.Context(), nil, []byte("a<+>"), false)
		if err != nil || len(want) != 2 {
			t.Fatalf("ids %d, error %v", want, err)
		}
		ctx := &lateContext{context.Background(), 50}
		ids, err := tok.Append(ctx, nil, []byte("a<+>"+strings.Repeat("<", 200_000)), false)
		if !errors.Is(err, context.DeadlineExceeded) || !slices.Equal(ids, want) {
			t.Errorf("ids %d, error %v; want %d, and that the deadline has passed", ids, err, want)
		}
	}
}

// Normal forms of small characters may be large. They take memory in proportion to the
// text, or the text is refused.
func TestNormalFormsAreBounded(t *testing.T) {
	for _, form := range []string{"NFC", "NFD", "NFKC", "NFKD"} {
		tok := loadWith(t, map[string]any{"normalizer": map[string]any{"type": form}})
		for _, c := range []string{"\ufdfa", "\u3300", "\u0301", "\U0001d160", "한"} {
			text := []byte(strings.Repeat(c, (3<<20)/len(c)))
			ctx := &lateContext{context.Background(), 1000}
			ids := make([]uint32, 0, 5*len(text))
			if n := allocated(func() { _, _ = tok.Append(ctx, ids, text, false) }); n > 160 {
				t.Errorf("%s of %+q: %d MiB are allocated", form, c, n)
			}
		}
	}
}
