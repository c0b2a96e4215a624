// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"log/slog"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// answerRequest answers all unanswered messages of the request, of which m is the last one: with
// a worker, with a refusal, or unchanged (fail open). It returns false if the stream must end.
func (s *stream) answerRequest(ctx context.Context, m message, b *extprocv3.HttpBody) (more bool) {
	defer s.afterPanic(m, &more)
	defer s.reserved.giveBack()
	body := b.GetBody()
	var fits bool
	if s.mode == buffered {
		fits = s.reserved.add(len(body))
	} else {
		body, fits = s.joinChunks(b)
	}
	if fits && s.mode == buffered && len(body) > largeBody {
		defer s.leaveTurn()
		if fits = s.takeTurn(ctx); ctx.Err() != nil {
			return false
		}
	}
	if fits {
		body, fits = s.text(body) // without fields that steer, the worker gets the body as it came
	}
	if !fits {
		if bad := s.checkHeld(b); bad != nil {
			return s.refuse(bad)
		}
		s.failOpen(failHeld, nil)
		return s.pass(m)
	}
	conf := &s.conf
	truncated := s.partial && m == requestBody && !b.GetEndOfStream()
	fields, unread, bad := s.readBody(m, body, truncated)
	s.gives = s.endpoint.GivesID() && !fields.Unkept
	switch {
	case bad == nil && truncated && unread: // a body with trailers that is JSON is complete
		bad = s.uncheckable(false)
	case bad == nil && fields.Steering&conf.untrusted() != 0:
		bad = s.unsteer(body)
	}
	if bad != nil {
		return s.refuse(bad)
	}
	s.checked = true
	if s.replaced != nil {
		body = s.replaced
		if fields.Body != nil {
			fields.Body = body // a worker may be asked for its token ids
		}
	}
	if fields.Model == "" && !unread && fields.Size > 0 && !s.endpoint.NeedsModel() && !s.isSession() {
		return s.pass(m) // no prompt and no model: any worker of Envoy's pool can serve it
	}
	s.promptHash = s.prefixOf(&fields, body)
	req := s.routerRequest(&fields, unread)
	if !s.splittable(conf, m, &fields, truncated) {
		req.Split = router.SplitNever
	}
	req.MayPull = conf.KVPull != PullOff && s.mayPull(m, &fields, truncated)
	if conf.AllowDirect || conf.TrustOverrides {
		if bad := s.steer(conf, &req, fields.NVExt); bad != nil {
			return s.refuse(bad)
		}
		if s.queries(conf, fields.NVExt) {
			return s.query(ctx, req)
		}
	}
	// Before the decision: the fleet may become known during it, too late for it.
	starting := conf.Started != nil && !conf.Started()
	err := s.bestWorker(ctx, &req)
	switch {
	case s.decision.Prefill != nil && !conf.legByHeader(&s.decision):
		return s.routeSplit(ctx, m, &fields, body)
	case ctx.Err() != nil:
		return false
	case err != nil:
		return s.withoutWorker(m, err, fields.Model, unread, starting)
	}
	if s.decision.Source != nil && conf.KVPull == pullByBody {
		return s.routePull(m, body)
	}
	return s.route(m, nil)
}

// isSession reports whether the request is about a session of SGLang: kvroute names its worker, if there is one model.
func (s *stream) isSession() bool {
	return s.endpoint == openai.OpenSession || s.endpoint == openai.CloseSession
}

// afterPanic is deferred by the handling of a request's last message, m. After a panic it answers all unanswered
// messages of the request; more is false if the stream must end. If Envoy may send the client's body to the pool, it
// panics again, which ends the stream.
func (s *stream) afterPanic(m message, more *bool) {
	cause := recover()
	if cause == nil {
		return
	}
	if s.conf.untrusted() == 0 || s.checked && s.replaced == nil && !s.unchecked || m == headersBodyless || m.isOther() {
		panic(cause)
	}
	s.panicked(mainStream, cause)
	if s.free(); s.checked || s.unchecked { // the rest of an unchecked body is checked as it comes
		*more = s.pass(m)
		return
	}
	*more = s.refuse(failedCheck())
}

// text returns a body in UTF-8. It returns false if the budget has no room for a copy.
func (s *stream) text(body []byte) (text []byte, fits bool) {
	if s.unreadable() || !openai.IsUTF8(body) && !s.reserved.add(2*len(body)) {
		return body, s.unreadable()
	}
	return openai.UTF8(body), true
}

// untrusted returns the kinds of fields in a body that clients of the listener must not set.
func (c *Config) untrusted() (kinds openai.SteeringFields) {
	if !c.AllowDirect {
		kinds |= openai.FieldPins
	}
	if !c.TrustOverrides {
		kinds |= openai.FieldHints
	}
	return kinds
}

// readBody reads the fields of the request's body, whose last message is m. unread reports that kvroute
// cannot read all of it.
func (s *stream) readBody(m message, body []byte, truncated bool) (fields openai.Body, unread bool, bad *openai.Error) {
	if m == headersOurs || m.isOther() {
		s.unchecked = m == headersOurs && s.conf.untrusted() != 0
		return fields, true, nil
	}
	s.metrics.bodySize.Record(context.Background(), float64(len(body)))
	limit := s.conf.MaxBodyBytes
	if len(body) > limit {
		return fields, false, tooLarge(limit)
	}
	if s.unreadable() && len(body) > 0 {
		if s.compressed {
			s.metrics.compressed.Count()
		}
		return fields, true, s.uncheckable(true)
	}
	fields, bad = s.conf.Bodies.Parse(s.endpoint, body)
	switch {
	case bad != nil && truncated:
		return openai.ParseTruncated(body), true, nil
	case bad != nil && bad.Param == "" && len(body) > 0 && s.conf.untrusted() == 0: // not JSON: the engine refuses it
		s.malformed = true
		return openai.Body{}, true, nil
	}
	return fields, false, bad
}

// routerRequest returns the request to the router for a body with these fields.
func (s *stream) routerRequest(fields *openai.Body, unread bool) router.Request {
	h, conf := &s.head, &s.conf
	s.arrival.BodyAt = time.Now()
	return router.Request{
		Owned: true, Arrival: s.arrival,
		Model: fields.Model, Prompt: fields.Request, Tokens: fields.Tokens, Uncached: fields.Uncached,
		// A gateway can set the header; the body is always the client's.
		Salt:   cmp.Or(h.tenant, fields.CacheSalt),
		Unread: unread && fields.Model == "",
		// Treat the response as non-streaming unless the body has "stream": true. A first token
		// that kvroute sees in it ends the prefill anyway.
		Unseen:     !fields.Stream,
		MaxOutput:  fields.MaxTokens,
		WantSecond: conf.SecondChoice != SecondNone,
		// With a list, Envoy may skip the first address: the attempt's number does not say which worker it is.
		RankPerAttempt: h.rankPerAttempt && conf.SecondChoice == SecondHeader,
		HostPerAttempt: h.hostPerAttempt && conf.SecondChoice == SecondHeader,
		Session:        h.session, SessionFinal: h.sessionFinal, Held: fields.Held,
		AllowedAddresses: h.allowed, Client: s.clientHash(), Prefix: s.promptHash,
		Labels: router.Labels{
			Operation: operation(h.endpoint),
			RequestID: h.clientID,
			Class:     clip(h.hint(headerClass, prefixGateway+nameObjective, prefixLLMD+nameObjective)),
			Fairness:  clip(h.hint(prefixGateway+nameFairness, prefixLLMD+nameFairness)),
		},
	}
}

// splittable reports whether the request may have a prefill leg. If kvroute sends the prefill request, it
// must be able to change the body, whose last message is m. A request that does not read the cache has none: its
// worker would not use the blocks.
func (h *head) splittable(conf *Config, m message, fields *openai.Body, truncated bool) bool {
	prompt := h.endpoint == openai.ChatCompletions || h.endpoint == openai.Completions
	return !fields.Uncached &&
		(conf.PrefillLeg == PrefillByHeader || prompt && fields.Choices <= 1 && h.changeable(m, truncated))
}

// operation returns the name of the request's operation in OpenTelemetry's conventions for GenAI; ""
// if the model computes nothing.
func operation(e openai.Endpoint) string {
	switch e {
	case openai.ChatCompletions, openai.Responses, openai.Messages:
		return "chat"
	case openai.Completions, openai.Generate, openai.Ids:
		return "text_completion"
	case openai.Load:
		return "embeddings"
	case openai.Text, openai.OpenSession, openai.CloseSession, openai.Other:
	}
	return ""
}

// bestWorker gets a decision from the router and keeps it. If the request must wait for a worker,
// bestWorker extends Envoy's timeout.
func (s *stream) bestWorker(ctx context.Context, req *router.Request) error {
	conf := &s.conf
	req.DecisionTimeout, req.QueueWait = conf.DecisionTimeout, conf.QueueWait
	req.Waiting = func(split bool) {
		s.leaveTurn()
		wait := conf.QueueWait
		if split && conf.PrefillLeg == PrefillByRouter {
			wait += conf.PrefillTimeout
		}
		if !s.extended { // Envoy allows it once for each message
			s.extend(wait)
		}
	}
	s.id, req.Represents = s.newID(s.gives)
	req.MayInfer = s.mayInfer && !s.gives && !s.responseBody && conf.FirstToken == FirstTokenObserver
	s.booked = true // before the call, which may book and then panic
	req.ID = s.id
	d, err := s.router.BestWorker(ctx, *req)
	s.leaveTurn()
	if err != nil {
		// Nothing is booked for this request; see router.ErrDuplicate.
		s.booked = false
		return err
	}
	if !d.Address.IsValid() || !conf.mayServe(d.Address) {
		s.free()
		return fmt.Errorf("extproc: worker %s has the address %v, want one in the worker networks",
			cmp.Or(d.WorkerName, fmt.Sprint(d.Worker.ID)), d.Address)
	}
	s.decision, s.state = d, routed
	if conf.Log.Enabled(ctx, slog.LevelDebug) {
		conf.Log.Debug("request routed", "request", s.id, "client_request", req.Labels.RequestID,
			"worker", d.Worker.Label(d.WorkerName), "reason", d.Sentence())
	}
	return nil
}

// leaveTurn ends the turn of takeTurn, if there is one.
func (s *stream) leaveTurn() {
	if s.hasTurn {
		s.hasTurn = false
		<-s.turns
	}
}

// newID returns an id that no client can guess, so that no client can report the first token of
// another client's request. gives says that the response may give out an id. represents is [router.Request.Represents]
// of the request: 0 if it is neither in the sample of Config.ObserveShare nor audited.
func (s *Server) newID(gives bool) (id string, represents int) {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	id = s.prefix + hex.EncodeToString(b[:])
	if gives {
		id += givesMark
	}
	draw := float64(binary.BigEndian.Uint32(b[12:])) / (1 << 32)
	if draw < s.conf.AuditShare {
		id += auditMark
	}
	if share := max(s.conf.AuditShare, s.conf.ObserveShare); draw < share {
		// The mean is exactly 1/share: the draw is as good as a new one within the sample.
		represents = int(1/share + draw/share)
	}
	return id, represents
}
