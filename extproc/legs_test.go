// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// The API sends a request to its worker with the same headers and the same leg as Envoy.
func TestRequestsOfTheAPI(t *testing.T) {
	asked := 0
	prefiller := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked++
		fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`)
	}))
	defer prefiller.Close()
	at := netip.MustParseAddrPort(prefiller.Listener.Addr().String())
	leg := &router.Decision{ID: "g/prefill", Engine: "vllm", Worker: router.Worker{ID: 9, DPRank: 1}, Address: at}
	for name, c := range map[string]struct {
		conf    extproc.Config
		d       router.Decision
		headers string
		decode  string
		outcome string // of the leg
	}{
		"one worker":          {d: router.Decision{Worker: router.Worker{ID: 1, DPRank: 2}}},
		"a rank":              {d: router.Decision{Worker: router.Worker{ID: 1, DPRank: 2}, NameRank: true}, headers: "x-data-parallel-rank 2"},
		"a group":             {d: router.Decision{Group: "east", Member: &router.Worker{ID: 3}}, headers: "x-dynamo-router-group east x-dynamo-worker-instance-id 3 x-dynamo-dp-rank 0"},
		"a frontend":          {d: router.Decision{Engine: "dynamo", Worker: router.Worker{ID: 1}, Prefill: leg}, headers: "x-dynamo-worker-instance-id 1 x-dynamo-dp-rank 0 x-dynamo-routing-mode disaggregated x-dynamo-prefill-worker AT x-prefiller-host-port AT"},
		"a leg":               {d: router.Decision{Engine: "vllm", Prefill: leg}, decode: `{"prompt":"a","kv_transfer_params":{"a":1}}`, outcome: "served"},
		"by the header":       {conf: extproc.Config{PrefillLeg: extproc.PrefillByHeader}, d: router.Decision{Engine: "vllm", Prefill: leg}, headers: "x-dynamo-prefill-worker AT x-prefiller-host-port AT"},
		"without memory":      {conf: extproc.Config{MaxHeldBytes: 1}, d: router.Decision{Engine: "vllm", Prefill: leg}, outcome: "memory"},
		"above Envoy's limit": {conf: extproc.Config{MaxBodyBytes: 1}, d: router.Decision{Engine: "vllm", Prefill: leg}, decode: `{"prompt":"a","kv_transfer_params":{"a":1}}`, outcome: "served"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newUnserved(t, c.conf)
			asked = 0
			if c.decode != "" {
				h.router.slots[leg.ID] = true // the leg frees it
			}
			headers := strings.ReplaceAll(strings.Join(h.server.WorkerHeaders(&c.d), " "), at.String(), "AT")
			decode, err := h.server.RunLeg(t.Context(), &c.d, prefill.Leg{Path: "/v1/completions", Header: http.Header{}, Body: []byte(`{"prompt":"a"}`)})
			if headers != c.headers || string(decode) != c.decode || err != nil || (asked == 1) != (c.decode != "") {
				t.Errorf("headers %q, body %s, %v, %d prefill requests", headers, decode, err, asked)
			}
			if c.outcome != "" && h.count(t, "kvroute.extproc.prefill.duration", c.outcome) != 1 {
				t.Errorf("the leg is not counted as %s", c.outcome)
			}
			if h.server.Held() != 0 {
				t.Errorf("%d bytes stay reserved", h.server.Held())
			}
		})
	}
}
