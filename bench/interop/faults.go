// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
)

// direct sends a request to an engine without kvroute, which learns of it from events only.
func (w *world) direct(ctx context.Context, v *vllmEngine, text string) error {
	r, err := ask(ctx, "http://"+v.address+chatPath, text, nil)
	if err == nil && r.status != http.StatusOK {
		err = fmt.Errorf("status %d: %.300s", r.status, r.body)
	}
	if err != nil {
		return fmt.Errorf("engine %s: %w", v.name, err)
	}
	a, err := r.read()
	if err != nil {
		return err
	}
	v.expected[0] += a.Usage.stored(blockSize)
	return nil
}

// prompts are texts of different lengths to fill caches with, and to probe them.
func prompts(seed uint64, n int) (all []string) {
	for i := range n {
		all = append(all, chat(words(seed+uint64(i), 60+45*(i%7)), nil))
	}
	return all
}

// askAll asks for each of the prompts through Envoy.
func (w *world) askAll(ctx context.Context, res *result, what string, all []string) error {
	for i, text := range all {
		if _, err := w.ask(ctx, res, fmt.Sprintf("%s, prompt %d", what, i), chatPath, text); err != nil {
			return err
		}
	}
	return nil
}

// cutStream cuts the event streams while the engines work on, and lets them pass again:
// kvroute must request the missing events.
func cutStream(ctx context.Context, e *env) (res result, err error) {
	f, err := e.fleet(ctx)
	if err != nil {
		return res, err
	}
	var valves []*valve
	for _, v := range f.engines {
		live, replay, err := v.sockets(ctx)
		if err != nil {
			return res, err
		}
		for kind, to := range map[string]string{"live": live, "replay": replay} {
			between, err := openValve("unix", filepath.Join(e.dir, v.name+".cut-"+kind), to)
			if err != nil {
				return res, err
			}
			defer between.stop()
			valves = append(valves, between)
		}
	}
	at := func(kind string) string { return "ipc://" + filepath.Join(e.dir, "NAME.cut-"+kind) }
	config := f.config(fmt.Sprintf("{transport: zmq, endpoint: %q, replay: %q}", at("live"), at("replay")))
	return e.playWith(ctx, "cut", config, noGuesses, func(ctx context.Context, w *world, res *result) error {
		known := prompts(10_000, 6)
		if err := w.askAll(ctx, res, "before", known); err != nil {
			return err
		}
		for round := range 3 {
			for _, v := range valves {
				v.cut()
			}
			// More than the caches hold, so that what kvroute knew is evicted.
			missed := prompts(uint64(10_100+100*round), 30)
			for i, text := range missed {
				if err := w.direct(ctx, f.engines[i%len(f.engines)], text); err != nil {
					return err
				}
			}
			for _, v := range valves {
				v.join()
			}
			if err := w.settle(ctx); err != nil {
				return err
			}
			if err := w.askAll(ctx, res, fmt.Sprintf("after cut %d", round), append(missed[20:], known...)); err != nil {
				return err
			}
		}
		return nil
	})
}

// sockets are the files of the engine's sockets.
func (v *vllmEngine) sockets(ctx context.Context) (live, replay string, err error) {
	all, err := v.sources(ctx)
	if err != nil {
		return "", "", err
	}
	if all[0].live.Path == "" || all[0].replay.Path == "" {
		return "", "", fmt.Errorf("engine %s has no sockets that are files", v.name)
	}
	return all[0].live.Path, all[0].replay.Path, nil
}

// reset empties the engines' caches over HTTP and compares before and after.
func reset(ctx context.Context, w *world, res *result) error {
	known := prompts(11_000, 8)
	for round := range 2 {
		if err := w.askAll(ctx, res, fmt.Sprintf("before reset %d", round), append(known, known[:4]...)); err != nil {
			return err
		}
		for _, v := range w.engines {
			if err := v.empty(ctx); err != nil {
				return err
			}
		}
		if err := w.settle(ctx); err != nil {
			return err
		}
		if err := w.askAll(ctx, res, fmt.Sprintf("after reset %d", round), known); err != nil {
			return err
		}
	}
	return nil
}

// silentReset sends a request right after a reset, which vLLM announces with its next step
// only. That request finds fewer blocks than predicted, which is counted as explained; the
// next one must be right.
func silentReset(ctx context.Context, w *world, res *result) error {
	text := chat(words(11_500, 200), nil)
	if err := w.askAll(ctx, res, "before", []string{text, text}); err != nil {
		return err
	}
	for _, v := range w.engines {
		if err := v.post(ctx, "/reset_prefix_cache"); err != nil {
			return err
		}
	}
	var first result
	a, err := w.ask(ctx, &first, "the first one after a reset", chatPath, text)
	if err != nil {
		return err
	}
	if res.cases++; a.Usage.Details.Cached != 0 {
		res.differ("%d tokens were cached after a reset", a.Usage.Details.Cached)
	}
	res.notes = append(res.notes, "explained: vLLM tells of a reset with its next step only")
	res.notes = append(res.notes, first.notes...)
	// The other engine may not have made a step yet.
	for _, v := range w.engines {
		if err := w.direct(ctx, v, chat("Hi", nil)); err != nil {
			return err
		}
	}
	if err := w.settle(ctx); err != nil {
		return err
	}
	return w.askAll(ctx, res, "after", []string{text, text})
}

// killed kills an engine, sends requests meanwhile, and starts the engine again: kvroute
// must forget its blocks, and none of the other engine.
func killed(ctx context.Context, e *env) (res result, err error) {
	f, err := e.fleet(ctx)
	if err != nil {
		return res, err
	}
	victim := f.engines[1]
	return e.playWith(ctx, "killed", f.config(""), noGuesses, func(ctx context.Context, w *world, res *result) error {
		known := prompts(12_000, 12)
		if err := w.askAll(ctx, res, "before", known); err != nil {
			return err
		}
		for _, v := range f.engines { // each has some of them
			for _, text := range known[:4] {
				if err := w.direct(ctx, v, text); err != nil {
					return err
				}
			}
		}
		if err := w.settle(ctx); err != nil {
			return err
		}
		victim.deaf()
		victim.process.Kill()
		for i, text := range known { // Envoy turns to the other one
			r, err := ask(ctx, w.envoy.URL()+chatPath, text, nil)
			if err != nil {
				return err
			}
			a, err := r.read()
			if err != nil {
				return fmt.Errorf("prompt %d while an engine is dead: %w", i, err)
			}
			res.cases++
			f.engines[0].expected[0] += a.Usage.stored(blockSize)
		}
		if err := e.begin(victim); err != nil {
			return err
		}
		if err := victim.ready(ctx); err != nil {
			return err
		}
		if err := w.waitWorkers(ctx, len(f.engines)); err != nil {
			return err
		}
		if err := w.settle(ctx); err != nil {
			return err
		}
		for _, text := range known[6:] {
			if err := w.direct(ctx, victim, text); err != nil {
				return err
			}
		}
		if err := w.settle(ctx); err != nil {
			return err
		}
		return w.askAll(ctx, res, "after", append(known, known...))
	})
}

// example runs the example for readers, with the real vLLM.
func example(ctx context.Context, e *env) (result, error) {
	e.end() // the memory is needed
	return runExample(ctx, e, "vllm", "VLLM", filepath.Join(e.vllm, "bin/vllm"), blockSize)
}

// runExample runs the script of an example, which finds its program in a variable of the
// environment.
func runExample(ctx context.Context, e *env, name, variable, program string, block int) (res result, err error) {
	res.what = "the script's end, with an explained decision whose overlap the engine found"
	if program, err = filepath.Abs(program); err != nil {
		return res, err
	}
	script, err := e.start("example-"+name, []string{"KVROUTE=" + e.kvroute, variable + "=" + program}, "nice", "-n", "15", filepath.Join("examples", name, "run.sh"))
	if err != nil {
		return res, err
	}
	defer script.Stop()
	select {
	case <-ctx.Done():
		return res, context.Cause(ctx)
	case <-script.Done:
	}
	if err := script.Err(); err != nil {
		return res, err
	}
	text, err := os.ReadFile(script.Log)
	if err != nil {
		return res, err
	}
	foretold := lastNumber(text, "x-dynamo-overlap-blocks: ")
	cached := lastNumber(text, `"cached_tokens":`)
	res.cases++
	if foretold == 0 || foretold*block != cached || !bytes.Contains(text, []byte("<- chosen")) {
		res.differ("%d blocks were foretold, %d tokens cached:\n%s", foretold, cached, text)
	}
	return res, nil
}

// lastNumber returns the number behind the last one of some words, 0 if there is none.
func lastNumber(text []byte, words string) (n int) {
	at := bytes.LastIndex(text, []byte(words))
	if at < 0 {
		return 0
	}
	_, _ = fmt.Sscan(string(text[at+len(words):]), &n) // 0 if it is none
	return n
}
