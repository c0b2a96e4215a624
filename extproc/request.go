// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"fmt"

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
		return s.pass(m) // without a prompt, for an engine with one model: any worker of the pool will do
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
	if bad := s.steer(&req, &fields); bad != nil {
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
		out := s.forward(&fields, m, body)
		if s.flow == whole || m == headersOurs || m == headersBodyless {
			return s.send(s.route(m, out))
		}
		return s.flush(m, s.route(headersOurs, out), out)
	case ctx.Err() != nil:
		return false
	case starting && unserved(err):
		s.server.failOpen(failStarting, err)
		return s.pass(m)
	case fields.Model == "" && !unread && errors.Is(err, router.ErrUnknownModel):
		return s.pass(m) // there are several models, and each worker of the pool knows its own
	}
	// Nothing is known of a request that was not read, so it is not refused.
	if r := s.refusal(err, fields.Model); r != nil && (!unread || errors.Is(err, router.ErrNoWorkers)) {
		return s.refuse(r)
	}
	why := failInternal
	switch {
	case errors.Is(err, router.ErrDecisionTimeout) || errors.Is(err, context.DeadlineExceeded):
		why = failBudget
	case unread && s.encoding != "":
		why = failEncoding
	case unread:
		why = failMode
	}
	s.server.failOpen(why, err)
	return s.pass(m)
}

// readBody reads the request's body, of which b is the last part. unread says that it cannot
// be read, or not all of it.
func (s *stream) readBody(ctx context.Context, m message, b *extprocv3.HttpBody, body []byte) (fields openai.Body, unread bool, bad *openai.Error) {
	if m == headersOurs {
		return fields, true, nil
	}
	s.server.metrics.received(len(body))
	limit := s.server.conf.MaxBodyBytes
	if len(body) > limit {
		return fields, false, tooLarge(limit)
	}
	s.truncated = s.partial && m == requestBody && !b.GetEndOfStream()
	text, read, err := s.plain(ctx, body)
	if err != nil {
		return fields, false, tooLarge(limit)
	}
	if !read {
		return fields, true, nil
	}
	fields, bad = openai.Parse(s.endpoint, text)
	if bad != nil && s.truncated {
		return openai.ParseTruncated(text), true, nil
	}
	return fields, false, bad
}

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
	if !d.Address.IsValid() {
		s.free()
		return fmt.Errorf("extproc: worker %d has no address", d.Worker.ID)
	}
	if !s.server.conf.mayServe(d.Address) {
		s.free()
		return fmt.Errorf("extproc: worker %d at %s is outside the worker networks", d.Worker.ID, d.Address)
	}
	s.decision = d
	return nil
}

// forward returns the body with the prompt as ids, nil if it stays as it is.
func (s *stream) forward(fields *openai.Body, m message, body []byte) []byte {
	t := s.decision.Tokens
	if s.decision.Tokens = nil; t == nil || m != requestBody {
		return nil
	}
	switch {
	case s.encoding != "":
		s.server.metrics.forward("", keptEncoding)
		return nil
	case s.flow == ahead, s.truncated: // what follows a part is not ours to give a length to
		s.server.metrics.forward("", keptMode)
		return nil
	}
	out, form, outcome := s.server.forms.forward(s.endpoint, fields, t, body, s.server.conf.MaxBodyBytes)
	s.server.metrics.forward(form, outcome)
	return out
}
