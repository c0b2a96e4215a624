// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// harmony makes prompts of the gpt-oss models as vLLM 0.33 does: in code, not by the
// model's chat template. Texts of the messages never become control tokens.
//
// It is vLLM without VLLM_SYSTEM_START_DATE and
// VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS. The prompt contains the date, so it changes
// at the engine's midnight.
type harmony map[string]uint32 // ids of the control tokens

// harmonyTokens are the control tokens of the format harmony. Prompts contain only the first
// five.
//
//nolint:gochecknoglobals // a table
var harmonyTokens = strings.Fields(
	"<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|> <|constrain|>")

// speaksHarmony reports whether the model is a gpt-oss: config.json says so or, if
// there is none, all of the control tokens are there.
func (f *Files) speaksHarmony() bool {
	if f.ModelType != "" {
		return f.ModelType == "gpt_oss"
	}
	return !slices.ContainsFunc(harmonyTokens, func(text string) bool {
		_, ok := f.id(text)
		return !ok
	})
}

func newHarmony(f *Files) (harmony, error) {
	h := harmony{}
	for _, text := range harmonyTokens[:5] {
		id, ok := f.id(text)
		if !ok {
			return nil, fmt.Errorf("chat: the model is a gpt_oss, and its tokenizer has no %s", text)
		}
		h[text] = id
	}
	return h, nil
}

// harmonyMessage is one message of a prompt.
type harmonyMessage struct {
	author    string
	recipient string
	channel   string
	kind      string // of the content
	texts     []string
}

func (h harmony) render(c *conversation) Text {
	var list []jinja.Value
	instructions, instructed := "", false
	if c.API == Responses {
		list = parse("input", c.Input).Items()
		if instructed = c.Instructions != nil; instructed {
			instructions, _ = parse("instructions", c.Instructions).Text()
		}
	} else {
		list = c.checked()
	}
	effort := cmp.Or(c.effort("low", "medium", "high"), "medium") // the engine refuses the API's other ones
	tools := c.readTools()
	if role := roleOfFirst(list); !instructed && (role == "system" || role == "developer") {
		texts := textsOf(list[0])
		instructions, instructed = strings.Join(texts, ""), texts != nil
		list = list[1:]
	}
	system := "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: " +
		c.now.Format("2006-01-02") + "\n\nReasoning: " + effort +
		"\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
	if len(tools) > 0 {
		system += "\nCalls to these tools must go to the commentary channel: 'functions'."
	}
	messages := []harmonyMessage{{author: "system", texts: []string{system}}}
	var sections []string
	if instructions != "" || instructed && len(tools) > 0 {
		sections = append(sections, "# Instructions", instructions)
	}
	if len(tools) > 0 {
		sections = append(sections, toolNamespace(tools))
	}
	if len(sections) > 0 {
		messages = append(messages, harmonyMessage{author: "developer", texts: []string{strings.Join(sections, "\n\n")}})
	}
	if c.API == Responses {
		messages = harmonyItems(messages, c.Input, list)
	} else {
		messages = harmonyHistory(messages, list)
	}
	out := h.write(withoutOldThoughts(messages))
	return Text{Text: out, Exact: len(out), Marked: true}
}

func roleOfFirst(list []jinja.Value) string {
	if len(list) == 0 {
		return ""
	}
	return textAt(list[0], "role")
}

// partTexts returns the text of each part of a message, "" for a part without text.
func partTexts(m jinja.Value) []string {
	content := m.Get("content")
	if text, ok := content.Text(); ok || !content.IsList() {
		return []string{text}
	}
	out := make([]string, len(content.Items()))
	for i, p := range content.Items() {
		out[i] = textAt(p, "text")
	}
	return out
}

// harmonyHistory appends the client's messages.
func harmonyHistory(dst []harmonyMessage, list []jinja.Value) []harmonyMessage {
	tools := map[string]string{} // names by the ids of calls
	for _, m := range list {
		for _, call := range callsOf(m) {
			tools[call.id] = call.name
		}
	}
	for i, m := range list {
		texts := textsOf(m)
		switch role := textAt(m, "role"); role {
		case "assistant":
			dst = harmonyAnswer(dst, m)
		case "tool":
			id := textAt(m, "tool_call_id")
			dst = append(dst, harmonyMessage{
				author: "functions." + tools[id], recipient: "assistant", channel: "commentary",
				texts: []string{strings.Join(texts, "")},
			})
		case "system", "developer":
			if texts != nil {
				dst = append(dst,
					harmonyMessage{author: "developer", texts: []string{"# Instructions\n\n" + strings.Join(texts, "")}})
			}
		case "user":
			dst = append(dst, harmonyMessage{author: "user", texts: partTexts(m)})
		default:
			refuse("messages[%d]: harmony has no role %.40q", i, role)
		}
	}
	return dst
}

// harmonyItems appends the items of the input of [Responses], or its text.
func harmonyItems(dst []harmonyMessage, input []byte, items []jinja.Value) []harmonyMessage {
	if text, ok := parse("input", input).Text(); ok {
		return append(dst, harmonyMessage{author: "user", texts: []string{text}})
	}
	names := map[string]string{} // of the calls before, by id
	for i, item := range items {
		switch kind := textAt(item, "type"); kind {
		case "", "message":
			dst = harmonyItem(dst, i, item)
		case "reasoning":
			if thoughts := item.Get("content").Items(); len(thoughts) > 0 {
				texts := make([]string, len(thoughts))
				for k, t := range thoughts {
					texts[k] = textAt(t, "text")
				}
				dst = append(dst, harmonyMessage{author: "assistant", channel: "analysis", texts: []string{strings.Join(texts, "\n")}})
			}
		case "function_call":
			name := textAt(item, "name")
			names[textAt(item, "call_id")] = name
			dst = append(dst, harmonyMessage{
				author: "assistant", recipient: "functions." + name, channel: "commentary", kind: "json",
				texts: []string{textAt(item, "arguments")},
			})
		case "function_call_output":
			name, known := names[textAt(item, "call_id")]
			output, ok := item.Get("output").Text()
			if !known || !ok {
				refuse("input[%d]: the output is not a text, or of no call", i)
			}
			dst = append(dst, harmonyMessage{author: "functions." + name, recipient: "assistant", channel: "commentary", texts: []string{output}})
		default:
			refuse("input[%d] has the unknown type %.40q", i, kind)
		}
	}
	return dst
}

// harmonyItem appends an item that is a message.
func harmonyItem(dst []harmonyMessage, i int, item jinja.Value) []harmonyMessage {
	switch role := textAt(item, "role"); role {
	case "system", "developer":
		if text := strings.Join(textsOf(item), ""); text != "" {
			return append(dst, harmonyMessage{author: "developer", texts: []string{"# Instructions\n\n" + text}})
		}
		return dst
	case "user":
		return append(dst, harmonyMessage{author: "user", texts: partTexts(item)})
	case "assistant":
		return append(dst, harmonyMessage{author: "assistant", channel: "final", texts: partTexts(item)})
	default:
		refuse("input[%d]: harmony has no role %.40q", i, role)
	}
	return dst
}

// withoutOldThoughts leaves out thoughts before the last final answer.
func withoutOldThoughts(dst []harmonyMessage) []harmonyMessage {
	for last, m := range slices.Backward(dst) {
		if m.channel == "final" {
			kept := slices.DeleteFunc(slices.Clone(dst[:last]), func(m harmonyMessage) bool { return m.channel == "analysis" })
			return append(kept, dst[last:]...)
		}
	}
	return dst
}

// harmonyAnswer appends a message of the assistant.
func harmonyAnswer(dst []harmonyMessage, m jinja.Value) []harmonyMessage {
	add := func(channel string, texts ...string) {
		if len(texts) > 0 && texts[0] != "" {
			dst = append(dst, harmonyMessage{author: "assistant", channel: channel, texts: texts})
		}
	}
	thought, _ := thoughtOf(m).Text()
	calls := callsOf(m)
	if len(calls) == 0 {
		add("analysis", thought)
		add("final", partTexts(m)...)
		return dst
	}
	add("commentary", strings.Join(textsOf(m), ""))
	add("analysis", thought)
	for _, call := range calls {
		dst = append(dst, harmonyMessage{
			author: "assistant", recipient: "functions." + call.name, channel: "commentary", kind: "json",
			texts: []string{call.arguments},
		})
	}
	return dst
}

// write returns the text of the messages and the beginning of the answer.
func (h harmony) write(messages []harmonyMessage) []byte {
	size := 64
	for _, m := range messages {
		size += 64
		for _, t := range m.texts {
			size += len(t) + markSize
		}
	}
	w := marked{b: make([]byte, 0, size), ids: h}
	for _, m := range messages {
		w.control("<|start|>")
		isCall := m.author == "assistant" && m.recipient != ""
		author, channel := m.author, m.channel
		switch {
		case isCall:
			author, channel = author+" to="+m.recipient, channel+" "+m.kind
		case m.recipient != "":
			channel += " to=" + m.recipient
		}
		w.piece(author)
		if channel != "" {
			w.control("<|channel|>")
			w.piece(channel)
		}
		w.control("<|message|>")
		for _, t := range m.texts {
			w.piece(t)
		}
		if isCall {
			w.control("<|call|>")
		} else {
			w.control("<|end|>")
		}
	}
	w.control("<|start|>")
	w.piece("assistant")
	return w.b
}
