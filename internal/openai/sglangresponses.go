// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"slices"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// developerLabel stands before the text of a developer's message in /v1/responses.
const developerLabel = "Developer instructions:"

// sglangResponses makes the chat of the fields of /v1/responses.
func (f *fields) sglangResponses(e chat.Engine) chat.Request {
	c := sglangChat{engine: e}
	if e.Coded {
		c.setInexact(NoRenderer) // gpt-oss: SGLang does not use the template here
	}
	if f.get("previous_response_id") != nil {
		c.setInexact(NoHistory)
	}
	if e.Between {
		c.setInexact(NoRenderer)
	}
	var all []turn
	if instructions := f.get("instructions"); instructions != nil && string(instructions) != `""` {
		all = append(all, turn{role: "system", content: instructions})
	}
	input := f.get("input")
	if input.kind() == '"' {
		all = append(all, turn{role: "user", content: input})
	}
	input.each(func(item value) {
		if t, ok := c.responsesItem(item); ok {
			all = append(all, t)
		}
	})
	all = mergeTurns(all)
	if !e.InlineSystem || e.Older {
		all = systemFirst(all)
	}
	for _, t := range all {
		c.say(string(quote([]byte(t.role))), t.content, t.more()...)
	}
	q := chat.Request{Messages: list(c.history), ReasoningEffort: f.get("reasoning").member("effort"), ChatTemplateKwargs: f.get("chat_template_kwargs")}
	if reasoning := f.get("reasoning"); reasoning != nil && !hasMember(reasoning, "effort") {
		q.ReasoningEffort = value(`"medium"`)
	}
	if e.Older {
		q.ChatTemplateKwargs = nil
	}
	q.Tools, q.ToolChoice = c.responsesTools(f.get("tools"), f.get("tool_choice"))
	q.Inexact = c.inexact
	return q
}

// turn is a message of /v1/responses for SGLang. Fields that are nil are absent.
type turn struct {
	role                                    string
	content, callID, name, phase, reasoning value
	calls                                   []value
}

func (t *turn) more() []field {
	m := []field{{"tool_call_id", t.callID}, {"name", t.name}, {"phase", t.phase}, {"reasoning_content", t.reasoning}}
	if len(t.calls) > 0 {
		m = append(m, field{"tool_calls", list(t.calls)})
	}
	return m
}

// responsesItem returns the message for an item; false if there is none.
func (c *sglangChat) responsesItem(item value) (t turn, ok bool) {
	switch kind := item.textAt("type"); kind {
	case "function_call", "custom_tool_call":
		id := item.member("call_id")
		if id == nil {
			id = item.member("id")
		}
		arguments := item.member("arguments")
		switch {
		case kind == "custom_tool_call":
			input, _ := json.Marshal(map[string]string{"input": item.textAt("input")})
			arguments = quote(input)
			c.setInexact(NoRenderer)
		case arguments.kind() == '{':
			arguments = quote(arguments)
		case value(unquoteOr(arguments)).kind() != '{' || !json.Valid(unquoteOr(arguments)):
			arguments = value(`"{}"`)
		}
		call := object(field{"id", id}, field{"type", value(`"function"`)}, field{
			"function",
			object(field{"name", item.member("name")}, field{"arguments", arguments}),
		})
		return turn{role: "assistant", calls: []value{call}}, true
	case "function_call_output", "custom_tool_call_output":
		output := item.member("output")
		if output.kind() == '[' && !c.engine.Older {
			var texts []value
			output.each(func(part value) {
				if text := part.member("text"); text.kind() == '"' {
					texts = append(texts, text)
				}
			})
			output = join(texts, "")
		}
		return turn{role: "tool", content: output, callID: item.member("call_id")}, true
	case "reasoning":
		texts := reasoningTexts(item.member("summary"))
		if texts == nil {
			texts = reasoningTexts(item.member("content"))
		}
		if texts == nil {
			if item.member("encrypted_content") != nil {
				c.setInexact(NoRenderer)
			}
			return turn{}, false
		}
		return turn{role: "assistant", reasoning: join(texts, `\n`)}, true
	case "", "message":
	default:
		c.setInexact(NoRenderer)
		return turn{}, false
	}
	t = turn{
		role: item.textAt("role"), content: item.member("content"), name: item.member("name"), phase: item.member("phase"),
		callID: item.member("tool_call_id"), reasoning: item.member("reasoning_content"),
	}
	if c.engine.Older {
		t.phase = nil
	}
	item.member("tool_calls").each(func(call value) { t.calls = append(t.calls, call) })
	if t.content.kind() == '[' {
		t.content = sglangParts(t.content)
	}
	if t.role == "developer" {
		if t.role = "system"; !c.engine.Older {
			t.content = labelled(t.content)
		}
	}
	return t, true
}

// unquoteOr returns the text of a string, nil for another value.
func unquoteOr(v value) []byte {
	if v.kind() != '"' {
		return nil
	}
	return unquote(v)
}

// reasoningTexts returns the texts of the parts of a reasoning item that have one.
func reasoningTexts(parts value) (texts []value) {
	parts.each(func(part value) {
		if text := part.member("text"); len(text) > len(`""`) {
			texts = append(texts, text)
		}
	})
	return texts
}

// sglangParts returns a content with the parts' types as chats call them.
func sglangParts(content value) value {
	var parts []value
	content.each(func(part value) {
		switch part.textAt("type") {
		case "input_text", "output_text":
			part = textPart(part.member("text").or(`""`))
		case "input_image":
			part = object(field{"type", value(`"image_url"`)}, field{"image_url", part.member("image_url")})
		}
		parts = append(parts, part)
	})
	return list(parts)
}

// labelled returns the content of a developer's message with the label before its first text.
func labelled(content value) value {
	label := quote([]byte(developerLabel))
	if content.kind() == '"' {
		return join([]value{label, content}, `\n`)
	}
	done := false
	var parts []value
	content.each(func(part value) {
		if text := part.member("text"); !done && text.kind() == '"' {
			part, done = textPart(join([]value{label, text}, `\n`)), true
		}
		parts = append(parts, part)
	})
	if !done {
		parts = append([]value{textPart(label)}, parts...)
	}
	return list(parts)
}

// mergeTurns joins messages of the assistant that follow each other.
func mergeTurns(all []turn) (out []turn) {
	for _, t := range all {
		if len(out) == 0 || t.role != "assistant" || out[len(out)-1].role != "assistant" {
			out = append(out, t)
			continue
		}
		last := &out[len(out)-1]
		onlyThoughts := last.reasoning != nil && last.content == nil && last.calls == nil && last.phase == nil && last.name == nil
		if string(last.phase) != string(t.phase) && !onlyThoughts {
			out = append(out, t)
			continue
		}
		if t.phase != nil {
			last.phase = t.phase
		}
		last.content = mergeContents(last.content, t.content)
		last.calls = append(slices.Clip(last.calls), t.calls...)
		switch {
		case len(t.reasoning) <= len(`""`):
		case len(last.reasoning) > len(`""`):
			last.reasoning = join([]value{last.reasoning, t.reasoning}, `\n`)
		default:
			last.reasoning = t.reasoning
		}
	}
	return out
}

// mergeContents joins two contents.
func mergeContents(a, b value) value {
	none := func(v value) bool { return v == nil || string(v) == `""` }
	asParts := func(v value) (parts []value) {
		if v.kind() == '"' {
			return []value{textPart(v)}
		}
		v.each(func(p value) { parts = append(parts, p) })
		return parts
	}
	switch {
	case none(b):
		return a
	case none(a):
		return b
	case a.kind() == '"' && b.kind() == '"':
		return join([]value{a, b}, `\n\n`)
	}
	return list(append(asParts(a), asParts(b)...))
}

// systemFirst joins the texts of all system messages in a message at the front.
func systemFirst(all []turn) []turn {
	var texts []value
	others := []turn{{role: "system"}}
	for _, t := range all {
		switch {
		case t.role != "system":
			others = append(others, t)
		case t.content.kind() == '"':
			texts = append(texts, t.content)
		default:
			t.content.each(func(part value) {
				if text := part.member("text"); text.kind() == '"' {
					texts = append(texts, text)
				}
			})
		}
	}
	if len(texts) == 0 {
		return others[1:]
	}
	others[0].content = join(texts, `\n\n`)
	return others
}

// responsesTools returns the tools of /v1/responses and the choice in the form of chats. Only functions are in the
// prompt.
func (c *sglangChat) responsesTools(tools, choice value) (all, chosen []byte) {
	var read []value
	tools.each(func(t value) {
		switch t.textAt("type") {
		case "function":
		case "custom":
			c.setInexact(NoRenderer)
			return
		default:
			return
		}
		read = append(read, object(field{"type", value(`"function"`)}, field{"function", object(field{"name", t.member("name")},
			field{"description", t.member("description").or("null")}, field{"parameters", t.member("parameters").or("null")},
			field{"strict", t.member("strict").or("false")})}))
	})
	if len(read) == 0 {
		return nil, nil
	}
	if choice.kind() == '{' {
		name := choice.member("name")
		if name == nil {
			name = choice.member("function").member("name")
		}
		if kind := choice.textAt("type"); kind != "function" && kind != "custom" || name.textOr("") == "" {
			return list(read), nil
		}
		choice = object(field{"type", value(`"function"`)}, field{"function", object(field{"name", name})})
	}
	return list(read), choice
}
