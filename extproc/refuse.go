// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// refuse answers the request with an error response.
func (s *stream) refuse(e *openai.Error) bool {
	s.state = refused
	s.metrics.refusals.Count(strconv.Itoa(e.Status))
	s.conf.Log.Debug("request refused", "status", e.Status, "err", e.Message)
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
func (s *Server) refusal(err error, model string) *openai.Error {
	conf := openai.RefusalConfig{
		Overload: s.conf.OverloadStatus, WorkerParam: headerPin, OverrideParam: headerOverride,
	}
	return conf.Refusal(err, model)
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

// uncheckedBody is the refusal of a body for which the router has no memory.
func uncheckedBody() *openai.Error {
	return &openai.Error{
		Status: http.StatusServiceUnavailable, Message: "the router has no memory to check the body; send the request again",
		Type: openai.Unavailable, Code: "router_overloaded", Retry: 1,
	}
}

// failedCheck is the refusal of a body whose check panicked.
func failedCheck() *openai.Error {
	bad := uncheckedBody()
	bad.Message, bad.Code = "the router failed to check the body", "router_failed"
	return bad
}

// queried is the answer to a request that only queries its worker, in Dynamo's form: one worker
// does prefill and decode.
type queried struct {
	Worker struct {
		Decode      uint64 `json:"decode_worker_id"`
		DecodeRank  uint32 `json:"decode_dp_rank"`
		Prefill     uint64 `json:"prefill_worker_id"`
		PrefillRank uint32 `json:"prefill_dp_rank"`
	} `json:"worker_id"`
	Overlap int      `json:"overlap_blocks"`
	Tokens  []uint32 `json:"token_ids,omitempty"` // only exact ones
}

// query answers a request with the worker that it would get. It books nothing, and the request
// goes to no worker. The answer shows the fleet and its caches, so it is for trusted listeners.
func (s *stream) query(ctx context.Context, req router.Request) bool {
	req.DecisionTimeout = s.conf.DecisionTimeout
	req.ID, req.Owned, req.WantTokens, req.WantSecond = "", false, true, false
	d, err := s.router.BestWorker(ctx, req)
	if err != nil { // it does not fail open: the client does not want it served
		return s.refuse(cmp.Or(s.refusal(err, req.Model), openai.NoDecision()))
	}
	s.state = refused
	var a queried
	a.Worker.Decode, a.Worker.DecodeRank = d.Worker.ID, d.Worker.DPRank
	first := cmp.Or(d.Prefill, &d) // computes the prompt
	a.Worker.Prefill, a.Worker.PrefillRank = first.Worker.ID, first.Worker.DPRank
	a.Overlap, a.Tokens = first.OverlapBlocks, d.Tokens
	body, _ := json.Marshal(a) // numbers always marshal
	s.metrics.queries.Count()
	return s.send(immediate(http.StatusOK, []string{"content-type", "application/json"}, body, "kvroute_query"))
}
