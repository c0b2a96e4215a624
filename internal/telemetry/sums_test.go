// SPDX-License-Identifier: Apache-2.0

package telemetry_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/telemetry"
)

func readings(t *testing.T, m *telemetry.Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// Counters and histograms are compared with a slow model after each of many random steps: measurements, readings,
// and series that are forgotten.
func TestSumsAndForgetting(t *testing.T) {
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	k := meter.New(m.Meter("test"))
	count := k.Counter("kvroute.test.count", "{thing}", "Things.", "model", "kind")
	other := k.Counter("kvroute.test.other", "{thing}", "Other things.", "kind")
	took := k.Seconds("kvroute.test.took", "Times.", 1, 2)
	k.Total("kvroute.test.total", "{thing}", "Read by a function.", func(o meter.Observe) { o(7, "model", "always") })
	if err := k.Err(); err != nil {
		t.Fatal(err)
	}
	const bound = 5
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	model := map[string]int{} // the lines with their values
	for step := range 600 {
		name, kind := fmt.Sprint("m", random.IntN(bound)), fmt.Sprint("k", random.IntN(2))
		switch random.IntN(8) {
		case 0:
			keep := map[string]bool{}
			for i := range bound {
				keep[fmt.Sprint("m", i)] = random.IntN(2) == 0
			}
			if err := m.Forget(t.Context(), keep, "model", "the.model"); err != nil {
				t.Fatal(err)
			}
			maps.DeleteFunc(model, func(line string, _ int) bool {
				_, rest, has := strings.Cut(line, `model="`)
				value, _, _ := strings.Cut(rest, `"`)
				return has && !keep[value]
			})
		case 1, 2, 3:
			n := 1 + random.IntN(3)
			count.Add(n, name, kind)
			model[fmt.Sprintf(`kvroute_test_count_total{kind=%q,model=%q}`, kind, name)] += n
		case 4:
			other.Count(kind)
			model[fmt.Sprintf(`kvroute_test_other_total{kind=%q}`, kind)]++
		default:
			value := random.IntN(4)
			took.Record(t.Context(), float64(value), metric.WithAttributes(attribute.String("the.model", name)))
			for i, le := range []string{"1", "2", "+Inf"} {
				n := 0
				if value <= i+1 || i == 2 {
					n = 1
				}
				model[fmt.Sprintf(`kvroute_test_took_seconds_bucket{the_model=%q,le=%q}`, name, le)] += n
			}
			model[fmt.Sprintf(`kvroute_test_took_seconds_sum{the_model=%q}`, name)] += value
			model[fmt.Sprintf(`kvroute_test_took_seconds_count{the_model=%q}`, name)]++
		}
		if random.IntN(4) > 0 { // many steps come between two readings
			continue
		}
		var got, want []string
		for line := range strings.Lines(readings(t, m)) {
			if strings.HasPrefix(line, "kvroute_test_") && !strings.HasPrefix(line, "kvroute_test_total") {
				got = append(got, strings.TrimSpace(line))
			}
		}
		for line, n := range model {
			want = append(want, fmt.Sprint(line, " ", n))
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d, step %d:\n%s\nwant\n%s", seed, step, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	if text := readings(t, m); !strings.Contains(text, `kvroute_test_total{model="always"} 7`) {
		t.Errorf("what a function reads is not as before:\n%s", text)
	}
}

// No measurement is lost or counted twice when readings, measurements and forgetting come at the same time.
func TestSumsAtOnce(t *testing.T) {
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	k := meter.New(m.Meter("test"))
	count, took := k.Counter("kvroute.test.count", "{thing}", "Things.", "model"), k.Seconds("kvroute.test.took", "Times.", 1)
	const each, writers = 2000, 4
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for range each {
				count.Count("stays")
				count.Count(fmt.Sprint("leaves ", w))
				took.Record(t.Context(), 1, metric.WithAttributes(attribute.String("model", "stays")))
			}
		})
	}
	for range 2 {
		all.Go(func() {
			for range 20 {
				readings(t, m)
				if err := m.Forget(t.Context(), map[string]bool{"stays": true}, "model"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if err := m.Forget(t.Context(), map[string]bool{"stays": true}, "model"); err != nil {
		t.Fatal(err)
	}
	text := readings(t, m)
	for _, want := range []string{
		fmt.Sprintf("kvroute_test_count_total{model=\"stays\"} %d\n", each*writers), fmt.Sprintf("kvroute_test_took_seconds_count{model=\"stays\"} %d\n", each*writers),
		fmt.Sprintf("kvroute_test_took_seconds_bucket{model=\"stays\",le=\"1\"} %d\n", each*writers),
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(text, "leaves") {
		t.Error("a forgotten series is there")
	}
}

// A reading that began before series were forgotten does not bring them back.
func TestForgettingDuringReadings(t *testing.T) {
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	k := meter.New(m.Meter("test"))
	count := k.Counter("kvroute.test.count", "{thing}", "Things.", "model")
	count.Count("leaves")
	count.Count("stays")
	if err := m.ReadAround(t.Context(), func() {
		if err := m.Forget(t.Context(), map[string]bool{"stays": true}, "model"); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if text := readings(t, m); strings.Contains(text, "leaves") || !strings.Contains(text, "kvroute_test_count_total{model=\"stays\"} 1\n") {
		t.Errorf("a forgotten series is there, or another one is not:\n%s", text)
	}
}

// Metrics with a series for each model and health have more than OpenTelemetry's limit of 2,000 series.
func TestManySeries(t *testing.T) {
	m, err := telemetry.NewMetrics()
	if err != nil {
		t.Fatal(err)
	}
	k := meter.New(m.Meter("test"))
	count := k.Counter("kvroute.test.count", "{thing}", "Things.", "model")
	k.Gauge("kvroute.test.gauge", "{thing}", "Things.", func(o meter.Observe) {
		for i := range 3000 {
			o(1, "model", fmt.Sprint(i))
		}
	})
	for i := range 3000 {
		count.Count(fmt.Sprint(i))
	}
	text := readings(t, m)
	if c, g := strings.Count(text, "\nkvroute_test_count_total{"), strings.Count(text, "\nkvroute_test_gauge{"); c != 3000 || g != 3000 {
		t.Errorf("%d counters, %d gauges, want 3,000 of each", c, g)
	}
}
