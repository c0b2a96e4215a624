// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// mistralWriter writes one prompt.
type mistralWriter struct {
	*mistral
	out   marked
	exact int // where the first item stands, -1 if there is none
	items int
}

// write writes the prompt.
func (w *mistralWriter) write(turns []turn, system string, tools []jinja.Value, settings string) error {
	first, last := -1, -1
	for i, t := range turns {
		if t.role == "user" {
			if last = i; first < 0 {
				first = i
			}
		}
	}
	w.control("<s>")
	for i, t := range turns {
		var err error
		switch t.role {
		case "system":
			w.control("[SYSTEM_PROMPT]")
			err = w.chunks(t.content)
			w.control("[/SYSTEM_PROMPT]")
		case "user":
			here := last
			if w.version == 1 || w.version >= 13 {
				here = first
			}
			if i != here {
				err = w.user(t, "", nil, "")
			} else {
				err = w.user(t, system, tools, settings)
			}
		case "assistant":
			err = w.assistant(t, i < last)
		case "tool":
			err = w.result(t, i < last)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *mistralWriter) control(text string) { w.out.id(w.id[text]) }

func (w *mistralWriter) json(v jinja.Value) error {
	b, err := jinja.AppendJSON(nil, v)
	w.out.piece(string(b))
	return err
}

// chunks writes a content that may have thoughts and items.
func (w *mistralWriter) chunks(chunks []chunk) error {
	for _, c := range chunks {
		switch c.kind {
		case "text":
			w.out.piece(c.text)
		case "thinking":
			if _, ok := w.id["[THINK]"]; !ok || w.id["[/THINK]"] == 0 {
				return refused("thoughts are not for this model")
			}
			w.control("[THINK]")
			w.out.piece(c.text)
			if c.closed {
				w.control("[/THINK]")
			}
		default:
			// How many tokens an item takes only the engine knows.
			if w.exact < 0 {
				w.exact = len(w.out.b)
			}
			w.out.piece(string(appendItem(nil, c.item)))
			w.items++
		}
	}
	return nil
}

func (w *mistralWriter) user(t turn, system string, tools []jinja.Value, settings string) error {
	if w.version == 1 {
		text := textOf(t.content)
		if system != "" {
			text = system + "\n\n" + text
		}
		w.out.piece("[INST] " + text + " [/INST]")
		return nil
	}
	if len(tools) > 0 {
		list := make([]jinja.Value, len(tools))
		for i, tool := range tools {
			list[i] = mistralTool(tool)
		}
		w.control("[AVAILABLE_TOOLS]")
		if err := w.json(jinja.List(list...)); err != nil {
			return err
		}
		w.control("[/AVAILABLE_TOOLS]")
	}
	if settings != "" {
		w.control("[MODEL_SETTINGS]")
		w.out.piece(settings)
		w.control("[/MODEL_SETTINGS]")
	}
	w.control("[INST]")
	content := t.content
	hasItem := false
	for _, c := range content {
		hasItem = hasItem || c.kind == "item"
	}
	switch {
	case !hasItem:
		text := textOf(content)
		if system != "" {
			text = system + "\n\n" + text
		}
		w.out.piece(text)
	default:
		// An image behind nothing but texts comes first.
		if n := len(content) - 1; n == 1 && content[n].kind == "item" && strings.HasPrefix(content[n].text, "image") && content[0].kind == "text" {
			content = []chunk{content[1], content[0]}
		}
		if system != "" {
			w.out.piece(system + "\n\n")
		}
		if err := w.chunks(content); err != nil {
			return err
		}
	}
	w.control("[/INST]")
	return nil
}

// mistralTool is a tool as Mistral's models are shown it.
func mistralTool(tool jinja.Value) jinja.Value {
	f := at(tool, "function")
	function := jinja.NewDict(3)
	function.Set("name", at(f, "name"))
	function.Set("description", jinja.String(""))
	if _, ok := at(f, "description").Text(); ok {
		function.Set("description", at(f, "description"))
	}
	function.Set("parameters", jinja.FromDict(jinja.NewDict(0)))
	if at(f, "parameters").Dict() != nil {
		function.Set("parameters", at(f, "parameters"))
	}
	out := jinja.NewDict(2)
	out.Set("type", jinja.String("function"))
	out.Set("function", jinja.FromDict(function))
	return jinja.FromDict(out)
}

// assistant writes a message of the assistant. past says that a user spoke after it:
// version 2 leaves out calls then.
func (w *mistralWriter) assistant(t turn, past bool) error {
	switch {
	case len(t.content) == 0 && len(t.calls) == 0:
		return refused("a message of the assistant without content and calls")
	case w.version == 1:
		w.out.piece(textOf(t.content))
	case w.version < 7 && len(t.content) > 0 && len(t.calls) > 0:
		return refused("a message of the assistant with content and calls")
	case w.version == 2 && len(t.calls) > 0 && past:
		return nil
	case len(t.content) == 1 && t.content[0].kind == "text":
		w.out.piece(strings.TrimRight(t.content[0].text, " "))
	default:
		if err := w.chunks(t.content); err != nil {
			return err
		}
	}
	if err := w.calls(t.calls); err != nil {
		return err
	}
	if !t.resume {
		w.control("</s>")
	}
	return nil
}

func (w *mistralWriter) calls(calls []mistralCall) error {
	if len(calls) == 0 {
		return nil
	}
	if w.version >= 11 {
		for _, c := range calls {
			w.control("[TOOL_CALLS]")
			w.out.piece(c.name)
			if w.version == 11 {
				w.control("[CALL_ID]")
				w.out.piece(c.id)
			}
			w.control("[ARGS]")
			if err := w.json(c.arguments); err != nil {
				return err
			}
		}
		return nil
	}
	w.control("[TOOL_CALLS]")
	list := make([]jinja.Value, len(calls))
	for i, c := range calls {
		d := jinja.NewDict(3)
		d.Set("name", jinja.String(c.name))
		d.Set("arguments", c.arguments)
		if w.version >= 3 {
			d.Set("id", jinja.String(c.id))
		}
		list[i] = jinja.FromDict(d)
	}
	return w.json(jinja.List(list...))
}

// result writes what a tool gave. past says that a user spoke after it.
func (w *mistralWriter) result(t turn, past bool) error {
	if w.version == 2 && past {
		return nil
	}
	w.control("[TOOL_RESULTS]")
	defer w.control("[/TOOL_RESULTS]")
	if w.version >= 7 {
		if w.version < 13 {
			w.out.piece(t.callID)
			w.control("[TOOL_CONTENT]")
		}
		return w.chunks(t.content)
	}
	text := textOf(t.content)
	if text == "" {
		text = "{}"
	}
	content, err := jinja.FromJSON([]byte(text))
	if err != nil {
		content = jinja.String(text)
	}
	d := jinja.NewDict(2)
	if w.version >= 3 {
		d.Set("content", content)
		d.Set("call_id", jinja.String(t.callID))
		return w.json(jinja.FromDict(d))
	}
	d.Set("name", t.name)
	d.Set("content", content)
	return w.json(jinja.List(jinja.FromDict(d)))
}
