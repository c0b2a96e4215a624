// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"net/netip"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/router"
)

// Headers with the destination of a request, for Envoy, and its id, for the observer stream.
const (
	headerWorker   = "x-dynamo-worker"
	headerFallback = "x-dynamo-worker-fallback"
	headerThird    = "x-dynamo-worker-fallback-2"
	// Envoy replaces the request's Host by the value of headerHost, for all choices. headerFallbackHost and
	// headerThirdHost are those of the other choices if they answer another Host only, for an Envoy that sends metaHosts.
	headerHost         = "x-dynamo-worker-host"
	headerFallbackHost = "x-dynamo-worker-fallback-host"
	headerThirdHost    = "x-dynamo-worker-fallback-2-host"
	headerRequestID    = "x-dynamo-request-id"
	// The ranks of these workers if they differ, for an Envoy that sends metaRanks. Its upstream
	// filter sets headerVLLMRank of each attempt from them.
	headerFirstRank    = "x-dynamo-rank"
	headerFallbackRank = "x-dynamo-rank-fallback"
	headerThirdRank    = "x-dynamo-rank-fallback-2"
)

// inferredMark ends the id that Envoy gets if kvroute infers the first token of the request. Envoy's configuration,
// too, matches it.
const inferredMark = "-inferred"

// headerSource names the source, by the address of its OpenAI endpoint, to llm-d's sidecar.
const headerSource = "x-kv-cache-source-host-port"

// route answers all unanswered messages of the request, of which m is the last one, with the
// decision. A body that is not nil replaces the request's.
func (s *stream) route(m message, body []byte) bool {
	s.routed.Add(1)
	conf, d := &s.conf, &s.decision
	id := s.id
	if d.Inferred {
		id += inferredMark
	}
	headers := append(conf.destination(d), headerRequestID, id)
	headers = append(headers, s.rankHeaders(d)...)
	if d.Prefill != nil && conf.legByHeader(d) {
		headers = append(headers, prefillHeaders(d.Prefill)...)
	}
	if d.Source != nil && conf.KVPull == pullByHeader {
		headers = append(headers, headerSource, d.Source.Address.String())
	}
	if body == nil {
		body = s.replaced
	}
	headers = append(headers, s.lengthOf(body)...)
	c := &extprocv3.CommonResponse{HeaderMutation: mutation(headers), ClearRouteCache: true}
	c.HeaderMutation.RemoveHeaders = s.stripHeaders // Envoy removes before it sets
	answer := answerTo(m, c)
	inChunks := s.mode != buffered && !m.isRequestHeaders()
	if inChunks {
		answer = answerTo(headersOurs, c)
	} else if body != nil {
		c.BodyMutation = &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: body}}
	}
	if conf.EndpointPicker {
		answer.DynamicMetadata = conf.endpointMetadata(d)
	}
	if inChunks {
		return s.answerChunks(m, answer, body)
	}
	return s.send(answer)
}

// destination returns the headers with the destination, as name, value, name, value.
func (c *Config) destination(d *router.Decision) []string {
	headers := []string{headerWorker, d.Address.String()}
	if d.Host != "" {
		headers = append(headers, headerHost, d.Host)
	}
	switch second, third := c.second(d), c.third(d); {
	case !second.IsValid():
	case c.SecondChoice == SecondList:
		if headers[1] = c.endpoints(d); third.IsValid() {
			headers[1] += "," + third.String()
		}
	default:
		headers = append(headers, headerFallback, second.String())
		if d.Second.NameHost {
			headers = append(headers, headerFallbackHost, d.Second.Host)
		}
		if !third.IsValid() {
			break
		}
		if headers = append(headers, headerThird, third.String()); d.Third.NameHost {
			headers = append(headers, headerThirdHost, d.Third.Host)
		}
	}
	if c.EndpointPicker {
		headers = append(headers, destinationKey, c.endpoints(d))
	}
	return headers
}

// second returns the second choice if it may serve.
func (c *Config) second(d *router.Decision) (a netip.AddrPort) {
	if d.Second.Address.IsValid() && c.mayServe(d.Second.Address) {
		a = d.Second.Address
	}
	return a
}

// third returns the third choice if it and the second one may serve.
func (c *Config) third(d *router.Decision) (a netip.AddrPort) {
	if c.second(d).IsValid() && d.Third.Address.IsValid() && c.mayServe(d.Third.Address) {
		a = d.Third.Address
	}
	return a
}

// mayServe reports whether requests may be sent to an address.
func (c *Config) mayServe(a netip.AddrPort) bool { return c.Networks.Check(a) == nil }

// rankHeaders returns the headers that name the rank or the instance to the worker, or the group and its
// worker to the router of a group, as name, value, name, value.
func (h *head) rankHeaders(d *router.Decision) []string {
	second, third := d.Second, d.Third
	// differs reports whether another choice, if there is one, needs another rank or Host in its request.
	differs := func(s router.Second) bool {
		return s.Address.IsValid() && (s.NameHost || !s.NameRank || s.Worker.DPRank != d.Worker.DPRank)
	}
	switch {
	case d.Group != "":
		headers := []string{headerGroup, d.Group}
		if m := d.Member; m != nil {
			headers = append(headers, headerPin, fmt.Sprint(m.ID), headerRank, fmt.Sprint(m.DPRank))
		}
		return headers
	case !d.NameRank: // the server chooses a rank by itself
	case h.rankPerAttempt && (differs(second) || differs(third)):
		// Envoy removes headerVLLMRank of a request whose workers have different Host headers, too.
		headers := []string{headerFirstRank, fmt.Sprint(d.Worker.DPRank)}
		if second.NameRank {
			headers = append(headers, headerFallbackRank, fmt.Sprint(second.Worker.DPRank))
		}
		if third.NameRank {
			headers = append(headers, headerThirdRank, fmt.Sprint(third.Worker.DPRank))
		}
		return headers
	default:
		return []string{headerVLLMRank, fmt.Sprint(d.Worker.DPRank)}
	}
	if !engine.Of(d.Engine).Forwards {
		return nil
	}
	mode := router.SplitNever // to the named instance
	if d.Prefill != nil {
		mode = router.SplitAlways
	}
	return []string{
		headerPin, fmt.Sprint(d.Worker.ID), headerRank, fmt.Sprint(d.Worker.DPRank),
		headerRoutingMode, string(mode),
	}
}

// WorkerHeaders returns the headers that a request of [Server.RunLeg] needs, as name, value, name, value.
func (s *Server) WorkerHeaders(d *router.Decision) []string {
	headers := new(head).rankHeaders(d)
	if d.Prefill != nil && s.conf.legByHeader(d) {
		headers = append(headers, prefillHeaders(d.Prefill)...)
	}
	return headers
}

// unchanged answers m so that the request continues unchanged, without the client's steering
// headers. kvroute's own Envoy configuration removes these headers before; another configuration may
// not, and a client must not choose the destination of a request that fails open.
func (s *stream) unchanged(m message) *extprocv3.ProcessingResponse {
	var c *extprocv3.CommonResponse
	switch {
	case m.isRequestHeaders() && (s.stripHeaders != nil || s.replaced != nil):
		c = &extprocv3.CommonResponse{HeaderMutation: mutation(s.lengthOf(s.replaced)), ClearRouteCache: true}
		c.HeaderMutation.RemoveHeaders = s.stripHeaders
	case m == requestBody && s.mode == buffered && s.replaced != nil:
		c = &extprocv3.CommonResponse{
			HeaderMutation: mutation(s.lengthOf(s.replaced)),
			BodyMutation:   &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: s.replaced}},
		}
	}
	return answerTo(m, c)
}

// lengthOf returns the header with the length of a new body, as name, value. Envoy answers 500 if the header
// differs from the body's length.
func (s *stream) lengthOf(body []byte) []string {
	if body == nil || !s.sized {
		return nil
	}
	return []string{"content-length", strconv.Itoa(len(body))}
}

// mutation sets headers, given as name, value, name, value, in place of any that are there.
func mutation(pairs []string) *extprocv3.HeaderMutation {
	type memory struct {
		option corev3.HeaderValueOption
		header corev3.HeaderValue
	}
	all, set := make([]memory, len(pairs)/2), make([]*corev3.HeaderValueOption, len(pairs)/2)
	for i := range all {
		at := &all[i]
		at.header.Key, at.header.RawValue = pairs[2*i], []byte(pairs[2*i+1])
		at.option.Header, at.option.AppendAction = &at.header, corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
		set[i] = &at.option
	}
	return &extprocv3.HeaderMutation{SetHeaders: set}
}

// answerTo wraps c in the form of an answer to m. m must be a message that gets an answer.
func answerTo(m message, c *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
	a := new(extprocv3.ProcessingResponse)
	switch {
	case m.isRequestHeaders():
		a.Response = &extprocv3.ProcessingResponse_RequestHeaders{
			RequestHeaders: &extprocv3.HeadersResponse{Response: c},
		}
	case m == requestChunk, m == requestBody:
		a.Response = &extprocv3.ProcessingResponse_RequestBody{
			RequestBody: &extprocv3.BodyResponse{Response: c},
		}
	case m == requestTrailers:
		a.Response = &extprocv3.ProcessingResponse_RequestTrailers{
			RequestTrailers: &extprocv3.TrailersResponse{HeaderMutation: c.GetHeaderMutation()},
		}
	case m == responseHeaders:
		a.Response = &extprocv3.ProcessingResponse_ResponseHeaders{
			ResponseHeaders: &extprocv3.HeadersResponse{Response: c},
		}
	case m == responseBody:
		a.Response = &extprocv3.ProcessingResponse_ResponseBody{
			ResponseBody: &extprocv3.BodyResponse{Response: c},
		}
	case m == responseTrailers:
		a.Response = &extprocv3.ProcessingResponse_ResponseTrailers{
			ResponseTrailers: &extprocv3.TrailersResponse{HeaderMutation: c.GetHeaderMutation()},
		}
	}
	return a
}
