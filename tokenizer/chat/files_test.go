// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// files is a folder of a model: the texts of files by their names.
type files map[string]string

func (f files) load(t *testing.T) *chat.Files {
	t.Helper()
	loaded, err := chat.LoadFiles(func(name string) ([]byte, error) {
		if text, ok := f[name]; ok {
			return []byte(text), nil
		}
		return nil, fs.ErrNotExist
	}, func(folder string) (names []string) {
		for name := range f {
			if rest, ok := strings.CutPrefix(name, folder+"/"); ok {
				names = append(names, rest)
			}
		}
		slices.Sort(names)
		return names
	})
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}

// Which of several chat templates an engine uses, by transformers 5.24, vLLM 0.33 and SGLang 0.5.23.
func TestTemplateFiles(t *testing.T) {
	const (
		list      = `{"chat_template":[{"name":"default","template":"C"},{"name":"tool_use","template":"T"}]}`
		processor = `{"chat_template":"P"}`
		class     = `{"processor_class":"X"}`
		tool      = "additional_chat_templates/tool_use.jinja"
		rag       = "additional_chat_templates/rag.jinja"
	)
	for _, c := range []struct {
		name  string
		files files
		// The text of a prompt without and with tools; "-" if the engine refuses the request.
		vllm, sglang [2]string
	}{
		{"a text", files{"tokenizer_config.json": `{"chat_template":"C"}`}, [2]string{"C", "C"}, [2]string{"C", "C"}},
		{"a list", files{"tokenizer_config.json": list}, [2]string{"C", "T"}, [2]string{"C", "C"}},
		{"a file replaces the list", files{"tokenizer_config.json": list, "chat_template.jinja": "J"}, [2]string{"J", "J"}, [2]string{"J", "J"}},
		{"a file with a name", files{"chat_template.jinja": "J", tool: "A"}, [2]string{"J", "A"}, [2]string{"J", "J"}},
		{"only a file with a name", files{"tokenizer_config.json": list, tool: "A"}, [2]string{"-", "A"}, [2]string{"A", "A"}},
		{"another name", files{"tokenizer_config.json": list, "chat_template.jinja": "J", rag: "R"}, [2]string{"J", "J"}, [2]string{"J", "J"}},
		{"a processor", files{"tokenizer_config.json": list, "chat_template.json": processor, "preprocessor_config.json": class}, [2]string{"P", "T"}, [2]string{"P", "P"}},
		{"a processor alone", files{"chat_template.json": processor, "preprocessor_config.json": class}, [2]string{"P", "-"}, [2]string{"P", "P"}},
		{"a processor's configuration", files{"chat_template.jinja": "J", "processor_config.json": `{"processor_class":"X","chat_template":"P"}`}, [2]string{"P", "J"}, [2]string{"P", "P"}},
		{"a processor without template", files{"chat_template.jinja": "J", "processor_config.json": class}, [2]string{"J", "J"}, [2]string{"J", "J"}},
		{"a processor and files with names", files{"chat_template.jinja": "J", tool: "A", "chat_template.json": processor, "preprocessor_config.json": class}, [2]string{"J", "A"}, [2]string{"J", "J"}},
	} {
		for profile, want := range map[chat.Profile][2]string{chat.VLLM: c.vllm, chat.SGLang: c.sglang} {
			r, err := chat.NewRenderer(profile, c.files.load(t), chat.Flags{})
			if err != nil {
				t.Errorf("%s, %s: %v", c.name, profile, err)
				continue
			}
			for i, tools := range []string{"", `[{"type":"function","function":{"name":"f"}}]`} {
				q := chat.Request{Messages: []byte(`[{"role":"user","content":"a"}]`)}
				if tools != "" {
					q.Tools = []byte(tools)
				}
				text, err := r.Render(nil, q, time.Now())
				got := string(text.Text)
				if errors.Is(err, chat.ErrRefused) {
					got = "-"
				}
				if got != want[i] {
					t.Errorf("%s, %s, tools %q: %q, %v; want %q", c.name, profile, tools, got, err, want[i])
				}
			}
		}
	}
	unknown := files{"chat_template.jinja": "J", "chat_template.json": processor}
	if _, err := chat.NewRenderer(chat.VLLM, unknown.load(t), chat.Flags{}); !errors.Is(err, chat.ErrNoTemplate) || !strings.Contains(err.Error(), "set chat-template") {
		t.Errorf("a processor without a class: %v", err)
	}
	given := files{"tokenizer_config.json": list, "chat_template.json": processor}.load(t)
	given.SetTemplate("G")
	r, err := chat.NewRenderer(chat.VLLM, given, chat.Flags{})
	if err != nil {
		t.Fatal(err)
	}
	text, err := r.Render(nil, chat.Request{Messages: []byte(`[{"role":"user","content":"a"}]`), Tools: []byte(`[{"type":"function","function":{"name":"f"}}]`)}, time.Now())
	if err != nil || string(text.Text) != "G" {
		t.Errorf("a template of the engine's command line: %q, %v", text.Text, err)
	}
}

// Architectures whose prompts an engine makes in code, with a template file in the folder.
func TestMakers(t *testing.T) {
	config := func(text string) files { return files{"config.json": text, "chat_template.jinja": "J"} }
	for _, c := range []struct {
		config       string
		vllm, sglang string // J: the template; D: DeepSeek's encoder; "": neither
	}{
		{`{"architectures":["Qwen3ForCausalLM"]}`, "J", "J"},
		{`{"architectures":["DeepseekV3ForCausalLM"]}`, "J", "J"},
		{`{"architectures":["DeepseekV32ForCausalLM"]}`, "D", "J"},
		{`{"architectures":["DeepseekV4ForCausalLM"]}`, "D", ""},
		{`{"architectures":["DeepseekV4ForConditionalGeneration"]}`, "D", ""},
		{`{"architectures":["DeepseekV4ForCausalLM"],"model_type":"deepseek_v41"}`, "D", ""},
		{`{"architectures":["DeepseekV41ForCausalLM"]}`, "", ""},
		{`{"architectures":["KimiK3ForConditionalGeneration"]}`, "", ""},
		{`{"architectures":["MoonshotKimiaForCausalLM"]}`, "", "J"},
		{`{"architectures":["InklingForConditionalGeneration"]}`, "", ""},
		{`{"architectures":["Alpamayo2Super"]}`, "", "J"},
		{`{"model_type":"internvl_chat"}`, "J", ""},
	} {
		for profile, want := range map[chat.Profile]string{chat.VLLM: c.vllm, chat.SGLang: c.sglang} {
			got := ""
			r, err := chat.NewRenderer(profile, config(c.config).load(t), chat.Flags{})
			if err == nil {
				text, err := r.Render(nil, chat.Request{Messages: []byte(`[{"role":"user","content":"a"}]`)}, time.Now())
				if err != nil {
					t.Fatal(err)
				}
				if got = string(text.Text); strings.HasPrefix(got, "<｜begin▁of▁sentence｜>") {
					got = "D"
				}
			} else if !errors.Is(err, chat.ErrNoTemplate) {
				t.Fatal(err)
			}
			if got != want {
				t.Errorf("%s, %s: %q, %v; want %q", c.config, profile, got, err, want)
			}
		}
	}
	hf := config(`{"architectures":["DeepseekV32ForCausalLM"]}`).load(t)
	hf.Mode = "hf"
	r, err := chat.NewRenderer(chat.VLLM, hf, chat.Flags{})
	if err != nil {
		t.Fatal(err)
	}
	if text, err := r.Render(nil, chat.Request{Messages: []byte(`[{"role":"user","content":"a"}]`)}, time.Now()); err != nil || string(text.Text) != "J" {
		t.Errorf("--tokenizer-mode hf: %q, %v; want the template", text.Text, err)
	}
	bare := files{"config.json": `{"architectures":["DeepseekV3ForCausalLM"]}`}.load(t)
	if r, err = chat.NewRenderer(chat.SGLang, bare, chat.Flags{}); err != nil {
		t.Fatal(err)
	}
	const want = "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>"
	text, err := r.Render(nil, chat.Request{Messages: []byte(`[{"role":"user","content":"a"}]`)}, time.Now())
	if err != nil || string(text.Text) != want || !text.Special {
		t.Errorf("SGLang without a template: %q, %v, special tokens %t; want %q with special tokens", text.Text, err, text.Special, want)
	}
}

// The texts are those that SGLang 0.5.23's TemplateManager and OpenAIServingChat make of the files.
func TestTemplateFilesOfSGLang(t *testing.T) {
	for text, want := range map[string]string{
		"\n\n{% for m in messages %}<{{ m.role }}>{{ m.content }}\\n{{ 'a\\nb' }}{% endfor %}\n\n\n": "<user>hi\na\nb",
		"A\r\nB {{ messages[0].content }}\r\n\r\n":                                                   "A\nB hi",
		`{{ "x\\ny" }} {{ messages[0].content }}`:                                                    "xy hi",
	} {
		var f chat.Files
		f.SetTemplate(chat.TemplateOfFile(chat.SGLang, text))
		r, err := chat.NewRenderer(chat.SGLang, &f, chat.Flags{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.Render(nil, chat.Request{Messages: []byte(`[{"role":"user","content":"hi"}]`)}, time.Time{})
		if err != nil || string(got.Text) != want {
			t.Errorf("%q: %q, %v, want %q", text, got.Text, err, want)
		}
		if same := chat.TemplateOfFile(chat.VLLM, text); same != text {
			t.Errorf("vLLM reads %q as %q", text, same)
		}
	}
}
