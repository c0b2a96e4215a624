// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/policy"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// runSplit is `make bench-pd`: what a prefill leg adds to a request, what a fleet does whose prefill
// workers are killed, and what a split does to response times in the simulator.
func runSplit(ctx context.Context, o options) (met bool) {
	dir := bench.Must(os.MkdirTemp("", "bench-pd"))
	defer func() { _ = os.RemoveAll(dir) }()
	var figures []bench.Figure
	part := func(name string, measure func(ctx context.Context, o options, dir string) []bench.Figure) {
		if strings.Contains(name, o.only) {
			bench.Within(name, func() { figures = append(figures, measure(ctx, o, dir)...) })
		}
	}
	part("legs", legs)
	part("rewrite", rewrite)
	part("killed", killed)
	part("replay", simulated)
	return bench.Must(bench.Report(os.Stdout, o.out, bench.NewRun("bench-pd", o.commit, "make bench-pd", figures)))
}

// instant is a worker that answers at once. Its answer to the prefill request of 10 KB has the
// parameters of vLLM.
func instant(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	w.Header().Set("Content-Type", "application/json")
	if bytes.Contains(body, []byte(remoteDecode)) {
		_, _ = io.WriteString(w, prefilled)
		return
	}
	_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}`)
}

const remoteDecode = `"kv_transfer_params":{"do_remote_decode":true}`

//nolint:gochecknoglobals // a constant
var prefilled = fmt.Sprintf(`{"choices":[{"index":0,"message":{"role":"assistant","content":"y"},"finish_reason":"length"}],"kv_transfer_params":{`+
	`"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[%s]],"remote_engine_id":"6f8b1f0c-7c6e-4a0e-9d0a-3f1f5c0f7a11",`+
	`"remote_request_id":"chatcmpl-1","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}`, strings.TrimSuffix(strings.Repeat("1234,", 160), ","))

// legs measures requests of 10 KB that follow each other in an order that changes: to one of four
// aggregated workers, to two prefill and two decode workers, and a prefill request without Envoy and
// kvroute, which is the leg itself. Each fleet has its own Envoy and kvroute.
func legs(ctx context.Context, o options, dir string) []bench.Figure {
	var workers []string
	for range 4 {
		s := httptest.NewServer(http.HandlerFunc(instant))
		defer s.Close()
		workers = append(workers, s.Listener.Addr().String())
	}
	fleets := []*variant{{name: "aggregated"}, {name: "split"}}
	for i, roles := range [][]string{{"", "", "", ""}, {"prefill", "prefill", "decode", "decode"}} {
		v := fleets[i]
		v.server = startRouter(ctx, o, dir, v.name, workers, roles)
		defer v.server.Stop()
		v.envoy = startEnvoy(ctx, workers[3], v.server)
		defer func() { _ = v.envoy.Stop() }() // it ends with this process in any case
	}
	urls := []string{fleets[0].envoy.URL(), fleets[1].envoy.URL(), "http://" + workers[0]}
	usedUntil := func(begin []use) (server, proxy [2]float64) {
		for i, v := range fleets {
			after := v.used(ctx)
			server[i], proxy[i] = ms(after.server-begin[i].server), ms(after.proxy-begin[i].proxy)
		}
		return server, proxy
	}
	begin := []use{fleets[0].used(ctx), fleets[1].used(ctx)}
	<-time.After(length)
	idle, _ := usedUntil(begin)
	var rows []bench.Row
	for _, name := range []string{
		"p50, aggregated", "p50, split", "p50, the leg alone", "server's CPU a request, aggregated", "server's CPU a request, split",
		"Envoy's CPU a request, aggregated", "Envoy's CPU a request, split",
	} {
		rows = append(rows, bench.NewRow("10 KB: "+name, "ms", bench.Target{}))
	}
	rows = append(rows, bench.NewRow("10 KB: p50, split − aggregated − leg", "ms", bench.AtMost(1.5)),
		bench.NewRow("10 KB: server's CPU a request, split ÷ aggregated", "×", bench.AtMost(1.6)))

	rng := rand.New(rand.NewPCG(1, 1))
	texts := newTexts(rng)
	client := &http.Client{Transport: &http.Transport{DisableCompression: true}}
	return bench.Rounds(o.rounds, rows, func() (values []float64) {
		const each = 200 // requests of each kind
		var took [3][]float64
		start, begin := time.Now(), []use{fleets[0].used(ctx), fleets[1].used(ctx)}
		for range each {
			for _, kind := range rng.Perm(len(urls)) {
				body := texts.body(10<<10, 0)
				if kind == 2 {
					body = append([]byte("{"+remoteDecode+","), body[1:]...)
				}
				sent := time.Now()
				post(ctx, client, urls[kind], body)
				took[kind] = append(took[kind], ms(time.Since(sent)))
			}
		}
		<-time.After(50 * time.Millisecond) // streams end after the response
		seconds := time.Since(start).Seconds()
		server, proxy := usedUntil(begin)
		for i := range server {
			server[i] = (server[i] - idle[i]*seconds/length.Seconds()) / each
			proxy[i] /= each
		}
		for kind := range took {
			values = append(values, bench.NewQuantiles(took[kind]).P50)
		}
		fmt.Fprintln(os.Stderr, "legs: a round")
		return append(values, server[0], server[1], proxy[0], proxy[1], values[1]-values[0]-values[2], server[1]/server[0])
	})
}

// rewrite counts the bytes that a leg allocates for a body of 1 MB: prefill request, its answer and
// decode request, without the buffers of HTTP.
func rewrite(ctx context.Context, _ options, _ string) (figures []bench.Figure) {
	body := newTexts(rand.New(rand.NewPCG(1, 1))).body(1<<20, 0)
	answer := strings.Replace(prefilled, `"finish_reason"`, `"disaggregated_params":{"request_type":"context_only"},"finish_reason"`, 1)
	client := prefill.Client{Router: unheard{}, HTTP: &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
		_, err := io.Copy(io.Discard, r.Body)
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(answer))}, err
	})}}
	for _, engine := range []string{engine.VLLM, engine.SGLang, engine.TRTLLM} {
		d := &router.Decision{Engine: engine, Address: netip.MustParseAddrPort("127.0.0.1:1")}
		result := testing.Benchmark(func(b *testing.B) {
			for b.Loop() {
				leg := prefill.Leg{Path: "/v1/chat/completions", Body: body}
				done := make(chan struct{})
				decode, outcome := client.Do(ctx, d, leg, time.Now().Add(time.Minute), func() { close(done) })
				if <-done; len(decode) < len(body) {
					bench.NoError(fmt.Errorf("%s: the leg has the outcome %s", engine, outcome))
				}
			}
		})
		figures = append(figures, bench.NewFigure("bytes allocated for a leg ÷ bytes of its body of 1 MB, "+engine, "×", bench.AtMost(1.1),
			float64(result.AllocedBytesPerOp())/float64(len(body))))
	}
	return figures
}

// unheard is a router that no leg tells its result.
type unheard struct{}

func (unheard) Served(string, router.Response) (bool, []router.Avoided) { return false, nil }
func (unheard) FirstToken(string, router.Sign) bool                     { return true }
func (unheard) Free(string) bool                                        { return true }

type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// killed counts the requests that fail when two of four prefill workers are killed under load. The
// workers are simulated engines, each a process of its own.
func killed(ctx context.Context, o options, dir string) []bench.Figure {
	const rounds, requests = 3, 300
	var failed, second []float64
	for round := range rounds {
		var engines []*process.Child
		var workers, roles []string
		for i := range 8 {
			role := []string{"prefill", "decode"}[i%2]
			name := fmt.Sprint(role, round, i)
			e := bench.Must(process.StartChild(ctx, dir, name, bench.Must(filepath.Abs(o.binary)), "engine", "--name", name, "--role", role, "--engine", "vllm",
				"--listen", "127.0.0.1:0", "--nats-url", "", "--kv-events", "none", "--log-level", "error"))
			defer e.Stop()
			engines, workers, roles = append(engines, e), append(workers, e.At.HTTP), append(roles, role)
		}
		server := startRouter(ctx, o, dir, fmt.Sprint("kvroute", round), workers, roles)
		defer server.Stop()
		e := startEnvoy(ctx, workers[1], server)
		defer func() { _ = e.Stop() }() // it ends with this process in any case
		conf := bench.LoadConfig{URL: e.URL(), Rate: 20, Conversations: requests, Turns: 1, Seed: uint64(round)}
		sum := bench.Must(bench.Load(ctx, conf, func(done, total int) {
			if done == total/3 {
				engines[0].Kill()
				engines[2].Kill()
			}
		}, nil))
		fmt.Fprintf(os.Stderr, "killed: round %d of %d: errors %v\n", round+1, rounds, sum.Errors)
		failed = append(failed, float64(sum.Failed()))
		text := string(bench.Must(process.Get(ctx, "http://"+server.At.HTTP+"/metrics")))
		_, text, _ = strings.Cut(text, `kvroute_extproc_prefill_duration_seconds_count{outcome="second"} `)
		n := 0.
		_, _ = fmt.Sscan(text, &n) // 0 if there is none
		second = append(second, n)
	}
	return []bench.Figure{
		bench.NewFigure("2 of 4 prefill workers killed: legs of 300 that the second worker ran", "", bench.Target{}, second...),
		bench.Exactly(0).Figure("2 of 4 prefill workers killed: failed requests of 300, the most of a round", "", slices.Max(failed), slices.Min(failed), slices.Max(failed)),
	}
}

// simulated compares four prefill and four decode workers with eight aggregated ones, on public traces.
// There are no figures without the traces, and no targets.
func simulated(ctx context.Context, o options, _ string) []bench.Figure {
	if _, err := os.Stat(o.traces); err != nil {
		fmt.Fprintf(os.Stderr, "replay: left out, there are no traces: %v\n", err)
		return nil
	}
	b := policy.Bench{Traces: o.traces, Seeds: 3, Log: os.Stderr}
	return b.Split(ctx, os.Stdout, o.out)
}
