// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"iter"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Beginnings yields requests that a body may be the beginning of. The flag marks
// those that go on as most do; a body goes on in any way.
type Beginnings = iter.Seq2[chat.Request, bool]

// ParseBeginning reads a body that was cut off somewhere. The fields that are there
// whole are given, but no prompt: rest yields the prompts of bodies that begin as this
// one, each of which goes on in another way: with nothing more, with more of the text
// that was cut, with messages of all kinds, with fields that have not come yet. What
// all of them begin with, the whole body's prompt begins with.
//
// That holds unless the part that is missing has one of the few fields that make
// another prompt altogether: messages or prompt once more, ids in the place of text,
// truncate_prompt_tokens, add_special_tokens, chat_template, prompt_embeds, template
// variables but for those that switch thinking, or a message of the role developer
// or, in /v1/messages, system. And the salt of the blocks may be there.
//
// rest is nil where nothing is known of the prompt, or nothing by itself: of
// /v1/responses, whose history may follow; of a list of prompts; of a body that was cut
// inside of what its salt is in. Without an error there is a body, maybe an empty one.
func ParseBeginning(e Endpoint, body []byte) (b Body, rest Beginnings, err *Error) {
	end := endOf(body)
	unsalted := true
	if len(end.open) == 1 && end.quoted && string(end.name) != "prompt" {
		// Half of a name is another name, maybe one that there is.
		unsalted = string(end.name) != "cache_salt"
		end = end.unquoted()
	}
	whole := end.with("", nil)
	if b, err = Parse(Load, whole); err != nil {
		return Body{}, nil, err
	}
	b.Request = chat.Request{}
	if b.Model == "" || !unsalted || end.in(1, "nvext") {
		return b, nil, nil
	}
	var ways []way
	switch e {
	case Completions:
		ways = completionWays(&end, whole)
	case ChatCompletions, Messages:
		ways = chatWays(&end, e)
	default:
	}
	if len(ways) == 0 {
		return b, nil, nil
	}
	return b, func(yield func(chat.Request, bool) bool) {
		for i, w := range ways {
			p, err := Parse(e, end.with(w.tail, w.more))
			switch {
			case err != nil: // there is no such body
			case p.Tokens != nil || p.Size > 0 || p.Inexact != "":
				if i == 0 {
					return // so is every other
				}
			case !yield(p.Request, w.usual):
				return
			}
		}
	}, nil
}

// way is a way in which a body may go on: see ending.with.
type way struct {
	tail  string
	more  []string
	usual bool
}

// filler is text that nothing follows from.
const filler = "zq"

func completionWays(end *ending, whole []byte) []way {
	prompt := member(whole, "prompt")
	switch {
	case end.quoted && len(end.open) == 1:
		return []way{{"", nil, true}, {filler, nil, true}}
	case prompt == nil:
		return nil
	case end.in(1, "prompt"):
		// Of ids the first ones are the first ones. Of several prompts the longest
		// decides, which may be to come.
		if s := (scanner{in: prompt, at: 1}); len(end.open) > 2 || end.quoted || s.peek() < '0' || s.peek() > '9' {
			return nil
		}
	}
	return []way{{"", nil, true}, {"", []string{`"stream":false`}, true}}
}

// chatWays returns the ways in which a chat may go on, and takes from its end what
// says nothing yet.
func chatWays(end *ending, e Endpoint) (ways []way) {
	usual := true
	for _, name := range []string{"tools", "documents", "chat_template_kwargs", "system", "output_config"} {
		if end.in(1, name) {
			*end, usual = end.without(1), false
		}
	}
	inside := end.in(1, "messages")
	if inside {
		trimMessage(end)
	}
	whole := end.with("", nil)
	if messages := member(whole, "messages"); messages == nil || !filled(messages) {
		return nil
	}
	ways = []way{{"", nil, usual}}
	then := ""
	if inside {
		ways = append(ways, messageWays(end, e)...)
		if last := lastOf(member(whole, "messages")); stringOr(member(last, "role"), "") != "user" {
			then = laterUser
		}
	}
	seen := names(whole)
	for _, f := range fieldsOf(e) {
		if !slices.Contains(seen, f.name) {
			ways = append(ways, way{"", []string{f.member}, false})
			if then != "" {
				ways = append(ways, way{"", []string{f.member, then}, false})
			}
		}
	}
	return ways
}

func lastOf(list []byte) (last []byte) {
	each(list, func(value []byte) { last = value })
	return last
}

// trimMessage takes the message that was cut from the end of a list of messages, or a
// part of it, unless its text is what any longer one begins with.
func trimMessage(end *ending) {
	if len(end.open) < 3 {
		*end = end.unquoted()
		return
	}
	if len(end.open) == 3 && string(end.name) != "content" {
		*end = end.unquoted()
	}
	parts := end.in(3, "content") && end.open[3].kind == '['
	if parts && (len(end.open) > 5 || len(end.open) == 5 && !(end.quoted && string(end.name) == "text" && end.has(4, "type", "text"))) {
		*end = end.without(4)
	}
	if parts && len(end.open) == 4 {
		*end = end.unquoted()
	}
	ok := len(end.open) == 3 || parts
	switch stringOr(end.member(2, "role"), "") {
	case "user":
	case "system", "developer": // a first line for billing is left out
		text := stringOr(end.member(2, "content"), "")
		if len(end.open) == 5 {
			text = stringOr(end.member(4, "text"), "")
		}
		ok = ok && !(end.quoted && (strings.HasPrefix(billing, text) || strings.HasPrefix(text, billing)))
	case "tool": // of whose call the result is may be written before it
		ok = ok && end.member(2, "tool_call_id") != nil
	default: // what an assistant says may be cut out again, as thoughts are
		ok = false
	}
	if !ok || end.member(2, "content") == nil {
		*end = end.without(2)
	}
}

// member returns a member of the i-th of what is open, as the text has it.
func (e *ending) member(i int, name string) []byte {
	inner := ending{text: e.text[e.open[i].start:], quoted: e.quoted, open: slices.Clone(e.open[i:])}
	for k := range inner.open {
		inner.open[k].start -= e.open[i].start
	}
	return member(inner.with("", nil), name)
}

func (e *ending) has(i int, name, value string) bool {
	return stringOr(e.member(i, name), "") == value
}

// Messages that may follow. A template may refuse a chat without some of them, so that
// each comes with more than one text: one that all of them have is none of the body's.
const (
	laterUser = `{"role":"user","content":"` + filler + `"}`
	otherUser = `{"role":"user","content":"Kv"}`
	answer    = `{"role":"assistant","content":"` + filler + `"}`
	other     = `{"role":"assistant","content":"Kv"}`
	system    = `{"role":"system","content":"` + filler + `"}`
	result    = `{"role":"tool","tool_call_id":"zqzqzqzqz","content":"` + filler + `"}`
	call      = `{"role":"assistant","content":"","tool_calls":[{"id":"zqzqzqzqz","type":"function","function":{"name":"zq","arguments":"{}"}}]}`
	use       = `{"role":"assistant","content":[{"type":"tool_use","id":"zqzqzqzqz","name":"zq","input":{}}]}`
	used      = `{"role":"user","content":[{"type":"tool_result","tool_use_id":"zqzqzqzqz","content":"zq"}]}`
)

// messageWays are those of a text that breaks off in its messages.
func messageWays(end *ending, e Endpoint) (ways []way) {
	usual := []string{"", laterUser, otherUser, answer, other + "," + laterUser, call + "," + result, call + "," + result + "," + answer}
	odd := []string{result, system, answer + "," + system + "," + laterUser, laterUser + "," + answer + "," + laterUser}
	if e == Messages {
		usual = []string{"", laterUser, otherUser, answer, other + "," + laterUser, use + "," + used}
		odd = odd[3:]
	}
	tails := []string{""}
	if end.quoted {
		tails = []string{filler, ""}
	}
	for _, tail := range tails {
		for _, messages := range usual {
			if tail != "" || messages != "" {
				ways = append(ways, way{tail, []string{"", messages}, true})
			}
		}
		for _, messages := range odd {
			ways = append(ways, way{tail, []string{"", messages}, false})
		}
	}
	for _, then := range []string{"", laterUser} {
		if end.quoted {
			// What templates look for in texts, or take away at the ends of one; and what
			// a text is put in other quotes for.
			for _, tail := range []string{`\n\n` + filler, ` </think>` + filler, `</tool_response>`, `</think>\n</tool_response>`, `'` + filler, `'\"` + filler} {
				ways = append(ways, way{tail, []string{"", then}, false})
			}
		}
		if len(end.open) == 4 || len(end.open) == 5 {
			for i, part := range partsOf(e) {
				ways = append(ways, way{"", []string{"", then, "", part}, i < 2})
			}
		}
		if len(end.open) > 2 {
			if end.member(2, "name") == nil {
				for _, name := range []string{`"name":"zq"`, `"name":"Kv"`} {
					ways = append(ways, way{"", []string{"", then, name}, false})
				}
			}
		}
	}
	return ways
}

// partsOf returns parts that a content may go on with, two usual ones first.
func partsOf(e Endpoint) []string {
	parts := []string{`{"type":"text","text":"` + filler + `"}`, `{"type":"text","text":"Kv"}`}
	if e == Messages {
		// What a tool found stands before the texts that came with it.
		return append(parts, `{"type":"image","source":{"type":"url","url":"zq"}}`, `{"type":"tool_result","tool_use_id":"zqzqzqzqz","content":"zq"}`)
	}
	return append(parts, `{"type":"image_url","image_url":{"url":"zq"}}`)
}

// names returns those of an object's members, null or not.
func names(object []byte) (list []string) {
	s := scanner{in: object}
	s.peek()
	_ = s.object(func(name, _ []byte) { list = append(list, string(name)) }) // made by us, so there is no error
	return list
}

// field is one that has an effect on the prompt, with a value that has.
type field struct{ name, member string }

// fieldsOf returns the fields of a chat that may come behind its messages. A template may
// refuse a chat without one, so that each comes with more than one value.
func fieldsOf(e Endpoint) []field {
	const thinking = `"chat_template_kwargs":{"enable_thinking":`
	if e == Messages {
		return []field{
			{"system", `"system":"zq"`},
			{"system", `"system":"Kv"`},
			{"tools", `"tools":[{"name":"zq","description":"zq","input_schema":{"type":"object","properties":{}}}]`},
			{"tools", `"tools":[{"name":"Kv","input_schema":{}}]`},
			{"output_config", `"output_config":{"effort":"low"}`},
			{"output_config", `"output_config":{"effort":"high"}`},
			{"chat_template_kwargs", thinking + `true,"thinking":true}`},
			{"chat_template_kwargs", thinking + `false,"thinking":false}`},
		}
	}
	return []field{
		{"tools", `"tools":[{"type":"function","function":{"name":"zq","description":"zq","parameters":{"type":"object","properties":{}}}}]`},
		{"tools", `"tools":[{"type":"function","function":{"name":"Kv"}}]`},
		{"tool_choice", `"tool_choice":"none"`},
		{"documents", `"documents":[{"title":"zq","text":"zq"}]`},
		{"documents", `"documents":[{"title":"Kv","text":"Kv"}]`},
		{"reasoning_effort", `"reasoning_effort":"low"`},
		{"reasoning_effort", `"reasoning_effort":"high"`},
		{"reasoning_effort", `"reasoning_effort":"none"`},
		{"chat_template_kwargs", thinking + `true,"thinking":true}`},
		{"chat_template_kwargs", thinking + `false,"thinking":false}`},
		{"add_generation_prompt", `"add_generation_prompt":false`},
		{"continue_final_message", `"continue_final_message":true,"add_generation_prompt":false`},
	}
}
