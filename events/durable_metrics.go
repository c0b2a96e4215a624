// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Outcomes of snapshots.
const (
	snapshotWritten  = "written"
	snapshotFailed   = "failed"
	snapshotRestored = "restored"
	snapshotDamaged  = "damaged" // damaged and skipped
)

// durableMetrics are the instruments of a [Durable]. docs/metrics.md lists them.
type durableMetrics struct {
	snapshots metric.Int64Counter
	duration  metric.Float64Histogram
	sessions  metric.Int64Counter
	twice     metric.Int64Counter
}

func newDurableMetrics(meter metric.Meter, d *Durable) (*durableMetrics, error) {
	var m durableMetrics
	var errs [5]error
	m.snapshots, errs[0] = meter.Int64Counter("kvroute.events.snapshots",
		metric.WithUnit("{snapshot}"), metric.WithDescription("Snapshots of the index, by outcome."))
	m.duration, errs[1] = meter.Float64Histogram("kvroute.events.snapshot.duration",
		metric.WithUnit("s"), metric.WithDescription("Time to write or restore a snapshot, by outcome."),
		// From a demo's index to ten million blocks over a slow network.
		metric.WithExplicitBucketBoundaries(.01, .03, .1, .3, 1, 3, 10, 30, 100))
	m.sessions, errs[2] = meter.Int64Counter("kvroute.events.stream.reopened",
		metric.WithUnit("{time}"), metric.WithDescription("Times that the stream of events was opened anew, by reason."))
	m.twice, errs[3] = meter.Int64Counter("kvroute.events.stream.repeated",
		metric.WithUnit("{message}"), metric.WithDescription("Messages of the stream that came again, and were known."))
	_, errs[4] = meter.Int64ObservableGauge("kvroute.events.stream.pending",
		metric.WithUnit("{message}"), metric.WithDescription("Messages of the stream that are not applied yet."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(d.pending.Load())
			return nil
		}))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("events: make instruments: %w", err)
	}
	return &m, nil
}

func (m *durableMetrics) snapshot(ctx context.Context, outcome string, took time.Duration) {
	with := metric.WithAttributes(attribute.String("outcome", outcome))
	m.snapshots.Add(ctx, 1, with)
	m.duration.Record(ctx, took.Seconds(), with)
}

func (m *durableMetrics) repeated(ctx context.Context) { m.twice.Add(ctx, 1) }

// reopened counts the end of a session.
func (m *durableMetrics) reopened(ctx context.Context, err error) {
	reason := "error"
	for known, is := range map[string]error{"missed": errMissed, "epoch": errEpoch, "stream": errNewStream, "consumer": errConsumer} {
		if errors.Is(err, is) {
			reason = known
		}
	}
	m.sessions.Add(ctx, 1, metric.WithAttributes(attribute.String("reason", reason)))
}
