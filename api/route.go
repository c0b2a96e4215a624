// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// question is the body of best_worker, potential_loads and generate. Only a model and a prompt
// are required: token_ids, prompt or messages, the latter with their options as in a request to
// the model. token_ids beside messages, or beside a prompt other than the same ids, are an error.
type question struct {
	Model     string `json:"model"`
	RequestID string `json:"request_id"` // makes a decision a booking

	TokenIDs           []uint32        `json:"token_ids"`
	Prompt             json.RawMessage `json:"prompt"`
	Messages           json.RawMessage `json:"messages"`
	Tools              json.RawMessage `json:"tools"`
	ToolChoice         json.RawMessage `json:"tool_choice"`
	ChatTemplateKwargs json.RawMessage `json:"chat_template_kwargs"`
	CacheSalt          string          `json:"cache_salt"`

	WorkerID         *uint64  `json:"worker_id"` // pin
	DPRank           *uint32  `json:"dp_rank"`
	AllowedWorkerIDs []uint64 `json:"allowed_worker_ids"`

	PrefillWorkerID *uint64      `json:"prefill_worker_id"` // pin
	PrefillDPRank   *uint32      `json:"prefill_dp_rank"`
	RoutingMode     router.Split `json:"routing_mode"`

	RequiredTaints  []string           `json:"required_taints"`
	PreferredTaints map[string]float64 `json:"preferred_taints"`

	SessionID            string  `json:"session_id"`
	SessionFinal         bool    `json:"session_final"`
	Priority             float64 `json:"priority"`
	StrictPriority       int     `json:"strict_priority"`
	ExpectedOutputTokens int     `json:"expected_output_tokens"`
	TTFTTargetMS         float64 `json:"ttft_target_ms"`

	RouterConfigOverride *router.Override `json:"router_config_override"`
	Explain              bool             `json:"explain"`

	// Body are further fields of the body that /v1/generate sends to the worker: max_tokens,
	// temperature and so on.
	Body map[string]json.RawMessage `json:"body"`
}

// answer is the answer of /v1/best_worker.
type answer struct {
	choice
	Prefill  *leg     `json:"prefill,omitempty"`
	Decision Decision `json:"decision"`
}

// leg is the prefill leg, which has a slot of its own under RequestID.
type leg struct {
	RequestID string `json:"request_id,omitempty"`
	choice
}

// choice is a chosen worker.
type choice struct {
	WorkerID      uint64 `json:"worker_id"`
	DPRank        uint32 `json:"dp_rank"`
	OverlapBlocks int    `json:"overlap_blocks"`
	Address       string `json:"address"`
}

func choiceOf(d *router.Decision) choice {
	return choice{d.Worker.ID, d.Worker.DPRank, d.OverlapBlocks, d.Address.String()}
}

// booking is the body of the requests about a request in flight.
type booking struct {
	RequestID string `json:"request_id"`
	Tokens    int    `json:"tokens"` // add_output_tokens only
}

// request makes the router's request.
func (c *Config) request(q *question) (router.Request, *openai.Error) {
	req := router.Request{
		ID: q.RequestID, Model: q.Model, Tokens: q.TokenIDs, Salt: q.CacheSalt,
		Prompt:         router.Prompt{Prompt: span(q.Prompt), Messages: span(q.Messages), Tools: span(q.Tools), ToolChoice: span(q.ToolChoice), ChatTemplateKwargs: span(q.ChatTemplateKwargs)},
		RequiredTaints: q.RequiredTaints, PreferredTaints: q.PreferredTaints,
		Session: q.SessionID, SessionFinal: q.SessionFinal,
		Priority: q.Priority, StrictPriority: q.StrictPriority, ExpectedOutput: q.ExpectedOutputTokens,
		Override: q.RouterConfigOverride, Explain: q.Explain, Split: q.RoutingMode,
	}
	bad := func(field, want string) (router.Request, *openai.Error) {
		return req, invalid(field, field+" must be "+want)
	}
	switch {
	case q.Model == "":
		return bad("model", "the name of a model")
	case q.TokenIDs == nil && req.Prompt.Prompt == nil && req.Prompt.Messages == nil:
		return bad("token_ids", "a list of numbers, unless there is a prompt or messages")
	case q.TokenIDs != nil && req.Prompt.Messages != nil:
		return bad("token_ids", "absent beside messages: one of the two says what the prompt is")
	case q.TokenIDs != nil && req.Prompt.Prompt != nil && !sameIDs(q.TokenIDs, req.Prompt.Prompt):
		return bad("token_ids", "absent beside prompt, unless that is a list of the same ids")
	case q.DPRank != nil && q.WorkerID == nil:
		return bad("dp_rank", "beside a worker_id")
	case q.PrefillDPRank != nil && q.PrefillWorkerID == nil:
		return bad("prefill_dp_rank", "beside a prefill_worker_id")
	case !slices.Contains([]router.Split{router.SplitAuto, router.SplitNever, router.SplitAlways}, q.RoutingMode):
		return bad("routing_mode", "aggregated or disaggregated")
	case q.TTFTTargetMS < 0 || q.TTFTTargetMS > math.MaxInt32:
		return bad("ttft_target_ms", "a number of milliseconds")
	}
	req.TTFTTarget = time.Duration(q.TTFTTargetMS * float64(time.Millisecond))
	req.QueueWait, req.DecisionTimeout = c.QueueWait, c.DecisionTimeout
	req.Pinned, req.AnyRank = pin(q.WorkerID, q.DPRank)
	req.PrefillPinned, req.PrefillAnyRank = pin(q.PrefillWorkerID, q.PrefillDPRank)
	if q.AllowedWorkerIDs != nil {
		ids := make(map[uint64]bool, min(len(q.AllowedWorkerIDs), 1024))
		for _, id := range q.AllowedWorkerIDs {
			ids[id] = true
		}
		req.Allowed = []router.Worker{} // not nil, and only existing workers: bounded by the fleet
		for _, w := range c.Router.Workers() {
			if ids[w.ID] {
				req.Allowed = append(req.Allowed, w.Worker)
			}
		}
	}
	return req, nil
}

// pin returns a pinned worker, nil without one.
func pin(id *uint64, rank *uint32) (w *router.Worker, anyRank bool) {
	switch {
	case id == nil:
		return nil, false
	case rank == nil:
		return &router.Worker{ID: *id}, true
	}
	return &router.Worker{ID: *id, DPRank: *rank}, false
}

// sameIDs reports whether a prompt is a list of these token ids.
func sameIDs(ids []uint32, prompt []byte) bool {
	var others []uint32
	return json.Unmarshal(prompt, &others) == nil && slices.Equal(ids, others)
}

// span is a part of a body that may be absent or null.
func span(raw json.RawMessage) []byte {
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	return raw
}

func (c *Config) bestWorker(r *http.Request, q *question) (any, *openai.Error) {
	req, bad := c.request(q)
	if bad != nil {
		return nil, bad
	}
	d, err := c.Router.BestWorker(r.Context(), req)
	if err != nil {
		return nil, c.refusal(err, req.Model)
	}
	a := answer{choice: choiceOf(&d), Decision: shown(&d)}
	if d.Prefill != nil {
		a.Prefill = &leg{d.Prefill.ID, choiceOf(d.Prefill)}
	}
	return a, nil
}

func (c *Config) potentialLoads(r *http.Request, q *question) (any, *openai.Error) {
	req, bad := c.request(q)
	if bad != nil {
		return nil, bad
	}
	loads, err := c.Router.PotentialLoads(r.Context(), req)
	if err != nil {
		return nil, c.refusal(err, req.Model)
	}
	return map[string][]router.PotentialLoad{"loads": loads}, nil
}

// change makes a handler of a change of a booking. Its answer is whether the change did anything.
func change(do func(b *booking) bool) func(*http.Request, *booking) (any, *openai.Error) {
	return func(_ *http.Request, b *booking) (any, *openai.Error) {
		if b.RequestID == "" || b.Tokens < 0 {
			return nil, invalid("request_id", "request_id must be the id of a request, tokens 0 or more")
		}
		return map[string]bool{"changed": do(b)}, nil
	}
}

// refusal returns the answer to an error of the router.
func (c *Config) refusal(err error, model string) *openai.Error {
	taken := func(code string) *openai.Error {
		return &openai.Error{Status: http.StatusConflict, Message: err.Error(), Type: openai.InvalidRequest, Param: "request_id", Code: code}
	}
	switch {
	case errors.Is(err, router.ErrDuplicate):
		return taken("duplicate")
	case errors.Is(err, router.ErrFreed):
		return taken("freed")
	}
	words := openai.RefusalConfig{Overload: c.OverloadStatus, WorkerParam: "worker_id", OverrideParam: "router_config_override"}
	return cmp.Or(words.Refusal(err, model), openai.NoDecision())
}

// modelThresholds is the body and the answer of /busy_threshold, with the field names of NVIDIA
// Dynamo.
type modelThresholds struct {
	Model           string   `json:"model"`
	ActiveBlocks    *float64 `json:"active_decode_blocks_threshold"`
	PrefillTokens   *int     `json:"active_prefill_tokens_threshold"`
	PrefillFraction *float64 `json:"active_prefill_tokens_threshold_frac"`
}

func thresholdsOf(t *router.ModelThresholds) modelThresholds {
	return modelThresholds{t.Model, t.ActiveBlocks, t.PrefillTokens, t.PrefillFraction}
}

// thresholds returns the thresholds of the models that have some.
func (c *Config) thresholds() any {
	list := []modelThresholds{}
	for _, t := range c.Router.Thresholds() {
		if t.ActiveBlocks != nil || t.PrefillTokens != nil || t.PrefillFraction != nil {
			list = append(list, thresholdsOf(&t))
		}
	}
	return map[string][]modelThresholds{"thresholds": list}
}

// setThresholds changes the given thresholds of a model; without any it only returns them.
func (c *Config) setThresholds(_ *http.Request, body *modelThresholds) (any, *openai.Error) {
	set, err := c.Router.SetThresholds(body.Model, func(t router.Thresholds) router.Thresholds {
		return router.Thresholds{
			ActiveBlocks: cmp.Or(body.ActiveBlocks, t.ActiveBlocks), PrefillTokens: cmp.Or(body.PrefillTokens, t.PrefillTokens),
			PrefillFraction: cmp.Or(body.PrefillFraction, t.PrefillFraction),
		}
	})
	switch {
	case errors.Is(err, router.ErrUnknownModel):
		return nil, openai.UnknownModel(body.Model)
	case err != nil:
		return nil, invalid("", err.Error())
	}
	return thresholdsOf(&set), nil
}
