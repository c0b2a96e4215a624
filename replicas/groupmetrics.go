// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// What becomes of messages between router groups and those above them.
const (
	groupFull       = "full"        // a part of one, received
	groupDelta      = "delta"       // received
	groupLoad       = "load"        // received
	groupHole       = "hole"        // received, with messages missing before it
	groupBehindHole = "behind_hole" // received after a hole: only its load counts
	groupRepeated   = "repeated"
	groupOld        = "old"           // of an epoch that was left
	groupBad        = "bad"           // cannot be read
	groupUnknown    = "unknown_group" // that the configuration does not name
	groupTooMany    = "too_many"      // models of a group; or groups, or blocks, to be probed
	groupBlockSize  = "block_size"    // of a second size for one model
	groupRefused    = "refused"       // the router has no such candidate
	groupClockSet   = "clock"         // its clock was set
	groupAsked      = "asked"         // a full was requested
	groupUnsent     = "unsent"        // there is no connection
	groupOvertaken  = "overtaken"     // the index changed faster than it could be read

	groupAnswered = "answered"  // to a probe
	groupBusy     = "busy"      // answered so
	groupNoWorker = "no_worker" // answered as busy: there is none, or no such model
	groupBadProbe = "bad"       // cannot be read
	groupLate     = "late"      // not answered in time
	groupNobody   = "nobody"    // no replica of the group listens
	groupSkipped  = "skipped"   // not asked, since it does not answer
)

// groupMetrics are the instruments of router groups. docs/metrics.md lists them.
type groupMetrics struct {
	messages, told, bytes, probes, answers metric.Int64Counter
	took                                   metric.Float64Histogram
}

func newGroupMetrics(meter metric.Meter) (*groupMetrics, error) {
	var errs [6]error
	m := &groupMetrics{}
	m.messages, errs[0] = meter.Int64Counter("kvroute.group.events",
		metric.WithUnit("{event}"), metric.WithDescription("What happened to summaries of router groups, by kind."))
	m.told, errs[1] = meter.Int64Counter("kvroute.group.sent",
		metric.WithUnit("{message}"), metric.WithDescription("Summaries sent for the own router group, by kind."))
	m.bytes, errs[2] = meter.Int64Counter("kvroute.group.sent.size",
		metric.WithUnit("By"), metric.WithDescription("Size of the summaries sent, by kind."))
	m.probes, errs[3] = meter.Int64Counter("kvroute.group.probes",
		metric.WithUnit("{probe}"), metric.WithDescription("Probes of router groups, by what became of them."))
	m.answers, errs[4] = meter.Int64Counter("kvroute.group.answers",
		metric.WithUnit("{probe}"), metric.WithDescription("Probes of the own router group, by what was answered."))
	m.took, errs[5] = meter.Float64Histogram("kvroute.group.probe.duration", metric.WithUnit("s"),
		metric.WithDescription("Time that a request waited for the answers to its probes."),
		metric.WithExplicitBucketBoundaries(.0001, .0002, .0005, .001, .002, .003, .005, .01))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("make instruments: %w", err)
	}
	return m, nil
}

// observe makes the gauges of [Groups].
func (m *groupMetrics) observe(meter metric.Meter, ages func() []groupAge) error {
	_, err1 := meter.Float64ObservableGauge("kvroute.group.summary.age", metric.WithUnit("s"),
		metric.WithDescription("Age of the last summary of a router group, by group and model."),
		metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error {
			for _, a := range ages() {
				if a.age >= 0 {
					o.Observe(a.age.Seconds(), metric.WithAttributes(attribute.String("group", a.group), attribute.String("model", a.model)))
				}
			}
			return nil
		}))
	_, err2 := meter.Int64ObservableGauge("kvroute.group.candidates", metric.WithUnit("{group}"),
		metric.WithDescription("Router groups, one for each model of theirs, by state of their summaries."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			count := map[string]int64{"fresh": 0, "stale": 0, "missing": 0}
			for _, a := range ages() {
				switch {
				case a.fresh:
					count["fresh"]++
				case a.age >= 0:
					count["stale"]++
				default:
					count["missing"]++
				}
			}
			for state, n := range count {
				o.Observe(n, metric.WithAttributes(attribute.String("state", state)))
			}
			return nil
		}))
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Errorf("make instruments: %w", err)
	}
	return nil
}

func kindOf(kind string) metric.AddOption {
	return metric.WithAttributes(attribute.String("kind", kind))
}

func (m *groupMetrics) count(kind string) { m.messages.Add(context.Background(), 1, kindOf(kind)) }

func (m *groupMetrics) sent(kind string, size int) {
	m.told.Add(context.Background(), 1, kindOf(kind))
	m.bytes.Add(context.Background(), int64(size), kindOf(kind))
}

func (m *groupMetrics) probed(ctx context.Context, outcome string, n int) {
	if n > 0 {
		m.probes.Add(ctx, int64(n), metric.WithAttributes(attribute.String("outcome", outcome)))
	}
}

func (m *groupMetrics) answered(ctx context.Context, outcome string) {
	m.answers.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", outcome)))
}

func (m *groupMetrics) probeTook(ctx context.Context, d time.Duration) {
	m.took.Record(ctx, d.Seconds())
}
