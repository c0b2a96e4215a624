// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// kind is a kind of stream.
type kind uint8

const (
	mainStream kind = iota
	observerStream
	kinds // the number of kinds
)

func (k kind) String() string { return [...]string{"main", "observer"}[k] }

// How streams end, beside the states of main streams.
const (
	endPanic      = "panic"
	endLimit      = "limit"
	endUnrouted   = "unrouted"
	endElsewhere  = "elsewhere"
	endNoEvents   = "no_events"
	endFirstToken = "first_token"
	endEnded      = "ended"
	endDraining   = "draining"
)

// metrics are the package's instruments. docs/metrics.md lists them.
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
	legs      metric.Float64Histogram

	kinds [kinds]metric.MeasurementOption // labels, made once since every request needs them
}

func newMetrics(meter metric.Meter) (*metrics, error) {
	var errs []error
	counter := func(name, unit, help string) metric.Int64Counter {
		c, err := meter.Int64Counter("kvroute.extproc."+name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	m := metrics{
		ends:      counter("stream.ends", "{stream}", "Streams ended, by kind and last state."),
		failOpen:  counter("fail_open", "{request}", "Requests that Envoy routes without kvroute, by reason."),
		refusals:  counter("refusals", "{request}", "Requests answered with an error, by status."),
		strays:    counter("strays", "{message}", "Unexpected messages of Envoy, by message."),
		forwards:  counter("forwards", "{request}", "Requests whose prompt could be forwarded as token ids, by form and outcome."),
		queries:   counter("queries", "{request}", "Requests that only queried their worker."),
		encodings: counter("encodings", "{request}", "Requests with a compressed body, by encoding and outcome."),
		unreached: counter("unreached", "{request}", "Requests that Envoy could not send to the chosen worker, because it has no endpoint there."),
	}
	var err error
	m.streams, err = meter.Int64UpDownCounter("kvroute.extproc.streams",
		metric.WithUnit("{stream}"), metric.WithDescription("Streams open, by kind: main or observer."))
	errs = append(errs, err)
	m.bodySize, err = meter.Int64Histogram("kvroute.extproc.request.body.size",
		metric.WithUnit("By"), metric.WithDescription("Size of the bodies of requests that kvroute routes."),
		// From a question to a long document, in powers of four.
		metric.WithExplicitBucketBoundaries(256, 1<<10, 4<<10, 16<<10, 64<<10, 256<<10, 1<<20, 4<<20, 16<<20))
	errs = append(errs, err)
	m.legs, err = meter.Float64Histogram("kvroute.extproc.prefill.duration",
		metric.WithUnit("s"), metric.WithDescription("Time that requests waited for their prefill leg, by outcome."),
		// From a prefill worker that is not reached to the longest prompts.
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30))
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, fmt.Errorf("extproc: make instruments: %w", err)
	}
	for k := range kinds {
		m.kinds[k] = metric.WithAttributeSet(attribute.NewSet(label("kind", k.String())))
	}
	return &m, nil
}

// count adds 1 to a counter. It takes no context: most streams have ended at the call, and the
// counter would record nothing of the context.
func count(c metric.Int64Counter, labels ...attribute.KeyValue) {
	c.Add(context.Background(), 1, metric.WithAttributes(labels...))
}

func label(name, value string) attribute.KeyValue { return attribute.String(name, value) }
