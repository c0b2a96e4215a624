// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer"
)

// sample is a random text, to encode with special tokens before and after it or without.
type sample struct {
	text    string
	special bool
}

// tokenIDs compares the ids of random texts.
func tokenIDs(ref *reference, tok *tokenizer.Tokenizer, c candidate) bench.Figure {
	kind, n := "tokenizer ", texts
	switch {
	case c.config != "":
		kind, n = "AutoTokenizer ", texts/20
	case !c.real:
		n = texts / 4
	}
	r, made := random(1), 0
	theirs := func(all []sample) [][]uint32 {
		texts := make([]string, len(all))
		for i, s := range all {
			texts[i] = s.text
		}
		// A batch is of one kind.
		return ref.askAll(map[string]any{"op": "encode", "texts": texts, "special": all[0].special}, len(texts)).IDs
	}
	ours := func(s sample) []uint32 {
		return bench.Must(tok.Append(context.Background(), nil, []byte(s.text), s.special))
	}
	return comparison[sample, []uint32]{
		name: kind + c.name, cases: n, theirs: theirs, ours: ours, equal: slices.Equal[[]uint32],
		random: func() sample {
			made++
			return sample{c.text(r, tok), (made-1)/batch%2 == 1}
		},
		show: func(s sample, _, _ []uint32) string { return shrink(s, ours, theirs) },
	}.run()
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

// shrink returns a short text on which the two sides differ, and their ids: it removes parts of
// the text, large ones first, as long as the rest still differs.
func shrink(s sample, ours func(sample) []uint32, theirs func([]sample) [][]uint32) string {
	var got, want []uint32
	differ := func(text []rune) bool {
		part := sample{string(text), s.special}
		got, want = ours(part), theirs([]sample{part})[0]
		return !slices.Equal(got, want)
	}
	text := []rune(s.text)
	for n := len(text) / 2; n > 0; n /= 2 {
		for i := 0; i+n <= len(text); {
			if less := slices.Delete(slices.Clone(text), i, i+n); differ(less) {
				text = less
			} else {
				i += n
			}
		}
	}
	differ(text)
	return fmt.Sprintf("%q (%+.300q): got %d, want %d", string(text), string(text), got, want)
}
