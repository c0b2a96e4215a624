// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/meter"
)

// Outcomes of messages from engines.
const (
	sourceLive      = "live"     // as published
	sourceReplayed  = "replayed" // sent again on request
	sourceDuplicate = "duplicate"
	sourceBad       = "bad"     // not readable
	sourceForeign   = "foreign" // of a worker or rank that does not belong to the socket
	sourceLost      = "lost"    // permanently missing
	sourceAccepted  = "accepted"
)

// Outcomes of connections and requests to engines.
const (
	sourceGap          = "gap"
	sourceRestart      = "restart"
	sourceOverflow     = "buffer_full"
	sourceConnected    = "connected"
	sourceAway         = "disconnected"
	sourceAsked        = "replay"
	sourceUnanswered   = "replay_failed"
	sourceCut          = "replay_cut"
	sourceUndiscovered = "discovery_failed"
	sourceRestored     = "restored"
	// In no deprecated instrument.
	sourceAnswered = "events"
	sourceRetry    = "retry"
	sourceGivenUp  = "given_up"
)

// sourceMetrics are the instruments of [Sources]. docs/metrics.md lists them.
type sourceMetrics struct {
	events.FeedMetrics

	connections, leftOut meter.Counter
	// Those that the ones above replace: kvroute.source.*.
	batches, news, oldLeftOut meter.Counter
}

func newSourceMetrics(
	from metric.Meter, survey func() (counts map[events.Feed]map[indexer.State]int, copies int),
) (*sourceMetrics, error) {
	m := meter.New(from)
	all := events.NewFeedMetrics(m)
	all.Ranks(m, func(observe func(n int, feed events.Feed, state indexer.State)) {
		counts, _ := survey()
		for feed, states := range counts {
			for state, n := range states {
				observe(n, feed, state)
			}
		}
	})
	m.Gauge("kvroute.source.ranks", "{rank}", "Deprecated: use kvroute.events.ranks.", func(o meter.Observe) {
		counts, _ := survey()
		for state, n := range counts[events.FeedZMQ] {
			o(float64(n+counts[events.FeedPoll][state]), "state", string(state))
		}
	})
	copies := func(o meter.Observe) {
		_, most := survey()
		o(float64(most))
	}
	m.Gauge("kvroute.events.copies", "{copy}", "The largest number of copies of a block that an engine reported.", copies)
	m.Gauge("kvroute.source.copies", "{copy}", "Deprecated: use kvroute.events.copies.", copies)
	return &sourceMetrics{
		FeedMetrics: all,
		connections: m.Counter("kvroute.events.connections", "{event}",
			"Changes of connections to engines, by feed and kind.", "feed", "kind"),
		leftOut: m.Counter("kvroute.events.blocks.left_out", "{block}",
			"Blocks of engines' events that are not indexed, by feed and reason.", "feed", "reason"),
		batches: m.Counter("kvroute.source.batches", "{batch}", "Deprecated: use kvroute.events.received.", "outcome"),
		news: m.Counter("kvroute.source.news", "{event}",
			"Deprecated: use kvroute.events.connections, .queries, .query.ends and .repairs.", "kind"),
		oldLeftOut: m.Counter("kvroute.source.blocks.left_out", "{block}",
			"Deprecated: use kvroute.events.blocks.left_out.", "reason"),
	}, m.Err()
}

// count adds n to the instruments of an outcome. The Subscriber counts the events of Dynamo's publishers.
func (m *sourceMetrics) count(feed events.Feed, outcome string, n int) {
	switch outcome {
	case sourceAccepted, sourceAnswered, sourceRetry, sourceGivenUp:
	case sourceLive, sourceReplayed, sourceDuplicate, sourceBad, sourceForeign, sourceLost:
		m.batches.Add(n, outcome)
	default:
		m.news.Add(n, outcome)
	}
	switch outcome {
	case sourceLive: // counts when it is accepted
	case sourceAccepted, sourceDuplicate, sourceBad, sourceForeign, sourceLost:
		if feed != events.FeedPlane {
			m.Received(feed, outcome, n)
		}
	case sourceConnected, sourceAway, sourceUndiscovered:
		m.connections.Add(n, feed.String(), outcome)
	case sourceAsked:
		m.Happened(feed, "ask_range", n)
	case sourceUnanswered:
		m.Happened(feed, "unanswered", n)
	default:
		m.Happened(feed, outcome, n)
	}
}

func (m *sourceMetrics) drops(feed events.Feed, d *Drops) {
	for reason, n := range d {
		m.leftOut.Add(n, feed.String(), DropReason(reason).String())
		m.oldLeftOut.Add(n, DropReason(reason).String())
	}
}
