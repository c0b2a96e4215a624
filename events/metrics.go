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

// What becomes of events.
const (
	outcomeAccepted  = "accepted"
	outcomeDuplicate = "duplicate"
	outcomeGap       = "gap"     // accepted, with some missing before it
	outcomeRestart   = "restart" // accepted, the rank cleared before it
	outcomeMany      = "multi_publisher"
	outcomeWaiting   = "waiting" // for their worker
	outcomeDropped   = "dropped" // nobody knew their worker in time, or too many waited
	outcomeForeign   = "foreign" // of blocks that are not the worker's
	outcomeUnknown   = "unknown" // of a kind that this version does not know
	outcomeBad       = "bad"     // not readable
	outcomeSlow      = "slow"    // messages dropped since we were too slow
)

// metrics are the package's instruments. docs/metrics.md lists them.
type metrics struct {
	events metric.Int64Counter
	late   metric.Float64Histogram
}

func newMetrics(meter metric.Meter) (*metrics, error) {
	var m metrics
	var errs [2]error
	m.events, errs[0] = meter.Int64Counter("kvroute.events.received",
		metric.WithUnit("{event}"), metric.WithDescription("Events of workers' caches, by outcome."))
	m.late, errs[1] = meter.Float64Histogram("kvroute.events.delay",
		metric.WithUnit("s"), metric.WithDescription("Time from a message's publication to its arrival, by the two clocks."),
		// From loopback to an index that is too old to be worth much.
		metric.WithExplicitBucketBoundaries(.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("events: make instruments: %w", err)
	}
	return &m, nil
}

func (m *metrics) count(ctx context.Context, outcome string, n int) {
	m.events.Add(ctx, int64(n), metric.WithAttributes(attribute.String("outcome", outcome)))
}

func (m *metrics) delay(ctx context.Context, now time.Time, publishedMS uint64) {
	m.late.Record(ctx, max(0, now.Sub(time.UnixMilli(int64(publishedMS))).Seconds()))
}

// accepted counts an event under the first outcome that says something about it.
func (m *metrics) accepted(ctx context.Context, ev RouterEvent, v verdict) {
	outcome := outcomeAccepted
	switch {
	case v.duplicate:
		outcome = outcomeDuplicate
	case v.dropped:
		outcome = outcomeDropped
	case ev.Foreign:
		outcome = outcomeForeign
	case ev.Event.Kind == 0:
		outcome = outcomeUnknown
	case v.many:
		outcome = outcomeMany
	case v.restart:
		outcome = outcomeRestart
	case v.gap:
		outcome = outcomeGap
	case v.waiting:
		outcome = outcomeWaiting
	}
	m.count(ctx, outcome, 1)
}
