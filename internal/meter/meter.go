// SPDX-License-Identifier: Apache-2.0

// Package meter makes metrics with string attributes, and logs that no peer can fill. docs/metrics.md
// lists all metrics with their attributes.
package meter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// Maker makes the metrics of one type and keeps the errors. It belongs to one goroutine. The
// metrics may be used by any number of goroutines.
type Maker struct {
	meter metric.Meter
	errs  []error
}

// New returns a Maker. Without a meter, the metrics do nothing.
func New(meter metric.Meter) *Maker {
	return &Maker{meter: cmp.Or[metric.Meter](meter, noop.Meter{})}
}

// Log returns the log, or without one a log that does nothing.
func Log(log *slog.Logger) *slog.Logger { return cmp.Or(log, slog.New(slog.DiscardHandler)) }

// Err returns the errors of all metrics that were made.
func (m *Maker) Err() error {
	if err := errors.Join(m.errs...); err != nil {
		return fmt.Errorf("make metrics: %w", err)
	}
	return nil
}

// Counter is a counter with attributes.
type Counter struct {
	counter metric.Int64Counter
	names   []string // of the attributes
	// sets are the sets of the first values, at most maxSets. The map never changes.
	sets *atomic.Pointer[map[string]Set]
}

// maxSets is far above the number of values of most attributes.
const maxSets = 64

// Counter makes a counter with these attributes.
func (m *Maker) Counter(name, unit, description string, attributes ...string) Counter {
	c, err := m.meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
	m.errs = append(m.errs, err)
	sets := new(atomic.Pointer[map[string]Set])
	sets.Store(&map[string]Set{})
	return Counter{c, attributes, sets}
}

// Count counts one event. The values are those of the attributes, in their order.
func (c Counter) Count(values ...string) { c.Add(1, values...) }

// Add counts several events.
func (c Counter) Add(n int, values ...string) {
	if n <= 0 {
		return
	}
	var room [128]byte
	key, sets := room[:0], *c.sets.Load()
	for _, value := range values {
		key = append(append(key, value...), 0)
	}
	s := sets[string(key)]
	if s == nil {
		set := make([]attribute.KeyValue, len(values))
		for i, value := range values {
			set[i] = attribute.String(c.names[i], value)
		}
		if s = (Set{metric.WithAttributes(set...)}); len(sets) < maxSets {
			more := maps.Clone(sets)
			more[string(key)] = s
			c.sets.Store(&more) // a set that another goroutine added meanwhile is made again
		}
	}
	c.AddTo(s, n)
}

// Set is a set of attributes that was made once, for events that are frequent.
type Set []metric.AddOption

// NewSet returns a set of attributes, names and values in turn.
func NewSet(attributes ...string) Set { return Set{metric.WithAttributes(pairs(attributes)...)} }

// AddTo counts several events with the attributes of a set.
//
//nolint:contextcheck,nolintlint // a counter needs no context, so its callers need not pass one
func (c Counter) AddTo(s Set, n int) {
	if n > 0 {
		c.counter.Add(context.Background(), int64(n), s...)
	}
}

// Seconds makes a histogram of durations.
func (m *Maker) Seconds(name, description string, boundaries ...float64) metric.Float64Histogram {
	return m.Histogram(name, "s", description, boundaries...)
}

// Histogram makes a histogram.
func (m *Maker) Histogram(name, unit, description string, boundaries ...float64) metric.Float64Histogram {
	h, err := m.meter.Float64Histogram(name, metric.WithUnit(unit), metric.WithDescription(description),
		metric.WithExplicitBucketBoundaries(boundaries...))
	m.errs = append(m.errs, err)
	return h
}

// Observe passes a reading to the reader of a metric. The attributes are names and values in
// turn.
type Observe func(value float64, attributes ...string)

// Gauge makes a gauge that is read by a function.
func (m *Maker) Gauge(name, unit, description string, read func(Observe)) {
	_, err := m.meter.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description),
		callback(read))
	m.errs = append(m.errs, err)
}

// Total makes a counter that is read by a function.
func (m *Maker) Total(name, unit, description string, read func(Observe)) {
	_, err := m.meter.Float64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(description),
		callback(read))
	m.errs = append(m.errs, err)
}

func callback(read func(Observe)) metric.Float64ObservableOption {
	return metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error {
		read(func(value float64, attributes ...string) {
			o.Observe(value, metric.WithAttributes(pairs(attributes)...))
		})
		return nil
	})
}

func pairs(attributes []string) []attribute.KeyValue {
	set := make([]attribute.KeyValue, 0, len(attributes)/2)
	for i := 0; i+1 < len(attributes); i += 2 {
		set = append(set, attribute.String(attributes[i], attributes[i+1]))
	}
	return set
}
