// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/router"
)

// Names of workers are not unique, and may be hostile: the metrics stay readable and bounded.
func TestWorkerMetricsWithHostileNames(t *testing.T) {
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"gpu", "gpu", "", "bad\xff", "quote\"\n", strings.Repeat("x", 1000), "last"}
	for i, name := range names {
		if err := r.SetWorker(router.WorkerInfo{ID: uint64(i + 1), Name: name, Models: []string{"m"}, Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 1)}); err != nil {
			t.Fatal(err)
		}
	}
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	registry, err := fleet.NewRegistry(nil, fleet.RegistryConfig{
		Set: func(router.WorkerInfo) {}, Remove: func(uint64) {}, Now: func() time.Time { return now },
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := registry.SetStatic([]fleet.Record{{Name: "taken out", Address: "10.0.1.1:80", Models: []string{"m"}}}); err != nil {
		t.Fatal(err)
	}
	if err := registry.SetStatic(nil); err != nil {
		t.Fatal(err)
	}
	r.SetFaults(1, "a", []router.Fault{{What: "silent", Text: "x"}, {What: "silent", Text: "y"}})
	s := server{router: r, registry: registry, conf: config{WorkerMetrics: len(names) - 1}}
	if err := m.Register(workerMetrics, s.readWorkers); err != nil {
		t.Fatal(err)
	}
	scrape := func() string {
		w := httptest.NewRecorder()
		m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
		return w.Body.String()
	}
	text := scrape()
	for _, want := range []string{`worker="gpu"`, `worker="2"`, `worker="3"`, `worker="bad?"`, `worker="quote\"\n"`, `health="healthy"`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	if n := strings.Count(text, "\nkvroute_worker_state{"); n != len(names)-1 {
		t.Errorf("%d workers have metrics", n)
	}
	if want := "\nkvroute_worker_faults{fault=\"silent\",model=\"m\",rank=\"0\",worker=\"gpu\"} 1\n"; strings.Count(text, want) != 1 {
		t.Errorf("no %s in\n%s", want, text)
	}
	if s.conf.WorkerMetrics = 100; strings.Contains(scrape(), "taken out") {
		t.Error("a removed worker has a metric")
	}
	s.conf.WorkerMetrics = 0
	if text := scrape(); strings.Contains(text, "kvroute_worker_") {
		t.Errorf("metrics that are turned off:\n%s", text)
	}
}
