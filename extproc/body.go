// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"context"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// readBody reads the fields of the request's body, of which b is the last message. unread reports
// that kvroute cannot read all of it.
func (s *stream) readBody(m message, b *extprocv3.HttpBody, body []byte) (fields openai.Body, unread bool, bad *openai.Error) {
	if m == headersOurs || m.isOther() {
		return fields, true, nil
	}
	s.server.metrics.bodySize.Record(context.Background(), float64(len(body)))
	limit := s.server.conf.MaxBodyBytes
	if len(body) > limit {
		return fields, false, tooLarge(limit)
	}
	s.truncated = s.partial && m == requestBody && !b.GetEndOfStream()
	if s.compressed && len(body) > 0 { // kvroute reads no compressed bodies
		s.server.metrics.compressed.Count()
		return fields, true, nil
	}
	fields, bad = s.server.conf.Bodies.Parse(s.endpoint, body)
	if bad != nil && s.truncated {
		return openai.ParseTruncated(body), true, nil
	}
	return fields, false, bad
}

// hold keeps a part of the request, to be answered later. It returns false if the stream must end.
func (s *stream) hold(m message, chunk []byte) bool {
	if m == headersOurs {
		if s.flow == ahead {
			// Envoy waits for this answer with a timeout. In full duplex it has none.
			s.late = time.After(s.server.conf.DecisionTimeout)
		}
		return true
	}
	s.held = append(s.held, chunk)
	if s.size += len(chunk); s.size > s.server.conf.MaxBodyBytes {
		s.held = nil
		s.giveBack()
		return s.refuse(tooLarge(s.server.conf.MaxBodyBytes))
	}
	if !s.take(len(chunk)) {
		return s.release(failHeld)
	}
	return true
}

// take reserves n bytes of the budget for the request's body. It returns false if they do not fit.
func (s *stream) take(n int) bool {
	if !s.server.held.take(n) {
		return false
	}
	s.taken += n
	return true
}

// giveBack returns the bytes that take reserved.
func (s *stream) giveBack() {
	s.server.held.give(s.taken)
	s.taken = 0
}

// release answers all held parts of the request without a decision, and counts the reason.
func (s *stream) release(why failure) bool {
	defer s.giveBack()
	s.server.failOpen(why, nil)
	return s.pass(requestChunk)
}

// pass answers all unanswered messages of the request, of which m is the last one, without a
// decision.
func (s *stream) pass(m message) bool {
	if s.state = passing; s.ended {
		s.state = passed
	}
	if s.flow == whole || m.isRequestHeaders() {
		return s.send(s.unchanged(m))
	}
	return s.flush(m, s.unchanged(headersOurs), nil)
}

// unchanged answers m so that the request continues unchanged, without the client's steering
// headers. kvroute's own Envoy configuration removes these headers before; another configuration may
// not, and a client must not choose the destination of a request that fails open.
func (s *stream) unchanged(m message) *extprocv3.ProcessingResponse {
	if !m.isRequestHeaders() || s.stripHeaders == nil {
		return answer(m, nil)
	}
	return answer(m, &extprocv3.CommonResponse{
		HeaderMutation:  &extprocv3.HeaderMutation{RemoveHeaders: s.stripHeaders},
		ClearRouteCache: true,
	})
}

// flush sends the answer to the held headers, the answers to the held chunks, and the answer to m
// if m is the trailers. A body that is not nil replaces the chunks.
func (s *stream) flush(m message, headers *extprocv3.ProcessingResponse, body []byte) bool {
	s.late = nil
	answers := []*extprocv3.ProcessingResponse{headers}
	held := s.held
	s.held = nil
	if s.flow == ahead {
		for range held {
			answers = append(answers, answer(requestBody, nil))
		}
	} else {
		if body != nil {
			held = [][]byte{body}
		}
		last := m == requestBody
		if len(held) == 0 && last {
			held = [][]byte{nil}
		}
		for i, chunk := range held {
			answers = appendChunks(answers, requestBody, chunk, last && i == len(held)-1)
		}
	}
	if m == requestTrailers {
		answers = append(answers, answer(m, nil))
	}
	return s.send(answers...)
}

// relay answers a part of a body that stays unchanged.
func (s *stream) relay(m message, req *extprocv3.ProcessingRequest) []*extprocv3.ProcessingResponse {
	b, back := req.GetRequestBody(), s.flow == duplex
	if m == responseBody {
		b, back = req.GetResponseBody(), s.echo
		if s.usage != nil && s.booked {
			s.usage.read(b.GetBody(), b.GetEndOfStream())
		}
		if s.watching && s.booked && s.events.in(b.GetBody()) {
			s.watching = false // nothing after the first token is read
			s.server.router.FirstToken(s.id, router.SignObserver)
		}
	}
	if b == nil || !back {
		return []*extprocv3.ProcessingResponse{answer(m, nil)}
	}
	return appendChunks(nil, m, b.GetBody(), b.GetEndOfStream())
}

// body returns the request's body, of which b is the last part. It returns false if the budget has
// no room for it.
func (s *stream) body(b *extprocv3.HttpBody) (body []byte, ok bool) {
	last := b.GetBody()
	if s.flow == whole {
		return last, s.take(len(last))
	}
	if b != nil {
		s.held = append(s.held, last)
	}
	switch {
	case !s.take(len(last)):
		return nil, false
	case len(s.held) == 1:
		return s.held[0], true
	case !s.take(s.size + len(last)): // for the joined copy
		return nil, false
	}
	body = bytes.Join(s.held, nil)
	if s.flow == ahead {
		clear(s.held) // only their number matters: each is answered
	} else {
		s.held = [][]byte{body}
	}
	return body, true
}

// maxChunk limits the part of a body in one answer. Envoy accepts somewhat less than 64 KiB. gRPC
// has buffers up to 32 KiB; for a larger message it clears one of 1 MiB each time.
const maxChunk = 32_000

// echo sends a chunk back to Envoy.
func echo(m message, chunk []byte, last bool) *extprocv3.ProcessingResponse {
	return answer(m, &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{
		Mutation: &extprocv3.BodyMutation_StreamedResponse{
			StreamedResponse: &extprocv3.StreamedBodyResponse{Body: chunk, EndOfStream: last},
		},
	}})
}

// appendChunks appends the answers that send a part of a body back to Envoy.
func appendChunks(to []*extprocv3.ProcessingResponse, m message, part []byte, last bool) []*extprocv3.ProcessingResponse {
	for len(part) > maxChunk {
		to = append(to, echo(m, part[:maxChunk], false))
		part = part[maxChunk:]
	}
	return append(to, echo(m, part, last))
}
