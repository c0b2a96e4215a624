// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// instruments makes the instruments of a type. docs/metrics.md lists them with their
// attributes.
type instruments struct {
	metric.Meter
	errs []error
}

// newInstruments returns a maker of instruments. The meter may be nil.
func newInstruments(meter metric.Meter) *instruments {
	return &instruments{Meter: cmp.Or[metric.Meter](meter, noop.Meter{})}
}

// err returns the errors of all instruments so far.
func (m *instruments) err() error {
	if err := errors.Join(m.errs...); err != nil {
		return fmt.Errorf("make instruments: %w", err)
	}
	return nil
}

// counter is a counter with one attribute.
type counter struct {
	metric.Int64Counter
	attribute string
}

func (m *instruments) counter(name, unit, attribute, description string) counter {
	c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
	m.errs = append(m.errs, err)
	return counter{c, attribute}
}

// count counts one event. The value is that of the attribute.
func (c counter) count(value string) { c.add(value, 1) }

// add counts several events.
//
//nolint:contextcheck,nolintlint // counters need none; without this each caller would need it
func (c counter) add(value string, n int) {
	if n > 0 {
		c.Add(context.Background(), int64(n), metric.WithAttributes(attribute.String(c.attribute, value)))
	}
}

// seconds makes a histogram of durations.
func (m *instruments) seconds(name, description string, boundaries ...float64) metric.Float64Histogram {
	h, err := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description), metric.WithExplicitBucketBoundaries(boundaries...))
	m.errs = append(m.errs, err)
	return h
}

// observe passes a reading to the reader of an observable instrument. The attributes are
// keys and values in turn.
type observe func(value float64, attributes ...string)

// gauge makes a gauge that is read by a function.
func (m *instruments) gauge(name, unit, description string, read func(observe)) {
	_, err := m.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description),
		metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error {
			read(func(value float64, attributes ...string) { o.Observe(value, attributesOf(attributes)) })
			return nil
		}))
	m.errs = append(m.errs, err)
}

// total makes a counter that is read by a function.
func (m *instruments) total(name, unit, description string, read func(observe)) {
	_, err := m.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(description),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			read(func(value float64, attributes ...string) { o.Observe(int64(value), attributesOf(attributes)) })
			return nil
		}))
	m.errs = append(m.errs, err)
}

func attributesOf(pairs []string) metric.ObserveOption {
	set := make([]attribute.KeyValue, 0, len(pairs)/2)
	for i := 0; i+1 < len(pairs); i += 2 {
		set = append(set, attribute.String(pairs[i], pairs[i+1]))
	}
	return metric.WithAttributes(set...)
}
