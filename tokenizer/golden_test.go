// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bufio"
	"bytes"
	"compress/zlib"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// loadBytes loads a tokenizer.json.
func loadBytes(b []byte) (*tokenizer.Tokenizer, error) {
	return tokenizer.Load(fstest.MapFS{"tokenizer.json": {Data: b}}, tokenizer.Config{})
}

func goldenNames(t testing.TB) []string {
	t.Helper()
	names, err := filepath.Glob("testdata/golden/*.json")
	if err != nil || len(names) == 0 {
		t.Fatalf("no golden tokenizers: %v", err)
	}
	for i, n := range names {
		names[i] = strings.TrimSuffix(filepath.Base(n), ".json")
	}
	return names
}

// golden returns one of the small tokenizers that tools/golden made.
func golden(t testing.TB, name string) *tokenizer.Tokenizer {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata/golden", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := loadBytes(b)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return tok
}

// goldens returns all of them but those that reuse nothing within a stretch.
func goldens(t testing.TB) map[string]*tokenizer.Tokenizer {
	t.Helper()
	toks := map[string]*tokenizer.Tokenizer{}
	for _, name := range goldenNames(t) {
		toks[name] = golden(t, name)
	}
	return toks
}

type goldenCase struct {
	Text    string   `json:"text"`
	Special bool     `json:"special"`
	IDs     []uint32 `json:"ids"`
}

func goldenCases(t testing.TB, name string) (all []goldenCase) {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata/golden", name+".jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var c goldenCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	return all
}

// The reference's ids for each feature of a file.
func TestGolden(t *testing.T) {
	for _, name := range goldenNames(t) {
		t.Run(name, func(t *testing.T) {
			tok := golden(t, name)
			all := goldenCases(t, name)
			if len(all) < 100 {
				t.Fatalf("%d cases", len(all))
			}
			for _, c := range all {
				got, err := tok.Append(context.Background(), nil, []byte(c.Text), c.Special)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, c.IDs) {
					at := tokenizer.FirstDiff(got, c.IDs)
					t.Errorf("%q: differs at %d: got %d %q, want %d %q", c.Text, at, around(got, at), tok.Decode(nil, around(got, at)), around(c.IDs, at), tok.Decode(nil, around(c.IDs, at)))
				}
			}
		})
	}
}

// A rank file of our own gives tiktoken's ids.
func TestRanks(t *testing.T) {
	ranks, err := os.ReadFile("testdata/ranks/own.tiktoken")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kimi", "o200k"} {
		b, err := os.ReadFile("testdata/ranks/" + name + ".jsonl")
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		var head struct {
			Pattern string
			Special map[string]uint32
		}
		if err := json.Unmarshal([]byte(lines[0]), &head); err != nil {
			t.Fatal(err)
		}
		tok, err := tokenizer.Load(fstest.MapFS{"own.tiktoken": {Data: ranks}}, tokenizer.Config{Pattern: head.Pattern, Special: head.Special})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if tok.Slow != "" {
			t.Errorf("%s: slow: %q", name, tok.Slow)
		}
		for _, line := range lines[1:] {
			var c goldenCase
			if err := json.Unmarshal([]byte(line), &c); err != nil {
				t.Fatal(err)
			}
			got, err := tok.Append(context.Background(), nil, []byte(c.Text), false)
			if err != nil || !slices.Equal(got, c.IDs) {
				t.Errorf("%s: %q: %d, %v; want %d", name, c.Text, got, err, c.IDs)
			}
		}
	}
}

// A rank file without any special token says so: engines have some that nothing in
// the folder names.
func TestRanksWithoutSpecialTokens(t *testing.T) {
	ranks, err := os.ReadFile("testdata/ranks/own.tiktoken")
	if err != nil {
		t.Fatal(err)
	}
	decoder := []byte(`{"added_tokens_decoder":{"1000":{"content":"<|im_start|>"}}}`)
	for _, c := range []struct {
		name  string
		files fstest.MapFS
		conf  tokenizer.Config
		doubt bool
	}{
		{"nothing", fstest.MapFS{}, tokenizer.Config{Pattern: "kimi"}, true},
		{"a configuration without tokens", fstest.MapFS{"tokenizer_config.json": {Data: []byte(`{}`)}}, tokenizer.Config{Pattern: "kimi"}, true},
		{"a configuration with tokens", fstest.MapFS{"tokenizer_config.json": {Data: decoder}}, tokenizer.Config{Pattern: "kimi"}, false},
		{"given ones", fstest.MapFS{}, tokenizer.Config{Pattern: "kimi", Special: map[string]uint32{"<s>": 1000}}, false},
		{"given none", fstest.MapFS{}, tokenizer.Config{Pattern: "kimi", Special: map[string]uint32{}}, false},
	} {
		c.files["own.tiktoken"] = &fstest.MapFile{Data: ranks}
		m, err := tokenizer.LoadModel(c.files, tokenizer.ModelConfig{Config: c.conf, ChatTemplate: "x"})
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got := m.Degraded(); strings.Contains(got, "no special tokens") != c.doubt || c.doubt && !strings.Contains(got, "own.tiktoken") {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

// Where a stretch begins, nothing stands before it: not for the neighbours of a token
// that counts as a single word only, nor for the first prefix. The ids are the reference's.
func TestBeginningsOfStretches(t *testing.T) {
	for _, c := range []struct {
		file string
		want map[string][]uint32
	}{
		{
			`{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":false},"added_tokens":[{"id":9,"content":"A"},
				{"id":9,"content":"<m","single_word":true,"normalized":true}],"model":{"vocab":{"A":0,"<":1,"m":2,">":3},"merges":[]}}`,
			map[string][]uint32{"A<m>": {0, 4, 3}, "<m>A<m<m": {4, 3, 0, 4, 1, 2}, "m<m>": {2, 1, 2, 3}, "<m<m>": {4, 1, 2, 3}, "<m>m<m>": {4, 3, 2, 1, 2, 3}},
		},
		{
			`{"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"WhitespaceSplit"},{"type":"Metaspace","replacement":"▁","prepend_scheme":"first"}]},
				"model":{"vocab":{"▁":0,"a":1,"b":2},"merges":[]}}`,
			map[string][]uint32{"ab a": {0, 1, 2, 1}, " ab a": {1, 2, 1}, "a b": {0, 1, 2}},
		},
	} {
		tok, err := loadBytes([]byte(c.file))
		if err != nil {
			t.Fatal(err)
		}
		for text, want := range c.want {
			cache := tokenizer.NewCache(1 << 20)
			tokenizer.SetCacheStep(cache, 2)
			for range 2 {
				got, _, err := cache.Append(context.Background(), nil, tok, []byte(text), false)
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("%q: %d, %v; want %d", text, got, err, want)
				}
			}
		}
	}
}

// Kimi's folders do not say how text is parted into words; the class that they name does,
// and makes special tokens of the ids behind the ranks. Without the file of the class, chats with tools are
// in text-block mode.
func TestKimi(t *testing.T) {
	ranks, err := os.ReadFile("testdata/ranks/own.tiktoken")
	if err != nil {
		t.Fatal(err)
	}
	want, err := tokenizer.Load(fstest.MapFS{"tiktoken.model": {Data: ranks}}, tokenizer.Config{Pattern: "kimi", Special: map[string]uint32{"<|im_end|>": 402, "<|reserved_token_403|>": 403, "<|reserved_token_657|>": 657}})
	if err != nil {
		t.Fatal(err)
	}
	const decoder = `"added_tokens_decoder":{"402":{"content":"<|im_end|>","special":true}}`
	for _, c := range []struct {
		config string
		is     bool
	}{
		{`{"tokenizer_class":"TikTokenTokenizer","auto_map":{"AutoTokenizer":["tokenization_kimi.TikTokenTokenizer",null]},` + decoder + `}`, true},
		{`{"auto_map":{"AutoTokenizer":"tokenization_moonshot.TikTokenTokenizer"},` + decoder + `}`, true},
		{`{"auto_map":{"AutoTokenizer":["moonshotai/Any--tokenization_kimi.TikTokenTokenizer",null]},` + decoder + `}`, true},
		{`{"auto_map":{"AutoTokenizer":["tokenization_other.TikTokenTokenizer",null]},` + decoder + `}`, false},
		{`{"tokenizer_class":"TikTokenTokenizer",` + decoder + `}`, false},
		{`{"auto_map":{"AutoTokenizer":[]},` + decoder + `}`, false},
		{`{"auto_map":{"AutoTokenizer":[7]},` + decoder + `}`, false},
	} {
		files := fstest.MapFS{"tiktoken.model": {Data: ranks}, "tokenizer_config.json": {Data: []byte(c.config)}, "chat_template.jinja": {Data: []byte("{{ messages[0].content }}")}}
		m, err := tokenizer.LoadModel(files, tokenizer.ModelConfig{})
		if !c.is {
			if !errors.Is(err, tokenizer.ErrUnsupported) || !strings.Contains(err.Error(), "pattern") {
				t.Errorf("%s: error %v, want that the pattern is missing", c.config, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", c.config, err)
		}
		if why := m.Degraded(); why != "" {
			t.Errorf("%s: %s", c.config, why)
		}
		const text = "The WORLDs中文 <|im_end|><|reserved_token_402|><|reserved_token_403|><|reserved_token_657|><|reserved_token_658|> it's 12345"
		ids, _ := want.Append(context.Background(), nil, []byte(text), false)
		for tools, mode := range map[string]tokenizer.Mode{"": tokenizer.Exact, `[{"type":"function","function":{"name":"f"}}]`: tokenizer.Bytes} {
			q := chat.Request{Messages: []byte(`[{"role":"user","content":"` + text + `"}]`)}
			if tools != "" {
				q.Tools = []byte(tools)
			}
			p, err := m.Encode(context.Background(), nil, q, time.Time{})
			if err != nil || p.Mode != mode || mode == tokenizer.Exact && !slices.Equal(p.IDs, ids) || mode == tokenizer.Bytes && p.Reason != tokenizer.NoRenderer {
				t.Errorf("%s, tools %s: %s %s, %v, differs at %d", c.config, tools, p.Mode, p.Reason, err, tokenizer.FirstDiff(p.IDs, ids))
			}
		}
	}
}

// The class of Kimi K2 sorts the objects in tools by their keys. Later classes also write the tools as TypeScript, which is not
// done here. The texts are those that Python's json module writes for sorted objects.
func TestKimiTools(t *testing.T) {
	ranks, err := os.ReadFile("testdata/ranks/own.tiktoken")
	if err != nil {
		t.Fatal(err)
	}
	const (
		config = `{"auto_map":{"AutoTokenizer":["tokenization_kimi.TikTokenTokenizer",null]},"added_tokens_decoder":{"402":{"content":"<|im_end|>"}}}`
		apply  = "    def apply_chat_template(self, conversation, tools=None, **kwargs):\n"
		sorts  = apply + "        tools = deep_sort_dict(tools)\n"
		tools  = `[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"é":{"enum":[{"b":1,"a":2}]},"Z":{}}}}}]`
	)
	for _, c := range []struct{ code, want string }{
		{"class TikTokenTokenizer: pass", `[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object", "properties": {"é": {"enum": [{"b": 1, "a": 2}]}, "Z": {}}}}}]`},
		{sorts, `[{"function": {"description": null, "name": "f", "parameters": {"properties": {"Z": {}, "é": {"enum": [{"a": 2, "b": 1}]}}, "type": "object"}}, "type": "function"}]`},
		{sorts + "        tools_ts_str = encode_tools_to_typescript_style(tools)\n", ""},
		{apply + "        tools = changed(tools)\n", ""},
	} {
		files := fstest.MapFS{
			"tiktoken.model": {Data: ranks}, "tokenizer_config.json": {Data: []byte(config)}, "tokenization_kimi.py": {Data: []byte(c.code)},
			"chat_template.jinja": {Data: []byte("{{ tools | tojson }}")},
		}
		m, err := tokenizer.LoadModel(files, tokenizer.ModelConfig{})
		if err != nil {
			t.Fatal(err)
		}
		p, err := m.Encode(context.Background(), nil, chat.Request{Messages: []byte(`[{"role":"user","content":"a"}]`), Tools: []byte(tools)}, time.Time{})
		switch got := string(m.Tokenizer().Decode(nil, p.IDs)); {
		case err != nil:
			t.Fatal(err)
		case c.want == "" && (p.Mode != tokenizer.Bytes || p.Reason != tokenizer.NoRenderer):
			t.Errorf("%s: %s %s, want text-block mode without a renderer", c.code, p.Mode, p.Reason)
		case c.want != "" && (p.Mode != tokenizer.Exact || got != c.want):
			t.Errorf("%s: %s %s\ngot  %s\nwant %s", c.code, p.Mode, p.Reason, got, c.want)
		}
	}
}

// Kimi's class encodes long texts in slices, and so does the cache, wherever it resumes.
func TestKimiLong(t *testing.T) {
	ranks, err := os.ReadFile("testdata/ranks/own.tiktoken")
	if err != nil {
		t.Fatal(err)
	}
	config := `{"auto_map":{"AutoTokenizer":["tokenization_kimi.TikTokenTokenizer",null]},"added_tokens_decoder":{"1000":{"content":"<|im_start|>"},"1001":{"content":"<|im_end|>"}}}`
	tok, err := tokenizer.Load(fstest.MapFS{"tiktoken.model": {Data: ranks}, "tokenizer_config.json": {Data: []byte(config)}}, tokenizer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("testdata/ranks/kimi-long.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var c struct {
			Parts [][2]any
			IDs   []byte
		}
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatal(err)
		}
		var text []byte
		for _, p := range c.Parts {
			text = append(text, strings.Repeat(p[0].(string), int(p[1].(float64)))...)
		}
		unpacked, err := zlib.NewReader(bytes.NewReader(c.IDs))
		if err != nil {
			t.Fatal(err)
		}
		packed, err := io.ReadAll(unpacked)
		if err != nil {
			t.Fatal(err)
		}
		want := make([]uint32, len(packed)/4)
		for k := range want {
			want[k] = binary.LittleEndian.Uint32(packed[4*k:])
		}
		cache := tokenizer.NewCache(1 << 24)
		for _, end := range []int{len(text) / 3, len(text) * 2 / 3, len(text), len(text)} {
			got, reused, err := cache.Append(context.Background(), nil, tok, text[:end], false)
			if at := tokenizer.FirstDiff(got, want); end == len(text) && (err != nil || at >= 0) {
				t.Errorf("%v, %d bytes reused: %d ids, %v, differs at %d; want %d ids", c.Parts, reused, len(got), err, at, len(want))
			}
		}
	}
}

// The reference's treatment of ids that the vocabulary has already, of a token that stands
// there twice, and of tokens that no merge reaches in text that nothing parts.
func TestOddTokens(t *testing.T) {
	var fallback strings.Builder
	for c := range 256 {
		fmt.Fprintf(&fallback, `,"<0x%02X>":%d`, c, c+7)
	}
	for _, c := range []struct {
		file string
		want map[string][]uint32
	}{
		{
			`{"added_tokens":[{"id":3,"content":"<"},{"id":9,"content":"x"},{"id":9,"content":"x"},{"id":4,"content":"y"}],"model":{"vocab":{"a":0,"b":1,"<":37},"merges":[]}}`,
			map[string][]uint32{"<xy": {37, 3, 4}, "ax": {0, 3}},
		},
		{
			`{"added_tokens":[{"id":3,"content":"x"},{"id":3,"content":"c","lstrip":true}],"model":{"vocab":{"a":0,"b":1,"c":3},"merges":[]}}`,
			map[string][]uint32{"x": nil, "ax c": {0, 3}},
		},
		{
			`{"normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},"model":{"ignore_merges":true,"byte_fallback":true,"vocab":{"▁":0,"a":1,"b":2,"▁a b":3,"ab":4,"a▁b":5,"ab▁":6` + fallback.String() + `},"merges":[]}}`,
			map[string][]uint32{"ab": {4}, "a b": {5}, "ab ab": {1, 2, 0, 1, 2}, "ab aba b": {1, 2, 0, 1, 2, 1, 0, 2}, "abé": {1, 2, 202, 176}},
		},
	} {
		tok, err := loadBytes([]byte(c.file))
		if err != nil {
			t.Fatal(err)
		}
		for text, want := range c.want {
			if got, err := tok.Append(context.Background(), nil, []byte(text), false); err != nil || !slices.Equal(got, want) {
				t.Errorf("%q: %d, %v; want %d", text, got, err, want)
			}
		}
	}
	// The reference finds one of the two, and not always the same.
	tok, err := loadBytes([]byte(`{"added_tokens":[{"id":1,"content":"é","normalized":true},{"id":2,"content":"e\u0301","normalized":true}],"normalizer":{"type":"NFC"},"model":{"vocab":{"a":0},"merges":[]}}`))
	if err != nil || !strings.Contains(tok.Doubt, "one normal form") {
		t.Errorf("two tokens with one normal form: %v, doubt %q", err, tok.Doubt)
	}
}
