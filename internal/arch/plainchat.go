// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// This program plays one plain chat as Envoy does in kvroute's own configuration, against a router
// with the default settings of kvroute serve. It writes the coverage of exactly this request into a
// folder. TestPath builds and runs it: a test binary cannot clear its counters.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/netip"
	"os"
	"runtime/coverage"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer"
)

// playing ends the program at the first fault.
type playing struct{}

func (playing) Helper()                           {}
func (playing) Errorf(format string, args ...any) { log.Fatalf(format, args...) }
func (playing) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }
func (playing) Cleanup(func())                    {} // the program ends at once
func (playing) Context() context.Context          { return context.Background() }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// The counters are cleared after the set-up and after another request, which fills the pools of memory.
func main() {
	dir := os.Args[1]
	cache := tokenizer.NewCache(1 << 20)
	r := newRouter(cache)
	envoy := serve(r, cache)

	before := envoy.Do(chat("What is a prefill?"))
	before.Respond(200, "content-type", "application/json")
	before.End()

	check(coverage.ClearCounters())
	x := envoy.Do(chat("What is a block?"))
	check(cmp.Or(coverage.WriteMetaDir(dir), coverage.WriteCountersDir(dir)))

	d, ok := r.Decision(x.Header["x-dynamo-request-id"])
	if got := x.Header["x-dynamo-worker"]; !ok || got != d.Address.String() {
		log.Fatalf("the header names %q, the decision %v", got, d.Address)
	}
	if d.TokenMode != tokenizer.Exact || d.OverlapBlocks < 3 || d.Worker.ID != 2 || len(d.Candidates) != 3 {
		log.Fatalf("the decision is %+v, want worker 2 of 3 for its cached blocks", d)
	}
}

const model = "demo"

// messages are the messages of a chat: a system prompt of several blocks, and a question.
func messages(question string) []byte {
	system := strings.Repeat("You answer questions about a cluster that serves large language models. ", 20)
	text, err := json.Marshal([]map[string]string{
		{"role": "system", "content": system},
		{"role": "user", "content": question},
	})
	check(err)
	return text
}

func chat(question string) envoytest.Request {
	body := fmt.Appendf(nil, `{"model":%q,"messages":%s,"stream":true,"max_tokens":100}`, model, messages(question))
	return envoytest.Request{
		Path: "/v1/chat/completions", Body: body,
		Header: []string{
			":authority", "llm", ":scheme", "http", "content-type", "application/json", "content-length", fmt.Sprint(len(body)),
			"user-agent", "openai", "accept", "*/*", "x-forwarded-for", "127.0.0.1", "x-forwarded-proto", "http",
			"x-envoy-internal", "true", "x-request-id", "5a5d0d64-8ab5-4d7a-a1a5-7ddcd6b1de9b",
		},
	}
}

// newRouter returns a router with three workers that publish events. Worker 2 has the blocks of the
// chat's system prompt.
func newRouter(cache *tokenizer.Cache) *router.Router {
	prompts, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{Cache: cache})
	check(err)
	scoring := scorer.Defaults()
	scoring.Attention, scoring.KVRead = 6e-5, scoring.Engine.KVRead() // as kvroute serve
	start := time.Now()
	r, err := router.New(router.Config{
		Now:     func() time.Time { return start }, // what happens a few times a second does not happen here
		Scoring: scoring, EstimateOutput: true, InferFirstTokens: true, AvoidFailing: 2 * time.Second,
		Hooks: router.Hooks{
			Finished: func(router.Outcome) {},
			Used:     func(router.Decision) {},
			Departs:  func(router.Worker, bool) {},
			Learned:  func(router.Worker, string) {},
		},
		Cards: []router.Card{{Name: enginesim.ModelCard, Prompts: prompts}},
	})
	check(err)
	const blockSize = 16
	for id := range uint64(3) {
		check(r.SetWorker(router.WorkerInfo{
			ID: id + 1, Name: fmt.Sprint("gpu-", id+1), Models: []string{model}, ModelCard: enginesim.ModelCard,
			Address:   netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(id + 1)}), 8000),
			BlockSize: blockSize, TotalKVBlocks: 10_000, MaxNumSeqs: 256, MaxBatchedTokens: 8192, Engine: "vllm",
			Events: router.EventSource{Transport: "nats"},
		}))
	}
	d, err := r.BestWorker(context.Background(), router.Request{
		Model: model, Prompt: router.Prompt{Messages: messages("What is a worker?")}, WantTokens: true,
	})
	check(err)
	var blocks []indexer.Block
	for i, local := range indexer.AppendLocalHashes(nil, d.Tokens, blockSize, indexer.Seed("", "")) {
		blocks = append(blocks, indexer.Block{Local: local, External: uint64(i + 1)})
	}
	r.ApplyEvent(router.Worker{ID: 2}, indexer.Event{Kind: indexer.Stored, Blocks: blocks})
	return r
}

// serve serves Envoy's streams for a router, and returns Envoy's side.
func serve(r *router.Router, cache *tokenizer.Cache) *envoytest.Link {
	s, err := extproc.New(extproc.Config{
		RouterID: 1, Bodies: openai.Reader{Known: cache}, Started: func() bool { return true },
		SessionHeaders: []string{"x-dynamo-session-id", "x-session-id", "session-id", "x-claude-code-session-id"},
	}, r)
	check(err)
	g := grpc.NewServer(s.ServerOptions()...)
	s.Register(g)
	return envoytest.Serve(playing{}, g)
}
