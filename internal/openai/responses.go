// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"unicode/utf8"
)

// A request of /v1/responses becomes the chat that vLLM makes of it: the
// instructions are a system message, a string is a user message, items are
// messages; what an assistant thought, said and called in a row is one message.

// response fills in the chat that the fields of /v1/responses stand for.
func (f *fields) response(b *Body) *Error {
	var c conversation
	if f.elsewhere != nil {
		c.inexact = NoHistory
	}
	if filledString(f.instructions) {
		c.messages = append(c.messages, message{role: `"system"`, content: f.instructions})
	}
	switch {
	case f.input == nil:
		return bad("input", "you must provide input")
	case f.input[0] == '"':
		c.messages = append(c.messages, message{role: `"user"`, content: f.input})
	case f.input[0] == '[':
		s := scanner{in: f.input}
		_ = s.list(c.item) // scanned before, so there is no error
	default:
		return bad("input", "input must be a string or a list of items")
	}
	b.Messages = c.json()
	b.Tools = c.tools(f.request.Tools)
	b.ReasoningEffort = member(f.reasoning, "effort")
	if b.ToolChoice != nil && b.ToolChoice[0] != '"' {
		b.ToolChoice = nil
	}
	if c.resume {
		b.ContinueFinalMessage, b.AddGenerationPrompt = []byte("true"), []byte("false")
	}
	b.Inexact = c.inexact
	return nil
}

// message is a chat message of raw JSON; what is nil is left out.
type message struct {
	role                        string
	content, reasoning, answers []byte
	calls                       [][]byte
}

// conversation collects the messages that items stand for.
type conversation struct {
	messages []message
	resume   bool // the answer goes on with the last message
	inexact  string
}

// item is one element of the input.
type item struct {
	kind, role, content, status, callID, name, namespace, arguments, output, summary, encrypted []byte
}

func (i *item) take(name, value []byte) {
	for _, f := range []struct {
		name string
		at   *[]byte
	}{
		{"type", &i.kind},
		{"role", &i.role},
		{"content", &i.content},
		{"status", &i.status},
		{"call_id", &i.callID},
		{"name", &i.name},
		{"namespace", &i.namespace},
		{"arguments", &i.arguments},
		{"output", &i.output},
		{"summary", &i.summary},
		{"encrypted_content", &i.encrypted},
	} {
		if string(name) == f.name {
			*f.at = value
		}
	}
}

// item adds what an element of the input stands for.
func (c *conversation) item(raw []byte) {
	var i item
	if raw == nil || raw[0] != '{' {
		c.foreign(raw)
		return
	}
	s := scanner{in: raw}
	_ = s.object(i.take) // scanned before, so there is no error
	c.resume = false
	switch kind := stringOr(i.kind, "message"); {
	case kind == "function_call" && i.name != nil && i.callID != nil && i.arguments != nil && i.namespace == nil:
		c.call(&i)
	case kind == "function_call_output":
		c.messages = append(c.messages, message{role: `"tool"`, content: i.output, answers: i.callID})
	case kind == "reasoning" && i.encrypted == nil:
		c.reason(&i)
		c.resume = unfinished(i.status)
	case kind == "message" && i.role != nil:
		c.say(&i)
		c.resume = unfinished(i.status)
	default:
		c.foreign(raw)
	}
}

// foreign adds what only the engine can read.
func (c *conversation) foreign(raw []byte) {
	c.unknown(NoRenderer)
	if raw == nil {
		raw = []byte("null")
	}
	c.messages = append(c.messages, message{role: `"item"`, content: append(append([]byte{'['}, raw...), ']')})
}

func unfinished(status []byte) bool {
	s := stringOr(status, "")
	return s == "in_progress" || s == "incomplete"
}

// assistant returns the last message if it is the assistant's, else nil.
func (c *conversation) assistant() *message {
	if n := len(c.messages); n > 0 && c.messages[n-1].role == `"assistant"` {
		return &c.messages[n-1]
	}
	return nil
}

func (c *conversation) call(i *item) {
	m := c.assistant()
	if m == nil {
		c.messages = append(c.messages, message{role: `"assistant"`})
		m = c.assistant()
	}
	call := append([]byte(`{"id":`), i.callID...)
	call = append(append(call, `,"function":{"name":`...), i.name...)
	call = append(append(call, `,"arguments":`...), i.arguments...)
	m.calls = append(m.calls, append(call, `},"type":"function"}`...))
}

func (c *conversation) reason(i *item) {
	text := firstText(i.content)
	if text == nil {
		text = firstText(i.summary)
	}
	if text == nil {
		text = []byte(`""`)
	}
	if m := c.assistant(); m != nil && m.reasoning == nil {
		m.reasoning = text
		return
	}
	c.messages = append(c.messages, message{role: `"assistant"`, reasoning: text})
}

func (c *conversation) say(i *item) {
	if stringOr(i.role, "") != "assistant" {
		c.messages = append(c.messages, message{role: string(i.role), content: chatParts(i.content)})
		return
	}
	text := i.content
	if text != nil && text[0] == '[' {
		if text = firstText(i.content); text == nil {
			text = chatParts(i.content)
		}
	}
	if m := c.assistant(); m != nil && m.content == nil {
		m.content = text
		return
	}
	c.messages = append(c.messages, message{role: `"assistant"`, content: text})
}

// firstText returns the text of the first part of a list, nil if it has none.
func firstText(list []byte) (text []byte) {
	if list == nil || list[0] != '[' {
		return nil
	}
	s, seen := scanner{in: list}, false
	_ = s.list(func(part []byte) { // scanned before, so there is no error
		if !seen {
			text, seen = member(part, "text"), true
		}
	})
	return text
}

// chatParts returns a content with the parts' types as chats call them.
func chatParts(content []byte) []byte {
	if content == nil || content[0] != '[' {
		return content
	}
	out := []byte{'['}
	s := scanner{in: content}
	_ = s.list(func(part []byte) { // scanned before, so there is no error
		if len(out) > 1 {
			out = append(out, ',')
		}
		text := member(part, "text")
		switch kind := stringOr(member(part, "type"), ""); {
		case (kind == "input_text" || kind == "output_text") && text != nil:
			out = append(append(append(out, `{"type":"text","text":`...), text...), '}')
		case part == nil:
			out = append(out, "null"...)
		default:
			out = append(out, part...)
		}
	})
	return append(out, ']')
}

// json returns the messages as a list.
func (c *conversation) json() []byte {
	out := []byte{'['}
	for i := range c.messages {
		if i > 0 {
			out = append(out, ',')
		}
		m := &c.messages[i]
		out = append(append(out, `{"role":`...), m.role...)
		if m.content != nil {
			out = append(append(out, `,"content":`...), m.content...)
		}
		if m.reasoning != nil {
			out = append(append(out, `,"reasoning":`...), m.reasoning...)
		}
		if m.answers != nil {
			out = append(append(out, `,"tool_call_id":`...), m.answers...)
		}
		for j, call := range m.calls {
			if j == 0 {
				out = append(out, `,"tool_calls":[`...)
			} else {
				out = append(out, ',')
			}
			out = append(out, call...)
		}
		if len(m.calls) > 0 {
			out = append(out, ']')
		}
		out = append(out, '}')
	}
	return append(out, ']')
}

// tools returns the tools in the form that chats have them in. Those that are no
// functions run at the engine, which tells of them in its own words.
func (c *conversation) tools(raw []byte) []byte {
	if raw == nil || raw[0] != '[' || !filled(raw) {
		return nil
	}
	out := []byte{'['}
	s := scanner{in: raw}
	_ = s.list(func(tool []byte) { // scanned before, so there is no error
		if len(out) > 1 {
			out = append(out, ',')
		}
		if tool == nil || stringOr(member(tool, "type"), "") != "function" {
			c.unknown(NoRenderer)
			if tool == nil {
				tool = []byte("null")
			}
			out = append(out, tool...)
			return
		}
		out = append(out, `{"type":"function","function":{`...)
		begin := len(out)
		s := scanner{in: tool}
		_ = s.object(func(name, value []byte) {
			if string(name) == "type" {
				return
			}
			if len(out) > begin {
				out = append(out, ',')
			}
			if value == nil {
				value = []byte("null")
			}
			if bytes.ContainsRune(name, utf8.RuneError) {
				c.inexact = BadText // it is that, or stands for what is no text
			}
			out = append(append(append(out, quote(name)...), ':'), value...)
		})
		out = append(out, "}}"...)
	})
	return append(out, ']')
}

// stringOr returns the text of a string, or something else for what is none.
func stringOr(raw []byte, or string) string {
	if raw == nil || raw[0] != '"' {
		return or
	}
	return string(unquote(raw))
}

func filledString(raw []byte) bool { return len(raw) > 2 || len(raw) > 0 && raw[0] != '"' }
