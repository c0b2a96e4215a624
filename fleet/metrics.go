// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// Kinds of news about workers.
const (
	newsRecord    = "record"    // registered, or registered anew
	newsLeft      = "left"      // took the record back
	newsHeartbeat = "heartbeat" // a sign of life
	newsStranger  = "stranger"  // a heartbeat of nobody registered
	newsRefused   = "refused"   // not readable, or a lie
	newsFlaps     = "flaps"     // a worker came back too often to be believed
	newsClaimed   = "claimed"   // an id went back to an address that it had just left
	newsFollowed  = "followed"  // another worker has started at one's address
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

// probeMetrics are the instruments of a [Prober].
type probeMetrics struct{ probes metric.Int64Counter }

func newProbeMetrics(meter metric.Meter) (*probeMetrics, error) {
	meter = cmp.Or[metric.Meter](meter, noop.Meter{})
	probes, err := meter.Int64Counter("kvroute.fleet.probes",
		metric.WithUnit("{probe}"), metric.WithDescription("Questions to workers over HTTP, by kind and outcome."))
	if err != nil {
		return nil, fmt.Errorf("fleet: make instruments: %w", err)
	}
	return &probeMetrics{probes}, nil
}

func (m *probeMetrics) count(ctx context.Context, kind int, err error) {
	outcome := "answered"
	switch {
	case errors.Is(err, ErrNoLoad):
		outcome = "nothing said"
	case err != nil:
		outcome = "failed"
	}
	m.probes.Add(ctx, 1, metric.WithAttributes(
		attribute.String("kind", [...]string{askHealth: "health", askLoad: "metrics"}[kind]), attribute.String("outcome", outcome)))
}
