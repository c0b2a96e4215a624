// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/tokenizer"
)

// start runs an engine and serves it.
func start(t *testing.T, c enginesim.Config) (e *enginesim.Engine, url string) {
	t.Helper()
	e, err := enginesim.New(c)
	if err != nil {
		t.Fatal(err)
	}
	background(t, e.Run)
	s := httptest.NewServer(e)
	t.Cleanup(s.Close)
	t.Cleanup(s.CloseClientConnections)
	return e, s.URL
}

func send(t *testing.T, method, url, body string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(text)
}

const fast = 1000 // simulated seconds per second

func TestAnswers(t *testing.T) {
	_, url := start(t, enginesim.Config{Name: "w", Speed: fast})
	long := strings.Repeat("all of this is cached the second time ", 10)
	chat := `{"model":"sim","max_tokens":5,"messages":[{"role":"user","content":"` + long + `"}]`
	var last struct {
		Choices []struct {
			Message struct{ Content string } `json:"message"`
			Reason  string                   `json:"finish_reason"`
		}
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Output  int `json:"completion_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	prompts, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	prompt, err := prompts.Tokenizer().Append(t.Context(), nil, []byte("<|im_start|>user\n"+long+"<|im_end|>\n<|im_start|>assistant\n"), false)
	if err != nil || len(prompt) < 50 {
		t.Fatalf("%d tokens, %v", len(prompt), err)
	}
	for i, cached := range []int{0, (len(prompt) - 1) / 16 * 16} {
		resp, body := send(t, "POST", url+"/v1/chat/completions", chat+"}")
		if err := json.Unmarshal([]byte(body), &last); err != nil {
			t.Fatal(err)
		}
		if resp.Header.Get("X-Sim-Worker") != "w" || last.Usage.Output != 5 || last.Usage.Prompt != len(prompt) || last.Usage.Details.Cached != cached || last.Choices[0].Reason != "length" {
			t.Errorf("request %d: %s", i, body)
		}
	}
	_, streamed := send(t, "POST", url+"/v1/chat/completions", chat+`,"stream":true,"stream_options":{"include_usage":true}}`)
	events := strings.Split(strings.TrimSpace(streamed), "\n\n")
	// The role, five tokens, the end, the usage, [DONE].
	if len(events) != 9 || !strings.Contains(events[0], `"role":"assistant"`) || !strings.Contains(events[6], `"finish_reason":"length"`) ||
		!strings.Contains(events[7], `"usage":{"completion_tokens":5,"prompt_tokens":`) || events[8] != "data: [DONE]" {
		t.Errorf("streamed %d events:\n%s", len(events), streamed)
	}
	var text strings.Builder
	for _, e := range events[:7] {
		var chunk struct {
			Choices []struct{ Delta struct{ Content string } }
		}
		if err := json.Unmarshal([]byte(strings.TrimPrefix(e, "data: ")), &chunk); err != nil {
			t.Fatal(err)
		}
		text.WriteString(chunk.Choices[0].Delta.Content)
	}
	if text.String() != last.Choices[0].Message.Content {
		t.Errorf("streamed %q, whole %q", text.String(), last.Choices[0].Message.Content)
	}
	_, plain := send(t, "POST", url+"/v1/completions", `{"model":"sim","prompt":[1,2,3],"stream":true}`)
	if !strings.Contains(plain, `"object":"text_completion"`) || strings.Count(plain, "data: ") != 16+2 {
		t.Errorf("completions streamed\n%s", plain)
	}
}

func TestOtherEndpoints(t *testing.T) {
	e, url := start(t, enginesim.Config{Speed: fast, NumBlocks: 64})
	send(t, "POST", url+"/v1/completions", `{"model":"sim","prompt":"`+strings.Repeat("x", 100)+`"}`)
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"GET", "/health", "", 200, ""},
		{"GET", "/v1/models", "", 200, `"id":"sim"`},
		{"GET", "/metrics", "", 200, "vllm:num_requests_running"},
		{"GET", "/metrics", "", 200, `num_gpu_blocks="64"`},
		{"GET", "/metrics", "", 200, `vllm:prefix_cache_queries_total{engine="0",model_name="sim"} 100`},
		{"GET", "/metrics", "", 200, "vllm:time_to_first_token_seconds_count"},
		{"GET", "/nothing", "", 404, `"error"`},
		{"GET", "/v1/completions", "", 405, `"error"`},
		{"POST", "/v1/completions", `{"model":"other","prompt":"x"}`, 404, `"param":"model"`},
		{"POST", "/v1/completions", `{"model":"sim","prompt":""}`, 400, "empty"},
		{"POST", "/v1/completions", `{"model":"sim","prompt":"x","max_tokens":2000}`, 400, "maximum context length is 1024"},
		{"POST", "/v1/completions", `{"model":"sim",`, 400, "not valid JSON"},
		{"POST", "/v1/completions", `{"model":"sim","prompt":[1,"a"]}`, 400, "prompt"},
	} {
		if resp, body := send(t, c.method, url+c.path, c.body); resp.StatusCode != c.status || !strings.Contains(body, c.want) {
			t.Errorf("%s %s %s: %d %s, want %d and %q", c.method, c.path, c.body, resp.StatusCode, body, c.status, c.want)
		}
	}
	if s := e.Stats(); s.CachedBlocks != 6 {
		t.Errorf("%d blocks cached, want 6", s.CachedBlocks)
	}
	if resp, _ := send(t, "POST", url+"/reset_prefix_cache", ""); resp.StatusCode != 200 || e.Stats().CachedBlocks != 0 {
		t.Errorf("reset: %d, %d blocks left", resp.StatusCode, e.Stats().CachedBlocks)
	}
}

// The event of a block is published at the end of the step that computes it.
func TestEventsFollowTheirStep(t *testing.T) {
	prompts, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		type published struct {
			after  time.Duration
			blocks int
		}
		var got []published
		e, err := enginesim.New(enginesim.Config{Prompts: prompts, Publish: func(ev indexer.Event) {
			got = append(got, published{time.Since(begin).Round(time.Millisecond), len(ev.Blocks)})
		}})
		if err != nil {
			t.Fatal(err)
		}
		background(t, e.Run)
		ids, err := json.Marshal(tokens(1, 12_000))
		if err != nil {
			t.Fatal(err)
		}
		response := httptest.NewRecorder()
		e.ServeHTTP(response, httptest.NewRequestWithContext(t.Context(), "POST", "/v1/completions", strings.NewReader(`{"model":"sim","max_tokens":1,"prompt":`+string(ids)+`}`)))
		if response.Code != http.StatusOK {
			t.Fatalf("status %d: %s", response.Code, response.Body)
		}
		// Two steps of 8,192 and 3,808 tokens.
		if want := []published{{400 * time.Millisecond, 512}, {643 * time.Millisecond, 238}}; !slices.Equal(got, want) {
			t.Errorf("events %v, want %v", got, want)
		}
	})
}

// The time between two requests computes nothing of the second one.
func TestAPauseComputesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, err := enginesim.New(enginesim.Config{})
		if err != nil {
			t.Fatal(err)
		}
		background(t, e.Run)
		send := func(first int) time.Duration {
			ids, err := json.Marshal(tokens(first, 2_000))
			if err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			e.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "POST", "/v1/completions", strings.NewReader(`{"model":"sim","max_tokens":1,"prompt":`+string(ids)+`}`)))
			return time.Since(begin)
		}
		want := send(1)
		time.Sleep(80 * time.Millisecond)
		if took := send(10_000); took != want || want == 0 {
			t.Errorf("the first request took %v, an equal one after a pause of 80 ms %v", want, took)
		}
	})
}

// The headers of a streamed response come before the prompt is computed, the first
// event after it.
func TestHeadersComeBeforeTheFirstToken(t *testing.T) {
	_, url := start(t, enginesim.Config{Speed: 1})
	req, err := http.NewRequestWithContext(t.Context(), "POST", url+"/v1/completions", strings.NewReader(`{"model":"sim","stream":true,"max_tokens":1,"prompt":"`+strings.Repeat("x", 8000)+`"}`))
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	headers := time.Since(begin)
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	// 8,000 tokens take 390 ms.
	if first := time.Since(begin); first-headers < 200*time.Millisecond || first < 380*time.Millisecond {
		t.Errorf("headers after %v, first event after %v", headers, first)
	}
}

func TestAClientThatLeavesFreesItsRequest(t *testing.T) {
	e, url := start(t, enginesim.Config{Speed: 1})
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", url+"/v1/completions", strings.NewReader(`{"model":"sim","stream":true,"max_tokens":4000,"prompt":"hello"}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if e.Stats().Running != 1 {
		t.Errorf("%+v, want a request running", e.Stats())
	}
	if resp, _ := send(t, "POST", url+"/reset_prefix_cache", ""); resp.StatusCode != 409 {
		t.Errorf("a reset while blocks are in use: %d, want 409", resp.StatusCode)
	}
	cancel()
	for deadline := time.Now().Add(5 * time.Second); e.Stats().Running+e.Stats().UsedBlocks > 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%+v, want nothing", e.Stats())
		}
		<-time.After(time.Millisecond)
	}
}

// A client that does not read delays no other request.
func TestASlowClientDelaysNobody(t *testing.T) {
	_, url := start(t, enginesim.Config{Speed: fast})
	req, err := http.NewRequestWithContext(t.Context(), "POST", url+"/v1/chat/completions", strings.NewReader(`{"model":"sim","stream":true,"max_tokens":8000,"messages":[{"role":"user","content":"x"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() // the body is not read
	for range 20 {
		if resp, _ := send(t, "POST", url+"/v1/completions", `{"model":"sim","prompt":"quick"}`); resp.StatusCode != 200 {
			t.Fatal(resp.StatusCode)
		}
	}
}

// Salted prompts share no blocks with others, nor with other salts.
func TestSalts(t *testing.T) {
	var mu sync.Mutex
	locals := map[uint64]int{}
	_, url := start(t, enginesim.Config{Speed: fast, Publish: func(ev indexer.Event) {
		mu.Lock()
		defer mu.Unlock()
		for _, b := range ev.Blocks {
			locals[b.Local]++
		}
	}})
	prompt := `{"model":"sim","prompt":"01234567890123456"`
	for _, body := range []string{prompt + `}`, prompt + `,"cache_salt":"a"}`, prompt + `,"nvext":{"cache_salt":"b"}}`, prompt + `,"cache_salt":"a"}`} {
		send(t, "POST", url+"/v1/completions", body)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(locals) != 3 {
		t.Errorf("%d different blocks, want 3", len(locals))
	}
}

func TestBadSettings(t *testing.T) {
	for want, c := range map[string]enginesim.Config{
		"BlockSize": {BlockSize: -1},
		"NumBlocks": {NumBlocks: 1 << 30},
		"Preset":    {Preset: "abacus"},
		"Speed":     {Speed: -1},
		"Bandwidth": {Bandwidth: -1},
		"HoldTime":  {HoldTime: -1},

		`--hybrid is "window"`:      {Hybrid: "window"},
		`--hybrid is "chunk=64"`:    {Hybrid: "chunk=64"},
		`--hybrid is "window=1"`:    {Hybrid: "window=1"},
		"--kv-pulls cannot be":      {Hybrid: "window=64", Pulls: true},
		"--hybrid needs the engine": {Hybrid: "window=64", Engine: enginesim.SGLang},

		`Role is "both"`: {Role: "both", Engine: enginesim.SGLang},
		`Role is "gpu"`:  {Role: "gpu"},
	} {
		if _, err := enginesim.New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want one that names %s", c, err, want)
		}
	}
}
