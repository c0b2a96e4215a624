// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// flagTest is a router made with some flags.
type flagTest struct {
	*testing.T
	router *router.Router
	conf   config
	pass   func(time.Duration)
}

// decide returns the worker that the prompt goes to, or the reason why it goes to none.
func (f *flagTest) decide(req router.Request) string {
	req.Model, req.Tokens = "m", letters("ABCDEFGHIJ")
	d, err := f.router.BestWorker(f.Context(), req)
	if err != nil {
		return reasonOf(err)
	}
	return fmt.Sprint("worker ", d.Worker.ID)
}

func reasonOf(err error) string {
	for _, e := range []error{router.ErrQueueFull, router.ErrAllBusy, router.ErrNoWorkers, context.Canceled} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	return err.Error()
}

// wait books a request that has to wait, and returns once the request waits. The result is where the
// request went.
func (f *flagTest) wait(id string) (result chan string) {
	result = make(chan string, 1)
	waits := make(chan struct{})
	go func() { result <- f.decide(router.Request{ID: id, Waiting: func(bool) { close(waits) }}) }()
	select {
	case <-waits:
	case got := <-result:
		result <- got
	}
	return result
}

// envoy sends the prompt through Envoy's stream and returns the result.
func (f *flagTest) envoy(header ...string) *envoytest.Exchange {
	s, err := extproc.New(f.conf.extproc(), f.router)
	if err != nil {
		f.Fatal(err)
	}
	g := grpc.NewServer(s.ServerOptions()...)
	s.Register(g)
	var body strings.Builder
	body.WriteString(`{"model":"m","prompt":[`)
	for i, token := range letters("ABCDEFGHIJ") {
		if i > 0 {
			body.WriteString(",")
		}
		fmt.Fprint(&body, token)
	}
	x := envoytest.Serve(f.T, g).Do(envoytest.Request{Path: "/v1/completions", Header: header, Body: []byte(body.String() + "]}")})
	f.Cleanup(x.End)
	return x
}

// split gives the first of these workers the role prefill and the others the role decode.
func (f *flagTest) split(ids ...uint64) {
	for i, id := range ids {
		info := router.WorkerInfo{
			ID: id, Models: []string{"m"}, BlockSize: 8, TotalKVBlocks: 100, MaxBatchedTokens: 16, Engine: "vllm", Role: router.Decode,
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(id)}), 80),
		}
		if i == 0 {
			info.Role = router.Prefill
		}
		if err := f.router.SetWorker(info); err != nil {
			f.Fatal(err)
		}
	}
}

// leg says whether the prompt has a prefill leg, or why it has none.
func (f *flagTest) leg() string {
	f.split(1, 2)
	d, err := f.router.BestWorker(f.Context(), router.Request{Model: "m", Tokens: letters("ABCDEFGHIJ")})
	if err != nil {
		f.Fatal(err)
	}
	if d.Prefill != nil {
		return "a leg"
	}
	return string(d.NoLeg)
}

// pull lets worker 2 hold some blocks of the prompt in host memory, and sends the prompt to workers. It returns what
// names the source in the last request: the port in the body, or the header.
func (f *flagTest) pull(blocks int, workers ...string) string {
	for id := byte(1); id <= 3; id++ {
		at := netip.AddrFrom4([4]byte{10, 0, 0, id})
		if err := f.router.SetWorker(router.WorkerInfo{
			ID: uint64(id), Models: []string{"m"}, BlockSize: 8, Engine: "vllm", Address: netip.AddrPortFrom(at, 80), KVSource: netip.AddrPortFrom(at, 5710),
		}); err != nil {
			f.Fatal(err)
		}
	}
	ev := indexer.Event{Kind: indexer.Stored, Tier: indexer.HostPinned}
	for i, local := range indexer.AppendLocalHashes(nil, letters("ABCDEFGHIJ"), 8, indexer.Seed("", ""))[:blocks] {
		ev.Blocks = append(ev.Blocks, indexer.Block{Local: local, External: uint64(i) + 1})
	}
	f.router.ApplyEvent(router.Worker{ID: 2}, ev)
	var x *envoytest.Exchange
	for _, id := range workers {
		x = f.envoy("x-dynamo-worker-instance-id", id)
	}
	source := openai.Find(x.Body, "kv_transfer_params", "remote_kv_source", "remote_port")
	return string(source) + x.Header["x-kv-cache-source-host-port"]
}

func sentTo(x *envoytest.Exchange) string {
	if x.Refusal != nil {
		return fmt.Sprint("status ", x.Refusal.Status)
	}
	return x.Header["x-dynamo-worker"]
}

// flagCase is a flag with another effect than on the worker of one request.
type flagCase struct {
	flag          string
	in            situation
	without, with string
	outcome       func(f *flagTest) string
	from, to      string
}

func moreFlags() []flagCase {
	warm := situation{held: []int{2, 5, 8}, decode: []int{5, 0, 4}}
	full := situation{held: []int{0}, pending: []int{1}}
	// The second worker's blocks stay constant; the first one produces tokens.
	decodes := func(second int) situation {
		return situation{held: []int{0, 0}, decode: []int{1, 0}, pending: []int{0, second}}
	}
	afterASecond := func(f *flagTest) string {
		f.pass(time.Second)
		return f.decide(router.Request{})
	}
	const pulls = "--allow-direct --kv-pull body --kv-pull-min-tokens 8 --kv-pull-delay 1us"
	const load, queue = "--kv-overlap-score-weight 0", "--router-queue-threshold 0"
	waits := func(f *flagTest) string {
		waiter := f.wait("a")
		select {
		case got := <-waiter:
			return got
		default:
		}
		f.router.Free("pending0")
		<-waiter
		return "waits"
	}
	return []flagCase{
		{"no-router-track-output-blocks", decodes(8), load, load + " --no-router-track-output-blocks", afterASecond, "worker 2", "worker 1"},
		{"output-rate", decodes(8), load, load + " --output-rate 8", afterASecond, "worker 2", "worker 1"},
		// 90 tokens in a second with the default, 172 with the preset.
		{"engine-preset", decodes(16), load, load + " --engine-preset 8b", afterASecond, "worker 1", "worker 2"},

		{"router-queue-threshold", full, "", queue, waits, "worker 1", "waits"},
		{"router-queue-policy", full, queue, queue + " --router-queue-policy lcfs", func(f *flagTest) string {
			first := f.wait("first")
			f.pass(time.Second)
			second := f.wait("second")
			f.router.Free("pending0")
			select {
			case <-first:
				f.router.Free("first")
				<-second
				return "the first one"
			case <-second:
				f.router.Free("second")
				<-first
				return "the second one"
			}
		}, "the first one", "the second one"},
		{"router-queue-limit", full, queue, queue + " --router-queue-limit 1", func(f *flagTest) string {
			first := f.wait("first")
			second := f.wait("second")
			f.router.Free("pending0")
			<-first
			f.router.Free("first")
			return <-second
		}, "worker 1", router.ErrQueueFull.Error()},
		{"queue-wait", full, queue + " --queue-wait 20ms", queue + " --queue-wait 40ms", func(f *flagTest) string {
			done := make(chan struct{})
			defer close(done)
			go func() { // the router's clock is faster than the timer that ends a wait
				for {
					select {
					case <-done:
						return
					case <-time.After(time.Millisecond):
						f.pass(20 * time.Millisecond)
					}
				}
			}()
			x := f.envoy()
			return fmt.Sprint(sentTo(x), " after ", x.Patience)
		}, "status 429 after 520ms", "status 429 after 540ms"},
		{"prefill-leg", full, "", "--prefill-leg header", func(f *flagTest) string {
			f.split(1, 2)
			x := f.envoy()
			return fmt.Sprint(x.Header["x-dynamo-prefill-worker"], x.Header["x-prefiller-host-port"])
		}, "", "10.0.0.1:8010.0.0.1:80"},
		{"prefill-timeout", full, "--prefill-timeout 10ms", "--prefill-timeout 20ms", func(f *flagTest) string {
			f.split(1, 2)
			return fmt.Sprint(f.envoy().Patience)
		}, "510ms", "520ms"},
		{"conditional-disaggregation", situation{held: []int{0, 8}}, "", "--conditional-disaggregation isl_bounding", (*flagTest).leg, "a leg", "short"},
		{"disaggregation-tokens", situation{held: []int{0, 8}}, "--conditional-disaggregation isl_bounding", "--conditional-disaggregation isl_bounding --disaggregation-tokens 16", (*flagTest).leg, "short", "a leg"},
		{"disaggregation-fraction", situation{held: []int{0, 8}}, "--conditional-disaggregation isl_bounding", "--conditional-disaggregation isl_bounding --disaggregation-fraction 0.2", (*flagTest).leg, "short", "a leg"},
		{"decode-overlap-score-credit", situation{held: []int{0, 8, 0}, decode: []int{0, 2, 0}}, "", "--decode-overlap-score-credit 1", func(f *flagTest) string {
			f.split(1, 2, 3)
			return f.decide(router.Request{})
		}, "worker 3", "worker 2"},
		{"kv-pull", situation{held: []int{0, 0}}, pulls, pulls + " --kv-pull header", func(f *flagTest) string { return f.pull(10, "1") }, "5710", "10.0.0.2:80"},
		{"kv-pull-delay", situation{held: []int{0, 0}}, pulls, pulls + " --kv-pull-delay 2ms", func(f *flagTest) string { return f.pull(10, "1") }, "5710", ""},
		{"kv-pull-token-time", situation{held: []int{0, 0}}, pulls, pulls + " --kv-pull-token-time 40us", func(f *flagTest) string { return f.pull(10, "1") }, "5710", ""},
		{"kv-pull-compute-time", situation{held: []int{0, 0}}, pulls, pulls + " --kv-pull-compute-time 10us", func(f *flagTest) string { return f.pull(10, "1") }, "5710", ""},
		{"kv-pull-min-tokens", situation{held: []int{0, 0}}, pulls, pulls + " --kv-pull-min-tokens 17", func(f *flagTest) string { return f.pull(2, "1") }, "5710", ""},
		{"kv-pull-limit", situation{held: []int{0, 0}}, pulls, pulls + " --kv-pull-limit 1", func(f *flagTest) string { return f.pull(10, "1", "3") }, "5710", ""},
		{"overload-status", situation{held: []int{0}}, "--active-prefill-tokens-threshold 0", "--active-prefill-tokens-threshold 0 --overload-status 529", func(f *flagTest) string {
			if _, err := f.router.BestWorker(f.Context(), router.Request{ID: "long", Model: "m", Blocks: &router.Blocks{Tokens: 100_000}}); err != nil {
				f.Fatal(err)
			}
			x := f.envoy()
			return fmt.Sprint(sentTo(x), ", again in ", x.Refusal.Header["retry-after"], " s")
		}, "status 429, again in 1 s", "status 529, again in 1 s"},

		{"session-affinity-ttl-secs", warm, "", "--session-affinity-ttl-secs 9", func(f *flagTest) string { return f.session("x-session-id") }, "10.0.0.3:80", "10.0.0.1:80"},
		{"session-headers", warm, "--session-affinity-ttl-secs 9", "--session-affinity-ttl-secs 9 --session-headers x-talk", func(f *flagTest) string {
			return f.session("x-talk")
		}, "10.0.0.3:80", "10.0.0.1:80"},
		{"session-affinity-mode", warm, "--session-affinity-ttl-secs 9", "--session-affinity-ttl-secs 9 --session-affinity-mode hard", func(f *flagTest) string {
			f.bind("s")
			w := router.WorkerInfo{ID: 1, Models: []string{"m"}, BlockSize: 8, Address: f.router.Workers()[0].Address, Draining: true}
			if err := f.router.SetWorker(w); err != nil {
				f.Fatal(err)
			}
			return f.decide(router.Request{Session: "s"})
		}, "worker 3", router.ErrNoWorkers.Error()},

		{"trust-overrides", warm, "", "--trust-overrides", func(f *flagTest) string {
			return sentTo(f.envoy("x-dynamo-router-override", `{"overlap_score_weight":1}`))
		}, "10.0.0.3:80", "10.0.0.2:80"},
		{"allow-direct", warm, "", "--allow-direct", func(f *flagTest) string {
			return sentTo(f.envoy("x-dynamo-worker-instance-id", "1"))
		}, "10.0.0.3:80", "10.0.0.1:80"},
	}
}

// bind binds a session to the first worker, which would otherwise not be chosen.
func (f *flagTest) bind(session string) {
	if _, err := f.router.BestWorker(f.Context(), router.Request{
		ID: "bound", Model: "m", Tokens: letters("Z"), Session: session, Pinned: &router.Worker{ID: 1},
	}); err != nil {
		f.Fatal(err)
	}
	f.router.MarkPrefillCompleted("bound")
	f.router.Free("bound")
}

// session returns where a request goes whose session is bound to the first worker.
func (f *flagTest) session(header string) string {
	f.bind("s")
	return sentTo(f.envoy(header, "s"))
}
