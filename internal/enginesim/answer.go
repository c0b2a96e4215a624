// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
)

// answer is a response that is being written, in the format of its endpoint.
type answer struct {
	w        http.ResponseWriter
	endpoint openai.Endpoint
	body     *openai.Body
	created  time.Time
	ids      []uint32 // ids of the prompt, if the client requested token ids
	// receive fetches the blocks of the prompt, offer adds the parameters with which they are
	// fetched to a whole answer. Both may be nil.
	receive func(context.Context) bool
	pull    func(context.Context) // copies blocks before the request is submitted; may be nil
	offer   func(whole object)

	// Of /v1/responses: its id, the fields about stored responses, and the messages of the prompt with those before it.
	id       string
	fields   responseFields
	messages []json.RawMessage
	kept     bool           // the engine stores the response
	keep     func(r object) // stores a response

	prompt   int           // tokens
	cached   int           // prompt tokens found in the cache; set before the first progress
	progress chan struct{} // one at admission, one for each token; closed at the end
	made     int           // tokens
	failed   bool          // the blocks were not fetched; set before the end
}

// follow writes the response as the engine makes progress. It returns false if the client left, or
// the blocks were not received.
func (a *answer) follow(r *http.Request, m *metrics) bool {
	admitted := false
	for {
		select {
		case <-r.Context().Done():
			return false
		case _, more := <-a.progress:
			switch {
			case !more && a.failed:
				a.fail()
				return true
			case !more:
				a.end()
				m.prompts.Add(float64(a.prompt))
				m.outputs.Add(float64(a.made))
				m.success.Inc()
				return true
			case !admitted:
				admitted = true
				if a.begin(); a.receive != nil && !a.receive(r.Context()) {
					a.fail()
					return false
				}
				continue
			case a.made == 0:
				m.firstToken.Observe(time.Since(a.created).Seconds())
			}
			if a.made++; a.body.Stream && !a.send(a.delta()...) {
				return false
			}
		}
	}
}

// begin starts a stream when the request is admitted. As in vLLM, the headers are sent before the
// prompt is computed.
func (a *answer) begin() {
	if !a.body.Stream {
		return
	}
	a.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	a.w.WriteHeader(http.StatusOK)
	if a.endpoint == openai.Responses {
		a.send(event{"response.created", object{"type": "response.created", "response": a.response()}})
	} else {
		a.send()
	}
}

// fail answers as vLLM does if a transfer fails: in a stream the error is an event.
func (a *answer) fail() {
	const text = `{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}`
	if a.body.Stream {
		a.send(event{data: json.RawMessage(text)}, event{data: json.RawMessage("[DONE]")})
		return
	}
	a.w.Header().Set("Content-Type", "application/json")
	a.w.WriteHeader(http.StatusInternalServerError)
	_, _ = io.WriteString(a.w, text) // an error means that the client has left
}

// delta returns the events of a stream for the newest token.
func (a *answer) delta() []event {
	word := a.word(a.made - 1)
	switch a.endpoint {
	case openai.Responses:
		return []event{{"response.output_text.delta", object{"delta": word}}}
	case openai.Messages:
		return []event{{"content_block_delta", object{"delta": word}}}
	default:
		token := event{data: a.completion(a.withIDs(a.choice(word, "", nil), a.made-1))}
		if a.endpoint == openai.ChatCompletions && a.made == 1 { // as vLLM does
			return []event{{data: a.completion(a.withIDs(a.choice("", "assistant", nil), a.made))}, token}
		}
		return []event{token}
	}
}

// end writes what follows the last token, or the whole response if it is not a stream.
func (a *answer) end() {
	var last event
	switch a.endpoint {
	case openai.Responses:
		r := a.response()
		a.keep(r)
		if last = (event{data: r}); a.body.Stream {
			last = event{"response.completed", object{"type": "response.completed", "response": r}}
		}
	case openai.Messages:
		last = event{"message_stop", a.message()}
	default:
		if !a.body.Stream {
			whole := a.completion(a.withIDs(a.choice(a.text(), "assistant", "length"), 0))
			if whole["usage"] = a.usage(); a.ids != nil {
				whole["prompt_token_ids"] = a.ids
			}
			if a.offer != nil {
				a.offer(whole)
			}
			reply(a.w, whole)
			return
		}
		events := []event{{data: a.completion(a.withIDs(a.choice("", "", "length"), a.made))}}
		if a.body.IncludeUsage {
			usage := a.completion()
			usage["usage"] = a.usage()
			events = append(events, event{data: usage})
		}
		a.send(append(events, event{data: json.RawMessage("[DONE]")})...)
		return
	}
	if a.body.Stream {
		a.send(last)
	} else {
		reply(a.w, last.data)
	}
}

// event is an event of a stream. Those of OpenAI's older endpoints have no name.
type event struct {
	name string
	data any // written as it is if it is a [json.RawMessage]
}

// object is a JSON object. The answers have the fields that clients in this repository read.
type object = map[string]any

// send writes events of a stream. It returns false if the client left.
func (a *answer) send(events ...event) bool {
	var b bytes.Buffer
	for _, e := range events {
		if e.name != "" {
			fmt.Fprintf(&b, "event: %s\n", e.name)
		}
		text, ok := e.data.(json.RawMessage)
		if !ok {
			text, _ = json.Marshal(e.data) // plain data always marshals
		}
		fmt.Fprintf(&b, "data: %s\n\n", text)
	}
	_, err := a.w.Write(b.Bytes())
	_ = http.NewResponseController(a.w).Flush() // the next write fails if the client left
	return err == nil
}

// reply writes a complete answer.
func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // an error means that the client has left
}

// words are the words of answers.
//
//nolint:gochecknoglobals // a table
var words = [...]string{"the ", "block ", "is ", "cached ", "and ", "a ", "worker ", "answers ", "soon, ", "then ", "another ", "one "}

func (a *answer) word(i int) string { return words[a.tokenID(i)] }

// id is the id of the output token i: the place of its word in words.
func (a *answer) tokenID(i int) int { return (a.prompt*7 + i*i + i) % len(words) }

// withIDs adds the ids of the output tokens from one on to a choice, as vLLM does with return_token_ids.
func (a *answer) withIDs(choice object, from int) object {
	if a.ids != nil {
		ids := make([]int, a.made-from)
		for i := range ids {
			ids[i] = a.tokenID(from + i)
		}
		choice["token_ids"] = ids
	}
	return choice
}

// text returns the text generated so far.
func (a *answer) text() string {
	var all strings.Builder
	for i := range a.made {
		all.WriteString(a.word(i))
	}
	return all.String()
}

// completion is an answer of /v1/chat/completions or /v1/completions, or a chunk of one.
func (a *answer) completion(choices ...object) object {
	id, kind := fmt.Sprintf("cmpl-%x", a.created.UnixNano()), "text_completion"
	switch {
	case a.endpoint == openai.ChatCompletions && a.body.Stream:
		id, kind = "chat"+id, "chat.completion.chunk"
	case a.endpoint == openai.ChatCompletions:
		id, kind = "chat"+id, "chat.completion"
	}
	if choices == nil {
		choices = []object{}
	}
	return object{"id": id, "object": kind, "created": a.created.Unix(), "model": a.body.Model, "choices": choices}
}

// choice is the choice of a completion or of a chunk. reason is nil before the end.
func (a *answer) choice(content, role string, reason any) object {
	c, message := object{"index": 0, "finish_reason": reason}, object{"content": content}
	if role != "" {
		message["role"] = role
	}
	switch {
	case a.endpoint != openai.ChatCompletions:
		c["text"] = content
	case a.body.Stream:
		c["delta"] = message
	default:
		c["message"] = message
	}
	return c
}

// usage returns the token usage of a completion.
func (a *answer) usage() object {
	return object{
		"prompt_tokens": a.prompt, "completion_tokens": a.made, "total_tokens": a.prompt + a.made, "prompt_tokens_details": object{"cached_tokens": a.cached},
	}
}

// response is the answer of /v1/responses: in progress while no token is generated.
func (a *answer) response() object {
	r := object{
		"id": a.id, "object": "response", "status": "in_progress", "model": a.body.Model, "output": []any{}, "usage": nil,
		"background": a.fields.Background, "previous_response_id": a.fields.Previous,
	}
	if a.made > 0 {
		r["status"] = "completed"
		r["output"] = []object{{
			"type": "message", "role": "assistant", "status": "completed", "content": []object{{"type": "output_text", "text": a.text()}},
		}}
		r["usage"] = object{
			"input_tokens": a.prompt, "output_tokens": a.made, "total_tokens": a.prompt + a.made, "input_tokens_details": object{"cached_tokens": a.cached},
		}
	}
	return r
}

// message is the answer of /v1/messages.
func (a *answer) message() object {
	return object{
		"id": fmt.Sprintf("msg_%x", a.created.UnixNano()), "type": "message", "role": "assistant", "model": a.body.Model,
		"content": []object{{"type": "text", "text": a.text()}},
		"usage":   object{"input_tokens": a.prompt - a.cached, "output_tokens": a.made, "cache_read_input_tokens": a.cached},
	}
}
