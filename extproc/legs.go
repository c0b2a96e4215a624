// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"net/http"
	"strconv"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// Who sends the prefill request of a split request.
const (
	// PrefillByRouter: kvroute does, before it answers Envoy with the decode worker.
	PrefillByRouter = "router"
	// PrefillByHeader: the decode worker's sidecar or frontend does. kvroute names the prefill
	// worker in headers.
	PrefillByHeader = "header"
)

// The outcomes of legs, beside those of package prefill.
const (
	legMemory = "memory"    // no room for the bodies
	legLarge  = "too_large" // the decode request would be larger than a body may be
)

// splittable says whether kvroute could run a prefill leg for a request.
func (s *stream) splittable(m message, fields *openai.Body) router.Split {
	switch {
	case s.server.conf.PrefillLeg == PrefillByHeader:
		return router.SplitAuto
	case s.endpoint != openai.ChatCompletions && s.endpoint != openai.Completions, fields.Choices > 1,
		m != requestBody, s.flow == ahead, s.truncated, s.compressed:
		return router.SplitNever // the body cannot be changed, or not so
	}
	return router.SplitAuto
}

// runLeg runs the prefill leg of the decision, if there is one, and returns the decode request's
// body. Without a leg, or if it fails, the body is nil: it is unchanged, and the worker computes the
// prompt. The error is that of [router.Router.PrefillFailed].
func (s *stream) runLeg(ctx context.Context, fields *openai.Body, body []byte) ([]byte, error) {
	d := s.decision.Prefill
	if d == nil || s.legByHeader() {
		return nil, nil
	}
	size := 2 * len(body) // the client's body, and the decode worker's
	leg := prefill.Leg{Path: "/v1/chat/completions", Header: http.Header{}, Body: body, Prompts: fields.Prompts}
	leg.Header.Set("x-request-id", s.id)
	s.trace(leg.Header)
	if d.NameRank { // the second choice has the same rank
		leg.Header.Set(headerVLLMRank, strconv.FormatUint(uint64(d.Worker.DPRank), 10))
	}
	if s.endpoint == openai.Completions {
		leg.Path = "/v1/completions"
	}
	began := time.Now()
	var decode []byte
	outcome := legMemory
	if s.server.held.takeForLeg(size) {
		s.giveBack() // size has the client's body
		if !s.extended {
			s.extend(s.server.conf.PrefillTimeout)
		}
		decode, outcome = s.server.prefill.Do(ctx, d, leg, began.Add(s.server.conf.PrefillTimeout), func() { s.server.held.giveForLeg(size) })
		if len(decode) > s.server.conf.MaxBodyBytes { // Envoy answers 413
			decode, outcome = nil, legLarge
		}
	}
	s.server.metrics.legs.Record(context.Background(), time.Since(began).Seconds(), metric.WithAttributes(attribute.String("outcome", outcome)))
	switch {
	case decode != nil:
		return decode, nil
	case outcome != prefill.Left:
		s.server.conf.Log.Debug("a prefill leg failed", "worker", d.Worker.ID, "reason", outcome)
		return nil, s.server.router.PrefillFailed(s.id)
	}
	return nil, nil
}

// trace adds the request's trace context to the headers of another request, so that the worker's spans
// belong to the same trace. A broken context adds nothing.
func (s *stream) trace(h http.Header) {
	from := propagation.MapCarrier{"traceparent": s.arrival.TraceParent, "tracestate": s.arrival.TraceState}
	w3c := propagation.TraceContext{}
	w3c.Inject(w3c.Extract(context.Background(), from), propagation.HeaderCarrier(h))
}

// legByHeader reports whether the decode worker sends the prefill request. Dynamo's workers always
// do: their frontend reads the prefill worker from headers.
func (s *stream) legByHeader() bool {
	return s.server.conf.PrefillLeg == PrefillByHeader || s.decision.Engine == router.EngineDynamo
}

// extend gives kvroute more time to answer Envoy's message. Envoy takes only one extension for a
// message.
func (s *stream) extend(d time.Duration) {
	s.extended = true
	s.watch()
	// An error means that the stream has ended, which ends ctx.
	_ = s.grpc.Send(&extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(d + answerTime)})
}

// prefillHeaders returns the headers that name the prefill worker to a decode worker's sidecar, as
// name, value, name, value.
func (s *stream) prefillHeaders() []string {
	d := s.decision.Prefill
	if d == nil || !s.legByHeader() {
		return nil
	}
	at := d.Address.String()
	headers := []string{headerPrefillWorker, at, headerPrefiller, at}
	if d.Engine == router.EngineDynamo {
		headers = append(headers, headerPrefillPin, strconv.FormatUint(d.Worker.ID, 10), headerPrefillRank, strconv.FormatUint(uint64(d.Worker.DPRank), 10))
	}
	return headers
}

// Headers that name the prefill worker: kvroute's own, and that of llm-d's sidecar.
const (
	headerPrefillWorker = "x-dynamo-prefill-worker"
	headerPrefiller     = "x-prefiller-host-port"
)
