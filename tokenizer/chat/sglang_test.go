// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"testing"
	"time"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// The prompts are those that SGLang 0.5.23's own classes make, or 0.5.17's.
func TestSGLangPrompts(t *testing.T) {
	const template = `{% for t in tools or [] %}{{ t | tojson }};{% endfor %}` +
		`{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}{{ enable_thinking }},{{ reasoning_effort }}>`
	f := &chat.Files{Templates: map[string]string{"default": template}}
	user := `{"role":"user","content":"a"}`
	for _, c := range []struct {
		name      string
		q         chat.Request
		version   string
		want      string
		continued string
	}{
		{"last message of the assistant", chat.Request{Messages: []byte(`[` + user + `,{"role":"assistant","content":"b"}]`)}, "", "user:a;user:b;,>", ""},
		{"continued", chat.Request{Messages: []byte(`[` + user + `,{"role":"assistant","content":"b"}]`), ContinueFinalMessage: []byte("true")}, "", "user:a;,>", "b"},
		{"effort none", chat.Request{Messages: []byte(`[` + user + `]`), ReasoningEffort: []byte(`"none"`)}, "", "user:a;False,none>", ""},
		{"reasoning", chat.Request{Messages: []byte(`[` + user + `]`), Reasoning: []byte(`{"effort":"high"}`)}, "", "user:a;True,high>", ""},
		{"kwargs win", chat.Request{Messages: []byte(`[` + user + `]`), ReasoningEffort: []byte(`0.5`), ChatTemplateKwargs: []byte(`{"enable_thinking":false,"reasoning_effort":"low"}`)}, "", "user:a;False,low>", ""},
		{
			"big integers and thoughts",
			chat.Request{Messages: []byte(`[{"role":"assistant","content":[{"type":"thinking","thinking":"x"},{"type":"text","text":"a"}],"tool_calls":[{"function":{"name":"f","arguments":"{\"n\":18446744073709551616}"}}]},` + user + `]`)},
			"",
			`assistant:a[{"id": null, "index": null, "type": "function", "function": {"name": "f", "arguments": {"n": 1.8446744073709552e+19}}}];user:a;,>`, "",
		},
		{
			"tools",
			chat.Request{Messages: []byte(`[` + user + `]`), Tools: []byte(`[{"function":{"parameters":{},"name":"f","x":1}}]`)},
			"0.5.23",
			`{"type": "function", "function": {"parameters": {}, "name": "f", "description": null}, "defer_loading": null};user:a;,>`, "",
		},
		{
			"tools before 0.5.23",
			chat.Request{Messages: []byte(`[` + user + `]`), Tools: []byte(`[{"function":{"parameters":{},"name":"f","x":1}}]`)},
			"0.5.17",
			`{"type": "function", "function": {"description": null, "name": "f", "parameters": {}, "strict": false}, "defer_loading": null};user:a;,>`, "",
		},
		{"tool_choice none", chat.Request{Messages: []byte(`[` + user + `]`), Tools: []byte(`[{"function":{"name":"f"}}]`), ToolChoice: []byte(`"none"`)}, "", "user:a;,>", ""},
	} {
		r, err := chat.NewRenderer(chat.SGLang, f, chat.Flags{})
		if err != nil {
			t.Fatal(err)
		}
		r.SetVersion(c.version)
		text, err := r.Render(nil, c.q, time.Time{})
		if string(text.Text) != c.want || text.Continued != c.continued {
			t.Errorf("%s: %q, continued %q, %v, want %q, %q", c.name, text.Text, text.Continued, err, c.want, c.continued)
		}
	}
}

// Versions of SGLang have rules of their own.
func TestSGLangVersions(t *testing.T) {
	r, err := chat.NewRenderer(chat.SGLang, &chat.Files{Templates: map[string]string{"default": "x"}}, chat.Flags{})
	if err != nil {
		t.Fatal(err)
	}
	for version, want := range map[string]chat.Engine{
		"": {}, "main": {}, "0.5.23": {}, "0.6.0": {}, "0.5.22": {Older: true, Between: true}, "v0.5.18.post1": {Older: true, Between: true},
		"0.5.17": {Older: true}, "0.4.9": {Older: true},
	} {
		want.Profile = chat.SGLang
		r.SetVersion(version)
		if got := r.Engine(); got != want {
			t.Errorf("%q: %+v, want %+v", version, got, want)
		}
	}
}
