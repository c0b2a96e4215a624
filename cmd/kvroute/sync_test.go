// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/bench/demo"
)

// Two replicas decide by the load of both: a request of one replica counts as load at the other one,
// and a request that waits there is admitted when the first one ends.
func TestReplicasShareTheirLoad(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	bus, err := startNATS("127.0.0.1:0", "")
	if err != nil {
		t.Fatal(err)
	}
	defer bus.Stop()
	file := filepath.Join(t.TempDir(), "kvroute.yaml")
	const workers = `
version: 1
workers:
- {name: w0, address: '127.0.0.1:9', models: [m], block_size: 8, max_num_batched_tokens: 64}
- {name: w1, address: '127.0.0.1:10', models: [m], block_size: 8, max_num_batched_tokens: 64}
`
	if err := os.WriteFile(file, []byte(workers), 0o600); err != nil {
		t.Fatal(err)
	}
	start := func(name string, more ...string) *demo.Child {
		c, err := demo.Start(t.Context(), t.TempDir(), name, append([]string{
			"serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-url", bus.URL(), "--replica", name,
		}, more...)...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			c.Stop()
			if t.Failed() {
				t.Logf("log of %s:\n%s", name, c.LastLines())
			}
		})
		return c
	}
	post := func(c *demo.Child, path string, body any, into any) {
		t.Helper()
		data, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		resp, text := whole(t, http.MethodPost, "http://"+c.At.HTTP+path, string(data), nil)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s%s: %s: %s", c.Name, path, resp.Status, text)
		}
		if into != nil {
			if err := json.Unmarshal([]byte(text), into); err != nil {
				t.Fatal(err)
			}
		}
	}
	type routed struct {
		WorkerID uint64 `json:"worker_id"`
	}
	book := func(c *demo.Child, id string, letter int) (a routed) {
		t.Helper()
		tokens := make([]int, 800)
		for i := range tokens {
			tokens[i] = letter
		}
		post(c, "/v1/best_worker", map[string]any{"model": "m", "request_id": id, "token_ids": tokens}, &a)
		return a
	}
	load := func(c *demo.Child) map[uint64][2]int {
		_, text := get(t, "http://"+c.At.HTTP+"/v1/workers")
		var list struct {
			Workers []struct {
				WorkerID uint64 `json:"worker_id"`
				Active   int    `json:"active_requests"`
				Pending  int    `json:"pend_tokens"`
			} `json:"workers"`
		}
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			t.Fatal(err)
		}
		loads := map[uint64][2]int{}
		for _, w := range list.Workers {
			if w.Active > 0 {
				loads[w.WorkerID] = [2]int{w.Active, w.Pending}
			}
		}
		return loads
	}

	a, b := start("a"), start("b", "--router-queue-threshold", "0")
	alone := start("alone", "--router-replica-sync=false")
	first := book(a, "r1", 1)
	eventually(t, "b does not see what a does", func() bool { return load(b)[first.WorkerID] == [2]int{1, 800} })
	second := book(b, "r1", 2) // the same id at another replica is another request
	if second.WorkerID == first.WorkerID {
		t.Error("b sends a request to the worker that a has just made busy")
	}
	eventually(t, "a does not see what b does", func() bool { return load(a)[second.WorkerID] == [2]int{1, 800} })

	// Both workers are busy, according to a's slots and b's.
	waited := make(chan routed, 1)
	go func() { waited <- book(b, "r2", 3) }()
	eventually(t, "nobody waits at b", func() bool {
		_, text := get(t, "http://"+b.At.HTTP+"/metrics")
		return strings.Contains(text, `kvroute_router_queue_size{model="m"} 1`)
	})
	c := start("c", "--drain-delay", "5s")
	eventually(t, "c, which came later, does not know of both", func() bool { return len(load(c)) == 2 })
	post(a, "/v1/free", map[string]string{"request_id": "r1"}, nil)
	if got := <-waited; got.WorkerID != first.WorkerID {
		t.Errorf("the request that waited goes to %d, want %d, which a left", got.WorkerID, first.WorkerID)
	}
	for _, id := range []string{"r1", "r2"} {
		post(b, "/v1/mark_prefill_complete", map[string]string{"request_id": id}, nil)
	}
	eventually(t, "a does not see the first tokens at b", func() bool {
		return load(a)[first.WorkerID] == [2]int{1, 0} && load(a)[second.WorkerID] == [2]int{1, 0}
	})
	if n := len(load(alone)); n > 0 {
		t.Errorf("a replica without the sync knows of requests on %d workers", n)
	}
	_, text := get(t, "http://"+a.At.HTTP+"/metrics")
	for _, want := range []string{"kvroute_sync_peers", "kvroute_sync_delay_seconds_bucket", `kvroute_sync_changes_total{direction="received",kind="taken"`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s among the metrics", want)
		}
	}
	kill(t, b)
	eventually(t, "a keeps what a dead replica did", func() bool { return len(load(a)) == 0 })

	// A replica that drains continues to send changes, and announces at its end that it leaves.
	third := book(c, "r3", 4)
	if err := c.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, "c does not drain", func() bool { return strings.Contains(c.LastLines(), "msg=draining") })
	late := book(c, "late", 5)
	eventually(t, "a does not see what c books while it drains", func() bool {
		l := load(a)
		return l[third.WorkerID][0]+l[late.WorkerID][0] >= 2
	})
	<-c.Done
	eventually(t, "a keeps what c, which has left, did", func() bool { return len(load(a)) == 0 })
	if log := a.LastLines(); !strings.Contains(log, "a router replica has left") {
		t.Errorf("a does not say that c has left:\n%s", log)
	}
}

// The first turn of a session at one replica binds it at the other.
func TestReplicasShareSessions(t *testing.T) {
	t.Parallel()
	bus, err := startNATS("127.0.0.1:0", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(bus.Stop)
	file := writeFile(t, `
version: 1
session-affinity-ttl-secs: 600
workers:
- {name: w0, address: '127.0.0.1:9', models: [m], block_size: 8}
- {name: w1, address: '127.0.0.1:10', models: [m], block_size: 8}
- {name: w2, address: '127.0.0.1:11', models: [m], block_size: 8}
`)
	replicas := make([]*demo.Child, 2)
	for i := range replicas {
		if replicas[i], err = demo.Start(t.Context(), t.TempDir(), fmt.Sprint("replica", i), "serve", "--config", file, "--nats-url", bus.URL(),
			"--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(replicas[i].Stop)
	}
	post := func(c *demo.Child, path, body string) (response struct {
		Worker   uint64 `json:"worker_id"`
		Decision struct{ Reason string }
	},
	) {
		t.Helper()
		resp, text := whole(t, http.MethodPost, "http://"+c.At.HTTP+path, body, nil)
		if err := json.Unmarshal([]byte(text), &response); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s %s", path, resp.Status, text)
		}
		return response
	}
	eventually(t, "the replicas do not hear each other", func() bool { // changes are sent only if another replica is known
		for _, c := range replicas {
			var r api.Replica
			_, text := get(t, "http://"+c.At.HTTP+"/v1/replica")
			if err := json.Unmarshal([]byte(text), &r); err != nil || len(r.Peers) != 1 {
				return false
			}
		}
		return true
	})
	first := post(replicas[0], "/v1/best_worker", `{"model":"m","request_id":"r","session_id":"s","token_ids":[1,2,3]}`)
	post(replicas[0], "/v1/mark_prefill_complete", `{"request_id":"r"}`)
	eventually(t, "the other replica does not know of the session", func() bool {
		got := post(replicas[1], "/v1/best_worker", `{"model":"m","session_id":"s","token_ids":[9]}`)
		return got.Decision.Reason == "session" && got.Worker == first.Worker
	})
	post(replicas[1], "/v1/best_worker", `{"model":"m","request_id":"end","session_id":"s","session_final":true,"token_ids":[9]}`)
	eventually(t, "the end of the session at the other replica is not known", func() bool {
		return post(replicas[0], "/v1/best_worker", `{"model":"m","session_id":"s","token_ids":[9]}`).Decision.Reason != "session"
	})
}
