// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"sync"

	"github.com/kvroute/kvroute/internal/openai"
)

// responses are the responses that the engine stores, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1: in memory, until
// the process ends.
type responses struct {
	mu sync.Mutex
	// mu guards the fields below.
	byID map[string]*storedResponse
}

// storedResponse is a stored response.
type storedResponse struct {
	answer   object             // is replaced, never changed
	messages []json.RawMessage  // of its prompt
	text     string             // of its output
	cancel   context.CancelFunc // of a run in the background, nil for others
}

func (s *responses) get(id string) (r storedResponse, found bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.byID[id]
	if p == nil {
		return r, false
	}
	return *p, true
}

// put stores a response, unless it was cancelled before.
func (s *responses) put(id string, r storedResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if was := s.byID[id]; was == nil || was.answer["status"] != "cancelled" {
		s.byID[id] = &r
	}
}

// cancelAll ends all runs in the background.
func (s *responses) cancelAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.byID {
		if r.cancel != nil {
			r.cancel()
		}
	}
}

// responseFields are the fields of /v1/responses about stored responses.
type responseFields struct {
	ID         string  `json:"request_id"` // vLLM's: the client may choose the response's id
	Previous   *string `json:"previous_response_id"`
	Background bool    `json:"background"`
	Store      *bool   `json:"store"`
}

// beginResponse reads the fields about stored responses, and puts the conversation that the request continues before the
// prompt.
func (e *Engine) beginResponse(a *answer, data []byte) *openai.Error {
	f := &a.fields
	if err := json.Unmarshal(data, f); err != nil {
		return refusal(http.StatusBadRequest, "", err.Error())
	}
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	a.id = cmp.Or(f.ID, "resp_"+hex.EncodeToString(random[:]))
	kept := *cmp.Or(f.Store, new(true))
	switch {
	case f.Background && !kept:
		return refusal(http.StatusBadRequest, "background", "background can only be used when `store` is true")
	case f.Background && !e.conf.StoreResponses:
		return refusal(http.StatusBadRequest, "background", "This engine does not support `store=True` and therefore does not support the background mode.")
	}
	a.kept = kept && e.conf.StoreResponses
	_ = json.Unmarshal(a.body.Messages, &a.messages) // it was parsed before
	if f.Previous == nil {
		return nil
	}
	previous, found := e.stored.get(*f.Previous)
	if !found {
		return responseNotFound(*f.Previous)
	}
	said, _ := json.Marshal(object{"role": "assistant", "content": previous.text}) // a text always marshals
	var all []json.RawMessage
	rest := a.messages
	for ; len(rest) > 0 && isSystem(rest[0]); rest = rest[1:] {
		all = append(all, rest[0])
	}
	for _, m := range previous.messages { // instructions do not carry over
		if !isSystem(m) {
			all = append(all, m)
		}
	}
	if previous.text != "" {
		all = append(all, said)
	}
	a.messages = append(all, rest...)
	a.body.Messages, _ = json.Marshal(a.messages)
	a.body.Inexact = ""
	return nil
}

func isSystem(message json.RawMessage) bool {
	var m struct {
		Role string `json:"role"`
	}
	return json.Unmarshal(message, &m) == nil && m.Role == "system"
}

// keep stores a response in its present state, if it is to be stored.
func (e *Engine) keep(a *answer, r object, cancel context.CancelFunc) {
	if a.kept {
		e.stored.put(a.id, storedResponse{answer: r, messages: a.messages, text: a.text(), cancel: cancel})
	}
}

// background runs a request after it has answered with a queued response.
func (e *Engine) background(req *request, a *answer, r *http.Request) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	queued := a.response()
	queued["status"] = "queued"
	e.keep(a, queued, cancel)
	reply(a.w, queued)
	a.w = nowhere{}
	go func() {
		defer cancel()
		e.run(req, a, r.WithContext(ctx))
	}()
}

// nowhere is the writer of a response that no client waits for.
type nowhere struct{}

func (nowhere) Header() http.Header         { return http.Header{} }
func (nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (nowhere) WriteHeader(int)             {}

func responseNotFound(id string) *openai.Error {
	return refusal(http.StatusNotFound, "response_id", fmt.Sprintf("Response with id '%s' not found.", id))
}

// retrieve answers with a stored response.
func (e *Engine) retrieve(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	switch found, known := e.stored.get(id); {
	case !known:
		responseNotFound(id).Write(w)
	case r.URL.Query().Get("stream") == "true": // vLLM streams only what began as a stream in the background
		refusal(http.StatusBadRequest, "response_id", "Unknown response_id: "+id).Write(w)
	default:
		reply(w, found.answer)
	}
}

// cancel ends the run of a response in the background.
func (e *Engine) cancel(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	found, known := e.stored.get(id)
	switch status := found.answer["status"]; {
	case !known:
		responseNotFound(id).Write(w)
	case status != "queued" && status != "in_progress":
		refusal(http.StatusBadRequest, "response_id", "Cannot cancel a synchronous response.").Write(w)
	default:
		found.answer = maps.Clone(found.answer)
		found.answer["status"] = "cancelled"
		e.stored.put(id, found)
		found.cancel()
		reply(w, found.answer)
	}
}
