// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// effortTemplate is plainTemplate for a model that reads a reasoning effort, "none", too.
const effortTemplate = `{% if reasoning_effort is defined and reasoning_effort == "none" %}no effort at all. {% elif reasoning_effort %}the effort is {{ reasoning_effort }}. {% endif %}` + plainTemplate

// Each conversion of a client's body that the engine makes otherwise is found within ten requests of its class, among
// requests of another class, and on each path.
func TestBrokenReadingsAreFound(t *testing.T) {
	// replace returns an engine that reads another text in the messages or tools.
	replace := func(pairs ...string) func(*router.Prompt) {
		return func(p *router.Prompt) {
			span, r := &p.Messages, strings.NewReplacer(pairs...)
			if p.Tools != nil {
				span = &p.Tools
			}
			if !strings.Contains(string(*span), pairs[0]) {
				t.Errorf("%s is not in %s", pairs[0], *span)
			}
			*span, p.Parsed = []byte(r.Replace(string(*span))), nil
		}
	}
	const (
		text       = "of several blocks of tokens"
		parameters = `{"type":"object","properties":{}}`
	)
	user := `{"role":"user","content":"question N ` + text + `"}`
	for _, c := range []struct {
		name, path, class, body string
		engine                  func(p *router.Prompt)
	}{
		{
			"the order of a tool's keys", "/v1/chat/completions", "chat+tools",
			`"messages":[` + user + `],"tools":[{"type":"function","function":{"name":"f","parameters":` + parameters + `}}]`,
			replace(`"type":"object","properties":{}`, `"properties":{},"type":"object"`),
		},
		{
			"the order of a tool's keys", "/v1/messages", "messages+tools",
			`"messages":[` + user + `],"tools":[{"name":"f","input_schema":` + parameters + `}]`,
			replace(`"type":"object","properties":{}`, `"properties":{},"type":"object"`),
		},
		{
			"the last assistant message", "/v1/chat/completions", "chat",
			`"messages":[` + user + `,{"role":"assistant","content":"The answer is"}]`,
			replace(`{"role":"assistant"`, `{"role":"assistant","content":""},{"role":"assistant"`),
		},
		{
			"a system turn in its place", "/v1/messages", "messages+system_inside",
			`"messages":[` + user + `,{"role":"system","content":"a rule"},` + user + `]`,
			func(p *router.Prompt) {
				system := `,{"role":"system","content":"a rule"}`
				if !strings.Contains(string(p.Messages), system) {
					t.Errorf("no system turn in %s", p.Messages)
				}
				p.Messages, p.Parsed = []byte("["+system[1:]+","+strings.Replace(string(p.Messages[1:]), system, "", 1)), nil
			},
		},
		{
			"thinking: disabled", "/v1/messages", "messages+reasoning",
			`"messages":[` + user + `],"thinking":{"type":"disabled"}`,
			func(p *router.Prompt) { p.NoThinking = false },
		},
		{
			"strict", "/v1/messages", "messages+tools",
			`"messages":[` + user + `],"tools":[{"name":"f","input_schema":` + parameters + `,"strict":true}]`,
			replace(`,"strict":true`, ``),
		},
		{
			"strict", "/v1/responses", "responses+tools",
			`"input":"question N ` + text + `","tools":[{"type":"function","name":"f","parameters":` + parameters + `,"strict":true}]`,
			replace(`,"strict":true`, ``),
		},
		{
			"defer_loading", "/v1/chat/completions", "chat+tools",
			`"messages":[` + user + `],"tools":[{"type":"function","function":{"name":"f","parameters":` + parameters + `,"defer_loading":true}}]`,
			replace(`,"defer_loading":true`, ``),
		},
		{
			"defer_loading", "/v1/messages", "messages+tools",
			`"messages":[` + user + `],"tools":[{"name":"f","input_schema":` + parameters + `,"defer_loading":true}]`,
			replace(`,"defer_loading":true`, ``),
		},
		{
			"default kwargs", "/v1/chat/completions", "chat", `"messages":[` + user + `]`,
			func(p *router.Prompt) { p.ChatTemplateKwargs = []byte(`{"enable_thinking":false}`) },
		},
		{
			"default kwargs", "/v1/responses", "responses", `"input":"question N ` + text + `"`,
			func(p *router.Prompt) { p.ChatTemplateKwargs = []byte(`{"enable_thinking":false}`) },
		},
		{
			"reasoning_effort", "/v1/chat/completions", "chat+reasoning", `"messages":[` + user + `],"reasoning_effort":"low"`,
			func(p *router.Prompt) { p.ReasoningEffort = nil },
		},
		{
			"reasoning_effort", "/v1/responses", "responses+reasoning", `"input":"question N ` + text + `","reasoning":{"effort":"low"}`,
			func(p *router.Prompt) { p.ReasoningEffort = nil },
		},
	} {
		name := c.path + ": " + c.name
		s := newStoringOf(t, 2, effortTemplate, effortTemplate)
		requests := 0
		for ; !s.class(c.class).Unconfirmed; requests++ {
			if requests == 10 {
				t.Errorf("%s is not found by 10 requests: %+v", name, s.r.Models()[0].Classes)
				break
			}
			send := func(path, body string, engine func(p *router.Prompt)) {
				endpoint, _ := openai.Classify(http.MethodPost, path)
				b, bad := openai.Parse(endpoint, []byte(strings.ReplaceAll(`{"model":"m","max_tokens":9,`+body+`}`, "question N", fmt.Sprint("question ", requests))))
				if bad != nil {
					t.Fatalf("%s: %s", name, bad.Message)
				}
				s.reads = engine
				if d := s.request(b.Request); d.TokenMode != tokenizer.Exact {
					t.Errorf("%s: %s, %s", name, d.TokenMode, d.TokenReason)
				}
			}
			send("/v1/completions", `"prompt":"question N of another class, of several blocks"`, nil)
			send(c.path, c.body, c.engine)
		}
		if k := s.class(c.class); k.Position < 0 || k.Ours == k.Theirs {
			t.Errorf("%s: the token is not known: %+v", name, k)
		}
		for _, k := range s.r.Models()[0].Classes {
			if k.Unconfirmed != (k.Class == c.class) || k.Class != c.class && k.Class != "completions" {
				t.Errorf("%s: %+v", name, k)
			}
		}
	}
}
