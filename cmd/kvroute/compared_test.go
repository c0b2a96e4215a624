// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/natstest"
)

// faultsOf returns the names of each worker's faults, as GET /v1/workers shows them.
func faultsOf(t *testing.T, kvroute *demo.Child) map[string]string {
	t.Helper()
	var answer struct {
		Workers []struct {
			Name   string
			Faults []struct{ What, Text string }
		}
	}
	if _, text := get(t, "http://"+kvroute.At.HTTP+"/v1/workers"); json.Unmarshal([]byte(text), &answer) != nil {
		t.Fatal(text)
	}
	faults := map[string]string{}
	for _, w := range answer.Workers {
		for _, f := range w.Faults {
			faults[w.Name] = strings.TrimSpace(faults[w.Name] + " " + f.What)
		}
	}
	return faults
}

// engineAt is an engine that reports a model and a block size.
func engineAt(t *testing.T, model func() string, length, blockSize int) string {
	t.Helper()
	return startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/models":
			fmt.Fprintf(w, `{"data":[{"id":%q,"max_model_len":%d}]}`, model(), length)
		case "/metrics":
			fmt.Fprintf(w, "vllm:cache_config_info{block_size=\"%d\"} 1.0\n", blockSize)
		case "/health":
		default:
			http.NotFound(w, r)
		}
	})
}

// kvroute serve compares its workers with their engines. Each fault is in /v1/workers, and once in the
// log when it begins and when it ends.
func TestWorkersAreCompared(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	sockets, err := enginesim.NewSockets(enginesim.SocketsConfig{Endpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, sockets.Run)
	live, _ := sockets.Endpoints()
	var mended atomic.Bool
	sim := func() string { return "sim" }
	a := engineAt(t, func() string {
		if mended.Load() {
			return "sim"
		}
		return "llama"
	}, 8192, 32)
	b, c := engineAt(t, sim, 8192, 16), engineAt(t, sim, 4096, 16)
	const worker = "- {name: %s, address: %q, models: [sim], model_card: kvroute-sim, block_size: 16, events: {transport: zmq, endpoint: %q}}\n"
	file := writeFile(t, "version: 1\nworkers:\n"+
		fmt.Sprintf(worker, "a", a, "tcp://127.0.0.1:1")+
		fmt.Sprintf(worker, "b", b, live)+
		fmt.Sprintf(worker, "c", c, "tcp://"+relay(t, strings.TrimPrefix(live, "tcp://"))))
	k := spawn(t, "kvroute", "serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--worker-networks", demo.AnyNetwork)
	next := uint64(0)
	eventually(t, "there are other faults", func() bool {
		sockets.Publish(enginesim.Change{
			Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1000 + next}}}, Tokens: make([]uint32, 16),
		})
		next++
		f := faultsOf(t, k)
		return f["a"] == "block_size event_socket_refused model_not_served" && f["b"] == "same_events" && f["c"] == "max_model_len same_events"
	})
	// Two registered workers at one address.
	for _, name := range []string{"twin-1", "twin-2"} {
		eventually(t, "the worker is not registered", func() bool {
			resp, _ := whole(t, "POST", "http://"+k.At.HTTP+"/v1/workers", fmt.Sprintf(`{"name":%q,"address":"127.0.0.1:2","models":["sim"],"block_size":16}`, name), http.Header{"Content-Type": {"application/json"}})
			return resp.StatusCode/100 == 2
		})
	}
	eventually(t, "one process twice is not seen", func() bool {
		f := faultsOf(t, k)
		return f["twin-1"] == "same_address" && f["twin-2"] == "same_address"
	})
	mended.Store(true)
	eventually(t, "the fault does not end", func() bool { return !strings.Contains(faultsOf(t, k)["a"], "model_not_served") })
	log, err := os.ReadFile(k.Log)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`level=WARN msg="a worker has a fault" worker=a fault=model_not_served`,
		`level=WARN msg="a worker has a fault" worker=a fault=block_size`,
		`level=WARN msg="a worker has a fault" worker=a fault=event_socket_refused`,
		`level=WARN msg="a worker has a fault" worker=c fault=max_model_len`,
		`level=WARN msg="a worker has a fault" worker=c fault=same_events`,
		`level=WARN msg="a worker has a fault" worker=twin-1 fault=same_address`,
		`level=INFO msg="a worker's fault has ended" worker=a fault=model_not_served`,
	} {
		if n := strings.Count(string(log), line); n != 1 {
			t.Errorf("%q is %d times in the log:\n%s", line, n, log)
		}
	}
}

// relay passes connections on to an address, so that one socket has two addresses.
func relay(t *testing.T, to string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			onward, err := net.Dial("tcp", to)
			if err != nil {
				from.Close()
				continue
			}
			go func() { _, _ = io.Copy(onward, from); onward.Close() }()
			go func() { _, _ = io.Copy(from, onward); from.Close() }()
		}
	}()
	return l.Addr().String()
}
