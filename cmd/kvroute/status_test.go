// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// Envoy's filter points to a closed port, so the pool serves the clients. A minute of Envoy's counters
// shows it, and the doctor names the fault.
func TestTheDoctorFindsAnUnusedKvroute(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	served := startHTTP(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"choices":[]}`) })
	if err := r.SetWorker(router.WorkerInfo{ID: 1, Name: "gpu-0", Address: netip.MustParseAddrPort(served), Models: []string{"sim"}, BlockSize: 16, NoEvents: true}); err != nil {
		t.Fatal(err)
	}
	config, err := demo.Render(envoy.Config{
		ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", ExtProc: []string{fmt.Sprint("127.0.0.1:", fixtures.HoldPort(t))}, Pool: []string{served},
	})
	if err != nil {
		t.Fatal(err)
	}
	e, err := envoytest.Start(t.Context(), envoytest.Options{Config: config})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Stop() })
	clock := time.Now()
	w, err := envoy.NewWatch(envoy.WatchConfig{
		URL: e.AdminURL(), ExtProc: "127.0.0.1:9002", Client: reach.Networks{}.Client(), Now: func() time.Time { return clock },
		Counts: func() (uint64, uint64) { return 0, 0 }, Peers: func() int { return 0 }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	url := newLoopback(t, api.New(api.Config{
		Router: r, Metrics: http.NotFoundHandler(), Replica: func() api.Replica { return api.Replica{Bus: true, Envoy: new(w.State())} },
	}))
	pass := func(n, requests int) {
		t.Helper()
		for range n {
			for range requests {
				if resp, text := whole(t, http.MethodPost, e.URL()+chatPath, chatBody("hello", 2, false), nil); resp.StatusCode != http.StatusOK {
					t.Fatalf("status %d: %s", resp.StatusCode, text)
				}
			}
			clock = clock.Add(envoy.WatchEvery)
			w.Read(t.Context())
		}
	}
	pass(1, 3)
	if status, out := examine(t, "--url", url); status != 0 {
		t.Fatalf("before anything is known the doctor ends with %d:\n%s", status, out)
	}
	pass(7, 2)
	status, out := examine(t, "--url", url)
	for _, want := range []string{
		"Envoy sent no request to kvroute for 60 s while the pool served 12; check that --extproc in Envoy's configuration names kvroute, which listens at 127.0.0.1:9002",
		"Envoy continued without kvroute 12 times in the last 60 s (failure_mode_allowed; 0 message timeouts, 12 failed streams)",
	} {
		if status != 1 || !strings.Contains(out, want) {
			t.Errorf("the doctor ends with %d and does not print %q:\n%s", status, want, out)
		}
	}
	if err := e.Stop(); err != nil {
		t.Fatal(err)
	}
	pass(1, 0)
	if status, out := examine(t, "--url", url); status != 1 || !strings.Contains(out, "Envoy's admin endpoint does not answer at "+e.AdminURL()+": dial tcp ") {
		t.Errorf("the doctor of a stopped Envoy ends with %d:\n%s", status, out)
	}
}

// A running kvroute reads its Envoy's counters, and notices that Envoy cannot reach it. It logs its
// status when it has started.
func TestKvrouteNoticesABypass(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 1, []string{"--speed", "20"})
	d.Unrouted = true
	d.EnvoyConfig.ExtProc = []string{fmt.Sprint("127.0.0.1:", fixtures.HoldPort(t))}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Stop)
	if err := d.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.StartRouter(t.Context(), "--envoy-admin", d.Envoy.AdminURL()); err != nil {
		t.Fatal(err)
	}
	wants := []string{"Envoy continued without kvroute "}
	if fixtures.Long() {
		wants = append(wants, "Envoy sent no request to kvroute for ")
	}
	for _, want := range wants {
		eventually(t, "the doctor does not find that "+want, func() bool {
			d.send(t, "hello", false)
			status, out := examine(t, apis(d.Router)...)
			return status == 1 && strings.Contains(out, want)
		})
	}
	var r api.Replica
	_, text := get(t, "http://"+d.Router.At.HTTP+"/v1/replica")
	if err := json.Unmarshal([]byte(text), &r); err != nil || r.Envoy == nil || r.Envoy.Counts["failure_mode_allowed"] == 0 || r.Envoy.Counts["requests"] != 0 {
		t.Errorf("GET /v1/replica: %v\n%s", err, text)
	}
	log := d.Router.LastLines()
	for _, want := range []string{
		"fault=bypassed", `msg=status state=ready listeners="extproc ` + d.Router.At.Extproc + ", http " + d.Router.At.HTTP + `" workers="1 NATS healthy" models="sim `, `events_heard=worker-1 events_not_heard=none replicas=1`,
	} {
		if !strings.Contains(log, want) {
			t.Errorf("no %q in the log:\n%s", want, log)
		}
	}
}

// kvroute compares its settings with those of a running Envoy.
func TestSettingsAreComparedWithEnvoys(t *testing.T) {
	t.Parallel() // mostly waits
	for _, c := range []struct {
		failover envoy.Failover
		choice   string
		flags    []string
		wants    []string // of the fault; none means that all fits
	}{
		{failover: envoy.Composite, choice: "header"},
		{failover: envoy.List, choice: "list"},
		{failover: envoy.NoFailover, choice: "none"},
		{envoy.NoFailover, "header", []string{"--prefill-timeout", "2m", "--max-body-bytes", "1024"}, []string{
			"max_message_timeout is 1m0s, but a request may wait 2m0.5s", "the limit of request bodies is 16777216 bytes, but that of max-body-bytes is 1024",
			"no cluster reads the header x-dynamo-worker-fallback",
		}},
	} {
		t.Run(c.failover+" and "+c.choice, func(t *testing.T) {
			t.Parallel()
			d := newStack(t, 0, nil)
			d.EnvoyConfig.Failover, d.EnvoyConfig.Pool = c.failover, []string{"127.0.0.1:1"}
			d.Unrouted = true
			if err := d.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(d.Stop)
			if err := d.StartRouter(t.Context()); err != nil {
				t.Fatal(err)
			}
			flags := append([]string{"--second-choice", c.choice, "--envoy-admin", d.Envoy.AdminURL()}, c.flags...)
			if err := d.StartRouter(t.Context(), flags...); err != nil {
				t.Fatal(err)
			}
			var r api.Replica
			eventually(t, "Envoy is not read", func() bool {
				_, text := get(t, "http://"+d.Router.At.HTTP+"/v1/replica")
				return json.Unmarshal([]byte(text), &r) == nil && r.Envoy != nil && !r.Envoy.Read.IsZero()
			})
			text := ""
			for _, f := range r.Envoy.Faults {
				if f.What == "settings" {
					text = f.Text
				}
			}
			if (text == "") != (len(c.wants) == 0) {
				t.Errorf("the fault is %q", text)
			}
			for _, want := range c.wants {
				if !strings.Contains(text, want) {
					t.Errorf("the fault is %q, want %q", text, want)
				}
			}
		})
	}
}

// Without the address of Envoy's administration, kvroute warns of settings that need flags of `kvroute config envoy`.
func TestSettingsAreComparedWithTheBootstrap(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 0, nil)
	d.Unrouted, d.EnvoyConfig.Pool = true, []string{"127.0.0.1:1"}
	d.begin(t)
	const warning = "settings need flags of kvroute config envoy"
	if log := d.Router.LastLines(); strings.Contains(log, warning) {
		t.Errorf("the defaults do not fit:\n%s", log)
	}
	for flags, want := range map[string]string{
		"--decision-timeout 2s --max-body-bytes 1024": "message_timeout is 2s, but a decision may take 2s (decision-timeout); " +
			"the limit of request bodies is 16777216 bytes, but that of max-body-bytes is 1024",
		"--second-choice list":                 "a cluster reads one address from x-dynamo-worker, but second-choice=list writes several",
		"--second-choice list --mode-override": "",
	} {
		if err := d.StartRouter(t.Context(), strings.Fields(flags)...); err != nil {
			t.Fatal(err)
		}
		log := d.Router.LastLines()
		log = log[strings.LastIndex(log, "kvroute starts"):]
		if strings.Contains(log, warning) != (want != "") || !strings.Contains(log, want) {
			t.Errorf("%s: want %q in the log:\n%s", flags, want, log)
		}
	}
}

// The status is logged once for each change.
func TestStatusIsLoggedOnChange(t *testing.T) {
	var out bytes.Buffer
	now := []any{"state", "ready", "workers", "1 file healthy", "replicas", 1}
	check := onChange(slog.New(slog.NewTextHandler(&out, nil)), func() []any { return slices.Clone(now) })
	for range 3 {
		check()
	}
	now[5] = 2
	check()
	check()
	if n := strings.Count(out.String(), "\n"); n != 2 || !strings.HasSuffix(out.String(), `msg=status state=ready workers="1 file healthy" replicas=2`+"\n") {
		t.Errorf("%d lines:\n%s", n, out.String())
	}
}

func TestListed(t *testing.T) {
	names := strings.Fields("a b c d e f g h i j")
	for n, want := range map[int]string{0: "none", 1: "a", 8: "a, b, c, d, e, f, g, h", 9: "a, b, c, d, e, f, g, h and 1 more", 10: "a, b, c, d, e, f, g, h and 2 more"} {
		if got := listed(names[:n]); got != want {
			t.Errorf("%d names: %q, want %q", n, got, want)
		}
	}
}

// A worker whose engine publishes nothing at the sockets of its record is named.
func TestAnEngineWithoutSocketsIsNamed(t *testing.T) {
	file := t.TempDir() + "/kvroute.yaml"
	socket := fixtures.HoldPort(t)
	if err := os.WriteFile(file, fmt.Appendf(nil, "version: 1\nworkers:\n- {name: gpu-1, address: \"127.0.0.1:%d\", models: [m], block_size: 16, health: none, events: {transport: zmq, endpoint: \"tcp://127.0.0.1:%d\"}}\n", fixtures.HoldPort(t), socket), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := demo.Start(t.Context(), t.TempDir(), "kvroute", "serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	eventually(t, "the doctor does not name the worker", func() bool {
		status, out := examine(t, apis(c)...)
		return status == 1 && strings.Contains(out, "unhealthy: 1 fault: 1 replica, ") && strings.Contains(out, fmt.Sprintf("events of gpu-1: no event has come, although it should send some: kvroute predicts its cache; "+
			"kvroute reads tcp://127.0.0.1:%d; start vLLM with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:%[1]d\",\"topic\":\"kv-events\"}', or set", socket))
	})
	eventually(t, "the status does not name the worker", func() bool {
		return strings.Contains(c.LastLines(), "events_heard=none events_not_heard=gpu-1 ")
	})
}

// The feeds of workers that publish no events by configuration are neither heard nor missed.
func TestFeeds(t *testing.T) {
	heard, unheard := feeds([]router.WorkerState{
		{Name: "nats", KVEvents: "ok", Transport: "nats", BlockSize: 16},
		{Name: "suspect", KVEvents: "suspect", Transport: "zmq", BlockSize: 16},
		{Name: "zmq", KVEvents: "none", Transport: "zmq"},
		{Name: "sidecar", KVEvents: "none", Transport: "nats", BlockSize: 16},
		{Name: "unsure", KVEvents: "none", NeverHeard: true, BlockSize: 16, Worker: router.Worker{DPRank: 1}},
		{Name: "none", KVEvents: "none", Transport: "none", BlockSize: 16},
		{Name: "blockless", KVEvents: "none", Transport: "nats"},
		{Name: "group", KVEvents: "summary", Group: "east", BlockSize: 16},
	})
	if got := fmt.Sprint(heard, unheard); got != "[nats suspect] [zmq sidecar unsure/1]" {
		t.Errorf("heard and not heard: %s", got)
	}
}
