// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Mistral holds what Mistral's own tokenizer files contain about chats.
type Mistral struct {
	Version string // one of MistralVersions
	Images  bool   // the model reads images
	Audio   bool   // the model reads sound
	// Efforts are the reasoning efforts that the model supports. Effort is the default of
	// requests without one. Files of version v15 have them.
	Efforts []string
	Effort  string
}

// MistralVersions are the versions of tekken.json that kvroute reads.
//
//nolint:gochecknoglobals // a table
var MistralVersions = strings.Fields("v3 v7 v11 v13 v15")

// mistral makes prompts as vLLM 0.32 makes them in mistral tokenizer mode, with the package
// mistral-common 1.13. Control tokens are inserted by id, and each text between two of them is
// tokenized by itself.
type mistral struct {
	Mistral
	version int
	tokens  map[string]uint32 // ids of the control tokens that the version has
}

// mistralTokens are the control tokens, by the first version that has them.
//
//nolint:gochecknoglobals // a table
var mistralTokens = map[int]string{
	3: "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]",
	7: "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]", 11: "[ARGS] [CALL_ID]",
	13: "[THINK] [/THINK]", // optional
	15: "[MODEL_SETTINGS] [/MODEL_SETTINGS]",
}

func newMistral(f *Files) (*mistral, error) {
	m := &mistral{Mistral: *f.Mistral, tokens: map[string]uint32{}}
	version, err := strconv.Atoi(strings.TrimPrefix(m.Version, "v"))
	if err != nil || !slices.Contains(MistralVersions, m.Version) {
		return nil, fmt.Errorf("chat: Mistral's prompts of version %.40q are not supported, only %q: %w", m.Version,
			MistralVersions, ErrNoTemplate)
	}
	m.version = version
	for since, texts := range mistralTokens {
		if since > version {
			continue
		}
		for text := range strings.FieldsSeq(texts) {
			if id, ok := f.id(text); ok {
				m.tokens[text] = id
			} else if since != 13 {
				return nil, fmt.Errorf("chat: prompts of version %s need a control token %s, which the tokenizer lacks",
					m.Version, text)
			}
		}
	}
	return m, nil
}

// turn is a message, or several consecutive messages of one role.
type turn struct {
	role    string
	content []chunk
	calls   []mistralCall
	resume  bool // the answer continues this turn

	name   jinja.Value // of a tool
	callID string
}

// chunk is a part of a content: a text, a thought, or an item.
type chunk struct {
	kind   string // text, thinking, item
	text   string // of an item its type
	closed bool   // the thought is complete
	item   []byte
}

type mistralCall struct {
	id, name  string
	arguments jinja.Value
}

func (m *mistral) render(c *conversation) Text {
	if c.ChatTemplate != nil || c.ChatTemplateKwargs != nil {
		refuse("chat_template and chat_template_kwargs are not for Mistral's tokenizers")
	}
	c.effort("none", "minimal", "low", "medium", "high", "xhigh", "max")
	list := c.checked()
	tools := c.readTools()
	turns := make([]turn, len(list))
	for i, message := range list {
		turns[i] = m.turn(i, message)
	}
	last := &turns[len(turns)-1]
	generate := string(c.AddGenerationPrompt) != "false"
	last.resume = string(c.ContinueFinalMessage) == "true"
	switch {
	case last.resume && generate:
		refuse("continue_final_message and add_generation_prompt")
	case last.resume != (last.role == "assistant"), generate && last.role == "assistant":
		refuse("the last message is of the role %s", last.role)
	}
	m.check(turns, tools)
	w := mistralWriter{
		mistral: m, marked: marked{ids: m.tokens}, exact: -1, system: m.system(turns), tools: tools, settings: m.settings(c),
	}
	w.write(m.merged(turns))
	t := Text{Text: w.b, Exact: len(w.b), Marked: true, Items: w.items}
	if w.exact >= 0 {
		t.Exact = w.exact
	}
	return t
}

// turn reads message i.
func (m *mistral) turn(i int, message jinja.Value) turn {
	defer inside("messages[%d]", i)
	t := turn{name: message.Get("name")}
	switch t.role = textAt(message, "role"); t.role {
	case "developer":
		t.role = "system"
	case "system", "user", "assistant":
	case "tool":
		if t.name.IsUndefined() {
			t.name = jinja.None()
		}
		text, ok := message.Get("tool_call_id").Text()
		if !ok {
			refuse("no tool_call_id")
		}
		t.callID = lastNine(text)
		if content := message.Get("content"); content.IsNone() || content.IsUndefined() {
			refuse("no content")
		}
	default:
		refuse("Mistral's models know no role %.40q", t.role)
	}
	t.content = chunksOf(message)
	if t.role != "assistant" {
		return t
	}
	for _, call := range callsOf(message) {
		arguments, err := jinja.FromJSON([]byte(call.arguments))
		if err != nil || arguments.Dict() == nil {
			arguments = jinja.Object()
		}
		t.calls = append(t.calls, mistralCall{lastNine(call.id), call.name, arguments})
	}
	if thought, ok := thoughtOf(message).Text(); ok {
		if slices.ContainsFunc(t.content, func(c chunk) bool { return c.kind == "thinking" }) {
			refuse("thoughts in two places")
		}
		t.content = slices.Insert(t.content, 0, chunk{kind: "thinking", text: thought, closed: true})
	}
	return t
}

// lastNine returns the part of a call's id that vLLM keeps.
func lastNine(id string) string {
	runes := []rune(id)
	return string(runes[max(0, len(runes)-9):])
}

func chunksOf(message jinja.Value) (chunks []chunk) {
	content := message.Get("content")
	if text, ok := content.Text(); ok {
		return []chunk{{kind: "text", text: text}}
	}
	for i, p := range content.Items() {
		c := chunk{}
		switch c.kind = textAt(p, "type"); c.kind {
		case "text":
			c.text = textAt(p, "text")
		case "thinking":
			c.text = textAt(p, "thinking")
			c.closed = p.Get("closed").IsUndefined() || p.Get("closed").Truth()
		case "image_url", "image", "input_audio", "audio_url":
			c = chunk{kind: "item", text: c.kind, item: toJSON(p)}
		default:
			refuse("content[%d] has the type %.40q", i, c.kind)
		}
		chunks = append(chunks, c)
	}
	return chunks
}

// merged joins consecutive turns of one role, except those of tools and of the system. Before v7
// it drops the system's turns, because their text stands in a user's turn.
func (m *mistral) merged(turns []turn) []turn {
	var out []turn
	for i, t := range turns {
		sameRole := len(out) > 0 && i > 0 && turns[i-1].role == t.role && t.role != "tool" && t.role != "system"
		switch {
		case t.role == "system" && m.version < 7:
		case !sameRole:
			t.content = m.joined(nil, t.content)
			out = append(out, t)
		default:
			last := &out[len(out)-1]
			last.content = m.joined(last.content, t.content)
			last.calls = append(last.calls, t.calls...)
			last.resume = last.resume || t.resume
		}
	}
	if m.version >= 11 {
		sortResults(out)
	}
	if len(out) == 0 || m.version < 7 && out[0].role != "user" {
		out = slices.Insert(out, 0, turn{role: "user"})
	}
	return out
}

// joined appends the chunks of one message to the chunks of earlier messages. Neighbouring
// texts become one text; empty texts are dropped.
func (m *mistral) joined(to, chunks []chunk) []chunk {
	between := "\n\n"
	for _, c := range chunks {
		last := len(to) - 1
		switch {
		case c.kind == "text" && c.text == "":
			continue
		case c.kind == "text" && last >= 0 && to[last].kind == "text":
			to[last].text += between + c.text
		default:
			to = append(to, c)
		}
		if m.version >= 15 {
			between = "" // within one message
		}
	}
	return to
}

// sortResults puts the results of tools into the order of the calls before them.
// Results of no call come last.
func sortResults(turns []turn) {
	place := map[string]int{}
	placeOf := func(t turn) int {
		if p, ok := place[t.callID]; ok {
			return p
		}
		return math.MaxInt
	}
	for i := 0; i < len(turns); i++ {
		start := i
		for i < len(turns) && turns[i].role == "tool" {
			i++
		}
		slices.SortStableFunc(turns[start:i], func(a, b turn) int { return cmp.Compare(placeOf(a), placeOf(b)) })
		if i > start {
			clear(place)
		}
		if i < len(turns) {
			for n, call := range turns[i].calls {
				place[call.id] = i<<20 + n
			}
		}
	}
}

// system returns the text of the system messages if it stands in a user's message, as it does
// before v7; else "".
func (m *mistral) system(turns []turn) string {
	var all []string
	for _, t := range turns {
		if t.role == "system" && m.version < 7 && (len(t.content) > 1 || textOf(t.content) != "") {
			all = append(all, textOf(m.joined(nil, t.content)))
		}
	}
	return strings.Join(all, "\n\n")
}

// textOf returns the text of a content that has only one chunk, a text; "" if it is empty.
func textOf(chunks []chunk) string {
	if len(chunks) == 0 {
		return ""
	}
	return chunks[0].text
}

// settings returns the model settings in the prompt, "" if it has none.
func (m *mistral) settings(c *conversation) string {
	if m.version < 15 || m.Efforts == nil && m.Effort == "" {
		return ""
	}
	return `{"reasoning_effort": "` + cmp.Or(c.effort(m.Efforts...), m.Effort) + `"}`
}
