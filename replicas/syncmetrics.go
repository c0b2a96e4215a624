// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"sync/atomic"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/router"
)

// syncMetrics are the instruments of the exchange. docs/metrics.md lists them and the kinds.
type syncMetrics struct {
	news, drops, lists counter
	delay              metric.Float64Histogram
	// Changes of requests by kind. They are counted for every request, so without an
	// instrument.
	sent, received [router.SlotFreed + 1]atomic.Int64
}

func newSyncMetrics(meter metric.Meter, status func() *syncStatus) (*syncMetrics, error) {
	m := newInstruments(meter)
	s := &syncMetrics{
		news:  m.counter("kvroute.sync.news", "{event}", "kind", "What happened between router replicas, by kind."),
		drops: m.counter("kvroute.sync.drops", "{change}", "kind", "Changes not sent for lack of room, by kind."),
		lists: m.counter("kvroute.sync.dumps", "{dump}", "cause", "Reasons to request a peer's list of requests."),
		delay: m.seconds("kvroute.sync.delay", "Age of received messages, above the least of the last minutes.",
			.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5),
	}
	m.total("kvroute.sync.changes", "{change}", "Changes of requests sent and received, by kind.", func(o observe) {
		for kind := range s.sent {
			name := router.ChangeKind(kind).String()
			o(float64(s.sent[kind].Load()), "direction", "sent", "kind", name)
			o(float64(s.received[kind].Load()), "direction", "received", "kind", name)
		}
	})
	m.gauge("kvroute.sync.peers", "{replica}", "Other router replicas known.", func(o observe) { o(float64(status().routers)) })
	m.gauge("kvroute.sync.requests", "{request}", "Requests in flight at other replicas.", func(o observe) {
		requests := 0
		for _, p := range status().peers {
			requests += p.ActiveRequests
		}
		o(float64(requests))
	})
	return s, m.err()
}
