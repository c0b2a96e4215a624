// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// queried is the answer to a request that only asks for its worker, in Dynamo's form:
// one worker does prefill and decode.
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

// query answers a request with the worker that it would go to. Nothing is booked, and
// it goes nowhere. What the answer tells of the fleet and its caches is for trusted
// listeners.
func (s *stream) query(ctx context.Context, req router.Request, model string) bool {
	req.DecisionTimeout = s.server.conf.DecisionTimeout
	req.ID, req.Owned, req.WantTokens, req.WantSecond = "", false, true, false
	d, err := s.server.router.BestWorker(ctx, req)
	if err != nil {
		r := s.refusal(err, model)
		if r == nil { // a request would fail open, but the client does not want this one served
			r = openai.NoDecision()
		}
		return s.refuse(r)
	}
	s.state = refused
	var a queried
	a.Worker.Decode, a.Worker.DecodeRank = d.Worker.ID, d.Worker.DPRank
	a.Worker.Prefill, a.Worker.PrefillRank = d.Worker.ID, d.Worker.DPRank
	if a.Overlap = d.OverlapBlocks; d.Tokens != nil {
		a.Tokens = d.Tokens.IDs
	}
	body, _ := json.Marshal(a) // numbers always marshal
	s.server.metrics.query()
	return s.send(immediate(http.StatusOK, []string{"content-type", "application/json"}, body, "kvroute_query"))
}

// named are the headers that tell the worker which of its ranks is meant, or which
// instance, or the router of a group that it is meant and which worker it named, as name
// and value.
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
	switch engine := engineName(d.Engine); {
	case d.NameRank: // without it the server chooses a rank by itself
		return []string{headerVLLMRank, rank}
	case engine == "dynamo": // a front that forwards to the instance that is named
		return []string{headerPin, strconv.FormatUint(d.Worker.ID, 10), headerRank, rank, headerRoutingMode, "aggregated"}
	}
	return nil
}
