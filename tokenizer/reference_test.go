// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/tokenizer"
)

var (
	loadedMu sync.Mutex
	loaded   = map[string]*tokenizer.Tokenizer{}
)

// reference returns one of the reference tokenizers, nil if it is not at hand.
func reference(t testing.TB, name string) *tokenizer.Tokenizer {
	t.Helper()
	dir := fixtures.Path(t, "tokenizers", name)
	if dir == "" {
		return nil
	}
	loadedMu.Lock()
	defer loadedMu.Unlock()
	if loaded[name] == nil {
		tok, err := tokenizer.Load(os.DirFS(dir), tokenizer.Config{Loader: tokenizer.TokenizerJSON}) // the vectors are of that file
		if err != nil {
			t.Fatal(err)
		}
		loaded[name] = tok
	}
	return loaded[name]
}

// vectors are the files of texts and their ids: texts in one, ids in the other.
var vectors = []struct {
	tokenizer, texts, ids string
	count                 int
}{
	{"gpt2", "kitoken/small_input.txt", "kitoken/small_tokens_gpt2.txt", 20},
	{"gpt2", "kitoken/mixed_input.txt", "kitoken/mixed_tokens_gpt2.txt", 120},
	{"gpt2", "kitoken/utf8_input.txt", "kitoken/utf8_tokens_gpt2.txt", 1},
	{"gpt-oss", "kitoken/small_input.txt", "kitoken/small_tokens_gpt_oss.txt", 20},
	{"gpt-oss", "kitoken/mixed_input.txt", "kitoken/mixed_tokens_gpt_oss.txt", 120},
	{"gpt-oss", "kitoken/utf8_input.txt", "kitoken/utf8_tokens_gpt_oss.txt", 1},
	{"tinyllama", "kitoken/small_input.txt", "kitoken/small_tokens_llama2.txt", 20},
	{"tinyllama", "kitoken/mixed_input.txt", "kitoken/mixed_tokens_llama2.txt", 120},
	{"tinyllama", "kitoken/utf8_input.txt", "kitoken/utf8_tokens_llama2.txt", 1},
	{"mistral-v3", "kitoken/small_input.txt", "kitoken/small_tokens_mistral03.txt", 20},
	{"mistral-v3", "kitoken/mixed_input.txt", "kitoken/mixed_tokens_mistral03.txt", 120},
	{"mistral-v3", "kitoken/utf8_input.txt", "kitoken/utf8_tokens_mistral03.txt", 1},
	{"gpt2", "llamacpp/gpt-2.inp", "llamacpp/gpt-2.out", 46},
	{"qwen3", "llamacpp/qwen2.inp", "llamacpp/qwen2.out", 46},
	{"tinyllama", "llamacpp/llama-spm.inp", "llamacpp/llama-spm.out", 46},
}

// cases splits the two files of a vector into texts and ids.
func cases(t *testing.T, texts, ids string) (text []string, want [][]uint32) {
	t.Helper()
	read := func(name string) string {
		b, err := os.ReadFile(fixtures.Path(t, "vectors", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	in, out := read(texts), read(ids)
	switch {
	case strings.HasPrefix(texts, "llamacpp"):
		text = strings.Split(strings.TrimSuffix(in, "\n__ggml_vocab_test__\n"), "\n__ggml_vocab_test__\n")
	case strings.Contains(texts, "utf8"):
		text = []string{in}
	default:
		unescape := strings.NewReplacer(`\n`, "\n", `\s`, " ", `\x`, "")
		for line := range strings.SplitSeq(strings.TrimSuffix(in, "\n"), "\n") {
			text = append(text, unescape.Replace(line))
		}
	}
	for line := range strings.SplitSeq(strings.TrimSuffix(out, "\n"), "\n") {
		var ids []uint32
		for _, f := range strings.FieldsFunc(line, func(r rune) bool { return r == ',' || r == ' ' }) {
			n, err := strconv.ParseUint(f, 10, 32)
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, uint32(n))
		}
		want = append(want, ids)
	}
	return text, want
}

func TestVectors(t *testing.T) {
	for _, v := range vectors {
		t.Run(v.tokenizer+"/"+filepath.Base(v.texts), func(t *testing.T) {
			tok := reference(t, v.tokenizer)
			if tok == nil {
				return
			}
			texts, want := cases(t, v.texts, v.ids)
			if len(texts) != v.count || len(want) != v.count {
				t.Fatalf("%d texts and %d lists of ids, want %d", len(texts), len(want), v.count)
			}
			for i, text := range texts {
				got, err := tok.Append(context.Background(), nil, []byte(text), false)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, want[i]) {
					at := tokenizer.FirstDiff(got, want[i])
					t.Errorf("%d: %.60q: differs at %d: got %d, want %d", i, text, at, around(got, at), around(want[i], at))
				}
			}
		})
	}
}

func around(ids []uint32, at int) []uint32 {
	return ids[min(max(at-2, 0), len(ids)):min(at+5, len(ids))]
}

// The rank file and the tokenizer.json of one model give the same ids.
func TestRanksEqualJSON(t *testing.T) {
	want := reference(t, "gpt-oss")
	if want == nil {
		return
	}
	b, err := os.ReadFile(fixtures.Path(t, "tokenizers", "gpt-oss", "o200k_base.tiktoken.gz"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "o200k_base.tiktoken.gz"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Load(os.DirFS(dir), tokenizer.Config{Loader: tokenizer.TokenizerJSON}) // the vectors are of that file
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors[:3] {
		texts, _ := cases(t, v.texts, v.ids)
		for _, text := range texts {
			if strings.Contains(text, "<|") {
				continue
			}
			a, errA := tok.Append(context.Background(), nil, []byte(text), false)
			b, errB := want.Append(context.Background(), nil, []byte(text), false)
			if errA != nil || errB != nil || !slices.Equal(a, b) {
				t.Errorf("%.60q: %v, %v, differs at %d", text, errA, errB, tokenizer.FirstDiff(a, b))
			}
		}
	}
}
