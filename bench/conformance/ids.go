// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer"
)

// compare encodes random texts on both sides. Of the first differences it prints a short
// text.
func compare(ref *reference, tok *tokenizer.Tokenizer, c candidate) bench.Comparison {
	kind, n := "tokenizer", texts
	switch {
	case c.config != "":
		kind, n = "AutoTokenizer", texts/20
	case !c.real:
		n = texts / 4
	}
	r := random(1)
	var ours, theirs time.Duration
	different := 0
	for done := 0; done < n; {
		batch := make([]string, min(500, n-done))
		for i := range batch {
			batch[i] = c.text(r, tok)
		}
		special := done%1000 == 500
		ids, took := ref.encode(batch, special)
		theirs += took
		for i, text := range batch {
			start := bench.CPUTime()
			got := bench.Must(tok.Append(context.Background(), nil, []byte(text), special))
			ours += bench.CPUTime() - start
			if slices.Equal(got, ids[i]) {
				continue
			}
			if different++; different <= 3 {
				shrink(c.name, ref, tok, text, special)
			}
		}
		done += len(batch)
	}
	return bench.NewComparison(kind, c.name, n, different, ours, theirs)
}

// encode returns the reference's ids of texts, and how long they took.
func (r *reference) encode(texts []string, special bool) ([][]uint32, time.Duration) {
	return r.ids(map[string]any{"op": "encode", "texts": texts, "special": special}, len(texts))
}

// text returns a text to compare: random characters, tokens, long runs, or the
// candidate's own words.
func (c candidate) text(r *rand.Rand, tok *tokenizer.Tokenizer) string {
	switch k := r.IntN(10); {
	case k < 3:
		ids := make([]uint32, 1+r.IntN(30))
		for i := range ids {
			ids[i] = uint32(r.IntN(tok.Size()))
		}
		return strings.ToValidUTF8(string(tok.Decode(nil, ids)), "")
	case k < 4:
		return chats.Runs(r)
	case k < 7 && c.words != nil:
		return chats.Random(r) + c.words[r.IntN(len(c.words))] + chats.Random(r)
	}
	return chats.Random(r)
}

// shrink prints a short text on which the two sides differ: it removes parts, large ones
// first, as long as the rest still differs.
func shrink(name string, ref *reference, tok *tokenizer.Tokenizer, text string, special bool) {
	encode := func(s []rune) (ours, theirs []uint32) {
		ids, _ := ref.encode([]string{string(s)}, special)
		return bench.Must(tok.Append(context.Background(), nil, []byte(string(s)), special)), ids[0]
	}
	runes := []rune(text)
	for n := len(runes) / 2; n > 0; n /= 2 {
		for i := 0; i+n <= len(runes); {
			less := slices.Delete(slices.Clone(runes), i, i+n)
			got, want := encode(less)
			if slices.Equal(got, want) {
				i += n
			} else {
				runes = less
			}
		}
	}
	got, want := encode(runes)
	fmt.Printf("%s: different: %q (%+.300q): got %d, want %d\n", name, string(runes), string(runes), got, want)
}
