// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Profile names an engine by how it makes a prompt of a request.
type Profile string

// The profiles. The rules of vLLM are those of version 0.32, read off a running one
// and compared with it on random requests (bench/conformance); those of the other
// two are of their documentation and source as of July 2026, and not checked
// against an engine.
const (
	VLLM   Profile = "vllm"
	SGLang Profile = "sglang"
	TRTLLM Profile = "trtllm"
)

// ErrRefused is wrapped by errors about requests that the engine itself refuses,
// so that there is no prompt.
var ErrRefused = errors.New("the engine would refuse this request")

// Renderer makes prompts for one model on one kind of engine. It is immutable.
type Renderer struct {
	profile  Profile
	template template
	tools    template    // for requests with tools
	special  *jinja.Dict // bos_token and its like
	harmony  *harmony    // instead of a template
	mistral  *mistral    // instead of a template
}

// template is a chat template, and what the engine sees in it.
type template struct {
	*jinja.Template
	parts bool // contents are lists of parts, not strings
	dev   bool // it knows the role "developer"
}

func (r *Renderer) parse(name, text string) (template, error) {
	parsed, err := jinja.Parse(name, text)
	if err != nil {
		return template{}, fmt.Errorf("chat: %w", err)
	}
	t := template{Template: parsed, parts: parsed.LoopsOverContent()}
	if r.profile == SGLang {
		t.parts = slices.ContainsFunc([]string{"image", "audio", "video", "vision"}, func(kind string) bool { return strings.Contains(text, kind) }) ||
			slices.ContainsFunc([]string{"message", "msg", "m"}, func(name string) bool { return parsed.LoopsOver(name, "content") })
	}
	t.dev = strings.Contains(text, `"developer"`) || strings.Contains(text, `'developer'`)
	return t, nil
}

// Text is a rendered prompt.
type Text struct {
	Text []byte
	// Exact is how many bytes of Text are what the engine renders: all, unless
	// there is an image or other item whose place only the engine can fill.
	// Behind that stands something that is equal for equal items.
	Exact int
	// Marked is set if control tokens stand in Text as marks ([AppendMark]), and
	// nothing else in it is one.
	Marked bool
	// Kept is how many of the prompt's last tokens the engine keeps; 0 is all.
	Kept int
	// Items is how many images and the like there are, Others how many bytes the
	// prompts of a list have that stand behind the first.
	Items, Others int
}

// NewRenderer returns a renderer for a model's files. It fails if they have no chat
// template or a broken one, naming it.
//
// Of gpt-oss models vLLM makes prompts in code, which is done here, and SGLang by
// the template; what TensorRT-LLM does is not known here.
func NewRenderer(p Profile, f *Files) (*Renderer, error) {
	switch p {
	case VLLM, SGLang, TRTLLM:
	default:
		return nil, fmt.Errorf("chat: unknown engine profile %q; known are vllm, sglang, trtllm", p)
	}
	r := &Renderer{profile: p, special: jinja.NewDict(len(f.Special))}
	if f.Mistral != nil {
		if p != VLLM {
			return nil, fmt.Errorf("chat: only vLLM is known to read Mistral's own tokenizer files: %w", ErrNoTemplate)
		}
		var err error
		r.mistral, err = newMistral(f)
		return r, err
	}
	if p != SGLang && f.speaksHarmony() {
		if p == TRTLLM {
			return nil, fmt.Errorf("chat: prompts of gpt_oss as TensorRT-LLM makes them: %w", ErrNoTemplate)
		}
		var err error
		r.harmony, err = newHarmony(f)
		return r, err
	}
	text, ok := f.Templates["default"]
	if !ok && f.broken != nil {
		return nil, f.broken
	}
	if !ok {
		return nil, fmt.Errorf("chat: the model has no chat template: %w", ErrNoTemplate)
	}
	for _, name := range f.specialOrder {
		r.special.Set(name, jinja.String(f.Special[name]))
	}
	var err error
	if r.template, err = r.parse("chat_template", text); err != nil {
		return nil, err
	}
	r.tools = r.template
	if text, ok := f.Templates["tool_use"]; ok {
		if r.tools, err = r.parse("chat_template tool_use", text); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// ErrNoTemplate is wrapped where a model's files have no chat template, or the
// engine has its own way in the place of one that is not known here.
var ErrNoTemplate = errors.New("no chat template")

// Render returns the prompt of a chat request. now is what the template may say
// the time is; give it in the engine's time zone.
//
// Errors wrap [ErrRefused] if the engine refuses such a request, or are of type
// [*jinja.Error], then too. Other errors are about JSON that no engine reads.
func (r *Renderer) Render(q Request, now time.Time) (Text, error) {
	c := conversation{r: r, now: now}
	if r.harmony != nil || r.mistral != nil {
		text, err := c.coded(q)
		if err != nil {
			return Text{}, fmt.Errorf("chat: %w", err)
		}
		return text, nil
	}
	if err := c.read(q); err != nil {
		return Text{}, fmt.Errorf("chat: %w", err)
	}
	text, err := c.text(nil)
	if err != nil {
		return Text{}, fmt.Errorf("chat: %w", err)
	}
	out := Text{Text: text, Exact: len(text), Kept: c.kept, Items: len(c.items)}
	if len(c.items) == 0 {
		return out, nil
	}
	// Where the first item stands the text differs from one with other words there.
	other, err := c.text([]byte("\x00"))
	if err != nil {
		return Text{}, fmt.Errorf("chat: %w", err)
	}
	for i := range text {
		if i >= len(other) || text[i] != other[i] {
			out.Exact = i
			break
		}
	}
	for _, item := range c.items {
		out.Text = appendItem(out.Text, item)
	}
	return out, nil
}

// Kept reads truncate_prompt_tokens: how many of the last tokens the engine keeps,
// 0 if it keeps all.
func Kept(span []byte) int {
	n := 0
	for _, d := range span {
		if d < '0' || d > '9' || n > 1<<28 {
			return 0
		}
		n = n*10 + int(d-'0')
	}
	return n
}

func refused(format string, a ...any) error {
	return fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, a...))
}

// conversation is a request as the engine sees it.
type conversation struct {
	r        *Renderer
	now      time.Time
	messages []jinja.Value
	vars     *jinja.Dict
	template template
	resume   bool     // the answer goes on with the last message
	items    [][]byte // images and the like, each as its JSON
	kept     int
	size     int // of messages and tools, in bytes
}

// What the values may take that a template makes: a template that works on its
// messages makes some copies of them.
const (
	leastMemory   = 24 << 20
	memoryPerByte = 4
)

// resumeTag stands behind the text that the answer goes on with: what is behind
// it in the rendering is cut off. The space at its end tells whether the template
// keeps spaces there.
const resumeTag = "\ue000kvroute goes on here\ue000 "

func (c *conversation) read(q Request) error {
	boolean := func(name string, span []byte, def bool) (bool, error) {
		switch string(span) {
		case "":
			return def, nil
		case "true", "false":
			return string(span) == "true", nil
		}
		return false, refused("%s is no boolean", name)
	}
	generate, err := boolean("add_generation_prompt", q.AddGenerationPrompt, true)
	if err != nil {
		return err
	}
	if c.resume, err = boolean("continue_final_message", q.ContinueFinalMessage, false); err != nil {
		return err
	}
	switch {
	case q.ChatTemplate != nil:
		return refused("a chat template in the request is not trusted")
	case c.r.profile == SGLang:
		generate = !c.resume
	case c.resume && generate:
		return refused("continue_final_message and add_generation_prompt")
	}
	c.kept = Kept(q.TruncatePromptTokens)
	c.size = len(q.Messages) + len(q.Tools)
	tools, err := c.readTools(q)
	if err != nil {
		return err
	}
	if c.template = c.r.template; tools != nil {
		c.template = c.r.tools
	}
	if err := c.readMessages(q.Messages); err != nil {
		return err
	}
	return c.readVariables(q, tools, generate)
}

// readVariables collects what the template sees.
func (c *conversation) readVariables(q Request, tools []jinja.Value, generate bool) error {
	c.vars = jinja.NewDict(16)
	c.vars.Set("messages", jinja.List(c.messages...))
	c.vars.Set("tools", jinja.None())
	if q.ChatTemplateKwargs != nil {
		v, err := jinja.FromJSON(q.ChatTemplateKwargs)
		if err != nil {
			return fmt.Errorf("chat_template_kwargs: %w", err)
		}
		d := v.Dict()
		if d == nil {
			return refused("chat_template_kwargs is no object")
		}
		for name, value := range d.All() {
			if name != "messages" && name != "chat_template" {
				c.vars.Set(name, value)
			}
		}
	}
	if q.ReasoningEffort != nil {
		v, err := jinja.FromJSON(q.ReasoningEffort)
		if err != nil {
			return fmt.Errorf("reasoning_effort: %w", err)
		}
		c.vars.Set("reasoning_effort", v)
		if effort, ok := v.Text(); ok && c.r.profile == VLLM {
			if _, given := c.vars.Get("enable_thinking"); !given {
				c.vars.Set("enable_thinking", jinja.Bool(effort != "none"))
			}
		}
	}
	if q.Documents != nil {
		v, err := jinja.FromJSON(q.Documents)
		if err != nil {
			return fmt.Errorf("documents: %w", err)
		}
		c.vars.Set("documents", v)
	}
	if tools != nil {
		c.vars.Set("tools", jinja.List(tools...))
	}
	c.vars.Set("add_generation_prompt", jinja.Bool(generate))
	for name, value := range c.r.special.All() {
		if _, given := c.vars.Get(name); !given {
			c.vars.Set(name, value)
		}
	}
	return nil
}

// text renders the template. With instead, the items of the conversation are
// replaced by a text.
func (c *conversation) text(instead []byte) ([]byte, error) {
	vars := c.vars
	if instead != nil {
		vars = vars.Clone()
		replaced := make([]jinja.Value, len(c.messages))
		for i, m := range c.messages {
			replaced[i] = withoutItems(m, string(instead))
		}
		vars.Set("messages", jinja.List(replaced...))
	}
	o := jinja.Options{Now: c.now, MaxMemory: max(leastMemory, c.size*memoryPerByte)}
	out, err := c.template.Render(nil, vars, o)
	if err != nil && c.r.profile == SGLang {
		// SGLang tries once more with the functions of the tools alone.
		if bare, ok := bareTools(vars); ok {
			vars = vars.Clone()
			vars.Set("tools", bare)
			out, err = c.template.Render(nil, vars, o)
		}
	}
	if err != nil || !c.resume {
		return out, err
	}
	at := bytes.LastIndex(out, []byte(strings.TrimSuffix(resumeTag, " ")))
	if at < 0 {
		return nil, refused("the template leaves out the message to go on with")
	}
	kept := bytes.HasPrefix(out[at:], []byte(resumeTag))
	if out = out[:at]; !kept {
		out = bytes.TrimRight(out, " \t\n\r\v\f")
	}
	return out, nil
}

func bareTools(vars *jinja.Dict) (jinja.Value, bool) {
	tools, _ := vars.Get("tools")
	var bare []jinja.Value
	for _, t := range tools.Items() {
		d := t.Dict()
		if d == nil {
			return jinja.Value{}, false
		}
		f, ok := d.Get("function")
		if !ok {
			return jinja.Value{}, false
		}
		bare = append(bare, f)
	}
	return jinja.List(bare...), len(bare) > 0
}

// readTools returns the tools in the engine's order of keys, nil if there are none.
func (c *conversation) readTools(q Request) ([]jinja.Value, error) {
	if q.Tools == nil {
		if c.r.profile == VLLM && q.ToolChoice != nil && string(q.ToolChoice) != `"none"` {
			return nil, refused("tool_choice without tools")
		}
		return nil, nil
	}
	v, err := jinja.FromJSON(q.Tools)
	if err != nil {
		return nil, fmt.Errorf("tools: %w", err)
	}
	list := v.Items()
	if len(list) == 0 {
		if c.r.profile == VLLM {
			return nil, refused("tools is empty or no list")
		}
		return nil, nil
	}
	only := ""
	if c.r.profile == SGLang && q.ToolChoice != nil {
		choice, err := jinja.FromJSON(q.ToolChoice)
		if err != nil {
			return nil, fmt.Errorf("tool_choice: %w", err)
		}
		if text, _ := choice.Text(); text == "none" {
			return nil, nil
		}
		if d := choice.Dict(); d != nil {
			f, _ := d.Get("function")
			if d := f.Dict(); d != nil {
				name, _ := d.Get("name")
				only, _ = name.Text()
			}
		}
	}
	var out []jinja.Value
	for i, t := range list {
		tool := t.Dict()
		if tool == nil {
			return nil, refused("tools[%d] is no object", i)
		}
		fv, _ := tool.Get("function")
		f := fv.Dict()
		if f == nil {
			return nil, refused("tools[%d].function is no object", i)
		}
		name, _ := f.Get("name")
		text, ok := name.Text()
		if !ok {
			return nil, refused("tools[%d].function.name is no string", i)
		}
		if only != "" && text != only {
			continue
		}
		out = append(out, c.tool(tool, f, name))
	}
	return out, nil
}

// tool returns one tool as the engine writes it again.
func (c *conversation) tool(tool, f *jinja.Dict, name jinja.Value) jinja.Value {
	or := func(key string, def jinja.Value) jinja.Value {
		if v, ok := f.Get(key); ok {
			return v
		}
		return def
	}
	kind, ok := tool.Get("type")
	if !ok {
		kind = jinja.String("function")
	}
	function := jinja.NewDict(4)
	switch c.r.profile {
	case VLLM:
		function.Set("name", name)
		function.Set("description", or("description", jinja.None()))
		function.Set("parameters", or("parameters", jinja.None()))
		if strict, ok := f.Get("strict"); ok && !strict.IsNone() {
			function.Set("strict", strict)
		}
	case SGLang:
		function.Set("description", or("description", jinja.None()))
		function.Set("name", name)
		function.Set("parameters", or("parameters", jinja.None()))
		function.Set("strict", or("strict", jinja.Bool(false)))
	default:
		function = f
	}
	out := jinja.NewDict(2)
	out.Set("type", kind)
	out.Set("function", jinja.FromDict(function))
	return jinja.FromDict(out)
}
