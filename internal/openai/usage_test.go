// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// readUsage reads a response in pieces of n bytes.
func readUsage(response string, n int) router.Usage {
	var r openai.UsageReader
	for piece := range slices.Chunk([]byte(response), n) {
		r.Read(piece, false)
		if r.Kept() > 8<<10 {
			panic("the reader keeps more than its limit")
		}
	}
	return r.Usage
}

// The usage is found in responses of all forms, whatever the size of their pieces.
func TestUsageOfResponses(t *testing.T) {
	full := router.Usage{PromptTokens: 100, OutputTokens: 7, CachedTokens: 64, Cached: true}
	for name, c := range map[string]struct {
		response string
		want     router.Usage
	}{
		"chat":                  {`{"choices":[{"message":{"content":"say \"usage\":{\"prompt_tokens\":9}"}}],"usage":{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":64}},"kv_transfer_params":null}`, full},
		"stream":                {"data: {\"usage\":null}\n\ndata: {\"usage\": {\"prompt_tokens\":100,\"completion_tokens\":1}}\n\ndata: {\"choices\":[],\"usage\" : {\"prompt_tokens\":100,\"completion_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\ndata: [DONE]\n\n", full},
		"responses":             {"event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":100,\"input_tokens_details\":{\"cached_tokens\":64},\"output_tokens\":7}}}\n\n", full},
		"messages":              {`data: {"message":{"usage":{"input_tokens":100,"output_tokens":0}}}` + "\n\n" + `data: {"usage":{"output_tokens":7}}`, router.Usage{PromptTokens: 100, OutputTokens: 7}},
		"messages with a cache": {`data: {"message":{"usage":{"input_tokens":36,"cache_read_input_tokens":64,"output_tokens":0}}}` + "\n\n" + `data: {"usage":{"output_tokens":7}}`, full},
		"without details":       {`{"usage":{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":null}}`, router.Usage{PromptTokens: 100, OutputTokens: 7}},
		"without usage":         {`{"choices":[{"text":"usage"}]}`, router.Usage{}},
		"null":                  {`{"usage":null}`, router.Usage{}},
		"a name only":           {`["usage"]`, router.Usage{}},
		"cut off":               {`{"usage":{"prompt_tokens":100`, router.Usage{}},
		"text for a number":     {`{"usage":{"prompt_tokens":"many"}}`, router.Usage{Bad: true}},
		"a list":                {`{"usage":[1,2]}`, router.Usage{Bad: true}},
		"below zero":            {`{"usage":{"prompt_tokens":-5}}`, router.Usage{Bad: true}},
		"too large":             {`{"usage":{"prompt_tokens":99999999999}}`, router.Usage{Bad: true}},
		"a fraction":            {`{"usage":{"prompt_tokens":1.5}}`, router.Usage{Bad: true}},
		"endless":               {`{"usage":{"x":"` + strings.Repeat("y", 20_000) + `"}}`, router.Usage{Bad: true}},
		"no JSON":               {`"usage":}`, router.Usage{Bad: true}},
	} {
		for _, n := range []int{1, 3, 100, len(c.response)} {
			if got := readUsage(c.response, n); got != c.want {
				t.Errorf("%s in pieces of %d bytes: %+v, want %+v", name, n, got, c.want)
			}
		}
	}
}

func FuzzUsage(f *testing.F) {
	f.Add(`data: {"usage": {"prompt_tokens":100}}`, 3)
	f.Add(`"usage""usage" : : {`, 1)
	f.Fuzz(func(t *testing.T, response string, n int) {
		if n < 1 || n > 1<<16 {
			return
		}
		whole := readUsage(response, max(1, len(response)))
		if parts := readUsage(response, n); len(response) < 2000 && parts != whole {
			t.Errorf("in pieces of %d bytes: %+v, in one %+v", n, parts, whole)
		}
	})
}
