// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// Requests that find the holder of their prompt busy copy its blocks: kvroute names the source in the body, and the
// engine copies from there.
func TestABusyHolderIsCopiedFrom(t *testing.T) {
	engine := []string{"--engine", "vllm", "--kv-pulls", "--speed", "0.5", "--max-num-seqs", "4"}
	d := startStack(t, 3, engine, "--kv-pull", "body", "--audit-share", "1")
	system := strings.Repeat("You know all about caches. ", 800)
	first, _ := reply(t, d, "POST", chatPath, chatBody(system, 1, false), nil)
	holder := first.Header.Get("X-Sim-Worker")
	eventually(t, "the router does not hear of the blocks in both tiers", func() bool {
		var heard, cached int
		for i, w := range workers(t, d) {
			heard, cached = heard+w.CachedBlocks, cached+cachedBlocks(t, d.Engines[i])
		}
		return cached > 0 && heard == 2*cached
	})
	var all sync.WaitGroup
	for i := range 24 {
		all.Go(func() {
			resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody(fmt.Sprint(system, i), 64, false), nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
				t.Errorf("request %d: status %d, %v", i, resp.StatusCode, err)
			}
		})
	}
	all.Wait()
	var list struct{ Decisions []router.Decision }
	eventually(t, "the router does not hear of the end of all requests", func() bool {
		if err := process.GetJSON(t.Context(), "http://"+d.Router.At.HTTP+"/v1/decisions?limit=24", &list); err != nil {
			t.Fatal(err)
		}
		open := func(d router.Decision) bool { return d.Freed.IsZero() || d.Usage == nil }
		return len(list.Decisions) == 24 && !slices.ContainsFunc(list.Decisions, open)
	})
	copies := 0
	for _, d := range list.Decisions {
		if d.Source == nil {
			continue
		}
		copies++
		had := d.OverlapBlocks * d.BlockSize
		if d.Source.WorkerName != holder || d.Source.Outcome != router.PullInTime || d.Usage.CachedTokens != had+d.Source.Tokens {
			t.Errorf("%s had %d tokens, and %d in the end; source %+v, want %s", d.WorkerName, had, d.Usage.CachedTokens, d.Source, holder)
		}
	}
	if copies == 0 {
		t.Error("no request names a source")
	}
}
