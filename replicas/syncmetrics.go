// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/router"
)

// Kinds of what happens between replicas.
const (
	syncOut       = "sent"      // a message
	syncUnsent    = "unsent"    // a message without a connection
	syncIn        = "received"  // a message
	syncBad       = "bad"       // a message that cannot be read
	syncRepeated  = "repeated"  // a message with a number that came before
	syncTooLate   = "late"      // a message that took longer than 100 ms
	syncBadEvent  = "bad_event" // a change that cannot be read, in a message that can
	syncDuplicate = "duplicate" // a change that was known
	syncUnknown   = "unknown"   // a change of an unknown request, or on an unknown worker
	syncAsked     = "asked"     // a peer's list was requested
	syncAnswered  = "answered"  // the own list was sent
	syncLeft      = "left"      // a peer that said so
	syncGone      = "gone"      // a peer that was silent for too long
	syncTooMany   = "too_many"  // a router or a request above the limit

	syncSession     = "session"      // bound or ended by another router
	syncSessionKept = "session_kept" // received, and left as it is here

	droppedChange  = "change"
	droppedSession = "session"
)

// syncMetrics are the instruments of the exchange. docs/metrics.md lists them.
type syncMetrics struct {
	news, drops, lists metric.Int64Counter
	delay              metric.Float64Histogram
	peers, requests    atomic.Int64
	// changes by direction (sent, received) and kind. They are counted on the way of every
	// request, so without the instrument.
	changes [2][router.SlotFreed + 1]atomic.Int64
}

func newSyncMetrics(meter metric.Meter) (*syncMetrics, error) {
	var errs [7]error
	m := &syncMetrics{}
	m.news, errs[0] = meter.Int64Counter("kvroute.sync.news",
		metric.WithUnit("{event}"), metric.WithDescription("What happened between router replicas, by kind."))
	m.drops, errs[1] = meter.Int64Counter("kvroute.sync.drops",
		metric.WithUnit("{change}"), metric.WithDescription("Changes not sent for lack of room, by kind."))
	m.lists, errs[2] = meter.Int64Counter("kvroute.sync.dumps",
		metric.WithUnit("{dump}"), metric.WithDescription("Reasons to request a peer's list of requests."))
	m.delay, errs[3] = meter.Float64Histogram("kvroute.sync.delay", metric.WithUnit("s"),
		metric.WithDescription("Age of received messages, above the least of the last minutes."),
		metric.WithExplicitBucketBoundaries(.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5))
	_, errs[4] = meter.Int64ObservableCounter("kvroute.sync.changes", metric.WithUnit("{change}"),
		metric.WithDescription("Changes of requests sent and received, by kind."), metric.WithInt64Callback(m.observeChanges))
	_, errs[5] = meter.Int64ObservableGauge("kvroute.sync.peers", metric.WithUnit("{replica}"),
		metric.WithDescription("Other router replicas known."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error { o.Observe(m.peers.Load()); return nil }))
	_, errs[6] = meter.Int64ObservableGauge("kvroute.sync.requests", metric.WithUnit("{request}"),
		metric.WithDescription("Requests in flight at other replicas."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error { o.Observe(m.requests.Load()); return nil }))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("make instruments: %w", err)
	}
	return m, nil
}

func (m *syncMetrics) observeChanges(_ context.Context, o metric.Int64Observer) error {
	for i, direction := range [...]string{"sent", "received"} {
		for k := range m.changes[i] {
			if n := m.changes[i][k].Load(); n > 0 {
				o.Observe(n, metric.WithAttributes(attribute.String("direction", direction), attribute.String("kind", router.ChangeKind(k).String())))
			}
		}
	}
	return nil
}

func (m *syncMetrics) sent(k router.ChangeKind)     { m.changes[0][k].Add(1) }
func (m *syncMetrics) received(k router.ChangeKind) { m.changes[1][k].Add(1) }

func (m *syncMetrics) count(kind string) { m.add(kind, 1) }

func (m *syncMetrics) add(kind string, n int) {
	if n > 0 {
		m.news.Add(context.Background(), int64(n), kindOf(kind))
	}
}

func (m *syncMetrics) dropped(kind string, n int) {
	m.drops.Add(context.Background(), int64(n), kindOf(kind))
}

// requested counts a reason to request a list: new, hole, count, reconnection, worker, unreadable.
func (m *syncMetrics) requested(why string) {
	m.lists.Add(context.Background(), 1, metric.WithAttributes(attribute.String("cause", why)))
}

func (m *syncMetrics) delayed(d time.Duration) { m.delay.Record(context.Background(), d.Seconds()) }

func (m *syncMetrics) hold(peers, requests int) {
	m.peers.Store(int64(peers))
	m.requests.Store(int64(requests))
}
