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
