// SPDX-License-Identifier: Apache-2.0

package main

import (
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
	"github.com/kvroute/kvroute/tokenizer"
)

// harmony compares whole prompts of gpt-oss with the package that vLLM makes them
// with, if the model's tokenizer is in the reference data.
func harmony(ref *reference, o options) []bench.Figure {
	m, err := tokenizer.LoadModel(os.DirFS(filepath.Join(o.shared, "tokenizers/gpt-oss")), tokenizer.ModelConfig{})
	if errors.Is(err, fs.ErrNotExist) {
		fmt.Println("no gpt-oss under", o.shared, "- its prompts are not compared")
		return nil
	}
	bench.NoError(err)
	return []bench.Figure{referencePrompts(ref, m, "gpt-oss", chats.Requests{}, map[string]any{"op": "harmony", "date": day})}
}

// referencePrompts compares whole prompts with those of the reference. The question is the
// operation of the reference, without requests.
func referencePrompts(ref *reference, m *tokenizer.Model, name string, g chats.Requests, question map[string]any) bench.Figure {
	return prompts("prompts "+name, requests, g, m, false, func(all []*prompt) [][]uint32 {
		bodies := make([]json.RawMessage, len(all))
		for i, p := range all {
			bodies[i] = p.body
		}
		question["requests"] = bodies
		return ref.askAll(question, len(bodies)).IDs
	})
}

// prompt is the body of a request, and the time that its template sees.
type prompt struct {
	body []byte
	now  time.Time
}

// prompts compares the ids of random chat requests, nil for a refused one. An engine may refuse
// requests that kvroute accepts: the client gets the engine's error from any worker.
func prompts(name string, n int, g chats.Requests, m *tokenizer.Model, engine bool, theirs func([]*prompt) [][]uint32) bench.Figure {
	g.R = random(4)
	refused, refusedByEngine := 0, 0
	f := comparison[*prompt, []uint32]{
		name: name, cases: n, theirs: theirs,
		random: func() *prompt { return &prompt{bench.Must(json.Marshal(g.Request())), today()} },
		ours:   func(p *prompt) []uint32 { return chats.IDs(m, with(`"model":"model"`, p.body), p.now) },
		equal: func(ours, theirs []uint32) bool {
			switch {
			case ours == nil && theirs == nil:
				refused++
			case theirs == nil && engine:
				refusedByEngine++
			default:
				return slices.Equal(ours, theirs)
			}
			return true
		},
		show: func(p *prompt, ours, theirs []uint32) string { return difference(m, ours, theirs, p.body) },
	}.run()
	f.What += fmt.Sprintf(" (%d refused by both, %d by the engine alone)", refused, refusedByEngine)
	return f
}

// with adds fields to a body.
func with(fields string, body []byte) []byte { return append([]byte("{"+fields+","), body[1:]...) }

// difference describes where two prompts differ.
func difference(m *tokenizer.Model, ours, theirs []uint32, body []byte) string {
	at := max(0, tokenizer.FirstDiff(ours, theirs))
	window := func(ids []uint32) string {
		if ids == nil {
			return "refused"
		}
		return fmt.Sprintf("%q", m.Tokenizer().Decode(nil, ids[max(0, min(len(ids), at-10)):min(len(ids), at+20)]))
	}
	return fmt.Sprintf("at %d got %s, want %s, for %.2000s", at, window(ours), window(theirs), body)
}
