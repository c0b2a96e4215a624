// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// controlTokens numbers the control tokens of a model.
type controlTokens []string

func (c controlTokens) id(text string) (uint32, bool) {
	for i, t := range c {
		if t == text {
			return uint32(i), true
		}
	}
	return 0, false
}

// pieces parts a text at its marks: texts, and control tokens in lists of their own.
func (c controlTokens) pieces(text []byte) (out []any) {
	add := func(s []byte) {
		if len(s) == 0 {
			return
		}
		if last := len(out) - 1; last >= 0 {
			if before, ok := out[last].(string); ok {
				out[last] = before + string(s)
				return
			}
		}
		out = append(out, string(s))
	}
	for at := 0; at < len(text); {
		start, end, id := chat.NextMark(text, at)
		if start < 0 {
			add(text[at:])
			break
		}
		add(text[at:start])
		if id != chat.NoID {
			out = append(out, []any{c[id]})
		}
		at = end
	}
	return out
}

var harmonyTokens = controlTokens{"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"}

func harmony(t testing.TB) *chat.Renderer {
	t.Helper()
	r, err := chat.NewRenderer(chat.VLLM, &chat.Files{ModelType: "gpt_oss", ID: harmonyTokens.id}, chat.Flags{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// requestOf cuts the fields of a request as package internal/openai does.
func requestOf(t testing.TB, body []byte) chat.Request {
	t.Helper()
	var f map[string]json.RawMessage
	if err := json.Unmarshal(body, &f); err != nil {
		t.Fatal(err)
	}
	span := func(name string) []byte {
		if v := f[name]; string(v) != "null" {
			return v
		}
		return nil
	}
	return chat.Request{
		Messages: span("messages"), Tools: span("tools"), ToolChoice: span("tool_choice"), AddGenerationPrompt: span("add_generation_prompt"),
		ContinueFinalMessage: span("continue_final_message"), ReasoningEffort: span("reasoning_effort"), ChatTemplateKwargs: span("chat_template_kwargs"),
	}
}

// goldenCase is a request and what the reference makes of it.
type goldenCase struct {
	Request json.RawMessage
	Pieces  []any
	IDs     string
	Refused *string
}

func goldens(t testing.TB, name string) (header map[string]string, cases []goldenCase) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var c goldenCase
		into := any(&c)
		if header == nil {
			into = &header
		}
		if err := json.Unmarshal(lines.Bytes(), into); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if c.Request != nil {
			cases = append(cases, c)
		}
	}
	if lines.Err() != nil || len(cases) == 0 {
		t.Fatalf("%s: %d cases, %v", name, len(cases), lines.Err())
	}
	return header, cases
}

// The package that vLLM uses gave the pieces.
func TestHarmony(t *testing.T) {
	header, cases := goldens(t, "testdata/harmony.jsonl")
	date, err := time.Parse(time.DateOnly, header["date"])
	if err != nil {
		t.Fatal(err)
	}
	r, refused := harmony(t), 0
	for _, c := range cases {
		text, err := r.Render(nil, requestOf(t, c.Request), date)
		if c.Refused != nil {
			if refused++; !errors.Is(err, chat.ErrRefused) {
				t.Errorf("%s\n%q, %v; want it refused: %s", c.Request, text.Text, err, *c.Refused)
			}
			continue
		}
		if err != nil || !text.Marked || text.Exact != len(text.Text) {
			t.Errorf("%s\n%v, marked %v, %d of %d exact", c.Request, err, text.Marked, text.Exact, len(text.Text))
			continue
		}
		if diff := cmp.Diff(c.Pieces, harmonyTokens.pieces(text.Text)); diff != "" {
			t.Errorf("%s\n%s", c.Request, diff)
		}
	}
	if len(cases) != 29 || refused != 3 {
		t.Errorf("%d cases, %d of them refused; want 29 and 3", len(cases), refused)
	}
}

func TestHarmonyIsRecognised(t *testing.T) {
	jinja := map[string]string{"default": "{{ messages[0].content }}"}
	for _, c := range []struct {
		name    string
		profile chat.Profile
		files   chat.Files
		marked  bool
		err     string
	}{
		{"by config.json", chat.VLLM, chat.Files{ModelType: "gpt_oss", Templates: jinja, ID: harmonyTokens.id}, true, ""},
		{"by the control tokens", chat.VLLM, chat.Files{Templates: jinja, ID: harmonyTokens.id}, true, ""},
		{"config.json counts first", chat.VLLM, chat.Files{ModelType: "qwen3", Templates: jinja, ID: harmonyTokens.id}, false, ""},
		{"not by some of them", chat.VLLM, chat.Files{Templates: jinja, ID: harmonyTokens[:6].id}, false, ""},
		{"without control tokens", chat.VLLM, chat.Files{ModelType: "gpt_oss", ID: harmonyTokens[:4].id}, false, "<|call|>"},
		{"SGLang has the template", chat.SGLang, chat.Files{ModelType: "gpt_oss", Templates: jinja, ID: harmonyTokens.id}, false, ""},
		{"TensorRT-LLM has its own", chat.TRTLLM, chat.Files{ModelType: "gpt_oss", Templates: jinja, ID: harmonyTokens.id}, false, "no chat template"},
	} {
		r, err := chat.NewRenderer(c.profile, &c.files, chat.Flags{})
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v, want an error about %q", c.name, err, c.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		text, err := r.Render(nil, chat.Request{Messages: []byte(`[{"role":"user","content":"x"}]`)}, time.Now())
		if err != nil || text.Marked != c.marked {
			t.Errorf("%s: marked %v, %v; want %v", c.name, text.Marked, err, c.marked)
		}
	}
}

func TestHarmonyDay(t *testing.T) {
	late := time.Date(2027, 1, 2, 23, 59, 0, 0, time.FixedZone("", 9*3600))
	text, err := harmony(t).Render(nil, chat.Request{Messages: []byte(`[{"role":"user","content":"x"}]`)}, late)
	if err != nil || !strings.Contains(string(text.Text), "Current date: 2027-01-02\n") {
		t.Errorf("%q, %v", text.Text, err)
	}
}

func TestHarmonyRefuses(t *testing.T) {
	deep := strings.Repeat(`{"type":"array","items":`, 200) + `{}` + strings.Repeat(`}`, 200)
	for body, want := range map[string]string{
		`{"messages":[]}`:    "messages",
		`{"messages":["x"]}`: "messages[0]",
		`{"messages":[{"role":"user","content":"x"},{"role":"user","content":null}]}`:                                                                 "messages[1]",
		`{"messages":[{"role":"user","content":"x"}],"tools":[]}`:                                                                                     "tools",
		`{"messages":[{"role":"user","content":"x"}],"tool_choice":"required"}`:                                                                       "tool_choice",
		`{"messages":[{"role":"user","content":"x"}],"reasoning_effort":5}`:                                                                           "reasoning_effort",
		`{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":true,"continue_final_message":true}`:                                     "continue_final_message",
		`{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":` + deep + `}}]}`:                "too deep",
		`{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"oneOf":[{"default":NaN}]}}}]}`: "NaN",
	} {
		if text, err := harmony(t).Render(nil, rawRequest(body), time.Now()); !errors.Is(err, chat.ErrRefused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.200s: %q, %v; want it refused for %s", body, text.Text, err, want)
		}
	}
}

// rawRequest is requestOf for bodies that Go's JSON package does not read.
func rawRequest(body string) (q chat.Request) {
	for name, span := range map[string]*[]byte{
		`"messages":`: &q.Messages, `"tools":`: &q.Tools, `"tool_choice":`: &q.ToolChoice, `"reasoning_effort":`: &q.ReasoningEffort,
		`"add_generation_prompt":`: &q.AddGenerationPrompt, `"continue_final_message":`: &q.ContinueFinalMessage,
	} {
		_, rest, ok := strings.Cut(body, name)
		if !ok {
			continue
		}
		end := len(rest) - 1
		for _, next := range []string{`,"tools":`, `,"tool_choice":`, `,"reasoning_effort":`, `,"add_generation_prompt":`, `,"continue_final_message":`} {
			if k := strings.Index(rest, next); k >= 0 {
				end = min(end, k)
			}
		}
		*span = []byte(rest[:end])
	}
	return q
}

func TestMarks(t *testing.T) {
	text := chat.AppendMark([]byte("a"), 0xffffff)
	text = append(chat.AppendMark(text, chat.NoID), "b"...)
	for _, c := range []struct {
		from, start, end int
		id               uint32
	}{{0, 1, 6, 0xffffff}, {6, 6, 11, chat.NoID}, {11, -1, -1, chat.NoID}} {
		start, end, id := chat.NextMark(text, c.from)
		if start != c.start || end != c.end || id != c.id {
			t.Errorf("from %d: %d, %d, %d; want %d, %d, %d", c.from, start, end, id, c.start, c.end, c.id)
		}
	}
	if start, end, id := chat.NextMark(text[:4], 0); start != 1 || end != 4 || id != chat.NoID {
		t.Errorf("half a mark: %d, %d, %d", start, end, id)
	}
}

// Whatever a client sends, marks are the renderer's own and the rest is text.
func FuzzHarmony(f *testing.F) {
	_, cases := goldens(f, "testdata/harmony.jsonl")
	for _, c := range cases {
		q := requestOf(f, c.Request)
		f.Add(q.Messages, q.Tools, q.ReasoningEffort)
	}
	f.Add([]byte(`[{"role":"user","content":"\ud800"}]`), []byte(`[{"function":{"name":"\uffff"}}]`), []byte(`"low"`))
	r := harmony(f)
	f.Fuzz(func(t *testing.T, messages, tools, effort []byte) {
		q := chat.Request{Messages: messages, Tools: tools, ReasoningEffort: effort}
		text, err := r.Render(nil, q, time.Unix(0, 0))
		if err != nil {
			return
		}
		starts := 0
		for _, p := range harmonyTokens.pieces(text.Text) {
			switch p := p.(type) {
			case string:
				if !utf8.ValidString(p) {
					t.Fatalf("no text: %q", p)
				}
			case []any:
				if p[0] == "<|start|>" {
					starts++
				}
			}
		}
		if starts < 2 || !strings.HasSuffix(string(text.Text), "assistant") {
			t.Fatalf("%d messages in %q", starts, text.Text)
		}
	})
}
