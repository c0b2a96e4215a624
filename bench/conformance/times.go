// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

const (
	conversationTokens = 100_000
	turnBytes          = 2000
	turns              = 20
	fileBytes          = 8 << 20 // what the targets of loading are for
)

// atMost is a figure whose target is a highest median.
func atMost(what, unit string, most float64, values []float64) bench.Figure {
	f := figure(what, unit, 0, values)
	f.Target, f.Met = fmt.Sprintf("≤ %g %s", most, unit), f.Median <= most
	return f
}

// milliseconds returns how much the cores have worked since they had for so long.
func milliseconds(since time.Duration) float64 { return float64(bench.CPUTime()-since) / 1e6 }

// turnFigures measures a conversation of 100,000 tokens: all of it with nothing
// known, neither words nor beginnings, and each next turn with its cache.
func turnFigures(tok *tokenizer.Tokenizer, c candidate, o options) ([]bench.Figure, error) {
	r := rand.New(rand.NewPCG(o.seed, 5))
	ctx := context.Background()
	var scratch, next []float64
	for range o.rounds {
		var text []byte
		ids := 0
		for ids < conversationTokens {
			part := []byte(o.documents["prose"][r.IntN(len(o.documents["prose"]))])
			all, err := tok.Append(ctx, nil, part, false)
			if err != nil {
				return nil, err
			}
			ids += len(all)
			text = append(text, part...)
		}
		dst := make([]uint32, 0, 2*conversationTokens)
		cache := tokenizer.NewCache(64 << 20)
		if err := forget(tok); err != nil {
			return nil, err
		}
		start := bench.CPUTime()
		if _, _, err := cache.Append(ctx, dst, tok, text, false); err != nil {
			return nil, err
		}
		scratch = append(scratch, milliseconds(start))
		for range turns {
			text = append(text, o.documents["prose"][r.IntN(len(o.documents["prose"]))][:turnBytes]...)
			start := bench.CPUTime()
			if _, _, err := cache.Append(ctx, dst, tok, text, false); err != nil {
				return nil, err
			}
			next = append(next, milliseconds(start))
		}
	}
	return []bench.Figure{
		atMost(c.name+", conversation of 100k tokens: from scratch", "ms", 25, scratch),
		atMost(c.name+", conversation of 100k tokens: next turn", "ms", 1.5, next),
	}, nil
}

// forget lets a tokenizer know no word; the memory for those to come is there.
func forget(tok *tokenizer.Tokenizer) error {
	tok.Forget()
	_, err := tok.Append(context.Background(), nil, nil, false)
	return err
}

// loadFigures measures loading a file, and what it keeps, in proportion to a file
// of 8 MB. Smaller files than half of that are mostly tables of constant size, and
// give nothing.
func loadFigures(c candidate, path string, o options) ([]bench.Figure, error) {
	b, err := os.ReadFile(path)
	if err != nil || len(b) < fileBytes/2 {
		return nil, err
	}
	fsys := fstest.MapFS{filepath.Base(path): {Data: b}}
	scale := fileBytes / float64(len(b))
	var took, kept []float64
	for range o.rounds {
		before := heap()
		start := bench.CPUTime()
		tok, err := tokenizer.Load(fsys, tokenizer.Config{})
		if err != nil {
			return nil, err
		}
		took = append(took, milliseconds(start)*scale)
		kept = append(kept, (float64(heap())-float64(before))/(1<<20)*scale)
		runtime.KeepAlive(tok)
	}
	of := fmt.Sprintf("%s, of %.1f MB: ", c.name, float64(len(b))/(1<<20))
	return []bench.Figure{
		atMost(of+"load, as of 8 MB", "ms", 400, took),
		atMost(of+"kept, as of 8 MB", "MB", 40, kept),
	}, nil
}

func heap() uint64 {
	runtime.GC()
	runtime.GC() // the first one may leave what has a finalizer
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// timedTemplates are those of models with tools on which rendering is timed.
//
//nolint:gochecknoglobals // a table
var timedTemplates = []string{"real/qwen3", "vllm_ex/tool_chat_template_hermes", "vllm_ex/tool_chat_template_llama3.2_json"}

// renderFigures measures rendering of a chat of 100 messages with tools.
func renderFigures(o options) ([]bench.Figure, error) {
	all, err := templateTexts(o)
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(longChat(rand.New(rand.NewPCG(o.seed, 6))))
	if err != nil {
		return nil, err
	}
	q, err := requestOf(body)
	if err != nil {
		return nil, err
	}
	var out []bench.Figure
	for _, name := range timedTemplates {
		if all[name] == "" || !strings.Contains(name, o.only) {
			continue
		}
		r, err := chat.NewRenderer(chat.VLLM, &chat.Files{Templates: map[string]string{"default": all[name]}})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		var took []float64
		for range 20 * o.rounds {
			start := bench.CPUTime()
			if _, err := r.Render(q, today()); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			took = append(took, milliseconds(start))
		}
		out = append(out, atMost(name+": rendering 100 messages with tools", "ms", 1, took))
	}
	return out, nil
}

// longChat is a request of 100 messages and four tools, of which every tenth
// message is a result.
func longChat(r *rand.Rand) map[string]any {
	messages := []any{map[string]any{"role": "system", "content": chats.Document(r, chats.ChatWords, " ", 1000)}}
	for len(messages) < 100 {
		messages = append(messages, map[string]any{"role": "user", "content": chats.Document(r, chats.ChatWords, " ", 200)})
		if len(messages)%10 == 8 {
			call := map[string]any{"id": "call12345", "type": "function", "function": map[string]any{"name": "tool0", "arguments": `{"city": "Bern"}`}}
			messages = append(messages, map[string]any{"role": "assistant", "content": "", "tool_calls": []any{call}},
				map[string]any{"role": "tool", "tool_call_id": "call12345", "name": "tool0", "content": chats.Document(r, chats.CodeWords, " ", 300)})
		}
		messages = append(messages, map[string]any{"role": "assistant", "content": chats.Document(r, chats.ChatWords, " ", 400)})
	}
	var tools []any
	for k := range 4 {
		tools = append(tools, map[string]any{"type": "function", "function": map[string]any{
			"name": fmt.Sprintf("tool%d", k), "description": chats.Document(r, chats.ChatWords, " ", 200), "parameters": map[string]any{
				"type": "object", "properties": map[string]any{"city": map[string]any{"type": "string", "description": "of where"}}, "required": []any{"city"},
			},
		}})
	}
	return map[string]any{"messages": slices.Clip(messages[:100]), "tools": tools, "add_generation_prompt": true}
}
