// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/tokenizer"
)

// Every endpoint of engines works through a real Envoy. A request with a prompt goes to the worker
// that has it cached, whichever endpoint cached it. A request without a prompt is still routed. A
// request to an unknown path reaches a worker of the pool.
func TestSurfacesThroughEnvoy(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStack(t, 2, []string{"--speed", "50"})
	text := strings.Repeat("a long and winding prompt ", 40)
	ids := strings.TrimSuffix(strings.Repeat("17,18,19,20,", 60), ",")
	post := func(path, body string) (status int) {
		t.Helper()
		resp, text := reply(t, d, "POST", path, body, nil)
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: status %d: %s", path, resp.StatusCode, text)
		}
		return resp.StatusCode
	}
	for _, c := range []struct{ first, path, body string }{
		{"/v1/completions " + fmt.Sprintf(`{"model":"sim","max_tokens":2,"prompt":%q}`, text), "/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":2}}`, text)},
		{"", "/generate", fmt.Sprintf(`{"text":[%q,"b"],"sampling_params":{"max_new_tokens":2},"stream":true}`, text)},
		{"/inference/v1/generate " + fmt.Sprintf(`{"token_ids":[%s],"sampling_params":{"max_tokens":2}}`, ids), "/generate", fmt.Sprintf(`{"input_ids":[%s],"sampling_params":{"max_new_tokens":2}}`, ids)},
		{"", "/inference/v1/generate", fmt.Sprintf(`{"model":"sim","token_ids":[%s],"sampling_params":{"max_tokens":2}}`, ids)},
	} {
		if path, body, some := strings.Cut(c.first, " "); some {
			post(path, body)
		}
		// The events of the first request may not have arrived yet.
		eventually(t, c.path+" does not find what is cached", func() bool {
			if post(c.path, c.body) != http.StatusOK {
				return false
			}
			got := lastDecision(t, d)
			return got.OverlapBlocks > 0 && got.OverlapBlocks == got.PromptBlocks && got.TokenMode == tokenizer.Exact
		})
	}
	for _, c := range []struct{ path, body string }{
		{"/tokenize", `{"model":"sim","prompt":"a"}`},
		{"/v1/embeddings", `{"model":"sim","input":"a"}`},
	} {
		post(c.path, c.body)
		if got := lastDecision(t, d); got.TokenMode != tokenizer.None || got.OverlapBlocks != 0 {
			t.Errorf("%s: %+v", c.path, got)
		}
	}
	before := lastDecision(t, d).ID
	if resp, body := reply(t, d, "POST", "/v1/models/unheard-of", "no JSON", nil); resp.StatusCode != http.StatusMethodNotAllowed || lastDecision(t, d).ID != before {
		t.Errorf("another method on a model: status %d, %s", resp.StatusCode, body)
	}
	if resp, body := reply(t, d, "GET", "/v1/models", "", nil); resp.StatusCode != http.StatusOK || !strings.Contains(body, "sim") {
		t.Errorf("an unknown path of the pool: status %d, %s", resp.StatusCode, body)
	}
	eventually(t, "slots are left", func() bool { requests, _, _ := inFlight(t, d); return requests == 0 })
}
