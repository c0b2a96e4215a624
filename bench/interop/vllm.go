// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// vllmChecks compare with real vLLM engines. The first one starts two, which the others
// use; the ranks' engine comes last, when these have ended.
func vllmChecks() []check {
	const start = engineStart + time.Minute
	return slices.Concat([]check{
		{"turns of conversations, events over ZeroMQ", start, direct(turns, noGuesses)},
		{"shared system prompts, events over ZeroMQ", start, direct(shared, noGuesses)},
		{"forced eviction, events over ZeroMQ", start, direct(evict, noGuesses)},
		{"adapters, events over ZeroMQ", start, direct(adapters, noGuesses)},
		{"cache salts, events over ZeroMQ", start, direct(salts, noGuesses)},
		{"streams and completions, events over ZeroMQ", start, direct(forms, noGuesses)},
		{"ids of the chat shapes of the reference data", start, shapes},
		{"ids of tools and Unicode", start, random},
		{"several requests at a time", start, direct(atOnce, noGuesses)},
		// With kvroute's default: it guesses until the events arrive. Then no guess may be left
		// in the index.
		{"guesses, as by default", start, direct(inTurn(turns, shared, evict, adapters))},
		{"a reset of the cache", start, direct(reset, noGuesses)},
		{"a reset that nobody was told of yet", start, direct(silentReset, noGuesses)},
		{"a cut event stream", start, cutStream},
		{"events through kvroute publish and JetStream", 2 * start, published},
		{"round robin and by cache", start, compareModes},
	}, realClients(), []check{
		{"an engine killed and started again", 2 * start, killed},
		{"data-parallel ranks", 2 * start, ranks},
		{"the example for readers", start, func(ctx context.Context, e *env, res *result) {
			e.endGroup() // the memory is needed
			e.runExample(ctx, res, "vllm", "VLLM", filepath.Join(e.vllm, "bin/vllm"), blockSize)
		}},
	})
}

// turns are conversations whose turns alternate; replies are the engines' own.
func turns(ctx context.Context, w *world, res *result) {
	histories := make([][]any, 5)
	for turn := range 4 {
		for i := range histories {
			histories[i] = append(histories[i], message("user", words(uint64(1000+100*i+turn), 50+30*i)))
			a := w.ask(ctx, res, fmt.Sprintf("conversation %d, turn %d", i, turn), chatPath,
				body(map[string]any{"messages": histories[i], "max_tokens": 8 + 20*(i%3)}, nil))
			histories[i] = append(histories[i], message("assistant", a.text()))
		}
	}
}

// shared are questions after one of few system prompts.
func shared(ctx context.Context, w *world, res *result) {
	for i := range 24 {
		system := words(uint64(2000+i%3), 150+40*(i%3))
		w.ask(ctx, res, fmt.Sprintf("question %d", i), chatPath,
			body(map[string]any{"messages": []any{message("system", system), message("user", words(uint64(2100+i), 10+7*i))}}, nil))
	}
}

// evict sends more prompts than the caches hold, and earlier ones again. Some consist of
// whole blocks, which vLLM stores again each time.
func evict(ctx context.Context, w *world, res *result) {
	_, before := w.totals()
	r := rand.New(rand.NewPCG(3, 3))
	var seen []string
	for i := range 60 {
		var text string
		switch {
		case i > 4 && r.IntN(3) == 0:
			text = seen[r.IntN(len(seen))]
		case r.IntN(3) == 0:
			ids := make([]int, blockSize*(1+r.IntN(20))) // whole blocks
			for k := range ids {
				ids[k] = 100 + r.IntN(400) // the smallest vocabulary has 512
			}
			text = body(map[string]any{"prompt": ids}, nil)
		default:
			text = body(map[string]any{"prompt": words(uint64(3000+i), 200+r.IntN(700)), "max_tokens": 1 + r.IntN(40)}, nil)
		}
		seen = append(seen, text)
		w.ask(ctx, res, fmt.Sprintf("prompt %d", i), completionPath, text)
	}
	if _, after := w.totals(); after == before {
		res.differ("nothing was evicted")
	}
}

// adapters are the same prompts for the model and for its adapter, some with a salt.
func adapters(ctx context.Context, w *world, res *result) {
	for i := range 24 {
		more := map[string]any{"model": []string{modelName, adapterName}[i%2]}
		if i%6 > 3 {
			more["cache_salt"] = "tenant"
		}
		w.ask(ctx, res, fmt.Sprintf("prompt %d of %v", i, more), chatPath, chat(words(uint64(4000+i/8), 120+i), more))
	}
}

// salts are the same prompts of several tenants.
func salts(ctx context.Context, w *world, res *result) {
	for i := range 24 {
		more := map[string]any{}
		if i%3 > 0 {
			more["cache_salt"] = []string{"", "tenant-1", "tenant-2"}[i%3]
		}
		w.ask(ctx, res, fmt.Sprintf("prompt %d with %v", i, more), chatPath, chat(words(uint64(5000+i/12), 150+5*i), more))
	}
}

// forms are requests of all kinds: streams, texts, ids.
func forms(ctx context.Context, w *world, res *result) {
	stream := map[string]any{"stream": true, "stream_options": map[string]any{"include_usage": true}, "max_tokens": 40}
	for i := range 6 {
		text := words(uint64(6000+i/2), 130)
		ids := append(slices.Repeat([]int{97, 11, 187, 0}, 8), 97, 11, 187, i)
		for _, one := range []struct{ what, path, body string }{
			{"a streamed chat", chatPath, chat(text, stream)},
			{"a chat with a limit of its new name", chatPath, chat(text, map[string]any{"max_completion_tokens": 3})},
			{"a text", completionPath, body(map[string]any{"prompt": text}, nil)},
			{"a streamed text", completionPath, body(map[string]any{"prompt": text}, stream)},
			{"ids", completionPath, body(map[string]any{"prompt": ids}, nil)},
			{"a prefix to go on with", chatPath, body(map[string]any{
				"messages": []any{message("user", text), message("assistant", "It is")}, "continue_final_message": true, "add_generation_prompt": false,
			}, nil)},
		} {
			w.ask(ctx, res, fmt.Sprintf("%s %d", one.what, i), one.path, one.body)
		}
	}
}

// atOnce sends requests from several clients at a time. Requests change the caches for each other, so
// a prediction may then be wrong; afterwards the index and the predictions must be right.
func atOnce(ctx context.Context, w *world, res *result) {
	r := rand.New(rand.NewPCG(13, 13))
	var texts []string
	for i := range 90 {
		texts = append(texts, body(map[string]any{
			"messages":   []any{message("system", words(uint64(13_000+r.IntN(6)), 100+20*r.IntN(3))), message("user", words(uint64(13_100+i/3), 20+r.IntN(200)))},
			"max_tokens": 1 + r.IntN(30),
		}, nil))
	}
	var during result
	var mu sync.Mutex // of the world, and of the two below
	var failed error
	var clients sync.WaitGroup
	next := make(chan string)
	for range 6 {
		clients.Go(func() {
			for text := range next {
				err := bench.Try(func() {
					one := ask(ctx, w.envoy.URL()+chatPath, text, named())
					mu.Lock()
					defer mu.Unlock()
					w.compareAnswer(ctx, &during, "at once", one)
				})
				mu.Lock()
				failed = errors.Join(failed, err)
				mu.Unlock()
			}
		})
	}
	for _, text := range texts {
		next <- text
	}
	close(next)
	clients.Wait()
	bench.NoError(failed)
	res.note("while %d requests ran, six at a time, %d found another overlap than was predicted: others changed the cache meanwhile", during.cases, during.different)
	res.notes = append(res.notes, during.notes...)
	w.settle(ctx)
	w.askAll(ctx, res, "after that", texts[60:])
}

// ranks plays with one engine of two data-parallel ranks, each with a cache of its own.
func ranks(ctx context.Context, e *env, res *result) {
	f := e.files()
	e.endGroup() // the memory is needed
	v := e.launch(f, "dp", 2, "")
	e.atEnd(v.stop)
	v.ready(ctx)
	e.vllms = f
	e.atEnd(func() { e.vllms = nil })
	e.play(ctx, res, "ranks", f.config("{transport: zmq}"), []string{noGuesses}, inTurn(turns, shared, evict, salts))
	e.publish(ctx, res, []scene{{"turns over JetStream", turns}, {"evict over JetStream", evict}})
}
