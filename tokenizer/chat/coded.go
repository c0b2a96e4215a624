// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"fmt"
	"slices"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// What the prompts that engines make in code, not by a template, have in common.

func (c *conversation) coded(q Request) (Text, error) {
	if c.r.mistral != nil {
		return c.r.mistral.render(c, q)
	}
	return c.r.harmony.render(c, q, c.now)
}

// checked returns the messages as the client sent them, once they are such that
// the engine accepts them.
func (c *conversation) checked(q Request) ([]*jinja.Dict, error) {
	if string(q.ContinueFinalMessage) == "true" && string(q.AddGenerationPrompt) == "true" {
		return nil, refused("continue_final_message and add_generation_prompt")
	}
	v, err := jinja.FromJSON(q.Messages)
	if err != nil {
		return nil, fmt.Errorf("messages: %w", err)
	}
	if len(v.Items()) == 0 {
		return nil, refused("messages is empty or no list")
	}
	list := make([]*jinja.Dict, len(v.Items()))
	for i, m := range v.Items() {
		if list[i] = m.Dict(); list[i] == nil {
			return nil, refused("messages[%d] is no object", i)
		}
		if _, err := c.message(list[i], false); err != nil {
			return nil, fmt.Errorf("messages[%d]: %w", i, err)
		}
	}
	return list, nil
}

// effortOf returns the reasoning effort that the request asks for, "" if none.
func effortOf(q Request, known []string) (string, error) {
	if q.ReasoningEffort == nil {
		return "", nil
	}
	v, err := jinja.FromJSON(q.ReasoningEffort)
	if err != nil {
		return "", fmt.Errorf("reasoning_effort: %w", err)
	}
	text, ok := v.Text()
	if !ok || !slices.Contains(known, text) {
		return "", refused("reasoning_effort is none of %q", known)
	}
	return text, nil
}

// call is a call of a tool in a message of the assistant.
type call struct{ id, name, arguments string }

func callsOf(d *jinja.Dict) []call {
	v, _ := d.Get("tool_calls")
	var out []call
	for _, x := range v.Items() {
		var c call
		c.id, _ = at(x, "id").Text()
		c.name, _ = at(at(x, "function"), "name").Text()
		c.arguments, _ = at(at(x, "function"), "arguments").Text()
		out = append(out, c)
	}
	return out
}

// thoughtOf returns what the assistant thought; ok is false if the client does not
// say.
func thoughtOf(d *jinja.Dict) (text string, ok bool) {
	for _, name := range []string{"reasoning", "reasoning_content"} {
		if v, given := d.Get(name); given && !v.IsNone() {
			text, ok = v.Text()
			return text, ok
		}
	}
	return "", false
}
