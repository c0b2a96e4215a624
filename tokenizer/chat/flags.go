// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Flags are flags of the engine that change prompts. The zero value has the engine's defaults. The fields have the
// names of vLLM's flags.
type Flags struct {
	// DefaultKwargs is --default-chat-template-kwargs: a JSON object, or nil.
	DefaultKwargs []byte
	// ExcludeTools is --exclude-tools-when-tool-choice-none.
	ExcludeTools bool
	// ContentFormat is --chat-template-content-format: string, openai, or auto, which is the default.
	ContentFormat string
	// EffortMap is --reasoning-effort-map: the efforts for the template by those of requests.
	EffortMap map[string]string
	// DisabledEffort is --anthropic-disabled-thinking-effort: an effort, or auto, which is the default.
	DisabledEffort string
}

// efforts are the reasoning efforts of Anthropic's API.
//
//nolint:gochecknoglobals // a table
var efforts = strings.Fields("low medium high xhigh max")

// check returns an error for a value that the engine's flag does not have.
func (f *Flags) check() error {
	if f.DefaultKwargs != nil {
		if v, err := jinja.FromJSON(f.DefaultKwargs); err != nil || v.Dict() == nil {
			return fmt.Errorf("default-chat-template-kwargs is not an object: %s", f.DefaultKwargs)
		}
	}
	if !slices.Contains([]string{"", "auto", "string", "openai"}, f.ContentFormat) {
		return fmt.Errorf("chat-template-content-format is %q, want auto, string or openai", f.ContentFormat)
	}
	if e := f.DisabledEffort; e != "" && e != "auto" && e != "none" && !slices.Contains(efforts, e) {
		return fmt.Errorf("anthropic-disabled-thinking-effort is %q, want auto, none, %s", e, strings.Join(efforts, ", "))
	}
	return nil
}

// mapped returns the effort that the template gets.
func (c *conversation) mapped(effort jinja.Value) jinja.Value {
	if text, ok := effort.Text(); ok {
		if to, ok := c.flags.EffortMap[text]; ok {
			return jinja.String(to)
		}
	}
	return effort
}

// setKwargs adds the values of a request's chat_template_kwargs, or of the engine's, to the variables. vLLM treats null and
// "auto" as absent. It reports whether enable_thinking is among them, with any value.
func (c *conversation) setKwargs(name string, span []byte) (thinking bool) {
	if span == nil {
		return false
	}
	d := parse(name, span).Dict()
	if d == nil {
		refuse("%s is not an object", name)
	}
	for name, value := range d.All() {
		text, _ := value.Text()
		thinking = thinking || name == "enable_thinking"
		if absent := c.profile == VLLM && (value.IsNone() || text == "auto"); !absent && name != "messages" && name != "chat_template" {
			c.vars.Set(name, value)
		}
	}
	return thinking
}

// mergesSystem reports whether the engine puts the system turns of [Messages] into one message in front: if the template
// fails for a turn that is not the first. vLLM tries it in an environment without the functions of transformers.
func mergesSystem(t template) bool {
	if t.Template == nil || t.generation {
		return true
	}
	message := func(role string) jinja.Value { return jinja.Object("role", role, "content", "t") }
	vars := jinja.NewDict(4)
	vars.Set("messages", jinja.List(message("system"), message("user"), message("system"), message("user")))
	vars.Set("add_generation_prompt", jinja.Bool(false))
	vars.Set("raise_exception", jinja.Value{})
	vars.Set("strftime_now", jinja.Value{})
	_, err := t.Render(nil, vars, jinja.Options{})
	return err != nil
}

// mergedSystem returns messages with the texts of all system turns in one message in front.
func mergedSystem(list []jinja.Value) []jinja.Value {
	var texts []string
	var others []jinja.Value
	for _, m := range list {
		if textAt(m, "role") == "system" {
			texts = append(texts, textAt(m, "content"))
		} else {
			others = append(others, m)
		}
	}
	if len(texts) == 0 {
		return list
	}
	return append([]jinja.Value{jinja.Object("role", "system", "content", strings.Join(texts, ""))}, others...)
}

// disabledEffort returns the effort for disabled thinking: none, or low if the template refuses none or treats it as
// another effort.
func (r *Renderer) disabledEffort() string {
	if e := r.flags.DisabledEffort; e != "" && e != "auto" {
		return e
	}
	render := func(effort string) (string, bool) {
		t, err := r.Render(nil, Request{Messages: []byte(`[{"role":"user","content":"Hi"}]`), ReasoningEffort: []byte(`"` + effort + `"`)}, time.Time{})
		return string(t.Text), err == nil
	}
	none, ok := render("none")
	if !ok {
		return "low"
	}
	for _, effort := range efforts {
		if text, ok := render(effort); ok && text == none {
			return "low"
		}
	}
	return "none"
}
