// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

const (
	firstChecks  = 8      // of each model's requests
	laterChecks  = 10_000 // one in so many after those
	checkTimeout = 10 * time.Second
	recheckEvery = time.Minute
	// driftAfter is how many checks in a row must find other ids within the first
	// block before a model is no longer tokenized: a single one may be a worker
	// that is being replaced.
	driftAfter = 2
)

// verifier compares the ids of requests with those that a worker makes of them,
// out of band. One goroutine, in run, asks one worker at a time; what it cannot
// keep up with is not checked.
type verifier struct {
	log    *slog.Logger
	checks metric.Int64Counter
	queue  chan check
	client *http.Client

	mu   sync.Mutex
	seen map[string]int // requests observed, by model
}

// check is one request to compare, all of it copied.
type check struct {
	router.Observation
}

func newVerifier(log *slog.Logger, meter metric.Meter) (*verifier, error) {
	checks, err := meter.Int64Counter("kvroute.tokenize.checks", metric.WithUnit("{check}"),
		metric.WithDescription("Prompts compared with a worker's own token ids, by model and outcome."))
	return &verifier{
		log: log, checks: checks, queue: make(chan check, 16), seen: map[string]int{},
		client: &http.Client{Timeout: checkTimeout},
	}, err
}

// observe queues the first requests of a model and then few of them.
func (v *verifier) observe(o router.Observation) {
	v.mu.Lock()
	n := v.seen[o.Model]
	v.seen[o.Model]++
	v.mu.Unlock()
	if n >= firstChecks && n%laterChecks != 0 {
		return
	}
	o.IDs = slices.Clone(o.IDs)
	o.Prompt = clonePrompt(o.Prompt)
	select {
	case v.queue <- check{o}:
	default:
	}
}

func clonePrompt(p chat.Request) chat.Request {
	for _, span := range []*[]byte{
		&p.Messages, &p.Tools, &p.Prompt, &p.ToolChoice, &p.AddGenerationPrompt, &p.ContinueFinalMessage, &p.ChatTemplate,
		&p.ChatTemplateKwargs, &p.ReasoningEffort, &p.Documents, &p.AddSpecialTokens, &p.TruncatePromptTokens,
	} {
		*span = bytes.Clone(*span)
	}
	return p
}

// run compares until ctx ends.
func (v *verifier) run(ctx context.Context) error {
	wrong := map[string]int{}     // checks in a row with other ids in the first block
	drifted := map[string]check{} // the last such check of models given up
	again := time.NewTicker(recheckEvery)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-v.queue:
			at, ok := v.compare(ctx, c)
			switch {
			case !ok:
			case at < 0 || at >= c.BlockSize:
				wrong[c.Model] = 0
			default:
				if wrong[c.Model]++; wrong[c.Model] == driftAfter {
					v.log.Error("model is routed in text-block mode: its worker makes other tokens", "model", c.Model, "worker", c.Address)
					c.Card.Prompts.SetDrifted(true)
					drifted[c.Model] = c
				}
			}
		case <-again.C:
			for model, c := range drifted {
				p, err := c.Card.Prompts.Check(ctx, nil, c.Prompt, time.Now())
				if err != nil {
					continue
				}
				c.IDs = p.IDs
				if at, ok := v.compare(ctx, c); ok && (at < 0 || at >= c.BlockSize) {
					v.log.Info("model is tokenized again: its worker makes the same tokens", "model", model)
					c.Card.Prompts.SetDrifted(false)
					delete(drifted, model)
					wrong[model] = 0
				}
			}
		}
	}
}

// compare asks the worker and returns the position of the first id that differs,
// -1 if none does; ok is false if the worker did not say.
func (v *verifier) compare(ctx context.Context, c check) (at int, ok bool) {
	outcome := "ok"
	defer func() {
		v.checks.Add(ctx, 1, metric.WithAttributes(attribute.String("model", c.Model), attribute.String("outcome", outcome)))
	}()
	theirs, err := askTokenize(ctx, v.client, "http://"+c.Address.String(), c.Model, c.Prompt)
	if err != nil {
		outcome = "error"
		v.log.Debug("a worker does not tell its tokens", "model", c.Model, "worker", c.Address, "err", err)
		return 0, false
	}
	if at = tokenizer.FirstDiff(c.IDs, theirs); at >= 0 {
		outcome = "different"
		v.log.Warn("a worker makes other tokens", "model", c.Model, "worker", c.Address, "position", at,
			"ours", around(c.IDs, at), "theirs", around(theirs, at))
	}
	return at, true
}

func around(ids []uint32, at int) []uint32 {
	return ids[min(max(at-4, 0), len(ids)):min(at+5, len(ids))]
}

// askTokenize asks a worker's /tokenize, as vLLM has it, for the ids of a prompt.
func askTokenize(ctx context.Context, client *http.Client, url, model string, q chat.Request) ([]uint32, error) {
	body := map[string]any{"model": model}
	for name, span := range map[string][]byte{
		"messages": q.Messages, "tools": q.Tools, "prompt": q.Prompt, "add_generation_prompt": q.AddGenerationPrompt,
		"continue_final_message": q.ContinueFinalMessage, "chat_template_kwargs": q.ChatTemplateKwargs, "add_special_tokens": q.AddSpecialTokens,
	} {
		if span != nil {
			body[name] = json.RawMessage(span)
		}
	}
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/tokenize", bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // it was read
	const most = 64 << 20
	answer, err := io.ReadAll(io.LimitReader(resp.Body, most))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: status %d: %.200s", url, resp.StatusCode, answer)
	}
	var out struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := json.Unmarshal(answer, &out); err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	if out.Tokens == nil {
		return nil, errors.New(url + ": the answer has no tokens")
	}
	return out.Tokens, nil
}
