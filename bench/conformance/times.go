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

// milliseconds returns the CPU time of this process since an earlier CPU time.
func milliseconds(since time.Duration) float64 { return float64(bench.CPUTime()-since) / 1e6 }

// speeds measures both sides, and fastokens, on documents of 8 KB in turn. Each side first encodes
// half of the documents. The others are then cold the first time and warm the second time.
func speeds(ref *reference, tok *tokenizer.Tokenizer, c candidate, o options) (out []bench.Figure) {
	r := random(2)
	for _, kind := range []struct {
		name string
		cold float64 // target
	}{{"prose", 10}, {"Python", 10}, {"Go", 10}, {"Chinese words", 6}} {
		of := c.name + ", " + kind.name + ": "
		out = append(out, bench.Rounds(rounds, []bench.Row{
			bench.NewRow(of+"cold, times Hugging Face's speed", "×", bench.AtLeast(kind.cold)),
			bench.NewRow(of+"warm, times Hugging Face's speed", "×", bench.AtLeast(20)),
			bench.NewRow(of+"cold rate", "MB/s", bench.Target{}),
			bench.NewRow(of+"cold, times the speed of fastokens", "×", bench.Target{}),
			bench.NewRow(of+"warm, times the speed of fastokens", "×", bench.Target{}),
		}, func() []float64 {
			texts := slices.Clone(o.documents[kind.name])
			for kind.name == "Chinese words" && len(texts) < documents {
				texts = append(texts, chats.CJK.Document(r, documentBytes))
			}
			r.Shuffle(len(texts), func(i, j int) { texts[i], texts[j] = texts[j], texts[i] })
			half, size := len(texts)/2, 0
			for _, text := range texts[half:] {
				size += len(text)
			}
			var theirs struct{ Seconds, Fast, FastWarm float64 } // Fast is 0 if fastokens cannot read the file
			ref.ask(map[string]any{"op": "time", "others": texts[:half], "texts": texts[half:]}, &theirs)
			forget(tok)
			timeAll(tok, texts[:half])
			cold, warm := timeAll(tok, texts[half:]), timeAll(tok, texts[half:])
			values := []float64{theirs.Seconds / cold, theirs.Seconds / warm, float64(size) / 1e6 / cold}
			if theirs.Fast > 0 {
				values = append(values, theirs.Fast/cold, theirs.FastWarm/warm)
			}
			return values
		})...)
	}
	return out
}

// timeAll returns the seconds that the texts take.
func timeAll(tok *tokenizer.Tokenizer, texts []string) float64 {
	dst := make([]uint32, 0, 16<<10)
	var took time.Duration
	for _, text := range texts {
		data := []byte(text)
		start := bench.CPUTime()
		dst = bench.Must(tok.Append(context.Background(), dst[:0], data, false))
		took += bench.CPUTime() - start
	}
	return took.Seconds()
}

// forget empties a tokenizer's word cache, and allocates the memory of the next one.
func forget(tok *tokenizer.Tokenizer) {
	tok.Forget()
	bench.Must(tok.Append(context.Background(), nil, nil, false))
}

// turnFigures measures a conversation of 100,000 tokens: first all of it with empty caches,
// then each next turn with the cache of the turns before.
func turnFigures(tok *tokenizer.Tokenizer, c candidate, o options) []bench.Figure {
	r := random(5)
	prose := func() string { return o.documents["prose"][r.IntN(len(o.documents["prose"]))] }
	dst := make([]uint32, 0, 2*conversationTokens)
	of := c.name + ", conversation of 100k tokens: "
	return bench.Rounds(rounds, []bench.Row{
		bench.NewRow(of+"from scratch", "ms", bench.AtMost(25)),
		bench.NewRow(of+"next turn, mean of 20", "ms", bench.AtMost(1.5)),
	}, func() []float64 {
		var text []byte
		for ids := 0; ids < conversationTokens; {
			part := prose()
			ids += len(bench.Must(tok.Append(context.Background(), nil, []byte(part), false)))
			text = append(text, part...)
		}
		cache := tokenizer.NewCache(64 << 20)
		timed := func() float64 {
			start := bench.CPUTime()
			_, _, err := cache.Append(context.Background(), dst, tok, text, false)
			bench.NoError(err)
			return milliseconds(start)
		}
		forget(tok)
		values := []float64{timed(), 0}
		for range turns {
			text = append(text, prose()[:turnBytes]...)
			values[1] += timed() / turns
		}
		return values
	})
}

// loadFigures measures the time to load a file and the memory of the loaded tokenizer, scaled
// to a file of 8 MB. Files below half of that are mostly tables of constant size, so they
// have no figures.
func loadFigures(c candidate, path string) []bench.Figure {
	b := bench.Must(os.ReadFile(path))
	if len(b) < fileBytes/2 {
		return nil
	}
	fsys := fstest.MapFS{filepath.Base(path): {Data: b}}
	of := fmt.Sprintf("%s, of %.1f MB: ", c.name, float64(len(b))/(1<<20))
	return bench.Rounds(rounds, []bench.Row{
		bench.NewRow(of+"load, as of 8 MB", "ms", bench.AtMost(400)),
		bench.NewRow(of+"kept, as of 8 MB", "MB", bench.AtMost(40)),
	}, func() []float64 {
		before, start := bench.Heap(), bench.CPUTime()
		tok := bench.Must(tokenizer.Load(fsys, tokenizer.Config{}))
		took, scale := milliseconds(start), fileBytes/float64(len(b))
		defer runtime.KeepAlive(tok)
		return []float64{took * scale, (bench.Heap() - before) / (1 << 20) * scale}
	})
}

// renderFigures measures rendering of a chat of 100 messages with tools, with the templates of
// three models with tools.
func renderFigures(o options) (out []bench.Figure) {
	all := templateTexts(o)
	q := longChat(random(6))
	for _, name := range []string{"real/qwen3", "vllm_ex/tool_chat_template_hermes", "vllm_ex/tool_chat_template_llama3.2_json"} {
		if all[name] == "" || !strings.Contains(name, o.only) {
			continue
		}
		r := bench.Must(chat.NewRenderer(chat.VLLM, &chat.Files{Templates: map[string]string{"default": all[name]}}, chat.Flags{}))
		row := bench.NewRow(name+": rendering 100 messages with tools", "ms", bench.AtMost(1))
		out = append(out, bench.Rounds(20*rounds, []bench.Row{row}, func() []float64 {
			start := bench.CPUTime()
			bench.Must(r.Render(nil, q, today()))
			return []float64{milliseconds(start)}
		})...)
	}
	return out
}

// longChat is a request of 100 messages and four tools. It has a call and its result in every ten
// messages.
func longChat(r *rand.Rand) chat.Request {
	text := func(size int) string { return chats.English.Document(r, size) }
	messages := []any{chats.Message("system", text(1000))}
	for len(messages) < 100 {
		messages = append(messages, chats.Message("user", text(200)))
		if len(messages)%10 == 8 {
			call := chats.Message("assistant", "")
			call["tool_calls"] = []any{chats.Call("call12345", "tool0", `{"city": "Bern"}`)}
			messages = append(messages, call, map[string]any{"role": "tool", "tool_call_id": "call12345", "name": "tool0", "content": chats.Code.Document(r, 300)})
		}
		messages = append(messages, chats.Message("assistant", text(400)))
	}
	var tools []any
	for k := range 4 {
		parameters := json.RawMessage(`{"type": "object", "properties": {"city": {"type": "string", "description": "of where"}}, "required": ["city"]}`)
		tools = append(tools, map[string]any{"type": "function", "function": map[string]any{"name": fmt.Sprint("tool", k), "description": text(200), "parameters": parameters}})
	}
	return chat.Request{Messages: bench.Must(json.Marshal(messages[:100])), Tools: bench.Must(json.Marshal(tools)), AddGenerationPrompt: []byte("true")}
}
