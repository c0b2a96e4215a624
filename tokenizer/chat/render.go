// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Profile names an engine by how it makes a prompt of a request.
type Profile string

// The profiles. The rules of vLLM are those of version 0.32, taken from a running one
// and compared with it on random requests (bench/conformance); those of the other two
// are from their documentation and source as of July 2026, and not compared with an
// engine.
const (
	VLLM   Profile = "vllm"
	SGLang Profile = "sglang"
	TRTLLM Profile = "trtllm"
)

// ErrRefused is wrapped by errors about requests that the engine itself refuses,
// so that there is no prompt.
var ErrRefused = errors.New("the engine would refuse this request")

// ErrNoTemplate is wrapped where a model's files have no chat template, or the
// engine makes the prompt in another way that this package does not know.
var ErrNoTemplate = errors.New("no chat template")

// Renderer makes prompts for one model on one kind of engine. It is immutable.
type Renderer struct {
	profile  Profile
	template template
	tools    template    // for requests with tools
	special  *jinja.Dict // bos_token and the like
	harmony  *harmony    // instead of a template
	mistral  *mistral    // instead of a template
}

// template is a chat template, and what the engine sees in it.
type template struct {
	*jinja.Template
	parts bool // contents are lists of parts, not strings
	dev   bool // it knows the role "developer"
}

// Text is a rendered prompt.
type Text struct {
	Text []byte
	// Exact is how many bytes of Text are what the engine renders: all, unless there is
	// an image or other item, whose tokens only the engine knows. What stands behind is
	// equal for equal items.
	Exact int
	// Marked is set if control tokens stand in Text as marks ([AppendMark]), and
	// nothing else in it is one.
	Marked bool
	// Kept is how many of the prompt's last tokens the engine keeps; 0 is all.
	Kept int
	// Items is the number of images and the like, Others the number of bytes of the
	// prompts of a list except the longest.
	Items, Others int
}

// NewRenderer returns a renderer for a model's files. It fails if they have no chat
// template or one that cannot be parsed; the error names it.
//
// vLLM makes the prompts of gpt-oss models in code, which is done here, and SGLang by
// the template; what TensorRT-LLM does is unknown.
func NewRenderer(p Profile, f *Files) (*Renderer, error) {
	if !slices.Contains([]Profile{VLLM, SGLang, TRTLLM}, p) {
		return nil, fmt.Errorf("chat: unknown engine profile %q; known are vllm, sglang, trtllm", p)
	}
	r := &Renderer{profile: p, special: jinja.NewDict(len(f.Special))}
	var err error
	switch text, ok := f.Templates["default"]; {
	case f.Mistral != nil && p != VLLM:
		return nil, fmt.Errorf("chat: only vLLM is known to read Mistral's own tokenizer files: %w", ErrNoTemplate)
	case f.Mistral != nil:
		r.mistral, err = newMistral(f)
	case p == TRTLLM && f.speaksHarmony():
		return nil, fmt.Errorf("chat: prompts of gpt_oss as TensorRT-LLM makes them: %w", ErrNoTemplate)
	case p == VLLM && f.speaksHarmony():
		r.harmony, err = newHarmony(f)
	case !ok && f.broken != nil:
		return nil, f.broken
	case !ok:
		return nil, fmt.Errorf("chat: the model has no chat template: %w", ErrNoTemplate)
	default:
		for _, name := range slices.Sorted(maps.Keys(f.Special)) {
			r.special.Set(name, jinja.String(f.Special[name]))
		}
		if r.template, err = r.parse("chat_template", text); err != nil {
			return nil, err
		}
		r.tools = r.template
		if text, ok := f.Templates["tool_use"]; ok {
			r.tools, err = r.parse("chat_template tool_use", text)
		}
	}
	if err != nil {
		return nil, err
	}
	return r, nil
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

// Harmony reports whether prompts are made in the format of gpt-oss.
func (r *Renderer) Harmony() bool { return r.harmony != nil }

// conversation is a request as the engine sees it. Its methods, and the functions that
// they call, panic with a *refusal.
type conversation struct {
	r        *Renderer
	q        Request
	now      time.Time
	messages []jinja.Value
	vars     *jinja.Dict
	template template
	generate bool     // add_generation_prompt
	resume   bool     // the answer continues the last message
	items    [][]byte // images and the like, each as its JSON
}

// refusal is what ends the reading of a request.
type refusal struct{ err error }

// refused returns the refusal of a request that the engine refuses, too.
func refused(format string, a ...any) *refusal {
	return &refusal{fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, a...))}
}

// inside is deferred: it names the part of the request in a refusal that passes.
func inside(format string, a ...any) {
	if e := recover(); e != nil {
		if refusal, ok := e.(*refusal); ok {
			refusal.err = fmt.Errorf(format+": %w", append(a, refusal.err)...)
		}
		panic(e)
	}
}

// Render returns the prompt of a chat request. now is the time that the template may
// read, in the engine's time zone.
//
// Errors wrap [ErrRefused] if the engine refuses such a request, or are of type
// [*jinja.Error], then too. Other errors are about JSON that no engine reads.
func (r *Renderer) Render(q Request, now time.Time) (t Text, err error) {
	defer func() {
		switch e := recover().(type) {
		case nil:
		case *refusal:
			t, err = Text{}, fmt.Errorf("chat: %w", e.err)
		default:
			panic(e)
		}
	}()
	c := &conversation{r: r, q: q, now: now}
	switch {
	case r.mistral != nil:
		return r.mistral.render(c), nil
	case r.harmony != nil:
		return r.harmony.render(c), nil
	}
	c.read()
	text := c.text("")
	t = Text{Text: text, Exact: len(text), Kept: Kept(q.TruncatePromptTokens), Items: len(c.items)}
	if len(c.items) == 0 {
		return t, nil
	}
	// The first item stands where a text with other words in its place differs.
	other := c.text("\x00")
	for t.Exact = 0; t.Exact < min(len(text), len(other)) && text[t.Exact] == other[t.Exact]; {
		t.Exact++
	}
	for _, item := range c.items {
		t.Text = appendItem(t.Text, item)
	}
	return t, nil
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

// parse reads a field of the request.
func parse(name string, span []byte) jinja.Value {
	v, err := jinja.FromJSON(span)
	if err != nil {
		panic(&refusal{fmt.Errorf("%s: %w", name, err)})
	}
	return v
}

func boolean(name string, span []byte, byDefault bool) bool {
	switch string(span) {
	case "":
		return byDefault
	case "true", "false":
		return string(span) == "true"
	}
	panic(refused("%s is not a boolean", name))
}

// resumeTag stands behind the text that the answer continues: what is behind it in the
// rendering is cut off. The space at its end shows whether the template keeps spaces.
const resumeTag = "\ue000kvroute goes on here\ue000 "

// read reads the request for a template.
func (c *conversation) read() {
	c.generate = boolean("add_generation_prompt", c.q.AddGenerationPrompt, true)
	c.resume = boolean("continue_final_message", c.q.ContinueFinalMessage, false)
	switch {
	case c.q.ChatTemplate != nil:
		panic(refused("a chat template in the request is not trusted"))
	case c.r.profile == SGLang:
		c.generate = !c.resume
	case c.resume && c.generate:
		panic(refused("continue_final_message and add_generation_prompt"))
	}
	tools := c.readTools()
	if c.template = c.r.template; tools != nil {
		c.template = c.r.tools
	}
	c.readMessages()
	c.readVariables(tools)
}

// readVariables collects the variables of the template.
func (c *conversation) readVariables(tools []jinja.Value) {
	c.vars = jinja.NewDict(16)
	c.vars.Set("messages", jinja.List(c.messages...))
	c.vars.Set("tools", jinja.None())
	if c.q.ChatTemplateKwargs != nil {
		d := parse("chat_template_kwargs", c.q.ChatTemplateKwargs).Dict()
		if d == nil {
			panic(refused("chat_template_kwargs is not an object"))
		}
		for name, value := range d.All() {
			if name != "messages" && name != "chat_template" {
				c.vars.Set(name, value)
			}
		}
	}
	if c.q.ReasoningEffort != nil {
		v := parse("reasoning_effort", c.q.ReasoningEffort)
		c.vars.Set("reasoning_effort", v)
		if effort, ok := v.Text(); ok && c.r.profile == VLLM {
			c.vars.SetDefault("enable_thinking", jinja.Bool(effort != "none"))
		}
	}
	if c.q.Documents != nil {
		c.vars.Set("documents", parse("documents", c.q.Documents))
	}
	if tools != nil {
		c.vars.Set("tools", jinja.List(tools...))
	}
	c.vars.Set("add_generation_prompt", jinja.Bool(c.generate))
	for name, value := range c.r.special.All() {
		c.vars.SetDefault(name, value)
	}
}

// What the values may take that a template makes: a template that works on its
// messages makes some copies of them.
const (
	leastMemory   = 24 << 20
	memoryPerByte = 4
)

// text renders the template. A text other than "" replaces the items of the
// conversation.
func (c *conversation) text(instead string) []byte {
	vars := c.vars
	if instead != "" {
		vars = vars.Clone()
		replaced := make([]jinja.Value, len(c.messages))
		for i, m := range c.messages {
			replaced[i] = withoutItems(m, instead)
		}
		vars.Set("messages", jinja.List(replaced...))
	}
	o := jinja.Options{Now: c.now, MaxMemory: max(leastMemory, (len(c.q.Messages)+len(c.q.Tools))*memoryPerByte)}
	out, err := c.template.Render(nil, vars, o)
	if err != nil && c.r.profile == SGLang {
		// SGLang tries once more with the functions of the tools alone.
		var bare []jinja.Value
		tools, _ := vars.Get("tools")
		for _, t := range tools.Items() {
			bare = append(bare, t.Get("function"))
		}
		if len(bare) > 0 && !slices.ContainsFunc(bare, jinja.Value.IsUndefined) {
			vars = vars.Clone()
			vars.Set("tools", jinja.List(bare...))
			out, err = c.template.Render(nil, vars, o)
		}
	}
	if err != nil {
		panic(&refusal{err})
	}
	if !c.resume {
		return out
	}
	at := bytes.LastIndex(out, []byte(strings.TrimSuffix(resumeTag, " ")))
	if at < 0 {
		panic(refused("the template leaves out the message to continue"))
	}
	if bytes.HasPrefix(out[at:], []byte(resumeTag)) {
		return out[:at]
	}
	return bytes.TrimRight(out[:at], " \t\n\r\v\f")
}

// readTools returns the tools as the engine writes them again, nil if there are none.
func (c *conversation) readTools() []jinja.Value {
	if c.q.Tools == nil {
		if c.r.profile == VLLM && c.q.ToolChoice != nil && string(c.q.ToolChoice) != `"none"` {
			panic(refused("tool_choice without tools"))
		}
		return nil
	}
	list := parse("tools", c.q.Tools).Items()
	if len(list) == 0 && c.r.profile == VLLM {
		panic(refused("tools is empty or not a list"))
	}
	only := ""
	if c.r.profile == SGLang && c.q.ToolChoice != nil && len(list) > 0 {
		choice := parse("tool_choice", c.q.ToolChoice)
		if text, _ := choice.Text(); text == "none" {
			return nil
		}
		only, _ = choice.Get("function").Get("name").Text()
	}
	var out []jinja.Value
	for i, tool := range list {
		name, ok := tool.Get("function").Get("name").Text()
		if !ok {
			panic(refused("tools[%d] is not an object with a function that has a name", i))
		}
		if only == "" || name == only {
			out = append(out, c.tool(tool))
		}
	}
	return out
}

// tool returns one tool with the engine's keys, in its order.
func (c *conversation) tool(tool jinja.Value) jinja.Value {
	f := tool.Get("function")
	function := jinja.NewDict(4)
	set := func(key string, byDefault jinja.Value) {
		v, ok := f.Dict().Get(key)
		if !ok {
			v = byDefault
		}
		function.Set(key, v)
	}
	switch c.r.profile {
	case VLLM:
		set("name", jinja.None())
		set("description", jinja.None())
		set("parameters", jinja.None())
		if v := f.Get("strict"); !v.IsUndefined() && !v.IsNone() {
			function.Set("strict", v)
		}
	case SGLang:
		set("description", jinja.None())
		set("name", jinja.None())
		set("parameters", jinja.None())
		set("strict", jinja.Bool(false))
	default:
		function = f.Dict()
	}
	kind, ok := tool.Dict().Get("type")
	if !ok {
		kind = jinja.String("function")
	}
	return jinja.Object("type", kind, "function", jinja.FromDict(function))
}
