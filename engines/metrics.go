// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
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
	batches, news, leftOut metric.Int64Counter
}

func newSourceMetrics(meter metric.Meter, s *Sources) (*sourceMetrics, error) {
	var m sourceMetrics
	var errs [6]error
	m.batches, errs[0] = meter.Int64Counter("kvroute.source.batches",
		metric.WithUnit("{batch}"), metric.WithDescription("Messages of engines' sockets, by outcome."))
	m.news, errs[1] = meter.Int64Counter("kvroute.source.news",
		metric.WithUnit("{event}"), metric.WithDescription("Changes of the connections and requests to engines, by kind."))
	m.leftOut, errs[2] = meter.Int64Counter("kvroute.source.blocks.left_out",
		metric.WithUnit("{block}"), metric.WithDescription("Blocks of engines' events that are not indexed, by reason."))
	var ranks, copies metric.Int64ObservableGauge
	ranks, errs[3] = meter.Int64ObservableGauge("kvroute.source.ranks",
		metric.WithUnit("{rank}"), metric.WithDescription("Ranks with a direct connection to their engine, by the state of their known blocks."))
	copies, errs[4] = meter.Int64ObservableGauge("kvroute.source.copies",
		metric.WithUnit("{copy}"), metric.WithDescription("The largest number of copies of a block that an engine reported."))
	_, errs[5] = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		counts, most := s.survey()
		for state, n := range counts {
			o.ObserveInt64(ranks, int64(n), metric.WithAttributes(attribute.String("state", State(state).String())))
		}
		o.ObserveInt64(copies, int64(most))
		return nil
	}, ranks, copies)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("engines: make instruments: %w", err)
	}
	return &m, nil
}

// count adds n to the instrument of an outcome.
func (m *sourceMetrics) count(ctx context.Context, outcome string, n int) {
	switch outcome {
	case sourceLive, sourceReplayed, sourceDuplicate, sourceBad, sourceForeign, sourceLost:
		m.batches.Add(ctx, int64(n), metric.WithAttributes(attribute.String("outcome", outcome)))
	default:
		m.news.Add(ctx, int64(n), metric.WithAttributes(attribute.String("kind", outcome)))
	}
}

func (m *sourceMetrics) drops(ctx context.Context, d Drops) {
	for reason, n := range d {
		if n > 0 {
			m.leftOut.Add(ctx, int64(n), metric.WithAttributes(attribute.String("reason", DropReason(reason).String())))
		}
	}
}
