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

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer"
)

// harmony compares whole prompts of gpt-oss with the package that vLLM makes them
// with, if the model's tokenizer is in the reference data.
func harmony(ref *reference, o options) []bench.Comparison {
	m, err := tokenizer.LoadModel(os.DirFS(filepath.Join(o.shared, "tokenizers/gpt-oss")), tokenizer.ModelConfig{})
	if errors.Is(err, fs.ErrNotExist) {
		fmt.Println("no gpt-oss under", o.shared, "- its prompts are not compared")
		return nil
	}
	bench.NoError(err)
	return []bench.Comparison{prompts(ref, m, "gpt-oss", false, map[string]any{"op": "harmony", "date": day})}
}

// prompts compares the ids of random chat requests. The question is the operation of the
// reference, without requests.
func prompts(ref *reference, m *tokenizer.Model, name string, strict bool, question map[string]any) bench.Comparison {
	refused := 0
	g := chats.Requests{R: random(4), Strict: strict}
	c := comparison[json.RawMessage, []uint32]{
		kind: "prompts", name: name, cases: requests, equal: slices.Equal[[]uint32],
		random: func() json.RawMessage { return bench.Must(json.Marshal(g.Request())) },
		theirs: func(bodies []json.RawMessage) ([][]uint32, float64) {
			question["requests"] = bodies
			all := ref.askAll(question, len(bodies))
			for _, ids := range all.IDs {
				if ids == nil {
					refused++
				}
			}
			return all.IDs, all.Seconds
		},
		ours: func(body json.RawMessage) []uint32 { return chats.IDs(m, with(`"model":"model"`, body), today()) },
		show: func(body json.RawMessage, ours, theirs []uint32) string { return difference(m, ours, theirs, body) },
	}.run()
	c.Refused = refused
	return c
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
