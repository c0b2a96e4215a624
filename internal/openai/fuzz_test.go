// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
)

// FuzzRequests reads any body as every kind of request. The parts of an accepted body that are
// passed on are valid JSON and not much longer. Its ids equal those that encoding/json reads. A
// refusal has a client error's status and OpenAI's form. The corpus is in testdata.
func FuzzRequests(f *testing.F) {
	f.Add([]byte(`{"model":"m","input":"x"}`))
	f.Add([]byte(`{"text":["a",""],"input_ids":[[1],[2]],"sampling_params":{"max_new_tokens":3},"lora_path":"l","extra_key":"k"}`))
	f.Add([]byte(`{"token_ids":[1,2],"features":null,"sampling_params":{"max_tokens":3},"cache_salt":"s"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		original := string(body)
		numbers := bytes.Contains(body, []byte("NaN")) || bytes.Contains(body, []byte("Infinity")) // not read by encoding/json
		for e := openai.Other; e <= openai.Text; e++ {
			b, err := openai.Parse(e, body)
			if string(body) != original {
				t.Fatal("the body was changed")
			}
			if err != nil {
				if err.Status != 400 || err.Message == "" || len(err.Message) > 300 || !json.Valid(err.JSON()) {
					t.Fatalf("%q: refused with %+v", body, err)
				}
				continue
			}
			for what, span := range map[string][]byte{"messages": b.Messages, "tools": b.Tools, "effort": b.ReasoningEffort, "prompt": b.Prompt} {
				// An item becomes a message, which adds at most a role and brackets.
				if span != nil && (!json.Valid(span) && !numbers || len(span) > 64*len(body)) {
					t.Fatalf("%q: %s is %q", body, what, span)
				}
			}
			switch {
			case e == openai.Responses || e == openai.ChatCompletions || e == openai.Messages:
				var list []json.RawMessage
				if (json.Unmarshal(b.Messages, &list) != nil || len(list) == 0) && !numbers && b.Size == 0 {
					t.Fatalf("%q: messages are %q", body, b.Messages)
				}
			case e == openai.Load && b.Size != len(body):
				t.Fatalf("%q: size is %d", body, b.Size)
			}
			checkIDs(t, &b, body)
		}
	})
}

// checkIDs compares ids given by the client with those that encoding/json reads.
func checkIDs(t *testing.T, b *openai.Body, body []byte) {
	t.Helper()
	var outer map[string]json.RawMessage
	if b.Tokens == nil || json.Unmarshal(body, &outer) != nil {
		return
	}
	for _, at := range [][2]string{{"nvext", "token_data"}, {"kv_transfer_params", "prompt_token_ids"}} {
		var inner map[string]json.RawMessage
		var ids []uint32
		_ = json.Unmarshal(outer[at[0]], &inner) // it may have another type
		if json.Unmarshal(inner[at[1]], &ids) == nil && slices.Equal(ids, b.Tokens) {
			return
		}
	}
	t.Fatalf("%q: ids are %d", body, b.Tokens)
}
