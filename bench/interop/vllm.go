// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// vllmChecks compare with real vLLM engines. The first one starts two, which the others
// use; the ranks' engine comes last, when these are gone.
func vllmChecks() []check {
	const start = engineStart + time.Minute
	return slices.Concat([]check{
		{"turns of conversations, events over ZeroMQ", start, direct(turns)},
		{"shared system prompts, events over ZeroMQ", start, direct(shared)},
		{"forced eviction, events over ZeroMQ", start, direct(evict)},
		{"adapters, events over ZeroMQ", start, direct(adapters)},
		{"cache salts, events over ZeroMQ", start, direct(salts)},
		{"streams and completions, events over ZeroMQ", start, direct(forms)},
		{"ids of the chat shapes of the reference data", start, with((*env).shapes)},
		{"ids of tools and Unicode", start, with((*env).random)},
		{"several requests at a time", start, direct(atOnce)},
		{"guesses, as by default", start, guessed},
		{"a reset of the cache", start, direct(reset)},
		{"a reset that nobody was told of yet", start, direct(silentReset)},
		{"a cut event stream", start, cutStream},
		{"events through kvroute publish and JetStream", 2 * start, published},
		{"round robin and by cache", start, compareModes},
	}, realClients(), []check{
		{"an engine killed and started again", 2 * start, killed},
		{"data-parallel ranks", 2 * start, ranks},
		{"the example for readers", start, example},
	})
}

// play sends requests to a world.
type play func(context.Context, *world, *result) error

// direct plays with events straight from the engines, whose sockets kvroute learns
// from them.
func direct(p play) func(context.Context, *env) (result, error) {
	return func(ctx context.Context, e *env) (result, error) {
		return e.play(ctx, "direct", p)
	}
}

// with is direct for a play that needs the model's files.
func with(p func(*env, context.Context, *world, *result) error) func(context.Context, *env) (result, error) {
	return func(ctx context.Context, e *env) (result, error) {
		return e.play(ctx, "direct", func(ctx context.Context, w *world, res *result) error { return p(e, ctx, w, res) })
	}
}

// play plays in a world of its own, with the engines that all share.
func (e *env) play(ctx context.Context, name string, p play) (res result, err error) {
	f, err := e.fleet(ctx)
	if err != nil {
		return res, err
	}
	return e.playWith(ctx, name, f.config(""), noGuesses, p)
}

// guessed runs some of the plays with kvroute's default: it guesses until the events
// arrive. After that no guess may be left in the index.
func guessed(ctx context.Context, e *env) (result, error) {
	f, err := e.fleet(ctx)
	if err != nil {
		return result{}, err
	}
	return e.playWith(ctx, "guessed", f.config(""), nil, func(ctx context.Context, w *world, res *result) error {
		for _, p := range []play{turns, shared, evict, adapters} {
			if err := p(ctx, w, res); err != nil {
				return err
			}
		}
		return nil
	})
}

// playWith is play with a configuration and flags of kvroute's.
func (e *env) playWith(ctx context.Context, name, config string, flags []string, p play) (res result, err error) {
	res.what = "foretold overlap with cached_tokens, index with events"
	f := e.vllms
	s, err := e.startStack(ctx, name, config, f.addresses(), flags...)
	if err != nil {
		return res, err
	}
	defer s.stop()
	w, err := newWorld(ctx, s, f.engines)
	if err == nil {
		err = p(ctx, w, &res)
	}
	if err != nil {
		return res, fmt.Errorf("%w\n%s", err, s.router.LastLines())
	}
	res.notes = append(res.notes, w.summary()+"; "+f.tokenizer)
	return res, nil
}

// noGuesses makes kvroute predict from events alone.
//
//nolint:gochecknoglobals // a constant list
var noGuesses = []string{"--router-predicted-ttl-secs", "0"}

func (f *vllmFleet) addresses() (all []string) {
	for _, v := range f.engines {
		all = append(all, v.address)
	}
	return all
}

// config is kvroute's configuration. events is what stands after the engine's name,
// empty for what makes kvroute ask the engine.
func (f *vllmFleet) config(events string) string {
	if events == "" {
		events = "{transport: zmq}"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "version: 1\nmodels:\n- {name: %s, lora: [%s], tokenizer: %q}\nworkers:\n", modelName, adapterName, f.model)
	for _, v := range f.engines {
		fmt.Fprintf(&b, "- {name: %s, address: %q, models: [%s], lora: [%s], events: %s}\n",
			v.name, v.address, modelName, adapterName, strings.ReplaceAll(events, "NAME", v.name))
	}
	return b.String()
}

// words are a text of about n tokens; the same seed begins the same text.
func words(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 7))
	list := strings.Fields("the cache of an engine holds blocks and each block is named by what stands before it so that two prompts share their beginning until they part")
	var b strings.Builder
	fmt.Fprintf(&b, "%d:", seed)
	for range n {
		b.WriteByte(' ')
		b.WriteString(list[r.IntN(len(list))])
	}
	return b.String()
}

// turns are conversations whose turns alternate; replies are the engines' own.
func turns(ctx context.Context, w *world, res *result) error {
	histories := make([][]any, 5)
	for turn := range 4 {
		for i := range histories {
			histories[i] = append(histories[i], message("user", words(uint64(1000+100*i+turn), 50+30*i)))
			a, err := w.ask(ctx, res, fmt.Sprintf("conversation %d, turn %d", i, turn), chatPath,
				body(map[string]any{"messages": histories[i], "max_tokens": 8 + 20*(i%3)}, nil))
			if err != nil {
				return err
			}
			histories[i] = append(histories[i], message("assistant", a.text()))
		}
	}
	return nil
}

// shared are questions after one of few system prompts.
func shared(ctx context.Context, w *world, res *result) error {
	for i := range 24 {
		system := words(uint64(2000+i%3), 150+40*(i%3))
		if _, err := w.ask(ctx, res, fmt.Sprintf("question %d", i), chatPath,
			body(map[string]any{"messages": []any{message("system", system), message("user", words(uint64(2100+i), 10+7*i))}}, nil)); err != nil {
			return err
		}
	}
	return nil
}

// evict asks for more prompts than the caches hold, and for earlier ones again; some of
// them of whole blocks, which are stored again each time.
func evict(ctx context.Context, w *world, res *result) error {
	before := w.evicted()
	r := rand.New(rand.NewPCG(3, 3))
	var seen []string
	for i := range 60 {
		var text string
		path := completionPath
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
		if _, err := w.ask(ctx, res, fmt.Sprintf("prompt %d", i), path, text); err != nil {
			return err
		}
	}
	if w.evicted() == before {
		res.differ("nothing was evicted")
	}
	return nil
}

func (w *world) evicted() (n int) {
	for _, v := range w.engines {
		for _, l := range v.heard {
			if h, err := l.heard(); err == nil {
				n += h.removed
			}
		}
	}
	return n
}

// adapters are the same prompts for the model and for its adapter, some with a salt.
func adapters(ctx context.Context, w *world, res *result) error {
	for i := range 24 {
		more := map[string]any{"model": []string{modelName, adapterName}[i%2]}
		if i%6 > 3 {
			more["cache_salt"] = "tenant"
		}
		if _, err := w.ask(ctx, res, fmt.Sprintf("prompt %d of %v", i, more), chatPath, chat(words(uint64(4000+i/8), 120+i), more)); err != nil {
			return err
		}
	}
	return nil
}

// salts are the same prompts of several tenants.
func salts(ctx context.Context, w *world, res *result) error {
	for i := range 24 {
		more := map[string]any{}
		if i%3 > 0 {
			more["cache_salt"] = []string{"", "tenant-1", "tenant-2"}[i%3]
		}
		if _, err := w.ask(ctx, res, fmt.Sprintf("prompt %d with %v", i, more), chatPath, chat(words(uint64(5000+i/12), 150+5*i), more)); err != nil {
			return err
		}
	}
	return nil
}

// forms are requests of all kinds: streams, texts, ids.
func forms(ctx context.Context, w *world, res *result) error {
	stream := map[string]any{"stream": true, "stream_options": map[string]any{"include_usage": true}, "max_tokens": 40}
	for i := range 6 {
		text := words(uint64(6000+i/2), 130)
		for _, one := range []struct{ what, path, body string }{
			{"a streamed chat", chatPath, chat(text, stream)},
			{"a chat with a limit of its new name", chatPath, chat(text, map[string]any{"max_completion_tokens": 3})},
			{"a text", completionPath, body(map[string]any{"prompt": text}, nil)},
			{"a streamed text", completionPath, body(map[string]any{"prompt": text}, stream)},
			{"ids", completionPath, body(map[string]any{"prompt": []int{97, 11, 187, 0, 97, 11, 187, 0, 97, 11, 187, 0, 97, 11, 187, 0, 97, 11, 187, 0, 97, 11, 187, 0, 97, 11, 187, 0, 97, 11, 187, 0, 97, 11, 187, i}}, nil)},
			{"a prefix to go on with", chatPath, body(map[string]any{
				"messages": []any{message("user", text), message("assistant", "It is")}, "continue_final_message": true, "add_generation_prompt": false,
			}, nil)},
		} {
			if _, err := w.ask(ctx, res, fmt.Sprintf("%s %d", one.what, i), one.path, one.body); err != nil {
				return err
			}
		}
	}
	return nil
}
