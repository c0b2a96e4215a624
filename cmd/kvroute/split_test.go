// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/bits"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// splitFleet is a fleet with prefill and decode workers, behind Envoy and kvroute. The workers answer
// as vLLM does, unless a test changes what they do.
type splitFleet struct {
	*demonstration
	file    string // kvroute's configuration
	mu      sync.Mutex
	workers []string                    // in the file
	servers map[string]*httptest.Server // of the workers, by name
	does    map[string]http.HandlerFunc // what a worker does
	bodies  map[string][]map[string]any // requests that a worker got
}

// startPair starts a fleet of two prefill workers, p0 and p1, and the decode worker d.
func startPair(t *testing.T, mode envoy.BodyMode, flags ...string) *splitFleet {
	t.Helper()
	p := newSplitFleet(t)
	p.EnvoyConfig.BodyMode = mode
	p.add(t, "p0", "role: prefill")
	p.add(t, "p1", "role: prefill")
	p.add(t, "d", "role: decode")
	p.start(t, flags...)
	return p
}

// newSplitFleet returns a fleet without workers, which [splitFleet.start] starts.
func newSplitFleet(t *testing.T) *splitFleet {
	t.Helper()
	p := &splitFleet{
		demonstration: newStack(t, 0, nil), servers: map[string]*httptest.Server{},
		does: map[string]http.HandlerFunc{}, bodies: map[string][]map[string]any{},
	}
	p.file = filepath.Join(p.Dir, "kvroute.yaml")
	return p
}

// add adds a worker to the fleet. fields are more fields of its record, or other values than those
// below.
func (p *splitFleet) add(t *testing.T, name, fields string) {
	t.Helper()
	p.does[name] = func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"choices":[{"text":"answer"}],"kv_transfer_params":{"remote_engine_id":%q}}`, name)
	}
	p.servers[name] = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, err := io.ReadAll(r.Body)
		var body map[string]any
		if err != nil || json.Unmarshal(text, &body) != nil {
			return // the client left, or it is a health check
		}
		p.mu.Lock()
		p.bodies[name] = append(p.bodies[name], body)
		then := p.does[name]
		p.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		then(w, r)
	}))
	t.Cleanup(p.servers[name].Close)
	record := []string{fmt.Sprintf("name: %s, address: %q, %s", name, p.address(name), fields)}
	for field, value := range map[string]string{"engine": "vllm", "models": "[sim]", "block_size": "16"} {
		if !strings.Contains(fields, field) {
			record = append(record, field+": "+value)
		}
	}
	p.workers = append(p.workers, "- {"+strings.Join(record, ", ")+"}\n")
}

// address returns where a worker listens.
func (p *splitFleet) address(name string) string { return p.servers[name].Listener.Addr().String() }

// config is kvroute's configuration file, without the worker of a name.
func (p *splitFleet) config(without string) string {
	left := func(record string) bool { return strings.Contains(record, "name: "+without+",") }
	return "version: 1\nworkers:\n" + strings.Join(slices.DeleteFunc(slices.Clone(p.workers), left), "")
}

// start starts kvroute with these flags, and Envoy.
func (p *splitFleet) start(t *testing.T, flags ...string) {
	t.Helper()
	p.begin(t, append(p.flags(t), flags...)...)
	p.newRequests() // without the stack's own request
}

// flags writes the configuration file and returns the flags that name it.
func (p *splitFleet) flags(t *testing.T) []string {
	t.Helper()
	if err := os.WriteFile(p.file, []byte(p.config("")), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--config", p.file, "--no-kv-events"}
}

// computes changes what a worker does, and returns what it did before.
func (p *splitFleet) computes(name string, h http.HandlerFunc) (before http.HandlerFunc) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before = p.does[name]
	p.does[name] = h
	return before
}

// dies ends a worker: its connections are reset, and it accepts no others.
func (p *splitFleet) dies(name string) {
	_ = p.servers[name].Listener.Close() // nothing is done with the error
	p.servers[name].CloseClientConnections()
}

// newRequests returns the requests that came since the last call.
func (p *splitFleet) newRequests() map[string][]map[string]any {
	p.mu.Lock()
	defer p.mu.Unlock()
	taken := p.bodies
	p.bodies = map[string][]map[string]any{}
	return taken
}

// In every mode in which the body can be changed, a prefill worker computes the prompt and the decode
// worker gets the transfer's parameters; in the other modes the decode worker does both.
func TestARequestIsSplit(t *testing.T) {
	t.Parallel() // mostly waits
	for mode, splits := range map[envoy.BodyMode]bool{
		envoy.Buffered: true, envoy.BufferedPartial: true, envoy.FullDuplex: true, envoy.Streamed: false,
	} {
		t.Run(mode, func(t *testing.T) {
			p := startPair(t, mode)
			resp, body := reply(t, p.demonstration, "POST", chatPath, chatBody("hello", 7, true), nil)
			if resp.StatusCode != 200 || !strings.Contains(body, "answer") {
				t.Fatalf("status %d: %s", resp.StatusCode, body)
			}
			got := p.newRequests()
			decode := got["d"]
			if len(decode) != 1 || decode[0]["stream"] != true || decode[0]["max_tokens"] != 7. {
				t.Fatalf("the decode worker got %v", decode)
			}
			params, split := decode[0]["kv_transfer_params"].(map[string]any)
			if split != splits {
				t.Fatalf("the decode worker got %v", decode)
			}
			_, text := get(t, "http://"+p.Router.At.HTTP+"/metrics")
			skipped := map[bool]string{true: "", false: "asked"}[splits]
			if n := level(text, fmt.Sprintf(`kvroute_router_prefill_legs_total{model="sim",skipped=%q}`, skipped)); strings.Trim(n, "0") == "" {
				t.Errorf("no request is counted with the reason %q", skipped)
			}
			if splits {
				name := params["remote_engine_id"].(string)
				if first := got[name]; len(first) != 1 || first[0]["stream"] != false || first[0]["max_tokens"] != 1. || first[0]["messages"] == nil {
					t.Errorf("the prefill worker got %v", first)
				}
				if d := newest(t, p.demonstration); d.Prefill == nil || d.Prefill.WorkerName != name || d.WorkerName != "d" {
					t.Errorf("the kept decision is %+v", d)
				}
			}
			atRest(t, p.demonstration)
		})
	}
}

// Whatever a prefill worker does, the client gets a response: from the second prefill worker's blocks,
// or from the decode worker alone.
func TestFaultsOfPrefillWorkers(t *testing.T) {
	t.Parallel() // mostly waits
	p := startPair(t, envoy.Buffered, "--prefill-timeout", "500ms", "--avoid-failing", "0")
	hang := make(chan struct{})
	defer close(hang)
	reset := func(w http.ResponseWriter, _ *http.Request) {
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close()
		}
	}
	says := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) }
	}
	for _, c := range []struct {
		name    string
		does    http.HandlerFunc
		outcome string // if both do it; the second one helps otherwise, unless it is empty
		helps   bool
	}{
		{"refuses", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, "status", true},
		{"refuses the request", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(400) }, "status", false},
		{"resets the connection", reset, "unreachable", true},
		{"has no parameters", says(`{"choices":[]}`), "no_parameters", true},
		{"answers nonsense", says(`<html>`), "no_parameters", true},
		{"has a list of parameters", says(`{"kv_transfer_params":[{"remote_engine_id":"p"}]}`), "no_parameters", true},
		{"has half of the parameters", says(`{"kv_transfer_params":{"remote_engine_id":"p"`), "no_parameters", true},
		{"dies while it answers", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			fmt.Fprint(w, `{"kv_transfer_params":{"remote_engine_id":"p"}}`)
		}, "unreachable", true},
		{"sends a megabyte", says(`{"kv_transfer_params":{"a":"` + strings.Repeat("x", 1<<20) + `"}}`), "too_large", true},
		{"hangs", func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-hang:
			case <-r.Context().Done():
			}
		}, "timeout", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p0, p1 := p.computes("p0", c.does), p.computes("p1", c.does)
			defer func() { p.computes("p0", p0); p.computes("p1", p1) }()
			for _, second := range []bool{true, false} {
				if p.computes("p1", c.does); second {
					p.computes("p1", p1)
				}
				split := 0
				for range 4 { // each prefill worker is first for some of them
					resp, body := reply(t, p.demonstration, "POST", chatPath, chatBody("hello", 7, false), nil)
					if resp.StatusCode != 200 || !strings.Contains(body, "answer") {
						t.Fatalf("status %d: %s", resp.StatusCode, body)
					}
					decode := p.newRequests()["d"]
					if len(decode) != 1 {
						t.Fatalf("the decode worker got %v", decode)
					}
					if decode[0]["kv_transfer_params"] != nil {
						split++
					}
				}
				if !second && split > 0 || second && c.helps && split < 4 {
					t.Errorf("one worker works: %v; %d of 4 requests were split", second, split)
				}
			}
			_, text := get(t, "http://"+p.Router.At.HTTP+"/metrics")
			if strings.Trim(level(text, fmt.Sprintf(`kvroute_extproc_prefill_duration_seconds_count{outcome=%q}`, c.outcome)), "0") == "" {
				t.Errorf("no leg has the outcome %s", c.outcome)
			}
			if d := newest(t, p.demonstration); d.NoLeg != router.NoLegFailed {
				t.Errorf("the kept decision says %q", d.NoLeg)
			}
			atRest(t, p.demonstration)
		})
	}
}

// A client that leaves during the leg ends it, and a router that dies leaves the request to Envoy.
func TestALegEndsWithItsRequest(t *testing.T) {
	t.Parallel() // mostly waits
	p := startPair(t, envoy.Buffered)
	var under atomic.Int32
	for _, name := range []string{"p0", "p1"} {
		p.computes(name, func(_ http.ResponseWriter, r *http.Request) {
			under.Add(1)
			<-r.Context().Done()
			under.Add(-1)
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const requests = 50
	done := make(chan error, requests)
	for range requests {
		go func() {
			_, err := send(t, ctx, "POST", p.Envoy.URL()+chatPath, chatBody("hello", 7, false), nil)
			done <- err
		}()
	}
	eventually(t, "not all legs begin", func() bool { return under.Load() == requests })
	cancel()
	for range requests {
		<-done
	}
	eventually(t, "legs go on", func() bool { return under.Load() == 0 })
	atRest(t, p.demonstration)

	answered := make(chan sight)
	go func() {
		answered <- look(send(t, t.Context(), "POST", p.Envoy.URL()+chatPath, chatBody("hello", 7, false), nil))
	}()
	eventually(t, "no leg begins", func() bool { return under.Load() == 1 })
	if err := p.Router.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// Envoy's pool has no worker here, so it answers by itself, at once.
	if got := <-answered; got.err != nil || got.status == 200 {
		t.Errorf("status %d, error %v", got.status, got.err)
	}
}

// Prefill workers die under load: no client sees an error.
func TestHalfOfThePrefillWorkersDie(t *testing.T) {
	t.Parallel() // mostly waits
	p := startPair(t, envoy.Buffered, "--avoid-failing", "1s")
	const clients, requests = 8, 40
	var bad atomic.Int32
	var all sync.WaitGroup
	var sent atomic.Int32
	for range clients {
		all.Go(func() {
			for range requests {
				if got := look(send(t, t.Context(), "POST", p.Envoy.URL()+chatPath, chatBody("hello", 7, false), nil)); got.status != 200 {
					bad.Add(1)
				}
				if sent.Add(1) == clients*requests/4 {
					p.computes("p0", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) })
				}
			}
		})
	}
	all.Wait()
	if bad.Load() > 0 {
		t.Errorf("%d of %d requests failed", bad.Load(), clients*requests)
	}
	p.computes("p1", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) })
	if resp, body := reply(t, p.demonstration, "POST", chatPath, chatBody("hello", 7, false), nil); resp.StatusCode != 200 {
		t.Errorf("without any prefill worker: status %d: %s", resp.StatusCode, body)
	}
	atRest(t, p.demonstration)
	var list struct{ Workers []router.WorkerState }
	if err := process.GetJSON(t.Context(), "http://"+p.Router.At.HTTP+"/v1/workers", &list); err != nil || len(list.Workers) != 3 {
		t.Errorf("workers %+v, error %v", list, err)
	}
}

// A prefill worker that accepts requests and never answers costs few of them the time of a leg, also if they come from
// one client.
func TestAHungPrefillWorkerIsTriedRarely(t *testing.T) {
	t.Parallel() // mostly waits
	p := newSplitFleet(t)
	p.add(t, "p", "role: prefill")
	p.add(t, "d", "role: decode")
	p.start(t, "--prefill-timeout", "500ms", "--avoid-failing", "300ms", "--decision-timeout", "25s")
	eventually(t, "requests are not split", func() bool { return p.served(t, "sim") })
	var legs atomic.Int32
	works := p.computes("p", nil)
	p.computes("p", func(_ http.ResponseWriter, r *http.Request) {
		legs.Add(1)
		<-r.Context().Done()
	})
	const requests = 100
	began := time.Now()
	for range requests {
		if p.served(t, "sim") {
			t.Fatal("a leg is served")
		}
		time.Sleep(20 * time.Millisecond)
	}
	// Back-offs of 0.3, 0.6, 1.2, 2.4 s, and so on, with a leg after each.
	if most := 2 + bits.Len(uint(time.Since(began)/(300*time.Millisecond))); int(legs.Load()) > most {
		t.Errorf("%d of %d requests waited for a leg in %v, want at most %d", legs.Load(), requests, time.Since(began), most)
	}
	p.computes("p", works)
	eventually(t, "requests are not split again", func() bool { return p.served(t, "sim") })
}
