// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/tokenizer"
)

// withSteps returns a golden file with other steps.
func withSteps(t *testing.T, name, normalizer, preTokenizer string) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/golden/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]json.RawMessage
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	file["normalizer"], file["pre_tokenizer"] = json.RawMessage(normalizer), json.RawMessage(preTokenizer)
	if b, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	return b
}

const (
	spaceReplaced = `{"type":"Replace","pattern":{"String":" "},"content":"▁"}`
	spaceKept     = `{"type":"Replace","pattern":{"String":" "},"content":"▁ "}`
	spaceSplit    = `{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false}`
	spacesKept    = `{"type":"Split","pattern":{"String":" "},"behavior":"Removed","invert":true}`
	lineSplit     = `{"type":"Split","pattern":{"String":"\n"},"behavior":"Isolated","invert":false}`
	prefixed      = `{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":false}`
)

func sequence(field string, steps ...string) string {
	return `{"type":"Sequence","` + field + `":[` + strings.Join(steps, ",") + `]}`
}

// A Split that can never match is left out, and only that: whatever the steps,
// ids are those of the steps as they stand in the file. Gemma's text is cut, and
// its beginnings are reused.
func TestSplitThatNeverMatches(t *testing.T) {
	for name, c := range map[string]struct {
		normalizer, steps string
		fast              bool
	}{
		"gemma":         {spaceReplaced, spaceSplit, true},
		"twice":         {spaceReplaced, sequence("pretokenizers", spaceSplit, spaceSplit), true},
		"prepended":     {sequence("normalizers", `{"type":"Prepend","prepend":"▁"}`, spaceReplaced), spaceSplit, true},
		"metaspace":     {"null", prefixed, true},
		"space kept":    {spaceKept, spaceSplit, false},
		"inverted":      {spaceReplaced, spacesKept, false},
		"another":       {spaceReplaced, lineSplit, false},
		"not replaced":  {"null", spaceSplit, false},
		"put back":      {sequence("normalizers", spaceReplaced, `{"type":"Replace","pattern":{"String":"a"},"content":" "}`), spaceSplit, false},
		"behind a step": {spaceReplaced, sequence("pretokenizers", lineSplit, spaceSplit), false},
	} {
		t.Run(name, func(t *testing.T) {
			b := withSteps(t, "replace-only", c.normalizer, c.steps)
			tok, err := loadBytes(b)
			if err != nil {
				t.Fatal(err)
			}
			general, err := tokenizer.LoadGeneral(b)
			if err != nil {
				t.Fatal(err)
			}
			if got := tok.Slow == ""; got != c.fast {
				t.Errorf("slow because %q, want fast: %v", tok.Slow, c.fast)
			}
			r := rand.New(rand.NewPCG(1, 2))
			cache := tokenizer.NewCache(1 << 20)
			tokenizer.SetCacheStep(cache, 64)
			reusedAll := 0
			for range 300 {
				text := randomText(r, 1+r.IntN(60))
				for range 2 {
					special := r.IntN(2) == 0
					want, err := general.Append(context.Background(), nil, []byte(text), special)
					if err != nil {
						t.Fatal(err)
					}
					got, reused, err := cache.Append(context.Background(), nil, tok, []byte(text), special)
					if err != nil {
						t.Fatal(err)
					}
					if reusedAll += reused; !slices.Equal(got, want) {
						at := tokenizer.FirstDiff(got, want)
						t.Fatalf("%q: reused %d bytes, differs at %d: got %d, want %d", text, reused, at, around(got, at), around(want, at))
					}
					text += randomText(r, 10)
				}
			}
			if c.fast && reusedAll == 0 {
				t.Error("nothing was ever reused")
			}
		})
	}
}
