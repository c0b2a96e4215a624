// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/internal/openai"
	prompt "github.com/kvroute/kvroute/tokenizer/chat"
)

func TestParse(t *testing.T) {
	raw := func(s string) []byte { return []byte(s) }
	for _, c := range []struct {
		name     string
		endpoint openai.Endpoint
		body     string
		want     openai.Body
	}{
		{
			"a chat with everything", openai.ChatCompletions,
			`{"model":"m","messages":[{"role":"user","content":"hi \"there\""}],"tools":[{"type":"function"}],"stream":true,
			  "stream_options":{"include_usage":true},"max_tokens":7,"temperature":-0.5e+3,"stop":null,"nvext":{"x":[1,{}],"cache_salt":"s"}}`,
			openai.Body{
				Model: "m", Stream: true, IncludeUsage: true, MaxTokens: 7, CacheSalt: "s",
				Request: prompt.Request{Messages: raw(`[{"role":"user","content":"hi \"there\""}]`), Tools: raw(`[{"type":"function"}]`)},
			},
		},
		{
			"white space stays out of spans", openai.Completions, " \r\n\t{ \"model\" :\t\"m\" , \"prompt\" : [ 1 , 2 ] } \n",
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`[ 1 , 2 ]`)}},
		},
		{
			"an empty prompt is a prompt", openai.Completions, `{"model":"m","prompt":""}`,
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`""`)}},
		},
		{
			"escapes in names and values", openai.Completions, `{"\u006dodel":"a\/\u00e9\ud83d\ude00","prompt":"\u0000"}`,
			openai.Body{Model: "a/é😀", Request: prompt.Request{Prompt: raw(`"\u0000"`)}},
		},
		{
			"the last copy counts", openai.Completions,
			`{"model":1,"stream":"x","prompt":{},"nvext":{"cache_salt":"a"},"model":"m","stream":true,"prompt":"p","nvext":{}}`,
			openai.Body{Model: "m", Stream: true, Request: prompt.Request{Prompt: raw(`"p"`)}},
		},
		{
			"null is absent", openai.Completions,
			`{"model":"m","prompt":"p","stream":null,"stream_options":null,"nvext":null,"tools":null,"max_tokens":null,"cache_salt":null}`,
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`"p"`)}},
		},
		{
			"nvext's salt goes first", openai.Completions, `{"model":"m","prompt":"p","nvext":{"cache_salt":"a"},"cache_salt":"b"}`,
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`"p"`)}, CacheSalt: "a"},
		},
		{
			"a salt without nvext", openai.Completions, `{"model":"m","prompt":"p","nvext":{"cache_salt":""},"cache_salt":"b"}`,
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`"p"`)}, CacheSalt: "b"},
		},
		{
			"the newer limit of tokens goes first", openai.Completions, `{"model":"m","prompt":"p","max_completion_tokens":5,"max_tokens":9}`,
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`"p"`)}, MaxTokens: 5},
		},
		{
			"odd limits as pydantic reads them", openai.Completions, `{"model":"m","prompt":"p","max_completion_tokens":-5,"max_tokens":1e3}`,
			openai.Body{Model: "m", MaxTokens: 1000, Request: prompt.Request{Prompt: raw(`"p"`)}},
		},
		{
			"a limit beyond any number", openai.Completions, `{"model":"m","prompt":"p","max_tokens":` + strings.Repeat("9", 400) + `}`,
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`"p"`)}},
		},
		{
			"strings need not be UTF-8", openai.Completions, "{\"model\":\"m\xff\",\"prompt\":\"\xc3\x28\"}",
			openai.Body{Model: "m\xff", Request: prompt.Request{Prompt: raw("\"\xc3\x28\"")}},
		},
		{
			"names deeper down or in other case do not count", openai.Completions,
			`{"Model":"x","model":"m","prompt":"p","extra":{"model":"y","stream":true},"nvext":[{"cache_salt":"a"}],"stream_options":3}`,
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`"p"`)}},
		},
		{
			"ids by the client", openai.ChatCompletions, `{"model":"m","messages":[1],"nvext":{"token_data":[ 7 , 4294967295 ]},"kv_transfer_params":{"prompt_token_ids":[1]}}`,
			openai.Body{Model: "m", Tokens: []uint32{7, 4294967295}, Request: prompt.Request{Messages: raw(`[1]`)}},
		},
		{
			"ids as vLLM takes them", openai.ChatCompletions, `{"model":"m","messages":[1],"kv_transfer_params":{"do_remote_decode":true,"prompt_token_ids":[1,2]}}`,
			openai.Body{Model: "m", Tokens: []uint32{1, 2}, Request: prompt.Request{Messages: raw(`[1]`)}, Steering: openai.FieldHints},
		},
		{
			"of a completion vLLM does not take them", openai.Completions, `{"model":"m","prompt":"p","kv_transfer_params":{"prompt_token_ids":[1,2]}}`,
			openai.Body{Model: "m", Request: prompt.Request{Prompt: raw(`"p"`)}},
		},
		{
			"odd ids are the engine's to judge", openai.ChatCompletions,
			`{"model":"m","messages":[1],"nvext":{"token_data":[1,4294967296,2]},"kv_transfer_params":{"prompt_token_ids":[1,null]}}`,
			openai.Body{Model: "m", Request: prompt.Request{Messages: raw(`[1]`)}},
		},
		{
			"odd ids, a second time", openai.ChatCompletions, `{"model":"m","messages":[1],"nvext":{"token_data":[-1]},"kv_transfer_params":{"prompt_token_ids":{}}}`,
			openai.Body{Model: "m", Request: prompt.Request{Messages: raw(`[1]`)}},
		},
		{
			"no ids", openai.ChatCompletions, `{"model":"m","messages":[1],"nvext":{"token_data":[]},"kv_transfer_params":null}`,
			openai.Body{Model: "m", Request: prompt.Request{Messages: raw(`[1]`)}},
		},
		{
			"a prompt that is no text", openai.Completions, `{"model":"m","prompt_embeds":"AAAA","max_tokens":3}`,
			openai.Body{Model: "m", MaxTokens: 3, Request: prompt.Request{Size: 51, Inexact: "embeds"}},
		},
		{
			"no prompt to route by", openai.Load, `{"model":"m","input":["a","b"],"prompt":5,"nvext":{"token_data":[1]}}`,
			openai.Body{Model: "m", Request: prompt.Request{Size: 69, Inexact: "no_prompt"}},
		},
		{
			"nor a model", openai.Load, `{"query":"a","documents":["b"]}`,
			openai.Body{Request: prompt.Request{Size: 31, Inexact: "no_prompt"}},
		},
		{
			"a chat's prompt is not asked for", openai.Other, `{"model":"m"}`,
			openai.Body{Model: "m"},
		},
	} {
		got, err := openai.Parse(c.endpoint, []byte(c.body))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if !strings.Contains(c.body, string(got.NVExt)) || (got.NVExt == nil) == (strings.Contains(c.body, `"nvext":`) && !strings.Contains(c.body, `"nvext":null`)) {
			t.Errorf("%s: nvext is %q", c.name, got.NVExt)
		}
		got.NVExt = nil
		if path := map[openai.Endpoint]prompt.Path{openai.ChatCompletions: prompt.PathChat, openai.Completions: prompt.PathCompletions}[c.endpoint]; c.want.Size == 0 {
			if c.want.Path = path; path != prompt.UnknownPath {
				c.want.Body = []byte(c.body)
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	const ok = `"model":"m","messages":[1]`
	for _, c := range []struct {
		endpoint    openai.Endpoint
		body        string
		param, want string // want is a part of the message
	}{
		{openai.ChatCompletions, "", "", "no body"},
		{openai.ChatCompletions, " \n", "", "no body"},
		{openai.ChatCompletions, "hello", "", "want a value at byte 0"},
		{openai.ChatCompletions, "\xef\xbb\xbf{" + ok + "}", "", "want a value at byte 0"},
		{openai.ChatCompletions, `[]`, "", "must be a JSON object"},
		{openai.ChatCompletions, `"x"`, "", "must be a JSON object"},
		{openai.ChatCompletions, `null`, "", "must be a JSON object"},
		{openai.ChatCompletions, `[}`, "", "want a value at byte 1"},
		{openai.ChatCompletions, `[] {}`, "", "unexpected data after the end at byte 3"},
		{openai.ChatCompletions, `{`, "", "want a field name at byte 1"},
		{openai.ChatCompletions, `{` + ok, "", "want a comma or the object's end at byte 27"},
		{openai.ChatCompletions, `{` + ok + `,}`, "", "want a field name at byte 28"},
		{openai.ChatCompletions, `{` + ok + `}}`, "", "unexpected data after the end at byte 28"},
		{openai.ChatCompletions, `{"model" "m"}`, "", "want a colon at byte 9"},
		{openai.ChatCompletions, `{"model":}`, "", "want a value at byte 9"},
		{openai.ChatCompletions, `{"model":`, "", "unexpected end at byte 9"},
		{openai.ChatCompletions, `{"model":nul}`, "", "want a value at byte 9"},
		{openai.ChatCompletions, `{"a":[1,]}`, "", "want a value at byte 8"},
		{openai.ChatCompletions, `{"a":[1 2]}`, "", "want a comma or the list's end at byte 8"},
		{openai.ChatCompletions, `{"a":01}`, "", "want a comma"},
		{openai.ChatCompletions, `{"a":-}`, "", "bad number at byte 6"},
		{openai.ChatCompletions, `{"a":1.}`, "", "bad number at byte 7"},
		{openai.ChatCompletions, `{"a":1e+}`, "", "bad number at byte 8"},
		{openai.ChatCompletions, `{"a":"`, "", "unexpected end of a string at byte 6"},
		{openai.ChatCompletions, `{"a":"\`, "", "unexpected end of a string at byte 7"},
		{openai.ChatCompletions, `{"a":"\x"}`, "", "bad escape in a string at byte 7"},
		{openai.ChatCompletions, `{"a":"\u12g4"}`, "", "bad escape in a string at byte 10"},
		{openai.ChatCompletions, "{\"a\":\"line\nbreak\"}", "", "control character in a string at byte 10"},
		// Malformed JSON is reported before any wrong field.
		{openai.ChatCompletions, `{"model":1,"stream":"x"`, "", "want a comma"},

		{openai.ChatCompletions, `{}`, "messages", "must provide messages"},
		{openai.ChatCompletions, `{"model":["m"],"messages":[1]}`, "model", "must be a string"},
		{openai.ChatCompletions, `{` + ok + `,"model":7}`, "model", "must be a string"},
		{openai.ChatCompletions, `{"model":"m"}`, "messages", "must provide messages"},
		{openai.ChatCompletions, `{"model":"m","prompt":"p"}`, "messages", "must provide messages"},
		{openai.ChatCompletions, `{"model":"m","messages":"hi"}`, "messages", "must be a list"},
		{openai.ChatCompletions, `{"model":"m","messages":"x"}`, "messages", "must be a list"},
		{openai.ChatCompletions, `{` + ok + `,"stream":"maybe"}`, "stream", "must be true or false"},
		{openai.ChatCompletions, `{` + ok + `,"stream":2}`, "stream", "must be true or false"},
		{openai.ChatCompletions, `{` + ok + `,"stream_options":{"include_usage":[]}}`, "stream_options.include_usage", "true or false"},
		{openai.Completions, `{"model":"m"}`, "prompt", "must provide a prompt"},
		{openai.Completions, `{"model":"m","prompt":null}`, "prompt", "must provide a prompt"},
		{openai.Completions, `{"model":"m","prompt":{"a":1}}`, "prompt", "must be a string, or a list"},
	} {
		_, err := openai.Parse(c.endpoint, []byte(c.body))
		if err == nil {
			t.Errorf("%.80q: accepted, want an error with %q", c.body, c.want)
			continue
		}
		if err.Status != 400 || err.Type != openai.InvalidRequest || err.Param != c.param || !strings.Contains(err.Message, c.want) {
			t.Errorf("%.80q: got %d %s param %q %q, want 400 param %q and %q", c.body, err.Status, err.Type, err.Param, err.Message, c.param, c.want)
		}
	}
}

// The scanner reads eight bytes at a time; the byte that ends a run may be at any position.
func TestEveryByteAtEveryPositionOfAString(t *testing.T) {
	for b := range 256 {
		for pos := range 20 {
			text := []byte(strings.Repeat("x", 20))
			text[pos] = byte(b)
			body := fmt.Appendf(nil, `{"model":"m","prompt":"%s"}`, text)
			_, err := openai.Parse(openai.Completions, body)
			if (err == nil) != json.Valid(body) {
				t.Fatalf("byte %#x at %d: got %v, encoding/json says valid=%v", b, pos, err, json.Valid(body))
			}
		}
	}
}

// Every truncated request is refused, and the error names the position of its end.
func TestEveryPrefixIsRefused(t *testing.T) {
	const body = `{"model":"m","messages":[{"role":"user","content":"h\u00e9\n"}],"n":-1.5e-7,"b":[true,false,null]}`
	for n := range len(body) {
		if _, err := openai.Parse(openai.ChatCompletions, []byte(body[:n])); err == nil {
			t.Errorf("%q accepted", body[:n])
		}
	}
}

// Spans are parts of the body: a prompt is never copied, and appending to a span
// cannot write into the body.
func TestSpansAliasTheBody(t *testing.T) {
	body := []byte(`{"model":"m","prompt":"text"}`)
	got, err := openai.Parse(openai.Completions, body)
	if err != nil {
		t.Fatal(err)
	}
	if &got.Prompt[0] != &body[22] {
		t.Error("the prompt was copied")
	}
	if cap(got.Prompt) != len(got.Prompt) {
		t.Error("appending to the prompt would overwrite the body")
	}
}

// FuzzParse compares accepted bodies and their spans with encoding/json.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		`{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}`,
		`{"model":"a\u0062\ud800","prompt":["x",[1]],"max_tokens":1e5,"cache_salt":"\\"}`,
		`{"model":"m","model":"n","nvext":{"cache_salt":"a","cache_salt":"b"},"messages":[{}]}`,
		"{\"model\":\"\xff\",\"prompt\":\"\x00\"}", `[]`, `{}`, `{"a":01}`, `{"model":"m","prompt":"p"}x`, `{"a":[[[[{}]]]]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		original := string(body)
		for _, e := range []openai.Endpoint{openai.ChatCompletions, openai.Completions} {
			b, err := openai.Parse(e, body)
			if bytes.Contains(body, []byte("NaN")) || bytes.Contains(body, []byte("Infinity")) {
				continue // encoding/json does not read them
			}
			if err == nil {
				compare(t, b, body)
				continue
			}
			// Errors without a parameter are grammar errors, and the one that encoding/json does not detect.
			grammar := err.Param == "" && !strings.Contains(err.Message, "must be a JSON object")
			if grammar == json.Valid(body) {
				t.Fatalf("%q: got %v, encoding/json says valid=%v", body, err, json.Valid(body))
			}
		}
		if string(body) != original {
			t.Fatal("the body was changed")
		}
	})
}

func compare(t *testing.T, b openai.Body, body []byte) {
	t.Helper()
	// A map has exact names and keeps the last copy of a field, as Parse does.
	var want map[string]json.RawMessage
	if err := json.Unmarshal(body, &want); err != nil {
		t.Fatalf("%q accepted, encoding/json says %v", body, err)
	}
	for name, got := range map[string][]byte{"messages": b.Messages, "tools": b.Tools, "prompt": b.Prompt} {
		w := string(want[name])
		if w == "null" {
			w = ""
		}
		if string(got) != w {
			t.Fatalf("%q: %s is %q, encoding/json says %q", body, name, got, w)
		}
	}
	var model string
	if err := json.Unmarshal(want["model"], &model); want["model"] != nil && err != nil || strings.ToValidUTF8(b.Model, "\ufffd") != strings.ToValidUTF8(model, "\ufffd") &&
		!strings.Contains(model, "\ufffd") {
		t.Fatalf("%q: model is %q, encoding/json says %q, %v", body, b.Model, model, err)
	}
	var stream *bool
	if json.Unmarshal(want["stream"], &stream) == nil && b.Stream != (stream != nil && *stream) {
		t.Fatalf("%q: stream is %v", body, b.Stream)
	}
}

func BenchmarkParse(b *testing.B) {
	for _, kb := range []int{1, 64, 1024} {
		b.Run(fmt.Sprintf("kb=%d", kb), func(b *testing.B) {
			body := chat(kb << 10)
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := openai.Parse(openai.ChatCompletions, body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// chat returns a request of about n bytes, in messages of typical length, with an escape in each
// line.
func chat(n int) []byte {
	const turn = `{"role":"user","content":"` + `the quick brown fox jumps over the lazy dog and does so again, since nobody stopped it\n` + `"},`
	messages := strings.Repeat(turn, n/len(turn)+1)
	return []byte(`{"model":"meta/llama","stream":true,"stream_options":{"include_usage":true},"max_tokens":100,"nvext":{"cache_salt":"tenant"},"messages":[` +
		strings.TrimSuffix(messages, ",") + `]}`)
}
