// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/internal/openai"
)

// Requests to /v1/messages become the same chats as in vLLM.
func TestMessagesBecomeChats(t *testing.T) {
	for _, c := range []struct {
		name, body string // without the model
		messages   string
		tools      string
		inexact    string
	}{
		{name: "a string", body: `"messages":[{"role":"user","content":"hi \"there\""}]`, messages: `[{"role":"user","content":"hi \"there\""}]`},
		{
			name:     "system turns stay at their places",
			body:     `"system":"a\n","messages":[{"role":"user","content":"q"},{"role":"system","content":[{"type":"text","text":"b","cache_control":{}},{"type":"text","text":""},{"type":"text","text":"c"}]}]`,
			messages: `[{"role":"system","content":"a\n"},{"role":"user","content":"q"},{"role":"system","content":"bc"}]`,
		},
		{
			name:     "what changes with each request is left out",
			body:     `"system":[{"type":"text","text":"x-anthropic-billing-header: 1"},{"type":"text","text":"a"}],"messages":[{"role":"user","content":"q"},{"role":"system","content":"x-anthropic-billing-header: 2"}]`,
			messages: `[{"role":"system","content":"a"},{"role":"user","content":"q"}]`,
		},
		{
			name: "one text is no list, several are", body: `"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":""}]},{"role":"user","content":[{"type":"text","text":"b"},{"type":"text","text":"c"}]}]`,
			messages: `[{"role":"user","content":"a"},{"role":"user","content":[{"type":"text","text":"b"},{"type":"text","text":"c"}]}]`,
		},
		{
			name: "thoughts, calls and what came of them",
			body: `"messages":[{"role":"user","content":"q"},
				{"role":"assistant","content":[{"type":"thinking","thinking":"a","signature":"s"},{"type":"thinking","thinking":"b"},{"type":"redacted_thinking","data":"x"},{"type":"text","text":"said"},
					{"type":"tool_use","id":"c1","name":"f","input":{"b":1,"a":"<"}},{"type":"tool_use","id":"c2","name":"g"}]},
				{"role":"user","content":[{"type":"tool_result","tool_use_id":"c1","content":"seen"},{"type":"tool_result","tool_use_id":"c2","content":[{"type":"text","text":"x"},{"type":"text","text":"y"}]},{"type":"text","text":"go on"}]},
				{"role":"user","content":[{"type":"tool_result","tool_use_id":"c3"}]}]`,
			messages: `[{"role":"user","content":"q"},
				{"role":"assistant","content":"said","reasoning":"ab","tool_calls":[
					{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"b\":1,\"a\":\"\u003c\"}"}},{"id":"c2","type":"function","function":{"name":"g","arguments":"{}"}}]},
				{"role":"tool","content":"seen","tool_call_id":"c1"},{"role":"tool","content":"x\ny","tool_call_id":"c2"},
				{"role":"user","content":"go on"},{"role":"tool","content":"","tool_call_id":"c3"}]`,
		},
		{
			name: "an assistant that only calls", body: `"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{}}]}]`,
			messages: `[{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}]`,
		},
		{
			name: "images", body: `"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image","source":{"type":"url","url":"u"}}]},
				{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":[{"type":"text","text":"b"},{"type":"image","source":{}}]}]}]`,
			messages: `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image","source":{"type":"url","url":"u"}}]},
				{"role":"tool","content":"b","tool_call_id":"c"},{"role":"user","content":[{"type":"image","source":{}}]}]`,
		},
		{
			name: "tools", body: `"messages":[{"role":"user","content":"q"}],"tools":[{"name":"f","description":"d","input_schema":{"b":1,"a":2.0},"cache_control":{},"strict":false,"defer_loading":true},{"type":"custom","name":"g","input_schema":{}},{"name":"h","input_schema":{"type":"x"}}]`,
			messages: `[{"role":"user","content":"q"}]`,
			tools:    `[{"type":"function","function":{"name":"f","description":"d","parameters":{"b":1,"a":2.0,"type":"object"},"strict":false,"defer_loading":true}},{"type":"function","function":{"name":"g","description":null,"parameters":{"type":"object"}}},{"type":"function","function":{"name":"h","description":null,"parameters":{"type":"x"}}}]`,
		},
		{
			name: "tools of the engine's own", body: `"messages":[{"role":"user","content":"q"}],"tools":[{"type":"bash_20250124","name":"bash"},null]`,
			messages: `[{"role":"user","content":"q"}]`, tools: `[{"type":"bash_20250124","name":"bash"},null]`, inexact: "no_renderer",
		},
		{
			name: "what only the engine reads", body: `"messages":[{"role":"user","content":[{"type":"document","source":{}},{"type":"text","text":"a"}]},5,{"role":"user"}]`,
			messages: `[{"role":"item","content":[{"type":"document","source":{}}]},{"role":"user","content":"a"},{"role":"item","content":[5]},{"role":"item","content":[{"role":"user"}]}]`, inexact: "no_renderer",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := openai.Parse(openai.Messages, []byte(`{"model":"m",`+c.body+`,"max_tokens":9,"output_config":{"effort":"low"}}`))
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range []struct{ what, got, want string }{{"messages", string(got.Messages), c.messages}, {"tools", string(got.Tools), c.tools}} {
				if diff := cmp.Diff(compact(t, v.want), v.got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", v.what, diff)
				}
			}
			if got.Inexact != c.inexact || got.MaxTokens != 9 || string(got.ReasoningEffort) != `"low"` {
				t.Errorf("got %+v, want inexact %q", got, c.inexact)
			}
		})
	}
	for body, want := range map[string]string{
		`{"model":"m"}`: "you must provide messages", `{"model":"m","messages":{}}`: "messages must be a list",
		"{\"model\":\"m\",\"messages\":[\"\n\"]}": "control character in a string at byte 26",
	} {
		if _, err := openai.Parse(openai.Messages, []byte(body)); err == nil || err.Status != 400 || !strings.Contains(err.Message, want) {
			t.Errorf("%s: error %v, want one about %q", body, err, want)
		}
	}
}

// The engine computes the whole prompt of such requests, as vLLM 0.33 does.
func TestUncached(t *testing.T) {
	chat, ids := `"messages":[{"role":"user","content":"a"}]`, `"token_ids":[1]`
	for _, c := range []struct {
		endpoint openai.Endpoint
		body     string
		want     bool
	}{
		{openai.ChatCompletions, chat, false},
		{openai.ChatCompletions, chat + `,"prompt_logprobs":0`, true},
		{openai.ChatCompletions, chat + `,"prompt_logprobs":null`, false},
		{openai.ChatCompletions, chat + `,"logprobs":true,"top_logprobs":2`, false},
		{openai.ChatCompletions, chat + `,"echo":true`, true},
		{openai.Completions, `"prompt":"a","echo":true,"logprobs":1`, true},
		{openai.Completions, `"prompt":"a","echo":true`, false},
		{openai.Completions, `"prompt":"a","logprobs":1`, false},
		{openai.Completions, `"prompt":"a","prompt_logprobs":1`, true},
		{openai.Ids, ids, false},
		{openai.Ids, ids + `,"sampling_params":{"prompt_logprobs":1}`, true},
		{openai.Ids, ids + `,"sampling_params":{"prompt_logprobs":1,"skip_reading_prefix_cache":false}`, false},
		{openai.Ids, ids + `,"sampling_params":{"skip_reading_prefix_cache":true}`, true},
		{openai.Messages, chat + `,"prompt_logprobs":1`, false}, // not a field of this API
	} {
		b, err := openai.Parse(c.endpoint, []byte(`{"model":"m",`+c.body+`}`))
		if err != nil || b.Uncached != c.want {
			t.Errorf("%v %s: uncached %v, error %v, want %v", c.endpoint, c.body, b.Uncached, err, c.want)
		}
	}
}

func TestDisabledThinking(t *testing.T) {
	for thinking, want := range map[string]bool{`{"type":"disabled"}`: true, `{"type":"enabled","budget_tokens":1024}`: false, `null`: false} {
		b, err := openai.Parse(openai.Messages, []byte(`{"model":"m","messages":[{"role":"user","content":"a"}],"thinking":`+thinking+`,"tool_choice":{"type":"none"}}`))
		if err != nil || b.NoThinking != want || string(b.ToolChoice) != `"none"` {
			t.Errorf("%s: %v, tool choice %s, error %v, want %v", thinking, b.NoThinking, b.ToolChoice, err, want)
		}
	}
}
