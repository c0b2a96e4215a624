// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"cmp"
	"context"
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
	defaultTokens = 16
	maxTokens     = 8192
)

func (e *Engine) routes() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { refusal(http.StatusNotFound, "", "Not Found").Write(w) })
	// The last two are engines' own endpoints, which answer like completions.
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "POST /generate", "POST /inference/v1/generate"} {
		mux.HandleFunc(path, e.generate)
	}
	mux.HandleFunc("GET /v1/responses/{id}", e.retrieve)
	mux.HandleFunc("POST /v1/responses/{id}/cancel", e.cancel)
	mux.HandleFunc("/v1/responses/{id}", func(w http.ResponseWriter, _ *http.Request) { // vLLM has no DELETE
		refusal(http.StatusMethodNotAllowed, "", "Method Not Allowed").Write(w)
	})
	mux.HandleFunc("POST /v1/embeddings", e.embed)
	mux.HandleFunc("POST /tokenize", e.tokenize)
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.Handle("GET /metrics", e.metrics)
	mux.HandleFunc("POST /reset_prefix_cache", e.forget(func() { // the sockets send the event after the next step
		e.publish(Change{Event: indexer.Event{Kind: indexer.Cleared}})
		e.deliver()
	}))
	// A restart of the process: no event is published, and cache and sockets start empty.
	restart := func() {}
	if s := e.conf.Sockets; s != nil {
		restart = s.Restart
		path, description := s.description(e.conf.BlockSize)
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { reply(w, description) })
	}
	mux.HandleFunc("POST /sim/restart", e.forget(restart))
	mux.HandleFunc("POST /sim/blocks/{id}", e.send) // for decode engines
	mux.HandleFunc("POST /sim/pull", e.servePull)
	mux.HandleFunc("GET /sim/blocks", func(w http.ResponseWriter, _ *http.Request) { reply(w, e.Cached()) })
	return mux
}

// models lists the names of the model and its adapters, as vLLM does.
func (e *Engine) models(w http.ResponseWriter, _ *http.Request) {
	var data []object
	for _, name := range append([]string{e.conf.Model}, e.conf.Aliases...) {
		data = append(data, object{"id": name, "object": "model", "owned_by": "kvroute", "root": e.conf.Model, "parent": nil, "max_model_len": e.capacity()})
	}
	for _, name := range e.conf.LoRA {
		data = append(data, object{"id": name, "object": "model", "owned_by": "kvroute", "root": name, "parent": e.conf.Model})
	}
	reply(w, object{"object": "list", "data": data})
}

// ServeHTTP serves one request.
func (e *Engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Sim-Worker", e.conf.Name)
	e.mux.ServeHTTP(w, r)
}

// forget empties the cache if no block is in use, as vLLM does, and then calls f.
func (e *Engine) forget(f func()) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		e.mu.Lock()
		ok := e.scheduler.cache.reset()
		if ok {
			f()
		}
		e.mu.Unlock()
		if !ok {
			refusal(http.StatusConflict, "", "blocks are in use").Write(w)
		}
	}
}

// embed answers at once with a meaningless vector, without using the cache.
func (e *Engine) embed(w http.ResponseWriter, r *http.Request) {
	body, _, bad := read(r, openai.Load)
	if bad == nil && body.Model != e.conf.Model && body.Model != "" {
		bad = unknownModel(body.Model)
	}
	if bad != nil {
		bad.Write(w)
		return
	}
	reply(w, object{"object": "list", "model": e.conf.Model, "data": []object{{"object": "embedding", "index": 0, "embedding": []float64{0, 1}}}})
}

// tokenize returns the token ids of a chat or a completion, as vLLM does.
func (e *Engine) tokenize(w http.ResponseWriter, r *http.Request) {
	body, _, bad := read(r, openai.Other)
	if bad != nil {
		bad.Write(w)
		return
	}
	prompt, err := e.conf.Prompts.Encode(r.Context(), nil, body.Request, time.Now())
	if err != nil || prompt.Mode != tokenizer.Exact {
		refusal(http.StatusBadRequest, "", fmt.Sprintf("no prompt: %s %v", prompt.Reason, err)).Write(w)
		return
	}
	reply(w, object{"count": len(prompt.IDs), "max_model_len": e.capacity(), "tokens": prompt.IDs})
}

// capacity is the size of the cache in tokens.
func (e *Engine) capacity() int { return e.conf.NumBlocks * e.conf.BlockSize }

// generate serves all endpoints with a prompt.
func (e *Engine) generate(w http.ResponseWriter, r *http.Request) {
	a := answer{w: w, created: time.Now()}
	a.keep = func(r object) { e.keep(&a, r, nil) }
	req, bad := e.request(r, &a)
	if bad != nil {
		bad.Write(w)
		return
	}
	if a.fields.Background && !a.body.Stream {
		e.background(req, &a, r)
		return
	}
	e.run(req, &a, r)
}

// run computes a request and writes its response.
func (e *Engine) run(req *request, a *answer, r *http.Request) {
	if a.pull != nil {
		a.pull(r.Context())
	}
	e.submit(req)
	if !a.follow(r, e.metrics) {
		e.abort(req)
	}
}

// request reads a request, which reports its progress to a.
func (e *Engine) request(r *http.Request, a *answer) (*request, *openai.Error) {
	endpoint, bad := openai.Classify(r.Method, r.URL.Path)
	if bad != nil {
		return nil, bad
	}
	body, data, bad := read(r, endpoint)
	if bad != nil {
		return nil, bad
	}
	a.endpoint, a.body = endpoint, &body
	own := keys{salt: cmp.Or(body.CacheSalt, r.Header.Get("X-Tenant-Id"))}   // as Dynamo's workers do
	switch known := append([]string{"", e.conf.Model}, e.conf.Aliases...); { // some requests need not name a model
	case slices.Contains(e.conf.LoRA, body.Model):
		own.lora = body.Model
	case !slices.Contains(known, body.Model):
		return nil, unknownModel(body.Model)
	}
	if endpoint == openai.Responses {
		if bad := e.beginResponse(a, data); bad != nil {
			return nil, bad
		}
	}
	prompt, err := readPrompt(r.Context(), e.conf.Engine, e.conf.Prompts, data, &body, a.created)
	if err != nil {
		return nil, refusal(http.StatusBadRequest, "", err.Error())
	}
	a.w.Header().Set("X-Sim-Prompt", prompt.form)
	if prompt.returnIDs {
		a.ids = prompt.ids
	}
	a.prompt = len(prompt.ids)
	output := min(cmp.Or(body.MaxTokens, defaultTokens), maxTokens)
	switch most := e.capacity(); {
	case a.prompt == 0:
		return nil, refusal(http.StatusBadRequest, "prompt", "The prompt is empty.")
	case a.prompt+output > most:
		return nil, refusal(http.StatusBadRequest, "max_tokens",
			fmt.Sprintf("This model's maximum context length is %d tokens, you asked for %d.", most, a.prompt+output))
	}
	// The channel has room for all progress of the request, so that the engine never waits for a
	// slow client.
	a.progress = make(chan struct{}, output+1)
	req := &request{
		prefix: newPrefix(prompt.ids, e.conf.BlockSize, own), prompt: a.prompt, output: output,
		admitted: func(cached int) { a.cached = cached; a.progress <- struct{}{} },
		token:    func() { a.progress <- struct{}{} },
		finished: func() { close(a.progress) },
	}
	move, err := e.conf.transfer(data)
	if err == nil && move.send {
		err = e.open(move.id, req, a)
		a.offer = func(whole object) { e.offer(whole, r, req.leg, a) }
	}
	if err != nil {
		return nil, refusal(http.StatusBadRequest, "", err.Error())
	}
	if move.from != "" {
		req.receiving = true
		a.receive = func(ctx context.Context) bool { return e.receive(ctx, move, req) }
	}
	a.pull = e.puller(data, req)
	return req, nil
}

// read reads and parses the body of a request.
func read(r *http.Request, endpoint openai.Endpoint) (body openai.Body, data []byte, bad *openai.Error) {
	data, err := io.ReadAll(r.Body)
	if err != nil {
		return body, nil, refusal(http.StatusBadRequest, "", err.Error())
	}
	data = openai.UTF8(data)
	body, bad = openai.Parse(endpoint, data)
	return body, data, bad
}

func unknownModel(name string) *openai.Error {
	bad := refusal(http.StatusNotFound, "model", fmt.Sprintf("The model %q does not exist.", name))
	bad.Type = openai.NotFound
	return bad
}

func refusal(status int, param, message string) *openai.Error {
	return &openai.Error{Status: status, Message: message, Type: openai.InvalidRequest, Param: param}
}
