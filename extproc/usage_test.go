// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
)

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
			if got := extproc.ReadUsage(c.response, n); got != c.want {
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
		whole := extproc.ReadUsage(response, max(1, len(response)))
		if parts := extproc.ReadUsage(response, n); len(response) < 2000 && parts != whole {
			t.Errorf("in pieces of %d bytes: %+v, in one %+v", n, parts, whole)
		}
	})
}

const usageEvent = "data: {\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":7}}\n\n"

// An audited request's observer stays to the end of the response; another one leaves at the first token.
func TestObserverReadsTheUsageOfAuditedRequests(t *testing.T) {
	for _, c := range []struct {
		share   float64
		content string
		want    []string
	}{
		{1, "text/event-stream", []string{"first token by observer", "usage: 100 prompt tokens, 0 cached (reported: false), 7 output tokens, bad: false"}},
		{1, "application/json", []string{"usage: 100 prompt tokens, 0 cached (reported: false), 7 output tokens, bad: false"}},
		{0, "text/event-stream", []string{"first token by observer"}},
		{0, "application/json", nil},
	} {
		t.Run(fmt.Sprintf("%v of %s", c.share, c.content), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, extproc.Config{AuditShare: c.share})
				x := h.Do(chat(hello))
				x.Respond(200, "content-type", "text/event-stream")
				h.router.newCalls()
				o := x.Observe()
				o.Respond(200, "content-type", c.content)
				o.Chunk([]byte("data: {}\n\n"), false)
				synctest.Wait()
				if o.Ended() == (c.share == 1) {
					t.Errorf("after the first token the observer has ended: %v", o.Ended())
				}
				o.Chunk([]byte(usageEvent[:20]), false)
				o.Chunk([]byte(usageEvent[20:]), false)
				o.Chunk(nil, true)
				synctest.Wait()
				if !o.Ended() {
					t.Error("the observer stays after the response")
				}
				if diff := cmp.Diff(c.want, h.router.newCalls()); diff != "" {
					t.Errorf("calls (-want +got):\n%s", diff)
				}
				x.End()
			})
		})
	}
}

// The share of audited requests is the configured one.
func TestAuditShare(t *testing.T) {
	for _, share := range []float64{0, .01, .3, 1} {
		const n = 20_000
		if got := float64(extproc.Audited(share, n)) / n; got < share*.7 || got > share*1.3 {
			t.Errorf("share %v: %v of the requests are audited", share, got)
		}
	}
}
