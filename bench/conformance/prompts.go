// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// day is the date of the prompts: some contain it.
const day = "2026-08-22"

func today() time.Time { return time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC) }

// harmony compares whole prompts of gpt-oss with the package that vLLM makes them
// with, if the model's tokenizer is in the reference data.
func harmony(ref *reference, o options) []bench.Comparison {
	m, err := tokenizer.LoadModel(os.DirFS(filepath.Join(o.shared, "tokenizers/gpt-oss")), tokenizer.ModelConfig{})
	if errors.Is(err, fs.ErrNotExist) {
		fmt.Println("no gpt-oss under", o.shared, "- its prompts are not compared")
		return nil
	}
	bench.NoError(err)
	g := chats.Requests{R: random(4)}
	return []bench.Comparison{prompts(ref, m, g, "gpt-oss", map[string]any{"op": "harmony", "date": day})}
}

// prompts compares the ids of random chat requests.
func prompts(ref *reference, m *tokenizer.Model, g chats.Requests, name string, question map[string]any) bench.Comparison {
	var ours, theirs time.Duration
	different, refused := 0, 0
	for done := 0; done < requests; {
		bodies := make([]json.RawMessage, min(200, requests-done))
		for i := range bodies {
			bodies[i] = bench.Must(json.Marshal(g.Request()))
		}
		question["requests"] = bodies
		ids, took := ref.ids(question, len(bodies))
		theirs += took
		for i, body := range bodies {
			start := bench.CPUTime()
			got := encodeRequest(m, body, today())
			ours += bench.CPUTime() - start
			if ids[i] == nil {
				refused++
			}
			if !slices.Equal(got, ids[i]) {
				if different++; different <= 3 {
					fmt.Println(difference(m, name, got, ids[i], body))
				}
			}
		}
		done += len(bodies)
	}
	c := bench.NewComparison("prompts", name, requests, different, ours, theirs)
	c.Refused = refused
	return c
}

// encodeRequest returns the ids of a request, nil if kvroute or the engine refuses it.
func encodeRequest(m *tokenizer.Model, body []byte, now time.Time) []uint32 {
	q, err := requestOf(body)
	if err != nil {
		return nil
	}
	p := bench.Must(m.Encode(context.Background(), nil, q, now))
	if p.Mode == tokenizer.Bytes {
		return nil
	}
	return p.IDs
}

// requestOf reads a body as kvroute does. The bodies here name no model.
func requestOf(body []byte) (chat.Request, error) {
	b, bad := openai.Parse(openai.ChatCompletions, append([]byte(`{"model":"m",`), body[1:]...))
	if bad != nil {
		return chat.Request{}, errors.New(bad.Message)
	}
	return b.Request, nil
}

// difference describes where two prompts differ.
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
