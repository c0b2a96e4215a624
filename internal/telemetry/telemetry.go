// SPDX-License-Identifier: Apache-2.0

// Package telemetry makes the binary's logger, an OpenTelemetry meter provider whose readings
// Prometheus can scrape, and a provider of tracers. It is the only package that reads the
// environment's OTEL_ variables.
//
// Its only global is the version that the linker sets. Any number of goroutines may use what it returns.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
)

// Metrics makes and serves the metrics of a process.
type Metrics struct {
	provider *sdkmetric.MeterProvider // of the instruments
	exporter *sdkmetric.MeterProvider // has no instruments: it passes on what sums reads
	sums     *sums
	registry *prometheus.Registry
}

// NewMetrics makes a meter provider with a Prometheus registry of its own, which
// also has the readings of the Go runtime and of the process.
func NewMetrics() (*Metrics, error) {
	registry, sums := prometheus.NewRegistry(), newSums()
	exporter, err := otelprom.New(otelprom.WithRegisterer(registry), otelprom.WithoutScopeInfo(), otelprom.WithProducer(sums))
	if err != nil {
		return nil, fmt.Errorf("telemetry: make the Prometheus exporter: %w", err)
	}
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return &Metrics{
		// The callers bound the attributes. OpenTelemetry's own limit is 2,000 series of an instrument: too few for
		// the workers of 1,024 models by health.
		provider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(sums.reader), sdkmetric.WithCardinalityLimit(0)),
		exporter: sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter), sdkmetric.WithResource(origin(context.Background()))),
		sums:     sums, registry: registry,
	}, nil
}

// Meter returns the meter with which a package makes its instruments, as package meter does: counters of integers,
// histograms of floats, and gauges and totals that functions read. Other instruments are not served.
func (m *Metrics) Meter(name string) metric.Meter { return m.provider.Meter(name) }

// Reading describes a metric with many values that are read together. Name has dots, as the names of
// instruments have. Total makes it a counter, otherwise it is a gauge.
type Reading struct {
	Name, Help string
	Total      bool
	Labels     []string
}

// Register adds metrics that one function reads at each scrape. observe takes the place of the metric
// in the list, and the values of its labels. It is for metrics with thousands of values: OpenTelemetry
// would make the labels of each value at each scrape. Two values of a metric with equal labels fail the
// scrape; labels that are not UTF-8 panic.
func (m *Metrics) Register(
	readings []Reading, read func(observe func(place int, value float64, labels ...string)),
) error {
	c := &collector{read: read}
	for _, r := range readings {
		name, kind := strings.ReplaceAll(r.Name, ".", "_"), prometheus.GaugeValue
		if r.Total {
			name, kind = name+"_total", prometheus.CounterValue
		}
		c.descriptions = append(c.descriptions, prometheus.NewDesc(name, r.Help, r.Labels, nil))
		c.kinds = append(c.kinds, kind)
	}
	if err := m.registry.Register(c); err != nil {
		return fmt.Errorf("telemetry: register metrics: %w", err)
	}
	return nil
}

// collector implements [prometheus.Collector].
type collector struct {
	descriptions []*prometheus.Desc
	kinds        []prometheus.ValueType
	read         func(observe func(place int, value float64, labels ...string))
}

func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range c.descriptions {
		to <- d
	}
}

func (c *collector) Collect(to chan<- prometheus.Metric) {
	c.read(func(place int, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(c.descriptions[place], c.kinds[place], value, labels...)
	})
}

// Forget removes the series of counters and histograms with an attribute of one of these names whose value keep does
// not have. keep must not change afterwards. A series that is measured again begins at 0. Forget may be called while
// readings are served. An error says that the instruments could not be read; the series are removed nevertheless.
func (m *Metrics) Forget(ctx context.Context, keep map[string]bool, names ...string) error {
	if err := m.sums.forget(ctx, keep, names); err != nil {
		return fmt.Errorf("telemetry: forget series: %w", err)
	}
	return nil
}

// Handler serves the readings in Prometheus' text format.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4})
}

// Shutdown frees the provider's resources.
func (m *Metrics) Shutdown(ctx context.Context) error {
	return errors.Join(m.provider.Shutdown(ctx), m.exporter.Shutdown(ctx))
}

// NewLogger makes a logger that writes to w what has this level or a higher one. format is "json";
// other formats count as "text". replace, if not nil, rewrites attributes; see [slog.HandlerOptions]. Of the warnings
// with one message it writes ten a minute; the tenth says so, and the next one tells how many were left out.
func NewLogger(
	w io.Writer, level slog.Leveler, format string, replace func(groups []string, a slog.Attr) slog.Attr,
) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: replace}
	if format == "json" {
		return slog.New(newWarnings(slog.NewJSONHandler(w, opts)))
	}
	return slog.New(newWarnings(slog.NewTextHandler(w, opts)))
}

// Level returns the level "debug", "info", "warn" or "error"; other texts count as "info". To change the
// level of a logger, have the result read another text.
func Level(text string) *slog.LevelVar {
	level := new(slog.LevelVar)
	_ = level.UnmarshalText([]byte(text))
	return level
}

// version is the version that the linker sets: go build -ldflags "-X …/internal/telemetry.version=v1.2.3".
var version = "unknown"

// Version is the version that the linker set, else the module's version, or the commit of a build from a checkout.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && version == "unknown" {
		return info.Main.Version
	}
	return version
}
