// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// The rules of SGLang 0.5.23; conversation.older stands for those of 0.5.17. bench/conformance compares the former with
// SGLang's own classes.

// sglangRoles are the roles of messages except user. Their letter case does not matter.
//
//nolint:gochecknoglobals // a table
var sglangRoles = []string{"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"}

// sglangEfforts are the names of reasoning efforts.
//
//nolint:gochecknoglobals // a table
var sglangEfforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"}

// readSGLang reads the request for a template.
func (r *Renderer) readSGLang(c *conversation) {
	c.generate = true
	tools := c.sglangTools()
	r.choose(c, tools)
	if c.code != nil && boolean("continue_final_message", c.ContinueFinalMessage, false) {
		refuse("continue_final_message of a prompt that code makes is not done here")
	}
	c.readMessages()
	c.readLast()
	if len(c.messages) == 0 {
		refuse("no message is left before the one to continue")
	}
	r.sglangVariables(c, tools)
}

// readLast reads the last message if the assistant wrote it and it is a text. The answer continues the text; or,
// without continue_final_message, the user wrote it.
func (c *conversation) readLast() {
	last := c.messages[len(c.messages)-1]
	text, isText := last.Get("content").Text()
	if textAt(last, "role") != "assistant" || !isText {
		return
	}
	if boolean("continue_final_message", c.ContinueFinalMessage, false) {
		c.messages, c.continued = c.messages[:len(c.messages)-1], text
		return
	}
	c.messages[len(c.messages)-1] = jinja.Object("role", "user", "content", text)
}

// sglangMessage reads message i.
func (c *conversation) sglangMessage(i int, m jinja.Value) jinja.Value {
	defer inside("messages[%d]", i)
	role := textAt(m, "role")
	isUser := role == "user"
	if lower := strings.ToLower(role); !isUser {
		if role = lower; !slices.Contains(sglangRoles, role) {
			refuse("the role %.40q is unknown", role)
		}
	}
	out := jinja.NewDict(m.Dict().Len())
	out.Set("role", jinja.String(role))
	content := m.Get("content")
	parts := content.IsList()
	switch _, isText := content.Text(); {
	case isText:
	case parts:
		content = c.sglangParts(content.Items(), role)
	case isUser || !missing(content):
		refuse("content is neither a string nor a list")
	default:
		content = jinja.String("")
	}
	if !parts || !c.parts {
		out.Set("content", content)
	}
	if !isUser {
		for _, name := range []string{"tool_call_id", "name", "phase", "reasoning_content"} {
			if v := optionalText(m, name); !v.IsNone() && !(c.older && name == "phase") {
				out.Set(name, v)
			}
		}
		if calls := m.Get("tool_calls"); !missing(calls) {
			out.Set("tool_calls", each("tool_calls", calls, func(_ int, call jinja.Value) jinja.Value {
				return sglangCall(call, role)
			}))
		}
		if tools := m.Get("tools"); !missing(tools) {
			out.Set("tools", each("tools", tools, c.sglangTool))
		}
		if v := m.Get("prefix"); v.IsBool() && !c.older {
			out.Set("prefix", v)
		}
	}
	out.Set("content", content)
	return jinja.FromDict(out)
}

// each returns a list with a function's result for each element of a list.
func each(name string, list jinja.Value, read func(i int, v jinja.Value) jinja.Value) jinja.Value {
	if !list.IsList() {
		refuse("%s is not a list", name)
	}
	out := make([]jinja.Value, 0, len(list.Items()))
	for i, v := range list.Items() {
		out = append(out, read(i, v))
	}
	return jinja.List(out...)
}

// missing reports whether a field is absent or null.
func missing(v jinja.Value) bool { return v.IsUndefined() || v.IsNone() }

// optionalText returns a field that is a string or absent; None if it is absent.
func optionalText(m jinja.Value, name string) jinja.Value {
	v := m.Get(name)
	if missing(v) {
		return jinja.None()
	}
	if _, ok := v.Text(); !ok {
		refuse("%s is not a string", name)
	}
	return v
}

// sglangParts returns the content that the template gets for parts. A template of texts gets the texts only.
func (c *conversation) sglangParts(parts []jinja.Value, role string) jinja.Value {
	var read []jinja.Value
	var texts []string
	for i, p := range parts {
		switch kind := textAt(p, "type"); kind {
		case "text":
			text, ok := p.Get("text").Text()
			if !ok {
				refuse("content[%d] has no text", i)
			}
			texts = append(texts, text)
			read = append(read, textPart(text))
		case "thinking", "reasoning":
			if role != "assistant" || missing(p.Get("thinking")) == missing(p.Get("text")) {
				refuse("content[%d] is not a thought of the assistant", i)
			}
		case "tool_reference":
			read = append(read, jinja.Object("type", kind, "name", textAt(p, "name")))
		case "image_url", "video_url", "audio_url", "input_audio":
			if c.parts {
				c.items = append(c.items, toJSON(p))
			}
			read = append(read, jinja.Object("type", itemTypes[kind]))
		default:
			refuse("content[%d] has the unknown type %.40q", i, kind)
		}
	}
	if !c.parts || role == "tool" && len(texts) == len(read) {
		return jinja.String(strings.Join(texts, " "))
	}
	return jinja.List(read...)
}

// sglangCall reads a call of a tool. The assistant's arguments become an object.
func sglangCall(call jinja.Value, role string) jinja.Value {
	f := call.Get("function")
	if f.Dict() == nil {
		refuse("a tool call has no function")
	}
	arguments := f.Get("arguments")
	text, isText := arguments.Text()
	switch {
	case missing(arguments):
		arguments = jinja.None()
	case isText && role == "assistant":
		parsed, err := jinja.FromJSON([]byte(text))
		if err != nil || parsed.Dict() == nil {
			refuse("the arguments of a tool call are not a JSON object")
		}
		arguments = parsed.Narrow()
	case !isText && arguments.Dict() == nil:
		refuse("the arguments of a tool call are neither a string nor an object")
	}
	index := call.Get("index")
	if missing(index) {
		index = jinja.None()
	}
	if kind, isText := call.Get("type").Text(); isText && kind != "function" {
		refuse("a tool call has the unknown type %.40q", kind)
	}
	return jinja.Object("id", optionalText(call, "id"), "index", index, "type", "function",
		"function", jinja.Object("name", optionalText(f, "name"), "arguments", arguments))
}

// sglangTools returns the tools that the template gets; nil if it gets none.
func (c *conversation) sglangTools() (tools []jinja.Value) {
	if c.Tools != nil {
		tools = each("tools", parse("tools", c.Tools), c.sglangTool).Items()
	}
	if c.ToolChoice == nil {
		return tools
	}
	choice := parse("tool_choice", c.ToolChoice)
	if text, isText := choice.Text(); isText {
		switch {
		case text == "none":
			return nil
		case text != "auto" && text != "required", text == "required" && len(tools) == 0:
			refuse("tool_choice is %.40q", text)
		}
		return tools
	}
	name := textAt(choice.Get("function"), "name")
	tools = slices.DeleteFunc(slices.Clone(tools), func(t jinja.Value) bool { return textAt(t.Get("function"), "name") != name })
	if len(tools) == 0 {
		refuse("tool_choice names a tool that is not in tools")
	}
	return tools
}

// sglangTool reads tool i. Its function has the client's keys, in the client's order. Before 0.5.23 SGLang had an
// order of its own.
func (c *conversation) sglangTool(i int, tool jinja.Value) jinja.Value {
	f := tool.Get("function").Dict()
	if f == nil || textAt(tool.Get("function"), "name") == "" {
		refuse("tools[%d] is not an object with a function that has a name", i)
	}
	deferred := tool.Get("defer_loading")
	if missing(deferred) {
		deferred = jinja.None()
	}
	known := jinja.NewDict(5)
	for _, name := range []string{"description", "name", "parameters", "strict", "defer_loading"} {
		v, _ := f.Get(name)
		switch isNull := missing(v); {
		case name == "strict" && isNull && c.older:
			v = jinja.Bool(false)
		case name == "defer_loading" && isNull && !deferred.IsNone():
			v = deferred
		case isNull && (name == "strict" || name == "defer_loading"):
			continue
		case isNull:
			v = jinja.None()
		case name == "parameters" && !standardTypes(v):
			refuse("tools[%d]: SGLang writes a type of the parameters in another way", i)
		}
		known.Set(name, v)
	}
	function := known
	if !c.older {
		function = jinja.NewDict(5)
		for name := range f.All() {
			if v, ok := known.Get(name); ok {
				function.Set(name, v)
			}
		}
		for name, v := range known.All() {
			function.SetDefault(name, v)
		}
	}
	kind := tool.Get("type")
	if missing(kind) {
		kind = jinja.String("function")
	}
	return jinja.Object("type", kind, "function", jinja.FromDict(function), "defer_loading", deferred)
}

// standardTypes reports whether a schema's types have the names of JSON Schema. SGLang replaces some others.
func standardTypes(schema jinja.Value) bool {
	for _, s := range schema.Items() {
		if !standardTypes(s) {
			return false
		}
	}
	if schema.Dict() == nil {
		return true
	}
	standard := func(v jinja.Value) bool {
		name, isText := v.Text()
		return !isText || slices.Contains([]string{"string", "number", "integer", "boolean", "array", "object", "null"}, name)
	}
	kinds := schema.Get("type")
	if !standard(kinds) || slices.ContainsFunc(kinds.Items(), func(v jinja.Value) bool { return !standard(v) }) {
		return false
	}
	for name, v := range schema.Dict().All() {
		switch name {
		case "properties", "patternProperties", "$defs", "definitions", "dependentSchemas":
			if v.Dict() == nil {
				continue
			}
			for _, v := range v.Dict().All() {
				if !standardTypes(v) {
					return false
				}
			}
		case "anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties", "not", "if", "then", "else", "contains",
			"propertyNames", "unevaluatedItems", "unevaluatedProperties":
			if !standardTypes(v) {
				return false
			}
		}
	}
	return true
}

// sglangVariables collects the variables of the template.
func (r *Renderer) sglangVariables(c *conversation, tools []jinja.Value) {
	kwargs, effort := c.sglangKwargs()
	c.vars = jinja.NewDict(16)
	c.vars.Set("messages", jinja.List(c.messages...))
	c.vars.Set("tools", jinja.None())
	c.vars.Set("documents", jinja.None())
	c.vars.Set("add_generation_prompt", jinja.Bool(true))
	if len(tools) > 0 {
		c.vars.Set("tools", r.toolList(tools))
	}
	if !missing(effort) {
		c.vars.Set("reasoning_effort", effort)
	}
	for name, v := range kwargs.All() {
		switch name {
		case "messages", "conversation", "tools", "tokenize", "return_dict", "add_generation_prompt", "chat_template":
			refuse("chat_template_kwargs.%s is not possible", name)
		case "continue_final_message", "return_assistant_tokens_mask":
			if v.Truth() {
				refuse("chat_template_kwargs.%s is not possible", name)
			}
		case "padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs":
		default:
			c.vars.Set(name, v)
		}
	}
	if text, _ := effort.Text(); text == "low" && c.template.lowEffort {
		c.vars.SetDefault("low_effort", jinja.Bool(true))
	}
	for name, value := range r.special.All() {
		c.vars.SetDefault(name, value)
	}
}

// sglangKwargs returns chat_template_kwargs with what the reasoning effort adds, and the effort.
func (c *conversation) sglangKwargs() (kwargs *jinja.Dict, effort jinja.Value) {
	kwargs, thinks := jinja.NewDict(4), jinja.Value{}
	if c.ReasoningEffort != nil {
		effort = parse("reasoning_effort", c.ReasoningEffort)
	}
	if c.Reasoning != nil {
		reasoning := parse("reasoning", c.Reasoning)
		asked := reasoning.Get("effort")
		if missing(asked) {
			asked = reasoning.Get("reasoning_effort")
		}
		if !missing(asked) {
			effort = asked
		}
		enabled := reasoning.Get("enabled")
		if missing(enabled) {
			enabled = reasoning.Get("enable")
		}
		if text, isText := enabled.Text(); isText {
			enabled = jinja.Bool(slices.Contains([]string{"1", "true", "yes", "y", "on"}, strings.ToLower(strings.TrimSpace(text))))
		}
		if enabled.Truth() {
			thinks = jinja.Bool(true)
		}
	}
	if !missing(effort) {
		text, _ := effort.Text()
		thinks = jinja.Bool(text != "none")
		effort = sglangEffort(effort)
	}
	if c.ChatTemplateKwargs != nil {
		d := parse("chat_template_kwargs", c.ChatTemplateKwargs).Dict()
		if d == nil && thinks.IsUndefined() {
			refuse("chat_template_kwargs is not an object")
		}
		if d != nil {
			kwargs = d.Clone()
		}
	}
	if !thinks.IsUndefined() {
		kwargs.SetDefault("thinking", thinks)
		kwargs.SetDefault("enable_thinking", thinks)
	}
	others := jinja.NewDict(kwargs.Len())
	for name, v := range kwargs.All() {
		switch {
		case name != "reasoning_effort":
			others.Set(name, v)
		case !missing(v):
			effort = v
		}
	}
	if c.defaultKwargs != nil {
		for name, v := range parse("default-chat-template-kwargs", c.defaultKwargs).Dict().All() {
			others.SetDefault(name, v)
		}
		if v, _ := others.Get("reasoning_effort"); missing(effort) && !missing(v) {
			effort = v
		}
	}
	return others, effort
}

// sglangEffort returns an effort: one of sglangEfforts, or a number.
func sglangEffort(v jinja.Value) jinja.Value {
	text, isText := v.Text()
	if slices.Contains(sglangEfforts, text) {
		return v
	}
	if !isText && !v.IsBool() && v.Dict() == nil && !v.IsList() {
		text = string(toJSON(v))
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || !(n >= 0 && n <= 0.99) {
		refuse("reasoning_effort is neither a number from 0 to 0.99 nor one of %q", sglangEfforts)
	}
	return jinja.Float(n)
}
