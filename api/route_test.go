// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// post sends a body and returns the response.
func post(t *testing.T, h http.Handler, path, body string) (status int, text string, header http.Header) {
	t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), "POST", path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	h.ServeHTTP(w, r)
	return w.Code, w.Body.String(), w.Header()
}

func TestBestWorker(t *testing.T) {
	r := newRouter(t, 2)
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
	status, text, _ := post(t, h, "/v1/best_worker", `{"model":"m","request_id":"a","token_ids":[1,2,3,4],"explain":true}`)
	var got struct {
		WorkerID      uint64 `json:"worker_id"`
		OverlapBlocks int    `json:"overlap_blocks"`
		Address       string `json:"address"`
		Decision      router.Decision
	}
	if err := json.Unmarshal([]byte(text), &got); err != nil || status != 200 || got.WorkerID == 0 || got.Address != "10.0.0.1:8000" || len(got.Decision.Candidates) != 2 {
		t.Fatalf("%d %s: %v", status, text, err)
	}
	again := fmt.Sprintf(`{"model":"m","token_ids":[1,2,3,4],"worker_id":%d}`, got.WorkerID)
	if _, text, _ = post(t, h, "/v1/best_worker", again); !strings.Contains(text, `"overlap_blocks":1`) {
		t.Errorf("the same prompt again, only asked for: %s", text)
	}
	for body, want := range map[string]string{
		`{"model":"m","prompt":"hello there"}`:                                                                             `"token_mode":"bytes"`,
		`{"model":"m","messages":[{"role":"user","content":"x"}]}`:                                                         `"prompt_tokens":`,
		`{"model":"m","token_ids":[9],"worker_id":1}`:                                                                      `"reason":"pinned"`,
		`{"model":"m","token_ids":[9],"worker_id":2,"dp_rank":0}`:                                                          `"worker_id":2`,
		`{"model":"m","token_ids":[9],"allowed_worker_ids":[2,7]}`:                                                         `"worker_id":2`,
		`{"model":"m","token_ids":[9],"router_config_override":{"prefill_load_scale":1e308,"overlap_score_credit":1e308}}`: `"cost":`,
		`{"model":"m","token_ids":[1,2,3,4],"router_config_override":{"overlap_score_weight":1e308}}`:                      `"cost":`,
		`{"model":"m","token_ids":[9],"router_config_override":{"cost":"dynamo"}}`:                                         `"policy":"dynamo"`,
		`{"model":"m","token_ids":[9,8],"prompt":[9, 8],"messages":null}`:                                                  `"prompt_tokens":2`,
		`{"model":"m","token_ids":[],"priority":3,"strict_priority":1,"session_id":"s"}`:                                   `"prompt_tokens":0`,
		`{"model":"m","token_ids":[9],"ttft_target_ms":5,"expected_output_tokens":9}`:                                      `"prompt_tokens":1`,
		`{"model":"m","token_ids":[9],"required_taints":null,"preferred_taints":{"a":1}}`:                                  `"prompt_tokens":1`,
	} {
		if status, text, _ := post(t, h, "/v1/best_worker", body); status != 200 || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s, want %s", body, status, text, want)
		}
	}
	if status, text, _ := post(t, h, "/v1/potential_loads", `{"model":"m","token_ids":[1,2,3,4,5]}`); status != 200 || strings.Count(text, `"potential_prefill_tokens"`) != 2 {
		t.Errorf("potential loads: %d %s", status, text)
	}
	for _, c := range []struct{ path, body, want string }{
		{"mark_prefill_complete", `{"request_id":"a"}`, "true"},
		{"mark_prefill_complete", `{"request_id":"a"}`, "false"},
		{"add_output_tokens", `{"request_id":"a","tokens":3}`, "true"},
		{"free", `{"request_id":"a"}`, "true"},
		{"free", `{"request_id":"a"}`, "false"},
		{"mark_prefill_complete", `{"request_id":"a"}`, "false"},
		{"add_output_tokens", `{"request_id":"a","tokens":3}`, "false"},
	} {
		if status, text, _ := post(t, h, "/v1/"+c.path, c.body); status != 200 || !strings.Contains(text, `"changed":`+c.want) {
			t.Errorf("%s: %d %s, want %s", c.path, status, text, c.want)
		}
	}
	if status, text, _ := post(t, h, "/v1/dump_events", ""); status != 200 || strings.TrimSpace(text) != "[]" {
		t.Errorf("dump: %d %s", status, text)
	}
}

// Both workers of a split request are in the answer, each has a slot, and each may be pinned.
func TestBestWorkerOfASplitModel(t *testing.T) {
	r := newRouter(t, 0)
	held := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(fixtures.HoldPort(t))) // refuses connections
	for i, role := range []router.Role{router.Prefill, router.Prefill, router.Decode, router.Decode} {
		if err := r.SetWorker(router.WorkerInfo{
			ID: uint64(i + 1), Role: role, Models: []string{"m"}, BlockSize: 4, DPSize: 2, Engine: "vllm",
			Address: held,
		}); err != nil {
			t.Fatal(err)
		}
	}
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
	requests := func() string {
		n := map[uint64]int{}
		for _, w := range r.Workers() {
			n[w.ID] += w.ActiveRequests
		}
		return fmt.Sprint(n)
	}
	for _, c := range []struct {
		more          string // fields of the body
		status        int
		want          string
		slots, legEnd string // requests by worker, and after the end of the leg
	}{
		{`"worker_id":4,"dp_rank":1,"prefill_worker_id":2,"prefill_dp_rank":1`, 200, `{"worker_id":4,"dp_rank":1,"overlap_blocks":0,"address":"HELD","prefill":{"request_id":"a/prefill","worker_id":2,"dp_rank":1,"overlap_blocks":0,"address":"HELD"}`, "map[1:0 2:1 3:0 4:1]", "map[1:0 2:0 3:0 4:1]"},
		{`"worker_id":3,"prefill_worker_id":1,"routing_mode":"disaggregated"`, 200, `"prefill":{"request_id":"a/prefill","worker_id":1,`, "map[1:1 2:0 3:1 4:0]", "map[1:0 2:0 3:1 4:0]"},
		{`"worker_id":3,"routing_mode":"aggregated"`, 200, `"no_prefill":"asked"`, "map[1:0 2:0 3:1 4:0]", "map[1:0 2:0 3:1 4:0]"},
		{`"allowed_worker_ids":[3],"routing_mode":"disaggregated"`, 503, `"code":"no_worker"`, "", ""},
		{`"prefill_worker_id":3`, 400, `"code":"worker_not_allowed"`, "", ""},
		{`"prefill_worker_id":9`, 400, `"code":"worker_not_found"`, "", ""},
		{`"prefill_dp_rank":1`, 400, `prefill_dp_rank must be beside a prefill_worker_id`, "", ""},
		{`"routing_mode":"both"`, 400, `routing_mode must be aggregated or disaggregated`, "", ""},
	} {
		status, text, _ := post(t, h, "/v1/best_worker", `{"model":"m","request_id":"a","token_ids":[1,2,3,4],`+c.more+`}`)
		if want := strings.ReplaceAll(c.want, "HELD", held.String()); status != c.status || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s, want %d with %s", c.more, status, text, c.status, c.want)
		}
		if status != 200 {
			continue
		}
		if got := requests(); got != c.slots {
			t.Errorf("%s: requests %s, want %s", c.more, got, c.slots)
		}
		post(t, h, "/v1/free", `{"request_id":"a/prefill"}`)
		if got := requests(); got != c.legEnd {
			t.Errorf("%s: after the leg requests %s, want %s", c.more, got, c.legEnd)
		}
		post(t, h, "/v1/free", `{"request_id":"a"}`)
		if got := requests(); got != "map[1:0 2:0 3:0 4:0]" {
			t.Errorf("%s: in the end requests %s", c.more, got)
		}
	}
}

func TestErrorsOfTheRouter(t *testing.T) {
	r := newRouter(t, 1)
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), OverloadStatus: 529})
	post(t, h, "/v1/best_worker", `{"model":"m","request_id":"taken","token_ids":[1]}`)
	empty := api.New(api.Config{Router: newRouter(t, 0), Metrics: http.NotFoundHandler()})
	for _, c := range []struct {
		h      http.Handler
		path   string
		body   string
		status int
		want   string
	}{
		{h, "best_worker", `{"model":"x","token_ids":[1]}`, 404, `"code":"model_not_found"`},
		{empty, "best_worker", `{"model":"m","token_ids":[1]}`, 503, `"code":"no_worker"`},
		{h, "best_worker", `{"model":"m","request_id":"taken","token_ids":[1]}`, 409, `"param":"request_id"`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"worker_id":9}`, 400, `"param":"worker_id"`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"dp_rank":9}`, 400, `"param":"dp_rank"`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"router_config_override":{"alpha":-1}}`, 400, `alpha is -1`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"router_config_override":{"alpa":1}}`, 400, `alpa`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"expected_output_tokens":-1}`, 400, `ExpectedOutput`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"ttft_target_ms":-1}`, 400, `ttft_target_ms`},
		{h, "best_worker", `{"model":"m","token_ids":["a"]}`, 400, `token_ids`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"colour":"red"}`, 400, `colour`},
		{h, "best_worker", `{"model":"m","token_ids":[1]} and more`, 400, "follows"},
		{h, "best_worker", `{"token_ids":[1]}`, 400, `"param":"model"`},
		{h, "best_worker", `{"model":"m"}`, 400, `"param":"token_ids"`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"prompt":"a"}`, 400, `token_ids must be absent beside prompt`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"prompt":[1,2]}`, 400, `token_ids must be absent beside prompt`},
		{h, "potential_loads", `{"model":"m","token_ids":[],"prompt":[[]]}`, 400, `"param":"token_ids"`},
		{h, "best_worker", `{"model":"m","token_ids":[1],"messages":[]}`, 400, `token_ids must be absent beside messages`},
		{h, "generate", `{"model":"m","token_ids":[1],"prompt":"a","request_id":"g"}`, 400, `token_ids must be absent beside prompt`},
		{h, "best_worker", ``, 400, "EOF"},
		{h, "best_worker", `{"model":"` + strings.Repeat("x", 65<<20) + `"}`, 413, "too large"},
		{h, "potential_loads", `{"model":"x","token_ids":[1]}`, 404, `"code":"model_not_found"`},
		{h, "free", `{}`, 400, `"param":"request_id"`},
		{h, "free", `{"request_id":5}`, 400, `request_id`},
		{h, "add_output_tokens", `{"request_id":"a","tokens":-3}`, 400, `tokens`},
		{h, "generate", `{"model":"m","token_ids":[1]}`, 400, `"param":"request_id"`},
		{h, "generate", `{"model":"m","token_ids":[1],"request_id":"g","body":{"stream":false}}`, 400, `stream`},
		{h, "generate", `{"model":"x","token_ids":[1],"request_id":"g"}`, 404, `model_not_found`},
	} {
		status, text, _ := post(t, c.h, "/v1/"+c.path, c.body)
		var e struct {
			Error struct{ Message, Type string }
		}
		if err := json.Unmarshal([]byte(text), &e); err != nil || status != c.status || !strings.Contains(text, c.want) || e.Error.Message == "" || e.Error.Type == "" {
			t.Errorf("%s %.80s: %d %s, want %d with %s", c.path, c.body, status, text, c.status, c.want)
		}
	}
}

func TestBusyThresholds(t *testing.T) {
	r := newRouter(t, 1)
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), OverloadStatus: 529})
	for _, c := range []struct {
		method, body string
		status       int
		want         string
	}{
		{"GET", "", 200, `{"thresholds":[]}`},
		{"POST", `{"model":"m"}`, 200, `{"model":"m","active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":null,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":1}`, 200, `{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":1,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_decode_blocks_threshold":0.9}`, 200, `{"model":"m","active_decode_blocks_threshold":0.9,"active_prefill_tokens_threshold":1,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_decode_blocks_threshold":1.9}`, 400, "active_decode_blocks_threshold is 1.9"},
		{"POST", `{"model":"x","active_decode_blocks_threshold":0.9}`, 404, "model_not_found"},
		{"POST", `{"model":"m","threshold":0.9}`, 400, "threshold"},
		{"GET", "", 200, `{"thresholds":[{"model":"m","active_decode_blocks_threshold":0.9,"active_prefill_tokens_threshold":1,"active_prefill_tokens_threshold_frac":null}]}`},
	} {
		w := httptest.NewRecorder()
		req := httptest.NewRequestWithContext(t.Context(), c.method, "/busy_threshold", strings.NewReader(c.body))
		req.Header.Set("Content-Type", "application/json")
		h.ServeHTTP(w, req)
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.want) {
			t.Errorf("%s %s: %d %s, want %d %s", c.method, c.body, w.Code, w.Body, c.status, c.want)
		}
	}
	post(t, h, "/v1/best_worker", `{"model":"m","request_id":"a","token_ids":[1`+strings.Repeat(",1", 99_999)+`]}`)
	if status, text, header := post(t, h, "/v1/best_worker", `{"model":"m","request_id":"b","token_ids":[1]}`); status != 529 || header.Get("Retry-After") != "1" {
		t.Errorf("all busy: %d %s, come again in %s s, want 1", status, text, header.Get("Retry-After"))
	}
}

// engine is a worker that answers completions by a script.
func engine(t *testing.T, r *router.Router, handler http.HandlerFunc) {
	t.Helper()
	s := httptest.NewServer(handler)
	t.Cleanup(s.Close)
	if err := r.SetWorker(router.WorkerInfo{ID: 1, Models: []string{"m"}, BlockSize: 4, Address: netip.MustParseAddrPort(s.Listener.Addr().String())}); err != nil {
		t.Fatal(err)
	}
}

func TestGenerate(t *testing.T) {
	for _, c := range []struct {
		name    string
		handler http.HandlerFunc
		body    string
		status  int
		want    string
	}{
		{"a stream", func(w http.ResponseWriter, r *http.Request) {
			sent, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, ": waiting\n\ndata: %s\n\ndata: [DONE]\n\n", sent)
		}, `"token_ids":[1,2],"body":{"max_tokens":3}`, 200, "data: {\"max_tokens\":3,\"model\":\"m\",\"prompt\":[1,2],\"stream\":true}\n\ndata: [DONE]\n\n"},
		{"carriage returns", func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "id: 1\r\ndata: %s\r\n\r\ndata: b", r.URL.Path)
		}, `"messages":[{"role":"user"}],"cache_salt":"s"`, 200, "id: 1\r\ndata: /v1/chat/completions\n\ndata: b\n\n"},
		{"a refusal", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(422)
			fmt.Fprint(w, `{"error":{"message":"no","type":"t"}}`)
		}, `"token_ids":[1]`, 422, `{"error":{"message":"no","type":"t"}}`},
		{"a fault", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, `"token_ids":[1]`, 502, "status 500"},
		{"a redirect", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://example.org/", http.StatusFound)
		}, `"token_ids":[1]`, 502, "status 302"},
		{"a peer of a transfer", nil, `"token_ids":[1],"body":{"\u006bv_transfer_params":{"remote_host":"h"}}`, 400, `"param":"body.kv_transfer_params"`},
		{"a rank", nil, `"token_ids":[1],"body":{"nvext":{"dp_rank":1}}`, 400, `"param":"body.nvext.dp_rank"`},
		{"silence", func(http.ResponseWriter, *http.Request) {}, `"token_ids":[1]`, 200, ""},
		{"an end in between", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "data: a\n\n")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}, `"token_ids":[1]`, 200, "data: a\n\ndata: {\"error\""},
		{"an endless line", func(w http.ResponseWriter, _ *http.Request) {
			for range 3 << 10 {
				if _, err := w.Write(make([]byte, 1<<10)); err != nil {
					return
				}
			}
		}, `"token_ids":[1]`, 502, "too long"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRouter(t, 0)
			engine(t, r, c.handler)
			h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
			status, text, _ := post(t, h, "/v1/generate", `{"model":"m","request_id":"g",`+c.body+`}`)
			if status != c.status || !strings.Contains(text, c.want) {
				t.Errorf("%d %q, want %d %q", status, text, c.status, c.want)
			}
			if got := r.Workers()[0]; got.ActiveRequests != 0 || r.Free("g") {
				t.Errorf("left behind: %+v", got)
			}
		})
	}
}

// An engine that can return token ids is requested to do so, unless the caller sets that field,
// and the output tokens are counted by these ids.
func TestGenerateYieldsTokenIDs(t *testing.T) {
	for _, c := range []struct{ engine, body, sent string }{
		{"vllm", `"token_ids":[1,2]`, `{"return_token_ids":true,"model":"m","prompt":[1,2],"stream":true}`},
		{"vllm", `"messages":[{"role":"user"}]`, `{"return_token_ids":true,"messages":[{"role":"user"}],"model":"m","stream":true}`},
		{"vllm", `"token_ids":[1],"body":{"return_token_ids":false}`, `{"model":"m","prompt":[1],"return_token_ids":false,"stream":true}`},
		{"sglang", `"token_ids":[1]`, `{"model":"m","prompt":[1],"stream":true}`},
	} {
		r := newRouter(t, 0)
		asked, counted := make(chan string, 1), make(chan struct{})
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			sent, _ := io.ReadAll(req.Body)
			asked <- string(sent)
			// The event has more ids than tokens would be counted without ids: enough to fill a
			// block of 4.
			fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"abc\",\"token_ids\":[7,8,9,10,11,12]}]}\n\n")
			_ = http.NewResponseController(w).Flush()
			<-counted
			fmt.Fprint(w, "data: [DONE]\n\n")
		}))
		t.Cleanup(s.Close)
		if err := r.SetWorker(router.WorkerInfo{ID: 1, Models: []string{"m"}, BlockSize: 4, Engine: c.engine, Address: netip.MustParseAddrPort(s.Listener.Addr().String())}); err != nil {
			t.Fatal(err)
		}
		h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
		done := make(chan string)
		go func() {
			_, text, _ := post(t, h, "/v1/generate", `{"model":"m","request_id":"g",`+c.body+`}`)
			done <- text
		}()
		if got := <-asked; got != c.sent {
			t.Errorf("%s is sent %s, want %s", c.engine, got, c.sent)
		}
		for end := time.Now().Add(30 * time.Second); r.Workers()[0].ActiveBlocks == 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: six token ids fill no block", c.engine)
			}
		}
		close(counted)
		if text := <-done; !strings.Contains(text, `"token_ids":[7,8,9,10,11,12]`) {
			t.Errorf("%s: the events are %s", c.engine, text)
		}
	}
}

// When the client disconnects, its request at the worker ends.
func TestGenerateEndsWithItsClient(t *testing.T) {
	r := newRouter(t, 0)
	gone := make(chan struct{})
	engine(t, r, func(w http.ResponseWriter, req *http.Request) {
		fmt.Fprint(w, "data: a\n\n")
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
		close(gone)
	})
	s := httptest.NewServer(api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()}))
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", s.URL+"/v1/generate", strings.NewReader(`{"model":"m","request_id":"g","token_ids":[1]}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := make([]byte, 9)
	if _, err := io.ReadFull(resp.Body, first); err != nil || r.Workers()[0].ActiveRequests != 1 {
		t.Errorf("%q, %v, %+v", first, err, r.Workers()[0])
	}
	cancel()
	select {
	case <-gone:
	case <-time.After(10 * time.Second):
		t.Fatal("the worker was not told")
	}
	for end := time.Now().Add(10 * time.Second); r.Workers()[0].ActiveRequests != 0; {
		if time.Now().After(end) {
			t.Fatal("the slot is taken")
		}
	}
}

// The worker gets the prompt and the further fields. A field that the question sets itself is refused.
func TestGenerateMakesTheWorkersRequest(t *testing.T) {
	r := newRouter(t, 0)
	engine(t, r, func(w http.ResponseWriter, req *http.Request) {
		sent, _ := io.ReadAll(req.Body)
		fmt.Fprintf(w, "data: %s %s\n\n", req.URL.Path, sent)
	})
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
	for fields, want := range map[string]string{
		`"token_ids":[1,2],"cache_salt":"s"`:                      `/v1/completions {"cache_salt":"s","max_tokens":3,"model":"m","prompt":[1,2],"stream":true}`,
		`"prompt":"x","messages":null`:                            `/v1/completions {"max_tokens":3,"model":"m","prompt":"x","stream":true}`,
		`"messages":[{"role":"user"}],"tool_choice":"auto"`:       `/v1/chat/completions {"max_tokens":3,"messages":[{"role":"user"}],"model":"m","stream":true,"tool_choice":"auto"}`,
		`"prompt":[1,2],"token_ids":[1,2],"tools":[{"a": "<b>"}]`: `/v1/completions {"max_tokens":3,"model":"m","prompt":[1,2],"stream":true,"tools":[{"a":"\u003cb\u003e"}]}`,
	} {
		if status, got, _ := post(t, h, "/v1/generate", `{"model":"m","request_id":"g",`+fields+`,"body":{"max_tokens":3}}`); status != 200 || got != "data: "+want+"\n\n" {
			t.Errorf("%s: %d %q, want %s", fields, status, got, want)
		}
	}
	for field, want := range map[string]string{
		`"stream":true`: `"body must be without stream: the answer of /v1/generate is always a stream of events"`,
		`"prompt":"x"`:  `"body must be without prompt: put it beside body"`,
		`"messages":[]`: `"body must be without messages: put it beside body"`,
	} {
		if status, text, _ := post(t, h, "/v1/generate", `{"model":"m","request_id":"g","token_ids":[1],"body":{`+field+`}}`); status != 400 || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s", field, status, text)
		}
	}
	if status, text, _ := post(t, h, "/v1/generate", `{"model":"m","token_ids":[1]}`); status != 400 || !strings.Contains(text, "request_id must be") {
		t.Errorf("without an id: %d %s", status, text)
	}
}

// A booking waits in the queue for the configured time, or for its own target if that is shorter.
func TestABookingWaitsNotForEver(t *testing.T) {
	r, err := router.New(router.Config{Queue: router.QueueConfig{Threshold: new(0.)}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.SetWorker(router.WorkerInfo{ID: 1, Models: []string{"m"}, BlockSize: 4, MaxBatchedTokens: 8, Address: netip.MustParseAddrPort("10.0.0.1:8000")}); err != nil {
		t.Fatal(err)
	}
	const wait = 200 * time.Millisecond
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), QueueWait: wait})
	post(t, h, "/v1/best_worker", `{"model":"m","request_id":"first","token_ids":[1]}`)
	for body, least := range map[string]time.Duration{
		`"ttft_target_ms":20`:      20 * time.Millisecond,
		`"ttft_target_ms":9000000`: wait,
		`"priority":1`:             wait,
	} {
		for _, path := range []string{"/v1/best_worker", "/v1/generate"} {
			start := time.Now()
			status, text, header := post(t, h, path, `{"model":"m","request_id":"next","token_ids":[1],`+body+`}`)
			if took := time.Since(start); status != 429 || header.Get("Retry-After") == "" || took < least {
				t.Errorf("%s, %s: status %d after %v, %s", path, body, status, took, text)
			}
		}
	}
	if w := r.Workers()[0]; w.ActiveRequests != 1 {
		t.Errorf("left behind: %+v", w)
	}
}

// slowRouter returns a router with a worker of model m, whose prompts are tokenized.
func slowRouter(t *testing.T) *router.Router {
	t.Helper()
	prompts, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := router.New(router.Config{Cards: []router.Card{{Name: "m", Prompts: prompts}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.SetWorker(router.WorkerInfo{ID: 1, Models: []string{"m"}, BlockSize: 4, Address: netip.MustParseAddrPort("10.0.0.1:8000")}); err != nil {
		t.Fatal(err)
	}
	return r
}

// A routing call has the same decision timeout as a request through Envoy: a prompt that takes
// longer, here of a million tokens, gets an error.
func TestADecisionHasATimeout(t *testing.T) {
	r := slowRouter(t)
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), DecisionTimeout: time.Nanosecond})
	for _, path := range []string{"/v1/best_worker", "/v1/potential_loads", "/v1/generate"} {
		status, text, _ := post(t, h, path, `{"model":"m","request_id":"a","prompt":"`+strings.Repeat("a word ", 1<<20)+`"}`)
		if status != 503 || !strings.Contains(text, `"code":"no_decision"`) {
			t.Errorf("%s: %d %s, want 503 no_decision", path, status, text)
		}
	}
	if w := r.Workers()[0]; w.ActiveRequests != 0 {
		t.Errorf("left behind: %+v", w)
	}
}
