// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// The tests of this file have engines without knowledge of kvroute: they publish on ZeroMQ sockets
// like vLLM and SGLang.

// bareEngine starts such an engine.
func bareEngine(t *testing.T, name string, flags ...string) *demo.Child {
	t.Helper()
	return spawn(t, name, append([]string{
		"engine", "--name", name, "--listen", "127.0.0.1:0", "--nats-url", "", "--kv-events", "zmq", "--speed", "50",
	}, flags...)...)
}

func spawn(t *testing.T, name string, args ...string) *demo.Child {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	c, err := demo.Start(t.Context(), t.TempDir(), name, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Stop()
		if t.Failed() {
			t.Logf("%s's log:\n%s", name, c.LastLines())
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return c
}

// serveFile starts a kvroute with a configuration file and its own bus.
func serveFile(t *testing.T, file string) *demo.Child {
	t.Helper()
	return spawn(t, "kvroute", "serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
}

// emptyBus starts NATS for processes that the test starts, and connects to it.
func emptyBus(t *testing.T) (*bus.Server, *nats.Conn) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	bus, err := startNATS("127.0.0.1:0", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(bus.Stop)
	nc, err := nats.Connect(bus.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return bus, nc
}

// complete requests a completion of a prompt directly from an engine.
func complete(t *testing.T, e *demo.Child, prompt string) {
	t.Helper()
	resp, body := whole(t, http.MethodPost, "http://"+e.At.HTTP+"/v1/completions",
		fmt.Sprintf(`{"model":"sim","max_tokens":2,"prompt":%q}`, strings.Repeat(prompt+" ", 40)), nil)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d: %s", resp.StatusCode, body)
	}
}

// knows waits until the router knows as many blocks of each engine as the engine caches.
func knows(t *testing.T, d *demonstration, atLeast int, engines ...*demo.Child) {
	t.Helper()
	eventually(t, "the router does not hear of all blocks", func() bool {
		indexed := map[string]int{}
		for _, w := range workers(t, d) {
			indexed[w.Name] = w.CachedBlocks
		}
		for _, e := range engines {
			if n := cachedBlocks(t, e); n != indexed[e.Name] || n < atLeast {
				return false
			}
		}
		return true
	})
}

func cachedBlocks(t *testing.T, e *demo.Child) (n int) {
	t.Helper()
	_, text := get(t, "http://"+e.At.HTTP+"/metrics")
	_, text, _ = strings.Cut(text, "\nsim:cached_blocks{")
	_, text, ok := strings.Cut(text, "} ")
	if _, err := fmt.Sscan(text, &n); !ok || err != nil {
		t.Fatalf("%s does not say how many blocks it has", e.Name)
	}
	return n
}

// A static worker needs only an address: the engine reports the addresses of its event sockets.
func TestEventsStraightFromAStaticEngine(t *testing.T) {
	t.Parallel() // mostly waits
	a, b := bareEngine(t, "a", "--block-hash", "vllm"), bareEngine(t, "b", "--kv-events-format", "sglang", "--block-hash", "sglang", "--kv-events-drop-every", "1000")
	complete(t, a, "before anybody listens")
	file := writeFile(t, fmt.Sprintf("version: 1\nworkers:\n- {name: a, address: %q, models: [sim], events: {transport: zmq}}\n- {name: b, address: %q, models: [sim], events: {transport: zmq}}\n", a.At.HTTP, b.At.HTTP))
	d := &demonstration{demo.Stack{Router: serveFile(t, file)}}
	eventually(t, "the sockets are not found", func() bool {
		_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
		return strings.Contains(text, `kvroute_events_ranks{feed="zmq",state="ok"} 2`)
	})
	complete(t, b, "something else")
	knows(t, d, 5, a, b)
	// A restarted engine has an empty cache and sends no event about it.
	if resp, body := whole(t, http.MethodPost, "http://"+a.At.HTTP+"/sim/restart", "", nil); resp.StatusCode != http.StatusOK {
		t.Fatal(body)
	}
	knows(t, d, 0, a)
	complete(t, a, "after the restart")
	knows(t, d, 5, a, b)
}

// The events of workers that register with their sockets are read there, and lost messages are
// requested again.
func TestEventsStraightFromRegisteredEngines(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 2, []string{"--speed", "50", "--kv-events", "zmq", "--kv-events-drop-every", "3"})
	hits(t, d)
	_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
	if !strings.Contains(text, `kvroute_events_repairs_total{feed="zmq",what="replayed"}`) || strings.Contains(text, `kvroute_events_received_total{feed="nats",outcome="accepted"}`) {
		t.Error("no events were replayed, or some came over the bus")
	}
}

// hits sends conversations twice: the second time the cache is known.
func hits(t *testing.T, d *demonstration) {
	t.Helper()
	for i := range 6 {
		content := fmt.Sprintf("%d %s", i, strings.Repeat("You know all about sockets. ", 40))
		if resp, body := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil); resp.StatusCode != 200 {
			t.Fatalf("status %d: %s", resp.StatusCode, body)
		}
		// The message with these events may be lost on purpose; the next message shows the gap.
		eventually(t, "the second time is no hit", func() bool {
			again, _ := reply(t, d, "POST", chatPath, chatBody(content+fmt.Sprint(time.Now()), 4, false), nil)
			return again.Header.Get("X-Dynamo-Overlap-Blocks") != "0" && again.Header.Get("X-Dynamo-Reason") == "kv"
		})
	}
}

// startBeside starts bare engines with a sidecar each, and kvroute behind Envoy.
func startBeside(t *testing.T, engines int, engine, publish []string) (d *demonstration, sidecars []*demo.Child) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	path, err := envoytest.Find()
	if err != nil {
		t.Fatal(err)
	}
	d = &demonstration{demo.Stack{Dir: t.TempDir(), EnvoyPath: path, Workers: engines, Model: "sim"}}
	if d.Bus, err = startNATS("127.0.0.1:0", ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Engines = nil // the engines end by themselves
		d.Stop()
		http.DefaultClient.CloseIdleConnections()
	})
	for i := range engines {
		name := fmt.Sprint("worker-", i+1)
		e := bareEngine(t, name, engine...)
		d.Engines = append(d.Engines, e)
		sidecars = append(sidecars, spawn(t, "publish-"+name, append([]string{
			"publish", "--name", name, "--engine-address", e.At.HTTP, "--nats-url", d.Bus.URL(), "--model-card", enginesim.ModelCard, "--http-address", "127.0.0.1:0",
		}, publish...)...))
	}
	if err := d.StartRouter(t.Context()); err != nil {
		t.Fatal(err)
	}
	return d, sidecars
}

func TestPublishBesideEngines(t *testing.T) {
	t.Parallel() // mostly waits
	d, sidecars := startBeside(t, 2, []string{"--block-hash", "random"}, nil)
	hits(t, d)
	knows(t, d, 1, d.Engines...)
	// A restart of the engine.
	if resp, body := whole(t, http.MethodPost, "http://"+d.Engines[0].At.HTTP+"/sim/restart", "", nil); resp.StatusCode != http.StatusOK {
		t.Fatal(body)
	}
	knows(t, d, 0, d.Engines...)
	complete(t, d.Engines[0], "after the restart")
	hits(t, d)
	knows(t, d, 1, d.Engines...)
	_, text := get(t, "http://"+sidecars[0].At.HTTP+"/metrics")
	for _, want := range []string{`kvroute_events_ranks{feed="zmq",state="ok"} 1`, `kvroute_events_repairs_total{feed="zmq",what="restart"} 1`, `kvroute_source_ranks{state="ok"} 1`, `kvroute_source_news_total{kind="restart"} 1`, "kvroute_publish_buffered_bytes 0"} {
		if !strings.Contains(text, want) {
			t.Errorf("the sidecar's metrics have no %s", want)
		}
	}
	// A sidecar that ends removes its worker.
	sidecars[0].Stop()
	eventually(t, "the worker does not leave", func() bool { return len(workers(t, d)) == 1 })
	// A sidecar does not keep the worker of a dead engine registered.
	kill(t, d.Engines[1])
	eventually(t, "the worker of a dead engine is healthy", func() bool { return workers(t, d)[0].Health != "healthy" })
}

// An engine that returns unchanged is healthy again. If it returns with another model, its
// registration is wrong, so its sidecar ends and removes the worker.
func TestPublishEndsWhenAnotherEngineIsThere(t *testing.T) {
	t.Parallel() // mostly waits
	bus, _ := emptyBus(t)
	var sick atomic.Bool
	var model atomic.Value
	model.Store("m")
	engine := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case sick.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		case r.URL.Path == "/health":
		case r.URL.Path == "/v1/models":
			fmt.Fprintf(w, `{"data":[{"id":%q}]}`, model.Load())
		default:
			http.NotFound(w, r)
		}
	})
	p := spawn(t, "publish", "publish", "--name", "a", "--engine-address", engine, "--nats-url", bus.URL(), "--zmq-endpoint", "tcp://127.0.0.1:9", "--block-size", "16")
	d := &demonstration{demo.Stack{Router: spawn(t, "kvroute", "serve", "--nats-url", bus.URL(), "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0",
		"--degraded-after", "3s", "--unhealthy-after", "3s")}}
	is := func(want string) func() bool {
		return func() bool {
			var all strings.Builder
			for _, w := range workers(t, d) {
				all.WriteString(w.Model + " " + w.Health)
			}
			return all.String() == want
		}
	}
	eventually(t, "it is not registered", is("m healthy"))
	sick.Store(true)
	eventually(t, "it is still healthy", is("m unhealthy"))
	sick.Store(false)
	eventually(t, "it is not healthy again", is("m healthy"))
	sick.Store(true)
	eventually(t, "it is still healthy", is("m unhealthy"))
	model.Store("n")
	sick.Store(false)
	eventually(t, "the old model is still there", is(""))
	if said := p.LastLines(); !strings.Contains(said, "models [n], before [m]") {
		t.Errorf("it says %s", said)
	}
}

// Blocks of another size are joined or split, and refused if neither is possible.
func TestPublishWithOtherBlockSizes(t *testing.T) {
	t.Parallel() // mostly waits
	for _, c := range []struct {
		engine, routers string
		state           indexer.State
		factor          int // blocks of the routers for a hundred of the engine
	}{{"16", "32", "ok", 50}, {"64", "16", "ok", 400}, {"24", "16", "block_size_mismatch", 0}} {
		t.Run(c.engine+" as "+c.routers, func(t *testing.T) {
			bus, _ := emptyBus(t)
			e := bareEngine(t, "a", "--block-size", c.engine)
			spawn(t, "publish", "publish", "--name", "a", "--engine-address", e.At.HTTP, "--nats-url", bus.URL(), "--block-size", c.routers)
			d := &demonstration{demo.Stack{Router: spawn(t, "kvroute", "serve", "--nats-url", bus.URL(), "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")}}
			eventually(t, "the worker does not register", func() bool { return len(workers(t, d)) == 1 })
			complete(t, e, "some prompt that is long enough for blocks of any size")
			eventually(t, "the blocks are not as they should be", func() bool {
				if workers(t, d)[0].KVEvents != c.state {
					return false
				}
				return workers(t, d)[0].CachedBlocks == cachedBlocks(t, e)*c.factor/100
			})
			if got := workers(t, d)[0].BlockSize; fmt.Sprint(got) != c.routers {
				t.Errorf("the worker has blocks of %d tokens", got)
			}
		})
	}
}

// SGLang reports its role and the port of its bootstrap server. A flag takes precedence.
func TestPublishRegistersTheRole(t *testing.T) {
	t.Parallel() // mostly waits
	bus, nc := emptyBus(t)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		path, report, flag string
		role               router.Role
		bootstrap          string
	}{
		"prefill":    {"/get_server_info", `"disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001,`, "", router.Prefill, "127.0.0.1:9001"},
		"decode":     {"/server_info", `"disaggregation_mode":"decode","disaggregation_bootstrap_port":9001,`, "", router.Decode, ""},
		"both parts": {"/server_info", `"disaggregation_mode":"null","disaggregation_bootstrap_port":8998,`, "", router.Aggregated, ""},
		"silent":     {"/server_info", "", "", "", ""},
		"flag":       {"/server_info", "", "both", router.Both, ""},
		"other flag": {"/server_info", `"disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001,`, "both", router.Both, "127.0.0.1:9001"},
	} {
		engine := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/health":
			case "/v1/models":
				fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			case c.path:
				fmt.Fprintf(w, `{%s"kv_events":{"endpoint_host":"*","endpoint_port_base":9,"block_size":16}}`, c.report)
			default:
				http.NotFound(w, r)
			}
		})
		// It is ready when the worker is registered.
		spawn(t, "publish-"+name, "publish", "--name", name, "--engine-address", engine, "--nats-url", bus.URL(), "--role", c.flag)
		bucket, err := js.KeyValue(t.Context(), wire.Scope{}.Bucket("workers"))
		if err != nil {
			t.Fatal(err)
		}
		entry, err := bucket.Get(t.Context(), wire.WorkerKey(wire.WorkerID(name)))
		if err != nil {
			t.Fatal(err)
		}
		record, err := fleet.ParseRecord(entry.Value())
		if err != nil || record.Role != c.role || record.Bootstrap != c.bootstrap {
			t.Errorf("%s: role %q, bootstrap %q, %v", name, record.Role, record.Bootstrap, err)
		}
	}
}

func TestBadPublishFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--engine-address here":      `engine-address is "here"`,
		"--engine abacus":            `engine is "abacus"`,
		"--role boss":                `role is "boss"`,
		"--advertise there":          `advertise is "there"`,
		"--dp-size many":             "",
		"--log-level loud":           `log-level is "loud"`,
		"--zmq-endpoint x --nothing": "",
		"--nats-url=":                "nowhere to publish",
	} {
		status, _, stderr := runs(t, append([]string{"publish", "--nats-url", "nats://127.0.0.1:1"}, strings.Fields(args)...)...)
		if status == 0 || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %s; want %s", args, status, stderr, want)
		}
	}
}

// A router that is killed requests the missing events from an engine's own socket.
func TestARestartAsksEnginesForRangesOnly(t *testing.T) {
	t.Parallel() // mostly waits
	e := bareEngine(t, "a", "--block-hash", "vllm")
	file := writeFile(t, fmt.Sprintf("version: 1\nworkers:\n- {name: a, address: %q, models: [sim], events: {transport: zmq}}\n", e.At.HTTP))
	dir := t.TempDir()
	d := &demonstration{}
	serve := func() {
		d.Router = spawn(t, "kvroute", "serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0",
			"--nats-listen", "127.0.0.1:0", "--state-dir", dir, "--state-interval", "50ms")
	}
	replayed := func() int { return d.counter(t, "kvroute_events_repairs_total", `what="replayed"`) }
	for i := range 10 {
		complete(t, e, fmt.Sprint(i, " before anybody listens"))
	}
	serve()
	knows(t, d, 50, e)
	all := replayed()
	before := time.Now()
	eventually(t, "the state is not saved", func() bool {
		info, err := os.Stat(filepath.Join(dir, wire.Scope{}.Bucket(sourceFile)))
		return err == nil && info.ModTime().After(before.Add(100*time.Millisecond))
	})
	kill(t, d.Router)
	complete(t, e, "while nobody listens")
	serve()
	knows(t, d, 55, e)
	if n := replayed(); n == 0 || n*4 > all {
		t.Errorf("after a crash %d batches were sent again; %d at first", n, all)
	}
	if n := d.counter(t, "kvroute_events_repairs_total", `what="restored"`); n != 1 {
		t.Errorf("%d ranks were restored, want 1", n)
	}
	// The engine was replaced meanwhile.
	d.Router.Stop()
	if resp, body := whole(t, http.MethodPost, "http://"+e.At.HTTP+"/sim/restart", "", nil); resp.StatusCode != http.StatusOK {
		t.Fatal(body)
	}
	complete(t, e, "after the restart")
	serve()
	knows(t, d, 5, e)
	complete(t, e, "heard again")
	knows(t, d, 10, e)
}

// The heartbeats of a sidecar report its engine's load, and so does kv_metrics.
func TestHeartbeatsCarryTheEnginesLoad(t *testing.T) {
	t.Parallel() // mostly waits
	bus, nc := emptyBus(t)
	id := wire.WorkerID("a")
	beats, err := nc.SubscribeSync(wire.Scope{}.Own("heartbeat", wire.WorkerKey(id)))
	if err != nil {
		t.Fatal(err)
	}
	used, err := nc.SubscribeSync(wire.Scope{}.Topic(events.LoadTopic))
	if err != nil {
		t.Fatal(err)
	}
	e := bareEngine(t, "a", "--speed", "0.05", "--num-gpu-blocks", "500")
	spawn(t, "publish", "publish", "--name", "a", "--engine-address", e.At.HTTP, "--nats-url", bus.URL())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body := fmt.Sprintf(`{"model":"sim","max_tokens":4000,"stream":true,"prompt":%q}`, strings.Repeat("a long one ", 100))
	resp, err := send(t, ctx, http.MethodPost, "http://"+e.At.HTTP+"/v1/completions", body, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for deadline := time.Now().Add(process.Patience); ; {
		m, err := beats.NextMsg(time.Until(deadline))
		if err != nil {
			t.Fatalf("no heartbeat says that a request is running: %v", err)
		}
		var h fleet.Heartbeat
		if err := json.Unmarshal(m.Data, &h); err != nil || h.WorkerID != id {
			t.Fatalf("%s: %v", m.Data, err)
		}
		if h.Running == 1 && h.KVUsedBlocks > 10 && math.Abs(h.KVUtilization*500-float64(h.KVUsedBlocks)) <= 1 {
			break
		}
	}
	m, err := used.NextMsg(process.Patience)
	if err != nil {
		t.Fatal(err)
	}
	if env, err := events.DecodeEnvelope(m.Data); err != nil || env.Topic != events.LoadTopic || !strings.HasPrefix(string(env.Payload), string(events.AppendUsedBlocks(nil, id, 0, 0)[:20])) {
		t.Errorf("%+v, %v", env, err)
	}
}
