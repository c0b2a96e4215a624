// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
)

// Outcomes of snapshots.
const (
	snapshotWritten  = "written"
	snapshotFailed   = "failed"
	snapshotRestored = "restored"
	snapshotDamaged  = "damaged" // damaged and skipped
)

// metrics are the instruments of a [Reader]. docs/metrics.md lists them.
type metrics struct {
	snapshots, sessions, twice, epochs meter.Counter
	duration                           metric.Float64Histogram
}

func newMetrics(from metric.Meter, d *Reader) (*metrics, error) {
	m := meter.New(from)
	m.Gauge("kvroute.events.stream.pending", "{message}", "Messages of the stream that are not applied yet.",
		func(o meter.Observe) { o(float64(d.pending.Load())) })
	return &metrics{
		snapshots: m.Counter("kvroute.events.snapshots", "{snapshot}", "Snapshots of the index, by outcome.", "outcome"),
		sessions: m.Counter("kvroute.events.stream.reopened", "{time}",
			"Times that the stream of events was opened anew, by reason.", "reason"),
		twice: m.Counter("kvroute.events.stream.repeated", "{message}",
			"Messages of the stream that came again, and were known."),
		epochs: m.Counter("kvroute.events.epoch.refused", "{epoch}",
			"Epochs that were refused because they begin above the stream's last message."),
		// From a demo's index to ten million blocks over a slow network.
		duration: m.Seconds("kvroute.events.snapshot.duration", "Time to write or restore a snapshot, by outcome.",
			.01, .03, .1, .3, 1, 3, 10, 30, 100),
	}, m.Err()
}

func (m *metrics) snapshot(ctx context.Context, outcome string, took time.Duration) {
	m.snapshots.Count(outcome)
	m.duration.Record(ctx, took.Seconds(), metric.WithAttributes(attribute.String("outcome", outcome)))
}

// reopened counts the end of a session.
func (m *metrics) reopened(err error) {
	reason := "error"
	for known, is := range map[string]error{
		"missed": errMissed, "epoch": errEpoch, "stream": errNewStream, "consumer": errConsumer,
	} {
		if errors.Is(err, is) {
			reason = known
		}
	}
	m.sessions.Count(reason)
}
