// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Kinds of news about workers.
const (
	newsRecord    = "record"    // registered, or registered anew
	newsLeft      = "left"      // took the record back
	newsHeartbeat = "heartbeat" // a sign of life
	newsStranger  = "stranger"  // a heartbeat of nobody registered
	newsRefused   = "refused"   // not readable, or a lie
)

// metrics are the package's instruments. docs/metrics.md lists them.
type metrics struct{ news metric.Int64Counter }

func newMetrics(meter metric.Meter) (*metrics, error) {
	news, err := meter.Int64Counter("kvroute.fleet.news",
		metric.WithUnit("{message}"), metric.WithDescription("Messages about workers, by kind."))
	if err != nil {
		return nil, fmt.Errorf("fleet: make instruments: %w", err)
	}
	return &metrics{news}, nil
}

func (m *metrics) count(ctx context.Context, kind string) {
	m.news.Add(ctx, 1, metric.WithAttributes(attribute.String("kind", kind)))
}
