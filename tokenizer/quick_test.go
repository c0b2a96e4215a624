// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/tokenizer"
)

// Words that are found without the scanner have the ids, and the places to resume at, that the scanner
// and the word tables give.
func TestQuickWordsAreThoseOfTheScanner(t *testing.T) {
	parts := []string{
		" ", " ", " ", "\n", "\r\n", "\t", "  ", "'s", "'LL", "'", "’", "a", "the", "The", "HTTP", "fooBar", "XMLHttpRequest", "iPhone", "naïve", "Straße", "\u0301", "ſ", "1", "42", "123456", "²",
		".", ", ", "(", ")", "();", "//", "->", "==", "_", "-", "/", "\\", "\u00a0", "漢字", "日本語", "привет", "🙂", "internationalisation", "characteristically", "sixteen_bytes_ab", "\xff", "\xc3", "<|im_end|>",
	}
	for _, pattern := range tokenizer.QuickPatterns() {
		quick, slow := tokenizer.WithPattern(t, pattern)
		for seed := range uint64(300) {
			r := rand.New(rand.NewPCG(seed, 1))
			var text strings.Builder
			for range r.IntN(400) {
				if text.WriteString(parts[r.IntN(len(parts))]); r.IntN(3) == 0 {
					for range r.IntN(20) {
						text.WriteByte("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"[r.IntN(36)])
					}
				}
			}
			step := 1 + r.IntN(200)
			ids, ends := quick.Steps(context.Background(), []byte(text.String()), step)
			wantIDs, wantEnds := slow.Steps(context.Background(), []byte(text.String()), step)
			if !slices.Equal(ids, wantIDs) {
				t.Fatalf("%s, seed %d: ids differ at %d in %q", pattern, seed, tokenizer.FirstDiff(ids, wantIDs), text.String())
			}
			if ends != wantEnds {
				t.Fatalf("%s, seed %d: places\n%s\nwant\n%s\nin %q", pattern, seed, ends, wantEnds, text.String())
			}
		}
	}
}

// If the time is over inside of a word, no ids of the words behind it are appended.
func TestIDsBeforeAnErrorAreCorrect(t *testing.T) {
	tok, _ := tokenizer.WithPattern(t, tokenizer.QuickPatterns()[0])
	r := rand.New(rand.NewPCG(1, 1))
	var text []byte
	for range 300 {
		text = append(text, " the end"...)
		for range r.IntN(4000) {
			text = append(text, byte('a'+r.IntN(26)))
		}
	}
	want, err := tok.Append(context.Background(), nil, text, false)
	if err != nil {
		t.Fatal(err)
	}
	for left := 0; ; left++ {
		tok.Forget()
		ids, err := tok.Append(&countdown{context.Background(), left}, nil, text, false)
		if at := tokenizer.FirstDiff(ids, want); err != nil && at != len(ids) || err == nil && at != -1 {
			t.Fatalf("%d calls: %v, ids differ at %d of %d", left, err, at, len(ids))
		}
		if err == nil {
			if left < 10 {
				t.Fatalf("the context was asked %d times", left)
			}
			return
		}
	}
}
