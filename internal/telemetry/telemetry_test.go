// SPDX-License-Identifier: Apache-2.0

package telemetry_test

import (
	"net/http/httptest"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/telemetry"
)

func TestReadingsCanBeScraped(t *testing.T) {
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	c, err := m.Meter("test").Int64Counter("kvroute.test.things", metric.WithUnit("{thing}"), metric.WithDescription("Things."))
	if err != nil {
		t.Fatal(err)
	}
	c.Add(t.Context(), 3)
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	for _, want := range []string{"kvroute_test_things_total 3\n", "go_goroutines ", "process_resident_memory_bytes "} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("no %q in\n%s", want, w.Body)
		}
	}
}

func TestLogger(t *testing.T) {
	var out strings.Builder
	level := telemetry.Level("warn")
	log := telemetry.NewLogger(&out, level, "json", nil)
	log.Info("quiet")
	log.Warn("loud", "worker", 7)
	if got := out.String(); strings.Contains(got, "quiet") || !strings.Contains(got, `"worker":7`) {
		t.Errorf("logged %s", got)
	}
	if err := level.UnmarshalText([]byte("info")); err != nil {
		t.Fatal(err)
	}
	if log.Info("now"); !strings.Contains(out.String(), `"now"`) {
		t.Error("a changed level has no effect")
	}
}

func TestReadingsTogether(t *testing.T) {
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	readings := []telemetry.Reading{{Name: "kvroute.test.sent", Help: "Sent.", Total: true, Labels: []string{"to"}}, {Name: "kvroute.test.load", Help: "Load.", Labels: []string{"to"}}}
	if err := m.Register(readings, func(observe func(int, float64, ...string)) {
		for i, to := range []string{"a", "b"} {
			observe(0, float64(i), to)
			observe(1, 7, to)
		}
	}); err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	for _, want := range []string{"# TYPE kvroute_test_sent_total counter\n", "kvroute_test_sent_total{to=\"b\"} 1\n", "kvroute_test_load{to=\"a\"} 7\n"} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("no %q in\n%s", want, w.Body)
		}
	}
	if err := m.Register(readings, nil); err == nil {
		t.Error("the same metrics were registered twice")
	}
}
