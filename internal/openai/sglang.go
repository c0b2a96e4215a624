// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// SGLang makes chats of its own of /v1/messages and /v1/responses. The rules are those of SGLang 0.5.23.

// convertBy returns the function [chat.Request.Convert] of a request that vLLM reads as same, and SGLang by its own
// function.
func convertBy(same chat.Request, sglang func(e chat.Engine) chat.Request) func(chat.Engine) chat.Request {
	return func(e chat.Engine) chat.Request {
		if e.Profile != chat.SGLang {
			return same
		}
		q := sglang(e)
		q.Path = same.Path
		return q
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

// resultContents returns the contents of the messages for a tool's result, and its text. References to tools stand
// in messages of their own.
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

// messagesTools returns the tools of /v1/messages and the choice in the form of chats. Tools that run at Anthropic
// are left out.
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
