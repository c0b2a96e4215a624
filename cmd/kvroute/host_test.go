// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/router"
)

// hostWorker is a worker that answers requests with one Host header only, as a server behind a router by Host.
type hostWorker struct {
	address string
	busy    atomic.Bool // POST of a chat is answered with 503
	served  atomic.Int32

	mu    sync.Mutex
	wrong []string // path and Host of the requests with another Host
}

func newHostWorker(t *testing.T, right func(r *http.Request) bool) *hostWorker {
	t.Helper()
	w := new(hostWorker)
	w.address = startHTTP(t, func(out http.ResponseWriter, r *http.Request) {
		switch {
		case !right(r):
			w.mu.Lock()
			w.wrong = append(w.wrong, r.URL.Path+" "+r.Host)
			w.mu.Unlock()
			http.NotFound(out, r)
		case w.busy.Load() && r.URL.Path == chatPath:
			http.Error(out, "not now", http.StatusServiceUnavailable)
		default:
			if r.URL.Path == chatPath {
				w.served.Add(1)
			}
			_, _ = io.WriteString(out, `{"choices":[],"tokens":[1],"kv_transfer_params":{"a":1}}`)
		}
	})
	return w
}

// Each of a request's choices gets its own Host header, also if all have one address. kvroute knows which of
// them failed, and how.
func TestEachChoiceGetsItsOwnHost(t *testing.T) {
	var wrong atomic.Int32
	var pauses atomic.Bool
	answer := func(out http.ResponseWriter, r *http.Request) {
		switch {
		case r.Host != "busy.example" && r.Host != "full.example" && r.Host != "free.example":
			wrong.Add(1)
			http.NotFound(out, r)
		case r.Host != "free.example" && r.URL.Path == chatPath:
			if pauses.Load() {
				out.Header().Set("Retry-After", "30")
			}
			http.Error(out, "not now", http.StatusTooManyRequests)
		default:
			_, _ = io.WriteString(out, `{"choices":[]}`)
		}
	}
	for name, address := range map[string]func() string{
		"three addresses": func() string { return startHTTP(t, answer) },
		"one address":     sync.OnceValue(func() string { return startHTTP(t, answer) }),
	} {
		var config strings.Builder
		config.WriteString("version: 1\nworkers:\n")
		for _, worker := range []string{"busy", "full", "free"} {
			fmt.Fprintf(&config, "- {name: %s, address: %q, host: %s.example, models: [sim], block_size: 16, health: none, events: {transport: none}}\n", worker, address(), worker)
		}
		d := newStack(t, 0, nil)
		d.Unrouted = true
		d.begin(t, "--config", writeFile(t, config.String()), "--router-mode", "round-robin")
		eventually(t, "no request is decided", func() bool { return d.send(t, "hello", false).header.Get("X-Dynamo-Reason") != "" })
		pauses.Store(false)
		wrong.Store(0) // requests before Envoy used kvroute have the client's Host
		for range 20 {
			if got := d.send(t, "hello", false); got.status != http.StatusOK {
				t.Errorf("%s: status %d", name, got.status)
			}
		}
		pauses.Store(true)
		eventually(t, name+": the worker that answers 429 is not avoided for that", func() bool {
			d.send(t, "hello", false)
			for _, w := range workers(t, d) {
				if w.Name == "busy" && w.Failing && strings.Contains(w.AvoidedFor, "429") && len(w.Faults) == 0 {
					return true
				}
			}
			return false
		})
		if n := wrong.Load(); n > 0 {
			t.Errorf("%s: %d requests had another Host", name, n)
		}
	}
}

// Each worker gets its own Host header, in the client's requests, in prefill legs, probes and all
// other requests of kvroute.
func TestWorkersBehindARouterByHost(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 0, nil)
	d.Unrouted = true
	is := func(host string) func(*http.Request) bool {
		return func(r *http.Request) bool { return r.Host == host }
	}
	byName := map[string]*hostWorker{
		"prefill": newHostWorker(t, is("prefill.example")),
		"first":   newHostWorker(t, is("first.example:81")),
		"plain":   newHostWorker(t, func(*http.Request) bool { return true }),
	}
	// The name of its address is the Host of this worker, and a second choice's Host is the first one's.
	var local string
	var failing atomic.Bool
	byName["named"] = newHostWorker(t, func(r *http.Request) bool { return r.Host == local || failing.Load() })
	local = fmt.Sprint("localhost:", netip.MustParseAddrPort(byName["named"].address).Port())
	var text strings.Builder
	text.WriteString("version: 1\nworkers:\n")
	for name, w := range byName {
		role, address, host := "decode", w.address, ""
		switch name {
		case "prefill":
			role, host = "prefill", "prefill.example"
		case "first":
			host = "first.example:81"
		case "named":
			address = local
		}
		fmt.Fprintf(&text, "- {name: %s, address: %q, host: %q, models: [sim], role: %s, engine: vllm, model_card: kvroute-sim, block_size: 16, health: {interval: 100ms}, metrics: {interval: 100ms}, events: {transport: none}}\n",
			name, address, host, role)
	}
	d.EnvoyConfig.Pool = []string{byName["plain"].address}
	for _, w := range byName {
		d.EnvoyConfig.Pool = append(d.EnvoyConfig.Pool, w.address)
	}
	flags := []string{"--config", writeFile(t, text.String()), "--avoid-failing", "0", "--verify-tokenizer"}
	d.begin(t, flags...)
	send := func() (status int, decided bool) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, strings.NewReader(chatBody("a prompt of more than one block of tokens", 2, false)))
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "gateway.example"
		req.Header.Set("X-Dynamo-Worker-Host", "forged.example")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode, resp.Header.Get("X-Dynamo-Reason") != ""
	}
	for _, c := range []struct {
		failover envoy.Failover
		choice   string
	}{{envoy.Composite, "header"}, {envoy.List, "list"}, {envoy.NoFailover, "none"}} {
		d.EnvoyConfig.Failover = c.failover
		d.restartEnvoy(t, append(flags, "--second-choice", c.choice)...)
		eventually(t, "not all workers are healthy", func() bool {
			n := 0
			for _, w := range workers(t, d) {
				if w.Health == "healthy" {
					n++
				}
			}
			return n == len(byName)
		})
		eventually(t, "requests are not decided", func() bool { _, decided := send(); return decided })
		for _, w := range byName {
			w.mu.Lock()
			w.wrong = nil // requests before Envoy used kvroute went to the pool
			w.mu.Unlock()
			w.served.Store(0)
		}
		for _, busy := range []string{"", "first", "plain", "named"} {
			if failing.Store(busy != ""); busy != "" {
				byName[busy].busy.Store(true)
			}
			for range 12 {
				// There is always a second choice: the worker without a Host, or with its name as Host.
				status, decided := send()
				if !decided || status != http.StatusOK && (busy == "" || c.failover != envoy.NoFailover || status != http.StatusServiceUnavailable) {
					t.Errorf("%s, busy: %q: status %d, decided %v", c.failover, busy, status, decided)
				}
			}
			if busy != "" {
				byName[busy].busy.Store(false)
			}
		}
		for name, w := range byName {
			w.mu.Lock()
			if len(w.wrong) > 0 || w.served.Load() == 0 {
				t.Errorf("%s: %s served %d requests and got others with a wrong Host: %q", c.failover, name, w.served.Load(), w.wrong)
			}
			w.mu.Unlock()
		}
	}
}

// Messages about a worker behind a router by Host name the Host: other workers have the same address.
func TestMessagesNameTheHost(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	at := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "good.example" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	line := func(name string) string {
		return fmt.Sprintf("- {name: %s, address: %q, host: %s.example, models: [sim], health: {interval: 100ms}, events: {transport: none}}\n", name, at, name)
	}
	d := &demonstration{demo.Stack{Router: serveFile(t, writeFile(t, "version: 1\nworkers:\n"+line("good")+line("bad")))}}
	place := at + " (Host bad.example)"
	eventually(t, "no fault names the Host", func() bool {
		return slices.ContainsFunc(workers(t, d), func(w router.WorkerState) bool {
			return w.Name == "bad" && len(w.Faults) == 1 && strings.Contains(w.Faults[0].Text, "status 503 at "+place)
		})
	})
	if log := d.Router.LastLines(); !strings.Contains(log, fmt.Sprintf("worker=bad kind=health at=%q", place)) || strings.Contains(log, "worker=good kind=health") {
		t.Errorf("the log does not name the Host:\n%s", log)
	}
}
