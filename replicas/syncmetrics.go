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

// What happens between replicas.
const (
	syncOut       = "sent"
	syncUnsent    = "unsent" // there was no connection
	syncIn        = "received"
	syncBad       = "bad"       // a message that cannot be read
	syncRepeated  = "repeated"  // a message that came before
	syncBadEvent  = "bad_event" // in a message that can be read
	syncDuplicate = "duplicate" // a change that was known
	syncUnknown   = "unknown"   // a change of a request that is not
	syncAsked     = "asked"     // for all requests of a peer
	syncAnswered  = "answered"  // to who asked
	syncLeft      = "left"      // a peer that said so
	syncGone      = "gone"      // a peer that was silent for too long
	syncTooMany   = "too_many"  // peers, or requests of one: not all are listened to
	syncTooLate   = "late"      // a message that took longer than 100 ms

	syncSession     = "session"      // bound or ended by a peer's word
	syncSessionKept = "session_kept" // told of, and left as it is here
	droppedSession  = "session"      // among what was not told
)

// syncMetrics are the instruments of the exchange. docs/metrics.md lists them.
type syncMetrics struct {
	news, changes, drops, questions metric.Int64Counter
	delay                           metric.Float64Histogram
	peers, requests                 atomic.Int64

	// Made once, since these are on the way of every request.
	kinds    [2][router.SlotFreed + 1]metric.AddOption
	outcomes map[string]metric.AddOption
}

func newSyncMetrics(meter metric.Meter) (*syncMetrics, error) {
	var errs [7]error
	m := &syncMetrics{outcomes: make(map[string]metric.AddOption)}
	m.news, errs[0] = meter.Int64Counter("kvroute.sync.news",
		metric.WithUnit("{event}"), metric.WithDescription("What happened between router replicas, by kind."))
	m.changes, errs[1] = meter.Int64Counter("kvroute.sync.changes",
		metric.WithUnit("{change}"), metric.WithDescription("Changes of requests told and heard, by kind."))
	m.drops, errs[2] = meter.Int64Counter("kvroute.sync.drops",
		metric.WithUnit("{change}"), metric.WithDescription("Changes not told for lack of room, by kind."))
	m.questions, errs[3] = meter.Int64Counter("kvroute.sync.dumps",
		metric.WithUnit("{dump}"), metric.WithDescription("Reasons to ask a peer for all of its requests."))
	m.delay, errs[4] = meter.Float64Histogram("kvroute.sync.delay", metric.WithUnit("s"),
		metric.WithDescription("Age of what other replicas tell, above the least of the last minutes."),
		metric.WithExplicitBucketBoundaries(.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5))
	var peers, requests metric.Int64ObservableGauge
	peers, errs[5] = meter.Int64ObservableGauge("kvroute.sync.peers",
		metric.WithUnit("{replica}"), metric.WithDescription("Other router replicas known."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error { o.Observe(m.peers.Load()); return nil }))
	requests, errs[6] = meter.Int64ObservableGauge("kvroute.sync.requests",
		metric.WithUnit("{request}"), metric.WithDescription("Requests in flight at other replicas."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error { o.Observe(m.requests.Load()); return nil }))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("replicas: make instruments: %w", err)
	}
	_, _ = peers, requests // they observe by themselves
	for i, direction := range [...]string{"sent", "received"} {
		for k := range m.kinds[i] {
			m.kinds[i][k] = metric.WithAttributeSet(attribute.NewSet(
				attribute.String("direction", direction), attribute.String("kind", router.ChangeKind(k).String())))
		}
	}
	for _, o := range [...]string{syncOut, syncUnsent, syncIn, syncBad, syncRepeated, syncBadEvent, syncDuplicate, syncUnknown, syncAsked, syncAnswered, syncLeft, syncGone, syncTooMany, syncTooLate, syncSession, syncSessionKept} {
		m.outcomes[o] = metric.WithAttributeSet(attribute.NewSet(attribute.String("kind", o)))
	}
	return m, nil
}

func (m *syncMetrics) count(kind string) { m.add(kind, 1) }

func (m *syncMetrics) add(kind string, n int) {
	if n > 0 {
		m.news.Add(context.Background(), int64(n), m.outcomes[kind])
	}
}

func (m *syncMetrics) sent(k router.ChangeKind)     { m.changed(0, k) }
func (m *syncMetrics) received(k router.ChangeKind) { m.changed(1, k) }

func (m *syncMetrics) changed(direction int, k router.ChangeKind) {
	m.changes.Add(context.Background(), 1, m.kinds[direction][min(k, router.SlotFreed)])
}

func (m *syncMetrics) dropped(kind string) {
	m.drops.Add(context.Background(), 1, metric.WithAttributes(attribute.String("kind", kind)))
}

// asking counts a reason to ask a peer: new, hole, digest, reconnection, worker,
// unreadable.
func (m *syncMetrics) asking(why string) {
	m.questions.Add(context.Background(), 1, metric.WithAttributes(attribute.String("cause", why)))
}

func (m *syncMetrics) delayed(d time.Duration) { m.delay.Record(context.Background(), d.Seconds()) }

func (m *syncMetrics) hold(peers, requests int) {
	m.peers.Store(int64(peers))
	m.requests.Store(int64(requests))
}
