// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/openai"
)

func gatewayDump(t *testing.T, variant string) *configDump {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "examples", "envoy-gateway", "translated", variant+".json"))
	if err != nil {
		t.Fatal(err)
	}
	dump, err := parseDump(text)
	if err != nil {
		t.Fatal(err)
	}
	// The listener that only reports whether Envoy is ready has a port of Envoy Gateway's own.
	dump.Listeners = slices.DeleteFunc(dump.Listeners, func(l *listenerv3.Listener) bool { return strings.Contains(l.GetName(), "proxy-ready") })
	return dump
}

// gatewayBootstrap returns what makes a bootstrap of it, with the processes' addresses.
func gatewayBootstrap(t *testing.T, variant string) func(envoy.Config) ([]byte, error) {
	t.Helper()
	dump := gatewayDump(t, variant)
	return func(c envoy.Config) ([]byte, error) {
		return dump.bootstrap(map[string]string{"10.0.0.2:9002": c.ExtProc[0], "10.0.1.1:8000": c.Pool[0], "10.0.1.2:8000": c.Pool[1]})
	}
}

// Envoy Gateway does not report a policy that matches nothing, so the test looks for the effect of
// each policy in Envoy Gateway's output.
func TestGatewayPoliciesMatch(t *testing.T) {
	// Requests that kvroute decided go to these clusters, with this number of retries.
	for variant, decided := range map[string]map[string]uint32{
		"endpoint-override":    {"httproute/default/two-choices/rule/0": 1, "httproute/default/one-choice/rule/0": 0},
		"original-destination": {"kvroute-workers": 1},
	} {
		t.Run(variant, func(t *testing.T) {
			dump := gatewayDump(t, variant)
			if len(dump.Listeners) != 1 || dump.Listeners[0].GetPerConnectionBufferLimitBytes().GetValue() != 16<<20 {
				t.Fatalf("%d listeners, the body limit is not 16 MiB", len(dump.Listeners))
			}
			hcm := &hcmv3.HttpConnectionManager{}
			network := dump.Listeners[0].GetDefaultFilterChain().GetFilters()
			if err := network[len(network)-1].GetTypedConfig().UnmarshalTo(hcm); err != nil {
				t.Fatal(err)
			}
			if limit := network[0].String(); !strings.Contains(limit, "max_connections:{value:40000}") {
				t.Errorf("the limit of connections is %s", limit)
			}
			// Responses pass the filters in reverse order: the observer needs the request's id,
			// which the main filter receives from kvroute.
			filters := slices.DeleteFunc(slices.Clone(hcm.GetHttpFilters()), func(f *hcmv3.HttpFilter) bool { return !strings.Contains(f.GetName(), "ext_proc") })
			if len(filters) != 2 {
				t.Fatalf("%d filters ask kvroute, want the observer and the main one", len(filters))
			}
			observer, filter := filters[0].String(), filters[1]
			for _, want := range []string{"failure_mode_allow:true", "observability_mode:true", "response_header_mode:SEND", "response_body_mode:STREAMED"} {
				if !strings.Contains(observer, want) {
					t.Errorf("the observer has no %s: %s", want, observer)
				}
			}
			text := filter.String()
			for _, want := range []string{"failure_mode_allow:true", "allow_mode_override:true", "request_body_mode:BUFFERED", "upstream.address", "upstream.request_attempt_count", "base_interval:{nanos:5000000}"} {
				if !strings.Contains(strings.ReplaceAll(text, "  ", " "), want) {
					t.Errorf("the filter has no %s: %s", want, text)
				}
			}
			// Envoy tells kvroute of attempts that it repeated, under both names that the cluster may have.
			for _, name := range []string{filter.GetName()[len("envoy.filters.http.ext_proc/"):], "/default/kvroute/extproc/1"} {
				last := hcm.GetHttpFilters()[len(hcm.GetHttpFilters())-1].String()
				if got, want := strings.Contains(last, fmt.Sprintf("cluster_name:%q", name)), variant == "original-destination"; got != want {
					t.Errorf("attempts are logged to %s: %v, want %v: %s", name, got, want, last)
				}
			}
			// kvroute's requests for more time count only with a maximum.
			if got, want := strings.Contains(text, "max_message_timeout:{seconds:60}"), variant == "original-destination"; got != want {
				t.Errorf("the filter has a maximum of 60 s for a message: %v, want %v: %s", got, want, text)
			}
			if !hcm.GetUseRemoteAddress().GetValue() || !hcm.GetNormalizePath().GetValue() || !hcm.GetMergeSlashes() ||
				hcm.GetPathWithEscapedSlashesAction() != hcmv3.HttpConnectionManager_UNESCAPE_AND_FORWARD {
				t.Errorf("clients may forge their address or the spelling of a path: %v", hcm)
			}
			early := fmt.Sprint(hcm.GetEarlyHeaderMutationExtensions())
			if got := hcm.GetRequestTimeout().AsDuration(); got != 5*time.Minute {
				t.Errorf("a client may take %v to send a request (0 is for ever), want 5m", got)
			}
			routes := dump.Routes[hcm.GetRds().GetRouteConfigName()].GetVirtualHosts()[0].GetRoutes()
			unknown := routes[len(routes)-1]
			if unknown.GetDirectResponse().GetStatus() != http.StatusNotFound || len(unknown.GetTypedPerFilterConfig()) > 0 {
				t.Errorf("any other path gets %v", unknown)
			}
			routes = routes[:len(routes)-1]
			for _, r := range routes {
				if got, want := r.GetMatch().GetSafeRegex().GetRegex(), (envoy.Config{}).Paths(); got != want {
					t.Errorf("the route %s is for the paths %s, want %s", r.GetName(), got, want)
				}
			}
			asks := routes[len(routes)-1]
			if asks.GetTypedPerFilterConfig()[filter.GetName()] == nil {
				t.Errorf("the route %s does not ask kvroute", asks.GetName())
			}
			var removed []string
			for _, m := range regexp.MustCompile(`"(x-[a-z-]+)"`).FindAllStringSubmatch(asks.String(), -1) {
				removed = append(removed, m[1])
			}
			slices.Sort(removed)
			if want := slices.Sorted(slices.Values(openai.Hints)); !slices.Equal(removed, want) {
				t.Errorf("hints of clients that are removed: %v, want %v", removed, want)
			}
			for _, want := range openai.SteeringPatterns(nil) {
				if !strings.Contains(early, strconv.Quote(want)) {
					t.Errorf("the headers that are removed before routes are %s, want the expression %q", early, want)
				}
			}
			if len(routes) != len(decided)+1 {
				t.Errorf("%d routes, want %d for decided requests, and one more", len(routes), len(decided))
			}
			retried := func(r *routev3.Route) bool {
				again := r.GetRoute().GetRetryPolicy()
				return again.GetNumRetries().GetValue() > 0 && slices.Contains(again.GetRetriableStatusCodes(), 503)
			}
			for _, r := range routes[:len(routes)-1] {
				to := r.GetRoute()
				retries, known := decided[to.GetCluster()]
				if !known || to.GetRetryPolicy().GetNumRetries().GetValue() != retries || retries > 0 && !retried(r) || to.GetTimeout().AsDuration() != 0 {
					t.Errorf("requests that kvroute decided go to %v", to)
				}
				if on := r.GetMatch().GetHeaders(); len(on) != 1 || on[0].GetName() != "x-dynamo-worker" || len(r.GetRequestHeadersToRemove()) > 0 {
					t.Errorf("the route %s is for %v and removes %v", r.GetName(), on, r.GetRequestHeadersToRemove())
				}
			}
			if !retried(asks) || asks.GetRoute().GetTimeout().AsDuration() != 0 {
				t.Errorf("the route %s is tried again like this: %v", asks.GetName(), asks.GetRoute())
			}
			// Connections to lost machines end. Envoy Gateway itself cannot set TCP_USER_TIMEOUT.
			const limit = `TCP_USER_TIMEOUT, in milliseconds`
			patched := variant == "original-destination"
			if options := fmt.Sprint(dump.Listeners[0].GetSocketOptions()); len(dump.Listeners[0].GetSocketOptions()) < 4 || strings.Contains(options, limit) != patched {
				t.Errorf("the listener has the options %s", options)
			}
			named, settled := 0, 0
			for _, c := range dump.Clusters {
				connects := c.GetClusterType().GetName() != "envoy.clusters.composite"
				if k := c.GetUpstreamConnectionOptions().GetTcpKeepalive(); connects && k.GetKeepaliveTime().GetValue() != 10 {
					t.Errorf("the cluster %s has the probes %v", c.GetName(), k)
				}
				if ours := strings.HasPrefix(c.GetName(), "kvroute-worker-"); strings.Contains(fmt.Sprint(c.GetUpstreamBindConfig()), limit) != ours {
					t.Errorf("the cluster %s has the options %v", c.GetName(), c.GetUpstreamBindConfig())
				}
				// kvroute's cluster has a health check, and allows more than 1,024 open streams.
				if h := c.GetHealthChecks(); len(h) == 1 && h[0].GetGrpcHealthCheck() != nil && c.GetCircuitBreakers().GetThresholds()[0].GetMaxRequests().GetValue() == 40_000 &&
					c.GetCommonLbConfig().GetHealthyPanicThreshold() != nil && c.GetCommonLbConfig().GetHealthyPanicThreshold().GetValue() == 0 {
					settled++
				}
				if text := c.String(); strings.Contains(text, "x-dynamo-worker") {
					named++
				}
			}
			if settled != 1 { // the observer's cluster has no health check: no request waits for it
				t.Errorf("%d clusters are kvroute's with its health check and limits, want 1", settled)
			}
			if named != 2 {
				t.Errorf("%d clusters go where kvroute says, want 2", named)
			}
		})
	}
}

// Envoy Gateway's output for the manifests runs in a real Envoy.
func TestGateway(t *testing.T) {
	for variant, choice := range map[string]string{"endpoint-override": "list", "original-destination": "header"} {
		t.Run(variant, func(t *testing.T) {
			d := newStack(t, 2, []string{"--speed", "20", "--store-responses"})
			d.Bootstrap = gatewayBootstrap(t, variant)
			d.begin(t, "--mode-override", "--second-choice", choice, "--avoid-failing", "1m")

			content := strings.Repeat("a prefix to be found again ", 50)
			first, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, true), nil)
			settle(t, d)
			victim := startHTTP(t, func(http.ResponseWriter, *http.Request) { t.Error("the client's choice was reached") })
			again, _ := reply(t, d, "POST", chatPath, chatBody(content, 4, true), http.Header{"X-Dynamo-Worker": {victim}, "X-Dynamo-Worker-Fallback": {victim}})
			home := first.Header.Get("X-Sim-Worker")
			if again.Header.Get("X-Sim-Worker") != home || again.Header.Get("X-Dynamo-Overlap-Blocks") == "0" {
				t.Errorf("first at %s, then at %s with %s blocks", home, again.Header.Get("X-Sim-Worker"), again.Header.Get("X-Dynamo-Overlap-Blocks"))
			}
			eventually(t, "a body of 1 MB is not decided", func() bool { // a busy machine needs more than its time now and then
				large, _ := reply(t, d, "POST", chatPath, chatBody(strings.Repeat("word ", 200_000), 2, false), nil)
				return large.Header.Get("X-Dynamo-Reason") != ""
			})

			eventually(t, "no observer sees a first token", func() bool {
				stream, _ := reply(t, d, "POST", chatPath, chatBody("a short story", 40, true), nil)
				if id := stream.Header.Get("X-Dynamo-Request-Id"); id != "" {
					t.Errorf("the client gets to know the id %s", id)
				}
				_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
				return strings.Contains(text, `kvroute_router_first_tokens_total{model="sim",source="observer"}`) &&
					strings.Contains(text, `kvroute_extproc_stream_ends_total{end="first_token",kind="observer"}`)
			})
			for n := range 12 { // each by luck with one of two workers
				id, at := createResponse(t, d, "")
				if _, same := createResponse(t, d, fmt.Sprintf(`,"previous_response_id":%q`, id)); same != at {
					t.Errorf("conversation %d: the second turn is at %s, the first at %s", n, same, at)
				}
				if stored, text := reply(t, d, http.MethodGet, responsesPath+"/"+id, "", nil); stored.StatusCode != 200 {
					t.Errorf("conversation %d: %d %s", n, stored.StatusCode, text)
				}
			}
			idle(t, d)
			// The stream stays to the end of the response: the slot is held until then.
			resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("a long story", 400, true), nil)
			if err != nil {
				t.Fatal(err)
			}
			if n, _, _ := inFlight(t, d); n != 1 {
				t.Errorf("%d requests in flight while a response goes on, want 1", n)
			}
			_ = resp.Body.Close()
			idle(t, d)

			kill(t, d.named(t, home))
			second, body := reply(t, d, "POST", chatPath, chatBody(content, 4, true), nil)
			if second.StatusCode != 200 || second.Header.Get("X-Sim-Worker") == home {
				t.Errorf("the second choice: status %d from %q: %s", second.StatusCode, second.Header.Get("X-Sim-Worker"), body)
			}
			eventually(t, "the decision does not say who served", func() bool { return newest(t, d).Served.IsValid() })
			idle(t, d)
			worker := d.named(t, home)
			*worker = *restart(t, worker, t.TempDir())

			kill(t, d.Router)
			for range 4 {
				if open, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), http.Header{"X-Dynamo-Worker": {victim}}); open.StatusCode != 200 {
					t.Errorf("with kvroute dead: status %d: %s", open.StatusCode, body)
				}
			}
		})
	}
}

// A failing worker gets a request once, and a pinned request goes to no other worker.
func TestGatewayAsksNobodyTwice(t *testing.T) {
	for variant, choice := range map[string]string{"endpoint-override": "list", "original-destination": "header"} {
		t.Run(variant, func(t *testing.T) {
			d := newStack(t, 0, nil)
			d.Bootstrap = gatewayBootstrap(t, variant)
			var bad atomic.Bool
			var asked [2]atomic.Int64
			for i := range asked {
				d.EnvoyConfig.Pool = append(d.EnvoyConfig.Pool, startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
					if r.Method == http.MethodPost {
						asked[i].Add(1)
					}
					if i == 0 && bad.Load() {
						http.Error(w, "not now", http.StatusServiceUnavailable)
						return
					}
					w.Header().Set("Content-Type", "application/json")
					fmt.Fprint(w, `{"choices":[]}`)
				}))
			}
			d.begin(t, append(staticFlags(t, d, "failing", d.EnvoyConfig.Pool[0], "sound", d.EnvoyConfig.Pool[1]),
				"--mode-override", "--second-choice", choice, "--allow-direct", "--avoid-failing", "0", "--router-mode", "round-robin")...)
			bad.Store(true)
			var pin http.Header
			for _, w := range workers(t, d) {
				if w.Name == "failing" {
					pin = http.Header{"X-Dynamo-Worker-Instance-Id": {fmt.Sprint(w.ID)}}
				}
			}
			for i := range 16 {
				header, failing, sound := pin, int64(1), int64(0)
				if i >= 8 {
					header = nil
				}
				before := [...]int64{asked[0].Load(), asked[1].Load()}
				resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), header)
				one, status := newest(t, d), http.StatusServiceUnavailable
				if header == nil {
					status, sound = http.StatusOK, 1
					if one.WorkerName == "sound" {
						failing = 0
					}
				}
				if a, b := asked[0].Load()-before[0], asked[1].Load()-before[1]; resp.StatusCode != status || a != failing || b != sound {
					t.Errorf("request %d, meant for %s: status %d, asked %d and %d times, want %d, %d and %d: %.200s", i, one.WorkerName, resp.StatusCode, a, b, status, failing, sound, body)
				}
			}
			idle(t, d)
		})
	}
}

// If an endpoint override finds no endpoint, no worker gets the request: neither one that the
// request does not allow, nor one twice. The worker in the override is not counted as failing.
func TestGatewayAsksEndpointsOnly(t *testing.T) {
	d := newStack(t, 0, nil)
	d.Bootstrap = gatewayBootstrap(t, "endpoint-override")
	var asked atomic.Int64
	startWorker := func() string {
		return startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				asked.Add(1)
			}
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[]}`)
		})
	}
	d.EnvoyConfig.Pool = []string{startWorker(), startWorker()}
	absent := startWorker()
	d.begin(t, append(staticFlags(t, d, "one", d.EnvoyConfig.Pool[0], "two", d.EnvoyConfig.Pool[1], "absent", absent),
		"--mode-override", "--second-choice", "list", "--allow-direct", "--avoid-failing", "1m", "--router-mode", "round-robin")...)
	for range 8 {
		for _, w := range workers(t, d) {
			before, status, times := asked.Load(), http.StatusOK, int64(1)
			if w.Name == "absent" {
				status, times = http.StatusServiceUnavailable, 0
			}
			resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), http.Header{"X-Dynamo-Worker-Instance-Id": {fmt.Sprint(w.ID)}})
			if got := asked.Load() - before; resp.StatusCode != status || got != times {
				t.Errorf("pinned to %s: status %d, %d workers are asked, want %d and %d: %.200s", w.Name, resp.StatusCode, got, status, times, body)
			}
			// One of three workers is absent, so one of two choices is an endpoint.
			if resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil); resp.StatusCode != 200 {
				t.Errorf("unpinned: status %d: %.200s", resp.StatusCode, body)
			}
		}
	}
	idle(t, d)
	for _, w := range workers(t, d) {
		if w.Failing {
			t.Errorf("%s is blamed", w.Name)
		}
	}
}
