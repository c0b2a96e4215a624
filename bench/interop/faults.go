// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvroute/kvroute/bench"
)

// prompts are texts of different lengths to fill caches with, and to probe them.
func prompts(seed uint64, n int) (all []string) {
	for i := range n {
		all = append(all, chat(words(seed+uint64(i), 60+45*(i%7)), nil))
	}
	return all
}

// cutStream cuts the event streams while the engines continue, and connects them again:
// kvroute must request the missing events.
func cutStream(ctx context.Context, e *env, res *result) {
	f := e.fleet(ctx)
	var valves []*valve
	for _, v := range f.engines {
		at := v.sources(ctx)[0]
		for kind, to := range map[string]string{"live": at.live.Path, "replay": at.replay.Path} {
			if to == "" {
				bench.NoError(fmt.Errorf("engine %s has no sockets that are files", v.name))
			}
			between := bench.Must(openValve("unix", filepath.Join(e.dir, v.name+".cut-"+kind), to))
			e.atEnd(between.stop)
			valves = append(valves, between)
		}
	}
	at := func(kind string) string { return "ipc://" + filepath.Join(e.dir, "NAME.cut-"+kind) }
	config := f.config(fmt.Sprintf("{transport: zmq, endpoint: %q, replay: %q}", at("live"), at("replay")))
	e.play(ctx, res, "cut", config, []string{noGuesses}, func(ctx context.Context, w *world, res *result) {
		known := prompts(10_000, 6)
		w.askAll(ctx, res, "before", known)
		for round := range 3 {
			for _, v := range valves {
				v.cut()
			}
			// More than the caches hold, so that what kvroute knew is evicted.
			missed := prompts(uint64(10_100+100*round), 30)
			for i, text := range missed {
				w.direct(ctx, f.engines[i%len(f.engines)], text)
			}
			for _, v := range valves {
				v.join()
			}
			w.settle(ctx)
			w.askAll(ctx, res, fmt.Sprintf("after cut %d", round), append(missed[20:], known...))
		}
	})
}

// reset empties the engines' caches over HTTP and compares before and after.
func reset(ctx context.Context, w *world, res *result) {
	known := prompts(11_000, 8)
	for round := range 2 {
		w.askAll(ctx, res, fmt.Sprintf("before reset %d", round), append(known, known[:4]...))
		for _, v := range w.engines {
			v.empty(ctx)
		}
		w.settle(ctx)
		w.askAll(ctx, res, fmt.Sprintf("after reset %d", round), known)
	}
}

// silentReset sends a request right after a reset, which vLLM announces with its next step
// only. That request finds fewer blocks than predicted, which is counted as explained; the
// next one must be right.
func silentReset(ctx context.Context, w *world, res *result) {
	text := chat(words(11_500, 200), nil)
	w.askAll(ctx, res, "before", []string{text, text})
	for _, v := range w.engines {
		v.reset(ctx)
	}
	var first result
	a := w.ask(ctx, &first, "the first one after a reset", chatPath, text)
	if res.cases++; a.Usage.Details.Cached != 0 {
		res.differ("%d tokens were cached after a reset", a.Usage.Details.Cached)
	}
	res.note("explained: vLLM announces a reset with its next step only")
	res.notes = append(res.notes, first.notes...)
	// The other engine may not have made a step yet.
	for _, v := range w.engines {
		w.direct(ctx, v, chat("Hi", nil))
	}
	w.settle(ctx)
	w.askAll(ctx, res, "after", []string{text, text})
}

// killed kills an engine, sends requests meanwhile, and starts the engine again: kvroute
// must forget its blocks, and none of the other engine.
func killed(ctx context.Context, e *env, res *result) {
	f := e.fleet(ctx)
	victim := f.engines[1]
	e.play(ctx, res, "killed", f.config("{transport: zmq}"), []string{noGuesses}, func(ctx context.Context, w *world, res *result) {
		known := prompts(12_000, 12)
		w.askAll(ctx, res, "before", known)
		for _, v := range f.engines { // each has some of them
			for _, text := range known[:4] {
				w.direct(ctx, v, text)
			}
		}
		w.settle(ctx)
		victim.stopListening()
		victim.process.Kill()
		for _, text := range known { // Envoy retries at the other one
			a := ask(ctx, w.envoy.URL()+chatPath, text, nil).read()
			res.cases++
			w.expect(f.engines[0].rank(0), a.Usage.stored(blockSize))
		}
		e.begin(victim)
		victim.ready(ctx)
		w.waitWorkers(ctx, len(f.engines))
		w.settle(ctx)
		for _, text := range known[6:] {
			w.direct(ctx, victim, text)
		}
		w.settle(ctx)
		w.askAll(ctx, res, "after", append(known, known...))
	})
}

// runExample runs the script of an example, which finds its program in a variable of the
// environment.
func (e *env) runExample(ctx context.Context, res *result, name, variable, program string, block int) {
	res.what = "the script's end, with an explained decision whose overlap the engine found"
	program = bench.Must(filepath.Abs(program))
	script := e.start("example-"+name, []string{"KVROUTE=" + e.kvroute, variable + "=" + program}, "nice", "-n", "15", filepath.Join("examples", name, "run.sh"))
	e.atEnd(script.Stop)
	select {
	case <-ctx.Done():
		bench.NoError(context.Cause(ctx))
	case <-script.Done:
	}
	bench.NoError(script.Err())
	text := bench.Must(os.ReadFile(script.Log))
	predicted, cached := lastNumber(text, "x-dynamo-overlap-blocks: "), lastNumber(text, `"cached_tokens":`)
	res.cases++
	if predicted == 0 || predicted*block != cached || !bytes.Contains(text, []byte("  chosen\n")) {
		res.differ("%d blocks were predicted, %d tokens cached:\n%s", predicted, cached, text)
	}
}

// lastNumber returns the number after the last occurrence of some words, 0 if there is none.
func lastNumber(text []byte, words string) (n int) {
	if at := bytes.LastIndex(text, []byte(words)); at >= 0 {
		_, _ = fmt.Sscan(string(text[at+len(words):]), &n)
	}
	return n
}
