// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"net/http"
	"strconv"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/kvroute/kvroute/internal/openai"
)

// refuse answers the request with an error response.
func (s *stream) refuse(e *openai.Error) bool {
	s.state = refused
	count(s.server.metrics.refusals, label("status", strconv.Itoa(e.Status)))
	s.server.conf.Log.Debug("request refused", "status", e.Status, "err", e.Message)
	headers := e.Headers()
	if (e.Type == openai.Overloaded || e.Type == openai.Unavailable) && e.Code != "" {
		headers = append(headers, "x-dynamo-reason", e.Code)
	}
	return s.send(immediate(e.Status, headers, e.JSON(), "kvroute_refused"))
}

// immediate is a response of kvroute itself.
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

// refusal returns the error response to an error of the router, nil if the request fails open.
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
