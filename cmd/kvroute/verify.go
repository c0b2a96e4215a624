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
	"net/netip"
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
//
// A card begins unchecked. Equal ids make it agreed, other ids behind the first
// block make it differ, other ids in the first block driftAfter times in a row make
// it drift, which a later check of the same prompt can take back. A card that was
// reloaded begins anew.
type verifier struct {
	log    *slog.Logger
	checks metric.Int64Counter
	queue  chan router.Observation // copies
	client *http.Client
	again  time.Duration // between checks of a model that drifted
	// workers returns the addresses of a model's workers.
	workers func(model string) []netip.AddrPort

	mu   sync.Mutex
	seen map[string]seen // by model
}

// seen counts the requests observed with a card.
type seen struct {
	card *router.Card
	n    int
}

func newVerifier(log *slog.Logger, meter metric.Meter, client *http.Client, workers func(model string) []netip.AddrPort) (*verifier, error) {
	checks, err := meter.Int64Counter("kvroute.tokenize.checks", metric.WithUnit("{check}"),
		metric.WithDescription("Prompts compared with a worker's own token ids, by model and outcome."))
	return &verifier{
		log: log, checks: checks, queue: make(chan router.Observation, 16), seen: map[string]seen{}, again: recheckEvery, workers: workers,
		client: client,
	}, err
}

// observe queues the first requests of a model and then few of them.
func (v *verifier) observe(o router.Observation) {
	if !canAsk(o.Prompt) || !o.Card.Prompts.AsksAlike(o.Prompt) {
		return
	}
	v.mu.Lock()
	s := v.seen[o.Model]
	if s.card != o.Card {
		s = seen{card: o.Card}
	}
	n := s.n
	s.n++
	v.seen[o.Model] = s
	v.mu.Unlock()
	if n >= firstChecks && n%laterChecks != 0 {
		return
	}
	o.IDs = slices.Clone(o.IDs)
	o.Prompt = clonePrompt(o.Prompt)
	select {
	case v.queue <- o:
	default: // the worker cannot keep up
	}
}

// canAsk reports whether a worker's /tokenize can be told all that this prompt is
// made of: it takes one text or a chat, and not every field of one.
func canAsk(p chat.Request) bool {
	return (p.Messages != nil || len(p.Prompt) > 0 && p.Prompt[0] == '"') &&
		p.ReasoningEffort == nil && p.Documents == nil && p.TruncatePromptTokens == nil && !bytes.Contains(p.Messages, []byte(`"reasoning`))
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

// trial is what the checks of a model have shown so far.
type trial struct {
	card    *router.Card
	wrong   int                // checks in a row with other ids in the first block
	drifted router.Observation // the last such check, if the model was given up
}

// run compares until ctx ends.
func (v *verifier) run(ctx context.Context) error {
	trials := map[string]*trial{} // by model
	again := time.NewTicker(v.again)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-v.queue:
			t := trials[c.Model]
			if t == nil || t.card != c.Card {
				t = &trial{card: c.Card}
				trials[c.Model] = t
			}
			if at, ok := v.compare(ctx, c); ok {
				v.judge(t, c, at)
			}
		case <-again.C:
			for _, t := range trials {
				if t.card.Prompts.Verdict() == tokenizer.DriftSeen {
					v.retry(ctx, t)
				}
			}
		}
	}
}

// judge draws a check's consequences: at is the first position that differs.
func (v *verifier) judge(t *trial, c router.Observation, at int) {
	prompts := c.Card.Prompts
	verdict := prompts.Verdict()
	if at < 0 || at >= c.BlockSize {
		t.wrong = 0
	} else {
		t.wrong++
	}
	switch {
	case verdict == tokenizer.DriftSeen: // only retry takes that back
	case t.wrong >= driftAfter:
		v.log.Error("model is routed in text-block mode: its worker makes other tokens", "model", c.Model, "worker", c.Address, "position", at)
		prompts.SetVerdict(tokenizer.DriftSeen)
		t.drifted = c
	case at >= 0:
		prompts.SetVerdict(tokenizer.Differs)
	case verdict == tokenizer.Unchecked:
		prompts.SetVerdict(tokenizer.Agreed)
	}
}

// retry looks whether a model that drifted makes its worker's tokens again.
func (v *verifier) retry(ctx context.Context, t *trial) {
	c := t.drifted
	p, err := c.Card.Prompts.Check(ctx, nil, c.Prompt, time.Now())
	if err != nil {
		return
	}
	c.IDs = p.IDs
	at, ok := v.compare(ctx, c)
	for _, c.Address = range v.workers(c.Model) {
		if ok {
			break
		}
		at, ok = v.compare(ctx, c) // the first one may have left
	}
	if ok && (at < 0 || at >= c.BlockSize) {
		v.log.Info("model is tokenized again: its worker makes the same tokens", "model", c.Model)
		t.wrong = 0
		// It has differed: good enough to route by, not to answer from.
		c.Card.Prompts.SetVerdict(tokenizer.Differs)
	}
}

// compare asks the worker and returns the position of the first id that differs,
// -1 if none does; ok is false if the worker did not say.
func (v *verifier) compare(ctx context.Context, c router.Observation) (at int, ok bool) {
	outcome := "ok"
	defer func() {
		v.checks.Add(ctx, 1, metric.WithAttributes(attribute.String("model", c.Model), attribute.String("outcome", outcome)))
	}()
	asking, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	theirs, err := askTokenize(asking, v.client, "http://"+c.Address.String(), c.Model, c.Prompt)
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
