// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// The senders of the prefill request of a split request.
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

// routeSplit runs the prefill leg of the decision, and answers all unanswered messages of the request, of
// which m is the last one. It returns false if the stream must end.
func (s *stream) routeSplit(ctx context.Context, m message, fields *openai.Body, body []byte) bool {
	decode, err := s.runLeg(ctx, fields, body)
	switch {
	case ctx.Err() != nil:
		return false
	case err != nil:
		return s.refuse(s.refusal(err, fields.Model))
	}
	return s.route(m, decode)
}

// engineID is an id that Envoy has made. No engine reads an address from it.
var engineID = regexp.MustCompile(`^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$`)

// runLeg runs the prefill leg of the decision; see [Server.runLeg].
func (s *stream) runLeg(ctx context.Context, fields *openai.Body, body []byte) ([]byte, error) {
	leg := prefill.Leg{Path: "/v1/chat/completions", Header: http.Header{}, Body: body, Prompts: fields.Prompts}
	if engineID.MatchString(s.requestID) {
		leg.Header.Set("x-request-id", s.requestID) // as the decode worker's
	}
	addTrace(leg.Header, &s.arrival)
	if s.endpoint == openai.Completions {
		leg.Path = "/v1/completions"
	}
	return s.Server.runLeg(ctx, &s.decision, leg, s.conf.MaxBodyBytes, func() { // Envoy answers 413 to larger bodies
		s.reserved.giveBack() // the leg has reserved room for the client's body, too
		if !s.extended {
			s.extend(s.conf.PrefillTimeout)
		}
	})
}

// RunLeg runs the prefill leg of a decision for a request that another server of this process sends to the
// decision's worker. It returns the body of that request, or nil if the body stays as it is: kvroute sends no
// prefill request, or the leg has failed, and the worker computes the prompt. The error is that of
// [router.Router.PrefillFailed].
func (s *Server) RunLeg(ctx context.Context, d *router.Decision, leg prefill.Leg) ([]byte, error) {
	if d.Prefill == nil || s.conf.legByHeader(d) {
		return nil, nil
	}
	return s.runLeg(ctx, d, leg, math.MaxInt, func() {})
}

// runLeg runs the prefill leg of a decision, and returns the decode request's body, which has at most the given
// number of bytes. If the leg fails, the body is nil: it is unchanged, and the worker computes the prompt. The error
// is that of [router.Router.PrefillFailed]. runLeg calls begins once there is room for both bodies.
func (s *Server) runLeg(ctx context.Context, d *router.Decision, leg prefill.Leg, most int, begins func()) ([]byte, error) {
	size := 2 * len(leg.Body) // the client's body, and the decode worker's
	began := time.Now()
	var decode []byte
	outcome := legMemory
	if s.bodies.takeForLeg(size) {
		begins()
		deadline := began.Add(s.conf.PrefillTimeout)
		decode, outcome = s.prefill.Do(ctx, d.Prefill, leg, deadline, func() { s.bodies.giveForLeg(size) })
		if len(decode) > most {
			decode, outcome = nil, legLarge
		}
	}
	s.metrics.legs.Record(context.Background(), time.Since(began).Seconds(),
		metric.WithAttributes(attribute.String("outcome", outcome)))
	switch {
	case decode != nil:
		return decode, nil
	case outcome != prefill.Left:
		s.conf.Log.Debug("a prefill leg failed", "worker", d.Prefill.Worker.ID, "reason", outcome)
		return nil, s.router.PrefillFailed(d.ID)
	}
	return nil, nil
}

// addTrace adds the request's trace context to the headers of another request, so that the worker's spans
// belong to the same trace. A broken context adds nothing.
func addTrace(h http.Header, a *router.Arrival) {
	from := propagation.MapCarrier{"traceparent": a.TraceParent, "tracestate": a.TraceState}
	w3c := propagation.TraceContext{}
	w3c.Inject(w3c.Extract(context.Background(), from), propagation.HeaderCarrier(h))
}

// legByHeader reports whether the decode worker sends the prefill request. A frontend always
// does: it reads the prefill worker from headers.
func (c *Config) legByHeader(d *router.Decision) bool {
	return c.PrefillLeg == PrefillByHeader || engine.Of(d.Engine).Forwards
}

// prefillHeaders returns the headers that name the prefill worker to a decode worker's sidecar, as
// name, value, name, value.
func prefillHeaders(d *router.Decision) []string {
	at := d.Address.String()
	headers := []string{headerPrefillWorker, at, headerPrefiller, at}
	if engine.Of(d.Engine).Forwards {
		headers = append(headers, headerPrefillPin, fmt.Sprint(d.Worker.ID), headerPrefillRank, fmt.Sprint(d.Worker.DPRank))
	}
	return headers
}

// Headers that name the prefill worker: kvroute's own, and that of llm-d's sidecar.
const (
	headerPrefillWorker = "x-dynamo-prefill-worker"
	headerPrefiller     = "x-prefiller-host-port"
)

// takeForLeg reserves n bytes for the time of a prefill leg. Legs get at most half of the budget:
// slow prefill workers must leave room for requests that are decided.
func (b *bodyBudget) takeForLeg(n int) bool {
	if b.legs.Add(int64(n)) <= b.most/2 && b.take(n) {
		return true
	}
	b.legs.Add(-int64(n))
	return false
}

func (b *bodyBudget) giveForLeg(n int) {
	b.legs.Add(-int64(n))
	b.give(n)
}
