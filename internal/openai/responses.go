// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"slices"
	"unicode/utf8"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// A request of /v1/responses becomes the chat that vLLM makes of it. The instructions are
// a system message, a string is a user message, items are messages. Consecutive thoughts,
// texts and calls of the assistant are one message.

// responsesChat makes the chat of the fields of /v1/responses.
func (f *fields) responsesChat(b *Body) *Error {
	var c conversation
	for _, name := range [...]string{"previous_response_id", "conversation", "previous_input_messages"} {
		if f.get(name) != nil {
			c.setInexact(NoHistory)
		}
	}
	if instructions := f.get("instructions"); instructions != nil && string(instructions) != `""` {
		c.add(message{role: value(system), content: instructions})
	}
	input := f.get("input")
	switch input.kind() {
	case 0:
		return bad("input", "you must provide input")
	case '"':
		c.add(message{role: value(user), content: input})
	case '[':
		input.each(c.addItem)
	default:
		return bad("input", "input must be a string or a list of items")
	}
	b.API = chat.Responses
	b.Instructions, b.Input = f.get("instructions"), input
	b.Messages = c.json()
	b.Tools = c.responsesTools(f.get("tools"))
	b.ReasoningEffort = f.get("reasoning").member("effort")
	b.TruncatePromptTokens, b.TruncationSide = nil, nil
	if f.text(f.get("truncation"), "truncation") == "auto" {
		b.TruncatePromptTokens = []byte("-1")
	}
	if value(b.ToolChoice).kind() != '"' {
		b.ToolChoice = nil
	}
	if c.resume {
		b.ContinueFinalMessage, b.AddGenerationPrompt = []byte("true"), []byte("false")
	}
	b.Inexact = c.inexact
	return nil
}

// addItem adds an element of the input.
func (c *conversation) addItem(item value) {
	if item.kind() != '{' {
		c.addForeign(item)
		return
	}
	c.resume = false
	role, status := item.member("role"), item.textAt("status")
	unfinished := status == "in_progress" || status == "incomplete"
	switch kind := item.member("type").textOr("message"); {
	case kind == "function_call":
		name := item.member("name")
		if space := item.textAt("namespace"); space != "" && name.kind() == '"' {
			name = flatName(space, name)
		}
		if !c.addCall(item.member("call_id"), name, item.member("arguments")) {
			c.addForeign(item)
		}
	case kind == "custom_tool_call":
		arguments := quote(slices.Concat([]byte(`{"input": `), item.member("input").or(`""`), []byte{'}'}))
		if !c.addCall(item.member("call_id"), item.member("name"), arguments) {
			c.addForeign(item)
		}
	case kind == "function_call_output", kind == "custom_tool_call_output":
		c.add(message{role: value(tool), content: item.member("output"), callID: item.member("call_id")})
	case kind == "reasoning" && item.member("encrypted_content") == nil:
		c.addReasoning(item)
		c.resume = unfinished
	case kind == "message" && role != nil:
		c.addMessage(role, item.member("content"))
		c.resume = unfinished
	default:
		c.addForeign(item)
	}
}

// addCall adds a call of a function. It reports whether the call is complete.
func (c *conversation) addCall(id, name, arguments value) bool {
	if id == nil || name == nil || arguments == nil {
		return false
	}
	m := c.lastAssistant()
	if m == nil {
		m = c.add(message{role: value(assistant)})
	}
	function := object(field{"name", name}, field{"arguments", arguments})
	m.calls = append(m.calls, object(field{"id", id}, field{"function", function}, field{"type", value(`"function"`)}))
	return true
}

// addReasoning adds the assistant's thoughts.
func (c *conversation) addReasoning(item value) {
	text := firstText(item.member("content"))
	if text == nil {
		text = firstText(item.member("summary")).or(`""`)
	}
	m := c.lastAssistant()
	if m == nil || m.reasoning != nil {
		m = c.add(message{role: value(assistant)})
	}
	m.reasoning = text
}

// addMessage adds a message of any role.
func (c *conversation) addMessage(role, content value) {
	if role.textOr("") != "assistant" {
		c.add(message{role: role, content: chatParts(content)})
		return
	}
	text := firstText(content)
	if text == nil {
		text = chatParts(content)
	}
	m := c.lastAssistant()
	if m == nil || m.content != nil {
		m = c.add(message{role: value(assistant)})
	}
	m.content = text
}

// firstText returns the text of the first part of a list, nil if it has none.
func firstText(parts value) value { return parts.first().member("text") }

// chatParts returns a content with the parts' types as chats call them.
func chatParts(content value) value {
	if content.kind() != '[' {
		return content
	}
	var parts []value
	content.each(func(part value) {
		text := part.member("text")
		if kind := part.textAt("type"); text != nil && (kind == "input_text" || kind == "output_text") {
			part = object(field{"type", value(`"text"`)}, field{"text", text})
		}
		parts = append(parts, part)
	})
	return list(parts)
}

// customParameters is the schema with which a model sees a custom tool.
const customParameters = `{"type":"object","properties":{"input":{"type":"string","description":"The freeform text payload for this tool."}},` +
	`"required":["input"],"additionalProperties":false}`

// responsesTools returns the tools that the model sees, nil if the request has none. The functions of a namespace are
// tools of their own. The model sees no tool that the engine runs itself.
func (c *conversation) responsesTools(tools value) value {
	if !tools.filled() {
		return nil
	}
	var all []value
	tools.each(func(tool value) {
		switch tool.textAt("type") {
		case "function":
			all = append(all, asFunction(c.responsesFunction(tool, "")))
		case "custom":
			all = append(all, asFunction(object(field{"name", tool.member("name")}, field{"description", tool.member("description").or("null")},
				field{"parameters", value(customParameters)})))
		case "namespace":
			tool.member("tools").each(func(inner value) {
				if inner.textAt("type") == "function" {
					all = append(all, asFunction(c.responsesFunction(inner, tool.textAt("name"))))
				}
			})
		}
	})
	return list(all)
}

// flatName returns the name of a function of a namespace.
func flatName(space string, name value) value { return quote([]byte(space + "__" + name.textOr(""))) }

// responsesFunction returns a tool's function, which is the tool without its type.
func (c *conversation) responsesFunction(tool value, space string) value {
	out := value{'{'}
	tool.members(func(name []byte, v value) {
		if string(name) == "type" {
			return
		}
		if string(name) == "name" && space != "" {
			v = flatName(space, v)
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		if bytes.ContainsRune(name, utf8.RuneError) {
			c.inexact = BadText // it may replace bytes that are not UTF-8
		}
		out = append(append(append(out, quote(name)...), ':'), v.or("null")...)
	})
	return append(out, '}')
}
