// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// resumeTag stands after the text that the answer continues. The rendering is cut off at the tag.
// The space at the tag's end shows whether the template trims the text.
const resumeTag = "\ue000kvroute goes on here\ue000 "

// Message is a message of a chat, and how an engine passes it to a template. Only this package changes
// it. Any number of goroutines may use it.
type Message struct {
	value  jinja.Value
	normal atomic.Pointer[normalMessage]
	bytes  int
	traits Class
}

// normalMessage is a message as [conversation.message] returns it.
type normalMessage struct {
	form  form
	value jinja.Value
}

// form is what the normal form of a message depends on.
type form struct {
	profile    Profile
	parts, dev bool
	older      bool
}

// NewMessage reads a message. The error is that of [jinja.FromJSON].
func NewMessage(text []byte) (*Message, error) {
	v, err := jinja.FromJSON(text)
	m := &Message{value: v, bytes: len(text) + 2*v.Bytes(), traits: traitsOf(v)}
	for _, call := range callsOf(v) {
		arguments, _ := jinja.FromJSON([]byte(call.arguments))
		m.bytes += len(call.arguments) + arguments.Bytes()
	}
	return m, err
}

// Bytes returns the memory that the message may take.
func (m *Message) Bytes() int { return m.bytes }

// messageList returns the messages as the client sent them.
func (c *conversation) messageList() []jinja.Value {
	if c.Parsed == nil {
		list := parse("messages", c.Messages).Items()
		if len(list) == 0 {
			refuse("messages is empty or not a list")
		}
		for i, m := range list {
			c.noteTraits(i, traitsOf(m))
		}
		if c.API == Messages && c.merges {
			return mergedSystem(list)
		}
		return list
	}
	list := make([]jinja.Value, len(c.Parsed))
	for i, m := range c.Parsed {
		list[i] = m.value
		c.noteTraits(i, m.traits)
	}
	return list
}

// mergedSystem returns messages with the texts of all system turns in one message in front.
func mergedSystem(list []jinja.Value) []jinja.Value {
	var texts []string
	var others []jinja.Value
	for _, m := range list {
		if textAt(m, "role") == "system" {
			texts = append(texts, textAt(m, "content"))
		} else {
			others = append(others, m)
		}
	}
	if len(texts) == 0 {
		return list
	}
	return append([]jinja.Value{jinja.Object("role", "system", "content", strings.Join(texts, ""))}, others...)
}

// noteTraits adds the traits of message number i to the class of the request.
func (c *conversation) noteTraits(i int, traits Class) {
	if i == 0 {
		traits &^= WithSystem
	}
	c.class |= traits
}

// readMessages reads the messages as the engine passes them to the template.
func (c *conversation) readMessages() {
	c.messages = c.messageList()
	for i, m := range c.messages {
		c.messages[i] = c.normal(i, m, c.resume && i == len(c.messages)-1)
	}
	if c.profile == VLLM && !c.dev {
		c.mergeDevelopers()
	}
}

// mergeDevelopers gives messages of the role developer, which the template does not know, the
// role system. If there are any, and a message of either role is not the first message, it
// replaces all messages of both roles by one system message in front.
func (c *conversation) mergeDevelopers() {
	isDeveloper := func(m jinja.Value) bool { return textAt(m, "role") == "developer" }
	if !slices.ContainsFunc(c.messages, isDeveloper) {
		return
	}
	behind := false
	var texts []string
	var others []jinja.Value
	for i, m := range c.messages {
		switch role := textAt(m, "role"); role {
		case "developer":
			m = jinja.FromDict(m.Dict().Clone()) // a known message must not change
			m.Dict().Set("role", jinja.String("system"))
			c.messages[i] = m
		case "system":
		default:
			others = append(others, m)
			continue
		}
		behind = behind || i > 0
		if text := strings.Join(textsOf(m), "\n"); text != "" {
			texts = append(texts, text)
		}
	}
	if behind {
		system := jinja.Object("role", "system", "content", strings.Join(texts, "\n\n"))
		c.messages = append([]jinja.Value{system}, others...)
	}
}

// textsOf returns the text of a message, or the texts of its parts that have one.
func textsOf(m jinja.Value) (texts []string) {
	content := m.Get("content")
	if text, ok := content.Text(); ok {
		return []string{text}
	}
	for _, p := range content.Items() {
		if text, ok := p.Get("text").Text(); ok {
			texts = append(texts, text)
		}
	}
	return texts
}

// contentOf returns a text in the form that the template expects of contents.
func (c *conversation) contentOf(text string) jinja.Value {
	if !c.parts {
		return jinja.String(text)
	}
	return jinja.List(textPart(text))
}

func textPart(text string) jinja.Value {
	return jinja.Object("type", "text", "text", text)
}

// normal is message, or its result for a known message.
func (c *conversation) normal(i int, m jinja.Value, last bool) jinja.Value {
	if last || c.Parsed == nil {
		return c.message(i, m, last)
	}
	known, f := &c.Parsed[i].normal, form{c.profile, c.parts, c.dev, c.older}
	if n := known.Load(); n != nil && n.form == f {
		return n.value
	}
	items := len(c.items)
	v := c.message(i, m, false)
	if len(c.items) == items && len(m.Get("content").Items()) <= 1 { // joined texts take memory
		known.Store(&normalMessage{f, v})
	}
	return v
}

// message reads message i. If last is set, the answer continues the message, and resumeTag
// stands at the end of its text.
func (c *conversation) message(i int, m jinja.Value, last bool) jinja.Value {
	defer inside("messages[%d]", i)
	d := m.Dict()
	if d == nil {
		refuse("not an object")
	}
	if c.profile == SGLang {
		return c.sglangMessage(i, m)
	}
	role, ok := m.Get("role").Text()
	if !ok {
		refuse("role is not a string")
	}
	out := jinja.NewDict(d.Len() + 1)
	out.Set("role", m.Get("role"))
	out.Set("content", c.content(m.Get("content"), role, last))
	strict := c.profile == VLLM
	for _, f := range []struct{ name, role string }{{"name", ""}, {"tool_call_id", "tool"}, {"task", ""}} {
		v, ok := d.Get(f.name)
		if _, isText := v.Text(); ok && !v.IsNone() && (!strict || isText && (f.role == "" || f.role == role)) {
			out.Set(f.name, v)
		}
	}
	if strict && role == "developer" && c.dev {
		out.Set("tools", ownTools(m.Get("tools")))
	}
	if thought := thoughtOf(m); !thought.IsUndefined() && (!strict || role == "assistant") {
		out.Set("reasoning", thought)
		out.Set("reasoning_content", thought)
	}
	calls := m.Get("tool_calls").Items()
	if len(calls) > 0 && (!strict || role == "assistant") {
		list := make([]jinja.Value, len(calls))
		for k, call := range calls {
			list[k] = c.toolCall(k, call)
		}
		out.Set("tool_calls", jinja.List(list...))
	}
	return jinja.FromDict(out)
}

// ownTools returns the tools of a developer's message, with the keys that vLLM reads, in its order.
func ownTools(tools jinja.Value) jinja.Value {
	if tools.IsUndefined() {
		return jinja.None()
	}
	if !tools.IsList() {
		return tools
	}
	pick := func(v jinja.Value, keys ...string) jinja.Value {
		out := jinja.NewDict(len(keys))
		for _, key := range keys {
			if x := v.Get(key); !x.IsUndefined() {
				out.Set(key, x)
			}
		}
		return jinja.FromDict(out)
	}
	var out []jinja.Value
	for _, tool := range tools.Items() {
		if tool.Dict() != nil && tool.Get("function").Dict() != nil {
			tool = pick(tool, "function", "type")
			tool.Dict().Set("function", pick(tool.Get("function"), "name", "description", "parameters", "strict"))
		}
		out = append(out, tool)
	}
	return jinja.List(out...)
}

// thoughtOf returns the thoughts of an assistant, undefined if the message has none.
func thoughtOf(m jinja.Value) jinja.Value {
	for _, name := range []string{"reasoning", "reasoning_content"} {
		if v := m.Get(name); !v.IsUndefined() && !v.IsNone() {
			return v
		}
	}
	return jinja.Value{}
}

// toolCall reads tool call i. It replaces the JSON text of the arguments by an object.
func (c *conversation) toolCall(i int, call jinja.Value) jinja.Value {
	defer inside("tool_calls[%d]", i)
	f := call.Get("function").Dict()
	if f == nil {
		refuse("function is not an object")
	}
	arguments, _ := f.Get("arguments")
	text, isText := arguments.Text()
	switch {
	case !isText && c.profile == VLLM:
		refuse("function.arguments is not a string")
	case !isText:
		return call
	}
	parsed, _ := jinja.FromJSON([]byte(text))
	if parsed.Dict() == nil {
		parsed = jinja.Object()
	}
	function, out := f.Clone(), call.Dict().Clone()
	function.Set("arguments", parsed)
	out.Set("function", jinja.FromDict(function))
	return jinja.FromDict(out)
}

// itemTypes are the types of parts that an engine replaces by other tokens, with the
// type that templates see.
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
func (c *conversation) content(v jinja.Value, role string, last bool) jinja.Value {
	strict, tag := c.profile == VLLM, ""
	if last {
		tag = resumeTag
	}
	if text, ok := v.Text(); ok {
		if role == "tool" && strict {
			return jinja.String(text + tag)
		}
		text, dropped := c.withoutBilling(text, role)
		if dropped && c.parts {
			return jinja.List()
		}
		return c.contentOf(text + tag)
	}
	if v.IsNone() || v.IsUndefined() {
		switch {
		case v.IsNone() && role != "assistant" && role != "tool" && strict:
			refuse("content is null")
		case c.parts && !last:
			return jinja.List()
		}
		return c.contentOf(tag)
	}
	if !v.IsList() {
		refuse("content is neither a string nor a list")
	}
	var texts []string
	var read []jinja.Value
	for i, p := range v.Items() {
		text, item := c.part(i, p)
		text, dropped := c.withoutBilling(text, role)
		switch {
		case dropped:
		case !item.IsUndefined():
			read = append(read, item)
		case text != "" || !strict || c.parts:
			texts = append(texts, text)
			read = append(read, textPart(text))
		}
	}
	// vLLM makes a text of a tool's result if it has only texts.
	if c.parts && !(role == "tool" && strict && len(texts) == len(read)) {
		if last {
			read = append(read, textPart(tag))
		}
		return jinja.List(read...)
	}
	// Items stand before the text.
	return jinja.String(strings.Repeat(itemMark+"\n", len(read)-len(texts)) + strings.Join(texts, "\n") + tag)
}

// billing is the beginning of a first line of system messages that differs between requests.
// vLLM drops the line.
const billing = "x-anthropic-billing-header"

// withoutBilling returns a system message's text without its billing line. dropped is true if no
// other line is left.
func (c *conversation) withoutBilling(text, role string) (rest string, dropped bool) {
	if role != "system" || c.profile != VLLM || !strings.HasPrefix(text, billing) {
		return text, false
	}
	_, rest, _ = strings.Cut(text, "\n")
	return rest, rest == ""
}

// itemMark stands in a text at the place of an item.
const itemMark = "\ue000item\ue000"

// part reads part i of a content: a text, or an item.
func (c *conversation) part(i int, p jinja.Value) (text string, item jinja.Value) {
	kind, ok := p.Get("type").Text()
	if !ok {
		refuse("content[%d] has no type", i)
	}
	if as, ok := itemTypes[kind]; ok {
		c.items = append(c.items, toJSON(p))
		return "", jinja.Object("type", as)
	}
	if c.API == Responses && (kind == "input_text" || kind == "output_text") { // in outputs of tools
		kind = "text"
	}
	if kind != "text" && kind != "refusal" && kind != "thinking" {
		refuse("content[%d] has the unknown type %.40q", i, kind)
	}
	if text, ok = p.Get(kind).Text(); !ok {
		refuse("content[%d] of type %s has no %s", i, kind, kind)
	}
	return text, item
}

// withoutItems returns a message with the text instead in the place of each item.
func withoutItems(m jinja.Value, instead string) jinja.Value {
	out := m.Dict().Clone()
	content := m.Get("content")
	if text, ok := content.Text(); ok {
		out.Set("content", jinja.String(strings.ReplaceAll(text, itemMark, instead)))
		return jinja.FromDict(out)
	}
	var parts []jinja.Value
	for _, p := range content.Items() {
		if kind := textAt(p, "type"); kind != "text" {
			p = textPart(instead)
		}
		parts = append(parts, p)
	}
	out.Set("content", jinja.List(parts...))
	return jinja.FromDict(out)
}

// appendItem appends the hash of an image or the like, whose JSON is given: equal items
// give equal texts. It is short, because the tokens of an item do not depend on the
// number of its bytes.
func appendItem(dst, item []byte) []byte {
	sum := sha256.Sum256(item)
	return hex.AppendEncode(append(dst, "<|item "...), sum[:16])
}
