// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/tokenizer"
)

// alphabet are pieces of which random texts are made: what scanners, finders and
// normal forms have difficulties with.
var alphabet = []string{
	"a", "b", " ", "  ", "\n", "\r\n", "\t", "'", "'s", "'LL", "'ſ", "é", "é", "́", "中文", "日本", "한국", "ع", "ا", "1", "23", "4567", "１", "٣",
	"Hello", "hello", "HELLO", "HelloWorld", ".", ",", "!!", "/", "//\n", "<", "<|", "<|im_st", "<|im_start|>", "<|im_end|>\n", "<s>", "</s>", "[INST]",
	"<think>", "_", "-", "—", "🚀", "👩‍💻", "\u00a0", "\u0085", "\u2028", "\u3000", "\x00", "\x7f", "▁", "▁▁", "ǅ", "ʰ", "ª", "\u0301\u0301", "\U0001e4ec\u0301",
	"func main() {\n\tfmt.Println(\"x\")\n}\n", "the quick brown fox ", "Überraschung", "不客气", "  \n  ", "{\"a\": [1, 2.5e-3]}",
}

func randomText(r *rand.Rand, pieces int) string {
	var b strings.Builder
	few := alphabet
	if r.IntN(2) == 0 { // texts of few different pieces have more repetitions
		few = nil
		for range 1 + r.IntN(4) {
			few = append(few, alphabet[r.IntN(len(alphabet))])
		}
	}
	for range pieces {
		b.WriteString(few[r.IntN(len(few))])
	}
	return b.String()
}

// However a text is cut and continued, the cache gives the ids that encoding
// from scratch gives.
func TestCacheChangesNoID(t *testing.T) {
	names := []string{"gpt2", "qwen3", "gpt-oss", "tinyllama", "mistral-v3"}
	toks := goldens(t)
	for _, name := range names {
		if tok := reference(t, name); tok != nil {
			toks[name] = tok
		}
	}
	rounds := 12
	if testing.Short() {
		rounds = 4
	}
	for name, tok := range toks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(1, 2))
			reusedAll := 0
			for range rounds {
				c := tokenizer.NewCache(1 << 20)
				tokenizer.SetCacheStep(c, 64)
				text := randomText(r, 400)
				for range 12 {
					special := r.IntN(2) == 0
					want, err := tok.Append(context.Background(), []uint32{7}, []byte(text), special)
					if err != nil {
						t.Fatal(err)
					}
					got, reused, err := c.Append(context.Background(), []uint32{7}, tok, []byte(text), special)
					if err != nil {
						t.Fatal(err)
					}
					reusedAll += reused
					if !slices.Equal(got, want) {
						at := tokenizer.FirstDiff(got, want)
						t.Fatalf("%q: reused %d bytes, differs at %d: got %d, want %d", text, reused, at, around(got, at), around(want, at))
					}
					text = string([]byte(text)[:runeStart(text, r.IntN(len(text)+1))]) + randomText(r, 1+r.IntN(100))
				}
			}
			if reusedAll == 0 {
				t.Error("nothing was ever reused")
			}
		})
	}
}

// Entries of two texts with a common beginning need not fit together, and goroutines that encode the texts at once
// store entries of both.
func TestCacheOfMixedEntries(t *testing.T) {
	for name, tok := range goldens(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(11, 12))
			for range 40 {
				c := tokenizer.NewCache(1 << 20)
				tokenizer.SetCacheStep(c, 16)
				prefix := randomText(r, 60)
				texts := []string{prefix + randomText(r, 10), prefix[:runeStart(prefix, r.IntN(len(prefix)+1))] + randomText(r, 10), prefix}
				for _, text := range texts {
					own := tokenizer.Twin(c)
					if _, _, err := own.Append(context.Background(), nil, tok, []byte(text), false); err != nil {
						t.Fatal(err)
					}
					tokenizer.Mix(c, own, r)
				}
				for _, text := range texts {
					want, _ := tok.Append(context.Background(), nil, []byte(text), false)
					if got, _, err := c.Append(context.Background(), nil, tok, []byte(text), false); err != nil || !slices.Equal(got, want) {
						t.Fatalf("%q of %q: %d, %v; want %d", text, texts, got, err, want)
					}
				}
			}
		})
	}
}

// Encoding resumes only where every step begins again: not inside of a character that a step
// behind ByteLevel parts, nor where an earlier step would read a contraction.
func TestCacheBehindSteps(t *testing.T) {
	pieces := []string{"₲", "'s", "'", "ò", "²", "12", "123", "!", " ", "Ⲁ", "Ⲁ", "中", "e", "'st", "'te"}
	edited := func(name string, edits ...string) *tokenizer.Tokenizer {
		b, err := os.ReadFile("testdata/golden/" + name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		for k := 0; k < len(edits); k += 2 {
			if !bytes.Contains(b, []byte(edits[k])) {
				t.Fatalf("%s: no %s", name, edits[k])
			}
			b = bytes.Replace(b, []byte(edits[k]), []byte(edits[k+1]), 1)
		}
		tok, err := loadBytes(b)
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	const isolated = `"behavior":"Isolated","invert":false},`
	toks := map[string]*tokenizer.Tokenizer{
		"starcoder": golden(t, "starcoder"), "deepseek": golden(t, "bytelevel-deepseek"),
		// A token of the last byte of one Ⲁ and the first one of the next: the byte between the two is a digit.
		"falcon":            edited("falcon", `"vocab":{`, `"vocab":{"Ģâ":500,`, `"merges":[`, `"merges":[["Ģ","â"],`),
		"falcon3":           edited("falcon3", `"vocab":{`, `"vocab":{"Ģâ":500,`, `"merges":[`, `"merges":[["Ģ","â"],`),
		"o200k and Chinese": edited("bytelevel-o200k", isolated, isolated+`{"type":"Split","pattern":{"Regex":"[一-龥぀-ゟ゠-ヿ]+"},`+isolated),
	}
	for name, tok := range toks {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(7, 8))
			for range 400 {
				var b strings.Builder
				for range 1 + r.IntN(12) {
					b.WriteString(pieces[r.IntN(len(pieces))])
				}
				text := b.String()
				want, err := tok.Append(context.Background(), nil, []byte(text), false)
				if err != nil {
					t.Fatal(err)
				}
				for cut := range len(text) {
					c := tokenizer.NewCache(1 << 20)
					tokenizer.SetCacheStep(c, 2)
					if _, _, err := c.Append(context.Background(), nil, tok, []byte(text[:cut]), false); err != nil {
						t.Fatal(err)
					}
					if got, _, err := c.Append(context.Background(), nil, tok, []byte(text), false); err != nil || !slices.Equal(got, want) {
						t.Fatalf("%q behind %q: %d, %v; want %d", text, text[:cut], got, err, want)
					}
				}
			}
		})
	}
}

func runeStart(s string, i int) int {
	for i > 0 && i < len(s) && s[i]&0xc0 == 0x80 {
		i--
	}
	return i
}

func TestCacheIsBounded(t *testing.T) {
	tok := golden(t, "bytelevel-gpt2")
	c := tokenizer.NewCache(64 << 10)
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		if _, _, err := c.Append(context.Background(), nil, tok, []byte(randomText(r, 2000)), false); err != nil {
			t.Fatal(err)
		}
		if got := c.Bytes(); got > 64<<10 || got < 0 {
			t.Fatalf("the cache takes %d bytes, want at most %d", got, 64<<10)
		}
	}
}

// Steps that are used again stay; of an unused text, the last step is removed first.
func TestCacheKeepsWhatIsUsed(t *testing.T) {
	tok := golden(t, "bytelevel-gpt2")
	c := tokenizer.NewCache(128 << 10)
	r := rand.New(rand.NewPCG(5, 6))
	system := []byte(strings.Repeat("You are a helpful assistant. ", 300))
	for range 50 {
		text := append(slices.Clone(system), randomText(r, 3000)...)
		_, reused, err := c.Append(context.Background(), nil, tok, text, false)
		if err != nil {
			t.Fatal(err)
		}
		if reused > 0 {
			continue
		}
		if _, reused, _ = c.Append(context.Background(), nil, tok, text, false); reused < 4<<10 {
			t.Fatalf("of %d bytes %d were reused at once", len(text), reused)
		}
	}
	if _, reused, _ := c.Append(context.Background(), nil, tok, system, false); reused < 6<<10 {
		t.Errorf("of the system prompt's %d bytes %d are still known", len(system), reused)
	}
}

func TestCacheTellsTextsApart(t *testing.T) {
	c := tokenizer.NewCache(1 << 20)
	text := []byte(strings.Repeat("one two three ", 1000))
	for _, name := range []string{"bytelevel-gpt2", "metaspace-first"} {
		tok := golden(t, name)
		for _, special := range []bool{false, true} {
			want, _ := tok.Append(context.Background(), nil, text, special)
			for range 2 {
				if got, _, _ := c.Append(context.Background(), nil, tok, text, special); !slices.Equal(got, want) {
					t.Errorf("%s, special %v: ids of another text", name, special)
				}
			}
		}
	}
}

func TestCacheOfManyGoroutines(t *testing.T) {
	tok := golden(t, "bytelevel-cl100k")
	c := tokenizer.NewCache(256 << 10)
	r := rand.New(rand.NewPCG(7, 8))
	var texts []string
	var want [][]uint32
	system := randomText(r, 3000)
	for range 8 {
		texts = append(texts, system+randomText(r, 2000))
		ids, err := tok.Append(context.Background(), nil, []byte(texts[len(texts)-1]), false)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, ids)
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 50 {
				k := (g + i) % len(texts)
				if got, _, err := c.Append(context.Background(), nil, tok, []byte(texts[k]), false); err != nil || !slices.Equal(got, want[k]) {
					t.Errorf("text %d: %v, differs at %d", k, err, tokenizer.FirstDiff(got, want[k]))
				}
			}
		})
	}
	wg.Wait()
}

func TestCancelledContextGivesABeginning(t *testing.T) {
	tok := golden(t, "bytelevel-gpt2")
	text := []byte(strings.Repeat("some words and more ", 20000))
	want, _ := tok.Append(context.Background(), nil, text, false)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	got, err := tok.Append(ctx, nil, text, false)
	if err == nil || len(got) == 0 || len(got) >= len(want) || !slices.Equal(got, want[:len(got)]) {
		t.Errorf("%d of %d ids, %v; want a beginning and an error", len(got), len(want), err)
	}
}
