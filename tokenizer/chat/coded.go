// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"slices"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// The common part of prompts that engines make in code instead of with a template.

// checked returns the messages as the client sent them, if the engine accepts them.
func (c *conversation) checked() []jinja.Value {
	if string(c.ContinueFinalMessage) == "true" && string(c.AddGenerationPrompt) == "true" {
		refuse("continue_final_message and add_generation_prompt")
	}
	list := c.messageList()
	for i, m := range list {
		if c.API == Messages {
			m = withPythonArguments(m)
			list[i] = m
		}
		c.normal(i, m, false)
	}
	return list
}

// withPythonArguments returns a message of [Messages] with the arguments of calls as the engine writes them: by
// Python's json.dumps.
func withPythonArguments(m jinja.Value) jinja.Value {
	calls := m.Get("tool_calls").Items()
	if len(calls) == 0 {
		return m
	}
	out := make([]jinja.Value, len(calls))
	for i, call := range calls {
		arguments := textAt(call.Get("function"), "arguments")
		text, err := jinja.AppendASCII(nil, parse("arguments", []byte(arguments)))
		if err != nil {
			panic(&refusal{err})
		}
		function, full := call.Get("function").Dict().Clone(), call.Dict().Clone()
		function.Set("arguments", jinja.String(string(text)))
		full.Set("function", jinja.FromDict(function))
		out[i] = jinja.FromDict(full)
	}
	full := m.Dict().Clone()
	full.Set("tool_calls", jinja.List(out...))
	return jinja.FromDict(full)
}

// effort returns the reasoning effort that the request asks for, "" if none.
func (c *conversation) effort(known ...string) string {
	if c.ReasoningEffort == nil {
		return ""
	}
	text, ok := c.mapped(parse("reasoning_effort", c.ReasoningEffort)).Text()
	if !ok || !slices.Contains(known, text) {
		refuse("reasoning_effort is not one of %q", known)
	}
	return text
}

// textAt returns the text at a key of a message or a part of one; "" if there is none.
func textAt(v jinja.Value, key string) string {
	text, _ := v.Get(key).Text()
	return text
}

// call is a call of a tool in a message of the assistant.
type call struct{ id, name, arguments string }

func callsOf(m jinja.Value) (calls []call) {
	for _, x := range m.Get("tool_calls").Items() {
		f := x.Get("function")
		calls = append(calls, call{textAt(x, "id"), textAt(f, "name"), textAt(f, "arguments")})
	}
	return calls
}
