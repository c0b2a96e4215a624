// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
)

// runSee is `make bench-see`: what it costs to make kvroute visible.
func runSee(ctx context.Context, o options) (met bool) {
	dir := bench.Must(os.MkdirTemp("", "bench-see"))
	defer func() { _ = os.RemoveAll(dir) }()
	figures := slices.Concat(visible(ctx, o, dir), confirmed(ctx, o, dir), watched(ctx, o, dir))
	return bench.Must(bench.Report(os.Stdout, o.out, bench.NewRun("bench-see", o.commit, "make bench-see", figures)))
}

// visible compares the CPU time of requests of 10 KB in a kvroute with everything on (the default
// audit, metrics of workers that are scraped each second, an open dashboard, spans of a tenth of the
// requests) with one where everything is off: o.base, an earlier kvroute, or the same one with flags.
func visible(ctx context.Context, o options, dir string) []bench.Figure {
	worker := httptest.NewServer(http.HandlerFunc(answer))
	defer worker.Close()
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }))
	defer collector.Close()
	at := []string{worker.Listener.Addr().String()}
	base := o
	flags := []string{"--audit-share", "0", "--worker-metrics", "0"}
	if o.base != "" {
		base.binary, flags = o.base, nil
	}
	traced := map[string]string{
		"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.URL + "/v1/traces", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
		"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1",
	}
	fleets := []*variant{{name: "off"}, {name: "on"}}
	fleets[0].server = startRouter(ctx, base, dir, "off", at, []string{""}, flags...)
	for name, value := range traced {
		bench.NoError(os.Setenv(name, value))
	}
	fleets[1].server = startRouter(ctx, o, dir, "on", at, []string{""})
	for name := range traced {
		bench.NoError(os.Unsetenv(name))
	}
	for _, v := range fleets {
		defer v.server.Stop()
		v.envoy = startEnvoy(ctx, at[0], v.server)
		defer func() { _ = v.envoy.Stop() }() // it ends with this process in any case
	}
	on := "http://" + fleets[1].server.At.HTTP
	defer watch(ctx, on)()
	scraping, stop := context.WithCancel(ctx)
	defer stop()
	go func() { // ends with stop
		for scraping.Err() == nil {
			_, _ = process.Get(scraping, on+"/metrics") // an error shows in the figures
			<-time.After(time.Second)
		}
	}()
	rng := rand.New(rand.NewPCG(1, 1))
	texts := newTexts(rng)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}
	s := shape{name: "10 KB", size: 10 << 10, rate: 150, tokens: 5}
	return inTurn(o, rng, "10 KB: server's CPU a request, ", fleets, 1.05, func(v *variant) float64 {
		return one(ctx, client, texts, s, v).server
	})
}

// inTurn measures two variants in turn, each twice a round in an order that changes, and compares the second with the
// first one. measure returns milliseconds of CPU time.
func inTurn(o options, rng *rand.Rand, what string, two []*variant, most float64, measure func(v *variant) float64) []bench.Figure {
	return bench.Rounds(o.rounds, []bench.Row{
		bench.NewRow(what+two[0].name, "ms", bench.Target{}),
		bench.NewRow(what+two[1].name, "ms", bench.Target{}),
		bench.NewRow(what+two[1].name+" ÷ "+two[0].name, "×", bench.AtMost(most)),
	}, func() []float64 {
		var cpu [2]float64
		for _, v := range append(rng.Perm(2), rng.Perm(2)...) {
			bench.Within(two[v].name, func() { cpu[v] += measure(two[v]) / 2 })
		}
		fmt.Fprintln(os.Stderr, what+"a round")
		return []float64{cpu[0], cpu[1], cpu[1] / cpu[0]}
	})
}

// watch opens a dashboard's stream of events, and returns a function that closes it.
func watch(ctx context.Context, url string) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	req := bench.Must(http.NewRequestWithContext(ctx, http.MethodGet, url+"/v1/live", nil))
	req.Header.Set("Accept", "text/event-stream")
	resp := bench.Must(http.DefaultClient.Do(req))
	if resp.StatusCode != http.StatusOK {
		bench.NoError(fmt.Errorf("/v1/live answers with status %d", resp.StatusCode))
	}
	go func() { // ends with cancel
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}()
	return cancel
}

// watched measures the CPU time that an open dashboard takes while no request comes, and the time of
// a scrape, with 4 and with 512 workers. Nothing listens at the workers' addresses.
func watched(ctx context.Context, o options, dir string) (figures []bench.Figure) {
	for _, workers := range []int{4, 512} {
		addresses, roles := make([]string, workers), make([]string, workers)
		for i := range addresses {
			addresses[i] = fmt.Sprintf("127.1.%d.%d:1", i/250, i%250+1)
		}
		server := startRouter(ctx, o, dir, fmt.Sprint("watched", workers), addresses, roles)
		defer server.Stop()
		url := "http://" + server.At.HTTP
		used := func() float64 {
			const span = 5 * time.Second
			before := bench.Must(bench.ProcessTime(server.Pid()))
			<-time.After(span)
			return (bench.Must(bench.ProcessTime(server.Pid())) - before).Seconds() / span.Seconds() * 100
		}
		name := fmt.Sprintf("%d workers: ", workers)
		targets := map[int][2]bench.Target{4: {bench.AtMost(.3), bench.Below(.5)}}[workers]
		figures = append(figures, bench.Rounds(3, []bench.Row{
			bench.NewRow(name+"idle without a dashboard", "% of a core", targets[0]),
			bench.NewRow(name+"idle dashboard, added", "% of a core", targets[1]),
			bench.NewRow(name+"GET /metrics", "ms", bench.AtMost(20)),
		}, func() []float64 {
			idle := used()
			stop := watch(ctx, url)
			added := used() - idle
			stop()
			var took []float64
			for range 20 {
				sent := time.Now()
				bench.Must(process.Get(ctx, url+"/metrics"))
				took = append(took, ms(time.Since(sent)))
			}
			return []float64{idle, added, bench.NewQuantiles(took).P50}
		})...)
		server.Stop()
	}
	return figures
}

// confirmed compares the CPU time of requests of 10 KB with that of o.base, an earlier kvroute, where the worker
// publishes the events of its cache. The kvroute of now confirms its token ids with them.
func confirmed(ctx context.Context, o options, dir string) []bench.Figure {
	if o.base == "" {
		return nil
	}
	fleets := []*variant{{name: "base"}, {name: "now"}}
	for i, v := range fleets {
		engine := bench.Must(process.StartChild(ctx, dir, "engine-"+v.name, bench.Must(filepath.Abs(o.binary)), "engine", "--listen", "127.0.0.1:0", "--nats-url", "",
			"--tokenizer", bench.Must(filepath.Abs(tokenizerDir)), "--kv-events", "zmq", "--block-hash", "vllm", "--speed", "100", "--num-gpu-blocks", "20000", "--log-level", "error"))
		defer engine.Stop()
		of := o
		of.binary = []string{o.base, o.binary}[i]
		config := fmt.Sprintf("version: 1\nmodels: [{name: sim, tokenizer: %q, block-size: 16}]\nworkers: [{name: w, address: %q, engine: vllm, models: [sim], events: {transport: zmq, endpoint: %q}}]\n",
			bench.Must(filepath.Abs(tokenizerDir)), engine.At.HTTP, engine.At.Events)
		v.server = startServer(ctx, of, dir, v.name, config)
		defer v.server.Stop()
		v.envoy = startEnvoy(ctx, engine.At.HTTP, v.server)
		defer func() { _ = v.envoy.Stop() }() // it ends with this process in any case
	}
	rng := rand.New(rand.NewPCG(2, 2))
	texts := newTexts(rng)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}
	s := shape{name: "10 KB", size: 10 << 10, rate: 100, tokens: 5}
	one(ctx, client, texts, s, fleets[0])
	one(ctx, client, texts, s, fleets[1])
	figures := inTurn(o, rng, "10 KB, worker with events: server's CPU a request, ", fleets, 1.03, func(v *variant) float64 {
		return one(ctx, client, texts, s, v).server
	})
	metrics := string(bench.Must(process.Get(ctx, "http://"+fleets[1].server.At.HTTP+"/metrics")))
	if !confirmedBlocks.MatchString(metrics) {
		bench.NoError(errors.New("kvroute confirmed no blocks"))
	}
	return figures
}

// confirmedBlocks finds a metric of confirmed blocks.
var confirmedBlocks = regexp.MustCompile(`(?m)^kvroute_confirm_blocks_total\{[^\n]*outcome="confirmed"[^\n]*\} [1-9]`)
