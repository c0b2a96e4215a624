// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/bench/demo"
)

// A registration must not make kvroute call, or send clients to, an address that only this machine
// can reach.
func TestRegistrationsAreNoWayIn(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	var quit atomic.Int32
	admin := newLoopback(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		// At an allowed address kvroute reads what an engine says about itself, and calls nothing else.
		fixed := []string{"/v1/models", "/metrics", "/kv_event_sources", "/server_info", "/get_server_info"}
		if r.Method != http.MethodGet || !slices.Contains(fixed, r.URL.RequestURI()) {
			quit.Add(1)
		}
	}))
	adminAt := strings.TrimPrefix(admin, "http://")
	for _, c := range []struct{ networks, record, want string }{
		{"", `"address":"` + adminAt + `"`, "neither loopback nor link-local"},
		{"", `"address":"10.0.0.7:8000","events":{"transport":"http_poll","endpoint":"` + admin + `/quitquitquit"}`, "want http://10.0.0.7:8000/kv_cache_events"},
		{demo.AnyNetwork, `"address":"HTTP"`, "kvroute itself"},
		{demo.AnyNetwork, `"address":"EXTPROC"`, "kvroute itself"},
		{demo.AnyNetwork, `"address":"NATS"`, "kvroute itself"},
		{demo.AnyNetwork, `"address":"` + adminAt + `"`, ""},
	} {
		d := spawn(t, "kvroute", "serve", "--worker-networks", c.networks, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
		bus := d.At.NATS[strings.LastIndexAny(d.At.NATS, "/@")+1:]
		record := strings.NewReplacer("HTTP", d.At.HTTP, "EXTPROC", d.At.Extproc, "NATS", bus).Replace(c.record)
		var text string
		eventually(t, "the registry is not there", func() bool {
			var resp *http.Response
			resp, text = whole(t, "POST", "http://"+d.At.HTTP+"/v1/workers", `{"name":"a","models":["m"],`+record+`}`, http.Header{"Content-Type": {"application/json"}})
			return resp.StatusCode != http.StatusServiceUnavailable
		})
		if taken := strings.Contains(text, `"worker_id"`); taken != (c.want == "") || !strings.Contains(text, c.want) {
			t.Errorf("%s with --worker-networks %q: %s; want %q", record, c.networks, text, c.want)
		}
		d.Stop()
	}
	if n := quit.Load(); n != 0 {
		t.Errorf("kvroute called another program %d times", n)
	}
}

// Prompts go only to the worker whose token ids kvroute requests, and do not follow its redirects.
func TestPromptsDoNotFollowRedirects(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	var elsewhere, asked atomic.Int32
	other := newLoopback(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	worker := newLoopback(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		http.Redirect(w, r, other+r.URL.Path, http.StatusTemporaryRedirect)
	}))
	file := writeFile(t, fmt.Sprintf("version: 1\nworkers:\n- {name: a, address: %q, models: [sim, other], model_card: kvroute-sim, block_size: 16}\n", strings.TrimPrefix(worker, "http://")))
	c := spawn(t, "kvroute", "serve", "--config", file, "--verify-tokenizer", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
	for _, path := range []string{"/v1/best_worker", "/v1/generate"} {
		body := `{"model":"sim","request_id":"r` + path[4:] + `","messages":[{"role":"user","content":"a secret that nobody else may read, of more than one block of tokens"}]}`
		before := asked.Load()
		_, text := whole(t, "POST", "http://"+c.At.HTTP+path, body, http.Header{"Content-Type": {"application/json"}})
		if asked.Load() == before && path == "/v1/generate" {
			t.Errorf("%s: the worker was not asked: %s", path, text)
		}
	}
	eventually(t, "the worker is not asked for ids", func() bool { return asked.Load() >= 2 })
	if n := elsewhere.Load(); n != 0 {
		t.Errorf("%d calls went to another address", n)
	}
}
