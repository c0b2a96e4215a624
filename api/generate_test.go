// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// splitModel adds a prefill worker and a decode worker. It returns the requests that they got, in order, as role and
// body. answer is the answer of the prefill worker.
func splitModel(t *testing.T, r *router.Router, answer string) <-chan string {
	t.Helper()
	got := make(chan string, 2)
	for i, role := range []router.Role{router.Prefill, router.Decode} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			body, _ := io.ReadAll(req.Body)
			got <- fmt.Sprintf("%s %s %s", role, req.Header.Get("X-Rank"), body)
			if role == router.Prefill {
				fmt.Fprint(w, answer)
				return
			}
			fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n")
		}))
		t.Cleanup(s.Close)
		if err := r.SetWorker(router.WorkerInfo{
			ID: uint64(i + 1), Role: role, Models: []string{"m"}, BlockSize: 4, Engine: "vllm", Address: netip.MustParseAddrPort(s.Listener.Addr().String()),
		}); err != nil {
			t.Fatal(err)
		}
	}
	return got
}

// A request of /v1/generate has a prefill leg where a request of Envoy has one.
func TestGenerateRunsThePrefillLeg(t *testing.T) {
	const params = `{"kv_transfer_params":{"remote_host":"h"}}`
	const leg = `prefill  {"return_token_ids":true,"model":"m","prompt":[1,2],"stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`
	whole := func(more string) string {
		return `decode 7 {"return_token_ids":true,"model":"m",` + more + `"stream":true}`
	}
	for name, c := range map[string]struct {
		more, answer string // of the question; of the prefill worker
		without      bool   // kvroute sends no prefill requests
		status       int
		got          []string
		noLeg        router.NoLeg
		text         string // in the answer, if the status is not 200
	}{
		"a leg":                  {answer: params, status: 200, got: []string{leg, `decode 7 {"return_token_ids":true,"model":"m","prompt":[1,2],"stream":true,"kv_transfer_params":{"remote_host":"h"}}`}},
		"a leg that fails":       {answer: `{}`, status: 200, got: []string{leg, whole(`"prompt":[1,2],`)}, noLeg: router.NoLegFailed},
		"aggregated":             {more: `,"routing_mode":"aggregated"`, status: 200, got: []string{whole(`"prompt":[1,2],`)}, noLeg: router.NoLegAsked},
		"two choices":            {more: `,"body":{"n":2}`, status: 200, got: []string{whole(`"n":2,"prompt":[1,2],`)}, noLeg: router.NoLegAsked},
		"prompt logprobs":        {more: `,"body":{"prompt_logprobs":1}`, status: 200, got: []string{whole(`"prompt":[1,2],"prompt_logprobs":1,`)}, noLeg: router.NoLegAsked},
		"both workers pinned":    {more: `,"worker_id":2,"prefill_worker_id":1,"routing_mode":"disaggregated"`, answer: params, status: 200, got: []string{leg, `decode 7 {"return_token_ids":true,"model":"m","prompt":[1,2],"stream":true,"kv_transfer_params":{"remote_host":"h"}}`}},
		"two choices, and a leg": {more: `,"body":{"n":2},"routing_mode":"disaggregated"`, status: 400, text: "routing_mode must not be disaggregated"},
		"no legs":                {without: true, status: 200, got: []string{whole(`"prompt":[1,2],`)}, noLeg: router.NoLegAsked},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRouter(t, 0)
			requests := splitModel(t, r, c.answer)
			conf := api.Config{Router: r, Metrics: http.NotFoundHandler(), WorkerHeaders: func(*router.Decision) []string { return []string{"x-rank", "7"} }}
			legs := prefill.Client{HTTP: http.DefaultClient, Router: r}
			if !c.without {
				conf.RunLeg = func(ctx context.Context, d *router.Decision, leg prefill.Leg) ([]byte, error) {
					if d.Prefill == nil {
						return nil, nil
					}
					decode, _ := legs.Do(ctx, d.Prefill, leg, time.Now().Add(time.Minute), func() {})
					if decode == nil {
						return nil, r.PrefillFailed(d.ID)
					}
					return decode, nil
				}
			}
			status, text, _ := post(t, api.New(conf), "/v1/generate", `{"model":"m","request_id":"g","token_ids":[1,2]`+c.more+`}`)
			if status != c.status || !strings.Contains(text, c.text) {
				t.Errorf("%d %s, want %d %s", status, text, c.status, c.text)
			}
			var got []string
			for len(requests) > 0 {
				got = append(got, <-requests)
			}
			if diff := cmp.Diff(c.got, got); diff != "" {
				t.Errorf("the workers got (-want +got):\n%s", diff)
			}
			if d, _ := r.Decision("g"); d.NoLeg != c.noLeg {
				t.Errorf("no leg because of %q, want %q", d.NoLeg, c.noLeg)
			}
			for _, w := range r.Workers() {
				if w.ActiveRequests != 0 || w.Failing {
					t.Errorf("left behind: %+v", w)
				}
			}
		})
	}
}

// If the leg fails and the decode worker computes no prompts, the answer is that no worker is available. The
// decode worker has not failed.
func TestGenerateWithoutAWorkerForTheWholeRequest(t *testing.T) {
	r := newRouter(t, 0)
	requests := splitModel(t, r, "")
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), RunLeg: func(context.Context, *router.Decision, prefill.Leg) ([]byte, error) {
		return nil, fmt.Errorf("the leg failed: %w", router.ErrNoWorkers)
	}})
	status, text, _ := post(t, h, "/v1/generate", `{"model":"m","request_id":"g","token_ids":[1,2]}`)
	if status != 503 || !strings.Contains(text, `"code":"no_worker"`) || len(requests) != 0 {
		t.Errorf("%d %s after %d requests", status, text, len(requests))
	}
	for _, w := range r.Workers() {
		if w.ActiveRequests != 0 || w.Failures != 0 {
			t.Errorf("left behind: %+v", w)
		}
	}
}

// A worker that refuses connections costs no request while another worker is idle.
func TestGenerateAsksTheSecondWorker(t *testing.T) {
	for _, one := range []bool{false, true} {
		r := newRouter(t, 0)
		engine(t, r, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "data: [DONE]\n\n") })
		if err := r.SetWorker(router.WorkerInfo{
			ID: 2, Models: []string{"m"}, BlockSize: 4, Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(fixtures.HoldPort(t))),
		}); err != nil {
			t.Fatal(err)
		}
		h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), OneChoice: one})
		statuses := map[int]int{}
		for i := range 40 {
			status, _, _ := post(t, h, "/v1/generate", fmt.Sprintf(`{"model":"m","request_id":"g%d","token_ids":[%d]}`, i, i))
			statuses[status]++
		}
		if one != (statuses[502] > 0) || statuses[200]+statuses[502] != 40 {
			t.Errorf("statuses with one choice %v: %v", one, statuses)
		}
	}
}

// The usage that a response names is compared with the decision, as that of a response to Envoy.
func TestGenerateReportsTheUsage(t *testing.T) {
	r := newRouter(t, 0)
	engine(t, r, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n")
	})
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
	post(t, h, "/v1/generate", `{"model":"m","request_id":"g","token_ids":[1,2,3,4,5],"body":{"stream_options":{"include_usage":true}}}`)
	want := &router.Usage{PromptTokens: 5, OutputTokens: 7, CachedTokens: 4, Cached: true}
	if d, _ := r.Decision("g"); !cmp.Equal(d.Usage, want) {
		t.Errorf("usage %+v, want %+v", d.Usage, want)
	}
	if w := r.Workers()[0]; w.Audit == nil || w.Audit.Responses != 1 {
		t.Errorf("the response is not compared: %+v", w.Audit)
	}
}
