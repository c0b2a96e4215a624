// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
)

// answer is a response that is being written.
type answer struct {
	engine  *Engine
	body    openai.Body
	ids     []uint32 // ids of the prompt, if the client requested them
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
					// As in vLLM, the headers are sent before the prompt is computed.
					w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
					w.WriteHeader(http.StatusOK)
					if a.endpoint == openai.Responses {
						a.named("response.created", a.response(""))
						_, _ = w.Write(a.buf.Bytes()) // the next write fails if the client left
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

// words are the words of answers.
//
//nolint:gochecknoglobals // a table
var words = [...]string{"the ", "block ", "is ", "cached ", "and ", "a ", "worker ", "answers ", "soon, ", "then ", "another ", "one "}

func (a *answer) word(i int) string { return words[(a.prompt*7+i*i+i)%len(words)] }

// usage is the token usage of a request.
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

// stream writes the newest token; before the first one it writes the role, as vLLM does.
func (a *answer) stream() bool {
	a.buf.Reset()
	word := a.word(a.made - 1)
	switch {
	case a.endpoint == openai.Responses:
		a.named("response.output_text.delta", map[string]any{"delta": word})
	case a.endpoint == openai.Messages:
		a.named("content_block_delta", map[string]any{"delta": word})
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

// end writes the messages after the last token.
func (a *answer) end() {
	defer a.engine.metrics.finished(a.prompt, a.made)
	reason := "length"
	last := choice{FinishReason: &reason}
	switch {
	case a.endpoint == openai.Responses:
		a.finish("response.completed", a.response(a.text()))
	case a.endpoint == openai.Messages:
		a.finish("message_stop", a.message(a.text()))
	case a.body.Stream:
		if a.chat() {
			last.Delta = &text{}
		} else {
			last.Text = new("")
		}
		a.buf.Reset()
		a.event(a.object(last))
		if a.body.IncludeUsage {
			o := a.object()
			o.Usage = a.usage()
			a.event(o)
		}
		a.buf.WriteString("data: [DONE]\n\n")
		_, _ = a.w.Write(a.buf.Bytes()) // the client may have left
	default:
		if a.chat() {
			last.Message = &text{Role: "assistant", Content: a.text()}
		} else {
			last.Text = new(a.text())
		}
		o := a.object(last)
		o.Usage, o.PromptTokenIDs = a.usage(), a.ids
		reply(a.w, o)
	}
}

// finish sends a complete answer; for a stream it is the last event.
func (a *answer) finish(name string, whole map[string]any) {
	if !a.body.Stream {
		reply(a.w, whole)
		return
	}
	a.buf.Reset()
	a.named(name, whole)
	_, _ = a.w.Write(a.buf.Bytes()) // the client may have left
}

// text returns the text generated so far.
func (a *answer) text() string {
	var all strings.Builder
	for i := range a.made {
		all.WriteString(a.word(i))
	}
	return all.String()
}

// response is the answer of /v1/responses, with the fields that clients in this repository read.
// An empty text means that nothing was generated yet.
func (a *answer) response(text string) map[string]any {
	r := map[string]any{
		"id": fmt.Sprintf("resp_%x", a.created.UnixNano()), "object": "response", "status": "in_progress", "model": a.body.Model, "output": []any{}, "usage": nil,
	}
	if text != "" {
		r["status"] = "completed"
		r["output"] = []any{map[string]any{
			"type": "message", "role": "assistant", "status": "completed", "content": []any{map[string]any{"type": "output_text", "text": text}},
		}}
		r["usage"] = map[string]any{
			"input_tokens": a.prompt, "output_tokens": a.made, "total_tokens": a.prompt + a.made, "input_tokens_details": map[string]any{"cached_tokens": a.cached},
		}
	}
	return r
}

// message is the answer of /v1/messages, with the fields that clients in this repository read.
func (a *answer) message(all string) map[string]any {
	return map[string]any{
		"id": fmt.Sprintf("msg_%x", a.created.UnixNano()), "type": "message", "role": "assistant", "model": a.body.Model,
		"content": []any{map[string]any{"type": "text", "text": all}},
		"usage":   map[string]any{"input_tokens": a.prompt - a.cached, "output_tokens": a.made, "cache_read_input_tokens": a.cached},
	}
}

// named adds an event with a name. The first event of /v1/responses is sent with the headers,
// before the prompt is computed.
func (a *answer) named(name string, data map[string]any) {
	_, _ = fmt.Fprintf(&a.buf, "event: %s\ndata: ", name) // a write to a buffer never fails
	_ = json.NewEncoder(&a.buf).Encode(data)              // plain data always marshals
	a.buf.WriteString("\n")
}
