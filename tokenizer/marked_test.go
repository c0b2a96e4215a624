// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// markedText is a text with marks, and the same part by part.
type markedText struct {
	text  []byte
	parts []any // []byte or uint32
}

func randomMarked(r *rand.Rand, parts int) (m markedText) {
	for range parts {
		if r.IntN(3) > 0 {
			if text := randomText(r, r.IntN(30)); text != "" {
				if len(m.parts) > 0 {
					if _, ok := m.parts[len(m.parts)-1].([]byte); ok {
						m.text = chat.AppendMark(m.text, chat.NoID)
					}
				}
				m.text, m.parts = append(m.text, text...), append(m.parts, []byte(text))
			}
			continue
		}
		id := r.Uint32N(200)
		if r.IntN(5) == 0 {
			id = 0x01ffffff // bytes of an id may look like a mark
		}
		m.text, m.parts = chat.AppendMark(m.text, id), append(m.parts, id)
	}
	return m
}

// ids encodes the parts one by one.
func (m markedText) ids(t *testing.T, tok *tokenizer.Tokenizer) (ids []uint32) {
	t.Helper()
	for _, p := range m.parts {
		switch p := p.(type) {
		case uint32:
			ids = append(ids, p)
		case []byte:
			var err error
			if ids, err = tok.AppendMarked(context.Background(), ids, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	return ids
}

// Between two marks is a text of its own, with a cache of prefixes or without.
func TestMarkedTextIsItsParts(t *testing.T) {
	toks := goldens(t)
	for _, name := range []string{"gpt-oss", "tinyllama"} {
		if tok := reference(t, name); tok != nil {
			toks[name] = tok
		}
	}
	for name, tok := range toks {
		r := rand.New(rand.NewPCG(5, 6))
		c := tokenizer.NewCache(1 << 20)
		tokenizer.SetCacheStep(c, 64)
		reusedAll := 0
		before := randomMarked(r, 10)
		for range 40 {
			m := randomMarked(r, 10)
			// Each text goes on from the one before.
			m.text = slices.Concat(chat.AppendMark(slices.Clone(before.text), 3), m.text)
			m.parts = slices.Concat(before.parts, []any{uint32(3)}, m.parts)
			if len(m.text) > 20_000 {
				m = randomMarked(r, 10)
			}
			before = m
			want := m.ids(t, tok)
			got, err := tok.AppendMarked(context.Background(), nil, m.text)
			if err != nil || !slices.Equal(got, want) {
				t.Fatalf("%s: %q: %v, differs at %d", name, m.text, err, tokenizer.FirstDiff(got, want))
			}
			got, reused, err := c.AppendMarked(context.Background(), nil, tok, m.text)
			if err != nil || !slices.Equal(got, want) {
				t.Fatalf("%s: %q: %v, with %d bytes reused it differs at %d", name, m.text, err, reused, tokenizer.FirstDiff(got, want))
			}
			reusedAll += reused
		}
		if reusedAll == 0 {
			t.Errorf("%s: nothing was ever reused", name)
		}
	}
}

// The same bytes are other ids with marks than without: the cache keeps them apart.
func TestMarkedTextHasNoSpecialTokens(t *testing.T) {
	tok := golden(t, "added-flags")
	raw, _ := tok.ID("<|im_start|>")
	normed, ok := tok.ID("<m>")
	if !ok || raw == normed {
		t.Fatal("the tokenizer lacks tokens")
	}
	c := tokenizer.NewCache(1 << 20)
	tokenizer.SetCacheStep(c, 8)
	text := []byte("so <m> about <|im_start|> that <m> a while")
	found, _, err := c.Append(context.Background(), nil, tok, text, false)
	if err != nil || !slices.Contains(found, raw) || !slices.Contains(found, normed) {
		t.Errorf("%d, %v: want %d and %d in it", found, err, raw, normed)
	}
	ids, _, err := c.AppendMarked(context.Background(), nil, tok, text)
	if err != nil || slices.Contains(ids, raw) || slices.Contains(ids, normed) {
		t.Errorf("%d, %v: want neither %d nor %d in it", ids, err, raw, normed)
	}
	if back := string(tok.Decode(nil, ids)); back != string(text) {
		t.Errorf("%q becomes %q", text, back)
	}
}

// The ids of prompts for gpt-oss are those of the package that vLLM uses.
func TestHarmonyIDs(t *testing.T) {
	dir := fixtures.Path(t, "tokenizers", "gpt-oss")
	if dir == "" {
		return
	}
	m, err := tokenizer.LoadModel(os.DirFS(dir), tokenizer.ModelConfig{Cache: tokenizer.NewCache(1 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open("chat/testdata/harmony.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	equal := 0
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var c struct {
			Request json.RawMessage
			IDs     string
		}
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		if c.IDs == "" {
			continue
		}
		p, err := m.Encode(context.Background(), nil, requestOf(t, c.Request), time.Date(2026, 8, 22, 0, 0, 0, 0, time.UTC))
		if err != nil || p.Mode != tokenizer.Exact || sumOf(p.IDs) != c.IDs {
			t.Errorf("%s\nmode %s, sum %s, %v; want %s", c.Request, p.Mode, sumOf(p.IDs), err, c.IDs)
			continue
		}
		equal++
	}
	if equal != 26 {
		t.Errorf("%d prompts equal, want 26", equal)
	}
}

// sumOf is the sum over ids that golden files have.
func sumOf(ids []uint32) string {
	var b []byte
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// A worker's /tokenize says nothing of chats that it does not make with the template.
func TestAsksAlike(t *testing.T) {
	file, err := os.ReadFile("testdata/golden/bytelevel-o200k.json")
	if err != nil {
		t.Fatal(err)
	}
	var tokens strings.Builder
	tokens.WriteString(`"added_tokens":[`)
	for i, name := range []string{"start", "channel", "message", "end", "call", "return", "constrain"} {
		fmt.Fprintf(&tokens, `{"id":%d,"content":"<|%s|>","special":true},`, 5000+i, name)
	}
	file = bytes.Replace(file, []byte(`"added_tokens":[`), []byte(tokens.String()), 1)
	fsys := fstest.MapFS{"tokenizer.json": {Data: file}, "chat_template.jinja": {Data: []byte("x")}}
	for model, alike := range map[string]bool{"gpt_oss": false, "qwen3": true} {
		fsys["config.json"] = &fstest.MapFile{Data: []byte(`{"model_type":"` + model + `"}`)}
		m, err := tokenizer.LoadModel(fsys, tokenizer.ModelConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if m.AsksAlike(chat.Request{Messages: []byte("[]")}) != alike || !m.AsksAlike(chat.Request{Prompt: []byte(`"x"`)}) {
			t.Errorf("%s: chats alike %v, want %v", model, !alike, alike)
		}
		sgl, err := tokenizer.LoadModel(fsys, tokenizer.ModelConfig{Profile: chat.SGLang})
		if err != nil {
			t.Fatal(err)
		}
		tools := chat.Request{Messages: []byte("[]"), Tools: []byte(`[{"function":{"name":"f"}}]`)}
		deferred, prompted := tools, tools
		deferred.Tools = []byte(`[{"function":{"name":"f"},"defer_loading":true}]`)
		prompted.AddGenerationPrompt = []byte("false")
		if !sgl.AsksAlike(tools) || sgl.AsksAlike(deferred) || sgl.AsksAlike(prompted) {
			t.Errorf("%s: SGLang's /tokenize is compared for requests that it reads otherwise, or not for the others", model)
		}
		if alike {
			continue
		}
		// vLLM does not cut chats in this format.
		chatOf := chat.Request{Messages: []byte(`[{"role":"user","content":"Hello"}]`)}
		whole, err := m.Encode(t.Context(), nil, chatOf, time.Unix(0, 0))
		chatOf.TruncatePromptTokens = []byte("4")
		cut, errOfCut := m.Encode(t.Context(), nil, chatOf, time.Unix(0, 0))
		if err != nil || errOfCut != nil || whole.Mode != tokenizer.Exact || !slices.Equal(whole.IDs, cut.IDs) {
			t.Errorf("%d ids, with truncate_prompt_tokens %d; %v, %v", len(whole.IDs), len(cut.IDs), err, errOfCut)
		}
	}
}

// A model that asks for harmony and lacks its tokens is refused.
func TestHarmonyWithoutItsTokens(t *testing.T) {
	file, err := os.ReadFile("testdata/golden/bytelevel-o200k.json")
	if err != nil {
		t.Fatal(err)
	}
	fsys := fstest.MapFS{"tokenizer.json": {Data: file}, "config.json": {Data: []byte(`{"model_type":"gpt_oss"}`)}}
	if _, err := tokenizer.LoadModel(fsys, tokenizer.ModelConfig{}); err == nil {
		t.Error("loaded")
	}
	fsys["config.json"] = &fstest.MapFile{Data: []byte(`{"model_type":5}`)}
	if _, err := tokenizer.LoadModel(fsys, tokenizer.ModelConfig{}); err == nil {
		t.Error("loaded with a model_type that is no string")
	}
}
