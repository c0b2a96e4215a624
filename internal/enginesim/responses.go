// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"fmt"
)

// response is the answer of /v1/responses, as far as clients here look at it.
type response struct {
	ID     string         `json:"id"`
	Object string         `json:"object"`
	Status string         `json:"status"`
	Model  string         `json:"model"`
	Output []responseItem `json:"output"`
	Usage  *responseUsage `json:"usage"`
}

type responseItem struct {
	Type    string         `json:"type"`
	Role    string         `json:"role"`
	Status  string         `json:"status"`
	Content []responsePart `json:"content"`
}

type responsePart struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type responseUsage struct {
	Input   int `json:"input_tokens"`
	Output  int `json:"output_tokens"`
	Total   int `json:"total_tokens"`
	Details struct {
		Cached int `json:"cached_tokens"`
	} `json:"input_tokens_details"`
}

// delta is a piece of a streamed one.
type delta struct {
	Delta string `json:"delta"`
}

// response tells how far the request has come: "" is not at all.
func (a *answer) response(text string) response {
	r := response{ID: fmt.Sprintf("resp_%x", a.created.UnixNano()), Object: "response", Status: "in_progress", Model: a.body.Model, Output: []responseItem{}}
	if text != "" {
		r.Status = "completed"
		r.Output = append(r.Output, responseItem{"message", "assistant", "completed", []responsePart{{"output_text", text}}})
		r.Usage = &responseUsage{Input: a.prompt, Output: a.made, Total: a.prompt + a.made}
		r.Usage.Details.Cached = a.cached
	}
	return r
}

// anthropic is the answer of /v1/messages, as far as clients here look at it.
type anthropic struct {
	ID      string          `json:"id"`
	Type    string          `json:"type"`
	Role    string          `json:"role"`
	Model   string          `json:"model"`
	Content []responsePart  `json:"content"`
	Usage   *anthropicUsage `json:"usage"`
}

type anthropicUsage struct {
	Input  int `json:"input_tokens"`
	Output int `json:"output_tokens"`
	Cached int `json:"cache_read_input_tokens"`
}

func (a *answer) message(text string) anthropic {
	return anthropic{
		ID: fmt.Sprintf("msg_%x", a.created.UnixNano()), Type: "message", Role: "assistant", Model: a.body.Model,
		Content: []responsePart{{"text", text}}, Usage: &anthropicUsage{Input: a.prompt - a.cached, Output: a.made, Cached: a.cached},
	}
}

// named adds an event with a name. The first one of /v1/responses leaves with the headers,
// before anything is computed.
func (a *answer) named(name string, data any) {
	_, _ = fmt.Fprintf(&a.buf, "event: %s\ndata: ", name) // a buffer takes everything
	_ = json.NewEncoder(&a.buf).Encode(data)              // plain data always marshals
	a.buf.WriteString("\n")
}
