// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/enginesim"
)

// Each kind of engine accepts ids in its own fields, and uses them instead of the text beside
// them.
func TestPromptsAsIDs(t *testing.T) {
	list := strings.TrimSuffix(strings.Repeat("300,", 40), ",")
	completion := `{"model":"sim","max_tokens":1,"return_token_ids":true,"prompt":[` + list + `]}`
	chat := func(more string) string {
		return `{"model":"sim","max_tokens":1,"return_token_ids":true,"messages":[{"role":"user","content":"hi"}]` + more + `}`
	}
	inKV, onTop := chat(`,"kv_transfer_params":{"prompt_token_ids":[`+list+`]}`), chat(`,"prompt_token_ids":[`+list+`]`)
	for _, c := range []struct {
		engine, path, body, form string // form is "" if the request is refused
	}{
		{enginesim.VLLM, "/v1/completions", completion, "prompt"},
		{enginesim.SGLang, "/v1/completions", completion, "prompt"},
		{enginesim.TRTLLM, "/v1/completions", completion, "prompt"},
		{enginesim.VLLM, "/v1/chat/completions", inKV, "kv_transfer_params"},
		{enginesim.SGLang, "/v1/chat/completions", inKV, "text"},
		{enginesim.TRTLLM, "/v1/chat/completions", inKV, ""},
		{enginesim.VLLM, "/v1/chat/completions", onTop, "text"},
		{enginesim.SGLang, "/v1/chat/completions", onTop, "text"},
		{enginesim.TRTLLM, "/v1/chat/completions", onTop, "prompt_token_ids"},
		{enginesim.VLLM, "/v1/chat/completions", chat(`,"kv_transfer_params":{"do_remote_decode":false}`), "text"},
	} {
		_, url := start(t, enginesim.Config{Engine: c.engine, Speed: fast})
		for _, hits := range []bool{false, true} {
			resp, body := send(t, "POST", url+c.path, c.body)
			if c.form == "" {
				if resp.StatusCode != 400 || !strings.Contains(body, "extra inputs") {
					t.Errorf("%s %s: status %d, %s", c.engine, c.path, resp.StatusCode, body)
				}
				continue
			}
			var got struct {
				IDs   []uint32 `json:"prompt_token_ids"`
				Usage struct {
					Prompt  int `json:"prompt_tokens"`
					Details struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				}
			}
			if err := json.Unmarshal([]byte(body), &got); err != nil || resp.StatusCode != 200 {
				t.Fatalf("%s %s: status %d, %s, %v", c.engine, c.path, resp.StatusCode, body, err)
			}
			given := slices.Equal(got.IDs, slices.Repeat([]uint32{300}, 40))
			if form := resp.Header.Get("X-Sim-Prompt"); form != c.form || given != (c.form != "text") || got.Usage.Prompt != len(got.IDs) {
				t.Errorf("%s %s: prompt in %s, want %s; computed %d tokens: %d", c.engine, c.path, form, c.form, got.Usage.Prompt, got.IDs)
			}
			if cached := 32; given && hits && got.Usage.Details.Cached != cached {
				t.Errorf("%s %s: %d tokens cached the second time, want %d", c.engine, c.path, got.Usage.Details.Cached, cached)
			}
		}
	}
	if _, err := enginesim.New(enginesim.Config{Engine: "x"}); err == nil || !strings.Contains(err.Error(), "Engine") {
		t.Errorf("an unknown engine: %v", err)
	}
}

// Requests to the responses and embeddings endpoints.
func TestResponsesAndEmbeddings(t *testing.T) {
	_, url := start(t, enginesim.Config{Speed: fast})
	words := strings.Repeat("all of this is cached the second time ", 5)
	for _, cached := range []bool{false, true} {
		resp, body := send(t, "POST", url+"/v1/responses", fmt.Sprintf(`{"model":"sim","max_output_tokens":3,"instructions":"Be brief.","input":[{"role":"user","content":%q}]}`, words))
		var got struct {
			Object string
			Output []struct {
				Content []struct{ Text string }
			}
			Usage struct {
				Input   int `json:"input_tokens"`
				Output  int `json:"output_tokens"`
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"input_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(body), &got); err != nil || resp.StatusCode != 200 {
			t.Fatalf("status %d, %s, %v", resp.StatusCode, body, err)
		}
		if got.Object != "response" || len(got.Output) != 1 || got.Output[0].Content[0].Text == "" || got.Usage.Output != 3 || (got.Usage.Details.Cached > 0) != cached {
			t.Errorf("got %+v, want cached %v", got, cached)
		}
	}
	_, body := send(t, "POST", url+"/v1/responses", `{"model":"sim","max_output_tokens":3,"stream":true,"input":"a"}`)
	var events []string
	for line := range strings.Lines(body) {
		if name, ok := strings.CutPrefix(line, "event: response."); ok {
			events = append(events, strings.TrimSpace(name))
		}
	}
	if want := []string{"created", "output_text.delta", "output_text.delta", "output_text.delta", "completed"}; !slices.Equal(events, want) {
		t.Errorf("events %q, want %q: %s", events, want, body)
	}
	if resp, body := send(t, "POST", url+"/v1/responses", `{"model":"sim","input":"a","previous_response_id":"x"}`); resp.StatusCode != 404 || !strings.Contains(body, `"response_id"`) {
		t.Errorf("a history that is not there: status %d, %s", resp.StatusCode, body)
	}
	if resp, body := send(t, "POST", url+"/v1/embeddings", `{"model":"sim","input":"a"}`); resp.StatusCode != 200 || !strings.Contains(body, `"embedding":[`) {
		t.Errorf("embeddings: status %d, %s", resp.StatusCode, body)
	}
	if resp, body := send(t, "POST", url+"/v1/embeddings", `{"model":"x","input":"a"}`); resp.StatusCode != 404 {
		t.Errorf("embeddings of another model: status %d, %s", resp.StatusCode, body)
	}
}

// With return_token_ids each choice has the ids of its new output tokens, streamed or not.
func TestOutputTokenIDs(t *testing.T) {
	_, url := start(t, enginesim.Config{Speed: fast})
	for path, prompt := range map[string]string{"/v1/completions": `"prompt":[1,2,3]`, "/v1/chat/completions": `"messages":[{"role":"user","content":"hi"}]`} {
		var all [2][]int
		for i, stream := range []string{"true", "false"} {
			_, text := send(t, "POST", url+path, `{"model":"sim","max_tokens":4,"return_token_ids":true,"stream":`+stream+`,`+prompt+`}`)
			for line := range strings.Lines(text) {
				line = strings.TrimSpace(strings.TrimPrefix(line, "data: "))
				if line == "" || line == "[DONE]" {
					continue
				}
				var event struct {
					Choices []struct {
						IDs *[]int `json:"token_ids"`
					}
				}
				if err := json.Unmarshal([]byte(line), &event); err != nil || len(event.Choices) != 1 || event.Choices[0].IDs == nil {
					t.Fatalf("%s: %s, %v", path, line, err)
				}
				all[i] = append(all[i], *event.Choices[0].IDs...)
			}
		}
		if len(all[0]) != 4 || !slices.Equal(all[0], all[1]) {
			t.Errorf("%s: ids %d in a stream, %d without", path, all[0], all[1])
		}
		if _, text := send(t, "POST", url+path, `{"model":"sim","max_tokens":4,`+prompt+`}`); strings.Contains(text, "token_ids") {
			t.Errorf("%s: ids that nobody asked for: %s", path, text)
		}
	}
}
