// SPDX-License-Identifier: Apache-2.0

package outcomes

import (
	"cmp"
	"context"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvroute/kvroute/router"
)

// Trace makes the spans of a request that has ended: one for the request, below the span of its
// traceparent, and below that one for each step whose times are known. A broken traceparent counts
// as none. Trace costs little if the request's trace is not sampled.
func Trace(tracer trace.Tracer, o *router.Outcome) {
	d := &o.Decision
	// The steps of the decision follow one another. The queue is between match and choice.
	queued := d.Time.Add(-d.QueueTime)
	hashed := queued.Add(-d.HashTime - d.ProbeTime - d.MatchTime)
	began := hashed.Add(-d.TokenizeTime)
	first := o.Began
	if first.IsZero() || began.Before(first) {
		first = began
	}
	ctx := context.Background()
	if o.TraceParent != "" {
		ctx = propagation.TraceContext{}.Extract(ctx,
			propagation.MapCarrier{"traceparent": o.TraceParent, "tracestate": o.TraceState})
	}
	ctx, root := tracer.Start(ctx, strings.TrimSpace(d.Labels.Operation+" "+text(d.Model)), trace.WithTimestamp(first),
		trace.WithSpanKind(trace.SpanKindServer))
	if !root.IsRecording() {
		return
	}
	last := d.Freed
	step := func(name string, from, to time.Time, about ...attribute.KeyValue) {
		if from.IsZero() || !to.After(from) {
			return
		}
		_, s := tracer.Start(ctx, name, trace.WithTimestamp(from), trace.WithAttributes(about...))
		s.End(trace.WithTimestamp(to))
		if to.After(last) {
			last = to
		}
	}
	step("body", o.Began, o.BodyAt)
	step("tokenize", began, hashed, attribute.String("kvroute.tokenize.mode", string(d.TokenMode)),
		attribute.Int("kvroute.tokenize.bytes", d.TextBytes))
	step("match", hashed, queued, attribute.Int("kvroute.prompt.blocks", d.PromptBlocks))
	step("queue", queued, d.Time)
	step("decide", d.Time, d.Time.Add(d.PickTime), attribute.String("kvroute.reason", string(d.Reason)))
	if leg := d.Prefill; leg != nil {
		step("prefill", leg.Time, cmp.Or(o.LegEnded, d.Freed), worker(leg)...)
	}
	if d.FirstTokenBy != router.SignEnd {
		step("first token", d.Time, d.FirstToken, attribute.String("kvroute.first_token.source", string(d.FirstTokenBy)))
	}
	root.SetAttributes(append(worker(d), request(o)...)...)
	if failed(o) {
		root.SetStatus(codes.Error, "")
	}
	root.End(trace.WithTimestamp(last))
}

// worker describes the worker of a decision. Names that exist in OpenTelemetry's conventions for
// GenAI and HTTP are theirs, the others are kvroute's.
func worker(d *router.Decision) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("kvroute.worker.name", text(cmp.Or(d.WorkerName, strconv.FormatUint(d.Worker.ID, 10)))),
		attribute.String("kvroute.worker.address", d.Address.String()),
		attribute.Int64("kvroute.worker.rank", int64(d.Worker.DPRank)),
		attribute.Int("kvroute.overlap_blocks", d.OverlapBlocks),
		attribute.Int("kvroute.cached_tokens", d.CachedTokens),
		attribute.Int("kvroute.prompt_tokens", d.PromptTokens),
		attribute.String("kvroute.reason", string(d.Reason)),
	}
}

// request describes a request and its response.
func request(o *router.Outcome) []attribute.KeyValue {
	about := []attribute.KeyValue{
		attribute.String("gen_ai.request.model", text(o.Model)),
		attribute.String("kvroute.request.id", text(o.ID)),
	}
	if name := o.Labels.Operation; name != "" {
		about = append(about, attribute.String("gen_ai.operation.name", name))
	}
	if id := o.Labels.RequestID; id != "" {
		about = append(about, attribute.StringSlice("http.request.header.x-request-id", []string{text(id)}))
	}
	if o.Status != 0 {
		about = append(about, attribute.Int("http.response.status_code", o.Status))
	}
	if e := errorType(o); e != "" {
		about = append(about, attribute.String("error.type", e))
	}
	if o.Served.IsValid() {
		about = append(about, attribute.String("kvroute.served.address", o.Served.String()))
	}
	if o.Holdout != "" {
		about = append(about, attribute.String(holdoutAttribute, string(o.Holdout)))
	}
	if o.NoLeg != "" {
		about = append(about, attribute.String("kvroute.no_prefill", string(o.NoLeg)))
	}
	if u := o.Usage; u != nil {
		about = append(about, attribute.Int("gen_ai.usage.input_tokens", u.PromptTokens),
			attribute.Int("gen_ai.usage.output_tokens", u.OutputTokens))
		if u.Cached {
			about = append(about, attribute.Int("gen_ai.usage.cache_read.input_tokens", u.CachedTokens))
		}
	}
	return about
}

// text replaces bytes that are not UTF-8: with such bytes in one span, a whole export would fail.
func text(s string) string { return strings.ToValidUTF8(s, "�") }
