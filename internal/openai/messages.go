// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// A request of /v1/messages becomes the chat that vLLM makes of it. System turns stay where they are: only the
// model's template decides whether they must be in front. A tool's result is a message before the one that has it.
// Thoughts and tool calls of the assistant belong to its message.

// billing begins a text that one client puts before its system prompt. It differs in each
// request, so vLLM drops it.
const billing = "x-anthropic-billing-header"

// messagesChat makes the chat of the fields of /v1/messages.
func (f *fields) messagesChat(b *Body) {
	var c conversation
	c.addSystem(systemTexts(f.get("system")))
	f.get("messages").each(c.addTurn)
	b.API = chat.Messages
	b.Messages = c.json()
	b.Tools = c.tools(f.get("tools"), messagesFunction)
	b.ToolChoice = nil // but for none it has no effect on the prompt
	if f.get("tool_choice").textAt("type") == "none" {
		b.ToolChoice = []byte(`"none"`)
	}
	b.ReasoningEffort = f.get("output_config").member("effort")
	b.NoThinking = f.get("thinking").textAt("type") == "disabled"
	b.Inexact = c.inexact
}

// addSystem adds a system turn of several texts, if there is one.
func (c *conversation) addSystem(texts []value) {
	if len(texts) > 0 {
		c.add(message{role: value(system), content: join(texts, "")})
	}
}

// systemTexts returns the texts of a string or of a list of blocks that are not empty.
func systemTexts(content value) (texts []value) {
	if content.kind() == '"' {
		if len(content) > len(`""`) {
			texts = append(texts, content)
		}
		return texts
	}
	content.each(func(block value) {
		text := block.member("text")
		if t := text.textOr(""); block.textAt("type") == "text" && t != "" && !strings.HasPrefix(t, billing) {
			texts = append(texts, text)
		}
	})
	return texts
}

// addTurn adds a message of the request.
func (c *conversation) addTurn(turn value) {
	role, content := turn.member("role"), turn.member("content")
	switch {
	case role.textOr("") == "system":
		c.addSystemTurn(content)
	case role != nil && content.kind() == '"':
		c.add(message{role: role, content: content})
	case role != nil && content.kind() == '[':
		c.addBlocks(role, content)
	default:
		c.addForeign(turn)
	}
}

// addSystemTurn adds a system turn between the others.
func (c *conversation) addSystemTurn(content value) {
	if content.kind() == '"' && strings.HasPrefix(content.textOr(""), billing) {
		return
	}
	content.each(func(block value) {
		if kind := block.textAt("type"); kind == "tool_addition" || kind == "tool_removal" {
			c.setInexact(NoRenderer)
		}
	})
	c.addSystem(systemTexts(content))
}

// addBlocks adds the blocks of a message.
func (c *conversation) addBlocks(role, blocks value) {
	isUser := role.textOr("") == "user"
	m := message{role: role}
	var parts, thoughts []value
	blocks.each(func(block value) {
		text, thought := block.member("text"), block.member("thinking")
		switch kind := block.textAt("type"); {
		case kind == "text" && text != nil:
			if len(text) > len(`""`) {
				parts = append(parts, block)
			}
		case kind == "image":
			parts = append(parts, block)
		case kind == "thinking" && thought.kind() == '"':
			thoughts = append(thoughts, thought)
		case kind == "redacted_thinking":
		case kind == "tool_use":
			m.calls = append(m.calls, c.toolUse(block))
		case kind == "tool_result" && isUser:
			c.addToolResult(block)
		default:
			c.addForeign(block)
		}
	})
	if len(thoughts) > 0 {
		m.reasoning = join(thoughts, "")
	}
	switch {
	case len(parts) == 1 && parts[0].textAt("type") == "text":
		m.content = parts[0].member("text")
	case len(parts) > 0:
		m.content = list(parts)
	case isUser:
		return
	}
	c.add(m)
}

// toolUse returns a call of a tool in the form of chats.
func (c *conversation) toolUse(block value) value {
	if !utf8.Valid(block) {
		c.setInexact(BadText)
	}
	return object(field{"id", block.member("id").or(`""`)}, field{"type", value(`"function"`)}, field{"function", object(
		field{"name", block.member("name").or(`""`)}, field{"arguments", quote(block.member("input").or("{}"))},
	)})
}

// addToolResult adds the result of a tool: its texts, and then its images.
func (c *conversation) addToolResult(block value) {
	content := block.member("content")
	var images []value
	if content.kind() != '"' {
		var texts []value
		content.each(func(part value) {
			switch text := part.member("text"); part.textAt("type") {
			case "text":
				if text.kind() == '"' {
					texts = append(texts, text)
				}
			case "image":
				images = append(images, part)
			case "tool_reference": // the template expands it
				c.setInexact(NoRenderer)
			}
		})
		content = join(texts, `\n`)
	}
	c.add(message{role: value(tool), content: content, callID: block.member("tool_use_id").or(`""`)})
	if len(images) > 0 {
		c.add(message{role: value(user), content: list(images)})
	}
}

// messagesFunction returns a tool's function, nil for a tool that the engine refuses. The type of a tool has no effect.
func messagesFunction(tool value) value {
	name, schema := tool.member("name"), tool.member("input_schema")
	if name == nil || schema.kind() != '{' {
		return nil
	}
	if !schema.has("type") {
		schema = slices.Concat(schema[:len(schema)-1], value(`"type":"object"}`))
		if members := len(schema) > len(`{"type":"object"}`); members {
			schema = slices.Insert(schema, len(schema)-len(`"type":"object"}`), ',')
		}
	}
	return object(field{"name", name}, field{"description", tool.member("description").or("null")}, field{"parameters", schema},
		field{"strict", tool.member("strict")}, field{"defer_loading", tool.member("defer_loading")})
}
