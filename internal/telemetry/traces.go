// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Traces sends spans to an OpenTelemetry collector.
type Traces struct {
	provider *sdktrace.TracerProvider
	exporter *exporter
}

// NewTraces makes a provider of tracers as the OTEL_ variables of the environment say; docs/observe.md
// lists them. It returns nil if they ask for no traces. Spans wait in a queue, so that no caller of
// a tracer waits for the collector. count is called with the number of spans that were "exported",
// "dropped" (the queue is full) or "failed" (the collector did not take them all). count must not block.
func NewTraces(ctx context.Context, log *slog.Logger, count func(spans int, outcome ...string)) (*Traces, error) {
	protocol, err := protocol()
	if protocol == "" {
		return nil, err
	}
	e := &exporter{log: log, count: count, room: sdktrace.DefaultMaxQueueSize}
	if n, err := strconv.ParseInt(os.Getenv("OTEL_BSP_MAX_QUEUE_SIZE"), 10, 32); err == nil && n > 0 {
		e.room = n
	}
	if protocol == "grpc" {
		e.SpanExporter, err = otlptracegrpc.New(ctx)
	} else {
		e.SpanExporter, err = otlptracehttp.New(ctx, otlptracehttp.WithProxy(noRedirects))
	}
	if err != nil {
		return nil, fmt.Errorf("telemetry: make the exporter of traces: %w", err)
	}
	e.ended, e.end = context.WithCancel(context.WithoutCancel(ctx))
	return &Traces{exporter: e, provider: sdktrace.NewTracerProvider(sdktrace.WithResource(origin(ctx)),
		sdktrace.WithSpanProcessor(&queue{sdktrace.NewBatchSpanProcessor(e), e}))}, nil
}

var errRedirect = errors.New("the collector redirects, and spans go to no other host than the configured one")

// noRedirects returns the proxy of a request to the collector: that of the environment. It refuses the requests by
// which the HTTP client follows a redirect. (The exporter's HTTP client cannot be replaced: the variables for its
// certificates and its timeout would not count.)
func noRedirects(r *http.Request) (*url.URL, error) {
	if r.Response != nil {
		return nil, errRedirect
	}
	return http.ProxyFromEnvironment(r)
}

// protocol returns the protocol of exports, or "" for no traces.
func protocol() (string, error) {
	which := os.Getenv("OTEL_TRACES_EXPORTER")
	endpoint := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT"))
	switch {
	case strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true"), which == "none", which == "" && endpoint == "":
		return "", nil
	case which != "" && which != "otlp":
		return "", fmt.Errorf("OTEL_TRACES_EXPORTER is %q, want otlp or none", which)
	}
	p := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), "http/protobuf")
	switch p {
	case "grpc", "http/protobuf", "http/json":
		return p, nil
	}
	return "", fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL is %q, want grpc, http/protobuf or http/json", p)
}

// origin describes this process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
func origin(ctx context.Context) *resource.Resource {
	// The error is about parts of the variables, which the resource then lacks.
	r, _ := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(
		attribute.String("service.name", "kvroute"), attribute.String("service.version", Version())), resource.WithFromEnv())
	return r
}

// Tracer returns the tracer with which a package makes its spans.
func (t *Traces) Tracer(name string) trace.Tracer { return t.provider.Tracer(name) }

// Shutdown exports the spans that wait, and gives up when ctx ends.
func (t *Traces) Shutdown(ctx context.Context) error {
	defer t.exporter.end() // of an export that goes on
	return t.provider.Shutdown(ctx)
}

// queue limits the spans that wait for their export. The processor behind it would drop spans
// without counting them.
type queue struct {
	sdktrace.SpanProcessor
	exporter *exporter
}

// OnEnd adds a span to the queue, or drops it.
func (q *queue) OnEnd(s sdktrace.ReadOnlySpan) {
	e := q.exporter
	if e.waiting.Add(1) > e.room {
		e.waiting.Add(-1)
		e.count(1, "dropped")
		return
	}
	q.SpanProcessor.OnEnd(s)
}

// exporter counts the spans that its exporter exports.
type exporter struct {
	sdktrace.SpanExporter
	log     *slog.Logger
	count   func(spans int, outcome ...string)
	room    int64 // for spans that wait or are being exported
	waiting atomic.Int64
	failing bool               // the last export failed
	ended   context.Context    //nolint:containedctx // ends exports at the end of the shutdown's time
	end     context.CancelFunc // ends it
}

// ExportSpans exports spans and returns no error: it has counted and logged the error. There is one
// call at a time.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ended, cancel)() //nolint:contextcheck // a second context that ends the export
	err := e.SpanExporter.ExportSpans(ctx, spans)
	e.waiting.Add(-int64(len(spans)))
	outcome := "exported"
	if err != nil {
		outcome = "failed"
	}
	e.count(len(spans), outcome)
	if failed := err != nil; failed != e.failing {
		e.failing = failed
		if text := fmt.Sprint(err); failed { // it may have the collector's whole response
			e.log.Warn("spans were not exported: the collector is unreachable or refuses them",
				"err", text[:min(len(text), 500)])
		} else {
			e.log.Info("spans are exported again")
		}
	}
	return nil
}
