// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// answered holds the fields of an engine's answer that the tests check.
type answered struct {
	PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	Usage          struct {
		Prompt  int `json:"prompt_tokens"`
		Input   int `json:"input_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

// In each form, through Envoy, the worker computes from kvroute's token ids, and they equal its own.
func TestTokensAreForwarded(t *testing.T) {
	t.Parallel() // mostly waits
	const words = "the worker keeps the shared prefix and the router finds it there, once more and then again"
	completion := fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":2,"return_token_ids":true,"x":1.50}`, words)
	chat := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":2,"return_token_ids":true}`, words)
	for _, c := range []struct {
		name          string
		engine, flags []string
		path, body    string
		form          string // seen by the worker, once the model is checked
		outcome       string
	}{
		{"completion", []string{"--engine", "vllm", "--engine-version", "0.9.1"}, []string{"auto"}, "/v1/completions", completion, "prompt", "forwarded"},
		{"completion, SGLang", []string{"--engine", "sglang"}, []string{"prompt"}, "/v1/completions", completion, "prompt", "forwarded"},
		{"chat, vLLM", []string{"--engine", "vllm", "--engine-version", "0.32.0"}, []string{"auto"}, chatPath, chat, "kv_transfer_params", "forwarded"},
		{"chat, TensorRT-LLM", []string{"--engine", "trtllm", "--engine-version", "1.1.0"}, []string{"auto"}, chatPath, chat, "prompt_token_ids", "forwarded"},
		{"chat, an older vLLM", []string{"--engine", "vllm", "--engine-version", "0.11.0"}, []string{"auto"}, chatPath, chat, "text", "version"},
		{"chat, SGLang", []string{"--engine", "sglang"}, []string{"auto"}, chatPath, chat, "text", "engine"},
		{"chat, not switched on", []string{"--engine", "vllm", "--engine-version", "0.32.0"}, []string{"prompt"}, chatPath, chat, "text", "form"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := startStack(t, 1, append([]string{"--speed", "50"}, c.engine...), "--verify-tokenizer", "--forward-tokens", strings.Join(c.flags, ","))
			counted := func(outcome string) bool {
				_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
				for line := range strings.Lines(text) {
					if strings.HasPrefix(line, "kvroute_extproc_forwards_total{") && strings.Contains(line, `outcome="`+outcome+`"`) {
						return true
					}
				}
				return false
			}
			var resp *http.Response
			var body string
			// The model's first requests are checked outside of the request path.
			eventually(t, "no request is counted as "+c.outcome, func() bool {
				resp, body = reply(t, d, "POST", c.path, c.body, nil)
				return counted(c.outcome)
			})
			for _, chunked := range []bool{false, true} {
				resp, body = reply(t, d, "POST", c.path, c.body, nil)
				if chunked {
					resp, body = inChunks(t, d.Envoy.URL()+c.path, c.body)
				}
				var got answered
				if err := json.Unmarshal([]byte(body), &got); err != nil || resp.StatusCode != http.StatusOK {
					t.Fatalf("status %d, %s, %v", resp.StatusCode, body, err)
				}
				if form := resp.Header.Get("X-Sim-Prompt"); form != c.form {
					t.Errorf("the worker got the prompt in %s, want %s", form, c.form)
				}
				_, own := whole(t, "POST", "http://"+d.Engines[0].At.HTTP+"/tokenize", c.body, nil)
				var want struct{ Tokens []uint32 }
				if err := json.Unmarshal([]byte(own), &want); err != nil || len(want.Tokens) < 17 {
					t.Fatalf("the worker's own ids: %s, %v", own, err)
				}
				if !slices.Equal(got.PromptTokenIDs, want.Tokens) {
					t.Errorf("computed from ids %d, the worker's own are %d", got.PromptTokenIDs, want.Tokens)
				}
				if got.Usage.Details.Cached == 0 {
					t.Error("the worker found no cached blocks for a repeated prompt")
				}
			}
		})
	}
}

// inChunks posts a body without a declared length.
func inChunks(t *testing.T, url, body string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, io.MultiReader(strings.NewReader(body[:10]), strings.NewReader(body[10:])))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(text)
}
