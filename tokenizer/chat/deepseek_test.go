// SPDX-License-Identifier: Apache-2.0

package chat_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// vLLM made the prompts; tools/golden/deepseek_golden.py wrote them.
func TestDeepSeek(t *testing.T) {
	f, err := os.Open("testdata/deepseek.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	renderers := map[string]*chat.Renderer{}
	for model, architecture := range map[string]string{"deepseek_v32": "DeepseekV32ForCausalLM", "deepseek_v4": "DeepseekV4ForCausalLM"} {
		if renderers[model], err = chat.NewRenderer(chat.VLLM, &chat.Files{Architectures: []string{architecture}}, chat.Flags{}); err != nil {
			t.Fatal(err)
		}
	}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	lines.Scan() // it names the script
	equal, refused := 0, 0
	for lines.Scan() {
		var c struct {
			Request map[string]json.RawMessage
			Prompts map[string]*string
		}
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		q := chat.Request{
			Messages: c.Request["messages"], Tools: c.Request["tools"], ToolChoice: c.Request["tool_choice"],
			ChatTemplateKwargs: c.Request["chat_template_kwargs"], ReasoningEffort: c.Request["reasoning_effort"],
		}
		for model, want := range c.Prompts {
			text, err := renderers[model].Render(nil, q, time.Time{})
			switch {
			case want == nil:
				if refused++; !errors.Is(err, chat.ErrRefused) {
					t.Errorf("%s: %s: %q, %v; want it refused", model, lines.Bytes(), text.Text, err)
				}
			case err != nil || string(text.Text) != *want || text.Exact != len(text.Text):
				t.Errorf("%s: %s:\ngot  %q, %v\nwant %q", model, q.Messages, text.Text, err, *want)
			default:
				equal++
			}
		}
	}
	if equal != 63 || refused != 7 {
		t.Errorf("%d equal and %d refused, want 63 and 7", equal, refused)
	}
}
