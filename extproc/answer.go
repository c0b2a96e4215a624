// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"net/http"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/kvroute/kvroute/internal/openai"
)

// Headers that steer Envoy. Clients have no business with them.
const (
	headerWorker    = "x-dynamo-worker"
	headerFallback  = "x-dynamo-worker-fallback"
	headerRequestID = "x-dynamo-request-id"
)

// unchanged answers m so that the request goes on as it is, but for the client's own copies
// of headers that steer Envoy or kvroute. Our configuration of Envoy removes them before
// kvroute sees any; another one may not, and a request that fails open must not go where
// its client likes.
func (s *stream) unchanged(m message) *extprocv3.ProcessingResponse {
	isRequestHeaders := m == headersOurs || m == headersBodyless || m == headersOther || m == headersOtherEnd
	if !isRequestHeaders || s.stripHeaders == nil {
		return answer(m, nil)
	}
	return answer(m, &extprocv3.CommonResponse{
		HeaderMutation:  &extprocv3.HeaderMutation{RemoveHeaders: s.stripHeaders},
		ClearRouteCache: true,
	})
}

// route answers m with the decision: where to go, and by which id the observing
// stream is joined. A body that is
// not nil takes the place of the request's; where m is the headers, it follows.
func (s *stream) route(m message, body []byte) *extprocv3.ProcessingResponse {
	headers := append(s.destination(), headerRequestID, s.id)
	headers = append(headers, s.named()...)
	if body != nil && s.sized {
		// Envoy answers 500 to a body of another length than the header says.
		headers = append(headers, "content-length", strconv.Itoa(len(body)))
	}
	c := &extprocv3.CommonResponse{HeaderMutation: mutation(headers), ClearRouteCache: true}
	c.HeaderMutation.RemoveHeaders = s.stripHeaders // Envoy removes before it sets
	if body != nil && m == requestBody {
		c.BodyMutation = &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: body}}
	}
	return s.picked(answer(m, c))
}

// maxChunk is how much of a body stands in one answer. Envoy takes somewhat below 64 KiB.
// Up to 32 KiB gRPC has buffers that fit; a larger message takes one of 1 MiB, which it
// clears each time.
const maxChunk = 32_000

// echo answers a chunk that Envoy wants back.
func echo(m message, chunk []byte, last bool) *extprocv3.ProcessingResponse {
	return answer(m, &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{
		Mutation: &extprocv3.BodyMutation_StreamedResponse{
			StreamedResponse: &extprocv3.StreamedBodyResponse{Body: chunk, EndOfStream: last},
		},
	}})
}

// appendChunks appends the answers that give a part of a body back to Envoy.
func appendChunks(to []*extprocv3.ProcessingResponse, m message, part []byte, last bool) []*extprocv3.ProcessingResponse {
	for len(part) > maxChunk {
		to = append(to, echo(m, part[:maxChunk], false))
		part = part[maxChunk:]
	}
	return append(to, echo(m, part, last))
}

// refuse answers the request with an error response.
func (s *stream) refuse(e *openai.Error) bool {
	s.state = refused
	s.server.metrics.refused(e.Status)
	s.server.conf.Log.Debug("request refused", "status", e.Status, "err", e.Message)
	headers := []string{"content-type", "application/json"}
	if e.Status == http.StatusMethodNotAllowed {
		headers = append(headers, "allow", http.MethodPost)
	}
	if e.Retry > 0 {
		headers = append(headers, "retry-after", strconv.Itoa(e.Retry))
	}
	if (e.Type == openai.Overloaded || e.Type == openai.Unavailable) && e.Code != "" {
		headers = append(headers, "x-dynamo-reason", e.Code)
	}
	return s.send(immediate(e.Status, headers, e.JSON(), "kvroute_refused"))
}

// immediate is a response of our own, in the place of a worker's.
func immediate(status int, headers []string, body []byte, details string) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
		ImmediateResponse: &extprocv3.ImmediateResponse{
			Status:  &typev3.HttpStatus{Code: typev3.StatusCode(status)},
			Headers: mutation(headers),
			Body:    body,
			Details: details,
		},
	}}
}

// refusal returns what the client is told of an error of the router, nil if that fails open.
func (s *stream) refusal(err error, model string) *openai.Error {
	return openai.RefusalConfig{Overload: s.server.conf.OverloadStatus, WorkerParam: headerPin, OverrideParam: headerOverride}.Refusal(err, model)
}

// tooLarge is the refusal of a body above the limit, in bytes.
func tooLarge(limit int) *openai.Error {
	return &openai.Error{
		Status:  http.StatusRequestEntityTooLarge,
		Message: fmt.Sprintf("the request body is larger than %d bytes", limit),
		Type:    openai.InvalidRequest,
		Code:    "body_too_large",
	}
}

// setHeaders answers m with headers, given as name, value, name, value, in place
// of any that are there. reroute makes Envoy choose the route again.
func setHeaders(m message, reroute bool, pairs ...string) *extprocv3.ProcessingResponse {
	return answer(m, &extprocv3.CommonResponse{HeaderMutation: mutation(pairs), ClearRouteCache: reroute})
}

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

// answer wraps c in the answer that is due to m; nil if none is.
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
