// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// question is the body of the requests that ask about a request. Only model and a
// prompt are needed: token_ids, or prompt or messages with what belongs to it, as
// in a request to the model. Ids beside one of these are refused, since nobody could
// tell which one counts; only a prompt that is the same ids may stand there.
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

	// Body is more of the body that /v1/generate sends to the worker: max_tokens,
	// temperature and so on.
	Body map[string]json.RawMessage `json:"body"`
}

// answer is that of /v1/best_worker.
type answer struct {
	WorkerID      uint64          `json:"worker_id"`
	DPRank        uint32          `json:"dp_rank"`
	OverlapBlocks int             `json:"overlap_blocks"`
	Address       string          `json:"address"`
	Decision      router.Decision `json:"decision"`
}

// named is the body of the requests about one in flight.
type named struct {
	RequestID string `json:"request_id"`
	Tokens    int    `json:"tokens"` // add_output_tokens only
}

// dumpTime is how long a dump may take to be read.
const dumpTime = 5 * time.Minute

// maxBody bounds a body: a million token ids take 8 MB.
const maxBody = 64 << 20

// read reads a body, and answers itself if it cannot.
func read[T any](w http.ResponseWriter, r *http.Request, into *T) bool {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields()
	err := dec.Decode(into)
	if err == nil {
		if _, err = dec.Token(); errors.Is(err, io.EOF) {
			return true
		}
		err = errors.New("something follows its end")
	}
	status := http.StatusBadRequest
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		status = http.StatusRequestEntityTooLarge
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		status = http.StatusRequestTimeout
	}
	e := openai.Error{Status: status, Message: "the body cannot be read: " + err.Error(), Type: openai.InvalidRequest}
	e.Write(w)
	return false
}

// request turns a question into one to the router.
func (c *Config) request(q *question) (router.Request, *openai.Error) {
	req := router.Request{
		ID: q.RequestID, Model: q.Model, Tokens: q.TokenIDs, Salt: q.CacheSalt,
		Prompt:         router.Prompt{Prompt: span(q.Prompt), Messages: span(q.Messages), Tools: span(q.Tools), ToolChoice: span(q.ToolChoice), ChatTemplateKwargs: span(q.ChatTemplateKwargs)},
		RequiredTaints: q.RequiredTaints, PreferredTaints: q.PreferredTaints,
		Session: q.SessionID, SessionFinal: q.SessionFinal,
		Priority: q.Priority, StrictPriority: q.StrictPriority, ExpectedOutput: q.ExpectedOutputTokens,
		Override: q.RouterConfigOverride, Explain: q.Explain,
	}
	bad := func(field, want string) (router.Request, *openai.Error) {
		return req, &openai.Error{Status: http.StatusBadRequest, Message: field + " must be " + want, Type: openai.InvalidRequest, Param: field}
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
	case math.IsNaN(q.TTFTTargetMS) || q.TTFTTargetMS < 0 || q.TTFTTargetMS > math.MaxInt32:
		return bad("ttft_target_ms", "a number of milliseconds")
	}
	req.TTFTTarget = time.Duration(q.TTFTTargetMS * float64(time.Millisecond))
	req.QueueWait, req.DecisionTimeout = c.QueueWait, c.DecisionTimeout
	if q.WorkerID != nil {
		req.Pinned, req.AnyRank = &router.Worker{ID: *q.WorkerID}, q.DPRank == nil
		if q.DPRank != nil {
			req.Pinned.DPRank = *q.DPRank
		}
	}
	if q.AllowedWorkerIDs != nil {
		ids := make(map[uint64]bool, min(len(q.AllowedWorkerIDs), 1024))
		for _, id := range q.AllowedWorkerIDs {
			ids[id] = true
		}
		req.Allowed = []router.Worker{} // of those that exist, however many are named
		for _, w := range c.Router.Workers() {
			if ids[w.ID] {
				req.Allowed = append(req.Allowed, w.Worker)
			}
		}
	}
	return req, nil
}

// sameIDs says whether a prompt is a list of token ids, and of these.
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

// asked reads a question; if it is none, it answers itself.
func (c *Config) asked(w http.ResponseWriter, r *http.Request) (q question, req router.Request, ok bool) {
	if !read(w, r, &q) {
		return q, req, false
	}
	req, bad := c.request(&q)
	if bad != nil {
		bad.Write(w)
		return q, req, false
	}
	return q, req, true
}

func (c *Config) bestWorker(w http.ResponseWriter, r *http.Request) {
	_, req, ok := c.asked(w, r)
	if !ok {
		return
	}
	d, err := c.Router.BestWorker(r.Context(), req)
	if err != nil {
		c.refuse(w, err, req.Model)
		return
	}
	write(w, http.StatusOK, answer{d.Worker.ID, d.Worker.DPRank, d.OverlapBlocks, d.Address.String(), d})
}

func (c *Config) potentialLoads(w http.ResponseWriter, r *http.Request) {
	_, req, ok := c.asked(w, r)
	if !ok {
		return
	}
	loads, err := c.Router.PotentialLoads(r.Context(), req)
	if err != nil {
		c.refuse(w, err, req.Model)
		return
	}
	write(w, http.StatusOK, map[string][]router.PotentialLoad{"loads": loads})
}

// about answers a request about one in flight with whether that did anything.
func about(does func(n *named) bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var n named
		if !read(w, r, &n) {
			return
		}
		if n.RequestID == "" || n.Tokens < 0 {
			e := openai.Error{Status: http.StatusBadRequest, Message: "request_id must be the id of a request, tokens 0 or more", Type: openai.InvalidRequest, Param: "request_id"}
			e.Write(w)
			return
		}
		write(w, http.StatusOK, map[string]bool{"changed": does(&n)})
	}
}

func (c *Config) dumpEvents(w http.ResponseWriter, req *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	// Another dump waits for this one: a client that does not read must not stop it.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(dumpTime)) // a writer that cannot is none that matters
	ctx, cancel := context.WithTimeout(req.Context(), dumpTime)
	defer cancel()
	if err := c.Router.DumpEvents(ctx, w); errors.Is(err, router.ErrDumping) {
		fail(w, http.StatusServiceUnavailable, openai.Unavailable, "", "another dump or snapshot is being made; ask again")
	} // after any other error the array has no end; the client's connection is the client's business
}

// refuse answers with an error of the router.
func (c *Config) refuse(w http.ResponseWriter, err error, model string) {
	e := openai.RefusalConfig{Overload: c.OverloadStatus, WorkerParam: "worker_id", OverrideParam: "router_config_override"}.Refusal(err, model)
	taken := func(code string) *openai.Error {
		return &openai.Error{Status: http.StatusConflict, Message: err.Error(), Type: openai.InvalidRequest, Param: "request_id", Code: code}
	}
	switch {
	case errors.Is(err, router.ErrDuplicate):
		e = taken("duplicate")
	case errors.Is(err, router.ErrFreed):
		e = taken("freed")
	case e == nil:
		e = openai.NoDecision()
	}
	e.Write(w)
}

// modelThresholds is what /busy_threshold reads and writes, in the names of NVIDIA
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

func (c *Config) thresholds(w http.ResponseWriter, _ *http.Request) {
	list := []modelThresholds{}
	for _, t := range c.Router.Thresholds() {
		if t.ActiveBlocks != nil || t.PrefillTokens != nil || t.PrefillFraction != nil {
			list = append(list, thresholdsOf(&t))
		}
	}
	write(w, http.StatusOK, map[string][]modelThresholds{"thresholds": list})
}

// setThresholds changes the thresholds that are given; without any it only tells.
func (c *Config) setThresholds(w http.ResponseWriter, r *http.Request) {
	var body modelThresholds
	if !read(w, r, &body) {
		return
	}
	set, err := c.Router.SetThresholds(body.Model, func(t router.Thresholds) router.Thresholds {
		if body.ActiveBlocks != nil {
			t.ActiveBlocks = body.ActiveBlocks
		}
		if body.PrefillTokens != nil {
			t.PrefillTokens = body.PrefillTokens
		}
		if body.PrefillFraction != nil {
			t.PrefillFraction = body.PrefillFraction
		}
		return t
	})
	switch {
	case errors.Is(err, router.ErrUnknownModel):
		openai.UnknownModel(body.Model).Write(w)
	case err != nil:
		fail(w, http.StatusBadRequest, openai.InvalidRequest, "", err.Error())
	default:
		write(w, http.StatusOK, thresholdsOf(&set))
	}
}

func clip(s string) string { return s[:min(len(s), 128)] }
