// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// harmony makes prompts of the gpt-oss models in the way of vLLM 0.32, which has
// it in code: the model's own chat template is not what runs. What the messages
// say never becomes a control token.
//
// It is as vLLM is without VLLM_SYSTEM_START_DATE and
// VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS. The prompt has the day in it, so it is
// another one from the engine's midnight on.
type harmony struct {
	start, channel, message, end, call uint32
}

// harmonyTokens are the control tokens that a model has if it speaks harmony.
//
//nolint:gochecknoglobals // a table
var harmonyTokens = []string{"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"}

// speaksHarmony reports whether the model is a gpt-oss: config.json says so or, if
// there is none, all of the control tokens are there.
func (f *Files) speaksHarmony() bool {
	if f.ModelType != "" {
		return f.ModelType == "gpt_oss"
	}
	for _, text := range harmonyTokens {
		if _, ok := f.id(text); !ok {
			return false
		}
	}
	return true
}

// Harmony reports whether prompts are made in the format of gpt-oss.
func (r *Renderer) Harmony() bool { return r.harmony != nil }

func newHarmony(f *Files) (*harmony, error) {
	h := &harmony{}
	for text, id := range map[string]*uint32{
		"<|start|>": &h.start, "<|channel|>": &h.channel, "<|message|>": &h.message, "<|end|>": &h.end, "<|call|>": &h.call,
	} {
		var ok bool
		if *id, ok = f.id(text); !ok {
			return nil, fmt.Errorf("chat: the model is a gpt_oss, and its tokenizer has no %s", text)
		}
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

// harmonyEfforts are the reasoning efforts that there are. The engine refuses the
// other ones that the API has.
//
//nolint:gochecknoglobals // a table
var harmonyEfforts = []string{"low", "medium", "high"}

func (h *harmony) render(c *conversation, q Request, now time.Time) (Text, error) {
	list, err := c.checked(q)
	if err != nil {
		return Text{}, err
	}
	effort, err := effortOf(q, harmonyEfforts)
	if err != nil {
		return Text{}, err
	}
	if effort == "" {
		effort = "medium"
	}
	tools, err := c.readTools(q)
	if err != nil {
		return Text{}, err
	}
	instructions, instructed := "", false
	if role, _ := list[0].Get("role"); isInstruction(role) {
		instructions, instructed = joinTexts(list[0])
		list = list[1:]
	}
	system := "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: " +
		now.Format("2006-01-02") + "\n\nReasoning: " + effort +
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
		text, err := toolNamespace(tools)
		if err != nil {
			return Text{}, err
		}
		sections = append(sections, text)
	}
	if len(sections) > 0 {
		messages = append(messages, harmonyMessage{author: "developer", texts: []string{strings.Join(sections, "\n\n")}})
	}
	if messages, err = harmonyHistory(messages, list); err != nil {
		return Text{}, err
	}
	out := h.write(messages)
	return Text{Text: out, Exact: len(out), Marked: true}, nil
}

func isInstruction(role jinja.Value) bool {
	text, _ := role.Text()
	return text == "system" || text == "developer"
}

// joinTexts returns the texts of a message without anything between them; ok is
// false if there is none.
func joinTexts(d *jinja.Dict) (text string, ok bool) {
	content, _ := d.Get("content")
	if text, ok = content.Text(); ok {
		return text, true
	}
	var b strings.Builder
	for _, p := range content.Items() {
		v, _ := p.Dict().Get("text")
		if s, is := v.Text(); is {
			b.WriteString(s)
			ok = true
		}
	}
	return b.String(), ok
}

// texts returns the texts of a message part by part; parts without one are empty.
func texts(d *jinja.Dict) []string {
	content, _ := d.Get("content")
	if text, ok := content.Text(); ok {
		return []string{text}
	}
	parts := content.Items()
	if parts == nil && !content.IsList() {
		return []string{""}
	}
	out := make([]string, len(parts))
	for i, p := range parts {
		v, _ := p.Dict().Get("text")
		out[i], _ = v.Text()
	}
	return out
}

// harmonyHistory appends what the client's messages become.
func harmonyHistory(dst []harmonyMessage, list []*jinja.Dict) ([]harmonyMessage, error) {
	tools := map[string]string{} // names by the ids of calls
	for _, d := range list {
		for _, call := range callsOf(d) {
			tools[call.id] = call.name
		}
	}
	for i, d := range list {
		roleValue, _ := d.Get("role")
		switch role, _ := roleValue.Text(); role {
		case "assistant":
			dst = harmonyAnswer(dst, d)
		case "tool":
			id, _ := d.Get("tool_call_id")
			text, _ := id.Text()
			content, _ := joinTexts(d)
			dst = append(dst, harmonyMessage{
				author: "functions." + tools[text], recipient: "assistant", channel: "commentary", texts: []string{content},
			})
		case "system", "developer":
			if text, ok := joinTexts(d); ok {
				dst = append(dst, harmonyMessage{author: "developer", texts: []string{"# Instructions\n\n" + text}})
			}
		case "user":
			dst = append(dst, harmonyMessage{author: "user", texts: texts(d)})
		default:
			return nil, refused("messages[%d]: harmony knows no role %.40q", i, role)
		}
	}
	// Thoughts count until the answer that they led to.
	for last, m := range slices.Backward(dst) {
		if m.channel != "final" {
			continue
		}
		kept := dst[:0:0]
		for i, m := range dst {
			if i > last || m.channel != "analysis" {
				kept = append(kept, m)
			}
		}
		return kept, nil
	}
	return dst, nil
}

// harmonyAnswer appends what a message of the assistant becomes.
func harmonyAnswer(dst []harmonyMessage, d *jinja.Dict) []harmonyMessage {
	thought := func() {
		if text, _ := thoughtOf(d); text != "" {
			dst = append(dst, harmonyMessage{author: "assistant", channel: "analysis", texts: []string{text}})
		}
	}
	calls := callsOf(d)
	if len(calls) == 0 {
		thought()
		if all := texts(d); len(all) > 0 && all[0] != "" {
			dst = append(dst, harmonyMessage{author: "assistant", channel: "final", texts: all})
		}
		return dst
	}
	if text, _ := joinTexts(d); text != "" {
		dst = append(dst, harmonyMessage{author: "assistant", channel: "commentary", texts: []string{text}})
	}
	thought()
	for _, call := range calls {
		dst = append(dst, harmonyMessage{
			author: "assistant", recipient: "functions." + call.name, channel: "commentary", kind: "json", texts: []string{call.arguments},
		})
	}
	return dst
}

// write writes the messages, and the beginning of the one that is to come.
func (h *harmony) write(messages []harmonyMessage) []byte {
	size := 64
	for _, m := range messages {
		size += 64
		for _, t := range m.texts {
			size += len(t) + markSize
		}
	}
	w := marked{b: make([]byte, 0, size)}
	for _, m := range messages {
		w.id(h.start)
		isCall := m.author == "assistant" && m.recipient != ""
		switch {
		case isCall:
			w.piece(m.author + " to=" + m.recipient)
			w.id(h.channel)
			w.piece(m.channel + " " + m.kind)
		case m.recipient != "":
			w.piece(m.author)
			w.id(h.channel)
			w.piece(m.channel + " to=" + m.recipient)
		case m.channel != "":
			w.piece(m.author)
			w.id(h.channel)
			w.piece(m.channel)
		default:
			w.piece(m.author)
		}
		w.id(h.message)
		for _, t := range m.texts {
			w.piece(t)
		}
		if isCall {
			w.id(h.call)
		} else {
			w.id(h.end)
		}
	}
	w.id(h.start)
	w.piece("assistant")
	return w.b
}
