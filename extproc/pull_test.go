// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// sourced decides for a worker with a source, if the request may name one.
func sourced(_ context.Context, req router.Request) (router.Decision, error) {
	d := router.Decision{ID: req.ID, Worker: router.Worker{ID: 1}, Engine: "vllm", Address: netip.MustParseAddrPort("10.0.0.1:8000")}
	if req.MayPull {
		d.Source = &router.Source{Worker: router.Worker{ID: 2}, Address: netip.MustParseAddrPort("10.0.0.2:8000"), Pulls: netip.MustParseAddrPort("10.0.0.2:5711")}
	}
	return d, nil
}

// kvroute names the source in the body or in llm-d's header, and what a client wrote there never reaches a worker.
func TestRequestsNameTheSource(t *testing.T) {
	const named = `"kv_transfer_params":{"remote_kv_source":{"kv_request_id":"ID","remote_host":"10.0.0.2","remote_port":5711}}`
	evil := `"kv_transfer_params":{"remote_kv_source":{"remote_host":"evil","remote_port":1}}`
	body, header, trusted := extproc.Config{KVPull: "body"}, extproc.Config{KVPull: "header"}, extproc.Config{KVPull: "body", TrustOverrides: true}
	for name, c := range map[string]struct {
		conf   extproc.Config
		body   string
		path   string
		mode   filterv3.ProcessingMode_BodySendMode
		want   string // "" for an unchanged body
		header string
	}{
		"off":                     {body: `{"model":"m","prompt":"a"}`},
		"body":                    {conf: body, body: `{"model":"m","prompt":"a"}`, want: `{"model":"m","prompt":"a",` + named + `}`},
		"chunks":                  {conf: body, mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, body: `{"model":"m","prompt":"a"}`, want: `{"model":"m","prompt":"a",` + named + `}`},
		"chat":                    {conf: body, path: "/v1/chat/completions", body: `{"model":"m","messages":[{"role":"user","content":"a"}]}`, want: `{"model":"m","messages":[{"role":"user","content":"a"}],` + named + `}`},
		"a client's source":       {conf: body, body: `{"model":"m",` + evil + `,"prompt":"a"}`, want: `{"model":"m","prompt":"a",` + named + `}`},
		"escaped":                 {conf: body, body: `{"model":"m",` + strings.Replace(evil, "kv_t", `kv\u005ft`, 1) + `,"prompt":"a"}`, want: `{"model":"m","prompt":"a",` + named + `}`},
		"a client's own ids":      {conf: body, body: `{"model":"m","prompt":"a","kv_transfer_params":{"prompt_token_ids":[1],"x":2}}`, want: `{"model":"m","prompt":"a","kv_transfer_params":{"prompt_token_ids":[1],"remote_kv_source":{"kv_request_id":"ID","remote_host":"10.0.0.2","remote_port":5711}}}`},
		"a trusted client's own":  {conf: trusted, body: `{"model":"m","prompt":"a",` + evil + `}`},
		"hints":                   {conf: body, body: `{"model":"m","prompt":"a","kv_hints":[7]}`, want: `{"model":"m","prompt":"a",` + named + `}`},
		"several outputs":         {conf: body, body: `{"model":"m","prompt":"a","n":2}`},
		"several prompts":         {conf: body, body: `{"model":"m","prompt":["a","b"]}`},
		"another API":             {conf: body, path: "/v1/responses", body: `{"model":"m","input":"a"}`},
		"header":                  {conf: header, body: `{"model":"m","prompt":"a"}`, header: "10.0.0.2:8000"},
		"header, client's source": {conf: header, body: `{"model":"m",` + evil + `,"prompt":"a"}`, want: `{"model":"m","prompt":"a"}`, header: "10.0.0.2:8000"},
		"off, client's source":    {body: `{"model":"m",` + evil + `,"prompt":"a"}`, want: `{"model":"m","prompt":"a"}`},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, c.conf)
			h.router.will(sourced)
			path := "/v1/completions"
			if c.path != "" {
				path = c.path
			}
			x := h.Do(envoytest.Request{Path: path, Body: []byte(c.body), Mode: c.mode, Header: []string{"x-kv-cache-source-host-port", "evil:1"}})
			if x.Refusal != nil {
				t.Fatalf("refused: %+v", x.Refusal)
			}
			got := regexp.MustCompile(`"kv_request_id":"[0-9a-f]{32}"`).ReplaceAllString(string(x.Body), `"kv_request_id":"ID"`)
			if got != c.want {
				t.Errorf("body %s\nwant %s", got, c.want)
			}
			if got := x.Header["x-kv-cache-source-host-port"]; got != c.header {
				t.Errorf("header %q, want %q", got, c.header)
			}
			x.End()
			if h.server.Held() != 0 {
				t.Errorf("%d bytes stay reserved", h.server.Held())
			}
		})
	}
}

// pullFleet is three simulated engines with a router that knows them by their events.
type pullFleet struct {
	router  *router.Router
	engines []*enginesim.Engine
	servers []*httptest.Server
	link    *envoytest.Link
}

func newPullFleet(t *testing.T) *pullFleet {
	t.Helper()
	model, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	f := new(pullFleet)
	f.router, err = router.New(router.Config{
		Cards: []router.Card{{Name: "sim", Prompts: model}},
		Pull:  router.PullConfig{On: true, Delay: time.Millisecond, PerToken: time.Microsecond, ComputePerToken: time.Millisecond, MinTokens: 64, Limit: 2},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	for i := range 3 {
		worker := router.Worker{ID: uint64(i) + 1}
		e, err := enginesim.New(enginesim.Config{Name: fmt.Sprint(worker.ID), Speed: 1000, Pulls: true, Publish: func(ev indexer.Event) { f.router.ApplyEvent(worker, ev) }})
		if err != nil {
			t.Fatal(err)
		}
		s := httptest.NewServer(e)
		t.Cleanup(s.Close)
		at := netip.MustParseAddrPort(s.Listener.Addr().String())
		if err := f.router.SetWorker(router.WorkerInfo{ID: worker.ID, Models: []string{"sim"}, BlockSize: 16, Engine: "vllm", Address: at, KVSource: at}); err != nil {
			t.Fatal(err)
		}
		running.Go(func() { _ = e.Run(ctx) })
		f.engines, f.servers = append(f.engines, e), append(f.servers, s)
	}
	server, err := extproc.New(extproc.Config{KVPull: "body"}, f.router)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(server.ServerOptions()...)
	server.Register(g)
	f.link = envoytest.Serve(t, g)
	return f
}

// ask sends a request as Envoy does. It returns the worker, and the cached tokens of the response.
func (f *pullFleet) ask(t *testing.T, prompt string) (worker string, cached int, d router.Decision) {
	t.Helper()
	body := fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":2}`, prompt)
	x := f.link.Do(envoytest.Request{Path: "/v1/completions", Body: []byte(body)})
	if x.Refusal != nil {
		t.Fatalf("refused: %+v", x.Refusal)
	}
	if x.Body != nil {
		body = string(x.Body)
	}
	d = f.router.Decisions(1)[0]
	resp, err := http.Post("http://"+x.Header["x-dynamo-worker"]+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	var answer struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err != nil || json.Unmarshal(text, &answer) != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d: %s, %v", resp.StatusCode, text, err)
	}
	x.Respond(http.StatusOK)
	x.End()
	return resp.Header.Get("X-Sim-Worker"), answer.Usage.Details.Cached, d
}

// A worker that lacks a prefix copies it from the busy worker that holds it. If that one is gone, it computes.
func TestAPullBetweenSimulatedEngines(t *testing.T) {
	f := newPullFleet(t)
	defer http.DefaultClient.CloseIdleConnections()
	long := strings.Repeat("The old fisherman told it once more, with another end. ", 40)
	first, cached, d := f.ask(t, long)
	if cached != 0 || d.Source != nil {
		t.Fatalf("a new prompt: %d cached tokens, source %+v", cached, d.Source)
	}
	if next, _, d := f.ask(t, long+"And then?"); next != first || d.Source != nil {
		t.Fatalf("the holder is idle: worker %s after %s, source %+v", next, first, d.Source)
	}
	busy := func(id string, worker uint64) {
		tokens := make([]uint32, 500_000)
		if _, err := f.router.BestWorker(t.Context(), router.Request{ID: id, Model: "sim", Tokens: tokens, Pinned: &router.Worker{ID: worker}}); err != nil {
			t.Fatal(err)
		}
	}
	holder := d.Worker.ID
	busy("busy", holder)
	next, cached, d := f.ask(t, long+"And what did they say?")
	if next == first || d.Source == nil || d.Source.Worker.ID != holder || cached < d.Source.Tokens-16 {
		t.Fatalf("the holder is busy: worker %s after %s, %d cached tokens, source %+v", next, first, cached, d.Source)
	}
	if n := f.engines[holder-1].Pulled(); n*16 < d.Source.Tokens-16 {
		t.Errorf("%d blocks were copied", n)
	}
	kept := f.router.Decisions(1)[0]
	if kept.Source == nil || kept.Source.Outcome != router.PullInTime || !strings.Contains(kept.Sentence(), "as the source of") {
		t.Errorf("kept: %+v, %s", kept.Source, kept.Sentence())
	}

	// The source is gone: the worker computes, and the request is served.
	second := d.Worker.ID
	busy("busy too", second)
	f.servers[holder-1].Close()
	f.servers[second-1].Close()
	if third, cached, d := f.ask(t, long+"Who was it?"); d.Source == nil || third == first || third == next || cached != 0 {
		t.Errorf("without its source: worker %s, %d cached tokens, source %+v", third, cached, d.Source)
	}
}
