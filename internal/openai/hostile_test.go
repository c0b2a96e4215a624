// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
)

// A body of many small values must not cost a multiple of its size: a prompt that has an
// impossible shape is not read. The cost is measured from the body's bytes to the ids of its
// prompt.
func TestHostileBodiesAreBounded(t *testing.T) {
	const size = 4 << 20
	m, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{Cache: tokenizer.NewCache(1 << 20)})
	if err != nil {
		t.Fatal(err)
	}
	many := func(s string, most int) string {
		return strings.TrimSuffix(strings.Repeat(s, min(most, size/len(s))), ",")
	}
	const all = 1 << 30
	for _, c := range []struct {
		name     string
		endpoint openai.Endpoint
		body     string
		mode     tokenizer.Mode
		reason   string
		bytes    int // limit of the allocated bytes
	}{
		{"items of numbers", openai.Responses, `"input":[` + many("0,", all) + `]`, tokenizer.None, "too_large", 2 * size},
		{"empty items", openai.Responses, `"input":[` + many("{},", all) + `]`, tokenizer.None, "too_large", 2 * size},
		{"empty tools", openai.ChatCompletions, `"messages":[{"role":"user","content":"a"}],"tools":[` + many("{},", all) + `]`, tokenizer.None, "too_large", 2 * size},
		{"messages of numbers", openai.ChatCompletions, `"messages":[` + many("0,", all) + `]`, tokenizer.None, "too_large", 2 * size},
		{"empty parts", openai.ChatCompletions, `"messages":[{"role":"user","content":[` + many("[],", all) + `]}]`, tokenizer.None, "too_large", 2 * size},
		{"the same field again and again", openai.ChatCompletions, many(`"messages":[0,0,0,0],`, all), tokenizer.None, "too_large", 2 * size},
		{"empty prompts", openai.Completions, `"prompt":[` + many(`"",`, all) + `]`, tokenizer.None, "too_large", 2 * size},
		{"empty prompts of ids", openai.Completions, `"prompt":[` + many(`[],`, all) + `]`, tokenizer.None, "too_large", 2 * size},

		{"as many messages as are read", openai.ChatCompletions, `"messages":[` + many(`{"role":"user","content":""},`, 60_000) + `]`, tokenizer.Exact, "", 256 << 20},
		{"as many items as are read", openai.Responses, `"input":[` + many(`{"role":"user","content":""},`, 60_000) + `]`, tokenizer.Exact, "", 256 << 20},
		{"ids are cheap", openai.Completions, `"prompt":[` + many(`1,`, all) + `]`, tokenizer.Exact, "", 24 * size},
		{"so is an image", openai.ChatCompletions, `"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"` + many("A", all) + `"}}]}]`, tokenizer.ExactPrefix, tokenizer.Items, 24 * size},
		{"values that make no prompt", openai.Completions, `"prompt":"a","x":[` + many("{},", all) + `]`, tokenizer.Exact, "", 2 * size},
	} {
		body := []byte(`{"model":"m",` + c.body + `}`)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		b, bad := openai.Parse(c.endpoint, body)
		if bad != nil {
			t.Errorf("%s: %v", c.name, bad)
			continue
		}
		p, err := m.Encode(t.Context(), nil, b.Request, time.Now())
		runtime.ReadMemStats(&after)
		if err != nil || p.Mode != c.mode || p.Reason != c.reason {
			t.Errorf("%s: mode %s, reason %q, %v; want %s, %q", c.name, p.Mode, p.Reason, err, c.mode, c.reason)
		}
		if took := int(after.TotalAlloc - before.TotalAlloc); took > c.bytes {
			t.Errorf("%s: %d MB allocated for %d MB, want at most %d", c.name, took>>20, len(body)>>20, c.bytes>>20)
		}
	}
}
