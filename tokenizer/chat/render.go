// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Renderer makes prompts for one model on one kind of engine. Only SetVersion and SetEngineFlags change it. Any
// number of goroutines may use it.
type Renderer struct {
	profile Profile
	older   atomic.Bool            // SGLang before 0.5.23
	between atomic.Bool            // SGLang 0.5.18 to 0.5.22
	kwargs  atomic.Pointer[string] // --default-chat-template-kwargs as the engine reports them; nil = as in flags
	inline  bool                   // the template writes a system message that is not the first message
	// SGLang: /v1/responses does not use the template, as for gpt-oss.
	codedResponses bool
	template       template
	tools          template    // for requests with tools
	special        *jinja.Dict // bos_token and the like
	sort           bool        // the objects in tools
	harmony        harmony     // instead of a template
	mistral        *mistral    // instead of a template
	flags          Flags
	merges         bool   // system turns of Messages become one message in front
	disabled       []byte // the effort for disabled thinking, as JSON
}

// NewRenderer returns a renderer for a model's files and the flags of the engine. It fails if the files have no chat
// template, or if none can be parsed; the error names it. If only the template for chats with
// tools can be parsed, or only the other one, [Renderer.Try] names the other one. It also fails for a flag with a wrong
// value.
//
// vLLM makes the prompts of gpt-oss models in code, which is done here, and SGLang by
// the template; what TensorRT-LLM does is unknown.
func NewRenderer(p Profile, f *Files, flags Flags) (*Renderer, error) {
	if known := engine.Profiles(); !slices.Contains(known, string(p)) {
		return nil, fmt.Errorf("chat: unknown engine profile %q; known are %s", p, strings.Join(known, ", "))
	}
	r := &Renderer{profile: p, special: jinja.NewDict(len(f.Special)), sort: f.SortTools, flags: flags}
	err := flags.check()
	if err != nil {
		return nil, fmt.Errorf("chat: %w", err)
	}
	switch m := f.maker(p); {
	case f.Mistral != nil && p != VLLM:
		return nil, fmt.Errorf("chat: only vLLM is known to read Mistral's own tokenizer files: %w", ErrNoTemplate)
	case f.Mistral != nil:
		r.mistral, err = newMistral(f)
	case p == TRTLLM && f.speaksHarmony():
		return nil, fmt.Errorf("chat: prompts of gpt_oss as TensorRT-LLM makes them: %w", ErrNoTemplate)
	case p == VLLM && f.speaksHarmony():
		r.harmony, err = newHarmony(f)
		r.merges = true
		if text, ok := f.Templates["default"]; ok {
			if t, err := r.parse("chat_template", text); err == nil {
				r.merges = mergesSystem(t)
			}
		}
	case m != "":
		err = r.takeMaker(m)
	default:
		err = r.takeTemplates(f)
		r.codedResponses = p == SGLang && f.speaksHarmony()
		r.inline = p == SGLang && err == nil && r.probeInline()
	}
	if err != nil {
		return nil, err
	}
	if r.harmony == nil {
		r.merges = p != VLLM || mergesSystem(r.template) || mergesSystem(r.tools)
	}
	if p == VLLM {
		r.disabled = []byte(`"` + r.disabledEffort() + `"`)
	}
	return r, nil
}

// takeTemplates reads the chat templates: one for requests without tools, and one for requests with tools. An engine
// without one of them refuses those requests.
func (r *Renderer) takeTemplates(f *Files) (err error) {
	for _, name := range slices.Sorted(maps.Keys(f.Special)) {
		r.special.Set(name, jinja.String(f.Special[name]))
	}
	plain, tools := f.choose(r.profile)
	switch {
	case f.processor != "" && !f.processorClass && f.processor != f.Templates["default"]:
		return fmt.Errorf("chat: a processor's chat template differs from the tokenizer's, and no file has a processor_class, "+
			"so the one that the engine uses is unknown; set chat-template: %w", ErrNoTemplate)
	case plain.text == "" && tools.text == "" && f.broken != nil:
		return f.broken
	case plain.text == "" && tools.text == "":
		return fmt.Errorf("chat: the model has no chat template: %w", ErrNoTemplate)
	}
	var unreadable error // one template that cannot be read leaves the other one usable
	if plain.text != "" {
		r.template, err = r.parse(plain.name, plain.text)
	}
	switch {
	case tools == plain:
		r.tools = r.template
	case tools.text != "":
		if r.tools, unreadable = r.parse(tools.name, tools.text); unreadable == nil {
			err = nil
		} else if plain.text == "" {
			err = unreadable
		}
	}
	return err
}

// takeMaker makes prompts in the way of a model whose prompts are made in code.
func (r *Renderer) takeMaker(m maker) error {
	switch {
	case m == deepSeek32, m == deepSeek4 && r.profile == VLLM:
		r.template = template{code: &deepSeek{profile: r.profile, v4: m == deepSeek4}, parts: m == deepSeek4, dev: true}
	default:
		return fmt.Errorf("chat: code of the engine makes the prompts of this model (%s), and kvroute does not have it: %w", m, ErrNoTemplate)
	}
	r.tools = r.template
	return nil
}

// generationTag is a tag of transformers that Jinja2 alone does not read.
var generationTag = regexp.MustCompile(`\{%[-+]?\s*generation\b`)

// probeInline reports whether the template writes a system message behind a user's message, as SGLang finds out.
func (r *Renderer) probeInline() bool {
	const mark = "__kvroute_inline_system__"
	say := func(role, text string) jinja.Value { return jinja.Object("role", role, "content", text) }
	vars := jinja.NewDict(4)
	vars.Set("messages", jinja.List(say("system", "t"), say("user", "t"), say("system", mark), say("user", "t")))
	vars.Set("add_generation_prompt", jinja.Bool(false))
	vars.Set("strftime_now", jinja.Value{}) // SGLang's probe does not have it
	out, err := r.template.Render(nil, vars, jinja.Options{})
	return err == nil && !r.template.generation && bytes.Contains(out, []byte(mark))
}

// SetVersion sets the version of the engine that runs, "0.5.23" for instance. The profile sglang has rules of its
// own for versions before 0.5.23. An empty text, one without three numbers, and 0.0.0, which SGLang reports when it was
// built from source without tags, stand for the newest known version.
func (r *Renderer) SetVersion(version string) {
	var n [3]int
	count, _ := fmt.Sscanf(strings.TrimPrefix(version, "v"), "%d.%d.%d", &n[0], &n[1], &n[2])
	older := r.profile == SGLang && count == len(n) && n != [3]int{} && slices.Compare(n[:], []int{0, 5, 23}) < 0
	r.older.Store(older)
	r.between.Store(older && slices.Compare(n[:], []int{0, 5, 17}) > 0)
}

// SetEngineFlags sets the flags that the running engine reports; nil = it does not report them. Of them only the
// keyword arguments count: they replace [Flags.DefaultKwargs].
func (r *Renderer) SetEngineFlags(f *engine.Flags) {
	if f == nil {
		r.kwargs.Store(nil)
	} else {
		r.kwargs.Store(&f.Kwargs)
	}
}

// defaultKwargs returns the values of --default-chat-template-kwargs: a JSON object, or nil.
func (r *Renderer) defaultKwargs() []byte {
	switch reported := r.kwargs.Load(); {
	case reported == nil:
		return r.flags.DefaultKwargs
	case *reported == "":
		return nil
	default:
		return []byte(*reported)
	}
}

// Engine is the engine as [Request.Convert] sees it.
func (r *Renderer) Engine() Engine {
	return Engine{Profile: r.profile, Older: r.older.Load(), Between: r.between.Load(), InlineSystem: r.inline, Coded: r.harmony != nil || r.mistral != nil || r.codedResponses}
}

func (r *Renderer) parse(name, text string) (template, error) {
	parsed, err := jinja.Parse(name, text)
	if err != nil {
		err = fmt.Errorf("chat: %w: %w", ErrNoTemplate, err)
		return template{unreadable: err}, err
	}
	t := template{Template: parsed, parts: parsed.LoopsOverContent(), generation: generationTag.MatchString(text)}
	if r.profile == SGLang {
		t.parts = slices.ContainsFunc([]string{"image", "audio", "video", "vision"},
			func(kind string) bool { return strings.Contains(text, kind) }) ||
			slices.ContainsFunc([]string{"message", "msg", "m"},
				func(name string) bool { return parsed.LoopsOver(name, "content") })
	}
	if r.profile == VLLM && r.flags.ContentFormat != "" && r.flags.ContentFormat != "auto" {
		t.parts = r.flags.ContentFormat == "openai"
	}
	t.lowEffort = strings.Contains(text, "low_effort") && strings.Contains(text, "truncate_history_thinking")
	t.dev = strings.Contains(text, `"developer"`) || strings.Contains(text, `'developer'`)
	return t, nil
}

// mergesSystem reports whether the engine puts the system turns of [Messages] into one message in front: if the
// template fails for a turn that is not the first. vLLM tries it in an environment without the functions of
// transformers.
func mergesSystem(t template) bool {
	if t.Template == nil || t.generation {
		return true
	}
	message := func(role string) jinja.Value { return jinja.Object("role", role, "content", "t") }
	vars := jinja.NewDict(4)
	vars.Set("messages", jinja.List(message("system"), message("user"), message("system"), message("user")))
	vars.Set("add_generation_prompt", jinja.Bool(false))
	vars.Set("raise_exception", jinja.Value{})
	vars.Set("strftime_now", jinja.Value{})
	_, err := t.Render(nil, vars, jinja.Options{})
	return err != nil
}

// disabledEffort returns the effort for disabled thinking: none, or low if the template refuses none or treats it as
// another effort.
func (r *Renderer) disabledEffort() string {
	if e := r.flags.DisabledEffort; e != "" && e != "auto" {
		return e
	}
	render := func(effort string) (string, bool) {
		t, err := r.Render(nil, Request{Messages: []byte(`[{"role":"user","content":"Hi"}]`), ReasoningEffort: []byte(`"` + effort + `"`)}, time.Time{})
		return string(t.Text), err == nil
	}
	none, ok := render("none")
	if !ok {
		return "low"
	}
	for _, effort := range efforts {
		if text, ok := render(effort); ok && text == none {
			return "low"
		}
	}
	return "none"
}

// Harmony reports whether prompts are made in the format of gpt-oss.
func (r *Renderer) Harmony() bool { return r.harmony != nil }

// Render returns the prompt of a chat request. now is the time that the template may
// read, in the engine's time zone. The text may be in the memory of room.
//
// Errors wrap [ErrRefused] if the engine refuses such a request, or are of type
// [*jinja.Error], then too. Other errors are about JSON that no engine reads.
func (r *Renderer) Render(room []byte, q Request, now time.Time) (t Text, err error) {
	defer func() {
		switch e := recover().(type) {
		case nil:
		case *refusal:
			t, err = Text{}, fmt.Errorf("chat: %w", e.err)
		default:
			panic(e)
		}
	}()
	c := &conversation{Request: q, profile: r.profile, flags: &r.flags, now: now, merges: r.merges, class: q.class()}
	c.defaultKwargs = r.defaultKwargs()
	defer func() { t.Class = c.class }()
	if q.NoThinking && r.disabled != nil {
		c.ReasoningEffort = r.disabled
	}
	switch {
	case r.mistral != nil:
		return r.mistral.render(c), nil
	case r.harmony != nil:
		return r.harmony.render(c), nil
	}
	if r.profile == SGLang {
		c.older = r.older.Load()
		r.readSGLang(c)
	} else {
		r.read(c)
	}
	text := c.text(room, "")
	t = Text{Text: text, Exact: len(text), Items: len(c.items), Continued: c.continued}
	t.Special = c.code != nil && c.profile == SGLang
	if len(c.items) == 0 {
		return t, nil
	}
	c.class |= WithItems
	// The first item stands where a text with other words in its place differs.
	other := c.text(nil, "\x00")
	for t.Exact = 0; t.Exact < min(len(text), len(other)) && text[t.Exact] == other[t.Exact]; {
		t.Exact++
	}
	for _, item := range c.items {
		t.Text = appendItem(t.Text, item)
	}
	return t, nil
}

// read reads the request for a template.
func (r *Renderer) read(c *conversation) {
	c.generate = boolean("add_generation_prompt", c.AddGenerationPrompt, true)
	c.resume = boolean("continue_final_message", c.ContinueFinalMessage, false)
	switch {
	case c.ChatTemplate != nil:
		refuse("a chat template in the request is not trusted")
	case c.resume && c.generate:
		refuse("continue_final_message and add_generation_prompt")
	}
	tools := c.readTools()
	r.choose(c, tools)
	c.resume = c.resume && c.code == nil // vLLM's encoders ignore it
	c.readMessages()
	r.readVariables(c, tools)
}

// choose sets the template of a request with these tools.
func (r *Renderer) choose(c *conversation, tools []jinja.Value) {
	if c.template = r.template; tools != nil {
		c.template = r.tools
	}
	if c.unreadable != nil {
		panic(&refusal{c.unreadable})
	}
	if c.code == nil && c.template.Template == nil {
		refuse("the model has no chat template for such a request")
	}
}

// readVariables collects the variables of the template.
func (r *Renderer) readVariables(c *conversation, tools []jinja.Value) {
	c.vars = jinja.NewDict(16)
	c.vars.Set("messages", jinja.List(c.messages...))
	c.vars.Set("tools", jinja.None())
	c.setKwargs("default-chat-template-kwargs", c.defaultKwargs)
	list := r.toolList(tools)
	if tools != nil {
		c.vars.Set("tools", list)
	}
	thinking := c.setKwargs("chat_template_kwargs", c.ChatTemplateKwargs)
	if c.ReasoningEffort != nil {
		v := c.mapped(parse("reasoning_effort", c.ReasoningEffort))
		c.vars.Set("reasoning_effort", v)
		if effort, ok := v.Text(); ok && c.profile == VLLM && !thinking {
			c.vars.Set("enable_thinking", jinja.Bool(effort != "none"))
		}
	}
	if c.Documents != nil {
		c.vars.Set("documents", parse("documents", c.Documents))
	}
	if tools != nil && c.profile != VLLM {
		c.vars.Set("tools", list) // whatever chat_template_kwargs have
	}
	c.vars.Set("add_generation_prompt", jinja.Bool(c.generate))
	for name, value := range r.special.All() {
		c.vars.SetDefault(name, value)
	}
}

// toolList returns the tools that the template gets.
func (r *Renderer) toolList(tools []jinja.Value) jinja.Value {
	list := jinja.List(tools...)
	if r.sort {
		list = sorted(list)
	}
	return list
}

// sorted returns a value that was read from JSON with the keys of all its objects sorted.
func sorted(v jinja.Value) jinja.Value {
	if d := v.Dict(); d != nil {
		keys := make([]string, 0, d.Len())
		for key := range d.All() {
			keys = append(keys, key)
		}
		slices.Sort(keys)
		out := jinja.NewDict(len(keys))
		for _, key := range keys {
			out.Set(key, sorted(v.Get(key)))
		}
		return jinja.FromDict(out)
	}
	if !v.IsList() {
		return v
	}
	out := make([]jinja.Value, len(v.Items()))
	for i, item := range v.Items() {
		out[i] = sorted(item)
	}
	return jinja.List(out...)
}

// setKwargs adds the values of a request's chat_template_kwargs, or of the engine's, to the variables. vLLM treats
// null and "auto" as absent. It reports whether enable_thinking is among them, with any value.
func (c *conversation) setKwargs(name string, span []byte) (thinking bool) {
	if span == nil {
		return false
	}
	d := parse(name, span).Dict()
	if d == nil {
		refuse("%s is not an object", name)
	}
	for name, value := range d.All() {
		text, _ := value.Text()
		thinking = thinking || name == "enable_thinking"
		if absent := c.profile == VLLM && (value.IsNone() || text == "auto"); !absent && name != "messages" && name != "chat_template" {
			c.vars.Set(name, value)
		}
	}
	return thinking
}

// The limit of memory for the values that a template makes is memoryPerByte for each byte of
// messages and tools, but at least leastMemory: a template may copy its messages several times.
const (
	leastMemory   = 24 << 20
	memoryPerByte = 4
)

// text renders the template, in room if it is large enough. A text other than "" replaces the items of the
// conversation.
func (c *conversation) text(room []byte, instead string) []byte {
	vars := c.vars
	if instead != "" {
		vars = vars.Clone()
		replaced := make([]jinja.Value, len(c.messages))
		for i, m := range c.messages {
			replaced[i] = withoutItems(m, instead)
		}
		vars.Set("messages", jinja.List(replaced...))
	}
	if c.code != nil {
		return c.code.render(room[:0], vars)
	}
	o := jinja.Options{Now: c.now, MaxMemory: max(leastMemory, (len(c.Messages)+len(c.Tools))*memoryPerByte)}
	out, err := c.template.Render(slices.Grow(room[:0], len(c.Messages)+len(c.Tools)), vars, o)
	if e, ok := errors.AsType[*jinja.Error](err); ok && !e.Lacking() && c.profile == SGLang {
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
		refuse("the template leaves out the message to continue")
	}
	if bytes.HasPrefix(out[at:], []byte(resumeTag)) {
		return out[:at]
	}
	return bytes.TrimRight(out[:at], " \t\n\r\v\f")
}
