// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/tokenizer"
)

// The sides of the comparison.
const (
	alone  = iota // Envoy without a processor
	noop          // Envoy with a processor that does nothing
	ours          // Envoy with kvroute
	dynamo        // Dynamo's frontend
	sides
)

func sideName(i int) string {
	return [...]string{"Envoy alone", "Envoy + no-op", "Envoy + kvroute", "Dynamo's frontend"}[i]
}

// side is a running front: the processes between the client and the workers.
type side struct {
	url  string
	pids []int // Envoy or the frontend, then the processor
}

// load is a closed loop of conversations: each client sends the next turn when it has the answer. With
// a pace it is an open loop: turns are due at that interval.
type load struct {
	name          string
	size, clients int
	stream        bool
	requests      int
	cpu, rate     bench.Target
	ofCore        bench.Target  // requests in a second of kvroute's CPU
	over          bench.Target  // ms of kvroute over the no-op processor
	pace          time.Duration // between two requests of all clients
}

const turns = 4

// loads returns the loads. Targets of cpu and rate are those of kvroute's front over Dynamo's, with
// eight clients.
func loads() (all []load) {
	for _, l := range []load{
		{name: "1 KB", size: 1 << 10, requests: 1200, cpu: bench.AtMost(.7), rate: bench.AtLeast(1.3)},
		{name: "10 KB", size: 10 << 10, requests: 800, cpu: bench.AtMost(.8), rate: bench.AtLeast(1.2), ofCore: bench.AtLeast(8000), over: bench.AtMost(.15)},
		{name: "100 KB", size: 100 << 10, requests: 240, cpu: bench.AtMost(.8), rate: bench.AtLeast(1.1)},
		{name: "220 KB", size: 220 << 10, requests: 120, cpu: bench.AtMost(.9), rate: bench.AtLeast(1), ofCore: bench.AtLeast(1000)},
		{name: "1 MB", size: 1 << 20, requests: 32},
	} {
		size := l.name
		l.name, l.clients = size+", 8 clients, documents", 8
		streams := load{name: size + ", 8 clients, streams", size: l.size, clients: 8, stream: true, requests: l.requests, cpu: l.cpu, rate: l.rate}
		all = append(all, l, streams, load{name: size + ", 32 clients, streams", size: l.size, clients: 32, stream: true, requests: l.requests})
	}
	return append(all, load{name: "10 KB, 150 requests a second, documents", size: 10 << 10, clients: 8, requests: 600, over: bench.AtMost(.25), pace: time.Second / 150})
}

// bodies returns the turns of the load's conversations, one conversation after the other.
func (l *load) bodies(t *texts) (all [][]byte) {
	type message map[string]string
	part := func(n int) string {
		at := t.rng.IntN(len(t.all) - n)
		return t.all[at : at+n]
	}
	system := t.all[:l.size/5] // of all conversations
	for range max(1, l.requests/turns) {
		messages := []message{{"role": "system", "content": system}, {"role": "user", "content": part(l.size * 4 / 10)}}
		for range turns {
			all = append(all, bench.Must(json.Marshal(map[string]any{"model": frontModel, "max_tokens": answerTokens, "stream": l.stream, "messages": messages})))
			messages = append(messages, message{"role": "assistant", "content": part(l.size / 20)}, message{"role": "user", "content": part(l.size / 20)})
		}
	}
	return all
}

// spent is what a load cost on a side.
type spent struct {
	cpu      [2]float64 // ms a request of each process
	rate     float64    // requests a second
	p50, p99 float64    // ms
}

func (s *spent) front() float64 { return s.cpu[0] + s.cpu[1] }

// play sends all prompts of p to a side.
func (l *load) play(ctx context.Context, client *http.Client, p *prompts, s *side) (used spent) {
	var wg sync.WaitGroup
	var sent atomic.Int64
	next := make(chan int, len(p.all)/turns)
	for i := range cap(next) {
		next <- i * turns
	}
	close(next)
	took, errs := make([]time.Duration, len(p.all)), make([]error, l.clients)
	before, start := s.cpu(), time.Now()
	for c := range l.clients {
		wg.Go(func() {
			errs[c] = bench.Try(func() {
				for first := range next {
					for i := first; i < first+turns; i++ {
						began := time.Now()
						if l.pace > 0 {
							began = start.Add(time.Duration(sent.Add(1)) * l.pace)
							<-time.After(time.Until(began))
						}
						postPrompt(ctx, client, s.url, p.all[i].body, i)
						took[i] = time.Since(began)
					}
				}
			})
		})
	}
	wg.Wait()
	length := time.Since(start)
	bench.NoError(cmp.Or(errors.Join(errs...), context.Cause(ctx)))
	<-time.After(50 * time.Millisecond) // events and ends of streams
	for i, after := range s.cpu() {
		used.cpu[i] = ms(after-before[i]) / float64(len(took))
	}
	slices.Sort(took)
	used.rate, used.p50, used.p99 = float64(len(took))/length.Seconds(), ms(took[len(took)/2]), ms(took[len(took)*99/100])
	return used
}

func (s *side) cpu() (all [2]time.Duration) {
	for i, pid := range s.pids {
		all[i] = bench.Must(bench.ProcessTime(pid))
	}
	return all
}

// runFront measures kvroute's front against the others, as `make bench-front` runs it.
func runFront(ctx context.Context, o options) (met bool) {
	dir := bench.Must(os.MkdirTemp("", "bench-front"))
	defer func() { _ = os.RemoveAll(dir) }()
	model := filepath.Join(dir, "model")
	frontFiles(model, o.shared)
	reader := bench.Must(tokenizer.LoadModel(os.DirFS(model), tokenizer.ModelConfig{Cache: tokenizer.NewCache(64 << 20)}))
	p := &prompts{}
	all, stop := startSides(ctx, o, dir, model, p)
	defer stop()
	rng := rand.New(rand.NewPCG(1, 1))
	texts := newTexts(rng)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}
	warm := load{size: 10 << 10, clients: 8, stream: true, requests: 80}
	p.read(ctx, reader, warm.bodies(texts), warm.stream)
	for i := range all {
		if all[i] != nil {
			bench.Within("warm up "+sideName(i), func() { warm.play(ctx, client, p, all[i]) })
		}
	}
	var figures []bench.Figure
	for _, l := range loads() {
		if !strings.Contains(l.name, o.only) {
			continue
		}
		figures = append(figures, bench.Rounds(o.rounds, l.rows(all), func() []float64 {
			var got [sides]spent
			p.read(ctx, reader, l.bodies(texts), l.stream)
			for _, i := range rng.Perm(sides) {
				if all[i] != nil {
					bench.Within(l.name+", "+sideName(i), func() { got[i] = l.play(ctx, client, p, all[i]) })
				}
			}
			fmt.Fprintf(os.Stderr, "%s: a round\n", l.name)
			return values(all, &got)
		})...)
	}
	for i, s := range all {
		for k := 0; s != nil && k < len(s.pids); k++ {
			figures = append(figures, bench.NewFigure(fmt.Sprintf("memory at the end, %s, process %d", sideName(i), k+1), "MB", bench.Target{}, resident(s.pids[k])))
		}
	}
	if all[dynamo] == nil {
		fmt.Fprintln(os.Stderr, "bench-front: Dynamo's frontend is not installed (--dynamo): its targets are not measured")
	}
	return bench.Must(bench.Report(os.Stdout, o.out, bench.NewRun("bench-front", o.commit, "make bench-front", figures))) && all[dynamo] != nil
}

// rows are the rows of a load; values returns their values.
func (l *load) rows(all [sides]*side) (rows []bench.Row) {
	var p50, p99, none bench.Target
	add := func(what, unit string, t bench.Target) {
		rows = append(rows, bench.NewRow(l.name+": "+what, unit, t))
	}
	if all[dynamo] != nil {
		add("CPU, Envoy + kvroute ÷ Dynamo's frontend", "×", l.cpu)
		add("throughput, Envoy + kvroute ÷ Dynamo's frontend", "×", l.rate)
	}
	if l.over.IsSet() && l.pace == 0 {
		p50, p99 = bench.AtMost(1.15), bench.AtMost(1.3)
	}
	add("processor's CPU a request, kvroute − no-op", "ms", l.over)
	add("p50, kvroute ÷ no-op", "×", p50)
	add("p99, kvroute ÷ no-op", "×", p99)
	add("requests in a second of kvroute's CPU", "/s", l.ofCore)
	for i, s := range all {
		if s == nil {
			continue
		}
		add("CPU a request, "+sideName(i), "ms", none)
		add("  of these the processor", "ms", none)
		add("throughput, "+sideName(i), "/s", none)
		add("p50, "+sideName(i), "ms", none)
		add("p99, "+sideName(i), "ms", none)
	}
	return rows
}

func values(all [sides]*side, got *[sides]spent) (v []float64) {
	if all[dynamo] != nil {
		v = append(v, got[ours].front()/got[dynamo].front(), got[ours].rate/got[dynamo].rate)
	}
	v = append(v, got[ours].cpu[1]-got[noop].cpu[1], got[ours].p50/got[noop].p50, got[ours].p99/got[noop].p99, 1e3/got[ours].cpu[1])
	for i, s := range all {
		if s == nil {
			continue
		}
		v = append(v, got[i].front(), got[i].cpu[1], got[i].rate, got[i].p50, got[i].p99)
	}
	return v
}

// startSides starts the fronts. Each has workers of its own, so that they do not share caches.
func startSides(ctx context.Context, o options, dir, model string, p *prompts) (all [sides]*side, stop func()) {
	var stops []func()
	stop = func() {
		for _, f := range slices.Backward(stops) {
			f()
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	stops = append(stops, cancel)
	for i := range dynamo {
		f := startFleet(ctx, p)
		var server *process.Child
		switch i {
		case noop:
			server = bench.Must(process.StartChild(ctx, dir, "noop", bench.Must(os.Executable()), "--noop", f.addresses[0]))
		case ours:
			config := fmt.Sprintf("version: 1\nmodels: [{name: %s, tokenizer: %q}]\nworkers:\n%s", frontModel, model, f.records())
			server = startServer(ctx, o, dir, "kvroute", config)
		}
		e := startEnvoy(ctx, f.addresses[0], server)
		stops = append(stops, func() { _ = e.Stop() })
		all[i] = &side{url: e.URL(), pids: []int{e.Pid()}}
		if server != nil {
			stops = append(stops, server.Stop)
			all[i].pids = append(all[i].pids, server.Pid())
		}
	}
	if o.dynamo != "" {
		all[dynamo] = startDynamo(ctx, o, dir, model, &stops)
	}
	return all, stop
}

// startDynamo starts Dynamo's frontend and mock workers, which find each other by files and send their
// events over ZMQ.
func startDynamo(ctx context.Context, o options, dir, model string, stops *[]func()) *side {
	python := bench.Must(filepath.Abs(filepath.Join(o.dynamo, "bin", "python")))
	environment := append(os.Environ(),
		"DYN_FILE_KV="+filepath.Join(dir, "store"), "DYN_DISCOVERY_BACKEND=file", "DYN_TCP_RPC_HOST=127.0.0.1", "DYN_EVENT_PLANE_HOST=127.0.0.1",
		"DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1", "HF_HUB_OFFLINE=1", "DYN_EVENT_PLANE=zmq", "DYN_LOG=error")
	start := func(name string, args ...string) *process.Process {
		cmd := exec.CommandContext(ctx, python, args...)
		cmd.Env = environment
		started := bench.Must(process.Start(dir, name, cmd))
		*stops = append(*stops, started.Stop)
		return started
	}
	start("mocker", "-m", "dynamo.mocker", "--model-path", model, "--model-name", frontModel, "--block-size", fmt.Sprint(blockTokens),
		"--num-workers", "4", "--speedup-ratio", "1000", "--num-gpu-blocks-override", "1000000")
	port := bench.Must(process.FreePorts(1))
	f := start("frontend", "-m", "dynamo.frontend", "--router-mode", "kv", "--tokenizer", "fastokens", "--http-host", "127.0.0.1", "--http-port", fmt.Sprint(port))
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	bench.NoError(f.Await(ctx, 3*time.Minute, "it lists the model", func(ctx context.Context) bool {
		models, err := process.Get(ctx, url+"/v1/models")
		return err == nil && bytes.Contains(models, []byte(`"`+frontModel+`"`))
	}))
	return &side{url: url, pids: []int{f.Pid()}}
}

// resident returns the memory of a process in MB.
func resident(pid int) float64 {
	for line := range strings.Lines(string(bench.Must(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))))) {
		var kb float64
		if n, _ := fmt.Sscanf(line, "VmRSS: %f kB", &kb); n == 1 {
			return kb / 1024
		}
	}
	return 0
}
