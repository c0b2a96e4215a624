// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// The outcomes of events.
const (
	outcomeAccepted  = "accepted"
	outcomeDuplicate = "duplicate"
	outcomeGap       = "gap"     // events before it are missing
	outcomeRestart   = "restart" // accepted after the rank was cleared
	outcomeMany      = "multi_publisher"
	outcomeWaiting   = "waiting"    // waits for its worker
	outcomeDropped   = "dropped"    // its worker did not register in time, or too many events wait
	outcomeForeign   = "foreign"    // about blocks that are not the worker's
	outcomeUnknown   = "unknown"    // of an unknown kind
	outcomeBad       = "bad"        // unreadable
	outcomeSlow      = "slow"       // messages dropped because kvroute was too slow
	outcomeHeld      = "held"       // waits for the missing events before it
	outcomeOther     = "other_feed" // dropped: its worker has another feed
)

// metrics are the package's instruments. docs/metrics.md lists them.
type metrics struct {
	events  metric.Int64Counter
	late    metric.Float64Histogram
	queries metric.Int64Counter
	retries metric.Int64Counter
	answers metric.Int64Counter
	repairs metric.Int64Counter
}

func newMetrics(meter metric.Meter, s *Subscriber) (*metrics, error) {
	var m metrics
	var errs [9]error
	m.events, errs[0] = meter.Int64Counter("kvroute.events.received",
		metric.WithUnit("{event}"), metric.WithDescription("Events of workers' caches, by outcome."))
	m.late, errs[1] = meter.Float64Histogram("kvroute.events.delay",
		metric.WithUnit("s"), metric.WithDescription("Time from a message's publication to its arrival, by the two clocks."),
		// From loopback to an index that is too old to be of use.
		metric.WithExplicitBucketBoundaries(.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30))
	m.queries, errs[2] = meter.Int64Counter("kvroute.events.queries",
		metric.WithUnit("{query}"), metric.WithDescription("Queries to workers' local indexers, by what they ask for."))
	m.retries, errs[3] = meter.Int64Counter("kvroute.events.query.retries",
		metric.WithUnit("{query}"), metric.WithDescription("Queries that were not the first try."))
	m.answers, errs[4] = meter.Int64Counter("kvroute.events.query.ends",
		metric.WithUnit("{query}"), metric.WithDescription("Queries ended, by the answer or by why there is none."))
	m.repairs, errs[5] = meter.Int64Counter("kvroute.events.repairs",
		metric.WithUnit("1"), metric.WithDescription("What happened while ranks were repaired, other than queries."))
	var held, ranks metric.Int64ObservableGauge
	held, errs[6] = meter.Int64ObservableGauge("kvroute.events.held.blocks",
		metric.WithUnit("{block}"), metric.WithDescription("Blocks in events that wait for what is missing before them."))
	ranks, errs[7] = meter.Int64ObservableGauge("kvroute.events.ranks",
		metric.WithUnit("{rank}"), metric.WithDescription("Ranks whose events are followed, by how far they can be trusted."))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("events: make instruments: %w", err)
	}
	_, errs[8] = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s.observe(o, held, ranks)
		return nil
	}, held, ranks)
	return &m, errs[8]
}

func (s *Subscriber) observe(o metric.Observer, held, ranks metric.Int64ObservableGauge) {
	const repairing = StateSuspect + 1
	var n [repairing + 1]int64
	s.mu.Lock()
	blocks := s.tracker.repairs.blocks
	for _, r := range s.tracker.ranks {
		if r.repair != nil && !r.repair.reread {
			n[repairing]++
		} else {
			n[r.reported]++
		}
	}
	s.mu.Unlock()
	o.ObserveInt64(held, int64(blocks))
	for state, n := range n {
		name := "repairing"
		if state < int(repairing) {
			name = State(state).String()
		}
		o.ObserveInt64(ranks, n, metric.WithAttributes(attribute.String("state", name)))
	}
}

// happened counts an outcome that a tracker reports.
func (m *metrics) happened(what string, n int) {
	ctx := context.Background()
	if kind, ok := strings.CutPrefix(what, "ask_"); ok {
		m.queries.Add(ctx, int64(n), metric.WithAttributes(attribute.String("kind", kind)))
		return
	}
	switch what {
	case "retry":
		m.retries.Add(ctx, int64(n))
	case "no_room", "spilled", "given_up", "restored", "broken", "lie":
		m.repairs.Add(ctx, int64(n), metric.WithAttributes(attribute.String("what", what)))
	default:
		m.ended(ctx, what, n)
	}
}

func (m *metrics) ended(ctx context.Context, end string, n int) {
	m.answers.Add(ctx, int64(n), metric.WithAttributes(attribute.String("end", end)))
}

func (m *metrics) count(ctx context.Context, outcome string, n int) {
	m.events.Add(ctx, int64(n), metric.WithAttributes(attribute.String("outcome", outcome)))
}

func (m *metrics) delay(ctx context.Context, now time.Time, publishedMS uint64) {
	m.late.Record(ctx, max(0, now.Sub(time.UnixMilli(int64(publishedMS))).Seconds()))
}

// event counts an event. Foreign and unknown ones without another outcome count as such.
func (m *metrics) event(ctx context.Context, ev *RouterEvent, outcome string) {
	switch {
	case outcome != outcomeAccepted:
	case ev.Foreign:
		outcome = outcomeForeign
	case ev.Event.Kind == 0:
		outcome = outcomeUnknown
	}
	m.count(ctx, outcome, 1)
}
