// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// readMessages reads the messages as the engine passes them to the template.
func (c *conversation) readMessages(span []byte) error {
	v, err := jinja.FromJSON(span)
	if err != nil {
		return fmt.Errorf("messages: %w", err)
	}
	list := v.Items()
	if len(list) == 0 {
		return refused("messages is empty or no list")
	}
	for i, m := range list {
		d := m.Dict()
		if d == nil {
			return refused("messages[%d] is no object", i)
		}
		last := c.resume && i == len(list)-1
		read, err := c.message(d, last)
		if err != nil {
			return fmt.Errorf("messages[%d]: %w", i, err)
		}
		c.messages = append(c.messages, jinja.FromDict(read))
	}
	if c.r.profile == VLLM && !c.r.dev {
		c.mergeDevelopers(list)
	}
	return nil
}

// mergeDevelopers makes one system message at the front of the messages of the
// role developer, which the template does not know, and of those of the system.
func (c *conversation) mergeDevelopers(list []jinja.Value) {
	developers := 0
	var texts []string
	var others []jinja.Value
	for i, m := range c.messages {
		role, _ := list[i].Dict().Get("role")
		text, _ := role.Text()
		if text == "developer" {
			developers++
		}
		if text != "developer" && text != "system" {
			others = append(others, m)
			continue
		}
		content, _ := m.Dict().Get("content")
		if s, ok := content.Text(); ok {
			texts = append(texts, s)
		}
		for _, p := range content.Items() {
			t, _ := p.Dict().Get("text")
			s, _ := t.Text()
			texts = append(texts, s)
		}
	}
	if developers == 0 {
		return
	}
	system := jinja.NewDict(2)
	system.Set("role", jinja.String("system"))
	system.Set("content", c.contentOf(strings.Join(texts, "\n\n")))
	c.messages = append([]jinja.Value{jinja.FromDict(system)}, others...)
}

// contentOf is a text in the form in which the template gets contents.
func (c *conversation) contentOf(text string) jinja.Value {
	if !c.r.parts {
		return jinja.String(text)
	}
	return jinja.List(textPart(text))
}

func textPart(text string) jinja.Value {
	p := jinja.NewDict(2)
	p.Set("type", jinja.String("text"))
	p.Set("text", jinja.String(text))
	return jinja.FromDict(p)
}

// message reads one message. Of the last one that the answer goes on with, the
// text ends in resumeTag.
func (c *conversation) message(d *jinja.Dict, last bool) (*jinja.Dict, error) {
	roleValue, _ := d.Get("role")
	role, ok := roleValue.Text()
	if !ok {
		return nil, refused("role is no string")
	}
	out := jinja.NewDict(8)
	if c.r.profile == SGLang {
		for name, v := range d.All() {
			out.Set(name, v)
		}
	}
	out.Set("role", roleValue)
	content, err := c.content(d, role, last)
	if err != nil {
		return nil, err
	}
	out.Set("content", content)
	for _, name := range []string{"name", "tool_call_id", "task"} {
		if v, ok := d.Get(name); ok && !v.IsNone() {
			out.Set(name, v)
		}
	}
	for _, name := range []string{"reasoning", "reasoning_content"} {
		if v, ok := d.Get(name); ok && !v.IsNone() {
			out.Set("reasoning", v)
			out.Set("reasoning_content", v)
			break
		}
	}
	calls, ok := d.Get("tool_calls")
	if !ok || calls.IsNone() || len(calls.Items()) == 0 {
		return out, nil
	}
	var list []jinja.Value
	for i, call := range calls.Items() {
		read, err := c.toolCall(call)
		if err != nil {
			return nil, fmt.Errorf("tool_calls[%d]: %w", i, err)
		}
		list = append(list, read)
	}
	out.Set("tool_calls", jinja.List(list...))
	return out, nil
}

// toolCall reads a call of a tool, with its arguments as the object that their
// text is.
func (c *conversation) toolCall(v jinja.Value) (jinja.Value, error) {
	call := v.Dict()
	if call == nil {
		return v, refused("no object")
	}
	fv, _ := call.Get("function")
	f := fv.Dict()
	if f == nil {
		return v, refused("function is no object")
	}
	arguments, given := f.Get("arguments")
	text, isText := arguments.Text()
	switch {
	case !given:
		if c.r.profile == VLLM {
			return v, refused("function.arguments is missing")
		}
		return v, nil
	case !isText && c.r.profile == VLLM:
		return v, refused("function.arguments is no string")
	case !isText:
		return v, nil
	}
	parsed, err := jinja.FromJSON([]byte(text))
	if err != nil || parsed.Dict() == nil {
		if c.r.profile == SGLang && text != "" && err != nil {
			return v, refused("function.arguments is no JSON")
		}
		parsed = jinja.FromDict(jinja.NewDict(0))
	}
	function := f.Clone()
	function.Set("arguments", parsed)
	out := call.Clone()
	out.Set("function", jinja.FromDict(function))
	return jinja.FromDict(out), nil
}

// itemTypes are the kinds of parts that an engine puts something else in the
// place of, by the kind that templates know them as.
//
//nolint:gochecknoglobals // a table
var itemTypes = map[string]string{
	"image_url": "image", "image": "image", "input_image": "image", "image_embeds": "image", "image_pil": "image",
	"input_audio": "audio", "audio_url": "audio", "audio": "audio", "video_url": "video", "video": "video",
}

// MayHaveItems reports whether messages have images or the like, or may.
func MayHaveItems(messages []byte) bool {
	for name := range itemTypes {
		if bytes.Contains(messages, []byte(`"`+name+`"`)) {
			return true
		}
	}
	return false
}

// content reads the content of a message: a string, null, or a list of parts.
func (c *conversation) content(d *jinja.Dict, role string, last bool) (jinja.Value, error) {
	v, _ := d.Get("content")
	tag := ""
	if last {
		tag = resumeTag
	}
	if text, ok := v.Text(); ok {
		return c.contentOf(text + tag), nil
	}
	if v.IsNone() || v.IsUndefined() {
		switch {
		case role != "assistant" && role != "tool" && c.r.profile == VLLM:
			return v, refused("content is missing")
		case c.r.parts && !last:
			return jinja.List(), nil
		}
		return c.contentOf(tag), nil
	}
	parts := v.Items()
	if parts == nil && !v.IsList() {
		return v, refused("content is neither a string nor a list")
	}
	var texts []string
	var read []jinja.Value
	for i, p := range parts {
		text, item, err := c.part(p)
		switch {
		case err != nil:
			return v, fmt.Errorf("content[%d]: %w", i, err)
		case item != nil:
			read = append(read, jinja.FromDict(item))
		case text != "" || c.r.profile != VLLM:
			texts = append(texts, text)
			read = append(read, textPart(text))
		}
	}
	if c.r.parts {
		if last {
			read = append(read, textPart(tag))
		}
		return jinja.List(read...), nil
	}
	between := "\n"
	if c.r.profile == SGLang {
		between = " "
	}
	text := strings.Join(texts, between)
	if len(texts) < len(read) { // items stand before the text
		text = strings.Repeat(itemMark+"\n", len(read)-len(texts)) + text
	}
	return jinja.String(text + tag), nil
}

// itemMark stands in a text where an engine puts an item.
const itemMark = "\ue000item\ue000"

// part reads one part of a content: a text, or an item.
func (c *conversation) part(v jinja.Value) (text string, item *jinja.Dict, err error) {
	p := v.Dict()
	if p == nil {
		return "", nil, refused("a part is no object")
	}
	kindValue, _ := p.Get("type")
	kind, ok := kindValue.Text()
	if !ok {
		return "", nil, refused("a part has no type")
	}
	if as, ok := itemTypes[kind]; ok {
		raw, err := jinja.AppendJSON(nil, v)
		if err != nil {
			return "", nil, err
		}
		c.items = append(c.items, raw)
		item = jinja.NewDict(1)
		item.Set("type", jinja.String(as))
		return "", item, nil
	}
	switch kind {
	case "text", "refusal", "thinking":
	default:
		return "", nil, refused("a part has the unknown type %.40q", kind)
	}
	value, _ := p.Get(kind)
	if text, ok = value.Text(); !ok {
		return "", nil, refused("a part of type %s has no %s", kind, kind)
	}
	return text, nil, nil
}

// withoutItems returns a message with a text in the place of each item.
func withoutItems(m jinja.Value, instead string) jinja.Value {
	d := m.Dict()
	content, _ := d.Get("content")
	out := d.Clone()
	if text, ok := content.Text(); ok {
		out.Set("content", jinja.String(strings.ReplaceAll(text, itemMark, instead)))
		return jinja.FromDict(out)
	}
	var parts []jinja.Value
	for _, p := range content.Items() {
		kind, _ := p.Dict().Get("type")
		if text, _ := kind.Text(); text != "text" {
			p = textPart(instead)
		}
		parts = append(parts, p)
	}
	out.Set("content", jinja.List(parts...))
	return jinja.FromDict(out)
}
