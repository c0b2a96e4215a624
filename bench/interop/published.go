// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
)

// scene is a play with a name.
type scene struct {
	name string
	play play
}

// published plays with two engines' events from JetStream.
func published(ctx context.Context, e *env) (res result, err error) {
	f, err := e.fleet(ctx)
	if err != nil {
		return res, err
	}
	return e.publish(ctx, f, []scene{{"turns", turns}, {"shared", shared}, {"evict", evict}, {"adapters", adapters}, {"salts", salts}, {"reset", reset}})
}

// publish plays with events that `kvroute publish` beside each engine puts into JetStream:
// kvroute knows the workers from the registry. What it recorded meanwhile must be what the
// engines said.
func (e *env) publish(ctx context.Context, f *vllmFleet, scenes []scene) (res result, err error) {
	// A kvroute without workers has a NATS server for the others.
	bus, err := process.StartChild(ctx, e.dir, "bus", e.kvroute, "serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--drain-delay", "0")
	if err != nil {
		return res, err
	}
	defer bus.Stop()
	for _, v := range f.engines {
		p, err := process.StartChild(ctx, e.dir, "publish-"+v.name, e.kvroute, "publish", "--name", v.name, "--engine-address", v.address, "--nats-url", bus.At.NATS, "--model", modelName, "--lora", adapterName,
			"--record", e.recording(v))
		if err != nil {
			return res, err
		}
		defer p.Stop()
	}
	config := fmt.Sprintf("version: 1\nnats-url: %s\nmodels:\n- {name: %s, lora: [%s], tokenizer: %q}\n", bus.At.NATS, modelName, adapterName, f.model)
	for _, p := range scenes {
		// Each time kvroute is another one: it starts from the stream.
		one, err := e.playWith(ctx, "published", config, noGuesses, p.play)
		res.what = one.what
		res.cases, res.different = res.cases+one.cases, res.different+one.different
		for _, n := range one.notes {
			res.notes = append(res.notes, p.name+": "+n)
		}
		if err != nil {
			return res, fmt.Errorf("%s: %w", p.name, err)
		}
	}
	for _, v := range f.engines {
		for rank, l := range v.heard {
			said, err := l.heard()
			if err != nil {
				return res, err
			}
			played, err := playRecording(e.recording(v), rank)
			if err != nil {
				return res, fmt.Errorf("the recording of engine %s: %w", v.name, err)
			}
			if res.cases++; !reflect.DeepEqual(said, played) {
				res.differ("engine %s, rank %d: %d batches, %d blocks stored, %d removed, %d cached; in the recording %d, %d, %d, %d", v.name, rank,
					said.batches, said.stored, said.removed, len(said.hashes), played.batches, played.stored, played.removed, len(played.hashes))
			}
			res.notes = append(res.notes, fmt.Sprintf("engine %s, rank %d: a recording of %d batches", v.name, rank, played.batches))
		}
	}
	return res, nil
}

// recording is where `kvroute publish` writes down what an engine says.
func (e *env) recording(v *vllmEngine) string { return filepath.Join(e.dir, v.name+".recorded.jsonl") }

// playRecording returns what a rank said by a recording: its messages, live ones and those
// of answers, in the order of their numbers.
func playRecording(path string, rank int) (heard, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return heard{}, err
	}
	type message struct {
		Frames []string `json:"frames_hex"`
		Seq    int64    `json:"seq"`
	}
	all := make(map[int64][][]byte)
	for text := range bytes.Lines(data) {
		var line struct {
			Rank    int       `json:"rank"`
			Batches []message `json:"batches"`
			Replies []message `json:"replies"`
		}
		if err := json.Unmarshal(text, &line); err != nil {
			return heard{}, err
		}
		for _, m := range slices.Concat(line.Batches, line.Replies) {
			if line.Rank != rank || m.Seq < 0 {
				continue
			}
			frames := make([][]byte, len(m.Frames))
			for i, text := range m.Frames {
				if frames[i], err = hex.DecodeString(text); err != nil {
					return heard{}, err
				}
			}
			all[m.Seq] = frames
		}
	}
	l := listener{copies: make(map[uint64]int)}
	for _, seq := range slices.Sorted(maps.Keys(all)) {
		if err := l.take(all[seq]); err != nil {
			return heard{}, err
		}
	}
	return l.heard()
}

// atOnce asks from several clients at a time. What was foretold of a request may be
// other than what it finds, since others change the cache meanwhile; afterwards the
// index must be right, and so must be what is foretold then.
func atOnce(ctx context.Context, w *world, res *result) error {
	var during result
	var mu sync.Mutex // of what follows, and of the world
	var failed error
	var clients sync.WaitGroup
	r := rand.New(rand.NewPCG(13, 13))
	var texts []string
	for i := range 90 {
		texts = append(texts, body(map[string]any{
			"messages":   []any{message("system", words(uint64(13_000+r.IntN(6)), 100+20*r.IntN(3))), message("user", words(uint64(13_100+i/3), 20+r.IntN(200)))},
			"max_tokens": 1 + r.IntN(30),
		}, nil))
	}
	next := make(chan string)
	for range 6 {
		clients.Go(func() {
			for text := range next {
				one, err := ask(ctx, w.envoy.URL()+chatPath, text, map[string]string{"X-Request-Id": newRequestID()})
				mu.Lock()
				if err == nil {
					_, err = w.take(ctx, &during, "at once", &one)
				}
				if err != nil && failed == nil {
					failed = err
				}
				mu.Unlock()
			}
		})
	}
	for _, text := range texts {
		next <- text
	}
	close(next)
	clients.Wait()
	if failed != nil {
		return failed
	}
	res.notes = append(res.notes, fmt.Sprintf("while %d requests ran, six at a time, %d found another overlap than was foretold: others changed the cache meanwhile", during.cases, during.different))
	res.notes = append(res.notes, during.notes...)
	if err := w.settle(ctx); err != nil {
		return err
	}
	return w.askAll(ctx, res, "after that", texts[60:])
}

// ranks plays with one engine of two data-parallel ranks, each with a cache of its own.
func ranks(ctx context.Context, e *env) (res result, err error) {
	f, err := e.files()
	if err != nil {
		return res, err
	}
	e.end() // the memory is needed
	v, err := e.launch(f, "dp", 2)
	if err != nil {
		return res, err
	}
	defer v.stop()
	if err := v.ready(ctx); err != nil {
		return res, err
	}
	f.engines = []*vllmEngine{v}
	e.vllms = f
	defer func() { e.vllms = nil }()
	if res, err = e.playWith(ctx, "ranks", f.config(""), noGuesses, func(ctx context.Context, w *world, res *result) error {
		for _, p := range []play{turns, shared, evict, salts} {
			if err := p(ctx, w, res); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return res, err
	}
	bus, err := e.publish(ctx, f, []scene{{"turns over JetStream", turns}, {"evict over JetStream", evict}})
	bus.what, bus.cases, bus.different, bus.notes = res.what, res.cases+bus.cases, res.different+bus.different, append(res.notes, bus.notes...)
	return bus, err
}

// loaded is what came of a load.
type loaded struct {
	bench.Summary
	ttft float64 // mean, in seconds, as the engines say
}

// compareModes puts the same load on the engines round robin and by cache, in turn and
// with empty caches each time. The times, at the client and by the engines' own clocks, are
// no target: on a machine with other work one round says little.
func compareModes(ctx context.Context, e *env) (res result, err error) {
	res.what = "answered requests of a load, round robin and by cache in turn"
	f, err := e.fleet(ctx)
	if err != nil {
		return res, err
	}
	measures := []struct {
		what, unit string
		of         func(rr, kv *loaded) float64
	}{
		{"mean TTFT, round robin", "ms", func(rr, _ *loaded) float64 { return rr.TTFT.Mean * 1e3 }},
		{"mean TTFT, by cache", "ms", func(_, kv *loaded) float64 { return kv.TTFT.Mean * 1e3 }},
		{"mean TTFT, by cache ÷ round robin", "", func(rr, kv *loaded) float64 { return kv.TTFT.Mean / rr.TTFT.Mean }},
		{"median TTFT, by cache ÷ round robin", "", func(rr, kv *loaded) float64 { return kv.TTFT.P50 / rr.TTFT.P50 }},
		{"mean TTFT by the engines' own clocks, by cache ÷ round robin", "", func(rr, kv *loaded) float64 { return kv.ttft / rr.ttft }},
		{"cached share of prompts, round robin", "", func(rr, _ *loaded) float64 { return rr.CachedShare }},
		{"cached share of prompts, by cache", "", func(_, kv *loaded) float64 { return kv.CachedShare }},
	}
	values := make([][]float64, len(measures))
	for range 3 {
		var all [2]loaded
		for i, mode := range []string{"round-robin", "kv"} {
			if all[i], err = e.load(ctx, f, mode); err != nil {
				return res, err
			}
			res.cases += all[i].Requests
			if n := all[i].Failed(); n > 0 {
				res.differ("%s: %d failed: %v", mode, n, all[i].Errors)
			}
		}
		for i, m := range measures {
			values[i] = append(values[i], m.of(&all[0], &all[1]))
		}
	}
	for i, m := range measures {
		res.figures = append(res.figures, bench.NewFigure("vLLM, "+m.what, m.unit, bench.Target{}, values[i]...))
	}
	return res, nil
}

// load puts the load on empty engines.
func (e *env) load(ctx context.Context, f *vllmFleet, mode string) (l loaded, err error) {
	for _, v := range f.engines {
		if err := v.empty(ctx); err != nil {
			return l, err
		}
	}
	s, err := e.startStack(ctx, "mode-"+mode, f.config(""), f.addresses(), "--router-mode", mode)
	if err != nil {
		return l, err
	}
	defer s.stop()
	if err := s.waitWorkers(ctx, len(f.engines)); err != nil {
		return l, err
	}
	if err := s.waitRouted(ctx, chat("Hi", nil)); err != nil {
		return l, err
	}
	sum, count, err := f.firstTokens(ctx)
	if err != nil {
		return l, err
	}
	if l.Summary, err = bench.Load(ctx, bench.LoadConfig{
		URL: s.envoy.URL(), Model: modelName, Rate: 3, Conversations: 16, Turns: 3, TurnGap: 2 * time.Second,
		SystemPrompts: 8, SystemBytes: 5000, UserBytes: 200, ReplyBytes: 100, MaxTokens: 4, Seed: 1,
	}, nil, nil); err != nil {
		return l, err
	}
	sum2, count2, err := f.firstTokens(ctx)
	if err == nil && count2 == count {
		err = errors.New("the engines do not say when they gave first tokens")
	}
	l.ttft = (sum2 - sum) / (count2 - count)
	return l, err
}

// firstTokens returns the sum of the engines' times to first tokens, in seconds, and their
// number.
func (f *vllmFleet) firstTokens(ctx context.Context) (sum, count float64, err error) {
	for _, v := range f.engines {
		data, err := process.Get(ctx, "http://"+v.address+"/metrics")
		if err != nil {
			return 0, 0, err
		}
		for line := range strings.Lines(string(data)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
			var to *float64
			switch name, _, _ = strings.Cut(name, "{"); name {
			case "vllm:time_to_first_token_seconds_sum":
				to = &sum
			case "vllm:time_to_first_token_seconds_count":
				to = &count
			default:
				continue
			}
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, 0, fmt.Errorf("engine %s: %w in %q", v.name, err, line)
			}
			*to += n
		}
	}
	return sum, count, nil
}
