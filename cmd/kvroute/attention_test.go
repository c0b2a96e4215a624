// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/process"
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

// A worker that serves nobody is named within 3 s of its second missed probe.
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
