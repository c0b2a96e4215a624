// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Envoy reports the first tokens of requests with much to compute, and of a few others. kvroute infers the rest, and
// each request frees its slot.
func TestShortRequestsAreInferred(t *testing.T) {
	t.Parallel() // mostly waits
	const asked = 20
	for _, c := range []struct {
		name   string
		flags  []string
		infers bool
	}{
		{"default", []string{"--observe-share", "0", "--audit-share", "0"}, true},
		{"none inferred", []string{"--infer-tokens", "0"}, false},
		{"all in the sample", []string{"--observe-share", "1"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newStack(t, 1, nil)
			d.begin(t, append(c.flags, "--observe-per-minute", "1")...)
			observed := func() int64 {
				n, err := d.Envoy.Sum(t.Context(), `^http\.llm\.ext_proc\.kvroute_observer\.streams_started$`)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			// ask sends requests, and returns how many of their responses are observed.
			ask := func(n int, prompt string) (streams int64) {
				t.Helper()
				before := observed()
				for i := range n {
					body := chatBody(fmt.Sprint(i, " ", prompt), 4, true)
					if resp, text := reply(t, d, http.MethodPost, chatPath, body, nil); resp.StatusCode != http.StatusOK || !strings.Contains(text, "[DONE]") {
						t.Fatalf("status %d: %s", resp.StatusCode, text)
					}
				}
				eventually(t, "slots are not freed", func() bool {
					w := workers(t, d)[0]
					return w.ActiveRequests == 0 && w.PendTokens == 0
				})
				return observed() - before
			}
			ask(1, "the first request of a worker is observed")
			began := time.Now()
			short := ask(asked, "short")
			minutes := int64(time.Since(began).Minutes()) + 1
			switch {
			case c.infers && short > minutes:
				t.Errorf("%d of %d short requests are observed", short, asked)
			case !c.infers && short != asked:
				t.Errorf("%d of %d short requests are observed, want all", short, asked)
			}
			if long := ask(3, strings.Repeat("long prompt ", 600)); long != 3 {
				t.Errorf("%d of 3 long requests are observed", long)
			}
			seen := d.counter(t, "gen_ai_server_time_to_first_token_seconds_count", "")
			if want := int(1 + short + 3); seen != want {
				t.Errorf("%v times to first tokens, want %v", seen, want)
			}
		})
	}
}
