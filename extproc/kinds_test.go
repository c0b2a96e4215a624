// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
	prompts "github.com/kvroute/kvroute/tokenizer/chat"
)

// Each kind of request reaches the router with what its prompt is made of.
func TestKindsOfRequests(t *testing.T) {
	raw := func(s string) []byte { return []byte(s) }
	for _, c := range []struct {
		name, path, body string
		want             router.Request
	}{
		{
			"chat", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[1]}`,
			router.Request{Prompt: router.Prompt{Messages: raw(`[{"role":"user","content":"a"}]`), Tools: raw(`[1]`)}},
		},
		{"completion", "/v1/completions", `{"model":"m","prompt":"a"}`, router.Request{Prompt: router.Prompt{Prompt: raw(`"a"`)}}},
		{"completions", "/v1/completions", `{"model":"m","prompt":["a","b"]}`, router.Request{Prompt: router.Prompt{Prompt: raw(`["a","b"]`)}}},
		{"completion of ids", "/v1/completions", `{"model":"m","prompt":[1,2]}`, router.Request{Prompt: router.Prompt{Prompt: raw(`[1,2]`)}}},
		{"completions of ids", "/v1/completions", `{"model":"m","prompt":[[1],[2]]}`, router.Request{Prompt: router.Prompt{Prompt: raw(`[[1],[2]]`)}}},
		{"completion of embeddings", "/v1/completions", `{"model":"m","prompt_embeds":""}`, router.Request{Prompt: router.Prompt{Size: 32, Inexact: "embeds"}}},
		{
			"responses", "/v1/responses", `{"model":"m","instructions":"i","input":"a","cache_salt":"s"}`,
			router.Request{Salt: "s", Prompt: router.Prompt{
				API: prompts.Responses, Messages: raw(`[{"role":"system","content":"i"},{"role":"user","content":"a"}]`), Instructions: raw(`"i"`), Input: raw(`"a"`),
			}},
		},
		{
			"a history elsewhere", "/v1/responses", `{"model":"m","input":"a","previous_response_id":"r"}`,
			router.Request{Held: "r", Prompt: router.Prompt{API: prompts.Responses, Messages: raw(`[{"role":"user","content":"a"}]`), Input: raw(`"a"`), Inexact: "no_history"}},
		},
		{
			"messages", "/v1/messages", `{"model":"m","system":"i","messages":[{"role":"user","content":"a"}]}`,
			router.Request{Prompt: router.Prompt{API: prompts.Messages, Messages: raw(`[{"role":"system","content":"i"},{"role":"user","content":"a"}]`)}},
		},
		{
			"a prompt that no cache is read for", "/v1/completions", `{"model":"m","prompt":"a","echo":true,"logprobs":1}`,
			router.Request{Uncached: true, Split: router.SplitNever, Prompt: router.Prompt{Prompt: raw(`"a"`)}},
		},
		{"embeddings", "/v1/embeddings", `{"model":"m","input":["a"]}`, router.Request{Prompt: router.Prompt{Size: 27, Inexact: "no_prompt"}}},
		{
			"ids for Dynamo", "/v1/chat/completions", `{"model":"m","messages":[1],"nvext":{"token_data":[5,6],"cache_salt":"n"}}`,
			router.Request{Salt: "n", Tokens: []uint32{5, 6}, Prompt: router.Prompt{Messages: raw(`[1]`)}},
		},
		{
			"ids for vLLM", "/v1/chat/completions", `{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[5,6]}}`,
			router.Request{Tokens: []uint32{5, 6}, Prompt: router.Prompt{Messages: raw(`[1]`)}},
		},
		{"SGLang's text", "/generate", `{"model":"m","text":"a"}`, router.Request{Prompt: router.Prompt{Prompt: raw(`"a"`)}}},
		{"SGLang's texts", "/generate", `{"model":"m","text":["a","b"]}`, router.Request{Prompt: router.Prompt{Prompt: raw(`["a","b"]`)}}},
		{"SGLang's ids", "/generate", `{"model":"m","input_ids":[5,6]}`, router.Request{Prompt: router.Prompt{Prompt: raw(`[5,6]`)}}},
		{"SGLang's lists of ids", "/generate", `{"model":"m","input_ids":[[5],[6]]}`, router.Request{Prompt: router.Prompt{Prompt: raw(`[[5],[6]]`)}}},
		{"SGLang's images", "/generate", `{"model":"m","text":"a","image_data":"i"}`, router.Request{Prompt: router.Prompt{Size: 41, Inexact: "no_renderer"}}},
		{"vLLM's ids in", "/inference/v1/generate", `{"model":"m","token_ids":[5,6],"cache_salt":"s"}`, router.Request{Salt: "s", Prompt: router.Prompt{Prompt: raw(`[5,6]`)}}},
		{"SGLang's session", "/generate", `{"model":"m","text":"a","session_params":{"id":"s"}}`, router.Request{Held: "s", Prompt: router.Prompt{Prompt: raw(`"a"`)}}},
		{"the end of SGLang's session", "/close_session", `{"model":"m","session_id":"s"}`, router.Request{Held: "s", Prompt: router.Prompt{Size: 1, Inexact: "no_prompt"}}},
		{"tokenize", "/tokenize", `{"model":"m","prompt":"a"}`, router.Request{Prompt: router.Prompt{Size: 1, Inexact: "no_prompt"}}},
		{"count", "/v1/messages/count_tokens", `{"model":"m","messages":[1]}`, router.Request{Prompt: router.Prompt{Size: 1, Inexact: "no_prompt"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHarness(t, extproc.Config{})
			x := h.Do(envoytest.Request{Path: c.path, Body: []byte(c.body)})
			if x.Refusal != nil || x.Header["x-dynamo-worker"] != chosen.Address.String() {
				t.Fatalf("refusal %+v, header %v", x.Refusal, x.Header)
			}
			x.End()
			h.router.mu.Lock()
			defer h.router.mu.Unlock()
			got := h.router.asked[0]
			got.Owned, got.Waiting, got.DecisionTimeout, got.QueueWait, got.Arrival, got.Labels = false, nil, 0, 0, router.Arrival{}, router.Labels{}
			if c.path != "/v1/chat/completions" && c.path != "/v1/completions" {
				c.want.Split = router.SplitNever
			}
			if c.want.Prompt.Size == 0 {
				c.want.Prompt.Path = map[string]prompts.Path{
					"/v1/chat/completions": prompts.PathChat, "/v1/completions": prompts.PathCompletions, "/v1/responses": prompts.PathResponses,
					"/v1/messages": prompts.PathMessages, "/generate": prompts.PathGenerate, "/inference/v1/generate": prompts.PathGenerate,
				}[c.path]
				if path := c.want.Prompt.Path; path != prompts.UnknownPath && path != prompts.PathGenerate {
					c.want.Prompt.Body = []byte(c.body)
				}
			}
			if converts := c.path == "/v1/responses" || c.path == "/v1/messages"; converts != (got.Prompt.Convert != nil) {
				t.Errorf("there is a conversion for other engines: %t, want %t", !converts, converts)
			}
			if got.Prefix == 0 {
				t.Error("the beginning of the prompt is not known")
			}
			got.Prompt.Convert, got.Prefix = nil, 0
			c.want.ID, c.want.Model, c.want.WantSecond, c.want.Unseen = got.ID, "m", true, true
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("asked (-want +got):\n%s", diff)
			}
		})
	}
}

// An engine with one model needs no name of it where no prompt is routed by.
func TestEmbeddingsWithoutAModelPass(t *testing.T) {
	h := newHarness(t, extproc.Config{})
	x := h.Do(envoytest.Request{Path: "/score", Body: []byte(`{"text_1":"a","text_2":"b"}`)})
	if x.Refusal != nil || x.Header["x-dynamo-worker"] != "" || len(h.router.newCalls()) > 0 {
		t.Errorf("refusal %+v, header %v", x.Refusal, x.Header)
	}
	x.End()
}

// Engines' own endpoints name no model. The router knows whether there is but one; if
// there are several the request is the pool's.
func TestPromptsWithoutAModel(t *testing.T) {
	for path, body := range map[string]string{
		"/generate":              `{"text":"a"}`,
		"/inference/v1/generate": `{"token_ids":[1]}`,
	} {
		h := newHarness(t, extproc.Config{})
		x := h.Do(envoytest.Request{Path: path, Body: []byte(body)})
		if x.Refusal != nil || x.Header["x-dynamo-worker"] != chosen.Address.String() {
			t.Errorf("%s: refusal %+v, header %v", path, x.Refusal, x.Header)
		}
		x.End()
		h.router.will(func(context.Context, router.Request) (router.Decision, error) {
			return router.Decision{}, fmt.Errorf("router: %w", router.ErrUnknownModel)
		})
		x = h.Do(envoytest.Request{Path: path, Body: []byte(body)})
		if x.Refusal != nil || x.Header["x-dynamo-worker"] != "" {
			t.Errorf("%s with several models: refusal %+v, header %v", path, x.Refusal, x.Header)
		}
		x.End()
	}
}

// A request to a path that is no endpoint passes, whatever its body.
func TestUnknownPathsPass(t *testing.T) {
	h := newHarness(t, extproc.Config{})
	for _, path := range []string{"/", "/v1/files", "/v1/audio/transcriptions", "/generate_stream", "/get_model_info"} {
		for _, r := range []envoytest.Request{{Path: path, Body: []byte("no JSON")}, {Path: path, Method: "GET"}} {
			x := h.Do(r)
			if x.Refusal != nil || x.Header["x-dynamo-worker"] != "" || x.Left || len(h.router.newCalls()) > 0 {
				t.Errorf("%s %s: refusal %+v, header %v", r.Method, path, x.Refusal, x.Header)
			}
			x.End()
		}
	}
}

// A request whose path is spelled in another way is decided, booked and refused like a
// plain one: engines' servers read both as the same path.
func TestOtherSpellingsOfAPathAreTheSame(t *testing.T) {
	for _, path := range []string{"/v1/chat/%63ompletions", "/v1%2fchat/completions", "//v1/chat//completions", "/v1/./chat/completions", "/v1/x/../chat/completions"} {
		h := newHarness(t, extproc.Config{})
		x := h.Do(envoytest.Request{Path: path, Body: []byte(hello)})
		if x.Header["x-dynamo-worker"] != chosen.Address.String() || h.router.taken() != 1 {
			t.Errorf("%s: header %v, %d slots taken; want a decision and its slot", path, x.Header, h.router.taken())
		}
		x.End()
		h.router.will(func(context.Context, router.Request) (router.Decision, error) {
			return router.Decision{}, fmt.Errorf("router: %w", router.ErrAllBusy)
		})
		if x = h.Do(envoytest.Request{Path: path, Body: []byte(hello)}); x.Refusal == nil || x.Refusal.Status != 429 {
			t.Errorf("%s: refusal %+v, want 429", path, x.Refusal)
		}
		x.End()
	}
}
