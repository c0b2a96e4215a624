// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
)

// Requests to engines' own endpoints are read as completions, or routed by their size if they
// contain more or other values. Only invalid JSON is refused.
func TestEnginesOwnEndpoints(t *testing.T) {
	for _, c := range []struct {
		name    string
		e       openai.Endpoint
		body    string
		prompt  string // "" for none: then the prompt has a size
		inexact string
		most    int
	}{
		{"text", openai.Generate, `{"text":"a","sampling_params":{"max_new_tokens":7}}`, `"a"`, "", 7},
		{"texts", openai.Generate, `{"text":["a","b"],"sampling_params":[{"max_new_tokens":7}]}`, `["a","b"]`, "", 0},
		{"ids", openai.Generate, `{"input_ids":[1,2]}`, `[1,2]`, "", 0},
		{"lists of ids", openai.Generate, `{"input_ids":[[1],[2]]}`, `[[1],[2]]`, "", 0},
		{"text before ids", openai.Generate, `{"input_ids":[1,2],"text":"a"}`, `"a"`, "", 0},
		{"null text", openai.Generate, `{"input_ids":[1,2],"text":null,"image_data":null,"video_data":[]}`, `[1,2]`, "", 0},
		{"a prompt", openai.Generate, `{"prompt":"a","max_tokens":9,"sampling_params":{"max_tokens":7}}`, `"a"`, "", 9},
		{"an image", openai.Generate, `{"text":"a","image_data":"x"}`, "", openai.NoRenderer, 0},
		{"images", openai.Generate, `{"input_ids":[1],"image_data":["x"]}`, "", openai.NoRenderer, 0},
		{"vectors", openai.Generate, `{"input_embeds":[[0.5]]}`, "", openai.Embeds, 0},
		{"nothing", openai.Generate, `{}`, "", openai.NoPrompt, 0},
		{"no text", openai.Generate, `{"text":""}`, `""`, "", 0},
		{"no texts", openai.Generate, `{"text":[]}`, "", openai.NoPrompt, 0},
		{"a number", openai.Generate, `{"text":5}`, "", openai.NoPrompt, 0},
		{"vLLM's ids", openai.Ids, `{"token_ids":[1,2],"model":"m","sampling_params":{"max_tokens":7},"stream":true}`, `[1,2]`, "", 7},
		{"vLLM's ids with images", openai.Ids, `{"token_ids":[1,2],"features":{"mm_hashes":{}}}`, "", openai.NoRenderer, 0},
		{"no ids", openai.Ids, `{"token_ids":[]}`, "", openai.NoPrompt, 0},
		{"text for ids", openai.Ids, `{"token_ids":"a","text":"b"}`, "", openai.NoPrompt, 0},
		{"text to tokenize", openai.Text, `{"prompt":"a"}`, "", openai.NoPrompt, 0},
		{"a chat to tokenize", openai.Text, `{"messages":5,"model":"m"}`, "", openai.NoPrompt, 0},
		{"far too many texts", openai.Generate, `{"text":["a"` + strings.Repeat(`,""`, 200_001) + `]}`, "", openai.TooLarge, 0},
	} {
		b, err := openai.Parse(c.e, []byte(c.body))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if string(b.Prompt) != c.prompt || b.Inexact != c.inexact || b.MaxTokens != c.most || b.Size > 0 != (c.prompt == "") || b.Messages != nil {
			t.Errorf("%s: prompt %.40s, inexact %q, size %d, at most %d", c.name, b.Prompt, b.Inexact, b.Size, b.MaxTokens)
		}
		if c.e == openai.Text && b.Size != 1 {
			t.Errorf("%s: size %d, want no load to speak of", c.name, b.Size)
		}
	}
	for _, e := range []openai.Endpoint{openai.Generate, openai.Ids, openai.Text} {
		if _, err := openai.Parse(e, []byte(`{"text":`)); err == nil || err.Status != 400 {
			t.Errorf("what is no JSON is taken: %v", err)
		}
	}
}

// SGLang separates blocks by adapter and extra keys, so their salts differ.
func TestSaltsOfGenerate(t *testing.T) {
	salts := map[string]string{}
	for _, more := range []string{``, `,"lora_path":"a"`, `,"lora_path":"b"`, `,"extra_key":"a"`, `,"extra_key":"a","lora_path":"a"`, `,"lora_path":["a",null]`, `,"cache_salt":"s"`, `,"cache_salt":"s","extra_key":"a"`} {
		b, err := openai.Parse(openai.Generate, []byte(`{"text":"a"`+more+`}`))
		if err != nil {
			t.Fatal(err)
		}
		if other, taken := salts[b.CacheSalt]; taken {
			t.Errorf("%q and %q have one salt", more, other)
		}
		salts[b.CacheSalt] = more
	}
	if _, ok := salts[""]; !ok {
		t.Error("a request with neither has a salt")
	}
}
