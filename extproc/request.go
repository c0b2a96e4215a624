// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"fmt"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// answerRequest answers what is unanswered of the request, the last of it m, with a worker,
// a refusal, or nothing: fail open. It does not answer if the stream has ended.
func (s *stream) answerRequest(ctx context.Context, m message, b *extprocv3.HttpBody) bool {
	defer s.giveBack()
	defer s.deflate()
	body, ok := s.body(b)
	if !ok {
		s.server.failOpen(failHeld, nil)
		return s.pass(m)
	}
	fields, unread, bad := s.readBody(ctx, m, b, body)
	if bad != nil {
		return s.refuse(bad)
	}
	if fields.Model == "" && !unread && fields.Size > 0 {
		return s.pass(m) // no prompt, for an engine with one model: any worker of the pool is right
	}
	req := router.Request{
		Owned: true,
		Model: fields.Model, Prompt: fields.Request, Tokens: fields.Tokens, Salt: fields.CacheSalt,
		Unread: unread && fields.Model == "",
		// Treat the response as non-streaming unless the body has "stream": true. A first
		// token that is seen all the same counts as well.
		Unseen:     !fields.Stream,
		WantTokens: len(s.server.forms) > 0, WantSecond: s.server.conf.SecondChoice != SecondNone,
	}
	if s.salt != "" { // the header can be a gateway's; the body is always the client's
		req.Salt = s.salt
	}
	if bad := s.steer(&req, fields.NVExt); bad != nil {
		return s.refuse(bad)
	}
	if _, may := s.direct(); may && openai.Queries(fields.NVExt) {
		return s.query(ctx, req, fields.Model)
	}
	starting := s.server.starting()
	err := s.bestWorker(ctx, &req)
	switch {
	case err == nil:
		s.state = routed
		return s.route(m, s.forward(&fields, m, body))
	case ctx.Err() != nil:
		return false
	}
	why := s.failure(err, starting, unread)
	switch {
	case why == failStarting:
	case fields.Model == "" && !unread && errors.Is(err, router.ErrUnknownModel):
		return s.pass(m) // there are several models, and each worker of the pool knows its own
	// Nothing is known of an unread request, so it is not refused, unless Envoy cannot route it.
	case !unread, errors.Is(err, router.ErrNoWorkers), m.isOther() && !errors.Is(err, router.ErrUnknownModel):
		if r := s.refusal(err, fields.Model); r != nil {
			return s.refuse(r)
		}
	}
	s.server.failOpen(why, err)
	return s.pass(m)
}

// readBody reads the request's body, of which b is the last part. unread reports that it, or a
// part of it, cannot be read.
func (s *stream) readBody(ctx context.Context, m message, b *extprocv3.HttpBody, body []byte) (fields openai.Body, unread bool, bad *openai.Error) {
	if m == headersOurs || m.isOther() {
		return fields, true, nil
	}
	s.server.metrics.bodySize.Record(context.Background(), int64(len(body)))
	limit := s.server.conf.MaxBodyBytes
	if len(body) > limit {
		return fields, false, tooLarge(limit)
	}
	s.truncated = s.partial && m == requestBody && !b.GetEndOfStream()
	text, outcome := s.plain(ctx, body)
	switch outcome {
	case inflated:
	case overfilled:
		return fields, false, tooLarge(limit)
	default:
		return fields, true, nil
	}
	fields, bad = openai.Parse(s.endpoint, text)
	if bad != nil && s.truncated {
		return openai.ParseTruncated(text), true, nil
	}
	return fields, false, bad
}

// answerTime is how much longer than QueueWait Envoy is asked to wait, so that kvroute refuses
// the request before Envoy gives up.
const answerTime = 500 * time.Millisecond

// bestWorker gets a decision from the router. If the request has to wait for a worker, Envoy is
// told to wait, too.
func (s *stream) bestWorker(ctx context.Context, req *router.Request) error {
	conf := &s.server.conf
	req.DecisionTimeout, req.QueueWait = conf.DecisionTimeout, conf.QueueWait
	req.Waiting = func() {
		// An error means that the stream is at its end, which ends ctx.
		_ = s.grpc.Send(&extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(conf.QueueWait + answerTime)})
	}
	s.id = s.server.newID()
	s.booked = true // before the call, which may panic behind its booking
	req.ID = s.id
	d, err := s.server.router.BestWorker(ctx, *req)
	if err != nil {
		// Nothing is booked, or another request with this id is: see router.ErrDuplicate.
		s.booked = false
		return err
	}
	if !d.Address.IsValid() || !conf.mayServe(d.Address) {
		s.free()
		return fmt.Errorf("extproc: worker %d has the address %v, want one in the worker networks", d.Worker.ID, d.Address)
	}
	s.decision = d
	return nil
}
