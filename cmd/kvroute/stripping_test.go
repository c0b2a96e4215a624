// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/envoy"
)

// control are the headers by which routers, gateways and trusted clients steer: what a
// worker gets of them must be ours. Some engines would connect to where they say.
var control = strings.Fields(`x-dynamo-worker x-dynamo-worker-fallback x-dynamo-worker-list x-dynamo-request-id x-dynamo-prefill-worker
	x-prefiller-host-port x-dynamo-overlap-blocks x-data-parallel-rank x-gateway-destination-endpoint x-gateway-destination-endpoint-subset
	x-gateway-destination-endpoint-served x-dynamo-worker-instance-id x-worker-instance-id x-dynamo-dp-rank x-dp-rank
	x-dynamo-prefill-instance-id x-prefill-instance-id x-dynamo-prefill-dp-rank x-prefill-dp-rank x-dynamo-router-group x-dynamo-routing-mode
	x-dynamo-request-priority x-dynamo-request-strict-priority x-dynamo-slo-ttft-ms x-dynamo-router-override x-dynamo-meta-policy-class
	x-gateway-inference-objective x-gateway-inference-fairness-id x-gateway-model-name-rewrite x-llm-d-inference-objective
	x-llm-d-inference-fairness-id x-llm-d-model-name-rewrite`)

// What a client says in headers that steer never reaches a worker, whether kvroute decides,
// passes, has no room, hangs or is dead.
func TestControlHeadersReachNoWorker(t *testing.T) {
	const forged = "192.0.2.1:1"
	d := newStack(t, 0, nil)
	var mu sync.Mutex
	var seen []string
	asked := 0
	worker := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		if r.Header.Get("X-Of-Others") == "stays" { // or it is no request of the test
			asked++
		}
		for name, values := range r.Header {
			if strings.Contains(strings.Join(values, ","), forged) {
				seen = append(seen, strings.ToLower(name))
			}
		}
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[]}`)
	})
	header := http.Header{"X-Of-Others": {"stays"}}
	for _, name := range control {
		header.Add(name, forged)
	}
	d.secure.MessageTimeout = time.Second
	d.secure.Pool = []string{worker}
	flags := staticFlags(t, d, "a", worker)
	d.begin(t, flags...)
	const decides, passes, either = "decides", "passes", "either"
	check := func(when, does string) {
		t.Helper()
		for _, c := range []struct{ method, path, body string }{
			{"POST", chatPath, chatBody("hello", 2, false)}, {"POST", "/v1/unknown", "{}"}, {"GET", "/v1/models", ""},
		} {
			resp, body := reply(t, d, c.method, c.path, c.body, header)
			decided := resp.Header.Get("X-Dynamo-Reason") != ""
			if resp.StatusCode != 200 || does != either && decided != (does == decides && c.path == chatPath) {
				t.Errorf("%s, %s: status %d, reason %q: %.200s", when, c.path, resp.StatusCode, resp.Header.Get("X-Dynamo-Reason"), body)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if len(seen) > 0 || asked != 3 {
			t.Errorf("%s: the worker got %d requests of 3, and the client's %v", when, asked, seen)
		}
		seen, asked = nil, 0
	}
	check("kvroute decides", decides)
	d.router.hold(t)
	check("kvroute hangs", passes)
	d.router.kill(t)
	check("kvroute is dead", passes)
	d.unrouted = true
	if err := d.startRouter(t.Context(), append(flags, "--decision-timeout", "1ns")...); err != nil {
		t.Fatal(err)
	}
	check("kvroute has no time", either)

	d.bodyMode = envoy.FullDuplex
	if err := d.envoy.Stop(); err != nil {
		t.Fatal(err)
	}
	d.envoy, d.unrouted = nil, false
	if err := d.startRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	check("kvroute decides in full duplex", decides)
}
