// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"go.opentelemetry.io/otel/metric"

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
)

// sourceMetrics are the instruments of [Sources]. docs/metrics.md lists them.
type sourceMetrics struct {
	batches, news, leftOut meter.Counter
}

func newSourceMetrics(from metric.Meter, survey func() (counts map[indexer.State]int, copies int)) (*sourceMetrics, error) {
	m := meter.New(from)
	m.Gauge("kvroute.source.ranks", "{rank}", "Ranks with a direct connection to their engine, by the state of their known blocks.", func(o meter.Observe) {
		counts, _ := survey()
		for _, state := range indexer.States() {
			if state != indexer.StateSummary {
				o(float64(counts[state]), "state", string(state))
			}
		}
	})
	m.Gauge("kvroute.source.copies", "{copy}", "The largest number of copies of a block that an engine reported.", func(o meter.Observe) {
		_, most := survey()
		o(float64(most))
	})
	return &sourceMetrics{
		batches: m.Counter("kvroute.source.batches", "{batch}", "Messages of engines' sockets, by outcome.", "outcome"),
		news: m.Counter("kvroute.source.news", "{event}",
			"Changes of the connections and requests to engines, by kind.", "kind"),
		leftOut: m.Counter("kvroute.source.blocks.left_out", "{block}",
			"Blocks of engines' events that are not indexed, by reason.", "reason"),
	}, m.Err()
}

// count adds n to the instrument of an outcome.
func (m *sourceMetrics) count(outcome string, n int) {
	switch outcome {
	case sourceLive, sourceReplayed, sourceDuplicate, sourceBad, sourceForeign, sourceLost:
		m.batches.Add(n, outcome)
	default:
		m.news.Add(n, outcome)
	}
}

func (m *sourceMetrics) drops(d *Drops) {
	for reason, n := range d {
		m.leftOut.Add(n, DropReason(reason).String())
	}
}
