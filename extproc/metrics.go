// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// metrics are the package's instruments. docs/metrics.md lists them. Labels that
// every request needs are made once.
type metrics struct {
	streams   metric.Int64UpDownCounter
	ends      metric.Int64Counter
	failOpen  metric.Int64Counter
	refusals  metric.Int64Counter
	strays    metric.Int64Counter
	bodySize  metric.Int64Histogram
	forwards  metric.Int64Counter
	encodings metric.Int64Counter
	queries   metric.Int64Counter
	unreached metric.Int64Counter

	kinds [kinds]metric.MeasurementOption
	how   [kinds]map[string]metric.MeasurementOption // streams end
}

func newMetrics(meter metric.Meter) (*metrics, error) {
	var errs []error
	counter := func(name, unit, help string) metric.Int64Counter {
		c, err := meter.Int64Counter("kvroute.extproc."+name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	m := metrics{
		ends:      counter("stream.ends", "{stream}", "Streams ended, by kind and by where they stood."),
		failOpen:  counter("fail_open", "{request}", "Requests that Envoy was left to route, by reason."),
		refusals:  counter("refusals", "{request}", "Requests answered with an error, by status."),
		strays:    counter("strays", "{message}", "Messages of Envoy that were not expected, by message."),
		forwards:  counter("forwards", "{request}", "Requests whose prompt was to be handed on as token ids, by form and by what became of it."),
		queries:   counter("queries", "{request}", "Requests that only asked for their worker, and were told."),
		encodings: counter("encodings", "{request}", "Requests with a compressed body, by its encoding and by what became of it."),
		unreached: counter("unreached", "{request}", "Requests that Envoy could not send to the worker named, because it has no endpoint there."),
	}
	var err error
	m.streams, err = meter.Int64UpDownCounter("kvroute.extproc.streams",
		metric.WithUnit("{stream}"), metric.WithDescription("Streams open, by kind: main or observer."))
	errs = append(errs, err)
	m.bodySize, err = meter.Int64Histogram("kvroute.extproc.request.body.size",
		metric.WithUnit("By"), metric.WithDescription("Bodies of requests to be routed."),
		// From a question to a long document, in powers of four.
		metric.WithExplicitBucketBoundaries(256, 1<<10, 4<<10, 16<<10, 64<<10, 256<<10, 1<<20, 4<<20, 16<<20))
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, fmt.Errorf("extproc: make instruments: %w", err)
	}
	for k := range kinds {
		m.kinds[k] = label("kind", k.String())
		m.how[k] = make(map[string]metric.MeasurementOption)
		for _, end := range ends(k) {
			m.how[k][end] = metric.WithAttributeSet(attribute.NewSet(attribute.String("kind", k.String()), attribute.String("end", end)))
		}
	}
	return &m, nil
}

func label(name, value string) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(attribute.String(name, value)))
}

// The methods take no context: that of a stream is over when most of them are
// called, and nothing of it would be recorded.

func (m *metrics) opened(k kind, n int64) { m.streams.Add(context.Background(), n, m.kinds[k]) }

// ended counts the end of a stream; end is one of [ends].
func (m *metrics) ended(k kind, end string) { m.ends.Add(context.Background(), 1, m.how[k][end]) }

func (m *metrics) failedOpen(why failure) {
	m.failOpen.Add(context.Background(), 1, label("reason", why.String()))
}

func (m *metrics) refused(status int) {
	m.refusals.Add(context.Background(), 1, metric.WithAttributes(attribute.Int("status", status)))
}

func (m *metrics) stray(what message) {
	m.strays.Add(context.Background(), 1, label("message", what.String()))
}

func (m *metrics) notReached() { m.unreached.Add(context.Background(), 1) }

func (m *metrics) query() { m.queries.Add(context.Background(), 1) }

// encoded counts a compressed body; both names are of our own sets.
func (m *metrics) encoded(name, outcome string) {
	m.encodings.Add(context.Background(), 1, label("encoding", name), label("outcome", outcome))
}

func (m *metrics) received(n int) { m.bodySize.Record(context.Background(), int64(n)) }
