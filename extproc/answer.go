// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"strconv"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// Headers with the destination of a request, for Envoy, and its id, for the observer stream.
const (
	headerWorker    = "x-dynamo-worker"
	headerFallback  = "x-dynamo-worker-fallback"
	headerRequestID = "x-dynamo-request-id"
)

// route answers all unanswered messages of the request, of which m is the last one, with the
// decision. A body that is not nil replaces the request's.
func (s *stream) route(m message, body []byte) bool {
	s.server.routed.Add(1)
	headers := append(s.destination(), headerRequestID, s.id)
	headers = append(headers, s.named()...)
	headers = append(headers, s.prefillHeaders()...)
	if body != nil && s.sized {
		// Envoy answers 500 if the header differs from the body's length.
		headers = append(headers, "content-length", strconv.Itoa(len(body)))
	}
	c := &extprocv3.CommonResponse{HeaderMutation: mutation(headers), ClearRouteCache: true}
	c.HeaderMutation.RemoveHeaders = s.stripHeaders // Envoy removes before it sets
	if s.flow != whole && !m.isRequestHeaders() {
		return s.flush(m, s.withMetadata(answer(headersOurs, c)), body)
	}
	if body != nil {
		c.BodyMutation = &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: body}}
	}
	return s.send(s.withMetadata(answer(m, c)))
}

// destination returns the headers with the destination, as name, value, name, value.
func (s *stream) destination() []string {
	headers := []string{headerWorker, s.decision.Address.String()}
	switch second := s.second(); {
	case !second.IsValid():
	case s.server.conf.SecondChoice == SecondList:
		headers[1] = s.endpoints()
	default:
		headers = append(headers, headerFallback, second.String())
	}
	if s.server.conf.EndpointPicker {
		headers = append(headers, destinationKey, s.endpoints())
	}
	return headers
}
