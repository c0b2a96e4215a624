// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// needs returns what needs attention at a kvroute, without its models.
func needs(t *testing.T, of *demo.Child) []attention.Item {
	t.Helper()
	var live struct{ Attention []attention.Item }
	if err := process.GetJSON(t.Context(), "http://"+of.At.HTTP+"/v1/live", &live); err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(live.Attention, func(i attention.Item) bool { return i.Kind == attention.OfModel })
}

// A killed worker has one item at any time, although its sockets, its probes and a request find it dead one after the
// other. `kvroute top` shows the same, and the log has one warning of its silence.
func TestAKilledWorkerHasOneItem(t *testing.T) {
	t.Parallel() // mostly waits
	a, b, c := bareEngine(t, "a"), bareEngine(t, "b", "--kv-events", "none"), bareEngine(t, "c", "--kv-events", "none")
	var text strings.Builder
	text.WriteString("version: 1\nworkers:\n")
	for _, e := range []*demo.Child{a, b, c} {
		fmt.Fprintf(&text, "- {name: %s, address: %q, models: [sim], block_size: 16, events: {transport: %s}}\n", e.Name, e.At.HTTP, map[bool]string{true: "zmq", false: "none"}[e == a])
	}
	k := serveFile(t, writeFile(t, text.String()))
	d := &demonstration{demo.Stack{Router: k}}
	eventually(t, "the workers are not healthy with events", func() bool {
		notYet := func(w router.WorkerState) bool { return w.Health != "healthy" || w.Name == "a" && w.KVEvents != "ok" }
		return !slices.ContainsFunc(workers(t, d), notYet) && len(needs(t, k)) == 0
	})
	kill(t, a)
	kill(t, b)
	request := `{"model":"sim","request_id":"dead","worker_id":%d,"messages":[{"role":"user","content":"hello"}],"body":{"max_tokens":2}}`
	items, seen := map[string]attention.Item{}, map[string]bool{}
	// has reports whether the item of a worker is about its silence, and also about something else.
	has := func(name, what string) bool {
		i := items[name]
		return i.What == "silent" && slices.ContainsFunc(i.Also, func(also attention.Item) bool { return also.What == what })
	}
	eventually(t, "both are not silent, a without its socket, b after a failed request", func() bool {
		all := needs(t, k)
		clear(items)
		for _, i := range all {
			if items[i.Name].Name != "" {
				t.Fatalf("worker %s has several items: %+v", i.Name, all)
			}
			items[i.Name] = i
			var text strings.Builder
			text.WriteString(i.Name + ": " + i.What)
			for _, also := range i.Also {
				text.WriteString(", " + also.What)
			}
			if seen[text.String()] = true; text.String() == "b: probes" || text.String() == "b: health" || text.String() == "b: silent" {
				whole(t, http.MethodPost, "http://"+k.At.HTTP+"/v1/generate", fmt.Sprintf(request, i.ID), nil) // it fails
			}
		}
		return has("a", "event_socket_refused") && has("b", "avoided")
	})
	t.Logf("seen: %q", slices.Sorted(maps.Keys(seen)))
	for name, i := range items {
		if !strings.Contains(i.Cause, "connection refused") || i.Advice == "" || i.Since.IsZero() || !strings.Contains(i.Docs, "/docs/") {
			t.Errorf("the item of %s is %+v", name, i)
		}
	}
	status, out, _ := runs(t, "top", "--once", "--url", "http://"+k.At.HTTP)
	if status != 0 || strings.Count(out, "has the fault silent") != 2 || strings.Count(out, "\n!   also ") != 2 {
		t.Errorf("top says\n%s", out)
	}
	log, err := os.ReadFile(k.Log)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(log), "a worker is silent"); n != 2 || strings.Contains(string(log), "fault=silent") {
		t.Errorf("%d warnings of two silent workers:\n%s", n, log)
	}
}

// A worker without requests is named within 3 s of its second missed probe.
func TestTheSecondMissedProbeNamesAWorker(t *testing.T) {
	t.Parallel() // mostly waits
	var mu sync.Mutex
	var fails bool
	var missed []time.Time
	address := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if fails && r.URL.Path == "/health" {
			missed = append(missed, time.Now())
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	k := serveFile(t, writeFile(t, fmt.Sprintf("version: 1\nworkers: [{name: w, address: %q, models: [m], block_size: 16, events: {transport: none}}]\n", address)))
	d := &demonstration{demo.Stack{Router: k}}
	eventually(t, "the worker is not healthy", func() bool {
		all := workers(t, d)
		return len(all) == 1 && all[0].Health == "healthy" && !slices.ContainsFunc(needs(t, k), func(i attention.Item) bool { return i.Name == "w" })
	})
	mu.Lock()
	fails = true
	mu.Unlock()
	var item attention.Item
	eventually(t, "the worker is not named", func() bool {
		all := needs(t, k)
		at := slices.IndexFunc(all, func(i attention.Item) bool { return i.Name == "w" })
		if at >= 0 {
			item = all[at]
		}
		return at >= 0
	})
	mu.Lock()
	defer mu.Unlock()
	if len(missed) < 2 || item.Since.Sub(missed[1]) > 3*time.Second {
		t.Fatalf("probes were missed at %v; the worker is named since %v: %s", missed, item.Since, item.Text)
	}
	t.Logf("named %v after the second missed probe: %s", item.Since.Sub(missed[1]).Round(time.Millisecond), item.Text)
	if !strings.Contains(item.Cause, "status 500") || item.Advice == "" || item.Docs == "" {
		t.Errorf("the item is %+v", item)
	}
}
