// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Profile is the name of an engine whose rules for making a prompt of a request apply.
type Profile string

// The profiles. The rules of vLLM are those of version 0.33, and compared with its code on random
// requests of all paths (make conformance ENGINES=1); those of the other two
// are from their documentation and source as of July 2026, and not compared with an
// engine.
const (
	VLLM   Profile = engine.VLLM
	SGLang Profile = engine.SGLang
	TRTLLM Profile = engine.TRTLLM
)

// ErrRefused is in the chain of errors about requests that the engine itself refuses.
var ErrRefused = errors.New("the engine would refuse this request")

// ErrNoTemplate is in the chain of the error if a model's files have no chat template, or if the
// engine makes the prompt in a way that this package does not support.
var ErrNoTemplate = errors.New("no chat template")

// API is the API of a request whose fields became a chat.
type API uint8

// The APIs.
const (
	Chat      API = iota
	Messages      // /v1/messages, Anthropic's. Messages has system turns at their places.
	Responses     // /v1/responses
)

// Request holds the fields of a request body that make up the prompt, as raw
// JSON spans. A nil span is an absent field or null. The spans alias the body
// that they were cut from; nobody writes to them.
type Request struct {
	Messages []byte // chat completions: the array of messages
	// Parsed is Messages by [NewMessage]; nil if nobody read them.
	Parsed []*Message
	Tools  []byte // chat completions: the array of tools
	Prompt []byte // completions: a string, or a list of strings

	// API is the API of the request. The lists of tools of other APIs than Chat may be empty.
	API API
	// NoThinking is set for requests of Messages with "thinking": {"type": "disabled"}. It replaces ReasoningEffort.
	NoThinking bool
	// Instructions and Input are fields of Responses, which engines read in another way for gpt-oss.
	Instructions, Input []byte

	// Chat completions: what else has an effect on the text.
	ToolChoice           []byte
	AddGenerationPrompt  []byte
	ContinueFinalMessage []byte
	ChatTemplate         []byte
	ChatTemplateKwargs   []byte
	ReasoningEffort      []byte
	Documents            []byte
	Reasoning            []byte // SGLang: the object with the effort
	InputIDs             []byte // SGLang: the prompt's token ids

	// Both: what has an effect on the ids.
	AddSpecialTokens     []byte
	TruncatePromptTokens []byte
	TruncationSide       []byte

	// Path is the kind of API that the client used.
	Path Path
	// Body is the whole body, which workers can be asked about. Nil if only a part of it was read.
	Body []byte
	// Inexact is the reason why the engine's prompt has more than these spans; "" if it does not.
	Inexact string
	// Convert returns the chat that an engine makes of a request of another API. Nil if all engines make the same one.
	Convert func(e Engine) Request
	// Size is the number of bytes of a request whose prompt is not known; 0 for all others.
	Size int
}

// Clone returns the request with copies of its spans. Parsed and Convert are those of the request.
func (q Request) Clone() Request {
	for _, span := range []*[]byte{
		&q.Messages, &q.Tools, &q.Prompt, &q.Instructions, &q.Input, &q.ToolChoice, &q.AddGenerationPrompt,
		&q.ContinueFinalMessage, &q.ChatTemplate, &q.ChatTemplateKwargs, &q.ReasoningEffort, &q.Documents, &q.Reasoning,
		&q.InputIDs, &q.AddSpecialTokens, &q.TruncatePromptTokens, &q.TruncationSide, &q.Body,
	} {
		*span = bytes.Clone(*span)
	}
	return q
}

// Engine is an engine with a model, as far as the chat of another API depends on them.
type Engine struct {
	Profile Profile
	// Older is set for SGLang before 0.5.23: the rules are those of 0.5.17. Between is set for 0.5.18 to 0.5.22, whose
	// rules for /v1/responses are others again.
	Older, Between bool
	// InlineSystem is set if the template writes a system message that is not the first message.
	InlineSystem bool
	// Coded is set if the engine makes the prompt in code, as of gpt-oss.
	Coded bool
}

// Text is a rendered prompt.
type Text struct {
	Text []byte
	// Exact is how many bytes of Text are what the engine renders: all, unless there is
	// an image or other item, whose tokens only the engine knows. What stands behind is
	// equal for equal items.
	Exact int
	// Continued is the text of the assistant that the answer continues. The engine tokenizes it alone, as a text of its
	// own.
	Continued string
	// Marked is set if control tokens stand in Text as marks ([AppendMark]), and
	// nothing else in it is one.
	Marked bool
	// Special is set if the engine adds the tokenizer's special tokens to a chat.
	Special bool
	// Cut is the part of the prompt's tokens that the engine keeps.
	Cut Cut
	// Items is the number of images and the like, Others the number of bytes of the
	// prompts of a list except the longest.
	Items, Others int
	Class         Class // of the request
}

// template is a chat template with the properties that the engine derives from its text.
type template struct {
	*jinja.Template
	unreadable error // instead of a template; it wraps [ErrNoTemplate]

	code  *deepSeek // instead of the text
	parts bool      // contents are lists of parts, not strings
	dev   bool      // it knows the role "developer"

	generation bool // it has the tag generation
	// SGLang: a low effort sets the variable low_effort.
	lowEffort bool
}

// conversation is a request as the engine sees it. Its methods, and the functions that
// they call, panic with a *refusal.
type conversation struct {
	Request
	template
	profile Profile
	flags   *Flags
	// defaultKwargs are those of the engine: a JSON object, or nil.
	defaultKwargs []byte
	now           time.Time
	messages      []jinja.Value
	vars          *jinja.Dict
	generate      bool     // add_generation_prompt
	class         Class    // of the request, as far as it is read
	resume        bool     // the answer continues the last message
	merges        bool     // see Renderer
	items         [][]byte // images and the like, each as its JSON
	// SGLang: the text that the answer continues; and the engine is older than 0.5.23.
	continued string
	older     bool
}

// refusal is the panic value that ends the reading of a request.
type refusal struct{ err error }

// refuse ends the reading of a request that the engine refuses, too. It never returns.
func refuse(format string, a ...any) {
	panic(&refusal{fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, a...))})
}

// inside is deferred. It adds the part of the request to the text of a refusal that passes.
func inside(format string, a ...any) {
	if e := recover(); e != nil {
		if refusal, ok := e.(*refusal); ok {
			refusal.err = fmt.Errorf(format+": %w", append(a, refusal.err)...)
		}
		panic(e)
	}
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
	default:
		refuse("%s is not a boolean", name)
	}
	return string(span) == "true"
}

// toJSON writes a value that was read from JSON.
func toJSON(v jinja.Value) []byte {
	b, err := jinja.AppendJSON(nil, v)
	if err != nil {
		panic(&refusal{err})
	}
	return b
}

// readTools returns the tools with the keys that the engine gives the template, nil if there are none.
func (c *conversation) readTools() []jinja.Value {
	if c.Tools == nil {
		if c.profile == VLLM && c.API == Chat && c.ToolChoice != nil && string(c.ToolChoice) != `"none"` {
			refuse("tool_choice without tools")
		}
		return nil
	}
	if c.profile == VLLM && c.flags.ExcludeTools && string(c.ToolChoice) == `"none"` {
		return nil
	}
	list := parse("tools", c.Tools).Items()
	if len(list) == 0 && c.profile == VLLM && c.API == Chat {
		refuse("tools is empty or not a list")
	}
	out := make([]jinja.Value, 0, len(list)) // not nil: an empty list is no missing one
	for i, tool := range list {
		if _, ok := tool.Get("function").Get("name").Text(); !ok {
			refuse("tools[%d] is not an object with a function that has a name", i)
		}
		out = append(out, c.tool(tool))
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
	switch c.profile {
	case VLLM:
		set("name", jinja.None())
		set("description", jinja.None())
		set("parameters", jinja.None())
		if v := f.Get("strict"); !v.IsUndefined() && !v.IsNone() {
			function.Set("strict", v)
		}
		deferred := tool.Get("defer_loading")
		if v := f.Get("defer_loading"); !v.IsUndefined() && !v.IsNone() {
			function.Set("defer_loading", v)
		} else if !deferred.IsUndefined() && !deferred.IsNone() {
			function.Set("defer_loading", deferred)
		}
		if !deferred.IsUndefined() && !deferred.IsNone() {
			return jinja.Object("type", "function", "function", jinja.FromDict(function), "defer_loading", deferred)
		}
	default:
		function = f.Dict()
	}
	kind, ok := tool.Dict().Get("type")
	if !ok {
		kind = jinja.String("function")
	}
	return jinja.Object("type", kind, "function", jinja.FromDict(function))
}

// mapped returns the effort that the template gets.
func (c *conversation) mapped(effort jinja.Value) jinja.Value {
	if text, ok := effort.Text(); ok {
		if to, ok := c.flags.EffortMap[text]; ok {
			return jinja.String(to)
		}
	}
	return effort
}
