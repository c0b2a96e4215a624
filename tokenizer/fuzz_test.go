// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"
	"unicode/utf8"

	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Whatever the text, encoding does not panic, decoding gives the text back, and
// the cache changes nothing.
func FuzzEncode(f *testing.F) {
	for _, s := range alphabet {
		f.Add(s + "x" + s)
	}
	f.Add("\xff\xfe broken \xe4\xb8 UTF-8")
	var toks []*tokenizer.Tokenizer
	for _, name := range []string{"bytelevel-gpt2", "bytelevel-cl100k", "bytelevel-o200k", "bytelevel-tekken", "bytelevel-deepseek", "bytelevel-qwen35"} {
		toks = append(toks, golden(f, name))
	}
	f.Fuzz(func(t *testing.T, text string) {
		for i, tok := range toks {
			ids, err := tok.Append(context.Background(), nil, []byte(text), false)
			if err != nil {
				t.Fatal(err)
			}
			if back := string(tok.Decode(nil, ids)); back != text {
				t.Errorf("tokenizer %d: %q becomes %q", i, text, back)
			}
			c := tokenizer.NewCache(1 << 20)
			tokenizer.SetCacheStep(c, 16)
			for _, part := range []string{text[:len(text)/2], text, text + "'s"} {
				want, _ := tok.Append(context.Background(), nil, []byte(part), false)
				got, _, err := c.Append(context.Background(), nil, tok, []byte(part), false)
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("tokenizer %d: %q: %v, differs at %d", i, part, err, tokenizer.FirstDiff(got, want))
				}
			}
		}
	})
}

// The quick ways of encoding give the ids of the general one, which takes the steps as
// they stand in the file.
func FuzzGeneral(f *testing.F) {
	type pair struct{ quick, general *tokenizer.Tokenizer }
	var pairs []pair
	for _, name := range []string{
		"bytelevel-gpt2", "bytelevel-qwen2-nfc", "bytelevel-kimi", "falcon", "falcon3", "bloom", "starcoder", "bytelevel-gaps", "bytelevel-gaps-unk", "metaspace-first", "metaspace-always-split",
		"metaspace-never", "prepend-replace", "replace-only", "added-flags", "added-strip",
	} {
		b, err := os.ReadFile(filepath.Join("testdata/golden", name+".json"))
		if err != nil {
			f.Fatal(err)
		}
		quick := golden(f, name)
		general, err := tokenizer.LoadGeneral(b)
		if err != nil {
			f.Fatal(err)
		}
		pairs = append(pairs, pair{quick, general})
	}
	for _, s := range alphabet {
		f.Add("a" + s + "中 " + s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		text = strings.ToValidUTF8(text, "?")
		for i, p := range pairs {
			want, err := p.general.Append(context.Background(), nil, []byte(text), false)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := p.quick.Append(context.Background(), nil, []byte(text), false); err != nil || !slices.Equal(got, want) {
				t.Errorf("tokenizer %d: %q: %d, %v; want %d", i, text, got, err, want)
			}
		}
	})
}

// Whatever a rank file and its pattern are, loading them gives a tokenizer or an
// error.
func FuzzRanks(f *testing.F) {
	ranks, err := os.ReadFile("testdata/ranks/own.tiktoken")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(ranks[:400], "kimi")
	f.Add([]byte("YQ== 0\nYg== 1\nYWI= 2\n"), `[\p{L}&&[^\p{Han}a-c]]+|[^\s[0-9]]{1,3}|\s+(?!\S)`)
	f.Add([]byte("YQ== 0\n\nYg==\n"), `(?i:'s|k)|(?>a+)b`)
	f.Fuzz(func(t *testing.T, b []byte, pattern string) {
		tok, err := tokenizer.Load(fstest.MapFS{"a.tiktoken": {Data: b}}, tokenizer.Config{Pattern: pattern})
		if (tok == nil) == (err == nil) {
			t.Fatalf("a tokenizer and an error: %v", err)
		}
		if err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if _, err := tok.Append(ctx, nil, []byte("ab a\u0301 中 b 12's"), true); err != nil {
			t.Log(err)
		}
	})
}

// Whatever a file holds, loading it gives a tokenizer or an error.
func FuzzLoad(f *testing.F) {
	for _, name := range []string{"added-flags", "metaspace-always-split", "bytelevel-deepseek", "unk-single"} {
		b, err := os.ReadFile(filepath.Join("testdata/golden", name+".json"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		tok, err := loadBytes(b)
		if (tok == nil) == (err == nil) {
			t.Fatalf("a tokenizer and an error: %v", err)
		}
		if err != nil {
			return
		}
		if _, err := tok.Append(context.Background(), nil, []byte("ab a\u0301 <m> b 12"), true); err != nil {
			t.Log(err)
		}
	})
}

// Broken and hostile files are refused in words that name the file and the place.
func TestBadFiles(t *testing.T) {
	model := `"model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}`
	for _, c := range []struct {
		name, file  string
		want        string
		unsupported bool
	}{
		{"empty", ``, "byte 0", false},
		{"no object", `[]`, "byte 0", false},
		{"truncated", `{` + model[:40], "unexpected end", false},
		{"after the end", `{` + model + `} x`, "after the end", false},
		{"no model", `{}`, "no model", false},
		{"unigram", `{"model":{"type":"Unigram","vocab":[["a",0]]}}`, "Unigram", true},
		{"wordpiece", `{"model":{"type":"WordPiece","vocab":{"a":0}}}`, "WordPiece", true},
		{"merge without a token", `{"model":{"vocab":{"a":0,"b":1},"merges":["a b"]}}`, "model.merges: merge 0", false},
		{"merge of three", `{"model":{"vocab":{"a":0},"merges":["a a a"]}}`, "two tokens", false},
		{"an id too high", `{"model":{"vocab":{"a":4294967295},"merges":[]}}`, "id 4294967295", false},
		{"an id that is none", `{"model":{"vocab":{"a":-1},"merges":[]}}`, "token id at byte", false},
		{"no tokens", `{"model":{"vocab":{},"merges":[]}}`, "no tokens", false},
		{"control character", "{\"model\":{\"vocab\":{\"a\nb\":1}}}", "control character", false},
		{"half a surrogate", `{"model":{"vocab":{"\ud800":1},"merges":[]}}`, "surrogate", false},
		{"deep", strings.Repeat("[", 100_000), "byte 0", false},
		{"deep inside", `{"x":` + strings.Repeat("[", 100_000) + `}`, "nested too deep", false},
		{"normalizer", `{"normalizer":{"type":"BertNormalizer"},` + model + `}`, "BertNormalizer", true},
		{"pre-tokenizer", `{"pre_tokenizer":{"type":"BertPreTokenizer"},` + model + `}`, "BertPreTokenizer", true},
		{"post-processor", `{"post_processor":{"type":"Other"},` + model + `}`, "Other", true},
		{"expression", `{"pre_tokenizer":{"type":"Split","pattern":{"Regex":"(["},"behavior":"Isolated"},` + model + `}`, "(", true},
		{"dropout", `{"model":{"dropout":0.1,"vocab":{"a":0},"merges":[]}}`, "dropout", true},
		{"byte_fallback of bytes", `{"pre_tokenizer":{"type":"ByteLevel"},"model":{"byte_fallback":true,"vocab":{"a":0},"merges":[]}}`, "byte_fallback in a byte-level", true},
		{"suffix", `{"model":{"end_of_word_suffix":"</w>","vocab":{"a":0},"merges":[]}}`, "end_of_word_suffix", true},
		{"long prepend", `{"normalizer":{"type":"Prepend","prepend":"` + strings.Repeat("a", 64<<10+1) + `"},` + model + `}`, "normalizer: Prepend: prepend of 65537 bytes", true},
		{"long content", `{"normalizer":{"type":"Replace","pattern":{"String":"a"},"content":"` + strings.Repeat("a", 64<<10+1) + `"},` + model + `}`, "normalizer: Replace: content of 65537 bytes", true},
		{"long pattern", `{"normalizer":{"type":"Replace","pattern":{"String":"` + strings.Repeat("a", 64<<10+1) + `"},"content":"b"},` + model + `}`, "normalizer: Replace: pattern of 65537 bytes", true},
		{"long split", `{"pre_tokenizer":{"type":"Split","pattern":{"String":"` + strings.Repeat("a", 64<<10+1) + `"},"behavior":"Isolated"},` + model + `}`, "pre_tokenizer: Split: pattern of 65537 bytes", true},
		{"long added token", `{"added_tokens":[{"id":3,"content":"` + strings.Repeat("a", 64<<10+1) + `"}],` + model + `}`, "added_tokens: content of 65537 bytes", false},
		{"added token that grows", `{"added_tokens":[{"id":3,"content":"aaaa","normalized":true}],"normalizer":` + growing(2) + `,` + model + `}`, `added_tokens: the normal form of "aaaa"`, false},
		{"added tokens that grow", `{"added_tokens":[` + manyTokens(300) + `],"normalizer":{"type":"Prepend","prepend":"` + strings.Repeat("a", 64<<10-8) + `"},` + model + `}`, "added_tokens: the normal form of", false},
		{"many ids around", `{"post_processor":` + framing(200, 1000) + `,` + model + `}`, "post_processor: more than 1024 ids", false},
		{"many ids in steps", `{"post_processor":{"type":"Sequence","processors":[` + framing(1, 1000) + `,` + framing(1, 1000) + `]},` + model + `}`, "post_processor: two steps that put ids around a text", true},
		{"no text in the template", `{"post_processor":{"type":"TemplateProcessing","single":[],"special_tokens":{}},` + model + `}`, "does not have the text", true},
		{"another text in the template", `{"post_processor":{"type":"TemplateProcessing","single":[{"Sequence":{"id":"B"}}],"special_tokens":{}},` + model + `}`, "more than the text", true},
		{"added tokens that overlap", `{"added_tokens":[{"id":3,"content":"<m>","rstrip":true},{"id":4,"content":"\n"}],` + model + `}`, `added_tokens: "<m>" takes white space behind it along, "\n" begins with some`, true},
		{"the first character is dropped", `{"normalizer":{"type":"Strip","strip_left":true,"strip_right":false},"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"first"},` + model + `}`, "behind a normalizer Strip", true},
		{"unk", `{"model":{"unk_token":"<unk>","vocab":{"a":0},"merges":[]}}`, "<unk>", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := loadBytes([]byte(c.file))
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "tokenizer.json") {
				t.Errorf("error %v, want one that names tokenizer.json and %q", err, c.want)
			}
			if errors.Is(err, tokenizer.ErrUnsupported) != c.unsupported {
				t.Errorf("%v: ErrUnsupported is %v, want %v", err, !c.unsupported, c.unsupported)
			}
		})
	}
}

// growing is a normalizer whose steps make a thousand characters of each a.
func growing(steps int) string {
	step := `{"type":"Replace","pattern":{"String":"a"},"content":"` + strings.Repeat("a", 1000) + `"}`
	return `{"type":"Sequence","normalizers":[` + strings.TrimSuffix(strings.Repeat(step+",", steps), ",") + `]}`
}

func manyTokens(n int) string {
	var all []string
	for k := range n {
		all = append(all, fmt.Sprintf(`{"id":%d,"content":"t%d","normalized":true}`, 3+k, k))
	}
	return strings.Join(all, ",")
}

// framing is a post-processor that puts n special tokens of so many ids each
// before a text.
func framing(n, ids int) string {
	return `{"type":"TemplateProcessing","single":[` + strings.Repeat(`{"SpecialToken":{"id":"s"}},`, n) + `{"Sequence":{"id":"A"}}],"special_tokens":{"s":{"ids":[` +
		strings.TrimSuffix(strings.Repeat("0,", ids), ",") + `]}}}`
}

// A file whose steps make gigabytes of a short prompt gives an error, and a
// prompt in text-block mode, before it takes the memory.
func TestTextsThatGrow(t *testing.T) {
	const model = `"added_tokens":[{"id":3,"content":"<m>"}],"model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}`
	for name, c := range map[string]struct{ steps, text string }{
		"replaced":   {`"normalizer":` + growing(4), strings.Repeat("a", 207)},
		"expression": {`"normalizer":{"type":"Sequence","normalizers":[` + growing(1) + `,{"type":"Replace","pattern":{"Regex":"a"},"content":"` + strings.Repeat("b", 1000) + `"}]}`, strings.Repeat("a", 40)},
		"prepended":  {`"normalizer":{"type":"Prepend","prepend":"` + strings.Repeat("a", 64<<10) + `"}`, strings.Repeat("b<m>", 2000)},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := tokenizer.LoadModel(fstest.MapFS{"tokenizer.json": {Data: []byte(`{` + c.steps + `,` + model + `}`)}}, tokenizer.ModelConfig{Cache: tokenizer.NewCache(1 << 20)})
			if err != nil {
				t.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			p, err := m.Encode(context.Background(), nil, chat.Request{Prompt: []byte(`"` + c.text + `"`)}, time.Time{})
			runtime.ReadMemStats(&after)
			if err != nil || p.Mode != tokenizer.Bytes || p.Reason != tokenizer.TooLarge || len(p.IDs) == 0 {
				t.Errorf("mode %s, reason %q, %d ids, %v; want text-block mode and %s", p.Mode, p.Reason, len(p.IDs), err, tokenizer.TooLarge)
			}
			if got := after.TotalAlloc - before.TotalAlloc; got > 1<<30 {
				t.Errorf("%d MB were taken", got>>20)
			}
		})
	}
}

// Pieces that each get a prefix are bounded as well.
func TestPrefixesAreBounded(t *testing.T) {
	for limit, fails := range map[int]bool{19: true, 20: false} {
		if err := tokenizer.PrefixEach(10, limit); (err != nil) != fails {
			t.Errorf("10 pieces of one byte, each with one before it, and room for %d: error %v", limit, err)
		}
	}
}

func TestBadRankFiles(t *testing.T) {
	for _, c := range []struct{ name, file, want string }{
		{"x.tiktoken", "YQ== 0\n", "without a pattern"},
		{"o200k_base.tiktoken", "", "no tokens"},
		{"o200k_base.tiktoken", "YQ== 0\n\nYg==\n", "line 3"},
		{"o200k_base.tiktoken", "YQ== 0\n!! 1\n", "line 2"},
		{"o200k_base.tiktoken", "YQ== 99999999\n", "line 1"},
		{"other.txt", "", "no tokenizer.json and no *.tiktoken"},
	} {
		_, err := tokenizer.Load(fstest.MapFS{c.name: {Data: []byte(c.file)}}, tokenizer.Config{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %q: error %v, want one with %q", c.name, c.file, err, c.want)
		}
	}
}

// Long texts of one character, the worst of each scanner, take time in
// proportion to their length. That is asserted by the test's own time-out: what
// is quadratic takes hours for these.
func TestHostileTexts(t *testing.T) {
	const size = 1 << 17
	for name, tok := range goldens(t) {
		if strings.Contains(tok.Slow, "expression") || strings.Contains(tok.Slow, "no scanner") {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, s := range []string{"a", "'", "\u0301", " ", "\n ", "<|im_st", "<", "中", "1", "▁", "\xff", "aB", "😀"} {
				text := bytes.Repeat([]byte(s), size/len(s))
				ids, err := tok.Append(context.Background(), nil, text, false)
				gone := strings.TrimSpace(s) == "" || name == "bytelevel-gaps"
				if err != nil || utf8.Valid(text) && len(ids) == 0 && !gone {
					t.Errorf("%q: %d ids, %v", s, len(ids), err)
				}
			}
		})
	}
}

// Encoding into memory that is large enough allocates nothing.
func TestAllocations(t *testing.T) {
	text := []byte(strings.Repeat("The router reads a prompt, isn't it? 中文 12345\n\n", 200))
	for _, name := range []string{"bytelevel-gpt2", "bytelevel-qwen2-nfc", "bytelevel-o200k", "bytelevel-deepseek", "metaspace-first", "prepend-replace", "added-flags"} {
		tok := golden(t, name)
		dst, err := tok.Append(context.Background(), nil, text, true)
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(20, func() { dst, _ = tok.Append(context.Background(), dst[:0], text, true) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
