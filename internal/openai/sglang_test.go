// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"testing"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// The chats are those that SGLang's own classes make.
func TestSGLangChats(t *testing.T) {
	newest, older := chat.Engine{Profile: chat.SGLang}, chat.Engine{Profile: chat.SGLang, Older: true}
	inline := chat.Engine{Profile: chat.SGLang, InlineSystem: true}
	between := chat.Engine{Profile: chat.SGLang, Older: true, Between: true}
	for _, c := range []struct {
		name, body     string
		endpoint       Endpoint
		engine         chat.Engine
		messages, tool string
		inexact        string
	}{
		{
			"system as a list with a billing header", `{"model":"m","system":[{"type":"text","text":"x-anthropic-billing-header: 1"},{"type":"text","text":"Be."}],"messages":[{"role":"user","content":"Hi"}]}`,
			Messages, newest, `[{"role":"system","content":"x-anthropic-billing-header: 1\nBe."},{"role":"user","content":"Hi"}]`, "", "",
		},
		{
			"system turn moved to the front", `{"model":"m","messages":[{"role":"user","content":"Hi"},{"role":"system","content":" Be. "}]}`,
			Messages, newest, `[{"role":"system","content":"Be."},{"role":"user","content":"Hi"}]`, "", "",
		},
		{
			"system turn in its place, empty part kept", `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":""}]},{"role":"system","content":" Be. "}]}`,
			Messages, inline, `[{"role":"user","content":""},{"role":"system","content":" Be. "}]`, "", "",
		},
		{
			"text before a tool's result", `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"tool_result","tool_use_id":"t","content":"b"},{"type":"text","text":"c"}]}]}`,
			Messages, newest, `[{"role":"user","content":"a"},{"role":"tool","content":"b","tool_call_id":"t"},{"role":"user","content":"c"}]`, "", "",
		},
		{
			"thoughts", `{"model":"m","messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"x"}]}]}`,
			Messages, newest, `[{"role":"assistant","content":""}]`, "", NoRenderer,
		},
		{
			"tools", `{"model":"m","messages":[{"role":"user","content":"Hi"}],"tools":[{"name":"f","input_schema":{}},{"type":"web_search_20250305","name":"web_search"}]}`,
			Messages, newest, `[{"role":"user","content":"Hi"}]`,
			`[{"type":"function","function":{"name":"f","description":"","parameters":{"type":"object"},"strict":false}}]`, "",
		},
		{
			"developer", `{"model":"m","instructions":"Be.","input":[{"role":"user","content":"Hi"},{"role":"developer","content":"Do."}]}`,
			Responses, newest, `[{"role":"system","content":"Be.\n\nDeveloper instructions:\nDo."},{"role":"user","content":"Hi"}]`, "", "",
		},
		{
			"developer before 0.5.23", `{"model":"m","input":[{"role":"user","content":"Hi"},{"role":"developer","content":"Do."}]}`,
			Responses, older, `[{"role":"system","content":"Do."},{"role":"user","content":"Hi"}]`, "", "",
		},
		{
			"0.5.18 to 0.5.22 have other rules", `{"model":"m","input":[{"role":"user","content":"Hi"}]}`,
			Responses, between, `[{"role":"user","content":"Hi"}]`, "", NoRenderer,
		},
		{
			"one message of the assistant", `{"model":"m","input":[{"type":"reasoning","summary":[{"text":"a"}]},{"role":"assistant","content":"b"},{"type":"function_call","call_id":"c","name":"f","arguments":"["}]}`,
			Responses, newest, `[{"role":"assistant","content":"b","reasoning_content":"a","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}]`, "", "",
		},
	} {
		b, bad := Parse(c.endpoint, []byte(c.body))
		if b.Convert == nil {
			t.Errorf("%s: %v, no conversion", c.name, bad)
			continue
		}
		if q := b.Convert(c.engine); q.Path != b.Path {
			t.Errorf("%s: the chat has the path %d, want the request's, %d", c.name, q.Path, b.Path)
		}
		if q := b.Convert(c.engine); string(q.Messages) != c.messages || string(q.Tools) != c.tool || q.Inexact != c.inexact {
			t.Errorf("%s:\n%s %s %q, want\n%s %s %q", c.name, q.Messages, q.Tools, q.Inexact, c.messages, c.tool, c.inexact)
		}
	}
}
