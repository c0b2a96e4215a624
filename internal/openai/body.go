// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"cmp"
	"unsafe"

	"github.com/kvroute/kvroute/internal/jsonscan"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Body has the parts of a request's body that routing needs. All of it aliases the body, strings
// without escapes included: do not write to the body while a Body is in use, and clone a string
// that is kept for long.
type Body struct {
	Model        string
	Stream       bool
	IncludeUsage bool   // stream_options.include_usage
	MaxTokens    int    // max_completion_tokens, else max_tokens; 0 if absent or no count
	CacheSalt    string // nvext.cache_salt, else cache_salt; of a value that is no string its JSON text
	NVExt        []byte // nvext, for [ReadHints]; nil if absent
	Prompts      int    // number of prompts in a list of them; 0 for another prompt
	Choices      int    // number of responses to each prompt that the engine generates; 0 if the body names none

	// Uncached says that the engine computes the whole prompt, even if blocks of it are cached: it must return
	// probabilities of the prompt's tokens, or the client asks for it.
	Uncached bool

	// Held is the id of what a worker keeps and the request needs: the response that it continues, or SGLang's session.
	// Unkept says that the worker must not store the response.
	Held   string
	Unkept bool

	// Steering are the kinds of fields in the body that steer, for [RemoveSteering].
	Steering SteeringFields

	// Tokens is the prompt as the client tokenized it, in nvext.token_data or a chat's
	// kv_transfer_params.prompt_token_ids; nil if the field is absent or not a list of
	// token ids, which only the engine can judge.
	Tokens []uint32

	// Request has the parts of the prompt, as raw JSON. For ChatCompletions, Responses and
	// Messages its Messages are a list that is not empty, or it has a Size; for Completions its Prompt is a
	// string or a list, for Load it has a Size.
	// For Generate and Ids it has a Prompt like that of Completions, or a Size.
	chat.Request
}

// Parse is [Reader.Parse] of a Reader that knows no messages.
func Parse(e Endpoint, body []byte) (Body, *Error) { return Reader{}.Parse(e, body) }

// Reader reads bodies. It may be used by any number of goroutines.
type Reader struct {
	// Known keeps the messages of chats, so that of the next turn's body only the new messages are read. Nil keeps
	// nothing.
	Known *tokenizer.Cache
}

// Parse reads the body of a request for e. Every error has status 400 and names the place:
// malformed JSON by byte offset, a field by its name. For Other a prompt is optional and may have
// any form. The model is optional. [UTF8] makes a body of UTF-16 or UTF-32 readable.
func (r Reader) Parse(e Endpoint, body []byte) (Body, *Error) {
	var f fields
	if e == ChatCompletions {
		f.known = r.Known
	}
	if err := f.read(body); err != nil {
		return Body{}, err
	}
	b, err := f.body()
	if err != nil && (e < Load || err.Param == "model") { // the other endpoints do not have the field
		return Body{}, err
	}
	b.Uncached, b.Held = f.uncached(e), f.held(e)
	b.Unkept = f.get("store").kind() == 'f'
	b.Path = e.path()
	size := func(inexact string) chat.Request { return chat.Request{Size: len(body), Inexact: inexact} }
	switch {
	case f.promptValues > maxValues:
		b.Request = size(TooLarge)
		return b, nil
	case e == Load:
		b.Tokens, b.Request = nil, size(NoPrompt)
		return b, nil
	case e == Text || e == OpenSession || e == CloseSession:
		b.Tokens, b.Request = nil, chat.Request{Size: 1, Inexact: NoPrompt} // almost no load
		return b, nil
	case e == Generate || e == Ids:
		f.engineRequest(e, &b, len(body))
		return b, nil
	case e == Responses, e == Other && f.get("input") != nil && b.Messages == nil && b.Prompt == nil:
		b.Path = chat.PathResponses
		b.Messages = nil // no field of this endpoint
		if err := f.responsesChat(&b); err != nil {
			return Body{}, err
		}
		fields := f
		b.Convert = convertBy(b.Request, fields.sglangResponses)
	case e == Messages && f.get("messages").filled():
		f.messagesChat(&b)
		fields := f // on the heap, for the few requests that need it
		b.Convert = convertBy(b.Request, fields.sglangMessages)
	case e == ChatCompletions:
		b.Reasoning, b.InputIDs = f.get("reasoning"), f.get("input_ids")
	case e == Completions && f.get("prompt_embeds") != nil:
		b.Request = size(Embeds)
		return b, nil
	}
	if b.Path != chat.UnknownPath {
		b.Body = body
	}
	return b, b.complete(e, len(body))
}

// ParseTruncated reads the complete fields in the beginning of a body. It reads no prompt: a
// template may put a missing part before a present one. The size of the beginning is taken as the
// prompt's size.
func ParseTruncated(body []byte) Body {
	var f fields
	if readObject(&jsonscan.Scanner{In: body}, f.set) == nil {
		return Body{}
	}
	b, err := f.body()
	if err != nil {
		return Body{}
	}
	b.Tokens, b.Request = nil, chat.Request{Size: len(body), Inexact: Truncated}
	return b
}

// Reasons of [chat.Request.Inexact].
const (
	NoPrompt   = "no_prompt"   // an endpoint without a prompt, or a chat without messages
	Truncated  = "truncated"   // Envoy sent only the beginning of the body
	Embeds     = "embeds"      // the prompt is no text
	NoHistory  = "no_history"  // a part of it is at a worker, under a name
	NoRenderer = "no_renderer" // only the engine can make the prompt
	BadText    = "bad_text"    // text that the engine cannot read
	TooLarge   = "too_large"   // more values than a prompt has
)

// names are the members of a body that matter.
//
//nolint:gochecknoglobals // a table
var names = [...]string{
	"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens",
	"cache_salt", "nvext", "kv_transfer_params", "prompt_embeds", "n", "best_of",
	"prompt_logprobs", "echo", "logprobs",
	"messages", "tools", "prompt", "tool_choice", "add_generation_prompt", "continue_final_message", "chat_template",
	"chat_template_kwargs", "reasoning_effort", "documents", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "truncation",
	// Of Messages.
	"system", "output_config", "thinking",
	// Of Responses.
	"input", "instructions", "reasoning", "previous_response_id", "conversation", "previous_input_messages", "store",
	// Of Generate and Ids.
	"text", "input_ids", "token_ids", "sampling_params", "image_data", "video_data", "audio_data", "features",
	"input_embeds", "lora_path", "extra_key", "session_params", "session_id",
}

// place is the place of a member in fields, from 1 on, and its node in the tree of fields that steer. Both
// may be absent.
type place struct {
	at       int
	steering *steeringNode
}

//nolint:gochecknoglobals // a table
var places = func() map[string]place {
	m := make(map[string]place, len(names)+len(steeringTree.members))
	for i, name := range names {
		m[name] = place{i + 1, nil}
	}
	for name, node := range steeringTree.members {
		m[name] = place{m[name].at, node}
	}
	return m
}()

// fields are the members of a body that matter. They are read when the scan is over, since a later
// member of the same name replaces an earlier one.
type fields struct {
	values       [len(names) + 1]value
	steering     SteeringFields
	promptValues int    // number of values in the prompt
	err          *Error // of the first field with a value of the wrong type

	known  *tokenizer.Cache // for the first list of messages; nil when it was read
	parsed []*chat.Message  // the messages
}

// get returns the member of a name in names.
func (f *fields) get(name string) value { return f.values[places[name].at] }

func (f *fields) set(name []byte, v value) {
	p := places[string(name)]
	if p.at > 0 {
		f.values[p.at] = v
	}
	if p.steering != nil {
		f.steering |= p.steering.in(v)
	}
}

// read reads a whole body.
func (f *fields) read(body []byte) *Error {
	s := jsonscan.Scanner{In: body}
	kind := s.Peek()
	if s.At == len(body) {
		return bad("", "the request has no body")
	}
	var err error
	if kind == '{' {
		numbers, others := 0, 0
		err = s.Object(func(name []byte) error {
			name = unquote(name)
			v, err := f.value(&s, string(name) == "messages")
			f.set(name, v)
			f.count(name, s.Numbers-numbers, s.Others-others)
			numbers, others = s.Numbers, s.Others
			return err
		})
	} else {
		err = s.Skip()
	}
	if err == nil {
		err = s.End()
	}
	switch {
	case err != nil:
		return bad("", "the body is not valid JSON: "+err.Error())
	case kind != '{':
		return bad("", "the body must be a JSON object")
	}
	return nil
}

// value reads the value of a member.
func (f *fields) value(s *jsonscan.Scanner, messages bool) (value, error) {
	if !messages {
		return readValue(s)
	}
	known := f.known
	f.known, f.parsed = nil, nil
	if s.Peek() != '[' || known == nil {
		return readValue(s)
	}
	start := s.At
	var err error
	f.parsed, err = known.Messages(s)
	return s.In[start:s.At:s.At], err
}

// maxValues bounds the JSON values of a prompt: reading a value takes up to a kilobyte of memory,
// however small it is. A chat of a thousand messages with tool calls has some ten thousand values.
const maxValues = 200_000

// count adds up the values of fields that make the prompt. Token ids are cheap.
func (f *fields) count(name []byte, numbers, others int) {
	switch string(name) {
	case "messages", "tools", "input", "system", "documents", "chat_template_kwargs":
		f.promptValues += numbers + others
	case "prompt", "text", "input_ids", "token_ids":
		f.promptValues += others
	}
}

// body turns the values into a Body.
func (f *fields) body() (Body, *Error) {
	nvext := f.get("nvext")
	b := Body{NVExt: nvext, Steering: f.steering}
	b.Request = chat.Request{
		Messages:             f.get("messages"),
		Parsed:               f.parsed,
		Tools:                f.get("tools"),
		Prompt:               f.get("prompt"),
		ToolChoice:           f.get("tool_choice"),
		AddGenerationPrompt:  f.get("add_generation_prompt").plainBoolean(),
		ContinueFinalMessage: f.get("continue_final_message").plainBoolean(),
		ChatTemplate:         f.get("chat_template"),
		ChatTemplateKwargs:   f.get("chat_template_kwargs"),
		ReasoningEffort:      f.get("reasoning_effort"),
		Documents:            f.get("documents"),
		AddSpecialTokens:     f.get("add_special_tokens").plainBoolean(),
		TruncatePromptTokens: f.get("truncate_prompt_tokens"),
		TruncationSide:       f.get("truncation_side"),
	}
	b.Choices = max(f.get("n").count(), f.get("best_of").count())
	b.Prompts = f.get("prompt").prompts()
	b.Model = f.text(f.get("model"), "model")
	b.Stream = f.boolean(f.get("stream"), "stream")
	b.IncludeUsage = f.boolean(f.get("stream_options").member("include_usage"), "stream_options.include_usage")
	b.CacheSalt = cmp.Or(nvext.member("cache_salt").salt(), f.get("cache_salt").salt())
	for _, name := range [...]string{"max_completion_tokens", "max_tokens", "max_output_tokens"} {
		if b.MaxTokens = f.get(name).count(); b.MaxTokens > 0 {
			break
		}
	}
	if b.Tokens = nvext.member("token_data").ids(); b.Tokens == nil && b.Prompt == nil && !f.get("echo").isTrue() {
		b.Tokens = f.get("kv_transfer_params").member("prompt_token_ids").ids()
	}
	return b, f.err
}

// uncached reads [Body.Uncached] as vLLM does.
func (f *fields) uncached(e Endpoint) bool {
	switch e {
	case ChatCompletions:
		return f.get("prompt_logprobs") != nil || f.get("echo").isTrue()
	case Completions:
		return f.get("prompt_logprobs") != nil || f.get("echo").isTrue() && f.get("logprobs") != nil
	case Ids:
		sampling := f.get("sampling_params")
		if skip := sampling.member("skip_reading_prefix_cache"); skip != nil {
			return skip.isTrue()
		}
		return sampling.member("prompt_logprobs") != nil
	case Other, Responses, Messages, Generate, Load, Text, OpenSession, CloseSession:
	}
	return false
}

// complete returns an error for a missing or wrong field. A list without messages is no error: whether an engine serves
// it depends on the engine, on the template, and on what the worker keeps. It is routed by the size of the body.
func (b *Body) complete(e Endpoint, size int) *Error {
	messages, prompt := value(b.Messages), value(b.Prompt)
	isChat := e == ChatCompletions || e == Messages
	switch {
	case isChat && messages == nil:
		return bad("messages", "you must provide messages")
	case isChat && messages.kind() != '[':
		return bad("messages", "messages must be a list")
	case (isChat || e == Responses) && !messages.filled():
		b.Request = chat.Request{Size: size, Inexact: cmp.Or(b.Inexact, NoPrompt)}
	case e == Completions && prompt == nil:
		return bad("prompt", "you must provide a prompt")
	case e == Completions && prompt.kind() != '"' && prompt.kind() != '[':
		return bad("prompt", "prompt must be a string, or a list of strings or token ids")
	}
	return nil
}

// text returns the text of a string, "" for nil. For another value it keeps an error that names the
// field.
func (f *fields) text(v value, field string) string {
	if v == nil {
		return ""
	}
	if v.kind() != '"' {
		f.err = cmp.Or(f.err, bad(field, field+" must be a string"))
		return ""
	}
	return aliased(unquote(v))
}

// aliased returns a text without a copy, which would be the only allocation of most requests; see Body.
func aliased(text []byte) string { return unsafe.String(unsafe.SliceData(text), len(text)) }

// salt returns the text that separates the blocks of a request. SGLang takes a list of salts, one for each prompt, and
// some engines ignore the field: no engine finds blocks of the JSON text, so kvroute finds none either.
func (v value) salt() string {
	if v.kind() == '"' {
		return aliased(unquote(v))
	}
	return aliased(v)
}

// boolean returns a boolean, false for nil. For another value it keeps an error that names the field.
func (f *fields) boolean(v value, field string) bool {
	is, ok := v.boolean()
	if v != nil && !ok {
		f.err = cmp.Or(f.err, bad(field, field+" must be true or false"))
	}
	return is && ok
}
