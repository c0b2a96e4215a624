// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
)

// runFaults is `make bench-workers`: what clients see of workers with faults, and what it costs to watch 500
// workers. Each part has a kvroute, an Envoy and workers of its own.
func runFaults(ctx context.Context, o options) (met bool) {
	dir := bench.Must(os.MkdirTemp("", "bench-workers"))
	defer func() { _ = os.RemoveAll(dir) }()
	parts := []struct {
		name string
		run  func(ctx context.Context, o options, dir string) []bench.Figure
	}{
		{"cost", watchCost}, {"health", slowHealth}, {"new", newWorker}, {"refused", refusedConnection}, {"status", badStatus}, {"silence", silence},
	}
	var figures []bench.Figure
	for _, p := range parts {
		if !strings.Contains(p.name, o.only) {
			continue
		}
		began := time.Now()
		bench.Within(p.name, func() { figures = append(figures, p.run(ctx, o, dir)...) })
		fmt.Fprintf(os.Stderr, "%s: %.0f s\n", p.name, time.Since(began).Seconds())
	}
	return bench.Must(bench.Report(os.Stdout, o.out, bench.NewRun("bench-workers", o.commit, "make bench-workers", figures)))
}

// faultyWorker is a worker with scripted faults. Its settings may change while it serves.
type faultyWorker struct {
	name, address string
	service       atomic.Int64 // nanoseconds until it answers a request
	status        atomic.Int32 // of its answers to requests
	hangs         atomic.Bool  // requests get no answer
	healthTime    atomic.Int64 // nanoseconds until it answers /health
	health        atomic.Int32 // status of /health

	received atomic.Int32 // requests
	first    atomic.Int64 // time of the first request, in Unix nanoseconds
	healthy  atomic.Int64 // time of the first answer 200 to /health, in Unix nanoseconds
	server   *http.Server
}

// startFaulty starts a worker in this process, which answers requests after the service time. The host is
// an address of the loopback interface.
func startFaulty(ctx context.Context, name, host string, service time.Duration) *faultyWorker {
	w := &faultyWorker{name: name}
	w.service.Store(int64(service))
	w.status.Store(http.StatusOK)
	w.health.Store(http.StatusOK)
	l := bench.Must(net.Listen("tcp", net.JoinHostPort(host, "0")))
	w.address = l.Addr().String()
	w.server = &http.Server{Handler: w, ReadHeaderTimeout: time.Minute}
	go func() { _ = w.server.Serve(l) }()                   // ends with ctx
	context.AfterFunc(ctx, func() { _ = w.server.Close() }) // its connections end with it
	return w
}

func (w *faultyWorker) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/health":
		if !wait(r.Context(), time.Duration(w.healthTime.Load())) {
			return
		}
		status := int(w.health.Load())
		if status == http.StatusOK {
			w.healthy.CompareAndSwap(0, time.Now().UnixNano())
		}
		out.WriteHeader(status)
	case r.URL.Path == "/v1/models":
		_, _ = io.WriteString(out, `{"object":"list","data":[{"id":"sim","object":"model"}]}`)
	case r.Method != http.MethodPost || r.URL.Path == "/tokenize":
		http.NotFound(out, r)
	default:
		_, _ = io.Copy(io.Discard, r.Body)
		w.received.Add(1)
		w.first.CompareAndSwap(0, time.Now().UnixNano())
		if w.hangs.Load() {
			<-r.Context().Done()
			return
		}
		if !wait(r.Context(), time.Duration(w.service.Load())) {
			return
		}
		if status := int(w.status.Load()); status != http.StatusOK {
			if status == http.StatusTooManyRequests {
				out.Header().Set("Retry-After", "5")
			}
			http.Error(out, `{"error":{"message":"a fault","type":"fault"}}`, status)
			return
		}
		document(out)
	}
}

// wait returns false if ctx ends first.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// faultyStack is a kvroute and an Envoy in front of faulty workers.
type faultyStack struct {
	workers []*faultyWorker
	config  string // kvroute's configuration file
	router  *process.Child
	proxy   *envoytest.Proc
}

// workerList is the configuration of workers that are probed each second.
func workerList(workers []*faultyWorker) string {
	var text strings.Builder
	text.WriteString("workers:\n")
	for _, w := range workers {
		fmt.Fprintf(&text, "- {name: %s, address: %q, models: [sim], block_size: 16, health: {interval: 1s}, events: {transport: none}}\n", w.name, w.address)
	}
	return text.String()
}

// startStack starts kvroute and Envoy, and waits until kvroute decides requests. The pool that Envoy uses
// without kvroute has no worker, so each request to a worker is a decision of kvroute.
func startStack(ctx context.Context, o options, dir, name string, workers []*faultyWorker, flags ...string) *faultyStack {
	s := &faultyStack{workers: workers, config: filepath.Join(dir, name+".yaml")}
	s.router = startServer(ctx, o, dir, name, s.text(), flags...)
	var text bytes.Buffer
	bench.NoError(envoy.Render(&text, envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", ExtProc: []string{s.router.At.Extproc}}))
	s.proxy = bench.Must(envoytest.Start(ctx, envoytest.Options{Config: text.Bytes()}))
	bench.NoError(process.Until(ctx, process.Patience, "Envoy does not use kvroute", func(ctx context.Context) bool {
		n, err := s.proxy.Stat(ctx, "cluster.kvroute.membership_healthy")
		return err == nil && n == 1
	}))
	return s
}

func (s *faultyStack) text() string {
	return fmt.Sprintf("version: 1\nmodels: [{name: sim, tokenizer: %q, block-size: 16}]\n", bench.Must(filepath.Abs(tokenizerDir))) + workerList(s.workers)
}

func (s *faultyStack) stop() {
	_ = s.proxy.Stop() // it ends with this process in any case
	s.router.Stop()
}

// outcome is what the client of a request sees.
type outcome struct {
	status int // 0 without a response
	took   time.Duration
}

// ask sends a request with a prompt of its own.
func (s *faultyStack) ask(ctx context.Context, number int, streams bool) (o outcome) {
	body := fmt.Sprintf(`{"model":"sim","max_tokens":4,"stream":%v,"messages":[{"role":"user","content":%q}]}`, streams, strings.Repeat(fmt.Sprintf("question %d ", number), 40))
	req := bench.Must(http.NewRequestWithContext(ctx, http.MethodPost, s.proxy.URL()+"/v1/chat/completions", strings.NewReader(body)))
	req.Header.Set("Content-Type", "application/json")
	began := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if err == nil {
			o.status = resp.StatusCode
		}
	}
	o.took = time.Since(began)
	return o
}

// spread sends n requests at a steady pace and returns their outcomes.
func (s *faultyStack) spread(ctx context.Context, n int, pause, patience time.Duration) []outcome {
	all := make([]outcome, n)
	var open sync.WaitGroup
	for i := range all {
		open.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			all[i] = s.ask(ctx, i, false)
		})
		wait(ctx, pause)
	}
	open.Wait()
	return all
}

func failed(all []outcome) (n int) {
	for _, o := range all {
		if o.status != http.StatusOK {
			n++
		}
	}
	return n
}

func count(what string, target bench.Target, n int) bench.Figure {
	return bench.NewFigure(what, "requests", target, float64(n))
}

// slowHealth is a fleet whose workers all answer /health after 3 s, and requests at once.
func slowHealth(ctx context.Context, o options, dir string) []bench.Figure {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var workers []*faultyWorker
	for i := range 4 {
		w := startFaulty(ctx, fmt.Sprint("w", i), "127.0.0.1", 50*time.Millisecond)
		w.healthTime.Store(int64(3 * time.Second))
		workers = append(workers, w)
	}
	s := startStack(ctx, o, dir, "health", workers)
	defer s.stop()
	return []bench.Figure{count("/health takes 3 s on all workers: failed, of 80 requests in 32 s", bench.Exactly(0), failed(s.spread(ctx, 80, 400*time.Millisecond, 10*time.Second)))}
}

// newWorker is a worker that joins two others while it loads: its /health answers 503, and requests hang.
func newWorker(ctx context.Context, o options, dir string) []bench.Figure {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	workers := []*faultyWorker{startFaulty(ctx, "w0", "127.0.0.1", 50*time.Millisecond), startFaulty(ctx, "w1", "127.0.0.1", 50*time.Millisecond)}
	s := startStack(ctx, o, dir, "new", workers, "--router-mode", "round-robin")
	defer s.stop()
	late := startFaulty(ctx, "late", "127.0.0.1", 50*time.Millisecond)
	late.health.Store(http.StatusServiceUnavailable)
	late.hangs.Store(true)
	s.workers = append(s.workers, late)
	bench.NoError(os.WriteFile(s.config, []byte(s.text()), 0o600))
	bench.NoError(syscall.Kill(s.router.Pid(), syscall.SIGHUP))
	bench.NoError(process.Until(ctx, process.Patience, "kvroute does not know the new worker", func(ctx context.Context) bool {
		text, err := process.Get(ctx, "http://"+s.router.At.HTTP+"/v1/workers")
		return err == nil && bytes.Contains(text, []byte(`"late"`))
	}))
	before := s.spread(ctx, 80, 100*time.Millisecond, 5*time.Second)
	received := int(late.received.Load())
	late.hangs.Store(false)
	late.first.Store(0)
	late.health.Store(http.StatusOK)
	after := s.spread(ctx, 150, 50*time.Millisecond, 5*time.Second)
	usable := 60.0 // it got no request
	if first := late.first.Load(); first != 0 && late.healthy.Load() != 0 {
		usable = max(0, time.Duration(first-late.healthy.Load()).Seconds())
	}
	return []bench.Figure{
		count("a new worker that answers 503 to /health: its share of 80 requests", bench.Exactly(0), received),
		count("a new worker: failed, of 230 requests", bench.Exactly(0), failed(append(before, after...))),
		bench.NewFigure("a new worker: from its first good probe to its first request", "s", bench.AtMost(1), usable),
	}
}

// refusedConnection is a worker whose process ends: connections are refused.
func refusedConnection(ctx context.Context, o options, dir string) []bench.Figure {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	workers := []*faultyWorker{startFaulty(ctx, "w0", "127.0.0.1", time.Millisecond), startFaulty(ctx, "w1", "127.0.0.1", time.Millisecond), startFaulty(ctx, "w2", "127.0.0.1", time.Millisecond)}
	s := startStack(ctx, o, dir, "refused", workers, "--router-mode", "round-robin")
	defer s.stop()
	all := s.spread(ctx, 30, 10*time.Millisecond, 5*time.Second)
	routed := func() (n int) {
		var state struct {
			Workers []struct {
				Name   string
				Routed int
			}
		}
		bench.NoError(process.GetJSON(ctx, "http://"+s.router.At.HTTP+"/v1/workers", &state))
		for _, w := range state.Workers {
			if w.Name == "w2" {
				n = w.Routed
			}
		}
		return n
	}
	_ = workers[2].server.Close() // its listener was open
	before := routed()
	// One after the other, so that each request may profit from the one before.
	for i := range 30 {
		all = append(all, s.ask(ctx, i, false))
	}
	return []bench.Figure{
		count("connections are refused: requests routed there until kvroute noticed, of 30", bench.AtMost(1), routed()-before),
		count("connections are refused: failed, of 60 requests", bench.Exactly(0), failed(all)),
	}
}

// badStatus is one of four workers that answers with an error at once, where the others need a second.
func badStatus(ctx context.Context, o options, dir string) (figures []bench.Figure) {
	for _, mode := range []string{"kv", "least-loaded", "round-robin", "power-of-two"} {
		statuses := []int{http.StatusTooManyRequests, http.StatusUnauthorized, http.StatusNotFound, http.StatusInternalServerError}
		found := make([][]bench.Figure, len(statuses))
		failures := make([]error, len(statuses))
		var all sync.WaitGroup
		for i, status := range statuses {
			all.Go(func() { failures[i] = bench.Try(func() { found[i] = oneBad(ctx, o, dir, mode, status) }) })
		}
		all.Wait()
		bench.NoError(errors.Join(failures...))
		figures = slices.Concat(append([][]bench.Figure{figures}, found...)...)
	}
	return figures
}

// firstFailures is the number of failures after which a bad worker must be avoided.
const firstFailures = 10

func oneBad(ctx context.Context, o options, dir, mode string, status int) []bench.Figure {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var workers []*faultyWorker
	for i := range 4 {
		workers = append(workers, startFaulty(ctx, fmt.Sprint("w", i), "127.0.0.1", time.Second))
	}
	bad := workers[0]
	bad.service.Store(0)
	bad.status.Store(int32(status))
	s := startStack(ctx, o, dir, fmt.Sprint(mode, status), workers, "--router-mode", mode)
	defer s.stop()
	const requests, clients = 600, 12 // for about 50 s: several back-offs
	var mu sync.Mutex
	// Requests that clients saw fail: sent before and after the first failures, and those with status 429.
	var before, after, refused int
	var open sync.WaitGroup
	free := make(chan struct{}, clients)
	for i := range requests {
		free <- struct{}{}
		open.Go(func() {
			defer func() { <-free }()
			late := bad.received.Load() >= firstFailures
			got := s.ask(ctx, i, i%2 == 0)
			mu.Lock()
			defer mu.Unlock()
			if got.status == http.StatusTooManyRequests {
				refused++
			}
			switch failed := got.status != http.StatusOK; {
			case late && failed:
				after++
			case failed:
				before++
			}
		})
	}
	open.Wait()
	name := fmt.Sprintf("%d at once, %s: ", status, mode)
	received := int(bad.received.Load())
	figures := []bench.Figure{
		count(fmt.Sprint(name, "reached the worker, of ", requests), bench.Target{}, received),
		count(name+"failed for clients before its 10th failure", bench.Target{}, before),
		bench.NewFigure(name+"share after its first 10 failures", "%", bench.AtMost(5), 100*float64(max(0, received-firstFailures))/float64(requests-firstFailures)),
		count(name+"failed for clients after its first 10 failures", bench.Exactly(0), after),
	}
	if status == http.StatusTooManyRequests {
		figures = append(figures, count(fmt.Sprint(name, "clients that saw the 429, of ", requests), bench.Exactly(0), refused))
	}
	return figures
}
