// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// fault is a test of one fault in the fleet of [TestFaultsOfSplitRequests]. Its workers serve the
// model that has the fault's name, and have names with this prefix.
type fault struct {
	name    string
	workers map[string]string // name and more fields of the record
	test    func(t *testing.T, p *splitFleet, model string)
}

// maxBody is the largest body of a client in that fleet.
const maxBody = 2 << 20

// patient are flags with long times: on a busy machine no request has a timeout, and no worker that is
// avoided is tried again.
var patient = []string{"--decision-timeout", "25s", "--prefill-timeout", "30s", "--avoid-failing", "10m", "--max-body-bytes", fmt.Sprint(maxBody)}

// One fleet has several models, each with its own workers and its own fault. After each fault the
// client has the response that docs/disaggregation.md promises, and nothing stays booked.
func TestFaultsOfSplitRequests(t *testing.T) {
	t.Parallel() // mostly waits
	p := newSplitFleet(t)
	faults := []fault{
		{"breaks", map[string]string{"p": "role: prefill", "d": "role: decode"}, breakingPrefillWorker},
		{"dead", map[string]string{"p": "role: prefill", "d": "role: decode"}, deadPrefillWorker},
		{"sglang", map[string]string{"p": "role: prefill, engine: sglang", "d": "role: decode, engine: sglang"}, deadBootstrapServer},
		{"large", map[string]string{"p": "role: prefill", "d": "role: decode"}, largeParameters},
		{"refused", map[string]string{"p": "role: prefill", "d0": "role: decode", "d1": "role: decode"}, refusingDecodeWorkers},
		{"alone", map[string]string{"b": "role: both"}, unsplit(router.NoLegMissing)},
		{"twins", map[string]string{"b0": "role: both", "b1": "role: both"}, twoRolesOnEachWorker},
		{"sizes", map[string]string{"p": "role: prefill", "d": "role: decode, block_size: 32"}, unsplit("")},
		{"engines", map[string]string{"p": "role: prefill, engine: sglang", "d": "role: decode"}, unsplit(router.NoLegMissing)},
		{"leaves", map[string]string{"p": "role: prefill", "d": "role: decode"}, lastPrefillWorkerLeaves},
		{"sim", map[string]string{"p": "role: prefill", "d": "role: decode"}, pausedRouter},
		{"many", map[string]string{"p": "role: prefill", "d": "role: decode"}, manyLegs},
	}
	for _, f := range faults {
		for name, fields := range f.workers {
			p.add(t, f.name+"-"+name, fmt.Sprintf("models: [%s], %s", f.name, fields))
		}
	}
	p.EnvoyConfig.MaxBodyBytes = maxBody
	p.EnvoyConfig.MessageTimeout, p.EnvoyConfig.MaxMessageTimeout = 30*time.Second, time.Minute // for busy machines
	p.EnvoyConfig.Pool = []string{p.address("sim-d")}                                           // for requests that Envoy routes without kvroute
	p.start(t, patient...)
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			f.test(t, p, f.name)
			atRest(t, p.demonstration)
		})
	}
}

// sendShort sends a short chat for a model.
func (p *splitFleet) sendShort(t *testing.T, ctx context.Context, model string) sight {
	t.Helper()
	return look(send(t, ctx, "POST", p.Envoy.URL()+chatPath, strings.Replace(chatBody("hello", 7, false), "sim", model, 1), nil))
}

// served sends a chat for a model, which must succeed. It returns whether the worker that generated the
// response received the parameters of a transfer.
func (p *splitFleet) served(t *testing.T, model string) (split bool) {
	t.Helper()
	if got := p.sendShort(t, t.Context(), model); got.status != 200 || !strings.Contains(got.body, "answer") {
		t.Fatalf("status %d, error %v: %s", got.status, got.err, got.body)
	}
	for _, bodies := range p.newRequests() {
		for _, body := range bodies {
			split = split || body["max_tokens"] == 7. && body["kv_transfer_params"] != nil
		}
	}
	return split
}

// metric returns the value of one of kvroute's metrics, "" if it is absent.
func (p *splitFleet) metric(t *testing.T, name string) string {
	t.Helper()
	_, text := get(t, "http://"+p.Router.At.HTTP+"/metrics")
	return level(text, name)
}

func outcomeMetric(outcome string) string {
	return fmt.Sprintf("kvroute_extproc_prefill_duration_seconds_count{outcome=%q}", outcome)
}

// unsplit tests that the requests of a model have no leg, for this reason.
func unsplit(why router.NoLeg) func(t *testing.T, p *splitFleet, model string) {
	return func(t *testing.T, p *splitFleet, model string) {
		for range 4 {
			if p.served(t, model) {
				t.Error("the request is split")
			}
			if d := newest(t, p.demonstration); d.Prefill != nil || d.NoLeg != why {
				t.Errorf("the kept decision has the leg %+v and says %q, want %q", d.Prefill, d.NoLeg, why)
			}
		}
	}
}

// breakingPrefillWorker tests a prefill worker that closes the connection of a leg. It is the only one, so the next
// request has no leg.
func breakingPrefillWorker(t *testing.T, p *splitFleet, model string) {
	p.computes("breaks-p", func(http.ResponseWriter, *http.Request) {
		panic(http.ErrAbortHandler) // closes this connection only: a probe that fails and then succeeds would end the back-off
	})
	for _, want := range []router.NoLeg{router.NoLegFailed, router.NoLegFailing} {
		if split, d := p.served(t, model), newest(t, p.demonstration); split || d.NoLeg != want {
			t.Errorf("split: %t, want %q: the decision is %+v", split, want, d)
		}
	}
}

// deadPrefillWorker tests a prefill worker that dies after a leg, and before one.
func deadPrefillWorker(t *testing.T, p *splitFleet, model string) {
	works := p.computes("dead-d", func(w http.ResponseWriter, r *http.Request) {
		p.dies("dead-p")
		if resp, err := http.Get("http://" + p.address("dead-p")); err == nil { // the blocks
			_ = resp.Body.Close()
			t.Error("a dead worker answers")
		}
		http.Error(w, `{"error":{"message":"the blocks cannot be fetched"}}`, http.StatusInternalServerError)
	})
	if got := p.sendShort(t, t.Context(), model); got.status != 500 || !strings.Contains(got.body, "the blocks cannot be fetched") {
		t.Errorf("after its leg: status %d, error %v: %s", got.status, got.err, got.body)
	}
	if d := newest(t, p.demonstration); d.NoLeg != "" || d.Prefill == nil {
		t.Errorf("after its leg: the decision is %+v", d)
	}
	p.newRequests()

	p.computes("dead-d", works)
	if p.served(t, model) || newest(t, p.demonstration).NoLeg != router.NoLegFailed {
		t.Errorf("before its leg: the decision is %+v", newest(t, p.demonstration))
	}
}

// deadBootstrapServer tests a prefill worker of SGLang that dies when it has its request: the decode
// worker has the other one already.
func deadBootstrapServer(t *testing.T, p *splitFleet, model string) {
	died := make(chan struct{})
	p.computes("sglang-p", func(http.ResponseWriter, *http.Request) {
		p.dies("sglang-p")
		close(died)
	})
	p.computes("sglang-d", func(w http.ResponseWriter, _ *http.Request) {
		<-died
		http.Error(w, `{"error":{"message":"the prefill worker is gone"}}`, http.StatusInternalServerError)
	})
	got := p.sendShort(t, t.Context(), model)
	if got.status != 500 || !strings.Contains(got.body, "the prefill worker is gone") {
		t.Errorf("status %d, error %v: %s", got.status, got.err, got.body)
	}
	if decode := p.newRequests()["sglang-d"]; len(decode) != 1 || decode[0]["bootstrap_room"] == nil {
		t.Errorf("the decode worker got %v", decode)
	}
	// The next request finds the prefill worker dead. The decode worker would refuse a whole request.
	if got := p.sendShort(t, t.Context(), model); got.status != 503 || !strings.Contains(got.body, `"no_worker"`) || len(p.newRequests()) > 0 {
		t.Errorf("without a prefill worker: status %d, error %v: %s", got.status, got.err, got.body)
	}
}

// largeParameters tests the largest answer of a prefill worker. The decode worker gets all of it, unless
// the request would be larger than Envoy takes: then it gets the client's.
func largeParameters(t *testing.T, p *splitFleet, model string) {
	const before, after = `{"kv_transfer_params":{"a":"`, `"}}`
	large := strings.Repeat("x", 1<<20-len(before)-len(after))
	p.computes("large-p", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, before, large, after) })
	chat := func(content string) string { return strings.Replace(chatBody(content, 7, false), "sim", model, 1) }
	for _, size := range []int{maxBody / 4, maxBody} {
		content := strings.Repeat("y", size-len(chat("")))
		resp, body := reply(t, p.demonstration, "POST", chatPath, chat(content), nil)
		if resp.StatusCode != 200 || !strings.Contains(body, "answer") {
			t.Fatalf("%d bytes: status %d: %s", size, resp.StatusCode, body)
		}
		decode := p.newRequests()["large-d"]
		if len(decode) != 1 {
			t.Fatalf("%d bytes: the decode worker got %d requests", size, len(decode))
		}
		params, split := decode[0]["kv_transfer_params"].(map[string]any)
		if split != (size < maxBody) || split && params["a"] != large {
			t.Errorf("%d bytes: the decode worker got %.100v", size, params)
		}
		if messages, ok := decode[0]["messages"].([]any); !ok || messages[0].(map[string]any)["content"] != content {
			t.Errorf("%d bytes: the decode worker got %.100v", size, decode[0]["messages"])
		}
	}
	if n := p.metric(t, outcomeMetric("too_large")); n != "1" {
		t.Errorf("%q legs have the outcome too_large, want 1", n)
	}
}

// refusingDecodeWorkers tests a decode worker that answers 503 and asks for a pause, then one that accepts no connection:
// the second choice gets the same parameters, and the first one is avoided.
func refusingDecodeWorkers(t *testing.T, p *splitFleet, model string) {
	tried, failovers := atomic.Int32{}, fmt.Sprintf("kvroute_router_failovers_total{model=%q}", model)
	refuse := func(w http.ResponseWriter, _ *http.Request) {
		tried.Add(1)
		w.Header().Set("Retry-After", "60")
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	works := p.computes("refused-d0", refuse)
	for range 8 {
		if !p.served(t, model) {
			t.Error("a request is not split")
		}
	}
	if n := tried.Load(); n != 1 {
		t.Errorf("%d requests reached the worker that refuses, want 1", n)
	}
	if n := p.metric(t, failovers); n != "1" {
		t.Errorf("%q failovers are counted, want 1", n)
	}
	p.computes("refused-d1", refuse) // the only worker that is not avoided: Envoy asks no other one
	if got := p.sendShort(t, t.Context(), model); got.status != http.StatusServiceUnavailable || got.body != "" {
		t.Errorf("the client sees %d %q, want the worker's own 503", got.status, got.body)
	}
	row := outcomeOf(t, "the other choices fail as well")
	atRest(t, p.demonstration)

	p.computes("refused-d0", works)
	p.dies("refused-d1")
	for range 4 {
		if !p.served(t, model) {
			t.Error("a request is not split")
		}
	}
	p.dies("refused-d0")
	row.check(t, p.sendShort(t, t.Context(), model))
}

// twoRolesOnEachWorker tests that each of two workers can take either part of a request, and never both.
func twoRolesOnEachWorker(t *testing.T, p *splitFleet, model string) {
	for range 8 {
		if !p.served(t, model) {
			t.Error("a request is not split")
		}
		if d := newest(t, p.demonstration); d.Prefill == nil || d.Prefill.Worker == d.Worker {
			t.Errorf("the decision is %+v", d)
		}
	}
}

// lastPrefillWorkerLeaves tests a fleet that loses its last prefill worker under load and gets it back.
func lastPrefillWorkerLeaves(t *testing.T, p *splitFleet, model string) {
	var bad atomic.Int32
	var all sync.WaitGroup
	ctx, end := context.WithCancel(t.Context())
	for range 4 {
		all.Go(func() {
			for ctx.Err() == nil {
				if got := p.sendShort(t, t.Context(), model); got.status != 200 {
					bad.Add(1)
				}
			}
		})
	}
	defer all.Wait()
	defer end()
	becomes := func(split bool) {
		t.Helper()
		p.newRequests() // requests of both kinds may have come until now
		eventually(t, fmt.Sprintf("requests are not split = %v", split), func() bool {
			for _, body := range p.newRequests()["leaves-d"] {
				if (body["kv_transfer_params"] != nil) == split {
					return true
				}
			}
			return false
		})
	}
	becomes(true)
	for range 2 {
		rewrite(t, p.Router, p.file, p.config("leaves-p"))
		becomes(false)
		rewrite(t, p.Router, p.file, p.config(""))
		becomes(true)
	}
	end()
	all.Wait()
	if n := bad.Load(); n > 0 {
		t.Errorf("%d requests failed", n)
	}
}

// pausedRouter tests a kvroute that stands still during two legs. Envoy continues with one request when
// the time is over that kvroute asked for, and the client of the other one leaves.
func pausedRouter(t *testing.T, p *splitFleet, model string) {
	// The legs must begin before this time is over.
	if err := p.StartRouter(t.Context(), slices.Concat(p.flags(t), patient, []string{"--prefill-timeout", "4s", "--avoid-failing", "100ms"})...); err != nil {
		t.Fatal(err)
	}
	p.newRequests()
	extended := func() int64 {
		n, err := p.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.override_message_timeout_received")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	already := extended()
	var under atomic.Int32
	hangs := func(_ http.ResponseWriter, r *http.Request) {
		under.Add(1)
		<-r.Context().Done()
		under.Add(-1)
	}
	works := p.computes("sim-p", hangs)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	stays, leaves := make(chan sight, 1), make(chan sight, 1)
	go func() { stays <- p.sendShort(t, t.Context(), model) }()
	go func() { leaves <- p.sendShort(t, ctx, model) }()
	eventually(t, "two legs do not begin", func() bool { return under.Load() == 2 })
	eventually(t, "Envoy has not extended both timeouts", func() bool { return extended() == already+2 })
	hold(t, p.Router)
	leave()
	if got := <-leaves; got.err == nil {
		t.Errorf("the client that left has status %d", got.status)
	}
	outcomeOf(t, "kvroute hangs").check(t, <-stays)
	if decode := p.newRequests()["sim-d"]; len(decode) != 1 || decode[0]["kv_transfer_params"] != nil {
		t.Errorf("the decode worker got %v", decode)
	}
	if n := under.Load(); n != 2 {
		t.Errorf("%d legs wait while kvroute stands still, want 2", n)
	}
	if err := p.Router.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "legs go on", func() bool { return under.Load() == 0 })
	atRest(t, p.demonstration)
	p.computes("sim-p", works)
	eventually(t, "requests are not split again", func() bool { return p.served(t, model) })
}

// manyLegs tests more waiting legs than --max-held-bytes has room for: the other requests are decided
// all the same, and their decode worker computes the prompt.
func manyLegs(t *testing.T, p *splitFleet, model string) {
	const requests, room = 500, 250
	body := strings.Replace(chatBody(strings.Repeat("a long prompt ", 1500), 7, false), "sim", model, 1)
	// A leg counts its body twice, and legs get half of the bytes.
	if err := p.StartRouter(t.Context(), slices.Concat(p.flags(t), patient, []string{"--max-held-bytes", fmt.Sprint(4 * room * len(body))})...); err != nil {
		t.Fatal(err)
	}
	p.newRequests()
	served := func() (n int) {
		_, _ = fmt.Sscan(p.metric(t, outcomeMetric("served")), &n) // 0 if it is absent
		return n
	}
	already := served() // the stack's own requests
	var under atomic.Int32
	release := make(chan struct{})
	works := p.computes("many-p", nil)
	p.computes("many-p", func(w http.ResponseWriter, r *http.Request) {
		under.Add(1)
		<-release
		works(w, r)
	})
	open := sync.OnceFunc(func() { close(release) })
	defer open()
	answers := make(chan sight, requests)
	for range requests {
		go func() { answers <- look(send(t, t.Context(), "POST", p.Envoy.URL()+chatPath, body, nil)) }()
	}
	check := func(n int) {
		t.Helper()
		for range n {
			if got := <-answers; got.status != 200 || got.header.Get("X-Dynamo-Reason") == "" {
				t.Fatalf("status %d, reason %q, error %v: %s", got.status, got.header.Get("X-Dynamo-Reason"), got.err, got.body)
			}
		}
	}
	check(requests - room) // these do not wait
	eventually(t, "not all legs begin", func() bool { return under.Load() == room })
	if got := p.metric(t, outcomeMetric("memory")); got != fmt.Sprint(requests-room) {
		t.Errorf("%s legs have the outcome memory, want %d", got, requests-room)
	}
	open()
	check(room)
	if n := served() - already; under.Load() != room || n != room {
		t.Errorf("%d legs began and %d have the outcome served, want %d", under.Load(), n, room)
	}
}

// Two replicas lose NATS while legs are under way at both. The clients notice nothing, nothing stays
// booked, and the replicas agree when NATS is back.
func TestReplicasLoseNATSDuringLegs(t *testing.T) {
	t.Parallel() // mostly waits
	p := newSplitFleet(t)
	p.add(t, "p", "role: prefill")
	p.add(t, "d", "role: decode")
	at := heldAddress(t)
	bus, err := startNATS(at, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bus.Stop() })
	at = strings.TrimPrefix(bus.URL(), "nats://") // with the password, which stays when the bus restarts
	p.Bus, p.SharedBus = bus, true
	t.Cleanup(p.Stop)
	if err := p.StartReplicas(t.Context(), 2, append(p.flags(t), "--prefill-timeout", "30s")...); err != nil {
		t.Fatal(err)
	}
	p.newRequests()

	var under atomic.Int32
	release := make(chan struct{})
	works := p.computes("p", nil)
	p.computes("p", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		under.Add(1)
		<-release
		works(w, r)
	})
	open := sync.OnceFunc(func() { close(release) })
	defer open()
	const requests = 40
	answers := make(chan sight, requests)
	for range requests {
		go func() { answers <- p.sendShort(t, t.Context(), "sim") }()
	}
	eventually(t, "not all legs begin", func() bool { return under.Load() == requests })
	booked := func(c *demo.Child) (requests, pending int) {
		var list struct{ Workers []router.WorkerState }
		if err := process.GetJSON(t.Context(), "http://"+c.At.HTTP+"/v1/workers", &list); err != nil {
			t.Fatal(err)
		}
		for _, w := range list.Workers {
			requests, pending = requests+w.ActiveRequests, pending+w.PendTokens
		}
		return requests, pending
	}
	for _, c := range p.Others {
		eventually(t, c.Name+" does not count the legs of both replicas", func() bool { n, _ := booked(c); return n == 2*requests })
	}
	for _, c := range p.Others {
		if _, text := get(t, "http://"+c.At.HTTP+"/metrics"); strings.Trim(level(text, `kvroute_extproc_streams{kind="main"}`), "0") == "" {
			t.Errorf("%s has no request", c.Name)
		}
	}
	bus.Server.Shutdown()
	bus.Server.WaitForShutdown()
	open()
	for range requests {
		if got := <-answers; got.status != 200 || !strings.Contains(got.body, "answer") {
			t.Errorf("status %d, error %v: %s", got.status, got.err, got.body)
		}
	}
	for range 4 {
		if !p.served(t, "sim") {
			t.Error("a request is not split without NATS")
		}
	}
	if bus, err = startNATS(at, ""); err != nil {
		t.Fatal(err)
	}
	for _, c := range p.Others {
		eventually(t, c.Name+" keeps slots", func() bool { n, pending := booked(c); return n+pending == 0 })
	}
	eventually(t, "the replicas do not agree", func() bool {
		status, out := examine(t, apis(p.Others...)...)
		return status == 0 && strings.Contains(out, "equal: 2 replicas, 2 workers, ") && strings.Contains(out, ", 0 requests in flight")
	})
}
