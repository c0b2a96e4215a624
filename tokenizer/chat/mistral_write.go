// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"cmp"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// mistralWriter writes one prompt.
type mistralWriter struct {
	*mistral
	marked
	exact    int // offset of the first item in the text, -1 if there is none
	items    int
	system   string // text of the system messages, before v7
	tools    []jinja.Value
	settings string
}

// write writes the prompt.
func (w *mistralWriter) write(turns []turn) {
	isUser := func(t turn) bool { return t.role == "user" }
	here := slices.IndexFunc(turns, isUser) // the user's message that gets the tools and the system's text
	for i, t := range turns {
		if w.version < 13 && isUser(t) {
			here = i
		}
	}
	w.control("<s>")
	for i, t := range turns {
		switch t.role {
		case "system":
			w.control("[SYSTEM_PROMPT]")
			w.chunks(t.content)
			w.control("[/SYSTEM_PROMPT]")
		case "user":
			w.user(t, i == here)
		case "assistant":
			w.assistant(t)
		case "tool":
			w.result(t)
		}
	}
}

func (w *mistralWriter) json(v jinja.Value) { w.piece(string(toJSON(v))) }

// chunks writes a content that may have thoughts and items.
func (w *mistralWriter) chunks(chunks []chunk) {
	for _, c := range chunks {
		switch c.kind {
		case "text":
			w.piece(c.text)
		case "thinking":
			if _, ok := w.ids["[THINK]"]; !ok || w.ids["[/THINK]"] == 0 {
				refuse("thoughts are not for this model")
			}
			w.control("[THINK]")
			w.piece(c.text)
			if c.closed {
				w.control("[/THINK]")
			}
		default:
			// Only the engine knows how many tokens an item takes.
			if w.exact < 0 {
				w.exact = len(w.b)
			}
			w.piece(string(appendItem(nil, c.item)))
			w.items++
		}
	}
}

func (w *mistralWriter) user(t turn, here bool) {
	before := ""
	if here && w.system != "" {
		before = w.system + "\n\n"
	}
	if here && len(w.tools) > 0 {
		list := make([]jinja.Value, len(w.tools))
		for i, tool := range w.tools {
			list[i] = mistralTool(tool)
		}
		w.control("[AVAILABLE_TOOLS]")
		w.json(jinja.List(list...))
		w.control("[/AVAILABLE_TOOLS]")
	}
	if here && w.settings != "" {
		w.control("[MODEL_SETTINGS]")
		w.piece(w.settings)
		w.control("[/MODEL_SETTINGS]")
	}
	w.control("[INST]")
	content := t.content
	if !slices.ContainsFunc(content, func(c chunk) bool { return c.kind == "item" }) {
		w.piece(before + textOf(content))
	} else {
		// An image behind a single text comes first.
		if len(content) == 2 && content[0].kind == "text" && content[1].kind == "item" && strings.HasPrefix(content[1].text, "image") {
			content = []chunk{content[1], content[0]}
		}
		w.piece(before)
		w.chunks(content)
	}
	w.control("[/INST]")
}

// mistralTool is a tool as Mistral's models see it.
func mistralTool(tool jinja.Value) jinja.Value {
	f := tool.Get("function")
	description, parameters := f.Get("description"), f.Get("parameters")
	if _, ok := description.Text(); !ok {
		description = jinja.String("")
	}
	if parameters.Dict() == nil {
		parameters = jinja.Object()
	}
	return jinja.Object("type", "function", "function",
		jinja.Object("name", f.Get("name"), "description", description, "parameters", parameters))
}

// assistant writes a message of the assistant.
func (w *mistralWriter) assistant(t turn) {
	switch {
	case len(t.content) == 0 && len(t.calls) == 0:
		refuse("a message of the assistant without content and calls")
	case w.version < 7 && len(t.content) > 0 && len(t.calls) > 0:
		refuse("a message of the assistant with content and calls")
	case len(t.content) == 1 && t.content[0].kind == "text":
		w.piece(strings.TrimRight(t.content[0].text, " "))
	default:
		w.chunks(t.content)
	}
	w.writeCalls(t.calls)
	if !t.resume {
		w.control("</s>")
	}
}

func (w *mistralWriter) writeCalls(calls []mistralCall) {
	var list []jinja.Value
	for _, c := range calls {
		if w.version < 11 {
			list = append(list, jinja.Object("name", c.name, "arguments", c.arguments, "id", c.id))
			continue
		}
		w.control("[TOOL_CALLS]")
		w.piece(c.name)
		if w.version == 11 {
			w.control("[CALL_ID]")
			w.piece(c.id)
		}
		w.control("[ARGS]")
		w.json(c.arguments)
	}
	if list != nil {
		w.control("[TOOL_CALLS]")
		w.json(jinja.List(list...))
	}
}

// result writes the result of a tool.
func (w *mistralWriter) result(t turn) {
	w.control("[TOOL_RESULTS]")
	defer w.control("[/TOOL_RESULTS]")
	if w.version >= 7 {
		if w.version < 13 {
			w.piece(t.callID)
			w.control("[TOOL_CONTENT]")
		}
		w.chunks(t.content)
		return
	}
	text := cmp.Or(textOf(t.content), "{}")
	content, err := jinja.FromJSON([]byte(text))
	if err != nil {
		content = jinja.String(text)
	}
	w.json(jinja.Object("content", content, "call_id", t.callID))
}
