// SPDX-License-Identifier: Apache-2.0

// Package chat turns the fields of an OpenAI request into the text of a prompt.
//
// A [Renderer] gives the text that an engine feeds its model: the request
// normalised as the engine normalises it ([Profile]), put through the model's
// chat template. What the engine would refuse has no text, but an error.
//
// [AppendText] gives the canonical text of text-block mode: not what any engine
// feeds its model, but a text of which equal requests have equal copies and a
// longer conversation has a longer copy.
//
// The package is pure: no network, no clock, no log. Everything in it may be used
// by any number of goroutines.
package chat

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Request holds the fields of a request body that make up the prompt, as raw
// JSON spans. A nil span is an absent field or null. The spans alias the body
// that they were cut from; nobody writes to them.
type Request struct {
	Messages []byte // chat completions: the array of messages
	Tools    []byte // chat completions: the array of tools
	Prompt   []byte // completions: a string, or a list of strings

	// Chat completions: what else has an effect on the text.
	ToolChoice           []byte
	AddGenerationPrompt  []byte
	ContinueFinalMessage []byte
	ChatTemplate         []byte
	ChatTemplateKwargs   []byte
	ReasoningEffort      []byte
	Documents            []byte

	// Both: what has an effect on the ids.
	AddSpecialTokens     []byte
	TruncatePromptTokens []byte
}

// message is the part of a chat message that every engine renders.
type message struct {
	Role       string          `json:"role"`
	Name       string          `json:"name"`
	Content    json.RawMessage `json:"content"`
	ToolCalls  json.RawMessage `json:"tool_calls"`
	ToolCallID string          `json:"tool_call_id"`
}

// AppendText appends the canonical text of r to dst: the tools, then each
// message as a line with its role and name followed by its content, then the
// line that opens the answer. The text of a conversation that went on therefore
// begins with the text of its earlier turns, up to that last line.
//
// Text parts of a content are joined with a newline; parts of other kinds, tools
// and tool calls stand as the JSON that the client sent. Prompts that are token
// ids have no text and are refused, as is a span of the wrong JSON type; the
// error names the field.
func AppendText(dst []byte, r Request) ([]byte, error) {
	if r.Prompt != nil {
		return appendPrompt(dst, r.Prompt)
	}
	var messages []message
	if err := json.Unmarshal(r.Messages, &messages); err != nil {
		return dst, fmt.Errorf("chat: read messages: %w", err)
	}
	if len(r.Tools) > 0 {
		dst = append(dst, "<|tools|>\n"...)
		dst = append(dst, r.Tools...)
		dst = append(dst, '\n')
	}
	for i, m := range messages {
		dst = append(dst, "<|"...)
		dst = append(dst, m.Role...)
		if m.Name != "" {
			dst = append(append(dst, ' '), m.Name...)
		}
		if m.ToolCallID != "" {
			dst = append(append(dst, " for "...), m.ToolCallID...)
		}
		dst = append(dst, "|>\n"...)
		var err error
		if dst, err = appendContent(dst, m.Content); err != nil {
			return dst, fmt.Errorf("chat: read messages[%d].content: %w", i, err)
		}
		if len(m.ToolCalls) > 0 {
			dst = append(append(dst, '\n'), m.ToolCalls...)
		}
		dst = append(dst, '\n')
	}
	return append(dst, "<|assistant|>\n"...), nil
}

// part is one element of a message content that is a list.
type part struct {
	Type string  `json:"type"`
	Text *string `json:"text"`
}

func appendContent(dst []byte, content json.RawMessage) ([]byte, error) {
	if len(content) == 0 {
		return dst, nil
	}
	switch content[0] {
	case 'n': // null: an assistant message that only calls tools
		return dst, nil
	case '"':
		return appendString(dst, content)
	case '[':
	default:
		return dst, errors.New("want a string, null or a list of parts")
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(content, &parts); err != nil {
		return dst, err
	}
	for i, raw := range parts {
		if i > 0 {
			dst = append(dst, '\n')
		}
		if raw[0] == '"' {
			var err error
			if dst, err = appendString(dst, raw); err != nil {
				return dst, err
			}
			continue
		}
		var p part
		if err := json.Unmarshal(raw, &p); err != nil {
			return dst, fmt.Errorf("part %d: %w", i, err)
		}
		if p.Text != nil {
			dst = append(dst, *p.Text...)
		} else {
			dst = append(dst, raw...)
		}
	}
	return dst, nil
}

func appendPrompt(dst, prompt []byte) ([]byte, error) {
	if prompt[0] == '"' {
		return appendString(dst, prompt)
	}
	var list []string
	if err := json.Unmarshal(prompt, &list); err != nil {
		return dst, fmt.Errorf("chat: read prompt: %w", err)
	}
	// Several prompts run as several sequences: the longest is the one that
	// is worth routing by.
	var longest string
	for _, p := range list {
		if len(p) > len(longest) {
			longest = p
		}
	}
	return append(dst, longest...), nil
}

func appendString(dst []byte, raw []byte) ([]byte, error) {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		return dst, err
	}
	return append(dst, s...), nil
}
