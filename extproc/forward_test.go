// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"strings"
	"testing"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// A body is changed if everything speaks for it, and else stays as it is, which is
// counted by the first reason why.
func TestForwarding(t *testing.T) {
	const (
		completion = `{"model":"m","prompt":"a"}`
		chat       = `{"model":"m","messages":[1]}`
	)
	ids := []uint32{5, 6}
	agreed := func(engine, version string) *router.Tokens {
		return &router.Tokens{IDs: ids, Agreed: true, Engine: engine, EngineVersion: version}
	}
	for _, c := range []struct {
		name, on   string
		path, body string
		tokens     *router.Tokens
		form       string
		outcome    string
		want       string // the body, "" if it stays
	}{
		{"completion", "auto", "/v1/completions", completion, agreed("vllm", "0.6.0"), "prompt", "forwarded", `{"model":"m","prompt":[5,6]}`},
		{"completion, SGLang", "prompt", "/v1/completions", completion, agreed("sglang", ""), "prompt", "forwarded", `{"model":"m","prompt":[5,6]}`},
		{"completion, TensorRT-LLM", "auto", "/v1/completions", completion, agreed("trtllm", "1.2"), "prompt", "forwarded", `{"model":"m","prompt":[5,6]}`},
		{"chat, vLLM", "auto", "/v1/chat/completions", chat, agreed("vllm", "0.32.0"), "kv_transfer_params", "forwarded", `{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[5,6]}}`},
		{"chat, later vLLM", "auto", "/v1/chat/completions", chat, agreed("vllm", "v1.0.3rc1"), "kv_transfer_params", "forwarded", `{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[5,6]}}`},
		{"chat, built after", "auto", "/v1/chat/completions", chat, agreed("vllm", "0.32.0.post1+cu130"), "kv_transfer_params", "forwarded", `{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[5,6]}}`},
		{"chat, TensorRT-LLM", "auto", "/v1/chat/completions", chat, agreed("trtllm", "1.0.0"), "prompt_token_ids", "forwarded", `{"model":"m","messages":[1],"prompt_token_ids":[5,6]}`},
		{"named forms trust the version", "kv_transfer_params", "/v1/chat/completions", chat, agreed("vllm", "main"), "kv_transfer_params", "forwarded", `{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[5,6]}}`},
		{"an engine that cannot be asked", "prompt_token_ids", "/v1/chat/completions", chat, &router.Tokens{IDs: ids, Engine: "trtllm"}, "prompt_token_ids", "forwarded", `{"model":"m","messages":[1],"prompt_token_ids":[5,6]}`},

		{"that one, on its own", "auto", "/v1/chat/completions", chat, &router.Tokens{IDs: ids, Engine: "trtllm", EngineVersion: "1.0.0"}, "prompt_token_ids", "unchecked", ""},
		{"that one, after other ids", "prompt_token_ids", "/v1/chat/completions", chat, &router.Tokens{IDs: ids, Engine: "trtllm", Differs: true}, "prompt_token_ids", "unchecked", ""},
		{"unchecked", "kv_transfer_params", "/v1/chat/completions", chat, &router.Tokens{IDs: ids, Engine: "vllm", EngineVersion: "0.32.0"}, "kv_transfer_params", "unchecked", ""},
		{"an older version", "auto", "/v1/chat/completions", chat, agreed("vllm", "0.31.9"), "kv_transfer_params", "version", ""},
		{"a version before it", "auto", "/v1/chat/completions", chat, agreed("vllm", "0.32.0rc2"), "kv_transfer_params", "version", ""},
		{"a version in the making", "auto", "/v1/chat/completions", chat, agreed("vllm", "0.32.0.dev12+g1"), "kv_transfer_params", "version", ""},
		{"half a version", "auto", "/v1/chat/completions", chat, agreed("vllm", "0.32"), "kv_transfer_params", "version", ""},
		{"no version", "auto", "/v1/chat/completions", chat, agreed("vllm", ""), "kv_transfer_params", "version", ""},
		{"no number", "auto", "/v1/chat/completions", chat, agreed("vllm", "main"), "kv_transfer_params", "version", ""},
		{"a huge number", "auto", "/v1/chat/completions", chat, agreed("vllm", strings.Repeat("9", 40)+".1"), "kv_transfer_params", "forwarded", `{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[5,6]}}`},
		{"chat, SGLang", "auto", "/v1/chat/completions", chat, agreed("sglang", "9.0.0"), "kv_transfer_params", "engine", ""},
		{"an engine that we do not know", "prompt", "/v1/completions", completion, agreed("mine", "1"), "prompt", "engine", ""},
		{"a worker that says nothing", "auto", "/v1/completions", completion, agreed("", ""), "prompt", "engine", ""},
		{"responses", "auto", "/v1/responses", `{"model":"m","input":"a"}`, agreed("vllm", "0.32.0"), "", "engine", ""},
		{"embeddings", "auto", "/v1/embeddings", `{"model":"m","input":"a"}`, &router.Tokens{Engine: "vllm"}, "", "engine", ""},
		{"another form", "prompt", "/v1/chat/completions", chat, agreed("vllm", "0.32.0"), "kv_transfer_params", "form", ""},
		{"not exact", "auto", "/v1/completions", completion, &router.Tokens{Agreed: true, Engine: "vllm"}, "prompt", "inexact", ""},
		{"ids of the client's", "auto", "/v1/chat/completions", `{"model":"m","messages":[1],"nvext":{"token_data":[1]}}`, agreed("vllm", "0.32.0"), "kv_transfer_params", "given", ""},
		{"ids as the prompt", "auto", "/v1/completions", `{"model":"m","prompt":[1]}`, agreed("vllm", "0.32.0"), "prompt", "options", ""},
		{"a list", "auto", "/v1/completions", `{"model":"m","prompt":["a","b"]}`, agreed("vllm", "0.32.0"), "prompt", "options", ""},
		{"echo", "auto", "/v1/completions", `{"model":"m","prompt":"a","echo":true}`, agreed("vllm", "0.32.0"), "prompt", "options", ""},
		{"truncation", "auto", "/v1/completions", `{"model":"m","prompt":"a","truncate_prompt_tokens":3}`, agreed("vllm", "0.32.0"), "prompt", "options", ""},
		{"a field with something else", "auto", "/v1/chat/completions", `{"model":"m","messages":[1],"kv_transfer_params":3}`, agreed("vllm", "0.32.0"), "kv_transfer_params", "body", ""},
		{"too large", "auto", "/v1/completions", completion, &router.Tokens{IDs: make([]uint32, 400), Agreed: true, Engine: "vllm"}, "prompt", "body", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHarness(t, extproc.Config{ForwardTokens: c.on, MaxBodyBytes: 600})
			h.router.will(func(context.Context, router.Request) (router.Decision, error) {
				d := chosen
				d.Tokens = c.tokens
				return d, nil
			})
			x := h.Do(envoytest.Request{Path: c.path, Body: []byte(c.body), Header: []string{"content-length", "26"}})
			if string(x.Body) != c.want || x.Header["x-dynamo-worker"] == "" {
				t.Errorf("body %q, want %q; header %v, refusal %+v", x.Body, c.want, x.Header, x.Refusal)
			}
			x.End()
			if n, all := h.count(t, "kvroute.extproc.forwards", c.form, c.outcome), h.count(t, "kvroute.extproc.forwards"); n != 1 || all != 1 {
				t.Errorf("counted %d times as %s of form %q, %d times in all, want once", n, c.outcome, c.form, all)
			}
			if !h.router.asked[0].WantTokens {
				t.Error("the router was not asked for the ids")
			}
		})
	}
}

// Of a body that was cut off, though its beginning is JSON that is complete, neither text
// nor length is changed: the rest follows it.
func TestNothingIsForwardedInAPart(t *testing.T) {
	h := newHarness(t, extproc.Config{ForwardTokens: "auto"})
	h.router.will(func(context.Context, router.Request) (router.Decision, error) {
		d := chosen
		d.Tokens = &router.Tokens{IDs: []uint32{5, 6}, Agreed: true, Engine: "vllm", EngineVersion: "0.6.0"}
		return d, nil
	})
	x := h.Do(envoytest.Request{
		Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"a"}`), Header: []string{"content-length", "80000"},
		Mode: filterv3.ProcessingMode_BUFFERED_PARTIAL, Trailers: true, // an end that this message is not
	})
	if x.Body != nil || x.Header["content-length"] != "80000" || x.Header["x-dynamo-worker"] == "" {
		t.Errorf("body %q, header %v", x.Body, x.Header)
	}
	x.End()
	if n := h.count(t, "kvroute.extproc.forwards", "mode"); n != 1 {
		t.Errorf("%d kept because of the mode, want 1", n)
	}
}

// Without the option nothing is asked for, and nothing changed or counted.
func TestNothingIsForwardedByDefault(t *testing.T) {
	h := newHarness(t, extproc.Config{})
	x := h.Do(chat(hello))
	x.End()
	if x.Body != nil || h.router.asked[0].WantTokens || h.count(t, "kvroute.extproc.forwards") != 0 {
		t.Errorf("body %q, asked %+v", x.Body, h.router.asked[0])
	}
}

func TestForwardTokensIsRefused(t *testing.T) {
	for _, s := range []string{"yes", "prompt,chat", "auto;prompt"} {
		if err := extproc.CheckForwardTokens(s); err == nil || !strings.Contains(err.Error(), "no form of token ids") {
			t.Errorf("%q: error %v", s, err)
		}
		if _, err := extproc.New(extproc.Config{ForwardTokens: s}, newRouter(t)); err == nil || !strings.Contains(err.Error(), "ForwardTokens") {
			t.Errorf("%q: New: error %v", s, err)
		}
	}
	for _, s := range []string{"", "auto", " prompt , kv_transfer_params,prompt_token_ids", "auto,prompt"} {
		if err := extproc.CheckForwardTokens(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
}
