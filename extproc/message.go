// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
)

// configure reads how Envoy is configured to send bodies. An old Envoy sends no configuration in
// the first message; kvroute then assumes BUFFERED, the mode of its own Envoy configuration.
func (s *stream) configure(c *extprocv3.ProtocolConfiguration) {
	s.echo = c.GetResponseBodyMode() == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
	s.chunks = s.echo || c.GetResponseBodyMode() == filterv3.ProcessingMode_STREAMED
	switch c.GetRequestBodyMode() {
	case filterv3.ProcessingMode_BUFFERED_PARTIAL:
		s.partial = true
	case filterv3.ProcessingMode_NONE:
		if c != nil {
			s.flow = behind
		}
	case filterv3.ProcessingMode_STREAMED:
		if s.flow = behind; c.GetSendBodyWithoutWaitingForHeaderResponse() {
			s.flow = ahead
		}
	case filterv3.ProcessingMode_FULL_DUPLEX_STREAMED:
		s.flow = duplex
	case filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_GRPC:
	}
	if s.flow != whole || s.echo {
		s.wait.woken = make(chan struct{}, 1)
	}
}

// override returns the processing mode for Config.ModeOverride. It repeats the mode of the
// request's body, because an override replaces all modes.
func (s *stream) override() *filterv3.ProcessingMode {
	body := filterv3.ProcessingMode_BUFFERED
	if s.partial {
		body = filterv3.ProcessingMode_BUFFERED_PARTIAL
	}
	return &filterv3.ProcessingMode{
		RequestHeaderMode: filterv3.ProcessingMode_SEND, RequestBodyMode: body,
		ResponseHeaderMode: filterv3.ProcessingMode_SEND, ResponseBodyMode: filterv3.ProcessingMode_NONE,
		ResponseTrailerMode: filterv3.ProcessingMode_SEND,
	}
}

// classify returns the kind of a message, and reads the request headers.
func (s *stream) classify(req *extprocv3.ProcessingRequest) message {
	switch r := req.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		s.steering.allowed = subset(req)
		s.ended = r.RequestHeaders.GetEndOfStream()
		return s.requestHeaders(r.RequestHeaders)
	case *extprocv3.ProcessingRequest_RequestBody:
		last := r.RequestBody.GetEndOfStream() || s.flow == whole
		switch {
		case s.ended:
			return requestAgain
		case !last:
			return requestChunk
		}
		s.ended = true
		return requestBody
	case *extprocv3.ProcessingRequest_RequestTrailers:
		s.ended = true
		return requestTrailers
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		return responseHeaders
	case *extprocv3.ProcessingRequest_ResponseBody:
		return responseBody
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		return responseTrailers
	}
	return unknown
}

func (s *stream) requestHeaders(h *extprocv3.HttpHeaders) message {
	var method, path string
	var length int64
	for _, v := range h.GetHeaders().GetHeaders() {
		switch v.GetKey() {
		case ":method":
			method = value(v)
		case ":path":
			path = value(v)
		case "content-length":
			length, _ = strconv.ParseInt(value(v), 10, 64) // Envoy has checked it
			s.sized = true
		case "content-encoding":
			s.compressed = s.compressed || value(v) != "" && !strings.EqualFold(value(v), "identity")
		case "x-tenant-id":
			s.salt = value(v)
		default:
			s.noteHeader(v.GetKey(), value(v))
		}
	}
	s.arrival.TraceParent, s.arrival.TraceState = s.traceContext(h)
	s.endpoint, s.wrong = openai.Classify(method, path)
	switch {
	case s.wrong != nil:
		return headersWrong
	case s.endpoint == openai.Other && h.GetEndOfStream():
		return headersOtherEnd
	case s.endpoint == openai.Other:
		return headersOther
	case length > int64(s.server.conf.MaxBodyBytes):
		// Refused before the body: neither Envoy nor kvroute needs to hold it.
		s.wrong = tooLarge(s.server.conf.MaxBodyBytes)
		return headersWrong
	case h.GetEndOfStream():
		return headersBodyless
	}
	return headersOurs
}

// status returns the status of a response, "" if there is none.
func status(h *extprocv3.HttpHeaders) string { return header(h, ":status") }

// header returns the first header of a name, "" if there is none.
func header(h *extprocv3.HttpHeaders, name string) string {
	for _, v := range h.GetHeaders().GetHeaders() {
		if v.GetKey() == name {
			return value(v)
		}
	}
	return ""
}

// value returns a header's value, which Envoy sends in one field or the other
// depending on its version.
func value(v *corev3.HeaderValue) string {
	if raw := v.GetRawValue(); len(raw) > 0 {
		return string(raw)
	}
	return v.GetValue()
}

// mutation sets headers, given as name, value, name, value, in place of any that are there.
func mutation(pairs []string) *extprocv3.HeaderMutation {
	set := make([]*corev3.HeaderValueOption, 0, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		set = append(set, &corev3.HeaderValueOption{
			Header:       &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])},
			AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
		})
	}
	return &extprocv3.HeaderMutation{SetHeaders: set}
}

// answer wraps c in the form of an answer to m; nil if m gets no answer.
func answer(m message, c *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
	switch m {
	case headersOurs, headersBodyless, headersWrong, headersOther, headersOtherEnd:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{
			RequestHeaders: &extprocv3.HeadersResponse{Response: c},
		}}
	case requestChunk, requestBody:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{
			RequestBody: &extprocv3.BodyResponse{Response: c},
		}}
	case requestTrailers:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestTrailers{
			RequestTrailers: &extprocv3.TrailersResponse{HeaderMutation: c.GetHeaderMutation()},
		}}
	case responseHeaders:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{
			ResponseHeaders: &extprocv3.HeadersResponse{Response: c},
		}}
	case responseBody:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{
			ResponseBody: &extprocv3.BodyResponse{Response: c},
		}}
	case responseTrailers:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseTrailers{
			ResponseTrailers: &extprocv3.TrailersResponse{HeaderMutation: c.GetHeaderMutation()},
		}}
	case requestAgain, unknown, messages:
	}
	return nil
}
