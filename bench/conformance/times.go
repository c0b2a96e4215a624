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
	fileBytes          = 8 << 20 // size of the file in the targets of loading
)

// speeds measures both sides, and fastokens, on documents of 8 KB in turn.
func speeds(ref *reference, tok *tokenizer.Tokenizer, c candidate, o options) (out []bench.Figure) {
	r := random(2)
	for _, kind := range []struct {
		name   string
		target float64
	}{{"prose", 10}, {"Python", 10}, {"Go", 10}, {"Chinese words", 6}} {
		parts := o.documents[kind.name]
		var cold, warm, rate, fastCold, fastWarm []float64
		for range rounds {
			texts := make([]string, 48)
			size := 0
			for i := range texts {
				if texts[i] = chats.Document(r, chats.CJKWords, "", documentBytes); len(parts) > 0 {
					texts[i] = parts[r.IntN(len(parts))]
				}
				size += len(texts[i])
			}
			var theirs struct {
				Seconds float64
				Fast    *float64
			}
			ref.ask(map[string]any{"op": "time", "texts": texts}, &theirs)
			first := timeAll(tok, texts, true)
			again := timeAll(tok, texts, false)
			cold = append(cold, theirs.Seconds/first)
			warm = append(warm, theirs.Seconds/again)
			rate = append(rate, float64(size)/1e6/first)
			if theirs.Fast != nil {
				fastCold = append(fastCold, *theirs.Fast/first)
				fastWarm = append(fastWarm, *theirs.Fast/again)
			}
		}
		of := c.name + ", " + kind.name + ": "
		out = append(out,
			bench.NewFigure(of+"cold, times Hugging Face's speed", "×", bench.AtLeast(kind.target), cold...),
			bench.NewFigure(of+"warm, times Hugging Face's speed", "×", bench.AtLeast(20), warm...),
			bench.NewFigure(of+"cold rate", "MB/s", bench.Target{}, rate...),
		)
		if fastCold != nil {
			out = append(out, bench.NewFigure(of+"cold, times the speed of fastokens", "×", bench.Target{}, fastCold...),
				bench.NewFigure(of+"warm, times the speed of fastokens", "×", bench.Target{}, fastWarm...))
		}
	}
	return out
}

// timeAll returns the seconds that the texts take. If cold is set, the word cache is emptied
// before each text, which is not timed.
func timeAll(tok *tokenizer.Tokenizer, texts []string, cold bool) float64 {
	all := make([][]byte, len(texts))
	for i, t := range texts {
		all[i] = []byte(t)
	}
	dst := make([]uint32, 0, 16<<10)
	var took time.Duration
	for _, t := range all {
		if cold {
			forget(tok)
		}
		start := bench.CPUTime()
		dst = bench.Must(tok.Append(context.Background(), dst[:0], t, false))
		took += bench.CPUTime() - start
	}
	return took.Seconds()
}

// milliseconds returns the CPU time of this process since an earlier CPU time.
func milliseconds(since time.Duration) float64 { return float64(bench.CPUTime()-since) / 1e6 }

// turnFigures measures a conversation of 100,000 tokens: first all of it with empty caches,
// then each next turn with the cache of the turns before.
func turnFigures(tok *tokenizer.Tokenizer, c candidate, o options) []bench.Figure {
	r := random(5)
	ctx := context.Background()
	var scratch, next []float64
	for range rounds {
		var text []byte
		ids := 0
		for ids < conversationTokens {
			part := []byte(o.documents["prose"][r.IntN(len(o.documents["prose"]))])
			all := bench.Must(tok.Append(ctx, nil, part, false))
			ids += len(all)
			text = append(text, part...)
		}
		dst := make([]uint32, 0, 2*conversationTokens)
		cache := tokenizer.NewCache(64 << 20)
		appendAll := func(text []byte) {
			_, _, err := cache.Append(ctx, dst, tok, text, false)
			bench.NoError(err)
		}
		forget(tok)
		start := bench.CPUTime()
		appendAll(text)
		scratch = append(scratch, milliseconds(start))
		for range turns {
			text = append(text, o.documents["prose"][r.IntN(len(o.documents["prose"]))][:turnBytes]...)
			start := bench.CPUTime()
			appendAll(text)
			next = append(next, milliseconds(start))
		}
	}
	return []bench.Figure{
		bench.NewFigure(c.name+", conversation of 100k tokens: from scratch", "ms", bench.AtMost(25), scratch...),
		bench.NewFigure(c.name+", conversation of 100k tokens: next turn", "ms", bench.AtMost(1.5), next...),
	}
}

// forget empties a tokenizer's word cache, and allocates the memory of the next one.
func forget(tok *tokenizer.Tokenizer) {
	tok.Forget()
	bench.Must(tok.Append(context.Background(), nil, nil, false))
}

// loadFigures measures the time to load a file and the memory of the loaded tokenizer, scaled
// to a file of 8 MB. Files below half of that are mostly tables of constant size, so they
// give no figures.
func loadFigures(c candidate, path string) []bench.Figure {
	b := bench.Must(os.ReadFile(path))
	if len(b) < fileBytes/2 {
		return nil
	}
	fsys := fstest.MapFS{filepath.Base(path): {Data: b}}
	scale := fileBytes / float64(len(b))
	var took, kept []float64
	for range rounds {
		before := bench.Heap()
		start := bench.CPUTime()
		tok := bench.Must(tokenizer.Load(fsys, tokenizer.Config{}))
		took = append(took, milliseconds(start)*scale)
		kept = append(kept, (bench.Heap()-before)/(1<<20)*scale)
		runtime.KeepAlive(tok)
	}
	of := fmt.Sprintf("%s, of %.1f MB: ", c.name, float64(len(b))/(1<<20))
	return []bench.Figure{
		bench.NewFigure(of+"load, as of 8 MB", "ms", bench.AtMost(400), took...),
		bench.NewFigure(of+"kept, as of 8 MB", "MB", bench.AtMost(40), kept...),
	}
}

// timedTemplates are those of models with tools on which rendering is timed.
//
//nolint:gochecknoglobals // a table
var timedTemplates = []string{"real/qwen3", "vllm_ex/tool_chat_template_hermes", "vllm_ex/tool_chat_template_llama3.2_json"}

// renderFigures measures rendering of a chat of 100 messages with tools.
func renderFigures(o options) (out []bench.Figure) {
	all := templateTexts(o)
	body := bench.Must(json.Marshal(longChat(random(6))))
	q := bench.Must(requestOf(body))
	for _, name := range timedTemplates {
		if all[name] == "" || !strings.Contains(name, o.only) {
			continue
		}
		r := bench.Must(chat.NewRenderer(chat.VLLM, &chat.Files{Templates: map[string]string{"default": all[name]}}))
		var took []float64
		for range 20 * rounds {
			start := bench.CPUTime()
			bench.Must(r.Render(q, today()))
			took = append(took, milliseconds(start))
		}
		out = append(out, bench.NewFigure(name+": rendering 100 messages with tools", "ms", bench.AtMost(1), took...))
	}
	return out
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
