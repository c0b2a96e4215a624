// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"net/http"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
)

// steeringField is the code of the error for a body with a field that steers.
const steeringField = "steering_field"

// unsteer removes the steering fields from the request's body: s.replaced is then the body for the worker.
func (s *stream) unsteer(body []byte) *openai.Error {
	if !s.reserved.add(len(body)) { // for the copy
		return uncheckedBody()
	}
	if s.mode == buffered { // Envoy would send the client's body to the pool if the decision took too long
		s.moreTime()
	}
	s.replaced = openai.RemoveSteering(body, s.conf.untrusted())
	s.metrics.steering.Count("removed")
	return nil
}

// checkHeld returns the refusal of a body for which the budget has no room. A body in one message is in
// memory already; parts would have to be joined.
func (s *stream) checkHeld(b *extprocv3.HttpBody) *openai.Error {
	switch {
	case s.conf.untrusted() == 0:
		return nil
	case s.mode != buffered:
		return uncheckedBody()
	}
	bad := s.check(b.GetBody())
	if bad != nil && s.partial && !b.GetEndOfStream() && bad.Code != steeringField {
		return s.uncheckable(false) // not JSON: Envoy has truncated it
	}
	return bad
}

// uncheckable returns the refusal of a body that kvroute cannot read, nil if the listener is trusted: the body may
// have fields that steer. encoded says that the body has an encoding that kvroute does not read; otherwise Envoy has
// truncated it.
func (s *stream) uncheckable(encoded bool) *openai.Error {
	if s.conf.untrusted() == 0 {
		return nil
	}
	s.metrics.steering.Count("refused")
	bad := &openai.Error{
		Status: http.StatusRequestEntityTooLarge, Message: "the request body is larger than the gateway's buffer",
		Type: openai.InvalidRequest, Code: "body_too_large",
	}
	switch {
	case encoded && !s.compressed:
		bad.Status, bad.Code = http.StatusUnsupportedMediaType, "unsupported_charset"
		bad.Message = "the content-type names an unknown charset; send the body in UTF-8"
	case encoded:
		bad.Status, bad.Code = http.StatusUnsupportedMediaType, "unsupported_encoding"
		bad.Message = "the body has a content-encoding; send it without"
	}
	return bad
}

// inspect checks the parts of a body that Envoy passes on as they come: kvroute has made its decision, or has
// failed open, before the body was complete. The worker cannot use an incomplete body, so only the last part
// waits for the check, and a body with steering fields is refused. It returns false if the stream must end, and
// passes if the part may pass.
func (s *stream) inspect(m message, b *extprocv3.HttpBody) (passes, more bool) {
	part := b.GetBody()
	s.size += len(part)
	var bad *openai.Error
	switch {
	case s.size > s.conf.MaxBodyBytes:
		bad = tooLarge(s.conf.MaxBodyBytes)
	case !s.reserved.add(2 * len(part)): // for the joined copy, too
		bad = uncheckedBody()
	case m == requestChunk:
		s.parts = append(s.parts, part)
		return true, true
	default:
		bad = s.check(bytes.Join(append(s.parts, part), nil))
	}
	s.unchecked, s.parts = false, nil
	s.reserved.giveBack()
	if bad != nil {
		return false, s.refuse(bad)
	}
	return true, true
}

// check returns the refusal of a body that steers, or that kvroute cannot read. It does not panic.
func (s *stream) check(body []byte) (bad *openai.Error) {
	defer func() {
		if cause := recover(); cause != nil {
			s.panicked(mainStream, cause)
			bad = failedCheck()
		}
	}()
	if len(body) == 0 {
		return nil
	}
	if s.unreadable() {
		return s.uncheckable(true)
	}
	body, fits := s.text(body)
	if !fits {
		return uncheckedBody()
	}
	fields, bad := openai.Parse(s.endpoint, body)
	kinds := s.conf.untrusted()
	if bad != nil || fields.Steering&kinds == 0 {
		return bad
	}
	s.metrics.steering.Count("refused")
	path := openai.SteeringPath(body, kinds)
	return &openai.Error{
		Status: http.StatusBadRequest, Message: path + " is not allowed: only a trusted listener accepts fields that steer workers",
		Type: openai.InvalidRequest, Param: path, Code: steeringField,
	}
}
