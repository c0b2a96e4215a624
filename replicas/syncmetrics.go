// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"sync/atomic"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/router"
)

// syncMetrics are the instruments of the exchange. docs/metrics.md lists them and the kinds.
type syncMetrics struct {
	news, drops, lists meter.Counter
	delay              metric.Float64Histogram
	// Changes of requests by kind. They are counted for every request, so without an
	// instrument.
	sent, received [router.SlotFreed + 1]atomic.Int64
}

func newSyncMetrics(from metric.Meter, status func() *syncStatus) (*syncMetrics, error) {
	m := meter.New(from)
	s := &syncMetrics{
		news:  m.Counter("kvroute.sync.news", "{event}", "What happened between router replicas, by kind.", "kind"),
		drops: m.Counter("kvroute.sync.drops", "{change}", "Changes not sent for lack of room, by kind.", "kind"),
		lists: m.Counter("kvroute.sync.dumps", "{dump}", "Reasons to request a peer's list of requests.", "cause"),
		delay: m.Seconds("kvroute.sync.delay", "Age of received messages, above the least of the last minutes.",
			.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5),
	}
	m.Total("kvroute.sync.changes", "{change}", "Changes of requests sent and received, by kind.", func(o meter.Observe) {
		for kind := range s.sent {
			name := router.ChangeKind(kind).String()
			o(float64(s.sent[kind].Load()), "direction", "sent", "kind", name)
			o(float64(s.received[kind].Load()), "direction", "received", "kind", name)
		}
	})
	m.Gauge("kvroute.sync.peers", "{replica}", "Other router replicas known.",
		func(o meter.Observe) { o(float64(status().routers)) })
	m.Gauge("kvroute.sync.requests", "{request}", "Requests in flight at other replicas.", func(o meter.Observe) {
		requests := 0
		for _, p := range status().peers {
			requests += p.ActiveRequests
		}
		o(float64(requests))
	})
	return s, m.Err()
}
