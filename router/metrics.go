// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/indexer"
)

// metrics are the router's instruments. docs/metrics.md lists them.
type metrics struct {
	decisions metric.Int64Counter
	duration  metric.Float64Histogram
	overlap   metric.Float64Histogram
	blocks    metric.Int64Counter
	prompts   metric.Int64Counter
	reused    metric.Int64Counter
}

func newMetrics(meter metric.Meter, r *Router) (*metrics, error) {
	var m metrics
	var errs [10]error
	m.decisions, errs[0] = meter.Int64Counter("kvroute.router.decisions",
		metric.WithUnit("{decision}"), metric.WithDescription("Booked decisions, by model and reason."))
	m.duration, errs[1] = meter.Float64Histogram("kvroute.router.decision.duration",
		metric.WithUnit("s"), metric.WithDescription("Time of a decision: tokens, hashes, match, choice and booking."),
		// From a short prompt that is matched in microseconds to the budget of a request.
		metric.WithExplicitBucketBoundaries(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, .1, .25, .5, 1, 2.5))
	m.overlap, errs[2] = meter.Float64Histogram("kvroute.router.overlap.ratio",
		metric.WithUnit("1"), metric.WithDescription("Share of a prompt's full blocks that the chosen worker holds."),
		metric.WithExplicitBucketBoundaries(0, .1, .2, .3, .4, .5, .6, .7, .8, .9, .95, .99, 1))
	m.blocks, errs[3] = meter.Int64Counter("kvroute.router.event.blocks",
		metric.WithUnit("{block}"), metric.WithDescription("Blocks in the events of workers, by what became of them."))

	m.prompts, errs[8] = meter.Int64Counter("kvroute.tokenize.requests",
		metric.WithUnit("{request}"), metric.WithDescription("Booked requests whose prompt was read, by model, by how its token ids were made and why not exactly."))
	m.reused, errs[9] = meter.Int64Counter("kvroute.tokenize.reused.size",
		metric.WithUnit("By"), metric.WithDescription("Text of prompts whose token ids were known from earlier ones, by model."))

	var indexBlocks, slots, workers metric.Int64ObservableGauge
	indexBlocks, errs[4] = meter.Int64ObservableGauge("kvroute.router.index.blocks",
		metric.WithUnit("{block}"), metric.WithDescription("Pairs of block and worker in the index, by model and by where they are known from."))
	slots, errs[5] = meter.Int64ObservableGauge("kvroute.router.slots",
		metric.WithUnit("{request}"), metric.WithDescription("Requests in flight that hold a slot, by model."))
	workers, errs[6] = meter.Int64ObservableGauge("kvroute.router.workers",
		metric.WithUnit("{worker}"), metric.WithDescription("Workers known, by model and health."))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("router: make instruments: %w", err)
	}
	_, errs[7] = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		r.observe(o, indexBlocks, slots, workers)
		return nil
	}, indexBlocks, slots, workers)
	return &m, errs[7]
}

func (r *Router) observe(o metric.Observer, indexBlocks, slots, workers metric.Int64ObservableGauge) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	for _, p := range r.pools {
		model := attribute.String("model", p.model)
		var byHealth [Unhealthy + 1]int64
		p.mu.Lock()
		taken := p.core.slots.Len()
		for _, ord := range p.core.order {
			byHealth[min(p.core.entries[ord].info.Health, Unhealthy)]++
		}
		p.mu.Unlock()
		c := p.cache.Load()
		o.ObserveInt64(indexBlocks, int64(c.index.Blocks()), metric.WithAttributes(model, attribute.String("source", "events")))
		o.ObserveInt64(indexBlocks, int64(c.history.Blocks()), metric.WithAttributes(model, attribute.String("source", "history")))
		if c.predicted != nil {
			o.ObserveInt64(indexBlocks, int64(c.predicted.Blocks()), metric.WithAttributes(model, attribute.String("source", "prediction")))
		}
		o.ObserveInt64(slots, int64(taken), metric.WithAttributes(model))
		for h, n := range byHealth {
			o.ObserveInt64(workers, n, metric.WithAttributes(model, attribute.String("health", Health(h).String())))
		}
	}
}

func (m *metrics) decided(ctx context.Context, d *Decision) {
	model := attribute.String("model", d.Model)
	m.decisions.Add(ctx, 1, metric.WithAttributes(model, attribute.String("reason", string(d.Reason))))
	m.duration.Record(ctx, (d.TokenizeTime + d.MatchTime + d.PickTime).Seconds(), metric.WithAttributes(model))
	if d.TokenMode != "" {
		m.prompts.Add(ctx, 1, metric.WithAttributes(model, attribute.String("mode", string(d.TokenMode)), attribute.String("reason", d.TokenReason)))
		m.reused.Add(ctx, int64(d.ReusedBytes), metric.WithAttributes(model))
	}
	if d.PromptBlocks > 0 {
		m.overlap.Record(ctx, float64(d.OverlapBlocks)/float64(d.PromptBlocks), metric.WithAttributes(model))
	}
}

func (m *metrics) applied(out indexer.Outcome) {
	for _, c := range [...]struct {
		outcome string
		n       int
	}{
		{"stored", out.Stored},
		{"removed", out.Removed},
		{"duplicate", out.Duplicate},
		{"conflict", out.Conflict},
		{"orphan", out.Orphan},
		{"parked", out.Parked},
		{"evicted", out.Evicted},
		{"unknown", out.Unknown},
		{"refused", out.Refused},
		{"other_tier", out.OtherTier},
		{"invalid", out.Invalid},
	} {
		if c.n > 0 {
			m.blocks.Add(context.Background(), int64(c.n), metric.WithAttributes(attribute.String("outcome", c.outcome)))
		}
	}
}
