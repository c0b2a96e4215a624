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

// The short ways of the scanners see what the long ones see.
func TestThreeBytes(t *testing.T) {
	if r := tokenizer.ThreeBytesDiffer(); r != 0 {
		t.Errorf("U+%04X", r)
	}
}

// A set of pairs may claim a pair too many, and never misses one.
func TestPairSet(t *testing.T) {
	for _, n := range []int{0, 1, 50, 5000, 200_000} {
		r := rand.New(rand.NewPCG(1, 2))
		pairs := make([][2]uint32, n)
		for i := range pairs {
			pairs[i] = [2]uint32{r.Uint32N(1 << 24), r.Uint32N(1 << 24)}
		}
		missed, extra := tokenizer.MissedPair(pairs)
		if len(missed) > 0 || n <= 100_000 && extra > n/20+1 {
			t.Errorf("of %d pairs %d are missed, and %d others are found", n, len(missed), extra)
		}
	}
}

// Eight bytes are looked at together for the beginning of a token: it is found
// wherever it stands.
func TestAddedTokenAtEveryOffset(t *testing.T) {
	tok := golden(t, "added-strip")
	want, ok := tok.ID("<|im_end|>")
	if !ok {
		t.Fatal("no token")
	}
	for _, fill := range []string{"x", "é", "漢", "=", ";", "\x00", "\xff"} {
		for n := range 40 {
			text := strings.Repeat(fill, n) + "<|im_end|>" + strings.Repeat(fill, n%11) + "<" + fill
			ids, err := tok.Append(context.Background(), nil, []byte(text), false)
			if err != nil || !slices.Contains(ids, want) {
				t.Fatalf("%q: %d, %v", text, ids, err)
			}
		}
	}
}

// Words of characters of three bytes are cut in runs where they are cut one by one.
func TestCutsInRuns(t *testing.T) {
	toks := []*tokenizer.Tokenizer{golden(t, "bytelevel-qwen2-nfc"), golden(t, "bytelevel-o200k")}
	for _, name := range []string{"qwen3", "gpt-oss", "gpt2"} {
		if tok := reference(t, name); tok != nil {
			toks = append(toks, tok)
		}
	}
	r := rand.New(rand.NewPCG(1, 6))
	parts := []string{"路由", "缓存", "の", "です", "サーバー", "한", "국어", "，", "a", "é", "😀", "\xe4\xb8", "\xff", "ก", "\u3099", "\ufeff"}
	for range 300 {
		var word []byte
		for n := r.IntN(60); n >= 0; n-- {
			if r.IntN(3) == 0 {
				word = append(word, parts[r.IntN(len(parts))]...)
			} else {
				word = append(word, string(rune(0x4e00+r.IntN(600)))...)
			}
		}
		for _, tok := range toks {
			if at := tokenizer.CutsDiffer(tok, word); at >= 0 {
				t.Fatalf("%q at %d", word, at)
			}
		}
	}
}

// The tables of the words seen grow with their number up to a bound, know what they knew
// when they have grown, and change no id.
func TestTablesOfWords(t *testing.T) {
	tok := golden(t, "bytelevel-gpt2")
	r := rand.New(rand.NewPCG(1, 7))
	var text []byte
	var want []uint32
	add := func(n int) {
		for range n {
			word := []byte{' '}
			for range 7 + r.IntN(14) {
				word = append(word, byte('a'+r.IntN(26)))
			}
			for _, part := range [][]byte{word, {'7'}, {byte('A' + r.IntN(26)), byte('a' + r.IntN(26))}, {'7'}, {byte('a' + r.IntN(26)), byte('a' + r.IntN(26))}, {'7'}} {
				tok.Forget()
				ids, err := tok.Append(context.Background(), nil, part, false)
				if err != nil {
					t.Fatal(err)
				}
				text, want = append(text, part...), append(want, ids...)
			}
		}
	}
	for _, c := range []struct{ words, room int }{{100, 1 << 10}, {400, 1 << 12}, {1500, 1 << 14}} {
		add(c.words)
		tok.Forget()
		for range 2 {
			if got, err := tok.Append(context.Background(), nil, text, false); err != nil || !slices.Equal(got, want) {
				t.Fatalf("%d bytes: %v, differs at %d", len(text), err, tokenizer.FirstDiff(got, want))
			}
		}
		room, short, long := tokenizer.KnownWords(tok)
		if room != c.room || 4*short > room || short < 100 || long < 20 {
			t.Errorf("%d bytes: room for %d short words, %d known, and %d others", len(text), room, short, long)
		}
	}
	var many []byte
	for len(many) < 1<<20 {
		for n := r.IntN(14); n >= 0; n-- {
			many = append(many, byte('a'+r.IntN(26)))
		}
		many = append(many, byte('A'+r.IntN(26)), byte('a'+r.IntN(26)), '7', ' ')
	}
	if _, err := tok.Append(context.Background(), nil, many, false); err != nil {
		t.Fatal(err)
	}
	if room, short, long := tokenizer.KnownWords(tok); room != 1<<16 || short < 1<<14 || long < 300 || long > 1<<13 {
		t.Errorf("a megabyte of words: room for %d short words, %d known, and %d others", room, short, long)
	}
}
