// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Mistral is what Mistral's own tokenizer files say about chats.
type Mistral struct {
	Version string // one of MistralVersions
	Images  bool   // the model reads images
	Audio   bool   // and sound
	// Efforts are the reasoning efforts that the model knows, and Effort is that
	// of requests that name none. Of version v15.
	Efforts []string
	Effort  string
}

// MistralVersions are the versions of Mistral's prompts.
//
//nolint:gochecknoglobals // a table
var MistralVersions = []string{"v1", "v2", "v3", "v7", "v11", "v13", "v15"}

// mistral makes prompts as vLLM 0.32 makes them in mistral tokenizer mode, where
// the package mistral-common 1.13 does it: control tokens by their ids, and each
// text between them tokenized alone.
type mistral struct {
	Mistral
	version int
	id      map[string]uint32 // of the control tokens that the version has
}

// mistralTokens are the control tokens by the version that brought them.
//
//nolint:gochecknoglobals // a table
var mistralTokens = map[string]int{
	"<s>": 1, "</s>": 1,
	"[INST]": 2, "[/INST]": 2, "[AVAILABLE_TOOLS]": 2, "[/AVAILABLE_TOOLS]": 2, "[TOOL_RESULTS]": 2, "[/TOOL_RESULTS]": 2, "[TOOL_CALLS]": 2,
	"[SYSTEM_PROMPT]": 7, "[/SYSTEM_PROMPT]": 7, "[TOOL_CONTENT]": 7,
	"[ARGS]": 11, "[CALL_ID]": 11,
	"[MODEL_SETTINGS]": 15, "[/MODEL_SETTINGS]": 15,
}

func newMistral(f *Files) (*mistral, error) {
	m := &mistral{Mistral: *f.Mistral, id: map[string]uint32{}}
	version, err := strconv.Atoi(strings.TrimPrefix(m.Version, "v"))
	if err != nil || !slices.Contains(MistralVersions, m.Version) {
		return nil, fmt.Errorf("chat: Mistral's prompts of version %.40q are not known", m.Version)
	}
	m.version = version
	for text, since := range mistralTokens {
		if since > version {
			continue
		}
		id, ok := f.id(text)
		if !ok {
			return nil, fmt.Errorf("chat: prompts of version %s need a control token %s, which the tokenizer lacks", m.Version, text)
		}
		m.id[text] = id
	}
	for _, text := range []string{"[THINK]", "[/THINK]"} {
		if id, ok := f.id(text); ok && version >= 13 {
			m.id[text] = id
		}
	}
	return m, nil
}

// turn is a message, or several of one role in a row.
type turn struct {
	role    string
	content []chunk
	calls   []mistralCall
	resume  bool // the answer goes on with it

	name   jinja.Value // of a tool
	callID string
}

// chunk is a part of a content: a text, a thought, or an item.
type chunk struct {
	kind   string // text, thinking, item
	text   string
	closed bool // the thought is at its end
	item   []byte
}

type mistralCall struct {
	id, name  string
	arguments jinja.Value
}

func (m *mistral) render(c *conversation, q Request) (Text, error) {
	if q.ChatTemplate != nil || q.ChatTemplateKwargs != nil {
		return Text{}, refused("chat_template and chat_template_kwargs are not for Mistral's tokenizers")
	}
	if _, err := effortOf(q, []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}); err != nil {
		return Text{}, err
	}
	list, err := c.checked(q)
	if err != nil {
		return Text{}, err
	}
	tools, err := c.readTools(q)
	if err != nil {
		return Text{}, err
	}
	turns, err := m.turns(list)
	if err != nil {
		return Text{}, err
	}
	last := &turns[len(turns)-1]
	generate := string(q.AddGenerationPrompt) != "false"
	last.resume = string(q.ContinueFinalMessage) == "true"
	switch {
	case last.resume && generate:
		return Text{}, refused("continue_final_message and add_generation_prompt")
	case last.resume != (last.role == "assistant"), generate && last.role == "assistant":
		return Text{}, refused("the last message is of the role %s", last.role)
	}
	if err := m.check(turns, tools); err != nil {
		return Text{}, err
	}
	settings, err := m.settings(q)
	if err != nil {
		return Text{}, err
	}
	w := mistralWriter{mistral: m, exact: -1}
	if err := w.write(m.merged(turns), m.system(turns), tools, settings); err != nil {
		return Text{}, err
	}
	out := Text{Text: w.out.b, Exact: len(w.out.b), Marked: true, Kept: Kept(q.TruncatePromptTokens), Items: w.items}
	if w.exact >= 0 {
		out.Exact = w.exact
	}
	return out, nil
}

// turns reads the messages, each as a turn of its own.
func (m *mistral) turns(list []*jinja.Dict) ([]turn, error) {
	out := make([]turn, len(list))
	for i, d := range list {
		roleValue, _ := d.Get("role")
		t := &out[i]
		t.role, _ = roleValue.Text()
		switch t.role {
		case "system", "developer":
			t.role = "system"
		case "user", "assistant":
		case "tool":
			if t.name, _ = d.Get("name"); t.name.IsUndefined() {
				t.name = jinja.None()
			}
			id, _ := d.Get("tool_call_id")
			text, ok := id.Text()
			if !ok && (id.IsUndefined() || m.version >= 3) {
				return nil, refused("messages[%d] has no tool_call_id", i)
			}
			t.callID = lastNine(text)
			if content, _ := d.Get("content"); content.IsNone() || content.IsUndefined() {
				return nil, refused("messages[%d] has no content", i)
			}
		default:
			return nil, refused("messages[%d]: Mistral's models know no role %.40q", i, t.role)
		}
		var err error
		if t.content, err = chunksOf(d); err != nil {
			return nil, fmt.Errorf("messages[%d]: %w", i, err)
		}
		if t.role != "assistant" {
			continue
		}
		for _, call := range callsOf(d) {
			arguments, err := jinja.FromJSON([]byte(call.arguments))
			if err != nil || arguments.Dict() == nil {
				arguments = jinja.FromDict(jinja.NewDict(0))
			}
			t.calls = append(t.calls, mistralCall{lastNine(call.id), call.name, arguments})
		}
		if thought, ok := thoughtOf(d); ok {
			if slices.ContainsFunc(t.content, func(c chunk) bool { return c.kind == "thinking" }) {
				return nil, refused("messages[%d] has thoughts in two places", i)
			}
			t.content = slices.Insert(t.content, 0, chunk{kind: "thinking", text: thought, closed: true})
		}
	}
	return out, nil
}

// lastNine is what vLLM leaves of the id of a call.
func lastNine(id string) string {
	runes := []rune(id)
	return string(runes[max(0, len(runes)-9):])
}

func chunksOf(d *jinja.Dict) ([]chunk, error) {
	content, _ := d.Get("content")
	if text, ok := content.Text(); ok {
		return []chunk{{kind: "text", text: text}}, nil
	}
	var out []chunk
	for i, p := range content.Items() {
		kind, _ := at(p, "type").Text()
		c := chunk{kind: "item"}
		switch kind {
		case "text":
			c.kind = "text"
			c.text, _ = at(p, "text").Text()
		case "thinking":
			c.kind = "thinking"
			c.text, _ = at(p, "thinking").Text()
			c.closed = at(p, "closed").IsUndefined() || at(p, "closed").Truth()
		case "image_url", "image", "input_audio", "audio_url":
			var err error
			if c.item, err = jinja.AppendJSON(nil, p); err != nil {
				return nil, err
			}
			c.text = kind
		default:
			return nil, refused("content[%d] has the type %.40q", i, kind)
		}
		out = append(out, c)
	}
	return out, nil
}

// merged returns the turns with those of one role in a row as one, as far as the
// version does that.
func (m *mistral) merged(turns []turn) []turn {
	var out []turn
	for i, t := range turns {
		var last *turn
		if len(out) > 0 && i > 0 && turns[i-1].role == t.role && t.role != "tool" && t.role != "system" {
			last = &out[len(out)-1]
		}
		switch {
		case t.role == "system" && m.version < 7:
		case last == nil:
			t.content = m.joined(nil, t.content)
			out = append(out, t)
		default:
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

// joined appends the chunks of one message to those of the messages before it. Texts
// side by side become one, empty ones vanish.
func (m *mistral) joined(to, chunks []chunk) []chunk {
	fresh := true
	for _, c := range chunks {
		last := len(to) - 1
		switch {
		case c.kind == "text" && c.text == "":
			continue
		case c.kind != "text" || last < 0 || to[last].kind != "text":
			to = append(to, c)
		default:
			between := "\n\n"
			if !fresh && m.version >= 15 {
				between = ""
			}
			to[last].text += between + c.text
		}
		fresh = false
	}
	return to
}

// sortResults puts the results of tools into the order of the calls before them.
func sortResults(turns []turn) {
	for i := 0; i < len(turns); i++ {
		if turns[i].role != "tool" {
			continue
		}
		end := i
		for end < len(turns) && turns[end].role == "tool" {
			end++
		}
		place := map[string]int{}
		for k := i - 1; k >= 0 && turns[k].role != "tool"; k-- {
			for n, call := range slices.Backward(turns[k].calls) {
				if _, ok := place[call.id]; !ok {
					place[call.id] = k<<20 + n
				}
			}
		}
		slices.SortStableFunc(turns[i:end], func(a, b turn) int {
			x, xok := place[a.callID]
			y, yok := place[b.callID]
			switch {
			case xok && yok:
				return x - y
			case xok:
				return -1
			case yok:
				return 1
			}
			return 0
		})
		i = end
	}
}

// system returns the text of the system messages, which before v7 stands in a
// message of the user.
func (m *mistral) system(turns []turn) string {
	if m.version >= 7 {
		return ""
	}
	var all []string
	for _, t := range turns {
		if t.role != "system" || len(t.content) == 0 || len(t.content) == 1 && t.content[0].text == "" && t.content[0].kind == "text" {
			continue
		}
		all = append(all, textOf(m.joined(nil, t.content)))
	}
	return strings.Join(all, "\n\n")
}

// textOf returns the text of a content without items and thoughts.
func textOf(chunks []chunk) string {
	if len(chunks) == 0 {
		return ""
	}
	return chunks[0].text
}

// settings returns the settings of the model that the prompt has.
func (m *mistral) settings(q Request) (string, error) {
	if m.version < 15 || m.Efforts == nil && m.Effort == "" {
		return "", nil
	}
	effort := m.Effort
	if q.ReasoningEffort != nil {
		var err error
		if effort, err = effortOf(q, m.Efforts); err != nil {
			return "", err
		}
	}
	return `{"reasoning_effort": "` + effort + `"}`, nil
}
