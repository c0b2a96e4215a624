// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
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
	// Engines' own endpoints; the answers are those of completions.
	mux.HandleFunc("POST /generate", e.generate)
	mux.HandleFunc("POST /inference/v1/generate", e.generate)
	mux.HandleFunc("POST /v1/embeddings", e.embed)
	mux.HandleFunc("POST /tokenize", e.tokenize)
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.Handle("GET /metrics", e.metrics.handler())
	mux.HandleFunc("POST /reset_prefix_cache", e.reset)
	mux.HandleFunc("POST /sim/restart", e.restart)
	if e.conf.Sockets != nil {
		e.conf.Sockets.routes(mux, e.conf.BlockSize)
	}
	return mux
}

// ServeHTTP serves one request.
func (e *Engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Sim-Worker", e.conf.Name)
	e.mux.ServeHTTP(w, r)
}

func (e *Engine) models(w http.ResponseWriter, _ *http.Request) {
	type card struct {
		ID          string `json:"id"`
		Object      string `json:"object"`
		OwnedBy     string `json:"owned_by"`
		MaxModelLen int    `json:"max_model_len"`
	}
	reply(w, struct {
		Object string `json:"object"`
		Data   []card `json:"data"`
	}{"list", []card{{e.conf.Model, "model", "kvroute", e.conf.NumBlocks * e.conf.BlockSize}}})
}

// tokenize gives the token ids of a chat or a completion, as vLLM does.
func (e *Engine) tokenize(w http.ResponseWriter, r *http.Request) {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		(&openai.Error{Status: http.StatusBadRequest, Message: err.Error(), Type: openai.InvalidRequest}).Write(w)
		return
	}
	body, bad := openai.Parse(openai.Other, data)
	if bad != nil {
		bad.Write(w)
		return
	}
	prompt, err := e.conf.Prompts.Encode(r.Context(), nil, body.Request, time.Now())
	if err != nil || prompt.Mode != tokenizer.Exact {
		(&openai.Error{Status: http.StatusBadRequest, Message: fmt.Sprintf("no prompt: %s %v", prompt.Reason, err), Type: openai.InvalidRequest}).Write(w)
		return
	}
	reply(w, struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []uint32 `json:"tokens"`
	}{len(prompt.IDs), e.conf.NumBlocks * e.conf.BlockSize, prompt.IDs})
}

// reset forgets all blocks, as vLLM does only while none is in use.
func (e *Engine) reset(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	ok := e.model.cache.reset()
	if ok {
		e.publish(Change{Event: indexer.Event{Kind: indexer.Cleared}})
	}
	e.mu.Unlock()
	if !ok {
		(&openai.Error{Status: http.StatusConflict, Message: "blocks are in use", Type: openai.InvalidRequest}).Write(w)
	}
}

// restart does to cache and sockets what an end of the process would: nobody is
// told, and everything begins anew.
func (e *Engine) restart(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	ok := e.model.cache.reset()
	if ok && e.conf.Sockets != nil {
		e.conf.Sockets.restart()
	}
	e.mu.Unlock()
	if !ok {
		(&openai.Error{Status: http.StatusConflict, Message: "blocks are in use", Type: openai.InvalidRequest}).Write(w)
	}
}

func reply[T any](w http.ResponseWriter, v T) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // a client that left needs no answer
}

// generate serves all endpoints with a prompt.
func (e *Engine) generate(w http.ResponseWriter, r *http.Request) {
	endpoint, bad := openai.Classify(r.Method, r.URL.Path)
	if bad != nil {
		bad.Write(w)
		return
	}
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		status := http.StatusBadRequest
		if _, large := errors.AsType[*http.MaxBytesError](err); large {
			status = http.StatusRequestEntityTooLarge
		}
		(&openai.Error{Status: status, Message: err.Error(), Type: openai.InvalidRequest}).Write(w)
		return
	}
	body, bad := openai.Parse(endpoint, data)
	if bad != nil {
		bad.Write(w)
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

// adapter returns the adapter that a model's name stands for, "" for the model
// itself, which some requests need not name.
func (e *Engine) adapter(name string) (lora string, known bool) {
	if slices.Contains(e.conf.LoRA, name) {
		return name, true
	}
	return "", name == "" || name == e.conf.Model || slices.Contains(e.conf.Aliases, name)
}

// request turns a body into a request whose progress a hears of.
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
	if most := e.conf.NumBlocks * e.conf.BlockSize; len(tokens)+output > most {
		return refuse(http.StatusBadRequest, "max_tokens",
			fmt.Sprintf("This model's maximum context length is %d tokens, you asked for %d.", most, len(tokens)+output))
	}
	local := indexer.AppendLocalHashes(nil, tokens, e.conf.BlockSize, indexer.Seed(lora, a.body.CacheSalt))
	// Room for everything that the engine will ever say, so it never waits for
	// a slow client.
	a.prompt, a.output, a.progress = len(tokens), output, make(chan struct{}, output+1)
	return &request{
		tokens: tokens[:len(local)*e.conf.BlockSize], keys: keys{lora, a.body.CacheSalt},
		prompt: len(tokens), local: local, sequence: indexer.AppendSequenceHashes(nil, local), output: output,
		admitted: func(cached int) { a.cached = cached; a.progress <- struct{}{} },
		token:    func() { a.progress <- struct{}{} },
		finished: func() { close(a.progress) },
	}, nil
}

// answer is one response in the making.
type answer struct {
	engine  *Engine
	body    openai.Body
	ids     []uint32 // of the prompt, if the client asked for them
	created time.Time

	endpoint openai.Endpoint
	w        http.ResponseWriter

	prompt, output int
	cached         int           // set before the first progress
	progress       chan struct{} // one at admission, one for each token; closed at the end

	made int
	buf  bytes.Buffer
}

// follow writes the response as the engine makes progress. It returns false if the
// client left.
func (a *answer) follow(r *http.Request) bool {
	w := a.w
	for admitted := false; ; {
		select {
		case <-r.Context().Done():
			return false
		case _, more := <-a.progress:
			switch {
			case !more:
				a.end()
				return true
			case !admitted:
				admitted = true
				if a.body.Stream {
					// As vLLM does: the headers leave before the prompt is computed.
					w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
					w.WriteHeader(http.StatusOK)
					if a.endpoint == openai.Responses {
						a.named("response.created", a.response(""))
						_, _ = w.Write(a.buf.Bytes()) // the next write tells of a client that left
					}
					flush(w)
				}
				continue
			}
			if a.made == 0 {
				a.engine.metrics.firstToken(time.Since(a.created))
			}
			a.made++
			if a.body.Stream && !a.stream() {
				return false
			}
		}
	}
}

func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

// words are what answers are made of.
//
//nolint:gochecknoglobals // a table
var words = [...]string{"the ", "block ", "is ", "cached ", "and ", "a ", "worker ", "answers ", "soon, ", "then ", "another ", "one "}

func (a *answer) word(i int) string { return words[(a.prompt*7+i*i+i)%len(words)] }

// usage is the accounting of a request.
type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	Details          struct {
		CachedTokens int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

func (a *answer) usage() *usage {
	u := &usage{PromptTokens: a.prompt, CompletionTokens: a.made, TotalTokens: a.prompt + a.made}
	u.Details.CachedTokens = a.cached
	return u
}

// text is a message or a delta.
type text struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

// choice and object are the parts of OpenAI's answers, streamed or not.
type choice struct {
	Index        int     `json:"index"`
	Delta        *text   `json:"delta,omitempty"`
	Message      *text   `json:"message,omitempty"`
	Text         *string `json:"text,omitempty"`
	FinishReason *string `json:"finish_reason"`
}

type object struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`

	PromptTokenIDs []uint32 `json:"prompt_token_ids,omitempty"`
}

func (a *answer) chat() bool { return a.endpoint == openai.ChatCompletions }

func (a *answer) object(c ...choice) object {
	o := object{ID: fmt.Sprintf("cmpl-%x", a.created.UnixNano()), Object: "text_completion", Created: a.created.Unix(), Model: a.body.Model, Choices: c}
	if a.chat() {
		o.ID = "chat" + o.ID
		o.Object = "chat.completion"
		if a.body.Stream {
			o.Object += ".chunk"
		}
	}
	if c == nil {
		o.Choices = []choice{}
	}
	return o
}

// stream writes the newest token, the first one behind the role that vLLM sends.
func (a *answer) stream() bool {
	a.buf.Reset()
	word := a.word(a.made - 1)
	switch {
	case a.endpoint == openai.Responses:
		a.named("response.output_text.delta", delta{word})
	case a.endpoint == openai.Messages:
		a.named("content_block_delta", delta{word})
	case a.chat():
		if a.made == 1 {
			a.event(a.object(choice{Delta: &text{Role: "assistant"}}))
		}
		a.event(a.object(choice{Delta: &text{Content: word}}))
	default:
		a.event(a.object(choice{Text: &word}))
	}
	_, err := a.w.Write(a.buf.Bytes())
	flush(a.w)
	return err == nil
}

func (a *answer) event(o object) {
	a.buf.WriteString("data: ")
	_ = json.NewEncoder(&a.buf).Encode(o) // plain data always marshals
	a.buf.WriteString("\n")
}

// end writes what follows the last token.
func (a *answer) end() {
	reason := "length"
	defer a.engine.metrics.finished(a.prompt, a.made)
	if a.body.Stream && (a.endpoint == openai.Responses || a.endpoint == openai.Messages) {
		a.buf.Reset()
		if a.endpoint == openai.Messages {
			a.named("message_stop", a.message(a.text()))
		} else {
			a.named("response.completed", a.response(a.text()))
		}
		_, _ = a.w.Write(a.buf.Bytes()) // as below
		return
	}
	if a.body.Stream {
		a.buf.Reset()
		last := choice{FinishReason: &reason}
		if a.chat() {
			last.Delta = &text{}
		} else {
			last.Text = new("")
		}
		a.event(a.object(last))
		if a.body.IncludeUsage {
			o := a.object()
			o.Usage = a.usage()
			a.event(o)
		}
		a.buf.WriteString("data: [DONE]\n\n")
		_, _ = a.w.Write(a.buf.Bytes()) // the last words to a client that may have left
		return
	}
	c := choice{FinishReason: &reason}
	if a.chat() {
		c.Message = &text{Role: "assistant", Content: a.text()}
	} else {
		c.Text = new(a.text())
	}
	if a.endpoint == openai.Responses {
		reply(a.w, a.response(a.text()))
		return
	}
	if a.endpoint == openai.Messages {
		reply(a.w, a.message(a.text()))
		return
	}
	o := a.object(c)
	o.Usage, o.PromptTokenIDs = a.usage(), a.ids
	reply(a.w, o)
}

// text is all that was generated.
func (a *answer) text() string {
	var all strings.Builder
	for i := range a.made {
		all.WriteString(a.word(i))
	}
	return all.String()
}

// embed answers with a vector that means nothing, at once and from no cache.
func (e *Engine) embed(w http.ResponseWriter, r *http.Request) {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		(&openai.Error{Status: http.StatusBadRequest, Message: err.Error(), Type: openai.InvalidRequest}).Write(w)
		return
	}
	body, bad := openai.Parse(openai.Load, data)
	if bad == nil && body.Model != e.conf.Model && body.Model != "" {
		bad = &openai.Error{Status: http.StatusNotFound, Message: fmt.Sprintf("The model %q does not exist.", body.Model), Type: openai.NotFound, Param: "model"}
	}
	if bad != nil {
		bad.Write(w)
		return
	}
	type vector struct {
		Object    string    `json:"object"`
		Index     int       `json:"index"`
		Embedding []float64 `json:"embedding"`
	}
	reply(w, struct {
		Object string   `json:"object"`
		Data   []vector `json:"data"`
		Model  string   `json:"model"`
	}{"list", []vector{{"embedding", 0, []float64{0, 1}}}, e.conf.Model})
}
