// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"strings"

	"github.com/kvroute/kvroute/bench"
)

// chat is the body of a chat request for one token.
func chat(user string, more map[string]any) string {
	return body(map[string]any{"messages": []any{message("user", user)}}, more)
}

func message(role, content string) map[string]any {
	return map[string]any{"role": role, "content": content}
}

// body is a request with the common fields, those of q, and more.
func body(q, more map[string]any) string {
	all := map[string]any{"model": modelName, "max_tokens": 1, "temperature": 0}
	for _, m := range []map[string]any{q, more} {
		maps.Copy(all, m)
	}
	return string(bench.Must(json.Marshal(all)))
}

// words are a text of about n tokens; the same seed begins the same text.
func words(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 7))
	list := strings.Fields("the cache of an engine holds blocks and each block is named by what stands before it so that two prompts share their beginning until they part")
	var b strings.Builder
	fmt.Fprintf(&b, "%d:", seed)
	for range n {
		b.WriteByte(' ')
		b.WriteString(list[r.IntN(len(list))])
	}
	return b.String()
}

// usage is the part of a response in which an engine counts tokens.
type usage struct {
	Prompt    int `json:"prompt_tokens"`
	Completed int `json:"completion_tokens"`
	Details   struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// stored is how many blocks a worker has stored for a request: it keeps the blocks of the
// prompt and of all but the last token of the output that it did not find cached.
func (u *usage) stored(block int) int { return (u.Prompt+u.Completed-1)/block - u.Details.Cached/block }

// answer is the part of a response that the checks read.
type answer struct {
	Usage   usage `json:"usage"`
	Choices []struct {
		Text    string   `json:"text"`
		Tokens  []uint32 `json:"token_ids"`
		Message struct {
			Content string `json:"content"`
		} `json:"message"`
		Delta struct { // of a stream
			Content string `json:"content"`
		} `json:"delta"`
	} `json:"choices"`
	Prompt []uint32 `json:"prompt_token_ids"`
	Ext    struct {
		Worker struct { // Dynamo's: the worker that answered
			WorkerID uint64 `json:"decode_worker_id"`
			DPRank   uint32 `json:"decode_dp_rank"`
		} `json:"worker_id"`
	} `json:"nvext"`

	streamed string // the reply, of a stream
}

// text is the reply.
func (a *answer) text() string {
	if len(a.Choices) == 0 {
		return a.streamed
	}
	return a.Choices[0].Message.Content + a.Choices[0].Text + a.Choices[0].Delta.Content
}

// refusal is a response whose status is not 200.
type refusal struct {
	status int
	body   []byte
}

func (r *refusal) Error() string { return fmt.Sprintf("status %d: %.500s", r.status, r.body) }

// read decodes a response; of a stream, the last event with usage. A response whose
// status is not 200 is a [refusal].
func (r *response) read() (a answer) {
	if r.status != http.StatusOK {
		bench.NoError(&refusal{r.status, r.body})
	}
	if !strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
		bench.NoError(json.Unmarshal(r.body, &a))
		return a
	}
	var text strings.Builder
	for lines := bufio.NewScanner(bytes.NewReader(r.body)); lines.Scan(); {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var one answer
		bench.NoError(json.Unmarshal([]byte(data), &one))
		text.WriteString(one.text())
		if one.Usage.Prompt > 0 {
			a = one
		}
	}
	if a.Usage.Prompt == 0 {
		bench.NoError(errors.New("a stream without usage"))
	}
	a.streamed = text.String()
	return a
}
