// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
)

func TestExplain(t *testing.T) {
	r := routerOf(t, situation{held: []int{2, 5, 8}, decode: []int{5, 0, 4}}, "--busy-threshold", "0.45")
	s := httptest.NewServer(api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()}))
	defer s.Close()
	for _, req := range []router.Request{
		{ID: "why", Model: "m", Tokens: letters("ABCDEFGHIJ")},
		{ID: "pin", Model: "m", Tokens: letters("AB"), Pinned: &router.Worker{ID: 2}},
	} {
		if _, err := r.BestWorker(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	r.MarkPrefillCompleted("why")
	r.Free("why")
	for args, want := range map[string][]string{
		"why":         {"prompt    ", "80 tokens (exact), 10 full blocks of 8", "kv, random number 0.", "cost tokens, alpha 0.1, attention 6e-05, host", `thresholds   {"active_decode_blocks_threshold":0.45}`, "reason", "kv: cost 17.676 by tokens", "8 of its blocks are cached, 16 tokens to compute", "hashes ", "first token  after", "end          after", "<- chosen", "not: busy", "40.144"},
		"last":        {"pin", "pinned: the request names it", "not: pin"},
		"last --json": {`"id": "pin"`},
		"--json why":  {`"policy": "tokens"`, `"candidates": [`, `"excluded": "busy"`},
	} {
		status, out, stderr := runs(t, append([]string{"explain", "--url", s.URL}, strings.Fields(args)...)...)
		for _, w := range want {
			if status != 0 || !strings.Contains(out, w) {
				t.Errorf("explain %s: status %d, %s; want %q in\n%s", args, status, stderr, w, out)
			}
		}
	}
	text := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) }))
	defer text.Close()
	for args, want := range map[string]string{
		"--url " + s.URL + " nobody":      "no decision is kept",
		"--url " + s.URL:                  "want the id",
		"last --url http://127.0.0.1:1":   `refused; --url is "http://127.0.0.1:1", want the http-address of a running kvroute`,
		"last --url localhost:9003":       `--url is "localhost:9003", want the http-address`,
		"--url " + text.URL + " x":        "read the answer of " + text.URL + "/v1/decisions?id=x",
		"--url " + s.URL + "/elsewhere x": `/elsewhere", want the http-address of a running kvroute`,
	} {
		if status, _, stderr := runs(t, append([]string{"explain"}, strings.Fields(args)...)...); status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("explain %s: %d, %q; want %q", args, status, stderr, want)
		}
	}
	empty := httptest.NewServer(api.New(api.Config{Router: routerOf(t, situation{}), Metrics: http.NotFoundHandler()}))
	defer empty.Close()
	if status, _, stderr := runs(t, "explain", "--url", empty.URL, "last"); status != 1 || !strings.Contains(stderr, "nothing was decided") {
		t.Errorf("%d %s", status, stderr)
	}
}
