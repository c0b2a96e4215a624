// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// longChat is a request of about messages messages with four tools, of which every
// tenth message is a result.
func longChat(t testing.TB, messages int) chat.Request {
	t.Helper()
	words := strings.Fields("the router reads a prompt and turns it into tokens of which the worker has cached blocks, isn't that quick?\n\n")
	text := func(bytes int) string {
		var b strings.Builder
		for i := 0; b.Len() < bytes; i++ {
			b.WriteString(words[i*7%len(words)])
			b.WriteString([]string{" ", " ", ", ", " ", ".\n\n"}[i*3%5])
		}
		return b.String()
	}
	list := []map[string]any{{"role": "system", "content": text(1000)}}
	for len(list) < messages {
		list = append(list, map[string]any{"role": "user", "content": text(200)})
		if len(list)%10 == 8 {
			call := map[string]any{"id": "call12345", "type": "function", "function": map[string]any{"name": "tool0", "arguments": `{"city": "Bern"}`}}
			list = append(list, map[string]any{"role": "assistant", "content": "", "tool_calls": []any{call}},
				map[string]any{"role": "tool", "tool_call_id": "call12345", "name": "tool0", "content": text(300)})
		}
		list = append(list, map[string]any{"role": "assistant", "content": text(400)})
	}
	var tools []any
	for k := range 4 {
		tools = append(tools, map[string]any{"type": "function", "function": map[string]any{
			"name": fmt.Sprintf("tool%d", k), "description": text(200), "parameters": map[string]any{
				"type": "object", "properties": map[string]any{"city": map[string]any{"type": "string", "description": "of where"}}, "required": []any{"city"},
			},
		}})
	}
	var q chat.Request
	for span, v := range map[*[]byte]any{&q.Messages: list, &q.Tools: tools} {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		*span = b
	}
	return q
}

// templates returns the templates of the reference data, by name.
func templates(t testing.TB) map[string]string {
	t.Helper()
	dir := fixtures.Path(t, "templates")
	if dir == "" {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(dir, "templates.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]string
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// BenchmarkTemplates renders a chat of 100 messages with tools through each
// template that takes it. The target is less than 1 ms.
func BenchmarkTemplates(b *testing.B) {
	q := longChat(b, 100)
	now := time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC)
	all := templates(b)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		r, err := chat.NewRenderer(chat.VLLM, &chat.Files{Templates: map[string]string{"default": all[name]}, Special: map[string]string{"bos_token": "<s>", "eos_token": "</s>"}}, chat.Flags{})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := r.Render(nil, q, now); err != nil {
			b.Logf("%s: %v", name, err)
			continue
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := r.Render(nil, q, now); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
