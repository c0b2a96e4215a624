// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// answerRequest answers all unanswered messages of the request, of which m is the last one: with
// a worker, with a refusal, or unchanged (fail open). It returns false if the stream must end.
func (s *stream) answerRequest(ctx context.Context, m message, b *extprocv3.HttpBody) bool {
	defer s.giveBack()
	body, ok := s.body(b)
	if !ok {
		s.server.failOpen(failHeld, nil)
		return s.pass(m)
	}
	fields, unread, bad := s.readBody(m, b, body)
	if bad != nil {
		return s.refuse(bad)
	}
	if fields.Model == "" && !unread && fields.Size > 0 {
		return s.pass(m) // no prompt and no model: any worker of Envoy's pool can serve it
	}
	s.arrival.BodyAt = time.Now()
	req := router.Request{
		Owned: true, Arrival: s.arrival,
		Model: fields.Model, Prompt: fields.Request, Tokens: fields.Tokens, Salt: fields.CacheSalt,
		Unread: unread && fields.Model == "",
		// Treat the response as non-streaming unless the body has "stream": true. A first token
		// that kvroute sees in it ends the prefill anyway.
		Unseen:     !fields.Stream,
		MaxOutput:  fields.MaxTokens,
		Split:      s.splittable(m, &fields),
		WantSecond: s.server.conf.SecondChoice != SecondNone,
	}
	if s.salt != "" { // a gateway can set the header; the body is always the client's
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
		decode, err := s.runLeg(ctx, &fields, body)
		switch {
		case ctx.Err() != nil:
			return false
		case err != nil:
			return s.refuse(s.refusal(err, fields.Model))
		}
		return s.route(m, decode)
	case ctx.Err() != nil:
		return false
	}
	why := s.failure(err, starting, unread)
	switch {
	case why == failStarting:
	case fields.Model == "" && !unread && errors.Is(err, router.ErrUnknownModel):
		return s.pass(m) // there are several models; the worker uses its own
	// An unread request is not refused unless Envoy cannot route it either.
	case !unread, errors.Is(err, router.ErrNoWorkers), m.isOther() && !errors.Is(err, router.ErrUnknownModel):
		if r := s.refusal(err, fields.Model); r != nil {
			return s.refuse(r)
		}
	}
	s.server.failOpen(why, err)
	return s.pass(m)
}

// answerTime is added to QueueWait in Envoy's timeout, so that kvroute refuses the request before
// Envoy continues without an answer.
const answerTime = 500 * time.Millisecond

// bestWorker gets a decision from the router and keeps it. If the request must wait for a worker,
// bestWorker extends Envoy's timeout.
func (s *stream) bestWorker(ctx context.Context, req *router.Request) error {
	conf := &s.server.conf
	req.DecisionTimeout, req.QueueWait = conf.DecisionTimeout, conf.QueueWait
	req.Waiting = func(split bool) {
		wait := conf.QueueWait
		if split && conf.PrefillLeg == PrefillByRouter {
			wait += conf.PrefillTimeout
		}
		s.extend(wait)
	}
	s.id = s.server.newID()
	s.booked = true // before the call, which may book and then panic
	req.ID = s.id
	d, err := s.server.router.BestWorker(ctx, *req)
	if err != nil {
		// Nothing is booked for this request; see router.ErrDuplicate.
		s.booked = false
		return err
	}
	if !d.Address.IsValid() || !conf.mayServe(d.Address) {
		s.free()
		return fmt.Errorf("extproc: worker %s has the address %v, want one in the worker networks", cmp.Or(d.WorkerName, strconv.FormatUint(d.Worker.ID, 10)), d.Address)
	}
	s.decision = d
	return nil
}
