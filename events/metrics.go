// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/meter"
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
	events, queries, retries, answers, repairs meter.Counter
	late                                       metric.Float64Histogram
}

func newMetrics(from metric.Meter, s *Subscriber) (*metrics, error) {
	m := meter.New(from)
	m.Gauge("kvroute.events.held.blocks", "{block}", "Blocks in events that wait for what is missing before them.", func(o meter.Observe) {
		s.mu.Lock()
		blocks := s.tracker.repairs.blocks
		s.mu.Unlock()
		o(float64(blocks))
	})
	m.Gauge("kvroute.events.ranks", "{rank}", "Ranks whose events are followed, by how far they can be trusted.",
		s.observeStates)
	return &metrics{
		events: m.Counter("kvroute.events.received", "{event}", "Events of workers' caches, by outcome.", "outcome"),
		queries: m.Counter("kvroute.events.queries", "{query}",
			"Queries to workers' local indexers, by what they ask for.", "kind"),
		retries: m.Counter("kvroute.events.query.retries", "{query}", "Queries that were not the first try."),
		answers: m.Counter("kvroute.events.query.ends", "{query}",
			"Queries ended, by the answer or by why there is none.", "end"),
		repairs: m.Counter("kvroute.events.repairs", "1",
			"What happened while ranks were repaired, other than queries.", "what"),
		// From loopback to an index that is too old to be of use.
		late: m.Seconds("kvroute.events.delay", "Time from a message's publication to its arrival, by the two clocks.",
			.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30),
	}, m.Err()
}

func (s *Subscriber) observeStates(o meter.Observe) {
	const repairing = "repairing" // is shown as indexer.StateOK elsewhere
	n := map[indexer.State]int{indexer.StateOK: 0, repairing: 0, indexer.StatePartial: 0, indexer.StateSuspect: 0}
	s.mu.Lock()
	for _, r := range s.tracker.ranks {
		if r.repair != nil && !r.repair.reread {
			n[repairing]++
		} else {
			n[r.reported]++
		}
	}
	s.mu.Unlock()
	for state, n := range n {
		o(float64(n), "state", string(state))
	}
}

// happened counts an outcome that a tracker reports.
func (m *metrics) happened(what string, n int) {
	if kind, ok := strings.CutPrefix(what, "ask_"); ok {
		m.queries.Add(n, kind)
		return
	}
	switch what {
	case "retry":
		m.retries.Add(n)
	case "no_room", "spilled", "given_up", "restored", "broken", "lie":
		m.repairs.Add(n, what)
	default:
		m.answers.Add(n, what)
	}
}

func (m *metrics) delay(ctx context.Context, now time.Time, publishedMS uint64) {
	m.late.Record(ctx, max(0, now.Sub(time.UnixMilli(int64(publishedMS))).Seconds()))
}

// event counts an event. Foreign and unknown ones without another outcome count as such.
func (m *metrics) event(ev *RouterEvent, outcome string) {
	switch {
	case outcome != outcomeAccepted:
	case ev.Foreign:
		outcome = outcomeForeign
	case ev.Event.Kind == 0:
		outcome = outcomeUnknown
	}
	m.events.Count(outcome)
}
