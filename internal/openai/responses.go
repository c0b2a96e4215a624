// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"unicode/utf8"
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
	b.Messages = c.json()
	b.Tools = c.tools(f.get("tools"), c.responsesFunction)
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
	case kind == "function_call" && item.member("namespace") == nil:
		if !c.addCall(item.member("call_id"), item.member("name"), item.member("arguments")) {
			c.addForeign(item)
		}
	case kind == "function_call_output":
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

// responsesFunction returns a tool's function, which is the tool without its type; nil for another
// kind of tool.
func (c *conversation) responsesFunction(tool value) value {
	if tool.textAt("type") != "function" {
		return nil
	}
	out := value{'{'}
	tool.members(func(name []byte, v value) {
		if string(name) == "type" {
			return
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
