// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// counter is an instrument of this package. docs/metrics.md lists them with their
// attributes.
type counter struct{ metric.Int64Counter }

// newCounter makes the counter kvroute.fleet.NAME. The meter may be nil.
func newCounter(meter metric.Meter, name, unit, description string) (counter, error) {
	c, err := cmp.Or[metric.Meter](meter, noop.Meter{}).Int64Counter("kvroute.fleet."+name, metric.WithUnit(unit), metric.WithDescription(description))
	if err != nil {
		return counter{}, fmt.Errorf("fleet: make instruments: %w", err)
	}
	return counter{c}, nil
}

// count counts one event. The attributes are keys and values in turn.
func (c counter) count(attributes ...string) { c.add(1, attributes...) }

// add counts several events.
//
//nolint:contextcheck,nolintlint // counters need none; without this each caller would need it
func (c counter) add(n int, attributes ...string) {
	set := make([]attribute.KeyValue, 0, len(attributes)/2)
	for i := 0; i+1 < len(attributes); i += 2 {
		set = append(set, attribute.String(attributes[i], attributes[i+1]))
	}
	c.Add(context.Background(), int64(n), metric.WithAttributes(set...))
}
