// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// lateReply sends a request whose body comes in two pieces, some time after its headers.
func lateReply(t *testing.T, d *demonstration, body string) *http.Response {
	t.Helper()
	r, w := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, r)
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = int64(len(body))
	req.Header.Set("Content-Type", "application/json")
	go func() {
		for _, piece := range []string{body[:len(body)/2], body[len(body)/2:]} {
			<-time.After(100 * time.Millisecond)
			if _, err := io.WriteString(w, piece); err != nil {
				break // the response shows the error
			}
		}
		_ = w.Close() // never fails
	}()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return resp
}

// In each mode in which Envoy sends bodies, requests arrive whole, the choice is by cache wherever
// the body arrives in time, and no slot is left over.
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
		t.Run(c.mode, func(t *testing.T) {
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
				if a, b := first.Header.Get("X-Sim-Worker"), again.Header.Get("X-Sim-Worker"); !c.blind && a != b {
					_, why := get(t, "http://"+d.Router.At.HTTP+"/v1/decisions?limit=2")
					t.Errorf("conversation %d went to %s and then to %s: %s", i, a, b, why)
				}
			}
			// The body arrives later than the answer to the headers.
			for i := range 3 {
				settle(t, d)
				idle()
				content := fmt.Sprintf("%d %s", i, system)
				first, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, false), nil)
				idle()
				late := lateReply(t, d, chatBody(content, 4, false))
				if a, b := first.Header.Get("X-Sim-Worker"), late.Header.Get("X-Sim-Worker"); late.StatusCode != 200 || !c.blind && a != b {
					t.Errorf("conversation %d went to %s and then, with status %d, to %s", i, a, late.StatusCode, b)
				}
			}
			// All events of a response arrive.
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
			// Mistakes are answered with an error where kvroute sees the body.
			if resp, text := reply(t, d, "POST", chatPath, `{"model":"nobody","messages":[{"role":"user","content":"hi"}]}`, nil); !c.blind && resp.StatusCode != 404 {
				t.Errorf("an unknown model: status %d: %s", resp.StatusCode, text)
			}
			// A client that disconnects frees its slot.
			ctx, cancel := context.WithCancel(t.Context())
			resp, err := send(t, ctx, http.MethodPost, d.Envoy.URL()+chatPath, chatBody("and a long one", 4000, true), nil)
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
			defer func() { dies(t, d, c.mode == envoy.FullDuplex) }()
			for _, stat := range []string{"streams_failed", "message_timeouts", "spurious_msgs_received", "rejected_header_mutations"} {
				if n, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute."+stat); err != nil || n != 0 {
					t.Errorf("Envoy counts %d %s, %v", n, stat, err)
				}
			}
		})
	}
}

// dies kills kvroute during a response, during a decision, and before a request.
func dies(t *testing.T, d *demonstration, holds bool) {
	t.Helper()
	resp, err := send(t, t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, chatBody("a long story", 1500, true), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	hold(t, d.Router)
	started, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.streams_started")
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan sight, 1)
	go func() {
		asked <- look(send(t, t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, chatBody("hello", 4, false), nil))
	}()
	eventually(t, "Envoy does not ask kvroute", func() bool {
		n, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.streams_started")
		return err == nil && n > started || len(asked) > 0 // the health check may have been faster
	})
	kill(t, d.Router)
	after, during := outcomeOf(t, "kvroute dies after the decision"), outcomeOf(t, "kvroute dies while it decides")
	if holds {
		after, during = outcomeOf(t, "in full duplex kvroute dies after the decision"), outcomeOf(t, "in full duplex kvroute dies while it decides")
	}
	after.check(t, look(resp, nil))
	during.check(t, <-asked)
	if holds {
		eventually(t, "Envoy does not notice that kvroute is not there", func() bool {
			n, err := d.Envoy.Stat(t.Context(), "cluster.kvroute.membership_healthy")
			return err == nil && n == 0
		})
	}
	for i := range 4 {
		outcomeOf(t, "kvroute is not there").check(t, d.send(t, "hello", i%2 == 0))
	}
}

// A body that is larger than Envoy's buffer is truncated for kvroute, and not for the worker: the
// request is routed by load, and the worker gets the whole body.
func TestTruncatedBodiesThroughEnvoy(t *testing.T) {
	d := newStack(t, 3, []string{"--speed", "100", "--num-gpu-blocks", "65536"})
	d.EnvoyConfig.BodyMode, d.EnvoyConfig.MaxBodyBytes = envoy.BufferedPartial, 64<<10
	d.EnvoyConfig.MessageTimeout, d.EnvoyConfig.MaxMessageTimeout = 30*time.Second, 40*time.Second // for busy machines
	d.begin(t, "--decision-timeout", "25s", "--trust-overrides", "--allow-direct")                 // other clients get 413
	const tools = `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto"`
	story := strings.Repeat("And then the old fisherman told another story of the sea. ", 2500)
	body := func(i int, more string) string {
		return fmt.Sprintf(`{"model":"sim","max_tokens":2,%s,"messages":[{"role":"system","content":"You listen to %d."},{"role":"user","content":"%s%s"}]}`, tools, i, story, more)
	}
	resp, text := reply(t, d, "POST", chatPath, body(1, "One."), nil)
	var got answered
	if err := json.Unmarshal([]byte(text), &got); err != nil || resp.StatusCode != 200 || got.Usage.Prompt < len(story)/8 {
		t.Fatalf("status %d, %d tokens of the prompt: %.300s", resp.StatusCode, got.Usage.Prompt, text)
	}
	if last := lastDecision(t, d); last.TokenMode != tokenizer.None || last.TokenReason != openai.Truncated || last.Reason != router.ReasonLoad || last.PromptTokens == 0 {
		t.Errorf("mode %s, token reason %s, reason %s, %d tokens", last.TokenMode, last.TokenReason, last.Reason, last.PromptTokens)
	}
}

// Without the observing filter, a prefill ends with the first event that has content, and not
// before, in each mode in which Envoy sends chunks of the response to kvroute.
func TestTheMainStreamSeesTheFirstToken(t *testing.T) {
	for name, c := range map[string]struct {
		mode  envoy.BodyMode
		edit  *strings.Replacer
		flags []string
	}{
		"full duplex":       {mode: envoy.FullDuplex},
		"streamed response": {mode: envoy.Buffered, edit: strings.NewReplacer("response_body_mode: NONE", "response_body_mode: STREAMED")},
		"endpoint picker":   {mode: envoy.FullDuplex, flags: []string{"--endpoint-picker"}},
	} {
		t.Run(name, func(t *testing.T) {
			d := newStack(t, 0, nil)
			d.EnvoyConfig.BodyMode, d.EnvoyConfig.NoObserver = c.mode, true
			if c.edit != nil {
				d.Bootstrap = func(conf envoy.Config) ([]byte, error) {
					text, err := demo.Render(conf)
					return []byte(c.edit.Replace(string(text))), err
				}
			}
			events := make(chan string)
			d.begin(t, append(c.flags, staticFlags(t, d, "sse", startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
				if body, _ := io.ReadAll(r.Body); !strings.Contains(string(body), "a story") {
					return // only a check that the worker is there
				}
				w.Header().Set("Content-Type", "text/event-stream")
				for r.Context().Err() == nil {
					select {
					case e, more := <-events:
						if !more {
							return
						}
						_, _ = io.WriteString(w, e)
						_ = http.NewResponseController(w).Flush()
					case <-r.Context().Done():
					}
				}
			}))...)...)
			ended := make(chan sight, 1)
			go func() {
				ended <- look(send(t, t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, chatBody("a story", 4, true), nil))
			}()
			before := []string{": still waiting\n\n", "event: start\ndata:\n\n"}
			for _, e := range before {
				events <- e
			}
			if n, pend, _ := inFlight(t, d); n != 1 || pend == 0 {
				t.Errorf("before the first token: %d requests, %d pending tokens; want 1 and some", n, pend)
			}
			events <- "data: {\"choices\":[]}\n\n"
			eventually(t, "the prefill does not end with the first token", func() bool { n, pend, _ := inFlight(t, d); return n == 1 && pend == 0 })
			close(events)
			if got := <-ended; got.status != 200 || !strings.HasSuffix(got.body, "[]}\n\n") {
				t.Errorf("the client got %d: %q", got.status, got.body)
			}
			idle(t, d)
			if _, text := get(t, "http://"+d.Router.At.HTTP+"/metrics"); !strings.Contains(text, `source="observer"`) {
				t.Error("no first token by the observer is counted")
			}
		})
	}
}
