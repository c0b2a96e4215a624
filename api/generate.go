// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// generate routes a request, sends it to the worker and relays the stream of events of the
// response.
func (c *Config) generate(w http.ResponseWriter, r *http.Request) {
	var q question
	var req router.Request
	var to workerRequest
	bad := read(r, &q)
	if bad == nil {
		req, bad = c.request(&q)
	}
	switch {
	case bad != nil:
	case q.RequestID == "":
		bad = invalid("request_id", "request_id must be the id of the request")
	default:
		to, bad = c.workerRequest(&q)
	}
	if bad == nil {
		bad = c.complete(&req, &to)
	}
	if bad != nil {
		bad.Write(w)
		return
	}
	begun := false
	out := http.NewResponseController(w)
	for chunk, err := range c.Router.Generate(r.Context(), req, c.dispatch(&to)) {
		if err != nil {
			c.failGenerate(w, err, req.Model, begun)
			return
		}
		if len(chunk.Data) == 0 {
			continue
		}
		if !begun {
			begun = true
			w.Header().Set("Content-Type", "text/event-stream")
		}
		if _, err := w.Write(chunk.Data); err != nil {
			return // the client left
		}
		_ = out.Flush() // an error only means that the writer cannot flush
	}
}

// workerRequest is the request to the worker.
type workerRequest struct {
	prefill.Leg      // with the path and the body
	asksIDs     bool // the question does not say whether the engine returns token ids
}

// workerRequest makes the request to the worker: token ids or a prompt to /v1/completions, messages to
// /v1/chat/completions, together with the further fields of the question.
func (c *Config) workerRequest(q *question) (to workerRequest, _ *openai.Error) {
	fields := map[string]any{"model": q.Model, "stream": true}
	for name, value := range map[string]json.RawMessage{
		"prompt": q.Prompt, "messages": q.Messages, "tools": q.Tools, "tool_choice": q.ToolChoice, "chat_template_kwargs": q.ChatTemplateKwargs,
	} {
		if fields[name] = nil; span(value) != nil {
			fields[name] = value
		}
	}
	to.Path = "/v1/completions"
	if fields["messages"] != nil {
		to.Path = "/v1/chat/completions"
	}
	if q.TokenIDs != nil {
		fields["prompt"] = q.TokenIDs
	}
	if q.CacheSalt != "" {
		fields["cache_salt"] = q.CacheSalt
	}
	for name, value := range q.Body {
		_, given := fields[name]
		switch {
		case name == "stream":
			return to, invalid("body.stream", "body must be without stream: the answer of /v1/generate is always a stream of events")
		case given:
			return to, invalid("body."+name, "body must be without "+name+": put it beside body")
		}
		fields[name] = value
	}
	maps.DeleteFunc(fields, func(_ string, value any) bool { return value == nil })
	_, given := q.Body[askTokenIDs]
	to.asksIDs = !given
	var err error
	if to.Body, err = json.Marshal(fields); err != nil {
		return to, invalid("body", "body must be JSON")
	}
	if field := openai.SteeringPath(to.Body, openai.FieldPins|openai.FieldHints); field != "" && !c.TrustOverrides {
		return to, invalid("body."+field, "body."+field+" steers workers: start kvroute with --trust-overrides if all clients of the API may do so")
	}
	return to, nil
}

// complete adds to the router's request what the body of the worker's request says, as for a request of Envoy.
func (c *Config) complete(req *router.Request, to *workerRequest) *openai.Error {
	endpoint, _ := openai.Classify(http.MethodPost, to.Path) // the path is known
	fields, bad := openai.Parse(endpoint, to.Body)
	if bad != nil {
		return bad
	}
	to.Prompts = fields.Prompts
	req.Salt = cmp.Or(req.Salt, fields.CacheSalt)
	req.MaxOutput, req.Uncached = fields.MaxTokens, fields.Uncached
	req.WantSecond, req.RankPerAttempt = !c.OneChoice, true
	if c.RunLeg == nil || fields.Uncached || fields.Choices > 1 {
		if req.Split == router.SplitAlways {
			return invalid("routing_mode", "routing_mode must not be disaggregated: prefill workers do not serve this request")
		}
		req.Split = router.SplitNever
	}
	return nil
}

// failGenerate sends an error: as a response, or as an event if the response has begun.
func (c *Config) failGenerate(w http.ResponseWriter, err error, model string, begun bool) {
	if begun {
		e := openai.Error{Message: err.Error(), Type: openai.Unavailable, Code: "worker_failed"}
		_, _ = fmt.Fprintf(w, "data: %s\n\n", e.JSON()) // the client may have left
		return
	}
	if answer, ok := errors.AsType[*router.StatusError](err); ok && answer.Status >= 400 && answer.Status < 500 {
		// The worker refused a field that the client had set.
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(answer.Status)
		_, _ = w.Write(answer.Body) // the client may have left
		return
	}
	if _, ok := errors.AsType[*dispatchError](err); ok {
		e := openai.Error{Status: http.StatusBadGateway, Message: err.Error(), Type: openai.Unavailable, Code: "worker_failed"}
		e.Write(w)
		return
	}
	c.refusal(err, model).Write(w)
}

// dispatchError means that a worker could not be reached, or sent no stream.
type dispatchError struct{ error }

func (e *dispatchError) Unwrap() error { return e.error }

const (
	// maxEvent limits the size of an event of a stream.
	maxEvent = 1 << 20
	// maxRefusal limits the size of a worker's error body.
	maxRefusal = 1 << 16
)

// askTokenIDs makes an engine return the ids of the output tokens in each event, as
// choices[].token_ids.
const askTokenIDs = "return_token_ids"

// dispatch returns a function that posts a request to the worker of a decision and yields the events of
// the response, unchanged. It drops comments: they are no tokens. It requests token ids from an
// engine that can return them, unless the question sets that field. The prefill leg runs before the first attempt.
func (c *Config) dispatch(to *workerRequest) router.Dispatch {
	attempts := 0
	return func(ctx context.Context, req router.Request, d router.Decision) iter.Seq2[router.Chunk, error] {
		return func(yield func(router.Chunk, error) bool) {
			fail := func(err error) { yield(router.Chunk{}, &dispatchError{err}) }
			if attempts++; attempts == 1 {
				if to.asksIDs && engine.Of(d.Engine).ReturnsTokenIDs {
					to.Body = append([]byte(`{"`+askTokenIDs+`":true,`), to.Body[1:]...)
				}
				if err := c.runLeg(ctx, &d, to); err != nil {
					yield(router.Chunk{}, err)
					return
				}
			}
			resp, err := c.send(ctx, &d, to)
			if err != nil {
				fail(err)
				return
			}
			defer resp.Body.Close()
			if !yield(router.Chunk{}, nil) { // the worker answers
				return
			}
			var usage openai.UsageReader
			defer func() { usage.Report(req.ID, c.Router.ReportUsage) }()
			events := bufio.NewScanner(resp.Body)
			events.Buffer(nil, maxEvent)
			events.Split(splitEvents)
			for events.Scan() {
				event := events.Bytes()
				if !bytes.HasPrefix(event, []byte("data:")) && !bytes.Contains(event, []byte("\ndata:")) {
					continue
				}
				usage.Read(event, false)
				if chunk := (router.Chunk{Data: append(bytes.Clone(event), "\n\n"...), Tokens: outputTokens(event)}); !yield(chunk, nil) {
					return
				}
			}
			if err := events.Err(); err != nil {
				fail(err)
				return
			}
			usage.Read(nil, true)
		}
	}
}

// runLeg runs the prefill leg of a decision, if it has one, and replaces the body by that of the decode request.
func (c *Config) runLeg(ctx context.Context, d *router.Decision, to *workerRequest) error {
	if c.RunLeg == nil {
		return nil
	}
	decode, err := c.RunLeg(ctx, d, to.Leg)
	if decode != nil {
		to.Body = decode
	}
	return err
}

// send posts a request to the worker of a decision. An answer with another status than 200 is a [router.StatusError].
func (c *Config) send(ctx context.Context, d *router.Decision, to *workerRequest) (*http.Response, error) {
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+d.Address.String()+to.Path, bytes.NewReader(to.Body))
	if err != nil {
		return nil, err
	}
	post.Host = d.Host
	post.Header.Set("Content-Type", "application/json")
	if c.WorkerHeaders != nil {
		for pair := range slices.Chunk(c.WorkerHeaders(d), 2) {
			post.Header.Set(pair[0], pair[1])
		}
	}
	resp, err := c.Client.Do(post)
	if err != nil || resp.StatusCode == http.StatusOK {
		return resp, err
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, maxRefusal)) // as much as there is
	return nil, &router.StatusError{
		Status: resp.StatusCode, Body: text, RetryAfter: router.ReadRetryAfter(resp.Header.Get("Retry-After"), time.Now()),
	}
}

// outputTokens counts the output tokens of an event: its token ids, or one where the engine
// does not return ids.
func outputTokens(event []byte) (n int) {
	data := bytes.TrimLeft(event[len("data:"):], " ")
	if bytes.HasPrefix(data, []byte("[DONE]")) {
		return 0
	}
	var ids struct {
		Choices []struct {
			TokenIDs *[]uint32 `json:"token_ids"`
		} `json:"choices"`
	}
	known := false
	if bytes.Contains(data, []byte(`"token_ids"`)) && json.Unmarshal(data, &ids) == nil {
		for _, c := range ids.Choices {
			if c.TokenIDs != nil {
				known = true
				n += len(*c.TokenIDs)
			}
		}
	}
	if !known {
		return 1
	}
	return n
}

// splitEvents is a [bufio.SplitFunc] for events, which end with an empty line.
func splitEvents(data []byte, atEOF bool) (advance int, event []byte, err error) {
	for i := range data {
		if data[i] != '\n' {
			continue
		}
		if rest := bytes.TrimPrefix(data[i+1:], []byte("\r")); len(rest) > 0 && rest[0] == '\n' {
			return len(data) - len(rest) + 1, bytes.TrimRight(data[:i], "\r"), nil
		}
	}
	if atEOF && len(data) > 0 {
		return len(data), bytes.TrimRight(data, "\r\n"), nil
	}
	return 0, nil, nil
}
