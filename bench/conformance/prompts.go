// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// day is when the prompts are made: some have the date in them.
const day = "2026-08-22"

func today() time.Time { return time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC) }

// harmony compares whole prompts of gpt-oss with the package that vLLM makes them
// with, if the model's tokenizer is at hand.
func harmony(ref *reference, o options) ([]bench.Comparison, error) {
	m, err := tokenizer.LoadModel(os.DirFS(filepath.Join(o.shared, "tokenizers/gpt-oss")), tokenizer.ModelConfig{})
	if errors.Is(err, fs.ErrNotExist) {
		fmt.Println("no gpt-oss under", o.shared, "- its prompts are not compared")
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	g := chats.Requests{R: rand.New(rand.NewPCG(o.seed, 4))}
	c, err := prompts(ref, m, g, "gpt-oss", map[string]any{"op": "harmony", "date": day}, 10*o.conversations)
	return []bench.Comparison{c}, err
}

// prompts compares the ids of n random chat requests.
func prompts(ref *reference, m *tokenizer.Model, g chats.Requests, name string, question map[string]any, n int) (bench.Comparison, error) {
	var ours, theirs time.Duration
	different, refused := 0, 0
	for done := 0; done < n; {
		bodies := make([]json.RawMessage, min(200, n-done))
		for i := range bodies {
			var err error
			if bodies[i], err = json.Marshal(g.Request()); err != nil {
				return bench.Comparison{}, err
			}
		}
		question["requests"] = bodies
		var answer struct {
			IDs     [][]uint32
			Seconds float64
		}
		if err := ref.ask(question, &answer); err != nil {
			return bench.Comparison{}, err
		}
		if len(answer.IDs) != len(bodies) {
			return bench.Comparison{}, errors.New("the reference process answered for other requests")
		}
		theirs += seconds(answer.Seconds)
		for i, body := range bodies {
			start := bench.CPUTime()
			got, err := encodeRequest(m, body, today())
			ours += bench.CPUTime() - start
			if err != nil {
				return bench.Comparison{}, err
			}
			if answer.IDs[i] == nil {
				refused++
			}
			if !slices.Equal(got, answer.IDs[i]) {
				if different++; different <= 3 {
					fmt.Println(difference(m, name, got, answer.IDs[i], body))
				}
			}
		}
		done += len(bodies)
	}
	c := bench.NewComparison("prompts", name, n, different, ours, theirs)
	c.Refused = refused
	return c, nil
}

// encodeRequest returns the ids of a request, nil if the engine is said to refuse it.
func encodeRequest(m *tokenizer.Model, body []byte, now time.Time) ([]uint32, error) {
	q, err := requestOf(body)
	if err != nil {
		return nil, err
	}
	p, err := m.Encode(context.Background(), nil, q, now)
	if err != nil || p.Mode == tokenizer.Bytes {
		return nil, err
	}
	return p.IDs, nil
}

// difference shows where two prompts differ, for people.
func difference(m *tokenizer.Model, name string, ours, theirs []uint32, body []byte) string {
	at := max(0, tokenizer.FirstDiff(ours, theirs))
	window := func(ids []uint32) string {
		if ids == nil {
			return "refused"
		}
		return fmt.Sprintf("%q", m.Tokenizer().Decode(nil, ids[max(0, min(len(ids), at-10)):min(len(ids), at+20)]))
	}
	return fmt.Sprintf("%s: different at %d: got %s, want %s, for %.2000s", name, at, window(ours), window(theirs), body)
}

// requestOf cuts the fields of a body as package internal/openai does.
func requestOf(body []byte) (chat.Request, error) {
	var f map[string]json.RawMessage
	if err := json.Unmarshal(body, &f); err != nil {
		return chat.Request{}, err
	}
	span := func(name string) []byte {
		if v := f[name]; string(v) != "null" {
			return v
		}
		return nil
	}
	return chat.Request{
		Messages: span("messages"), Tools: span("tools"), ToolChoice: span("tool_choice"), AddGenerationPrompt: span("add_generation_prompt"),
		ContinueFinalMessage: span("continue_final_message"), ChatTemplateKwargs: span("chat_template_kwargs"), ReasoningEffort: span("reasoning_effort"),
		Documents: span("documents"), AddSpecialTokens: span("add_special_tokens"), TruncatePromptTokens: span("truncate_prompt_tokens"),
	}, nil
}
