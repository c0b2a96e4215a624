// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/internal/openai"
)

// Requests to /v1/responses become the same chats as in vLLM.
func TestResponsesBecomeChats(t *testing.T) {
	for _, c := range []struct {
		name, body string // without the model
		messages   string
		tools      string
		inexact    string
		resume     bool
	}{
		{name: "a string", body: `"input":"hi \"there\""`, messages: `[{"role":"user","content":"hi \"there\""}]`},
		{
			name: "instructions go first", body: `"input":"hi","instructions":"Be brief."`,
			messages: `[{"role":"system","content":"Be brief."},{"role":"user","content":"hi"}]`,
		},
		{name: "empty instructions are none", body: `"input":"hi","instructions":""`, messages: `[{"role":"user","content":"hi"}]`},
		{
			name: "messages, with and without a type", body: `"input":[{"role":"developer","content":"a"},{"type":"message","role":"user","content":"b"}]`,
			messages: `[{"role":"developer","content":"a"},{"role":"user","content":"b"}]`,
		},
		{
			name:     "parts have the names of chats",
			body:     `"input":[{"role":"user","content":[{"type":"input_text","text":"a\n"},{"type":"input_image","image_url":"http://x"},{"type":"text","text":"b"}]}]`,
			messages: `[{"role":"user","content":[{"type":"text","text":"a\n"},{"type":"input_image","image_url":"http://x"},{"type":"text","text":"b"}]}]`,
		},
		{
			name: "what an assistant does in a row is one message",
			body: `"input":[{"role":"user","content":"q"},
				{"type":"reasoning","id":"r","summary":[],"content":[{"type":"reasoning_text","text":"think"}]},
				{"type":"message","id":"m","role":"assistant","status":"completed","content":[{"type":"output_text","text":"said","annotations":[]}]},
				{"type":"function_call","id":"f","call_id":"c1","name":"look","arguments":"{\"a\":1}","status":"completed"},
				{"type":"function_call","call_id":"c2","name":"look","arguments":"{}"},
				{"type":"function_call_output","call_id":"c1","output":"seen"},
				{"type":"function_call","call_id":"c3","name":"look","arguments":"{}"}]`,
			messages: `[{"role":"user","content":"q"},
				{"role":"assistant","content":"said","reasoning":"think","tool_calls":[
					{"id":"c1","function":{"name":"look","arguments":"{\"a\":1}"},"type":"function"},
					{"id":"c2","function":{"name":"look","arguments":"{}"},"type":"function"}]},
				{"role":"tool","content":"seen","tool_call_id":"c1"},
				{"role":"assistant","tool_calls":[{"id":"c3","function":{"name":"look","arguments":"{}"},"type":"function"}]}]`,
		},
		{
			name:     "two answers are two messages",
			body:     `"input":[{"role":"assistant","content":"a"},{"role":"assistant","content":[{"type":"output_text","text":"b"},{"type":"output_text","text":"c"}]}]`,
			messages: `[{"role":"assistant","content":"a"},{"role":"assistant","content":"b"}]`,
		},
		{
			name: "a summary stands for the thoughts", body: `"input":[{"type":"reasoning","summary":[{"type":"summary_text","text":"s"}]},{"type":"reasoning","summary":[]}]`,
			messages: `[{"role":"assistant","reasoning":"s"},{"role":"assistant","reasoning":""}]`,
		},
		{
			name: "an unfinished answer goes on", body: `"input":[{"role":"user","content":"q"},{"type":"message","role":"assistant","status":"incomplete","content":[{"type":"output_text","text":"a"}]}]`,
			messages: `[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]`, resume: true,
		},
		{
			name: "an unfinished one in the middle does not", body: `"input":[{"role":"assistant","status":"incomplete","content":"a"},{"role":"user","content":"q"}]`,
			messages: `[{"role":"assistant","content":"a"},{"role":"user","content":"q"}]`,
		},
		{
			name: "tools", body: `"input":"q","tools":[{"type":"function","name":"f","strict":true,"parameters":{"b":1,"a":2.0},"description":null}]`,
			messages: `[{"role":"user","content":"q"}]`,
			tools:    `[{"type":"function","function":{"name":"f","strict":true,"parameters":{"b":1,"a":2.0},"description":null}}]`,
		},
		{
			name: "the model sees no tools of the engine's own, and others as functions",
			body: `"input":"q","tools":[{"type":"web_search"},{"type":"custom","name":"c","format":{}},
				{"type":"namespace","name":"n","tools":[{"type":"function","name":"f","parameters":{}},{"type":"custom","name":"x"}]}]`,
			messages: `[{"role":"user","content":"q"}]`,
			tools: `[{"type":"function","function":{"name":"c","description":null,"parameters":{"type":"object","properties":{"input":{"type":"string","description":"The freeform text payload for this tool."}},"required":["input"],"additionalProperties":false}}},
				{"type":"function","function":{"name":"n__f","parameters":{}}}]`,
		},
		{
			name: "only tools of the engine's own", body: `"input":"q","tools":[{"type":"web_search"}]`,
			messages: `[{"role":"user","content":"q"}]`, tools: `[]`,
		},
		{name: "a history elsewhere", body: `"input":"q","previous_response_id":"resp_1"`, messages: `[{"role":"user","content":"q"}]`, inexact: "no_history"},
		{name: "a conversation elsewhere", body: `"input":"q","conversation":{"id":"c"}`, messages: `[{"role":"user","content":"q"}]`, inexact: "no_history"},
		{
			name: "items that only the engine reads", body: `"input":[{"type":"item_reference","id":"x"},{"type":"reasoning","summary":[],"encrypted_content":"x"},null,5]`,
			messages: `[{"role":"item","content":[{"type":"item_reference","id":"x"}]},{"role":"item","content":[{"type":"reasoning","summary":[],"encrypted_content":"x"}]},
				{"role":"item","content":[null]},{"role":"item","content":[5]}]`,
			inexact: "no_renderer",
		},
		{
			name: "a call of a tool in a namespace", body: `"input":[{"type":"function_call","namespace":"n","call_id":"c","name":"f","arguments":"{}"}]`,
			messages: `[{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"n__f","arguments":"{}"},"type":"function"}]}]`,
		},
		{
			name: "a call of a custom tool", body: `"input":[{"type":"custom_tool_call","call_id":"c","name":"f","input":"a\n\u00e9"},{"type":"custom_tool_call_output","call_id":"c","output":"ok"}]`,
			messages: `[{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{\"input\": \"a\\n\\u00e9\"}"},"type":"function"}]},{"role":"tool","content":"ok","tool_call_id":"c"}]`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := openai.Parse(openai.Responses, []byte(`{"model":"m",`+c.body+`,"max_output_tokens":9,"messages":[0],"reasoning":{"effort":"low"}}`))
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range []struct{ what, got, want string }{{"messages", string(got.Messages), c.messages}, {"tools", string(got.Tools), c.tools}} {
				if diff := cmp.Diff(compact(t, v.want), v.got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", v.what, diff)
				}
			}
			if got.Inexact != c.inexact || (string(got.ContinueFinalMessage) == "true") != c.resume || got.MaxTokens != 9 || string(got.ReasoningEffort) != `"low"` {
				t.Errorf("got %+v, want inexact %q, resume %v", got, c.inexact, c.resume)
			}
		})
	}
}

// compact removes the white space between tokens.
func compact(t *testing.T, s string) string {
	t.Helper()
	if s == "" {
		return ""
	}
	for _, space := range []string{"\n", "\t"} {
		s = strings.ReplaceAll(s, space, "")
	}
	if !json.Valid([]byte(s)) {
		t.Fatalf("not JSON: %s", s)
	}
	return s
}

func TestResponsesAreRefused(t *testing.T) {
	for body, want := range map[string]string{
		`{"model":"m"}`:                          "you must provide input",
		`{"model":"m","input":null}`:             "you must provide input",
		`{"model":"m","input":5}`:                "input must be a string or a list",
		`{"model":"m","input":[{"type":"x"}`:     "want a comma or the list's end at byte 34",
		`{"model":"m","input":"x","stream":"s"}`: "stream",
	} {
		if _, err := openai.Parse(openai.Responses, []byte(body)); err == nil || err.Status != 400 || !strings.Contains(err.Message, want) {
			t.Errorf("%s: error %v, want one about %q", body, err, want)
		}
	}
}
