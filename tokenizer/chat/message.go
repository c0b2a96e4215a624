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
	c.messages = make([]jinja.Value, 0, len(list))
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
	if c.r.profile == VLLM && !c.template.dev {
		c.mergeDevelopers(list)
	}
	return nil
}

// mergeDevelopers makes messages of the role developer, which the template does not
// know, messages of the system, and one of all of these at the front unless there
// is only that.
func (c *conversation) mergeDevelopers(list []jinja.Value) {
	developers, behind := 0, false
	var texts []string
	var others []jinja.Value
	for i, m := range c.messages {
		role, _ := list[i].Dict().Get("role")
		switch text, _ := role.Text(); text {
		case "developer":
			developers++
			m.Dict().Set("role", jinja.String("system"))
		case "system":
		default:
			others = append(others, m)
			continue
		}
		behind = behind || i > 0
		content, _ := m.Dict().Get("content")
		text, ok := content.Text()
		if !ok {
			var parts []string
			for _, p := range content.Items() {
				if t, ok := at(p, "text").Text(); ok {
					parts = append(parts, t)
				}
			}
			text = strings.Join(parts, "\n")
		}
		if text != "" {
			texts = append(texts, text)
		}
	}
	if developers == 0 || !behind {
		return
	}
	system := jinja.NewDict(2)
	system.Set("role", jinja.String("system"))
	system.Set("content", jinja.String(strings.Join(texts, "\n\n")))
	c.messages = append([]jinja.Value{jinja.FromDict(system)}, others...)
}

// contentOf is a text in the form in which the template gets contents.
func (c *conversation) contentOf(text string) jinja.Value {
	if !c.template.parts {
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
	out := jinja.NewDict(d.Len() + 1)
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
	strict := c.r.profile == VLLM
	for _, f := range []struct{ name, role string }{{"name", ""}, {"tool_call_id", "tool"}, {"task", ""}} {
		v, ok := d.Get(f.name)
		if _, isText := v.Text(); ok && !v.IsNone() && (!strict || isText && (f.role == "" || f.role == role)) {
			out.Set(f.name, v)
		}
	}
	if strict && role == "developer" && c.template.dev {
		tools, ok := d.Get("tools")
		if !ok {
			tools = jinja.None()
		}
		out.Set("tools", tools)
	}
	for _, name := range []string{"reasoning", "reasoning_content"} {
		if v, ok := d.Get(name); ok && !v.IsNone() && (!strict || role == "assistant") {
			out.Set("reasoning", v)
			out.Set("reasoning_content", v)
			break
		}
	}
	calls, ok := d.Get("tool_calls")
	if !ok || calls.IsNone() || len(calls.Items()) == 0 || strict && role != "assistant" {
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
		if role == "tool" && c.r.profile == VLLM {
			return jinja.String(text + tag), nil
		}
		text, dropped := c.withoutBilling(text, role)
		if dropped && c.template.parts {
			return jinja.List(), nil
		}
		return c.contentOf(text + tag), nil
	}
	if v.IsNone() || v.IsUndefined() {
		switch {
		case role != "assistant" && role != "tool" && c.r.profile == VLLM:
			return v, refused("content is missing")
		case c.template.parts && !last:
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
		text, dropped := c.withoutBilling(text, role)
		switch {
		case err != nil:
			return v, fmt.Errorf("content[%d]: %w", i, err)
		case dropped:
		case item != nil:
			read = append(read, jinja.FromDict(item))
		case text != "" || c.r.profile != VLLM || c.template.parts:
			texts = append(texts, text)
			read = append(read, textPart(text))
		}
	}
	// A tool's result is a text again if it is nothing but text.
	if c.template.parts && !(role == "tool" && c.r.profile == VLLM && len(texts) == len(read)) {
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

// billing begins a line of the system's that changes from request to request, which
// vLLM drops.
const billing = "x-anthropic-billing-header"

// withoutBilling returns a text of the system without its first line, if that is
// for billing. dropped says that there is no other.
func (c *conversation) withoutBilling(text, role string) (rest string, dropped bool) {
	if role != "system" || c.r.profile != VLLM || !strings.HasPrefix(text, billing) {
		return text, false
	}
	_, rest, _ = strings.Cut(text, "\n")
	return rest, rest == ""
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
