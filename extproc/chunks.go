// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"slices"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/router"
)

// hold keeps a part of the request, to be answered later. It returns false if the stream must end.
func (s *stream) hold(m message, chunk []byte) bool {
	if m == headersOurs {
		if s.mode == streamedAhead {
			// Envoy waits for this answer with a timeout. In full duplex it has none.
			s.deadline = time.After(s.conf.DecisionTimeout)
		}
		return true
	}
	s.chunks = append(s.chunks, chunk)
	if s.size += len(chunk); s.size > s.conf.MaxBodyBytes {
		s.chunks = nil
		s.reserved.giveBack()
		return s.refuse(tooLarge(s.conf.MaxBodyBytes))
	}
	if !s.reserved.add(len(chunk)) {
		return s.passChunks(failHeld)
	}
	return true
}

// joinChunks returns the request's body, of which b is the last part. It returns false if the budget has
// no room for it.
func (s *stream) joinChunks(b *extprocv3.HttpBody) (body []byte, ok bool) {
	last := b.GetBody()
	if b != nil {
		s.chunks = append(s.chunks, last)
	}
	switch {
	case !s.reserved.add(len(last)):
		return nil, false
	case len(s.chunks) == 1:
		return s.chunks[0], true
	case !s.reserved.add(s.size + len(last)): // for the joined copy
		return nil, false
	}
	body = bytes.Join(s.chunks, nil)
	if s.mode == streamedAhead {
		clear(s.chunks) // only their number matters: each is answered
	} else {
		s.chunks = [][]byte{body}
	}
	return body, true
}

// passChunks answers all held parts of the request without a decision, and counts the reason.
func (s *stream) passChunks(why failure) bool {
	if s.conf.untrusted() != 0 {
		if why == failHeld {
			s.reserved.giveBack()
			return s.refuse(uncheckedBody())
		}
		s.unchecked, s.parts = true, slices.Clone(s.chunks)
	} else {
		defer s.reserved.giveBack()
	}
	s.failOpen(why, nil)
	return s.pass(requestChunk)
}

// answerChunks sends the answer to the held headers, the answers to the held chunks, and the answer to m
// if m is the trailers. A body that is not nil replaces the chunks.
func (s *stream) answerChunks(m message, headers *extprocv3.ProcessingResponse, body []byte) bool {
	s.deadline = nil
	answers := []*extprocv3.ProcessingResponse{headers}
	held := s.chunks
	s.chunks = nil
	if s.mode == streamedAhead {
		for i := range held {
			answers = append(answers, answerTo(requestBody, aheadPart(body, i == len(held)-1)))
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
		answers = append(answers, answerTo(m, nil))
	}
	return s.send(answers...)
}

// aheadPart returns the answer to a part of a body that Envoy has sent ahead: the last part becomes the whole
// new body, the others become empty. Without a new body the part stays.
func aheadPart(body []byte, last bool) *extprocv3.CommonResponse {
	switch {
	case body == nil:
		return nil
	case last:
		return &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: body}}}
	}
	return &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_ClearBody{ClearBody: true}}}
}

// relay answers a part of a body that stays unchanged.
func (s *stream) relay(m message, req *extprocv3.ProcessingRequest) []*extprocv3.ProcessingResponse {
	b, sendBack := req.GetRequestBody(), s.mode == fullDuplex
	if m == responseBody {
		b, sendBack = req.GetResponseBody(), s.echo
		s.given.read(b.GetBody(), b.GetEndOfStream())
		if s.usage != nil && s.booked {
			s.usage.Read(b.GetBody(), b.GetEndOfStream())
		}
		if s.watching && s.booked && s.events.in(b.GetBody()) {
			s.watching = false // nothing after the first token is read
			s.router.FirstToken(s.id, router.SignObserver)
		}
		s.watching = s.watching && !b.GetEndOfStream()
	}
	s.watching = s.watching && m != responseTrailers
	if b == nil || !sendBack {
		return []*extprocv3.ProcessingResponse{answerTo(m, nil)}
	}
	return appendChunks(nil, m, b.GetBody(), b.GetEndOfStream())
}

// maxChunk limits the part of a body in one answer. Envoy accepts somewhat less than 64 KiB. gRPC
// has buffers up to 32 KiB; for a larger message it clears one of 1 MiB each time.
const maxChunk = 32_000

// appendChunks appends the answers that send a part of a body back to Envoy.
func appendChunks(
	to []*extprocv3.ProcessingResponse, m message, part []byte, last bool,
) []*extprocv3.ProcessingResponse {
	for more := true; more; {
		chunk := &extprocv3.StreamedBodyResponse{Body: part}
		if more = len(part) > maxChunk; more {
			chunk.Body, part = part[:maxChunk], part[maxChunk:]
		}
		chunk.EndOfStream = last && !more
		to = append(to, answerTo(m, &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{
			Mutation: &extprocv3.BodyMutation_StreamedResponse{StreamedResponse: chunk},
		}}))
	}
	return to
}
