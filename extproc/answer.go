// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"net/netip"
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
	headers := append(s.destination(), headerRequestID, s.id)
	headers = append(headers, s.named()...)
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

// second returns the second choice if it may serve.
func (s *stream) second() (a netip.AddrPort) {
	if a = s.decision.Second.Address; !a.IsValid() || !s.server.conf.mayServe(a) {
		return netip.AddrPort{}
	}
	return a
}

// named returns the headers that name the rank or the instance to the worker, or the group and its
// worker to the router of a group, as name, value, name, value.
func (s *stream) named() []string {
	d := &s.decision
	if d.Group != "" {
		headers := []string{headerGroup, d.Group}
		if m := d.Member; m != nil {
			headers = append(headers, headerPin, strconv.FormatUint(m.ID, 10), headerRank, strconv.FormatUint(uint64(m.DPRank), 10))
		}
		return headers
	}
	rank := strconv.FormatUint(uint64(d.Worker.DPRank), 10)
	switch {
	case d.NameRank: // otherwise the server chooses a rank by itself
		return []string{headerVLLMRank, rank}
	case engineName(d.Engine) == "dynamo": // a frontend that forwards to the named instance
		return []string{headerPin, strconv.FormatUint(d.Worker.ID, 10), headerRank, rank, headerRoutingMode, "aggregated"}
	}
	return nil
}
