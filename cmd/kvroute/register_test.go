// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
)

// A worker without NATS registers over HTTP and reports its cached prefixes and load in heartbeats.
func TestWorkersRegisterOverHTTP(t *testing.T) {
	t.Parallel()
	c, err := demo.Start(t.Context(), t.TempDir(), "kvroute", "serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	call := func(method, path, body string) (int, string) {
		t.Helper()
		resp, text := whole(t, method, "http://"+c.At.HTTP+path, body, nil)
		return resp.StatusCode, text
	}
	expect := func(method, path, body string, status int, part string) {
		t.Helper()
		if got, text := call(method, path, body); got != status || !strings.Contains(text, part) {
			t.Errorf("%s %s: %d %s, want %d with %q", method, path, got, text, status, part)
		}
	}
	eventually(t, "the registry is not there", func() bool {
		status, _ := call("POST", "/v1/workers", `{"name":"first","address":"127.0.0.1:9001","models":["m"],"block_size":16,"total_kv_blocks":100,"events":{"transport":"none"}}`)
		return status == http.StatusCreated
	})
	expect("POST", "/v1/workers/second/heartbeat", `{}`, 404, "not registered")
	expect("POST", "/v1/workers", `{"name":"second","address":"127.0.0.1:9002","models":["m"],"block_size":16,"total_kv_blocks":100,"events":{"transport":"none"}}`, 201, `"worker_id":`)
	expect("POST", "/v1/workers", `{"name":"third","address":"127.0.0.1","models":["m"]}`, 400, "address")
	expect("POST", "/v1/workers", `{"nam":"third"}`, 400, "nam")
	expect("POST", "/v1/workers/second/heartbeat", `{"batch_size":1,"kv_used_blocks":90,"ts_ms":1}`, 200, `"worker_id":`)
	ids := make([]int, 40)
	for i := range ids {
		ids[i] = i + 1
	}
	prompt, _ := json.Marshal(ids)
	var best struct {
		Address string `json:"address"`
	}
	// The reported load counts.
	expect("POST", "/busy_threshold", `{"model":"m","active_decode_blocks_threshold":0.5}`, 200, "")
	_, text := call("POST", "/v1/best_worker", fmt.Sprintf(`{"model":"m","token_ids":%s}`, prompt))
	if err := json.Unmarshal([]byte(text), &best); err != nil || best.Address != "127.0.0.1:9001" {
		t.Errorf("%s, want the first worker, since the second is full", text)
	}
	// A rank's load that the engine publishes on the bus overrides the load of a heartbeat, which
	// may be unknown.
	nc, err := nats.Connect(c.At.NATS)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	eventually(t, "what is said on the bus is not known", func() bool {
		err := nc.Publish(wire.Scope{Namespace: "kvroute", Component: "workers", Endpoint: "generate"}.Topic(events.LoadTopic), events.AppendEnvelope(nil, events.Envelope{
			PublisherID: 5, Topic: events.LoadTopic, Payload: events.AppendUsedBlocks(nil, wire.WorkerID("first"), 0, 60),
		}))
		return err == nil && strings.Contains(workersText(t, c), `"engine_blocks":60,`)
	})
	expect("POST", "/v1/workers/first/heartbeat", `{}`, 200, `"worker_id":`)
	if text := workersText(t, c); !strings.Contains(text, `"engine_blocks":60,`) {
		t.Errorf("a heartbeat that says nothing of the load: %s", text)
	}
	expect("DELETE", "/v1/workers/second", "", 200, `"worker_id":`)
	expect("DELETE", "/v1/workers/second", "", 404, "not registered")
	_, text = call("GET", "/v1/workers", "")
	if gone, there, found := strings.Cut(text, `"workers":`); !found || strings.Contains(there, "second") || !strings.Contains(gone, `"state":"removed"`) {
		t.Errorf("the second worker is still there, or not among the removed ones: %s", text)
	}
}

// Settings decide how long a worker may be silent.
func TestAgesAreSettings(t *testing.T) {
	t.Parallel()
	for flag, value := range map[string]string{"--degraded-after": "2s", "--unhealthy-after": "7s", "--expired-after": "14s"} {
		if _, _, err := readConfig("serve", []string{flag, value}, nil); err == nil || !strings.Contains(err.Error(), flag[2:]+` is "`+value+`", want `) {
			t.Errorf("%s %s: error %v", flag, value, err)
		}
	}
	c, err := demo.Start(t.Context(), t.TempDir(), "kvroute", "serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0",
		"--degraded-after", "3s", "--unhealthy-after", "3s", "--expired-after", "1h")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	var begin time.Time
	eventually(t, "the registry is not there", func() bool {
		begin = time.Now()
		resp, _ := whole(t, "POST", "http://"+c.At.HTTP+"/v1/workers", `{"name":"a","address":"127.0.0.1:9001","models":["m"]}`, nil)
		return resp.StatusCode == http.StatusCreated
	})
	eventually(t, "its health does not change", func() bool { return !strings.Contains(workersText(t, c), `"health":"healthy"`) })
	if took := time.Since(begin); took < 3*time.Second || !strings.Contains(workersText(t, c), `"health":"unhealthy"`) {
		t.Errorf("after %v it is %s", took, workersText(t, c))
	}
}

// workersText returns kvroute's list of workers.
func workersText(t *testing.T, c *demo.Child) string {
	t.Helper()
	_, text := get(t, "http://"+c.At.HTTP+"/v1/workers")
	return text
}

// A worker of the configuration that fails its probes gets no requests, and gets requests again once
// it answers. Its load comes from its engine's metrics.
func TestStaticWorkersAreProbed(t *testing.T) {
	t.Parallel()
	var sick atomic.Bool
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case sick.Load():
			w.WriteHeader(http.StatusInternalServerError)
		case r.URL.Path == "/metrics":
			fmt.Fprint(w, "vllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.25\n")
		case r.URL.Path != "/health":
			http.NotFound(w, r)
		}
	}))
	defer engine.Close()
	file := writeFile(t, fmt.Sprintf(`version: 1
workers:
- {name: a, address: "%s", models: [m], block_size: 16, total_kv_blocks: 1000, health: {interval: 100ms}, metrics: {interval: 100ms}}
- {name: b, address: "localhost:9", models: [m], block_size: 16}
`, strings.TrimPrefix(engine.URL, "http://")))
	c, err := demo.Start(t.Context(), t.TempDir(), "kvroute", "serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0",
		"--degraded-after", "3s", "--unhealthy-after", "3s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	if _, text := get(t, "http://"+c.At.HTTP+"/v1/workers"); !strings.Contains(text, `"b@127.0.0.1:9"`) {
		t.Errorf("a worker with a name for its address is not there: %s", text)
	}
	health := func() (state string, used int) {
		resp, err := http.Get("http://" + c.At.HTTP + "/v1/workers")
		if err != nil {
			return "", 0
		}
		defer resp.Body.Close()
		var all struct {
			Workers []struct {
				Name   string `json:"name"`
				Health string `json:"health"`
				Used   int    `json:"engine_blocks"`
			} `json:"workers"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&all); err != nil {
			return "", 0
		}
		for _, w := range all.Workers {
			if w.Name == "a" {
				return w.Health, w.Used
			}
		}
		return "", 0
	}
	eventually(t, "its load is not known", func() bool { state, used := health(); return state == "healthy" && used == 250 })
	sick.Store(true)
	if err := process.Until(t.Context(), process.Patience, "it is still healthy", func(context.Context) bool {
		state, _ := health()
		return state == "unhealthy"
	}); err != nil {
		t.Fatal(err)
	}
	sick.Store(false)
	eventually(t, "it is not healthy again", func() bool { state, _ := health(); return state == "healthy" })
}

// Workers of the configuration without a setting of health are probed at /health, also those of a DNS
// name, unless they say none. A worker that says 503 is never healthy; one that has no such path is.
func TestConfiguredWorkersAreProbedByDefault(t *testing.T) {
	t.Parallel()
	port := func(status int) string {
		engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
		t.Cleanup(engine.Close)
		return strings.TrimPrefix(engine.URL, "http://127.0.0.1")
	}
	c := child(t, "kvroute", "serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--config", writeFile(t, fmt.Sprintf(`version: 1
workers:
- {name: good, address: "127.0.0.1%s", models: [m], block_size: 16}
- {name: loads, address: "127.0.0.1%s", models: [m], block_size: 16}
- {name: named, address: "localhost%s", models: [m], block_size: 16}
- {name: pathless, address: "127.0.0.1%s", models: [m], block_size: 16}
- {name: quiet, address: "127.0.0.1:9", models: [m], block_size: 16, health: none, metrics: none}
`, port(http.StatusOK), port(http.StatusServiceUnavailable), port(http.StatusServiceUnavailable), port(http.StatusNotFound))))
	want := map[string]string{"good": "healthy", "loads": "starting", "named": "starting", "pathless": "healthy", "quiet": "healthy"}
	got := map[string]string{}
	eventually(t, "the workers are in other states", func() bool {
		var all struct {
			Workers []struct {
				Name, Health string
			} `json:"workers"`
		}
		if json.Unmarshal([]byte(workersText(t, c)), &all) != nil {
			return false
		}
		for _, w := range all.Workers {
			name, _, _ := strings.Cut(w.Name, "@")
			got[name] = w.Health
		}
		return maps.Equal(got, want)
	})
}
