// SPDX-License-Identifier: Apache-2.0

package envoy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/telemetry"
)

// watched is an Envoy of which only the admin endpoint is there, and the counts of a kvroute.
type watched struct {
	*envoy.Watch

	stats            map[string]int
	dump             string // Envoy's configuration
	requests, routed uint64
	peers            int
	handler          atomic.Pointer[http.HandlerFunc] // instead of stats, if it is not nil
	clock            time.Time
	log              bytes.Buffer
	metrics          *telemetry.Metrics
}

func newWatched(t *testing.T) *watched {
	t.Helper()
	x := &watched{dump: "{}", stats: map[string]int{"cluster.workers.upstream_rq_total": 0}, clock: time.Unix(1000, 0)}
	admin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if handler := x.handler.Load(); handler != nil {
			(*handler)(w, r)
			return
		}
		if r.URL.Path == "/config_dump" {
			x.answerDump(w)
			return
		}
		if r.URL.Path != "/stats" || r.FormValue("filter") == "" {
			t.Errorf("%s was requested", r.URL)
		}
		for name, n := range x.stats {
			fmt.Fprintf(w, "%s: %d\n", name, n)
		}
	}))
	t.Cleanup(admin.Close)
	var err error
	if x.metrics, err = telemetry.NewMetrics(); err != nil {
		t.Fatal(err)
	}
	x.Watch, err = envoy.NewWatch(envoy.WatchConfig{
		URL: admin.URL + "/", ExtProc: "127.0.0.1:9002", Client: admin.Client(), Now: func() time.Time { return x.clock },
		Counts: func() (uint64, uint64) { return x.requests, x.routed }, Peers: func() int { return x.peers },
		Settings: fitting(), Log: slog.New(slog.NewTextHandler(&x.log, nil)), Meter: x.metrics.Meter("envoy"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// pass lets 10 s pass n times. Before each reading, step changes what was counted.
func (x *watched) pass(t *testing.T, n int, step func()) {
	t.Helper()
	for range n {
		x.clock = x.clock.Add(envoy.WatchEvery)
		step()
		x.Read(t.Context())
	}
}

func (x *watched) faults() (all []string) {
	for _, f := range x.State().Faults {
		all = append(all, f.What)
	}
	return all
}

const (
	filter  = "http.llm.ext_proc.kvroute."
	toPool  = "cluster.pool.upstream_rq_total"
	toFirst = "cluster.worker-first.upstream_rq_total"
)

func nothing() {}

// Each way in which Envoy does not use kvroute is a fault, and none of the ways in which it does.
func TestFaultsOfAnEnvoy(t *testing.T) {
	for name, c := range map[string]struct {
		step func(x *watched) // what happens in 10 s
		want string           // faults
		text string           // in the text of the first one
	}{
		"no traffic": {func(*watched) {}, "", ""},
		"routed":     {func(x *watched) { x.requests++; x.routed++; x.stats[filter+"streams_started"]++; x.stats[toFirst]++ }, "", ""},
		"models from the pool": {func(x *watched) {
			x.requests += 2
			x.routed++
			x.stats[filter+"streams_started"] += 2
			x.stats[toFirst]++
			x.stats[toPool]++
		}, "", ""},
		"a closed port": {func(x *watched) {
			x.stats[filter+"streams_failed"] += 2
			x.stats[filter+"failure_mode_allowed"] += 2
			x.stats[toPool] += 2
		}, "unused bypassed", "Envoy sent no request to kvroute for 60 s while the pool served 12: "},
		"no filter":                       {func(x *watched) { x.stats[toPool] += 3 }, "unused", "Envoy sent no request to kvroute for 60 s while the pool served 18: check that --extproc in Envoy's configuration names kvroute, which listens at 127.0.0.1:9002"},
		"another processor":               {func(x *watched) { x.stats[filter+"streams_started"]++; x.stats[toFirst]++ }, "unused", "while another processor got 6: "},
		"another replica":                 {func(x *watched) { x.peers = 1; x.stats[filter+"streams_started"]++; x.stats[toFirst]++ }, "", ""},
		"another replica that fails open": {func(x *watched) { x.peers = 1; x.stats[filter+"streams_started"]++; x.stats[toPool]++ }, "", ""},
		"too slow": {func(x *watched) {
			x.requests++
			x.stats[filter+"streams_started"]++
			x.stats[filter+"message_timeouts"]++
			x.stats[filter+"failure_mode_allowed"]++
			x.stats[toPool]++
		}, "bypassed", "6 message timeouts"},
		"a route without the header": {func(x *watched) {
			x.requests++
			x.routed++
			x.stats[filter+"streams_started"]++
			x.stats[toPool]++
		}, "ignored", "kvroute named a worker for 6 requests in 60 s, but Envoy sent all requests to the pool"},
		"the observer": {func(x *watched) { x.stats["http.llm.ext_proc.kvroute_observer.failure_mode_allowed"]++ }, "", ""},
		"no prefix":    {func(x *watched) { x.stats["http.http-8080.ext_proc.failure_mode_allowed"]++ }, "bypassed", ""},
		"other filters": {func(x *watched) {
			x.stats["http.llm.ext_proc.other.failure_mode_allowed"]++
			x.stats[filter+"streams_failed"] += 0
		}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := newWatched(t)
			x.stats[toPool], x.requests = 1000, 50 // from before
			x.pass(t, 1, nothing)
			x.pass(t, 7, func() { c.step(x) })
			s := x.State()
			if got := strings.Join(x.faults(), " "); got != c.want {
				t.Fatalf("faults %v, want %v", s.Faults, c.want)
			}
			if c.text != "" && !strings.Contains(s.Faults[0].Text, c.text) {
				t.Errorf("fault %q, want %q in it", s.Faults[0].Text, c.text)
			}
			if s.Seconds != 60 || !s.Read.Equal(x.clock) {
				t.Errorf("state %+v", s)
			}
			x.pass(t, 8, nothing) // the faults end with the traffic
			if got := x.faults(); got != nil {
				t.Errorf("faults %v without requests", got)
			}
			for what := range strings.FieldsSeq(c.want) {
				for _, line := range []string{"as it should\" fault=" + what, "no longer seen\" fault=" + what} {
					if n := strings.Count(x.log.String(), line); n != 1 {
						t.Errorf("%q is %d times in the log:\n%s", line, n, &x.log)
					}
				}
			}
		})
	}
}

// Requests are counted at the clusters to which the routes lead, whatever their names are.
func TestClustersOfOtherNames(t *testing.T) {
	foreign := func(edit func(host, cluster map[string]any)) any {
		all := withParts(t, envoy.Config{ExtProc: []string{"127.0.0.1:9002"}, PoolCluster: "vllm"})
		_, host := managerAndHost(all)
		edit(host, all["static_resources"].(map[string]any)["clusters"].([]any)[0].(map[string]any))
		return all
	}
	text, err := os.ReadFile("../examples/envoy-gateway/translated/original-destination.json")
	if err != nil {
		t.Fatal(err)
	}
	gateway := asEnvoyPrints(plain(t, text))
	as := foreign(func(_, _ map[string]any) {})
	for name, c := range map[string]struct {
		dump          any
		pool, workers string // clusters that are counted
		want          string
	}{
		"kvroute's routes first":        {as, "vllm", "", "ignored"},
		"the old route first":           {foreign(func(host, _ map[string]any) { oldRouteFirst(host) }), "vllm", "", "ignored"},
		"a name for statistics":         {foreign(func(_, cluster map[string]any) { cluster["alt_stat_name"] = "llm:8" }), "llm_8", "", "ignored"},
		"a cluster of other routes":     {as, "shop", "", ""},
		"Envoy Gateway":                 {gateway, "httproute/default/llm/rule/0/backend/0", "", "ignored"},
		"Envoy Gateway, and it decides": {gateway, "httproute/default/llm/rule/0/backend/0", "kvroute-worker-first", ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := newWatched(t)
			dump, err := json.Marshal(c.dump)
			if err != nil {
				t.Fatal(err)
			}
			x.dump = string(dump)
			count := func(n int) {
				x.stats["cluster."+c.pool+".upstream_rq_total"] += n
				if c.workers != "" {
					x.stats["cluster."+c.workers+".upstream_rq_total"] += n
				}
			}
			count(1000)
			x.pass(t, 1, nothing)
			x.pass(t, 8, func() { x.requests++; x.routed++; x.stats[filter+"streams_started"]++; count(1) })
			limits := func(what string) bool { return what == "settings" } // of bodies
			if got := strings.Join(slices.DeleteFunc(x.faults(), limits), " "); got != c.want {
				t.Errorf("faults %v, want %q", x.State().Faults, c.want)
			}
			if n := x.State().Counts["pool_requests"]; n != 0 && n != 6 {
				t.Errorf("%d requests of the pool in a minute", n)
			}
		})
	}
}

// A request that reaches kvroute in one minute and the pool in the next shows no fault, wherever the
// readings lie.
func TestALoneRequestIsNoFault(t *testing.T) {
	x := newWatched(t)
	x.pass(t, 20, nothing)
	x.pass(t, 1, func() { x.requests++; x.stats[filter+"streams_started"]++ })
	x.pass(t, 1, func() { x.stats[toPool]++ }) // it failed open a second later
	x.pass(t, 1, func() { x.stats[toFirst]++; x.stats[filter+"streams_started"]++ })
	x.pass(t, 1, func() { x.requests++; x.routed++ }) // Envoy was read before kvroute
	for range 20 {
		x.pass(t, 1, nothing)
		if got := x.faults(); got != nil {
			t.Fatalf("faults %v", got)
		}
	}
	if s := x.log.String(); s != "" {
		t.Errorf("log %s", s)
	}
}

// The counters go on after a restart of Envoy, and the minute is the last one.
func TestCountsOfAMinute(t *testing.T) {
	x := newWatched(t)
	x.stats[toPool] = 500
	x.pass(t, 1, nothing)
	if s := x.State(); s.Seconds != 0 || s.Counts["pool_requests"] != 0 {
		t.Errorf("after one reading: %+v", s)
	}
	x.pass(t, 3, func() { x.stats[toPool] += 10; x.requests += 2 })
	x.pass(t, 1, func() { x.stats[toPool] = 4 }) // since its restart
	if s := x.State(); s.Seconds != 40 || s.Counts["pool_requests"] != 34 || s.Counts["requests"] != 6 {
		t.Errorf("after 40 s: %+v", s)
	}
	x.pass(t, 7, func() { x.stats[toPool]++ })
	if s := x.State(); s.Seconds != 60 || s.Counts["pool_requests"] != 6 || s.Counts["requests"] != 0 {
		t.Errorf("after two minutes: %+v", s)
	}
	w := httptest.NewRecorder()
	x.metrics.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, want := range []string{`kvroute_envoy_counters_total{counter="pool_requests"} 41`, `kvroute_envoy_faults{fault="unused"} 1`, `kvroute_envoy_faults{fault="ignored"} 0`} {
		if !strings.Contains(w.Body.String(), want+"\n") {
			t.Errorf("no %s in the metrics", want)
		}
	}
	text, err := json.Marshal(newWatched(t).State())
	if err != nil || !strings.Contains(string(text), `"faults":[]`) || strings.Contains(string(text), `"read"`) {
		t.Errorf("state as JSON: %s, %v", text, err)
	}
}

// An admin endpoint that does not answer, or answers with nonsense, is a fault. It never holds up the
// reader for long.
func TestAnAdminEndpointThatFails(t *testing.T) {
	x := newWatched(t)
	x.stats[toPool] = 7
	x.pass(t, 1, nothing)
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		want    string
	}{
		"an error": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }, "status 403"},
		"too long": {func(w http.ResponseWriter, _ *http.Request) {
			for range 1 << 11 {
				if _, err := w.Write(bytes.Repeat([]byte("x"), 1<<10)); err != nil {
					return // the reader has left
				}
			}
		}, "more than 1048576 bytes"},
		"a hang":    {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "deadline exceeded"},
		"a cut-off": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF"},
		"another program": {func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "<html>\n: :\n"+toPool+": P0(nan)\n"+toPool+": -4\n")
		}, "it has no counters of an ext_proc filter"},
	} {
		x.handler.Store(&c.handler)
		x.pass(t, 1, nothing)
		faults := x.State().Faults
		if len(faults) != 1 || faults[0].What != "unanswered" || !strings.Contains(faults[0].Text, c.want) ||
			!strings.HasPrefix(faults[0].Text, "Envoy's admin endpoint does not answer at http://127.0.0.1:") || !strings.Contains(faults[0].Text, "; start Envoy, or compare ") {
			t.Errorf("%s: faults %+v, want %q", name, faults, c.want)
		}
	}
	x.handler.Store(nil)
	x.pass(t, 1, nothing)
	if got := x.faults(); got != nil {
		t.Errorf("faults %v after an answer", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	before := x.log.Len()
	if x.Read(ctx); x.log.Len() != before || slices.Contains(x.faults(), "unanswered") {
		t.Errorf("kvroute's end is a fault: %s", &x.log)
	}
}
