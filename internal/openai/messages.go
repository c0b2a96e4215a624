// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"strings"
	"unicode/utf8"
)

// A request of /v1/messages becomes the chat that vLLM makes of it: what is said
// as the system is one message at the front, what a tool found is a message before
// the one that it came in, and what an assistant thought and called belongs to its
// message.

// billing begins a text that one client puts before its system prompt. It is
// another one each time; vLLM leaves it out.
const billing = "x-anthropic-billing-header"

// messagesChat fills in the chat that the fields of /v1/messages stand for.
func (f *fields) messagesChat(b *Body) {
	var c conversation
	system := texts(f.system)
	each(f.request.Messages, func(raw []byte) {
		if stringOr(member(raw, "role"), "") == "system" {
			system = append(system, texts(member(raw, "content"))...)
		}
	})
	if len(system) > 0 {
		c.messages = append(c.messages, message{role: `"system"`, content: join(system, "")})
	}
	each(f.request.Messages, c.turn)
	b.Messages = c.json()
	b.Tools = c.messagesTools(f.request.Tools)
	b.ToolChoice = nil // what it may be has no effect on the prompt
	b.ReasoningEffort = member(f.outputConfig, "effort")
	b.Inexact = c.inexact
}

// texts returns the texts of a string or of a list of blocks, as raw strings.
func texts(content []byte) (list [][]byte) {
	if content != nil && content[0] == '"' {
		if len(content) > 2 {
			list = append(list, content)
		}
		return list
	}
	each(content, func(block []byte) {
		text := member(block, "text")
		if stringOr(member(block, "type"), "") == "text" && stringOr(text, "") != "" && !strings.HasPrefix(stringOr(text, ""), billing) {
			list = append(list, text)
		}
	})
	return list
}

// join returns raw strings as one.
func join(list [][]byte, between string) []byte {
	out := []byte{'"'}
	for i, s := range list {
		if i > 0 {
			out = append(out, between...)
		}
		out = append(out, s[1:len(s)-1]...)
	}
	return append(out, '"')
}

// each calls take for the elements of a list; anything else has none.
func each(list []byte, take func(value []byte)) {
	if list != nil && list[0] == '[' {
		s := scanner{in: list}
		_ = s.list(take) // scanned before, so there is no error
	}
}

// turn adds one message.
func (c *conversation) turn(raw []byte) {
	role, content := member(raw, "role"), member(raw, "content")
	user := stringOr(role, "") == "user"
	switch {
	case stringOr(role, "") == "system":
		return
	case role == nil || content == nil || content[0] != '"' && content[0] != '[':
		c.foreign(raw)
		return
	case content[0] == '"':
		c.messages = append(c.messages, message{role: string(role), content: content})
		return
	}
	m := message{role: string(role)}
	var parts, thoughts [][]byte
	each(content, func(block []byte) {
		text := member(block, "text")
		switch kind := stringOr(member(block, "type"), ""); {
		case kind == "text" && text != nil:
			if len(text) > 2 {
				parts = append(parts, block)
			}
		case kind == "image":
			parts = append(parts, block)
		case kind == "thinking" && stringOr(member(block, "thinking"), "\x00") != "\x00":
			thoughts = append(thoughts, member(block, "thinking"))
		case kind == "redacted_thinking":
		case kind == "tool_use":
			m.calls = append(m.calls, c.use(block))
		case kind == "tool_result" && user:
			c.found(block)
		default:
			c.foreign(block)
		}
	})
	if len(thoughts) > 0 {
		m.reasoning = join(thoughts, "")
	}
	switch {
	case len(parts) == 1 && stringOr(member(parts[0], "type"), "") == "text":
		m.content = member(parts[0], "text")
	case len(parts) > 0:
		m.content = []byte{'['}
		for i, p := range parts {
			if i > 0 {
				m.content = append(m.content, ',')
			}
			m.content = append(m.content, p...)
		}
		m.content = append(m.content, ']')
	case user:
		return
	}
	c.messages = append(c.messages, m)
}

// use returns a call of a tool in the form of chats.
func (c *conversation) use(block []byte) []byte {
	if !utf8.Valid(block) {
		c.unknown(BadText)
	}
	or := func(name, def string) []byte {
		if v := member(block, name); v != nil {
			return v
		}
		return []byte(def)
	}
	call := append([]byte(`{"id":`), or("id", `""`)...)
	call = append(append(call, `,"type":"function","function":{"name":`...), or("name", `""`)...)
	return append(append(append(call, `,"arguments":`...), quote(or("input", "{}"))...), "}}"...)
}

// found adds what a tool found: its texts, and behind them its images.
func (c *conversation) found(block []byte) {
	content := member(block, "content")
	id := member(block, "tool_use_id")
	if id == nil {
		id = []byte(`""`)
	}
	text := content
	var images [][]byte
	if text == nil || text[0] != '"' {
		var list [][]byte
		each(content, func(part []byte) {
			switch t := member(part, "text"); stringOr(member(part, "type"), "") {
			case "text":
				if t != nil && t[0] == '"' {
					list = append(list, t)
				}
			case "image":
				images = append(images, part)
			default:
				c.unknown(NoRenderer)
			}
		})
		text = join(list, `\n`)
	}
	c.messages = append(c.messages, message{role: `"tool"`, content: text, answers: id})
	if len(images) > 0 {
		m := message{role: `"user"`, content: []byte{'['}}
		for i, image := range images {
			if i > 0 {
				m.content = append(m.content, ',')
			}
			m.content = append(m.content, image...)
		}
		m.content = append(m.content, ']')
		c.messages = append(c.messages, m)
	}
}

// unknown notes why the chat is not all that the engine makes its prompt of.
func (c *conversation) unknown(why string) {
	if c.inexact == "" {
		c.inexact = why
	}
}

// messagesTools returns the tools in the form that chats have them in.
func (c *conversation) messagesTools(raw []byte) []byte {
	if raw == nil || raw[0] != '[' || !filled(raw) {
		return nil
	}
	out := []byte{'['}
	each(raw, func(tool []byte) {
		if len(out) > 1 {
			out = append(out, ',')
		}
		name := member(tool, "name")
		if kind := stringOr(member(tool, "type"), "custom"); name == nil || kind != "custom" && kind != "function" {
			c.unknown(NoRenderer)
			if tool == nil {
				tool = []byte("null")
			}
			out = append(out, tool...)
			return
		}
		out = append(append(out, `{"type":"function","function":{"name":`...), name...)
		for _, f := range [][2]string{{"description", "description"}, {"input_schema", "parameters"}} {
			value := member(tool, f[0])
			if value == nil {
				value = []byte("null")
			}
			out = append(append(out, `,"`+f[1]+`":`...), value...)
		}
		out = append(out, "}}"...)
	})
	return append(out, ']')
}
