// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/envoy"
)

// With --engine-load each request asks the engine for its load. The engine's answer reaches the
// router in each mode in which Envoy sends bodies, and never the client.
func TestEnginesSayHowBusyTheyAre(t *testing.T) {
	for _, mode := range []envoy.BodyMode{envoy.Buffered, envoy.FullDuplex} {
		t.Run(mode, func(t *testing.T) {
			d := newStack(t, 0, nil)
			d.EnvoyConfig.BodyMode, d.EnvoyConfig.EngineLoad = mode, true
			var report, asked atomic.Value
			report.Store("JSON {}")
			engine := func(w http.ResponseWriter, r *http.Request) {
				asked.Store(strings.Join(r.Header.Values("Endpoint-Load-Metrics-Format"), "+"))
				w.Header().Set("Content-Type", "application/json")
				w.Header().Set("Endpoint-Load-Metrics", report.Load().(string)) //nolint:forcetypeassert // nothing else is stored
				_ = json.NewEncoder(w).Encode(map[string]any{})
			}
			file := filepath.Join(d.Dir, "kvroute.yaml")
			text := "version: 1\nworkers:\n- {name: a, address: \"" + startHTTP(t, engine) + "\", models: [sim], block_size: 16, total_kv_blocks: 1000}\n"
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			d.begin(t, "--config", file)
			used := func() int { return workers(t, d)[0].EngineBlocks }
			ask := func(outcome string) {
				t.Helper()
				resp, body := reply(t, d, "POST", chatPath, chatBody("how are you?", 2, false), http.Header{"Endpoint-Load-Metrics-Format": {"TEXT"}})
				if got := asked.Load(); resp.StatusCode != 200 || got != "JSON" {
					t.Errorf("status %d, the engine was asked for %q, want JSON once: %s", resp.StatusCode, got, body)
				}
				if got := resp.Header.Get("Endpoint-Load-Metrics"); got != "" {
					t.Errorf("the client receives the load %q", got)
				}
				eventually(t, "no report is counted as "+outcome, func() bool {
					_, metrics := get(t, "http://"+d.Router.At.HTTP+"/metrics")
					return level(metrics, `kvroute_fleet_load_reports_total{outcome="`+outcome+`"}`) != ""
				})
			}
			says := func(text string, blocks int) {
				t.Helper()
				report.Store(text)
				eventually(t, "the router does not learn "+text, func() bool { // a report counts for 10 s only
					ask("taken")
					return used() == blocks
				})
			}
			says(`JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 0.0}}`, 250)
			report.Store(`TEXT named_metrics.kv_cache_usage_perc=7`)
			ask("bad")
			if got := used(); got > 250 {
				t.Errorf("after an invalid report %d blocks are used, want the previous load", got)
			}
			if !strings.Contains(d.Router.LastLines(), "the load report of an engine cannot be read") {
				t.Error("the invalid report is not logged")
			}
			says(`TEXT named_metrics.kv_cache_usage_perc=0.5`, 500)
		})
	}
}
