// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/process"
)

// world is engines behind kvroute and Envoy, which get one request at a time. Each
// response is compared: the overlap that kvroute predicted with the tokens that the engine
// reports as cached. Before the next request the index is compared with the blocks that
// the engines announced.
type world struct {
	*stack
	engines []*vllmEngine
	byID    map[uint64]*vllmEngine // kvroute's ids of the workers
	cached  int                    // tokens, as the engines say
	each    map[string]int         // requests by worker
}

func newWorld(ctx context.Context, s *stack, engines []*vllmEngine) (*world, error) {
	w := &world{stack: s, engines: engines, byID: make(map[uint64]*vllmEngine), each: make(map[string]int)}
	ranks := 0
	for _, v := range engines {
		ranks += v.ranks
	}
	if err := s.waitWorkers(ctx, ranks); err != nil {
		return nil, err
	}
	all, err := s.states(ctx)
	if err != nil {
		return nil, err
	}
	for _, state := range all {
		for _, v := range engines {
			if v.name == state.Name {
				w.byID[state.ID] = v
			}
		}
	}
	if len(w.byID) != len(engines) {
		return nil, fmt.Errorf("kvroute knows the workers %+v", all)
	}
	// Too short for a block, so that no cache changes.
	if err := s.waitRouted(ctx, chat("Hi", nil)); err != nil {
		return nil, err
	}
	for _, v := range engines {
		if err := v.empty(ctx); err != nil {
			return nil, err
		}
	}
	return w, w.settle(ctx)
}

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
	text, err := json.Marshal(all)
	if err != nil {
		panic(err) // texts and numbers only
	}
	return string(text)
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
		Text    string `json:"text"`
		Message struct {
			Content string `json:"content"`
		} `json:"message"`
	} `json:"choices"`
	Prompt []uint32 `json:"prompt_token_ids"`
}

// text is the reply.
func (a *answer) text() string {
	if len(a.Choices) == 0 {
		return ""
	}
	return a.Choices[0].Message.Content + a.Choices[0].Text
}

// read decodes a response; of a stream, the last event with usage.
func (r *response) read() (a answer, err error) {
	if !strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
		return a, json.Unmarshal(r.body, &a)
	}
	found := false
	for lines := bufio.NewScanner(bytes.NewReader(r.body)); lines.Scan(); {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var one answer
		if err := json.Unmarshal([]byte(data), &one); err != nil {
			return a, fmt.Errorf("%w in %.300s", err, data)
		}
		if one.Usage.Prompt > 0 {
			a, found = one, true
		}
	}
	if !found {
		return a, errors.New("a stream without usage")
	}
	return a, nil
}

// hits is how many tokens an engine can take from its cache that has so many leading
// blocks of a prompt: it always computes the last token, and so its whole block.
func hits(overlapBlocks, promptTokens, block int) int {
	return min(overlapBlocks, max(0, promptTokens-1)/block) * block
}

// ask sends a request through Envoy, compares, and waits until the index has the blocks
// that the request stored and evicted.
func (w *world) ask(ctx context.Context, res *result, what, path, text string) (answer, error) {
	a, err := w.once(ctx, res, what, path, text)
	if err == nil {
		err = w.settle(ctx)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", what, err)
	}
	return a, err
}

// refusal is the status and body of a response that is no success.
type refusal struct {
	status int
	body   []byte
}

func (r *refusal) Error() string { return fmt.Sprintf("status %d: %.500s", r.status, r.body) }

// once is ask without waiting. A response that is no success is a [refusal].
func (w *world) once(ctx context.Context, res *result, what, path, text string) (a answer, err error) {
	r, err := ask(ctx, w.envoy.URL()+path, text, map[string]string{"X-Request-Id": newRequestID()})
	if err != nil {
		return a, err
	}
	if r.status != http.StatusOK {
		return a, &refusal{r.status, r.body}
	}
	return w.take(ctx, res, what, &r)
}

// take compares a response with kvroute's decision.
func (w *world) take(ctx context.Context, res *result, what string, r *response) (a answer, err error) {
	if a, err = r.read(); err != nil {
		return a, err
	}
	d, err := w.decision(ctx, r.id)
	if err != nil {
		return a, err
	}
	v := w.byID[d.Worker.ID]
	if v == nil || int(d.Worker.DPRank) >= len(v.expected) {
		return a, fmt.Errorf("it went to %+v", d.Worker)
	}
	u := a.Usage
	v.expected[d.Worker.DPRank] += u.stored(blockSize)
	res.cases++
	w.cached += u.Details.Cached
	w.each[fmt.Sprintf("%s/%d", v.name, d.Worker.DPRank)]++
	switch {
	case d.TokenMode != "exact":
		res.differ("%s: tokenized as %q: %s", what, d.TokenMode, d.TokenReason)
	case d.PromptTokens != u.Prompt:
		res.differ("%s: %d prompt tokens here, %d there", what, d.PromptTokens, u.Prompt)
	case hits(d.OverlapBlocks, u.Prompt, blockSize) != u.Details.Cached:
		res.differ("%s: of %d tokens %d blocks are foretold, so %d tokens; %d were cached at %s", what, u.Prompt, d.OverlapBlocks, hits(d.OverlapBlocks, u.Prompt, blockSize), u.Details.Cached, v.name)
	case r.header.Get("X-Dynamo-Overlap-Blocks") != strconv.Itoa(d.OverlapBlocks):
		res.differ("%s: the header says %s blocks, the decision %d", what, r.header.Get("X-Dynamo-Overlap-Blocks"), d.OverlapBlocks)
	}
	return a, nil
}

// settle waits until each engine has announced the blocks that it must have stored,
// and the index has the blocks that the engines have by what they announced.
func (w *world) settle(ctx context.Context) error {
	var last string
	err := process.Until(ctx, 20*time.Second, "the index equals what the engines announced", func(ctx context.Context) bool {
		var err error
		last, err = w.compare(ctx)
		if err != nil {
			last = err.Error()
		}
		return last == ""
	})
	if err != nil {
		return fmt.Errorf("%w: %s", err, last)
	}
	return nil
}

// compare returns the first difference of the index and the engines, "" for none.
func (w *world) compare(ctx context.Context) (string, error) {
	var all [][]heard
	for _, v := range w.engines {
		var ranks []heard
		for rank, l := range v.heard {
			h, err := l.heard()
			if err != nil {
				return "", fmt.Errorf("engine %s, rank %d: %w", v.name, rank, err)
			}
			if h.stored != v.expected[rank] {
				return fmt.Sprintf("engine %s, rank %d announced %d blocks, want %d", v.name, rank, h.stored, v.expected[rank]), nil
			}
			ranks = append(ranks, h)
		}
		all = append(all, ranks)
	}
	cached, err := w.blocks(ctx)
	if err != nil {
		return "", err
	}
	index := make(map[place][]uint64)
	for _, b := range cached {
		if v := w.byID[b.worker]; v != nil {
			at := place{v.name, int(b.rank)}
			index[at] = append(index[at], b.external)
		}
	}
	for i, v := range w.engines {
		for rank, h := range all[i] {
			got := slices.Sorted(slices.Values(index[place{v.name, rank}]))
			if !slices.Equal(got, h.hashes) {
				return fmt.Sprintf("engine %s, rank %d has %d blocks, the index %d", v.name, rank, len(h.hashes), len(got)), nil
			}
		}
	}
	return "", nil
}

// place is a rank of an engine.
type place struct {
	name string
	rank int
}

// summary counts the requests, cached tokens and blocks so far.
func (w *world) summary() string {
	removed, stored, batches := 0, 0, 0
	for _, v := range w.engines {
		for _, l := range v.heard {
			if h, err := l.heard(); err == nil {
				stored, removed, batches = stored+h.stored, removed+h.removed, batches+h.batches
			}
		}
	}
	return fmt.Sprintf("requests %v, %d tokens cached, %d blocks stored and %d evicted so far, in %d batches", w.each, w.cached, stored, removed, batches)
}
