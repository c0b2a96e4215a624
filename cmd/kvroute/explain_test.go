// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
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
		"why":         {"prompt    ", "80 tokens (exact), 10 full blocks of 8", "kv, random number 0.", "cost tokens, alpha 0.1, attention 6e-05, decode_weight 1, kv_read 0.00145", `thresholds   {"active_decode_blocks_threshold":0.45}`, "reason", "kv: Worker 3 has 8 of 10 blocks of the prompt: 16 tokens to compute against 40 on worker 2. ", "Worker 3 has the lowest cost: 21.64 against ", "1 worker is above a busy threshold.", "8 of its blocks are cached, 16 tokens to compute", "hashes ", "first token  after", "end          after", "  chosen\n", "  excluded: above a busy threshold\n", "  40.14\n"},
		"last":        {"pin", "pinned: The request names worker 2.", "  excluded: not the worker that the request names\n"},
		"last --json": {`"id": "pin"`},
		"--json why":  {`"policy": "tokens"`, `"candidates": [`, `"excluded": "busy"`, `"verdict_text": "chosen"`, `"reason_text": "Worker 3 has 8 of 10 blocks`},
	} {
		status, out, stderr := runs(t, append([]string{"explain", "--url", s.URL}, strings.Fields(args)...)...)
		for _, w := range want {
			if status != 0 || !strings.Contains(out, w) {
				t.Errorf("explain %s: status %d, %s; want %q in\n%s", args, status, stderr, w, out)
			}
		}
	}
	// A split decision has a table for each worker that was chosen.
	split := routerOf(t, situation{})
	for i, role := range []router.Role{router.Prefill, router.Prefill, router.Decode, router.Decode} {
		w := router.WorkerInfo{
			ID: uint64(i + 1), Name: string(role) + fmt.Sprint(i), Role: role, Models: []string{"m"}, BlockSize: 8,
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 80),
		}
		if err := split.SetWorker(w); err != nil {
			t.Fatal(err)
		}
	}
	for _, req := range []router.Request{
		{ID: "a", Model: "m", Tokens: letters("AB"), PrefillPinned: &router.Worker{ID: 1}, Pinned: &router.Worker{ID: 3}},
		{ID: "both", Model: "m", Tokens: letters("CDE")},
		{ID: "whole", Model: "m", Tokens: letters("F"), Split: router.SplitNever},
	} {
		if _, err := split.BestWorker(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	both := httptest.NewServer(api.New(api.Config{Router: split, Metrics: http.NotFoundHandler()}))
	defer both.Close()
	_, out, _ := runs(t, "explain", "--url", both.URL, "both")
	decode, leg, _ := strings.Cut(out, "\nprefill leg:\n")
	for text, want := range map[string][]string{
		decode: {"worker    decode3 at 10.0.0.4:80", "cost tokens", "prefill is not tracked", "0 tokens to compute", "prefill1"},
		leg:    {"worker    prefill1 at 10.0.0.2:80", "cost tokens", "24 tokens to compute", "decode3"},
	} {
		rows := strings.Split(text, "\n")
		chosen := slices.IndexFunc(rows, func(row string) bool { return strings.HasSuffix(row, "  chosen") })
		if chosen < 0 || strings.Count(text, "excluded: "+router.ExcludedRole.Text()) != 2 || !strings.Contains(rows[chosen], strings.Fields(want[0])[1]) {
			t.Errorf("split decision: want a table with %s in\n%s", want[0], out)
		}
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("split decision: want %q in\n%s", w, text)
			}
		}
	}
	if r := strings.Fields(leg); !slices.Contains(r, "16") { // prefill0 has the tokens of the request before
		t.Errorf("split decision: the pending tokens of prefill0 are missing in\n%s", leg)
	}
	if _, out, _ = runs(t, "explain", "--url", both.URL, "whole"); !strings.Contains(out, "prefill leg  none: asked") {
		t.Errorf("a request without a leg:\n%s", out)
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
		failed := 1
		if want == "want the id" {
			failed = 2 // a mistake in the command line
		}
		if status, _, stderr := runs(t, append([]string{"explain"}, strings.Fields(args)...)...); status != failed || !strings.Contains(stderr, want) {
			t.Errorf("explain %s: %d, %q; want %q", args, status, stderr, want)
		}
	}
	empty := httptest.NewServer(api.New(api.Config{Router: routerOf(t, situation{}), Metrics: http.NotFoundHandler()}))
	defer empty.Close()
	if status, out, stderr := runs(t, "explain", "--url", empty.URL, ""); status != 2 || out != "" || !strings.Contains(stderr, "want the id of a request") {
		t.Errorf("an empty id: status %d, %q, %q", status, out, stderr)
	}
	if status, _, stderr := runs(t, "explain", "--url", empty.URL, "last"); status != 1 || !strings.Contains(stderr, "nothing was decided") {
		t.Errorf("%d %s", status, stderr)
	}
}
