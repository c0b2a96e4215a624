// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// plain writes each message as its role and content, and all variables that flags change.
const plain = `{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}` +
	`{{ tools | tojson if tools }}|{{ enable_thinking }}|{{ reasoning_effort }}|{{ own }}`

func render(t *testing.T, template string, flags chat.Flags, q chat.Request) string {
	t.Helper()
	r, err := chat.NewRenderer(chat.VLLM, &chat.Files{Templates: map[string]string{"default": template}}, flags)
	if err != nil {
		t.Fatal(err)
	}
	if q.Messages == nil {
		q.Messages = []byte(`[{"role":"user","content":"q"}]`)
	}
	text, err := r.Render(nil, q, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return string(text.Text)
}

// A template that cannot render a system turn behind others makes the engine put all of them in front.
func TestSystemTurnsStayWhereTheTemplateRendersThem(t *testing.T) {
	q := chat.Request{API: chat.Messages, Messages: []byte(`[{"role":"system","content":"a"},{"role":"user","content":"q"},{"role":"system","content":"b"}]`)}
	for template, want := range map[string]string{
		plain: "s:a;u:q;s:b;|||",
		`{% for m in messages %}{% if m.role == "system" and not loop.first %}{{ raise_exception("no") }}{% endif %}{% endfor %}` + plain: "s:ab;u:q;|||",
		`{% if strftime_now is defined %}{% endif %}` + plain:                                                                             "s:a;u:q;s:b;|||",
		`{% if strftime_now("%Y") %}{% endif %}` + plain:                                                                                  "s:ab;u:q;|||", // the engine tries it without this function
		plain + `{% generation %}{% endgeneration %}`:                                                                                     "s:ab;u:q;|||", // and without this tag
	} {
		if got := render(t, template, chat.Flags{}, q); got != want {
			t.Errorf("%s: got %q, want %q", template, got, want)
		}
	}
	q.API = chat.Chat
	if got := render(t, plain, chat.Flags{}, q); got != "s:a;u:q;s:b;|||" {
		t.Errorf("a chat: got %q", got)
	}
}

func TestDisabledThinkingHasTheEffortThatTheTemplateKnows(t *testing.T) {
	q := chat.Request{API: chat.Messages, NoThinking: true, ReasoningEffort: []byte(`"high"`)}
	for _, c := range []struct{ template, flag, want string }{
		{plain, "", "u:q;|False|none|"},
		{`{% set reasoning_effort = "max" if reasoning_effort not in ["low", "high"] else reasoning_effort %}` + strings.Replace(plain, "{{ enable_thinking }}", "", 1), "", "u:q;||low|"},
		{`{% if reasoning_effort == "none" %}{{ raise_exception("no") }}{% endif %}` + plain, "", "u:q;|True|low|"},
		{plain, "medium", "u:q;|True|medium|"},
		{plain, "none", "u:q;|False|none|"},
	} {
		if got := render(t, c.template, chat.Flags{DisabledEffort: c.flag}, q); got != c.want {
			t.Errorf("%s, flag %q: got %q, want %q", c.template, c.flag, got, c.want)
		}
	}
}

func TestFlagsOfTheEngine(t *testing.T) {
	tools := []byte(`[{"function":{"name":"f"}}]`)
	written := `[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}]`
	defaults := []byte(`{"enable_thinking":false,"own":"d"}`)
	for _, c := range []struct {
		name  string
		flags chat.Flags
		q     chat.Request
		want  string
	}{
		{"none", chat.Flags{}, chat.Request{Tools: tools, ToolChoice: []byte(`"none"`)}, "u:q;" + written + "|||"},
		{"tools are excluded", chat.Flags{ExcludeTools: true}, chat.Request{Tools: tools, ToolChoice: []byte(`"none"`)}, "u:q;|||"},
		{"tools are not excluded", chat.Flags{ExcludeTools: true}, chat.Request{Tools: tools}, "u:q;" + written + "|||"},
		{"defaults", chat.Flags{DefaultKwargs: defaults}, chat.Request{}, "u:q;|False||d"},
		{"the request's values win", chat.Flags{DefaultKwargs: defaults}, chat.Request{ChatTemplateKwargs: []byte(`{"enable_thinking":true,"own":null}`)}, "u:q;|True||d"},
		{"an effort wins", chat.Flags{DefaultKwargs: defaults}, chat.Request{ReasoningEffort: []byte(`"low"`)}, "u:q;|True|low|d"},
		{"auto is no value", chat.Flags{}, chat.Request{ChatTemplateKwargs: []byte(`{"enable_thinking":"auto"}`), ReasoningEffort: []byte(`"low"`)}, "u:q;||low|"},
		{"efforts", chat.Flags{EffortMap: map[string]string{"minimal": "none"}}, chat.Request{ReasoningEffort: []byte(`"minimal"`)}, "u:q;|False|none|"},
		{"parts", chat.Flags{ContentFormat: "openai"}, chat.Request{}, "u:[{'type': 'text', 'text': 'q'}];|||"},
		{"the request's tools win", chat.Flags{}, chat.Request{Tools: tools, ChatTemplateKwargs: []byte(`{"tools":[1]}`)}, "u:q;[1]|||"},
		{"no content", chat.Flags{}, chat.Request{Messages: []byte(`[{"role":"user"}]`)}, "u:;|||"},
		{
			"tools that are loaded later",
			chat.Flags{},
			chat.Request{Tools: []byte(`[{"function":{"name":"f","defer_loading":false}},{"defer_loading":true,"function":{"name":"g"}}]`)},
			`u:q;[{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "defer_loading": false}}, ` +
				`{"type": "function", "function": {"name": "g", "description": null, "parameters": null, "defer_loading": true}, "defer_loading": true}]|||`,
		},
	} {
		if got := render(t, plain, c.flags, c.q); got != c.want {
			t.Errorf("%s:\ngot  %q\nwant %q", c.name, got, c.want)
		}
	}
}

func TestWrongFlagsAreNamed(t *testing.T) {
	for want, flags := range map[string]chat.Flags{
		"default-chat-template-kwargs is not an object": {DefaultKwargs: []byte(`[1]`)},
		`chat-template-content-format is "text"`:        {ContentFormat: "text"},
		`anthropic-disabled-thinking-effort is "off"`:   {DisabledEffort: "off"},
	} {
		_, err := chat.NewRenderer(chat.VLLM, &chat.Files{Templates: map[string]string{"default": "a"}}, flags)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one about %q", err, want)
		}
	}
}
