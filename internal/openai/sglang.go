// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// SGLang makes chats of its own of /v1/messages and /v1/responses. The rules are those of SGLang 0.5.23.

// convertBy returns the function [chat.Request.Convert] of a request that vLLM reads as same, and SGLang by its own function.
func convertBy(same chat.Request, sglang func(e chat.Engine) chat.Request) func(chat.Engine) chat.Request {
	return func(e chat.Engine) chat.Request {
		if e.Profile != chat.SGLang {
			return same
		}
		return sglang(e)
	}
}

// sglangChat collects a chat for SGLang.
type sglangChat struct {
	conversation
	engine  chat.Engine
	history []value // the messages
}

func (c *sglangChat) say(role string, content value, more ...field) {
	c.history = append(c.history, object(append([]field{{"role", value(role)}, {"content", content}}, more...)...))
}

// contentOf returns the content of a message: the text of a single text part, else the list of parts.
func contentOf(parts []value) value {
	if len(parts) == 1 && parts[0].textAt("type") == "text" {
		return parts[0].member("text")
	}
	return list(parts)
}

// textPart returns a part with a text.
func textPart(text value) value { return object(field{"type", value(`"text"`)}, field{"text", text}) }

// strip returns a string without white space around it, as Python's str.strip.
func strip(text value) string { return strings.TrimFunc(string(unquote(text)), isPythonSpace) }

func isPythonSpace(r rune) bool {
	return r >= 0x1c && r <= 0x1f || strings.ContainsRune(" \t\n\v\f\r\u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000", r) || r >= 0x2000 && r <= 0x200a
}

// sglangMessages makes the chat of the fields of /v1/messages.
func (f *fields) sglangMessages(e chat.Engine) chat.Request {
	c := sglangChat{engine: e}
	var texts []value
	if system := f.get("system"); system.kind() == '"' {
		if strip(system) != "" {
			texts = append(texts, system)
		}
	} else {
		system.each(func(block value) {
			if text := block.member("text"); block.textAt("type") == "text" && len(text) > len(`""`) {
				texts = append(texts, text)
			}
		})
	}
	if !e.InlineSystem {
		f.get("messages").each(func(m value) {
			if m.textAt("role") == "system" {
				texts = append(texts, strippedTexts(m.member("content"))...)
			}
		})
	}
	if len(texts) > 0 {
		c.say(system, join(texts, `\n`))
	}
	f.get("messages").each(func(m value) {
		role, content := m.textAt("role"), m.member("content")
		switch {
		case role == "system" && !e.InlineSystem:
		case content.kind() == '"':
			c.say(string(quote([]byte(role))), content)
		default:
			c.addBlocks(role, content)
		}
	})
	q := chat.Request{Messages: list(c.history)}
	q.Tools, q.ToolChoice = c.messagesTools(f.get("tools"), f.get("tool_choice"))
	if thinking := f.get("thinking"); thinking != nil {
		c.setInexact(NoRenderer) // its effect depends on the engine's --reasoning-parser
	}
	if effort := f.get("output_config").member("effort"); effort != nil {
		if effort.textOr("") == "xhigh" {
			effort = value(`"max"`)
		}
		// Unlike an effort in a chat, this one does not set enable_thinking.
		q.ChatTemplateKwargs = object(field{"reasoning_effort", effort})
	}
	q.Inexact = c.inexact
	return q
}

// strippedTexts returns the text of a system message inside the chat, without white space around each part.
func strippedTexts(content value) []value {
	if content.kind() == '"' {
		if text := strip(content); text != "" {
			return []value{quote([]byte(text))}
		}
		return nil
	}
	var parts []value
	content.each(func(block value) {
		if text := strip(block.member("text").or(`""`)); block.textAt("type") == "text" && text != "" {
			parts = append(parts, quote([]byte(text)))
		}
	})
	if len(parts) == 0 {
		return nil
	}
	return []value{join(parts, `\n`)}
}

// addBlocks adds the blocks of a message of /v1/messages.
func (c *sglangChat) addBlocks(role string, blocks value) {
	var parts, calls []value
	said := string(quote([]byte(role)))
	blocks.each(func(block value) {
		switch block.textAt("type") {
		case "text":
			parts = append(parts, textPart(block.member("text")))
		case "image":
			if part := imagePart(block.member("source")); part != nil {
				parts = append(parts, part)
			}
		case "search_result":
			if text := searchText(block); text != "" {
				parts = append(parts, textPart(quote([]byte(text))))
			}
		case "thinking", "redacted_thinking":
			if role == "assistant" && (block.textAt("type") == "redacted_thinking" || block.textAt("thinking") != "") {
				c.setInexact(NoRenderer) // the engine's --reasoning-parser writes it, or nothing does
			}
		case "tool_use":
			calls = append(calls, c.toolUse(block))
		case "tool_result":
			contents, text := resultContents(block.member("content"))
			if role != "user" {
				parts = append(parts, textPart(quote(append([]byte("Tool result: "), text...))))
				return
			}
			if len(parts) > 0 {
				c.say(said, contentOf(parts))
				parts = nil
			}
			id := block.member("tool_use_id")
			if id.textOr("") == "" {
				id = block.member("id").or(`""`)
			}
			for _, content := range contents {
				c.say(tool, content, field{"tool_call_id", id})
			}
		}
	})
	var more []field
	if len(calls) > 0 {
		more = append(more, field{"tool_calls", list(calls)})
	}
	switch {
	case len(parts) > 0:
		c.say(said, contentOf(parts), more...)
	case len(calls) > 0:
		c.say(said, nil, more...)
	case role != "user":
		c.say(said, value(`""`))
	}
}

// imagePart returns the part of a chat for an image of /v1/messages, nil if it has no data.
func imagePart(source value) value {
	if source.textAt("type") == "base64" && source.textAt("data") == "" || source.textAt("type") != "base64" && source.textAt("url") == "" {
		return nil
	}
	return object(field{"type", value(`"image_url"`)}, field{"image_url", source})
}

// resultContents returns the contents of the messages for a tool's result, and its text. References to tools stand in messages
// of their own.
func resultContents(content value) (contents []value, text string) {
	if content.kind() == '"' {
		return []value{content}, string(unquote(content))
	}
	var texts []string
	var group []value
	references := false
	flush := func() {
		if len(group) > 0 {
			contents = append(contents, contentOf(group))
		}
		group = nil
	}
	add := func(part value, reference bool) {
		if reference != references {
			flush()
		}
		references = reference
		group = append(group, part)
	}
	content.each(func(item value) {
		switch item.textAt("type") {
		case "text":
			if text := item.textAt("text"); text != "" {
				texts = append(texts, text)
				add(textPart(item.member("text")), false)
			}
		case "image":
			if part := imagePart(item.member("source")); part != nil {
				add(part, false)
			}
		case "tool_reference":
			name := item.member("tool_name")
			if name.textOr("") == "" {
				name = item.member("name")
			}
			if name.textOr("") != "" {
				add(object(field{"type", value(`"tool_reference"`)}, field{"name", name}), true)
			}
		case "search_result":
			if text := searchText(item); text != "" {
				texts = append(texts, text)
				add(textPart(quote([]byte(text))), false)
			}
		}
	})
	flush()
	if len(contents) == 0 {
		contents = []value{value(`""`)}
	}
	return contents, strings.Join(texts, "\n")
}

// searchText returns the text of a search result.
func searchText(item value) string {
	var lines, texts []string
	if title := item.textAt("title"); title != "" {
		lines = append(lines, "Title: "+title)
	}
	source := item.member("source")
	from := source.textOr("")
	if source.kind() == '{' {
		if from = source.textAt("url"); from == "" {
			from = source.textAt("text")
		}
	}
	if from != "" {
		lines = append(lines, "Source: "+from)
	}
	item.member("content").each(func(part value) {
		if text := part.textAt("text"); part.textAt("type") == "text" && text != "" {
			texts = append(texts, text)
		}
	})
	if len(texts) > 0 {
		lines = append(lines, "Content: "+strings.Join(texts, "\n"))
	}
	return strings.Join(lines, "\n")
}

// messagesTools returns the tools of /v1/messages and the choice in the form of chats. Tools that run at Anthropic are left out.
func (c *sglangChat) messagesTools(tools, choice value) (all, chosen []byte) {
	var read []value
	tools.each(func(t value) {
		kind := t.textAt("type")
		if slices.ContainsFunc([]string{"web_search_", "computer_", "bash_", "text_editor_"}, func(p string) bool { return strings.HasPrefix(kind, p) }) {
			return
		}
		schema := t.member("input_schema")
		if schema.kind() == '{' && schema.member("type") == nil && !hasMember(schema, "type") {
			schema = withType(schema)
		}
		description := t.member("description").or(`""`)
		f := []field{{"name", t.member("name")}, {"description", description}, {"parameters", schema}}
		if !c.engine.Older {
			f = append(f, field{"strict", t.member("strict").or("false")})
		}
		read = append(read, object(field{"type", value(`"function"`)}, field{"function", object(f...)}, field{"defer_loading", t.member("defer_loading")}))
	})
	if len(read) == 0 {
		return nil, nil
	}
	switch choice.textAt("type") {
	case "none":
		return list(read), value(`"none"`)
	case "any":
		return list(read), value(`"required"`)
	case "tool":
		return list(read), object(field{"type", value(`"function"`)}, field{"function", object(field{"name", choice.member("name")})})
	}
	return list(read), nil
}

// hasMember reports whether an object has a member, even null.
func hasMember(object value, name string) (has bool) {
	object.members(func(n []byte, _ value) { has = has || string(n) == name })
	return has
}

// withType returns a schema with the type object as its last member.
func withType(schema value) value {
	out := append(value{}, schema[:len(schema)-1]...)
	if s := strings.TrimSpace(string(out)); s != "{" {
		out = append(out, ',')
	}
	return append(out, `"type":"object"}`...)
}

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
		call := object(field{"id", id}, field{"type", value(`"function"`)}, field{"function",
			object(field{"name", item.member("name")}, field{"arguments", arguments})})
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
	t = turn{role: item.textAt("role"), content: item.member("content"), name: item.member("name"), phase: item.member("phase"),
		callID: item.member("tool_call_id"), reasoning: item.member("reasoning_content")}
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

// responsesTools returns the tools of /v1/responses and the choice in the form of chats. Only functions are in the prompt.
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
