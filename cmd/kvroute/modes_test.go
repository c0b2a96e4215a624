// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/envoy"
)

// In whatever way Envoy hands over bodies, requests are served whole, the choice is
// by cache wherever the body can be seen in time, and no slot is left over.
func TestBodyModes(t *testing.T) {
	for _, c := range []struct {
		mode  envoy.BodyMode
		blind bool // the choice is made before the body is seen
	}{
		{envoy.Buffered, false},
		{envoy.BufferedPartial, false},
		{envoy.Streamed, true},
		{envoy.StreamedAhead, false},
		{envoy.FullDuplex, false},
	} {
		t.Run(string(c.mode), func(t *testing.T) {
			d := startStackIn(t, c.mode, 3, []string{"--speed", "20"}, "--decision-headers")
			system := strings.Repeat("You know all about caches. ", 400)
			idle := func() {
				eventually(t, "slots are left over", func() bool {
					requests, pend, blocks := inFlight(t, d)
					return requests+pend+blocks == 0
				})
			}
			for i := range 3 {
				content := fmt.Sprintf("%d %s", i, system)
				first, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
				settle(t, d)
				idle()
				again, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
				if first.StatusCode != 200 || again.StatusCode != 200 {
					t.Fatalf("status %d and %d", first.StatusCode, again.StatusCode)
				}
				reason := again.Header.Get("X-Dynamo-Reason")
				if c.blind && reason != "fallback:unread" || !c.blind && reason != "kv" {
					t.Errorf("the reason is %q", reason)
				}
				if a := first.Header.Get("X-Sim-Worker"); !c.blind && a != again.Header.Get("X-Sim-Worker") {
					// The last of its blocks may have been on their way still.
					eventually(t, fmt.Sprintf("conversation %d does not go to %s again", i, a), func() bool {
						idle()
						again, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
						return again.Header.Get("X-Sim-Worker") == a
					})
				}
			}
			// A response comes in events, all of them.
			resp, text := reply(t, d, "POST", chatPath, chatBody("tell me a story", 200, true), nil)
			if resp.StatusCode != 200 || strings.Count(text, "data: ") < 200 || !strings.HasSuffix(text, "data: [DONE]\n\n") {
				t.Errorf("a streamed response: status %d, %d events", resp.StatusCode, strings.Count(text, "data: "))
			}
			// A large body arrives whole.
			large := fmt.Sprintf(`{"model":"sim","max_tokens":2,"metadata":{"pad":%q},"messages":[{"role":"user","content":"hi"}]}`, strings.Repeat("all work and no play ", 50_000))
			if resp, text := reply(t, d, "POST", chatPath, large, nil); resp.StatusCode != 200 || !strings.Contains(text, "prompt_tokens") {
				t.Errorf("a body of 1 MB: status %d, %.200s", resp.StatusCode, text)
			}
			if resp, _ := reply(t, d, "GET", "/v1/models", "", nil); resp.StatusCode != 200 {
				t.Errorf("GET /v1/models: status %d", resp.StatusCode)
			}
			// Mistakes are told where they can be seen.
			if resp, text := reply(t, d, "POST", chatPath, `{"model":"nobody","messages":[{"role":"user","content":"hi"}]}`, nil); !c.blind && resp.StatusCode != 404 {
				t.Errorf("an unknown model: status %d: %s", resp.StatusCode, text)
			}
			// A client that leaves frees its slot.
			ctx, cancel := context.WithCancel(t.Context())
			resp, err := send(t, ctx, http.MethodPost, d.envoy.URL()+chatPath, chatBody("and a long one", 4000, true), nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			cancel()
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			idle()
			for _, stat := range []string{"streams_failed", "message_timeouts", "spurious_msgs_received", "rejected_header_mutations"} {
				if n, err := d.envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute."+stat); err != nil || n != 0 {
					t.Errorf("Envoy counts %d %s, %v", n, stat, err)
				}
			}
		})
	}
}
