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
	"strconv"
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
	url     string
	pids    []int  // Envoy or the frontend, then the processor
	metrics string // kvroute's; "" of others
}

// load is a closed loop of conversations: each client sends the next turn when it has the answer. With
// a pace it is an open loop: turns are due at that interval.
type load struct {
	name          string
	size, clients int
	stream        bool
	requests      int
	cpu           bench.Target  // of kvroute's front ÷ Dynamo's
	front         bench.Target  // of kvroute's front ÷ Envoy with the no-op processor
	over          bench.Target  // ms of kvroute over the no-op processor
	p50           bench.Target  // ÷ that with the no-op processor
	pace          time.Duration // between two requests of all clients
}

const turns = 4

// spread is how much the rounds of a figure may differ for its target to count.
const spread = 1.3

func atMost(v float64) bench.Target { return bench.AtMost(v).Within(spread) }

// loads returns the loads.
func loads() (all []load) {
	for _, l := range []struct {
		name           string
		size, requests int
		cpu8, cpu32    bench.Target
		documents      load
	}{
		{"1 KB", 1 << 10, 1200, atMost(.6), atMost(.7), load{}},
		{"10 KB", 10 << 10, 800, atMost(.55), atMost(.6), load{over: atMost(.25), p50: atMost(1.15)}},
		{"100 KB", 100 << 10, 240, atMost(.75), atMost(.7), load{}},
		{"220 KB", 220 << 10, 120, atMost(.65), atMost(.65), load{}},
		{name: "1 MB", size: 1 << 20, requests: 32},
	} {
		documents := l.documents
		documents.name, documents.size, documents.clients, documents.requests = l.name+", 8 clients, documents", l.size, 8, l.requests
		streams := load{name: l.name + ", 8 clients, streams", size: l.size, clients: 8, stream: true, requests: l.requests, cpu: l.cpu8}
		if l.size == 10<<10 {
			streams.front = atMost(1.3)
		}
		all = append(all, documents, streams,
			load{name: l.name + ", 32 clients, streams", size: l.size, clients: 32, stream: true, requests: l.requests, cpu: l.cpu32})
	}
	return append(all, load{name: "10 KB, 150 requests a second, documents", size: 10 << 10, clients: 8, requests: 600, over: atMost(.4), pace: time.Second / 150})
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
	wakes    float64    // times that a thread of the processes began to wait, a request
	kilobyte float64    // allocated by kvroute, a request
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
	allocated := s.allocated(ctx)
	waited := s.waited()
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
	n := float64(len(took))
	for i, after := range s.cpu() {
		used.cpu[i] = ms(after-before[i]) / n
	}
	used.wakes = (s.waited() - waited) / n
	used.kilobyte = (s.allocated(ctx) - allocated) / n / 1e3
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

// waited returns how often the threads of the processes have begun to wait.
func (s *side) waited() (n float64) {
	for _, pid := range s.pids {
		for _, name := range bench.Must(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))) {
			text, _ := os.ReadFile(name) // an error is that of a thread that has ended
			n += statusValue(text, "voluntary_ctxt_switches")
		}
	}
	return n
}

// allocated returns the bytes that kvroute has allocated.
func (s *side) allocated(ctx context.Context) float64 {
	if s.metrics == "" {
		return 0
	}
	for line := range bytes.Lines(bench.Must(process.Get(ctx, s.metrics))) {
		if value, ok := bytes.CutPrefix(line, []byte("go_memstats_alloc_bytes_total ")); ok {
			return bench.Must(strconv.ParseFloat(string(bytes.TrimSpace(value)), 64))
		}
	}
	bench.NoError(errors.New("kvroute's metrics lack go_memstats_alloc_bytes_total"))
	return 0
}

// openLoop measures 10 KB in an open loop at shares of what each front bears in a closed loop of 32 clients.
func openLoop(ctx context.Context, o options, client *http.Client, texts *texts, reader *tokenizer.Model, p *prompts, all [sides]*side) []bench.Figure {
	shares := []float64{.2, .5, .8}
	var rows []bench.Row
	for _, share := range shares {
		for i, s := range all {
			if s != nil {
				for _, what := range []string{"p50", "p99"} {
					rows = append(rows, bench.NewRow(fmt.Sprintf("10 KB, open loop at %.0f %% of what it bears, streams: %s, %s", 100*share, what, sideName(i)), "ms", bench.Target{}))
				}
			}
		}
	}
	return bench.Rounds(o.rounds, rows, func() (v []float64) {
		var bears [sides]float64
		for _, share := range append([]float64{0}, shares...) {
			var got [sides]spent
			for _, i := range texts.rng.Perm(sides) {
				if all[i] == nil {
					continue
				}
				l := load{size: 10 << 10, clients: 32, stream: true, requests: 400}
				if share > 0 {
					l.clients, l.pace = 64, time.Duration(float64(time.Second)/(share*bears[i]))
				}
				p.read(ctx, reader, l.bodies(texts), l.stream)
				bench.Within("open loop, "+sideName(i), func() { got[i] = l.play(ctx, client, p, all[i]) })
				if share == 0 {
					bears[i] = got[i].rate
				} else {
					v = append(v, got[i].p50, got[i].p99)
				}
			}
		}
		return v
	})
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
			var most bench.Target
			if i == ours && k == 1 && o.only == "" {
				most = bench.AtMost(800)
			}
			figures = append(figures, bench.NewFigure(fmt.Sprintf("memory at the end, %s, process %d", sideName(i), k+1), "MB", most, memory(s.pids[k])))
		}
	}
	if strings.Contains("open loop", o.only) {
		figures = append(figures, openLoop(ctx, o, client, texts, reader, p, all)...)
	}
	if all[dynamo] == nil {
		fmt.Fprintln(os.Stderr, "bench-front: Dynamo's frontend is not installed (--dynamo): its targets are not measured")
	}
	return bench.Must(bench.Report(os.Stdout, o.out, bench.NewRun("bench-front", o.commit, "make bench-front", figures))) && all[dynamo] != nil
}

// rows are the rows of a load; values returns their values.
func (l *load) rows(all [sides]*side) (rows []bench.Row) {
	var none bench.Target
	add := func(what, unit string, t bench.Target) {
		rows = append(rows, bench.NewRow(l.name+": "+what, unit, t))
	}
	if all[dynamo] != nil {
		add("CPU, Envoy + kvroute ÷ Dynamo's frontend", "×", l.cpu)
		add("throughput, Envoy + kvroute ÷ Dynamo's frontend", "×", none)
	}
	add("CPU, Envoy + kvroute ÷ Envoy + no-op", "×", l.front)
	add("processor's CPU a request, kvroute − no-op", "ms", l.over)
	add("p50, kvroute ÷ no-op", "×", l.p50)
	add("p99, kvroute ÷ no-op", "×", none)
	add("requests in a second of kvroute's CPU", "/s", none)
	add("allocated a request, kvroute", "KB", none)
	for i, s := range all {
		if s == nil {
			continue
		}
		add("CPU a request, "+sideName(i), "ms", none)
		add("  of these the processor", "ms", none)
		add("wake-ups a request, "+sideName(i), "", none)
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
	v = append(v, got[ours].front()/got[noop].front(), got[ours].cpu[1]-got[noop].cpu[1], got[ours].p50/got[noop].p50, got[ours].p99/got[noop].p99,
		1e3/got[ours].cpu[1], got[ours].kilobyte)
	for i, s := range all {
		if s == nil {
			continue
		}
		v = append(v, got[i].front(), got[i].cpu[1], got[i].wakes, got[i].rate, got[i].p50, got[i].p99)
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
			if i == ours {
				all[i].metrics = "http://" + server.At.HTTP + "/metrics"
			}
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
