// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

const (
	plainChat   = `{"messages":[{"role":"user","content":"hi"}]}`
	chatOfTools = `{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f"}}]}`
	resultChat  = `{"messages":[{"role":"user","content":"hi"},{"role":"tool","tool_call_id":"1","content":"x"}]}`
)

// Loading a model finds which of its chats cannot be exact, and where in the template. Each request has its own reason.
func TestTrials(t *testing.T) {
	const loop = "{% set l = range(9999) %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}"
	for _, c := range []struct {
		template    string
		usual       string // the reason of chats without tools
		why         string // "" if all chats are exact as far as is known
		tools, tool string // the reasons of chats with tools, and with a result
	}{
		{chatml, "", "", "", ""},
		{"\n{{ messages | random }}", tokenizer.Unsupported, "chats have no exact ids: chat_template cannot be used: line 2: the filter 'random'", tokenizer.Unsupported, tokenizer.Unsupported},
		{chatml + "{% if tools %}\n{{ tools | random }}{% endif %}", "", "chats with tools have no exact ids: chat_template cannot be used: line 5: the filter 'random'", tokenizer.Unsupported, ""},
		{chatml + "{% for m in messages %}{% if m.role == 'tool' %}{{ lipsum() }}{% endif %}{% endfor %}", "", "chats with results of tools have no exact ids: chat_template cannot be used: line 4: the function 'lipsum'", "", tokenizer.Unsupported},
		{chatml + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}", "", "", tokenizer.TemplateError, ""},
		{"{{ raise_exception('no') }}", "", "", tokenizer.TemplateError, tokenizer.TemplateError},
		{"{% include 'x' %}", "", "", tokenizer.TemplateError, tokenizer.TemplateError},
		{loop, tokenizer.Unsupported, "chats have no exact ids: chat_template cannot be used: line 1: more than 10000000 steps", tokenizer.Unsupported, tokenizer.Unsupported},
		{chatml + "{% if messages[0].content == 'b' %}{{ '\\N{BULLET}' }}{% endif %}", "", "", "", ""},
	} {
		for _, profile := range engine.Profiles() {
			m := modelWith(t, profile, map[string]string{"chat_template.jinja": c.template})
			mode, reason := m.Usual()
			if reason != c.usual || (mode == tokenizer.Exact) != (c.usual == "") || m.Degraded() != c.why {
				t.Errorf("%s, %q: mode %s, reason %q, %q; want %q, %q", profile, c.template, mode, reason, m.Degraded(), c.usual, c.why)
			}
			for body, want := range map[string]string{chatOfTools: c.tools, resultChat: c.tool} {
				if p := encodeChat(t, m, body); p.Reason != want || (p.Mode == tokenizer.Exact) != (want == "") {
					t.Errorf("%s, %q, %s: mode %s, reason %q; want %q", profile, c.template, body, p.Mode, p.Reason, want)
				}
			}
		}
	}
}

// A named template that cannot be read leaves the others as they are.
func TestANamedTemplateThatCannotBeRead(t *testing.T) {
	const bad = "line\n{% if %}"
	for _, c := range []struct {
		byDefault, tools string
		plain, withTools string // reasons
		usual, why       string
	}{
		{chatml, bad, "", tokenizer.NoRenderer, "", "chats with tools have no exact ids: chat_template tool_use cannot be used: line 2: unexpected"},
		{bad, chatml, tokenizer.NoRenderer, "", tokenizer.NoRenderer, "chats have no exact ids: chat_template cannot be used: line 2: unexpected"},
		{bad, bad, tokenizer.NoRenderer, tokenizer.NoRenderer, tokenizer.NoRenderer, "chat_template cannot be used: line 2: unexpected"},
		{chatml, chatml, "", "", "", ""},
	} {
		list := []map[string]string{{"name": "default", "template": c.byDefault}, {"name": "tool_use", "template": c.tools}, {"name": "rag", "template": bad}}
		config, _ := json.Marshal(map[string]any{"chat_template": list}) // cannot fail
		m := modelWith(t, engine.VLLM, map[string]string{"tokenizer_config.json": string(config)})
		if _, reason := m.Usual(); reason != c.usual || !strings.HasPrefix(m.Degraded(), c.why) || (c.why == "") != (m.Degraded() == "") {
			t.Errorf("%q, %q: reason %q, %q; want %q, %q", c.byDefault, c.tools, reason, m.Degraded(), c.usual, c.why)
		}
		if p, q := encodeChat(t, m, plainChat), encodeChat(t, m, chatOfTools); p.Reason != c.plain || q.Reason != c.withTools {
			t.Errorf("%q, %q: reasons %q and %q, want %q and %q", c.byDefault, c.tools, p.Reason, q.Reason, c.plain, c.withTools)
		}
	}
}

// A feature that no trial reaches is named once a request has reached it. Large arguments of a template are bounded.
func TestUnsupportedIsNamedByTheFirstRequest(t *testing.T) {
	m := modelWith(t, engine.VLLM, map[string]string{"chat_template.jinja": chatml + "\n{% if own %}{{ own * 1000 }}{% endif %}"})
	kwargs := `{"chat_template_kwargs":{"own":"` + strings.Repeat("x", 1<<20) + `"},` + plainChat[1:]
	if why := m.Degraded(); why != "" {
		t.Errorf("before: %s", why)
	}
	if p := encodeChat(t, m, kwargs); p.Mode != tokenizer.Bytes || p.Reason != tokenizer.Unsupported {
		t.Errorf("mode %s, reason %s", p.Mode, p.Reason)
	}
	if why := m.Degraded(); why != "some chats have no exact ids: chat_template cannot be used: line 5: a value of more than 12582912 bytes" {
		t.Errorf("afterwards: %s", why)
	}
	if mode, _ := m.Usual(); mode != tokenizer.Exact || encodeChat(t, m, plainChat).Mode != tokenizer.Exact {
		t.Errorf("other chats: mode %s", mode)
	}
}

// modelWith returns a model with a small tokenizer and files of its own.
func modelWith(t *testing.T, profile string, files map[string]string) *tokenizer.Model {
	t.Helper()
	vocabulary, err := os.ReadFile("testdata/golden/bytelevel-qwen2-nfc.json")
	if err != nil {
		t.Fatal(err)
	}
	fsys := fstest.MapFS{"tokenizer.json": {Data: vocabulary}}
	for name, text := range files {
		fsys[name] = &fstest.MapFile{Data: []byte(text)}
	}
	m, err := tokenizer.LoadModel(fsys, tokenizer.ModelConfig{Profile: chat.Profile(profile)})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func encodeChat(t *testing.T, m *tokenizer.Model, body string) tokenizer.Prompt {
	t.Helper()
	var q struct {
		Messages, Tools json.RawMessage
		Kwargs          json.RawMessage `json:"chat_template_kwargs"`
	}
	if err := json.Unmarshal([]byte(body), &q); err != nil {
		t.Fatal(err)
	}
	p, err := m.Encode(t.Context(), nil, chat.Request{Messages: q.Messages, Tools: q.Tools, ChatTemplateKwargs: q.Kwargs}, time.Unix(0, 0).UTC())
	if err != nil {
		t.Fatal(err)
	}
	return p
}
