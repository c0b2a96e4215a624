// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
)

// WithTokens replaces the field by one at the end of the body, and copies all other fields.
func TestWithTokens(t *testing.T) {
	for _, c := range []struct {
		name, body string
		form       openai.Form
		want       string // "" for none
	}{
		{"a prompt", " {\"model\":\"m\",\n\"prompt\" : \"hi \\\"you\\\"\" ,\"x\":1.50}\n", openai.FormPrompt, `{"model":"m","x":1.50,"prompt":[1,4294967295]}`},
		{"two prompts", `{"model":"m","prompt":"a","pr\u006fmpt":"b"}`, openai.FormPrompt, `{"model":"m","prompt":[1,4294967295]}`},
		{"of two prompts the last counts", `{"model":"m","prompt":"a","pr\u006fmpt":["b"]}`, openai.FormPrompt, ""},
		{"a list of prompts", `{"model":"m","prompt":["a"]}`, openai.FormPrompt, ""},
		{"no prompt", `{"model":"m"}`, openai.FormPrompt, ""},
		{"the prompt of something else", `{"model":"m","x":{"prompt":"a"},"prompt":"b"}`, openai.FormPrompt, `{"model":"m","x":{"prompt":"a"},"prompt":[1,4294967295]}`},

		{"a chat", `{"model":"m","messages":[1] }`, openai.FormKVTransfer, `{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[1,4294967295]}}`},
		{"a chat with null", `{"kv_transfer_params": null ,"model":"m"}`, openai.FormKVTransfer, `{"model":"m","kv_transfer_params":{"prompt_token_ids":[1,4294967295]}}`},
		{"a chat with an empty object", `{"model":"m","kv_transfer_params":{ }}`, openai.FormKVTransfer, `{"model":"m","kv_transfer_params":{"prompt_token_ids":[1,4294967295]}}`},
		{
			"a chat between prefill and decode", `{"model":"m","kv_transfer_params":{"do_remote_prefill":true} }`, openai.FormKVTransfer,
			`{"model":"m","kv_transfer_params":{"do_remote_prefill":true,"prompt_token_ids":[1,4294967295]}}`,
		},
		{"a null within", `{"model":"m","kv_transfer_params":{"prompt_token_ids":null}}`, openai.FormKVTransfer, `{"model":"m","kv_transfer_params":{"prompt_token_ids":[1,4294967295]}}`},
		{"ids of the client's", `{"model":"m","kv_transfer_params":{"prompt_token_ids":[7]}}`, openai.FormKVTransfer, ""},
		{"what is no object", `{"model":"m","kv_transfer_params":[]}`, openai.FormKVTransfer, ""},
		{"an object, then null", `{"kv_transfer_params":{"a":1},"model":"m","kv_transfer_params":null}`, openai.FormKVTransfer, `{"model":"m","kv_transfer_params":{"prompt_token_ids":[1,4294967295]}}`},

		{"TensorRT-LLM", `{"model":"m"}`, openai.FormTokenIDs, `{"model":"m","prompt_token_ids":[1,4294967295]}`},
		{"TensorRT-LLM with null", `{"prompt_token_ids":null,"model":"m"}`, openai.FormTokenIDs, `{"model":"m","prompt_token_ids":[1,4294967295]}`},
		{"TensorRT-LLM with ids", `{"prompt_token_ids":[],"model":"m"}`, openai.FormTokenIDs, ""},
	} {
		before := c.body
		got := openai.WithTokens([]byte(c.body), c.form, []uint32{1, 4294967295})
		if string(got) != c.want || before != c.body {
			t.Errorf("%s: %s\ngot  %s\nwant %s", c.name, c.body, got, c.want)
		}
	}
}

// FuzzWithTokens compares with encoding/json: the field has the ids, and all other fields are
// unchanged, byte for byte.
func FuzzWithTokens(f *testing.F) {
	for _, s := range []string{
		`{"model":"m","prompt":"a"}`, `{"model":"m","messages":[1],"kv_transfer_params":{"a":[1,2]}}`, `{"model":"m","kv_transfer_params":null,"prompt_token_ids":null}`,
		`{"model":"m","prompt":"a","prompt":"b","kv_transfer_params":{},"kv_transfer_params":{"x":{}}}`, " {\"model\" : \"m\" }\t",
	} {
		f.Add([]byte(s), uint32(7))
	}
	f.Fuzz(func(t *testing.T, body []byte, id uint32) {
		if _, err := openai.Parse(openai.Other, body); err != nil {
			return
		}
		original := bytes.Clone(body)
		for _, form := range []openai.Form{openai.FormPrompt, openai.FormKVTransfer, openai.FormTokenIDs} {
			out := openai.WithTokens(body, form, []uint32{id, id})
			if !bytes.Equal(body, original) {
				t.Fatal("the body was changed")
			}
			var was, is map[string]json.RawMessage
			if err := json.Unmarshal(body, &was); err != nil {
				return // nested deeper than encoding/json allows
			}
			if out == nil {
				if v := was[string(form)]; form != openai.FormPrompt && (v == nil || string(v) == "null") {
					t.Fatalf("%q: no %s", body, form)
				}
				continue
			}
			if err := json.Unmarshal(out, &is); err != nil {
				t.Fatalf("%q became %q: %v", body, out, err)
			}
			ids := is[string(form)]
			if form == openai.FormKVTransfer {
				var params map[string]json.RawMessage
				if err := json.Unmarshal(ids, &params); err != nil {
					t.Fatal(err)
				}
				ids = params["prompt_token_ids"]
				var old map[string]json.RawMessage
				_ = json.Unmarshal(was[string(form)], &old) // may be absent
				for name, v := range old {
					if name != "prompt_token_ids" && !bytes.Equal(params[name], v) {
						t.Fatalf("%q became %q", body, out)
					}
				}
			}
			var got []uint32
			if err := json.Unmarshal(ids, &got); err != nil || !slices.Equal(got, []uint32{id, id}) {
				t.Fatalf("%q became %q: ids %s, %v", body, out, ids, err)
			}
			delete(was, string(form))
			delete(is, string(form))
			if len(was) != len(is) {
				t.Fatalf("%q became %q", body, out)
			}
			for name, v := range was {
				if !bytes.Equal(is[name], v) {
					t.Fatalf("%q became %q: %s was %s", body, out, name, v)
				}
			}
		}
	})
}

func BenchmarkWithTokens(b *testing.B) {
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("some words and ", 5000) + `"}]}`)
	ids := make([]uint32, 20_000)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if openai.WithTokens(body, openai.FormKVTransfer, ids) == nil {
			b.Fatal("nothing")
		}
	}
}
