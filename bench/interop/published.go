// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
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
func published(ctx context.Context, e *env, res *result) {
	e.fleet(ctx)
	e.publish(ctx, res, []scene{{"turns", turns}, {"shared", shared}, {"evict", evict}, {"adapters", adapters}, {"salts", salts}, {"reset", reset}})
}

// publish plays with events that `kvroute publish` beside each engine puts into JetStream:
// kvroute knows the workers from the registry.
func (e *env) publish(ctx context.Context, res *result, scenes []scene) {
	// A kvroute without workers has a NATS server for the others.
	bus := e.startKvroute(ctx, "bus", "serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--drain-delay", "0")
	e.atEnd(bus.Stop)
	f := e.vllms
	for _, v := range f.engines {
		e.atEnd(e.startKvroute(ctx, "publish-"+v.name, "publish", "--name", v.name, "--worker-id", fmt.Sprint(v.id), "--engine-address", v.address, "--nats-url", bus.At.NATS, "--model", modelName,
			"--lora", adapterName).Stop)
	}
	config := fmt.Sprintf("version: 1\nnats-url: %s\nmodels:\n- {name: %s, lora: [%s], tokenizer: %q}\n", bus.At.NATS, modelName, adapterName, f.model)
	for _, s := range scenes {
		// Each time another kvroute starts from the stream.
		notes := len(res.notes)
		e.play(ctx, res, "published", config, []string{noGuesses}, s.play)
		for i := range res.notes[notes:] {
			res.notes[notes+i] = s.name + ": " + res.notes[notes+i]
		}
	}
}

// loaded is the outcome of a load.
type loaded struct {
	bench.Summary
	ttft float64 // mean, in seconds, as the engines say
}

// compareModes puts the same load on the engines round robin and by cache, in turn and
// with empty caches each time. The times, at the client and by the engines' own clocks, are
// no target: on a machine with other work one round says little.
func compareModes(ctx context.Context, e *env, res *result) {
	res.what = "answered requests of a load, round robin and by cache in turn"
	f := e.fleet(ctx)
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
			all[i] = e.load(ctx, f, mode)
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
}

// load puts the load on empty engines.
func (e *env) load(ctx context.Context, f *vllmFleet, mode string) (l loaded) {
	for _, v := range f.engines {
		v.empty(ctx)
	}
	s := e.startStack(ctx, "mode-"+mode, f.config("{transport: zmq}"), f.addresses(), "--router-mode", mode)
	defer s.stop()
	s.waitWorkers(ctx, len(f.engines))
	s.waitRouted(ctx)
	sum, count := f.firstTokens(ctx)
	l.Summary = bench.Must(bench.Load(ctx, bench.LoadConfig{
		URL: s.envoy.URL(), Model: modelName, Rate: 3, Conversations: 16, Turns: 3, TurnGap: 2 * time.Second,
		SystemPrompts: 8, SystemBytes: 5000, UserBytes: 200, ReplyBytes: 100, MaxTokens: 4, Seed: 1,
	}, nil, nil))
	sum2, count2 := f.firstTokens(ctx)
	if count2 == count {
		bench.NoError(errors.New("the engines do not say when they gave first tokens"))
	}
	l.ttft = (sum2 - sum) / (count2 - count)
	return l
}

// firstTokens returns the sum of the engines' times to first tokens, in seconds, and their
// number.
func (f *vllmFleet) firstTokens(ctx context.Context) (sum, count float64) {
	for _, v := range f.engines {
		for line := range strings.Lines(string(bench.Must(process.Get(ctx, "http://"+v.address+"/metrics")))) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
			switch name, _, _ = strings.Cut(name, "{"); name {
			case "vllm:time_to_first_token_seconds_sum":
				sum += bench.Must(strconv.ParseFloat(value, 64))
			case "vllm:time_to_first_token_seconds_count":
				count += bench.Must(strconv.ParseFloat(value, 64))
			}
		}
	}
	return sum, count
}
