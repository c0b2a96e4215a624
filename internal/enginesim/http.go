// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
)

const (
	maxBody       = 64 << 20
	defaultTokens = 16
	maxTokens     = 8192
)

func (e *Engine) routes() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		(&openai.Error{Status: http.StatusNotFound, Message: "Not Found", Type: openai.NotFound}).Write(w)
	})
	mux.HandleFunc("/v1/chat/completions", e.generate)
	mux.HandleFunc("/v1/completions", e.generate)
	mux.HandleFunc("/v1/responses", e.generate)
	mux.HandleFunc("/v1/messages", e.generate)
	// Engines' own endpoints; they answer like completions.
	mux.HandleFunc("POST /generate", e.generate)
	mux.HandleFunc("POST /inference/v1/generate", e.generate)
	mux.HandleFunc("POST /v1/embeddings", e.embed)
	mux.HandleFunc("POST /tokenize", e.tokenize)
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.Handle("GET /metrics", e.metrics.handler())
	mux.HandleFunc("POST /reset_prefix_cache", e.forget(func() { e.publish(Change{Event: indexer.Event{Kind: indexer.Cleared}}) }))
	// A restart of the process: no event is published, and cache and sockets start empty.
	restart := func() {}
	if e.conf.Sockets != nil {
		restart = e.conf.Sockets.Restart
		e.conf.Sockets.routes(mux, e.conf.BlockSize)
	}
	mux.HandleFunc("POST /sim/restart", e.forget(restart))
	return mux
}

// ServeHTTP serves one request.
func (e *Engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Sim-Worker", e.conf.Name)
	e.mux.ServeHTTP(w, r)
}

func (e *Engine) models(w http.ResponseWriter, _ *http.Request) {
	reply(w, map[string]any{"object": "list", "data": []any{
		map[string]any{"id": e.conf.Model, "object": "model", "owned_by": "kvroute", "max_model_len": e.capacity()},
	}})
}

// read reads and parses the body of a request. If that fails, it sends the error.
func read(w http.ResponseWriter, r *http.Request, endpoint openai.Endpoint) (body openai.Body, data []byte, ok bool) {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		status := http.StatusBadRequest
		if _, large := errors.AsType[*http.MaxBytesError](err); large {
			status = http.StatusRequestEntityTooLarge
		}
		refuse(w, status, "", err.Error())
		return body, nil, false
	}
	body, bad := openai.Parse(endpoint, data)
	if bad != nil {
		bad.Write(w)
	}
	return body, data, bad == nil
}

func refuse(w http.ResponseWriter, status int, param, message string) {
	(&openai.Error{Status: status, Message: message, Type: openai.InvalidRequest, Param: param}).Write(w)
}

func reply[T any](w http.ResponseWriter, v T) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // an error means that the client has left
}

// tokenize returns the token ids of a chat or a completion, as vLLM does.
func (e *Engine) tokenize(w http.ResponseWriter, r *http.Request) {
	body, _, ok := read(w, r, openai.Other)
	if !ok {
		return
	}
	prompt, err := e.conf.Prompts.Encode(r.Context(), nil, body.Request, time.Now())
	if err != nil || prompt.Mode != tokenizer.Exact {
		refuse(w, http.StatusBadRequest, "", fmt.Sprintf("no prompt: %s %v", prompt.Reason, err))
		return
	}
	reply(w, map[string]any{"count": len(prompt.IDs), "max_model_len": e.capacity(), "tokens": prompt.IDs})
}

// capacity is the size of the cache in tokens.
func (e *Engine) capacity() int { return e.conf.NumBlocks * e.conf.BlockSize }

// forget empties the cache if no block is in use, as vLLM does, and then calls f.
func (e *Engine) forget(f func()) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		e.mu.Lock()
		ok := e.model.cache.reset()
		if ok {
			f()
		}
		e.mu.Unlock()
		if !ok {
			refuse(w, http.StatusConflict, "", "blocks are in use")
		}
	}
}

// embed answers at once with a meaningless vector, without using the cache.
func (e *Engine) embed(w http.ResponseWriter, r *http.Request) {
	body, _, ok := read(w, r, openai.Load)
	if !ok {
		return
	}
	if body.Model != e.conf.Model && body.Model != "" {
		(&openai.Error{Status: http.StatusNotFound, Message: fmt.Sprintf("The model %q does not exist.", body.Model), Type: openai.NotFound, Param: "model"}).Write(w)
		return
	}
	reply(w, map[string]any{
		"object": "list", "model": e.conf.Model, "data": []any{map[string]any{"object": "embedding", "index": 0, "embedding": []float64{0, 1}}},
	})
}

// generate serves all endpoints with a prompt.
func (e *Engine) generate(w http.ResponseWriter, r *http.Request) {
	endpoint, bad := openai.Classify(r.Method, r.URL.Path)
	if bad != nil {
		bad.Write(w)
		return
	}
	body, data, ok := read(w, r, endpoint)
	if !ok {
		return
	}
	if body.CacheSalt == "" {
		body.CacheSalt = r.Header.Get("X-Tenant-Id") // as Dynamo's workers do
	}
	a := answer{engine: e, body: body, endpoint: endpoint, created: time.Now(), w: w}
	req, bad := e.request(r.Context(), data, &a)
	if bad != nil {
		bad.Write(w)
		return
	}
	e.submit(req)
	if !a.follow(r) {
		e.abort(req)
	}
}

// adapter returns the adapter for a model name: "" for the model itself. Some requests need not
// name a model.
func (e *Engine) adapter(name string) (lora string, known bool) {
	if slices.Contains(e.conf.LoRA, name) {
		return name, true
	}
	return "", name == "" || name == e.conf.Model || slices.Contains(e.conf.Aliases, name)
}

// request turns a body into a request that reports its progress to a.
func (e *Engine) request(ctx context.Context, data []byte, a *answer) (*request, *openai.Error) {
	refuse := func(status int, param, message string) (*request, *openai.Error) {
		return nil, &openai.Error{Status: status, Message: message, Type: openai.InvalidRequest, Param: param}
	}
	lora, known := e.adapter(a.body.Model)
	if !known {
		return refuse(http.StatusNotFound, "model", fmt.Sprintf("The model %q does not exist.", a.body.Model))
	}
	var fields promptFields
	tokens, form, err := e.promptOf(ctx, data, &a.body, &fields, a.created)
	if err != nil {
		return refuse(http.StatusBadRequest, "", err.Error())
	}
	a.w.Header().Set("X-Sim-Prompt", form)
	if fields.ReturnTokenIDs {
		a.ids = tokens
	}
	if len(tokens) == 0 {
		return refuse(http.StatusBadRequest, "prompt", "The prompt is empty.")
	}
	output := a.body.MaxTokens
	if output == 0 {
		output = defaultTokens
	}
	output = min(output, maxTokens)
	if most := e.capacity(); len(tokens)+output > most {
		return refuse(http.StatusBadRequest, "max_tokens",
			fmt.Sprintf("This model's maximum context length is %d tokens, you asked for %d.", most, len(tokens)+output))
	}
	local := indexer.AppendLocalHashes(nil, tokens, e.conf.BlockSize, indexer.Seed(lora, a.body.CacheSalt))
	// The channel has room for all progress of the request, so that the engine never waits for a
	// slow client.
	a.prompt, a.output, a.progress = len(tokens), output, make(chan struct{}, output+1)
	return &request{
		tokens: tokens[:len(local)*e.conf.BlockSize], keys: keys{lora, a.body.CacheSalt},
		prompt: len(tokens), local: local, sequence: indexer.AppendSequenceHashes(nil, local), output: output,
		admitted: func(cached int) { a.cached = cached; a.progress <- struct{}{} },
		token:    func() { a.progress <- struct{}{} },
		finished: func() { close(a.progress) },
	}, nil
}
