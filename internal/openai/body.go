// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"math"
	"unsafe"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Body is what routing needs of a request's body. All of it aliases the body,
// strings without escapes included: the body must not be written to while a Body
// is in use, and whoever keeps a string for long should clone it.
type Body struct {
	Model        string
	Stream       bool
	IncludeUsage bool   // stream_options.include_usage
	MaxTokens    int    // max_completion_tokens, else max_tokens; 0 if absent or no count
	CacheSalt    string // nvext.cache_salt, else cache_salt
	NVExt        []byte // nvext, for [ParseHints]; nil if absent
	Echo         bool   // the client wants the prompt's text back

	// Tokens is the prompt as the client tokenized it, in nvext.token_data or a
	// chat's kv_transfer_params.prompt_token_ids; nil if there is none, or no
	// list of token ids: what an engine makes of that is its own.
	Tokens []uint32

	// Request is what makes the prompt, as raw JSON. For ChatCompletions, Responses
	// and Messages its Messages are a list that is not empty, for Completions its
	// Prompt is a string or a list, for Load it has a Size.
	// For Generate and Ids it has a Prompt like that of Completions, or a Size.
	chat.Request
}

// Parse cuts the body of a request for e. Every error has status 400 and says
// what is wrong and where: malformed JSON by byte offset, a field by its name.
// For Other no prompt is asked for, and anything that can be one is taken. Where
// [Endpoint.NeedsModel] says so no model is asked for.
func Parse(e Endpoint, body []byte) (Body, *Error) {
	var f fields
	s := scanner{in: body}
	switch c := s.peek(); {
	case s.at == len(body):
		return Body{}, bad("", "the request has no body")
	case c != '{':
		if err := s.skip(); err != nil {
			return Body{}, err
		}
	default:
		numbers, others := 0, 0
		if err := s.object(func(name, value []byte) {
			f.top(name, value)
			f.count(name, s.numbers-numbers, s.others-others)
			numbers, others = s.numbers, s.others
		}); err != nil {
			return Body{}, err
		}
		f.object = true
	}
	if s.peek(); s.at != len(body) {
		return Body{}, s.malformed("unexpected data after the end")
	}
	if !f.object {
		return Body{}, bad("", "the body must be a JSON object")
	}
	b, err := f.body()
	if err != nil {
		return Body{}, err
	}
	switch {
	case f.values > maxValues:
		b.Request = chat.Request{Size: len(body), Inexact: TooLarge}
		if !e.NeedsModel() {
			return b, nil
		}
		return b, b.complete(Other)
	case e == Load:
		b.Tokens, b.Request = nil, chat.Request{Size: len(body), Inexact: NoPrompt}
		return b, nil
	case e == Text:
		b.Tokens, b.Request = nil, chat.Request{Size: 1, Inexact: NoPrompt} // no load to speak of
		return b, nil
	case e == Generate || e == Ids:
		f.engineRequest(e, &b, len(body))
		return b, nil
	case e == Responses, e == Other && f.input != nil && f.request.Messages == nil && f.request.Prompt == nil:
		b.Messages = nil // no field of this endpoint
		if err := f.response(&b); err != nil {
			return Body{}, err
		}
	case e == Messages && f.request.Messages != nil && filled(f.request.Messages):
		f.messagesChat(&b)
	case f.promptEmbeds != nil && e == Completions:
		b.Request = chat.Request{Size: len(body), Inexact: Embeds}
		return b, b.complete(Other)
	}
	return b, b.complete(e)
}

// ParseTruncated reads the fields that are complete in the beginning of a body. It reads no
// prompt: a template may put what is missing before what is there. The size of the
// beginning stands for the prompt's.
func ParseTruncated(body []byte) Body {
	f := fields{object: true}
	s := scanner{in: body}
	if s.peek() != '{' || s.object(f.top) == nil {
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
	NoPrompt   = "no_prompt"   // an endpoint without a prompt
	Truncated  = "truncated"   // only the beginning of the body is there
	Embeds     = "embeds"      // the prompt is no text
	NoHistory  = "no_history"  // a part of it is at a worker, under a name
	NoRenderer = "no_renderer" // the engine makes it in a way of its own
	BadText    = "bad_text"    // text that the engine cannot read
	TooLarge   = "too_large"   // more values than a prompt has
)

// fields are the spans of the fields that matter, nil if absent or null. They are
// looked at when the scan is over, since a later copy may replace any of them.
type fields struct {
	object bool // the body is an object
	values int  // that the prompt is made of

	model, stream, streamOptions   []byte
	maxTokens, maxCompletionTokens []byte
	cacheSalt, nvext, kvTransfer   []byte
	promptEmbeds, echo             []byte
	request                        chat.Request

	engine engineFields // of Generate and Ids
	// Of Messages.
	system, outputConfig []byte
	// Of Responses.
	input, instructions, reasoning, maxOutputTokens []byte
	elsewhere                                       []byte // names what is not in the body
}

// maxValues bounds the JSON values that a prompt may be made of: reading one takes
// up to a kilobyte, which a body of small values would multiply. A chat of a
// thousand messages with all their calls has some ten thousand.
const maxValues = 200_000

// count adds up the values of fields that make the prompt. Token ids are cheap.
func (f *fields) count(name []byte, numbers, others int) {
	switch string(name) {
	case "messages", "tools", "input", "system", "documents", "chat_template_kwargs":
		f.values += numbers + others
	case "prompt", "text", "input_ids", "token_ids":
		f.values += others
	}
}

// top takes a field of the body.
func (f *fields) top(name, value []byte) {
	switch string(name) {
	case "model":
		f.model = value
	case "stream":
		f.stream = value
	case "stream_options":
		f.streamOptions = value
	case "max_tokens":
		f.maxTokens = value
	case "max_completion_tokens":
		f.maxCompletionTokens = value
	case "cache_salt":
		f.cacheSalt = value
	case "nvext":
		f.nvext = value
	case "kv_transfer_params":
		f.kvTransfer = value
	case "echo":
		f.echo = value
	case "prompt_embeds":
		f.promptEmbeds = value
	case "system":
		f.system = value
	case "output_config":
		f.outputConfig = value
	case "input":
		f.input = value
	case "instructions":
		f.instructions = value
	case "reasoning":
		f.reasoning = value
	case "max_output_tokens":
		f.maxOutputTokens = value
	case "previous_response_id", "conversation", "previous_input_messages":
		if value != nil {
			f.elsewhere = value
		}
	case "messages":
		f.request.Messages = value
	case "tools":
		f.request.Tools = value
	case "prompt":
		f.request.Prompt = value
	case "tool_choice":
		f.request.ToolChoice = value
	case "add_generation_prompt":
		f.request.AddGenerationPrompt = value
	case "continue_final_message":
		f.request.ContinueFinalMessage = value
	case "chat_template":
		f.request.ChatTemplate = value
	case "chat_template_kwargs":
		f.request.ChatTemplateKwargs = value
	case "reasoning_effort":
		f.request.ReasoningEffort = value
	case "documents":
		f.request.Documents = value
	case "add_special_tokens":
		f.request.AddSpecialTokens = value
	case "truncate_prompt_tokens":
		f.request.TruncatePromptTokens = value
	default:
		f.engine.top(name, value)
	}
}

// body turns the spans into values.
func (f *fields) body() (b Body, err *Error) {
	b = Body{Request: f.request, NVExt: f.nvext, Echo: string(f.echo) == "true"}
	if b.Model, err = text(f.model, "model"); err != nil {
		return b, err
	}
	if b.Stream, err = boolean(f.stream, "stream"); err != nil {
		return b, err
	}
	b.IncludeUsage, err = boolean(member(f.streamOptions, "include_usage"), "stream_options.include_usage")
	if err != nil {
		return b, err
	}
	if b.CacheSalt, err = text(member(f.nvext, "cache_salt"), "nvext.cache_salt"); err != nil {
		return b, err
	}
	if b.CacheSalt == "" {
		if b.CacheSalt, err = text(f.cacheSalt, "cache_salt"); err != nil {
			return b, err
		}
	}
	for _, most := range [][]byte{f.maxCompletionTokens, f.maxTokens, f.maxOutputTokens} {
		if b.MaxTokens = count(most); b.MaxTokens > 0 {
			break
		}
	}
	if b.Tokens = ids(member(f.nvext, "token_data")); b.Tokens == nil && f.request.Messages != nil {
		b.Tokens = ids(member(f.kvTransfer, "prompt_token_ids"))
	}
	return b, nil
}

// complete reports what is missing.
func (b *Body) complete(e Endpoint) *Error {
	switch {
	case b.Model == "":
		return bad("model", "you must provide a model parameter")
	case e == Responses && b.Messages == nil:
		return bad("input", "you must provide input")
	case e == Responses && !filled(b.Messages):
		return bad("input", "input must be a string or a list with at least one item")
	case (e == ChatCompletions || e == Messages) && b.Messages == nil:
		return bad("messages", "you must provide messages")
	case (e == ChatCompletions || e == Messages) && !filled(b.Messages):
		return bad("messages", "messages must be a list with at least one message")
	case e == Completions && b.Prompt == nil:
		return bad("prompt", "you must provide a prompt")
	case e == Completions && b.Prompt[0] != '"' && b.Prompt[0] != '[':
		return bad("prompt", "prompt must be a string, or a list of strings or token ids")
	}
	return nil
}

// The functions below read spans, which are valid JSON without space around it.

// member returns the span of a member of an object; nil if there is none, or raw
// is something else, which is the engine's to judge.
func member(raw []byte, name string) (value []byte) {
	if len(raw) == 0 || raw[0] != '{' {
		return nil
	}
	s := scanner{in: raw}
	_ = s.object(func(n, v []byte) { // scanned before, so there is no error
		if string(n) == name {
			value = v
		}
	})
	return value
}

// filled reports whether raw is a list that is not empty.
func filled(raw []byte) bool {
	s := scanner{in: raw, at: 1}
	return raw[0] == '[' && s.peek() != ']'
}

func text(raw []byte, name string) (string, *Error) {
	if raw == nil {
		return "", nil
	}
	if raw[0] != '"' {
		return "", bad(name, name+" must be a string")
	}
	t := unquote(raw)
	// Saves the one allocation of most requests. Body tells the price.
	return unsafe.String(unsafe.SliceData(t), len(t)), nil
}

func boolean(raw []byte, name string) (bool, *Error) {
	if raw == nil {
		return false, nil
	}
	if raw[0] != 't' && raw[0] != 'f' {
		return false, bad(name, name+" must be true or false")
	}
	return raw[0] == 't', nil
}

// count returns raw as a count. Anything else is the engine's to judge and is
// read as 0.
func count(raw []byte) int {
	const limit = 1 << 30 // more than any context; keeps n*10 in range
	n := 0
	for _, c := range raw {
		if c < '0' || c > '9' || n > limit {
			return 0
		}
		n = n*10 + int(c-'0')
	}
	return n
}

// ids returns a list of token ids, nil if raw is anything else or empty.
func ids(raw []byte) []uint32 {
	if raw == nil || raw[0] != '[' {
		return nil
	}
	list := make([]uint32, 0, len(raw)/4)
	s := scanner{in: raw}
	_ = s.list(func(v []byte) { // scanned before, so there is no error
		n := uint64(0)
		for _, c := range v {
			if c < '0' || c > '9' || n > math.MaxUint32 {
				n = math.MaxUint64
				break
			}
			n = n*10 + uint64(c-'0')
		}
		if v == nil || n > math.MaxUint32 {
			list = nil
		}
		if list != nil {
			list = append(list, uint32(n))
		}
	})
	if len(list) == 0 {
		return nil
	}
	return list
}

// unquote returns the text of a string. It is a part of raw, unless there are
// escapes in it.
func unquote(raw []byte) []byte {
	t := raw[1 : len(raw)-1]
	if plain(t) == len(t) {
		return t
	}
	var s string
	_ = json.Unmarshal(raw, &s) // scanned before, so there is no error
	return []byte(s)
}

// quote is the inverse of unquote.
func quote(text []byte) []byte {
	out, _ := json.Marshal(string(text)) // strings always marshal
	return out
}
