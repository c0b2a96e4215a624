// SPDX-License-Identifier: Apache-2.0

package openai

import "cmp"

// conversation collects the chat of a request of [Responses] or [Messages].
type conversation struct {
	messages []message
	resume   bool   // the answer continues the last message
	inexact  string // see [chat.Request.Inexact]
}

// message is a message of a chat; fields that are nil are absent.
type message struct {
	role, content, reasoning, callID value
	calls                            []value
}

// Roles of messages.
const (
	assistant = `"assistant"`
	system    = `"system"`
	tool      = `"tool"`
	user      = `"user"`
)

// add adds a message and returns it.
func (c *conversation) add(m message) *message {
	c.messages = append(c.messages, m)
	return &c.messages[len(c.messages)-1]
}

// addForeign adds a value that only the engine can read.
func (c *conversation) addForeign(v value) {
	c.setInexact(NoRenderer)
	c.add(message{role: value(`"item"`), content: list([]value{v})})
}

// setInexact notes why the chat is not the engine's whole prompt. The first reason stays.
func (c *conversation) setInexact(reason string) {
	c.inexact = cmp.Or(c.inexact, reason)
}

// lastAssistant returns the last message if it is the assistant's, else nil.
func (c *conversation) lastAssistant() *message {
	if n := len(c.messages); n > 0 && string(c.messages[n-1].role) == assistant {
		return &c.messages[n-1]
	}
	return nil
}

// json returns the messages as a list.
func (c *conversation) json() value {
	all := make([]value, len(c.messages))
	for i, m := range c.messages {
		var calls value
		if len(m.calls) > 0 {
			calls = list(m.calls)
		}
		all[i] = object(field{"role", m.role}, field{"content", m.content}, field{"reasoning", m.reasoning},
			field{"tool_call_id", m.callID}, field{"tool_calls", calls})
	}
	return list(all)
}

// tools returns a list of tools in the form of chats, in which function returns a tool, or nil for one
// that only the engine can read.
func (c *conversation) tools(tools value, function func(tool value) value) value {
	if tools.kind() != '[' {
		return nil
	}
	var all []value
	tools.each(func(tool value) {
		f := function(tool)
		if f == nil {
			c.setInexact(NoRenderer)
			all = append(all, tool)
			return
		}
		all = append(all, asFunction(f))
	})
	return list(all)
}

func asFunction(f value) value {
	return object(field{"type", value(`"function"`)}, field{"function", f})
}
