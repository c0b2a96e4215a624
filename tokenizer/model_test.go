// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

func TestEncodeWithoutFiles(t *testing.T) {
	var none *tokenizer.Model
	for _, c := range []struct {
		name string
		in   chat.Request
		mode tokenizer.Mode
		want []uint32
	}{
		{"text is four bytes an id", chat.Request{Prompt: []byte(`"aé1"`)}, tokenizer.Bytes, []uint32{'a' | 0xc3<<8 | 0xa9<<16 | '1'<<24}},
		{"the last is filled up", chat.Request{Prompt: []byte(`"abcdef"`)}, tokenizer.Bytes, []uint32{'a' | 'b'<<8 | 'c'<<16 | 'd'<<24, 'e' | 'f'<<8}},
		{"ids are taken as they are", chat.Request{Prompt: []byte(`[5, 4294967295]`)}, tokenizer.Exact, []uint32{5, 4294967295}},
		{"of several lists the longest", chat.Request{Prompt: []byte(` [[1],[2,3],[4]]`)[1:]}, tokenizer.Exact, []uint32{2, 3}},
		{"of several texts the longest", chat.Request{Prompt: []byte(`["a","bc"]`)}, tokenizer.Bytes, []uint32{'b' | 'c'<<8}},
		{"no prompts", chat.Request{Prompt: []byte(`[]`)}, tokenizer.Bytes, nil},
		{"empty text", chat.Request{Prompt: []byte(`""`)}, tokenizer.Bytes, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := none.Encode(context.Background(), nil, c.in, time.Now())
			if err != nil || !slices.Equal(got.IDs, c.want) || got.Mode != c.mode {
				t.Errorf("Encode = %+v, %v; want %d in mode %s", got, err, c.want, c.mode)
			}
			if c.mode == tokenizer.Bytes && got.Reason != tokenizer.NoTokenizer {
				t.Errorf("reason %q", got.Reason)
			}
		})
	}
}

func TestEncodeNamesWhatItCannotRead(t *testing.T) {
	var none *tokenizer.Model
	for prompt, want := range map[string]string{
		`[1, -1]`:      "prompt as token ids",
		`[1, "a"]`:     "prompt as token ids",
		`[4294967296]`: "prompt as token ids",
		`["a", 1]`:     "prompt",
		`{}`:           "prompt",
		`true`:         "prompt",
	} {
		dst := []uint32{7}
		got, err := none.Encode(context.Background(), dst, chat.Request{Prompt: []byte(prompt)}, time.Now())
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one about %q", prompt, err, want)
		}
		if !slices.Equal(got.IDs, dst) {
			t.Errorf("%s: dst became %d, want it unchanged", prompt, got.IDs)
		}
	}
}

// modelOf returns a model with a small tokenizer and a template of our own.
func modelOf(t testing.TB, name, template string) *tokenizer.Model {
	t.Helper()
	file, err := os.ReadFile("testdata/golden/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	fsys := fstest.MapFS{"tokenizer.json": {Data: file}}
	if template != "" {
		fsys["chat_template.jinja"] = &fstest.MapFile{Data: []byte(template)}
	}
	m, err := tokenizer.LoadModel(fsys, tokenizer.ModelConfig{Cache: tokenizer.NewCache(1 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

const chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

func TestModes(t *testing.T) {
	m := modelOf(t, "bytelevel-qwen2-nfc", chatml)
	plain := modelOf(t, "metaspace-first", "")
	drifted := modelOf(t, "bytelevel-qwen2-nfc", chatml)
	drifted.SetConfirmed(chat.PlainChat, false)
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	long := []byte(`[{"role":"user","content":"` + strings.Repeat("some words ", 30_000) + `"}]`)
	for _, c := range []struct {
		name   string
		m      *tokenizer.Model
		over   bool // the time is up
		in     string
		mode   tokenizer.Mode
		reason string
	}{
		{"chat", m, false, `{"messages":[{"role":"user","content":"hi"}]}`, tokenizer.Exact, ""},
		{"completion", plain, false, `{"prompt":"hi"}`, tokenizer.Exact, ""},
		{"no template", plain, false, `{"messages":[{"role":"user","content":"hi"}]}`, tokenizer.Bytes, tokenizer.NoRenderer},
		{"refused", m, false, `{"messages":[{"role":"user","content":5}]}`, "", ""},
		{"no role", m, false, `{"messages":[{"content":"x"}]}`, tokenizer.Bytes, tokenizer.TemplateError},
		{"half a surrogate", m, false, `{"messages":[{"role":"user","content":"\ud800"}]}`, tokenizer.Bytes, tokenizer.BadText},
		{"half a surrogate in a completion", m, false, `{"prompt":"\ud800"}`, tokenizer.Bytes, tokenizer.BadText},
		{"bytes that are no text", m, false, "{\"prompt\":\"a\xff\"}", tokenizer.Bytes, tokenizer.BadText},
		{"bytes that are no text, behind the first", m, false, "{\"prompt\":[\"a\",\"\xff\"]}", tokenizer.Bytes, tokenizer.BadText},
		{"no character", m, false, `{"prompt":"a\u0000b"}`, tokenizer.Exact, ""},
		{"image", m, false, `{"messages":[{"role":"user","content":[{"type":"text","text":"see the router"},{"type":"image_url","image_url":{"url":"http://x/y.png"}}]}]}`, tokenizer.ExactPrefix, tokenizer.Items},
		{"drift", drifted, false, `{"messages":[{"role":"user","content":"hi"}]}`, tokenizer.Bytes, tokenizer.Drifted},
		{"budget", m, true, `{"messages":` + string(long) + `}`, tokenizer.ExactPrefix, tokenizer.Budget},
		{"too large", m, false, `{"prompt":"` + strings.Repeat("a", tokenizer.MaxPrompt+1) + `"}`, tokenizer.Bytes, tokenizer.TooLarge},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := context.Background()
			if c.over {
				ctx = cancelled
			}
			got, err := c.m.Encode(ctx, nil, requestOf(t, []byte(c.in)), time.Now())
			if c.mode == "" {
				if err == nil {
					t.Errorf("%+v, want an error", got)
				}
				return
			}
			if err != nil || got.Mode != c.mode || got.Reason != c.reason {
				t.Errorf("mode %q, reason %q, %v; want %q, %q", got.Mode, got.Reason, err, c.mode, c.reason)
			}
			if got.Exact > len(got.IDs) || got.Mode == tokenizer.Exact && got.Exact != len(got.IDs) || got.Mode == tokenizer.Bytes && got.Exact != 0 {
				t.Errorf("%d of %d ids are exact in mode %s", got.Exact, len(got.IDs), got.Mode)
			}
		})
	}
}

// Equal images make equal prompts, others do not, and what stands before them is
// as without them.
func TestItems(t *testing.T) {
	m := modelOf(t, "bytelevel-qwen2-nfc", chatml)
	encode := func(url string) tokenizer.Prompt {
		p, err := m.Encode(context.Background(), nil, requestOf(t, []byte(`{"messages":[{"role":"system","content":"The router reads the prompt."},{"role":"user","content":[{"type":"image_url","image_url":{"url":"`+url+`"}},{"type":"text","text":"What is it?"}]}]}`)), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	a, again, b := encode("http://x/1.png"), encode("http://x/1.png"), encode("http://x/2.png")
	if !slices.Equal(a.IDs, again.IDs) || slices.Equal(a.IDs, b.IDs) {
		t.Error("prompts with images do not meet by their images")
	}
	if a.Exact == 0 || !slices.Equal(a.IDs[:a.Exact], b.IDs[:b.Exact]) {
		t.Errorf("%d and %d exact ids before the image", a.Exact, b.Exact)
	}
}

// vLLM 0.33's renderer keeps these parts of prompts.
func TestTruncatedPrompt(t *testing.T) {
	m := modelOf(t, "metaspace-first", chatml) // it adds <s> before a text
	encode := func(body string) tokenizer.Prompt {
		p, err := m.Encode(context.Background(), []uint32{9}, requestOf(t, []byte(body)), time.Now())
		if err != nil || p.IDs[0] != 9 || p.Exact != len(p.IDs)-1 && p.Mode == tokenizer.Exact {
			t.Fatalf("%s: %+v, %v", body, p, err)
		}
		p.IDs = p.IDs[1:]
		return p
	}
	const text = `"The router reads the prompt, turns it into tokens"`
	all := encode(`{"prompt":` + text + `}`).IDs
	n := len(all)
	for _, c := range []struct {
		fields string
		want   []uint32
	}{
		{`"truncate_prompt_tokens":4`, append([]uint32{all[0]}, all[n-3:]...)},
		{`"truncate_prompt_tokens":4,"add_special_tokens":false`, all[n-4:]},
		{`"truncate_prompt_tokens":4,"truncation_side":"left"`, all[n-4:]},
		{`"truncate_prompt_tokens":4,"truncation_side":"right"`, all[:4]},
		{`"truncate_prompt_tokens":"4","truncation_side":null`, append([]uint32{all[0]}, all[n-3:]...)},
		{`"truncate_prompt_tokens":4.0,"truncation_side":"right"`, all[:4]},
		{`"truncate_prompt_tokens":true`, all[:1]},
		{`"truncate_prompt_tokens":1000`, all},
		{`"truncate_prompt_tokens":-1`, all},
		{`"truncation_side":"right"`, all},
		{`"truncate_prompt_tokens":99999999999999999999`, all},
		{`"truncate_prompt_tokens":0`, nil},
		{`"truncate_prompt_tokens":-2`, nil},
		{`"truncate_prompt_tokens":4.5`, nil},
		{`"truncate_prompt_tokens":"x"`, nil},
		{`"truncate_prompt_tokens":4,"truncation_side":"middle"`, nil},
	} {
		p := encode(`{"prompt":` + text + `,` + c.fields + `}`)
		switch {
		case c.want == nil && p.Reason != tokenizer.TemplateError:
			t.Errorf("%s: %s %s, want that the engine refuses it", c.fields, p.Mode, p.Reason)
		case c.want != nil && (p.Mode != tokenizer.Exact || !slices.Equal(p.IDs, c.want)):
			t.Errorf("%s: %s, %d of %d; want %d", c.fields, p.Mode, p.IDs, all, c.want)
		}
	}
	if ids := encode(`{"prompt":[1,2,3,4,5],"truncate_prompt_tokens":2,"truncation_side":"right"}`).IDs; !slices.Equal(ids, []uint32{1, 2}) {
		t.Errorf("ids from the client: %d, want the first two", ids)
	}
}

// SGLang has no such field. A prompt as long as the context of config.json is cut by vLLM at a length that is not
// known here.
func TestTruncationElsewhere(t *testing.T) {
	file, err := os.ReadFile("testdata/golden/bytelevel-qwen2-nfc.json")
	if err != nil {
		t.Fatal(err)
	}
	files := fstest.MapFS{"tokenizer.json": {Data: file}, "config.json": {Data: []byte(`{"max_position_embeddings":8}`)}}
	for _, c := range []struct {
		profile chat.Profile
		kept    string
		ids     int // 0: text-block mode
	}{{chat.SGLang, "4", 14}, {chat.VLLM, "4", 4}, {chat.VLLM, "-1", 0}} {
		m, err := tokenizer.LoadModel(files, tokenizer.ModelConfig{Profile: c.profile})
		if err != nil {
			t.Fatal(err)
		}
		p, err := m.Encode(context.Background(), nil, chat.Request{Prompt: []byte(`"~~~~~~~~~~~~~~"`), TruncatePromptTokens: []byte(c.kept)}, time.Now())
		if err != nil || c.ids > 0 && (p.Mode != tokenizer.Exact || len(p.IDs) != c.ids) || c.ids == 0 && p.Reason != tokenizer.TooLarge {
			t.Errorf("%s, %s: %s %s, %d ids, %v", c.profile, c.kept, p.Mode, p.Reason, len(p.IDs), err)
		}
	}
}
