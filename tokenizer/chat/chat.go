// SPDX-License-Identifier: Apache-2.0

// Package chat turns the fields of an OpenAI request into the text of a prompt.
//
// A [Renderer] gives the text that an engine feeds its model: the request
// normalised as the engine normalises it ([Profile]), put through the model's
// chat template. A request that the engine would refuse gives an error.
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
	"slices"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

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
// Text parts of a content are joined with a newline. An image or the like is
// replaced by its hash. Parts of other kinds, tools and tool calls stay as the JSON
// that the client sent. Of several prompts the longest is taken. Prompts of token ids
// and spans of the wrong JSON type are errors, which name the field.
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
		switch {
		case p.Text != nil:
			dst = append(dst, *p.Text...)
		case itemTypes[p.Type] != "":
			dst = appendItem(dst, raw)
		default:
			dst = append(dst, raw...)
		}
	}
	return dst, nil
}

// appendPrompt appends the prompt of a completion. Several prompts run as several
// sequences; the request is routed by the longest.
func appendPrompt(dst, prompt []byte) ([]byte, error) {
	if prompt[0] == '"' {
		return appendString(dst, prompt)
	}
	var list []string
	if err := json.Unmarshal(prompt, &list); err != nil {
		return dst, fmt.Errorf("chat: read prompt: %w", err)
	}
	if len(list) == 0 {
		return dst, nil
	}
	return append(dst, slices.MaxFunc(list, func(a, b string) int { return len(a) - len(b) })...), nil
}

// OtherBytes is how long the prompts beside the longest one of a list are, as JSON.
func OtherBytes(prompt []byte) (n int) {
	if len(prompt) == 0 || prompt[0] != '[' {
		return 0
	}
	var list []json.RawMessage
	if json.Unmarshal(prompt, &list) != nil {
		return 0
	}
	longest := 0
	for _, raw := range list {
		n += len(raw)
		longest = max(longest, len(raw))
	}
	return n - longest
}

// Completion returns the prompt of a completion as an engine reads it. The error
// is about JSON or text that no engine reads.
func Completion(q Request) (Text, error) {
	v, err := jinja.FromJSON(q.Prompt)
	if err != nil {
		return Text{}, fmt.Errorf("chat: prompt: %w", err)
	}
	list := v.Items()
	if !v.IsList() {
		list = []jinja.Value{v}
	}
	t := Text{Others: OtherBytes(q.Prompt), Class: q.class()}
	for i, p := range list {
		text, ok := p.Text()
		if !ok {
			return Text{}, fmt.Errorf("chat: prompt %d is no string", i)
		}
		if i == 0 || len(text) > len(t.Text) {
			t.Text, t.Exact = []byte(text), len(text)
		}
	}
	return t, nil
}

func appendString(dst []byte, raw []byte) ([]byte, error) {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		return dst, err
	}
	return append(dst, s...), nil
}
