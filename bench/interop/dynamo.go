// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/process"
)

// dynamoChecks compare kvroute with Dynamo's mock workers: what it reads of their
// discovery, their events and their local indexers, and where it sends requests behind
// their frontend.
func dynamoChecks() []check {
	return []check{
		{"the stand-alone indexer", 5 * time.Minute, dynamoIndexer},
		{"events over ZMQ", 8 * time.Minute, func(ctx context.Context, e *env, r *result) { dynamoEvents(ctx, e, r, "zmq") }},
		{"events over NATS", 8 * time.Minute, func(ctx context.Context, e *env, r *result) { dynamoEvents(ctx, e, r, "nats") }},
		{"events lost, asked for", 6 * time.Minute, dynamoLoss},
		{"workers that stop, die and come", 8 * time.Minute, dynamoWorkers},
		{"the example", 5 * time.Minute, func(ctx context.Context, e *env, r *result) {
			e.runExample(ctx, r, "dynamo", "DYNAMO", filepath.Join(e.dynamo, "bin/python"), dynamoBlock)
		}},
	}
}

// dynamoIndexer has Dynamo's stand-alone indexer and a kvroute subscribe to the same
// sockets, the mock engines' own: their indexes must be equal. The requests go through
// another kvroute, which subscribes to the event plane.
func dynamoIndexer(ctx context.Context, e *env, r *result) {
	r.what = "kvroute's index with that of the stand-alone indexer, which hears the same sockets of engines"
	sockets, port := bench.Must(process.FreePorts(4)), bench.Must(process.FreePorts(1))
	w := e.openDynamo(ctx, "dynamo-sockets", "zmq", "--zmq-kv-events-ports", fmt.Sprintf("%d,%d", sockets, sockets+2))
	var ranks []string
	var workers strings.Builder
	workers.WriteString("version: 1\nworkers:\n")
	for i := range 2 {
		at := sockets + 2*i
		ranks = append(ranks, fmt.Sprintf("%d:0=tcp://127.0.0.1:%d,%d:1=tcp://127.0.0.1:%d", i+1, at, i+1, at+1))
		fmt.Fprintf(&workers, "- {worker_id: %d, name: engine-%d, address: %q, models: [%s], model_card: kvroute-sim, block_size: %d, dp_size: 2, events: {transport: zmq, endpoint: \"tcp://127.0.0.1:%d\"}}\n",
			i+1, i+1, w.dynamo.address, modelName, dynamoBlock, at)
	}
	theirs := e.start("dynamo-indexer", w.dynamo.environment, w.dynamo.python(), "-m", "dynamo.indexer", "--port", fmt.Sprint(port), "--block-size", fmt.Sprint(dynamoBlock),
		"--model-name", modelName, "--workers", strings.Join(ranks, ","))
	e.atEnd(theirs.Stop)
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	await(ctx, theirs, dynamoStart, "it subscribes to 4 ranks", func(ctx context.Context) string {
		active := strings.Count(string(bench.Must(process.Get(ctx, url+"/workers"))), `"status":"active"`)
		return missingUnless(active == 2+4, "%d active", active) // the workers and their ranks
	})
	ours := e.startStack(ctx, "dynamo-beside", workers.String(), []string{w.dynamo.address})
	ours.waitWorkers(ctx, 4)
	seen, next := 0, conversations(3)
	for round := range 10 {
		w.talk(ctx, r, 6, next)
		r.try(ctx, fmt.Sprintf("round %d", round), func() {
			await(ctx, nil, 20*time.Second, "kvroute's index equals the indexer's", func(ctx context.Context) string {
				var dump map[string]struct {
					Events []routerEvent `json:"events"`
				}
				bench.NoError(process.GetJSON(ctx, url+"/dump", &dump))
				var there []blockAt
				for _, group := range dump {
					there = appendBlocks(there, group.Events...)
				}
				if seen = len(there); seen == 0 {
					return "no blocks there"
				}
				return differing(ours.blocks(ctx), there)
			})
		})
	}
	r.note("%s; %d blocks in the end", w.summary(), seen)
}

// dynamoEvents has conversations through Envoy, kvroute and the frontend. Of each response
// it compares the worker that answered with the chosen one, and the tokens that the worker
// had cached with the prediction; then kvroute's index with Dynamo's own, fed with the
// same messages. At the end another kvroute starts, which has to query the indexers.
func dynamoEvents(ctx context.Context, e *env, r *result, plane string) {
	r.what = "workers chosen with those that answered, overlap with cached_tokens, index with Dynamo's"
	w := e.openDynamo(ctx, "dynamo-"+plane, plane)
	next := conversations(1)
	w.talk(ctx, r, 100, next)
	var flags []string
	if plane == "nats" {
		flags = []string{"--nats-url", w.router.At.NATS}
	}
	late := e.startStack(ctx, "dynamo-late-"+plane, w.dynamo.config(w.dynamo.store), []string{w.dynamo.address}, flags...)
	late.waitWorkers(ctx, 4)
	w.stack = late // which continues from the indexers' answers
	r.try(ctx, "a kvroute that starts late", func() { w.settle(ctx) })
	late.waitRouted(ctx)
	w.talk(ctx, r, 20, next)
	r.note("%s", w.summary())
}

// dynamoLoss cuts kvroute's connections to the workers' publishers while they publish: it
// has to notice, to query the workers' indexers, and to know the caches again.
func dynamoLoss(ctx context.Context, e *env, r *result) {
	r.what = "the index with Dynamo's after the connections were cut"
	f := e.newDynamo("dynamo-loss")
	f.start("zmq", "")
	f.ready(ctx)
	store := filepath.Join(e.dir, "dynamo-loss-store-cut")
	sockets := f.mirror(store) //nolint:contextcheck // its sockets end with the world
	s := e.startStack(ctx, "dynamo-loss", f.config(store), []string{f.address})
	s.waitWorkers(ctx, 4)
	s.waitRouted(ctx)
	w, next := f.world(s), conversations(2)
	for round := range 4 {
		w.talk(ctx, r, 6, next)
		for _, v := range sockets {
			v.cut()
		}
		// Predictions are wrong meanwhile, so nothing is compared.
		for range 8 {
			a := ask(ctx, w.envoy.URL()+chatPath, next(), nil).read()
			w.expect(events.RankName(a.Ext.Worker), a.Usage.stored(dynamoBlock))
		}
		await(ctx, nil, 20*time.Second, "the workers announce what they stored", func(context.Context) string {
			_, missing := w.announced()
			return missing
		})
		for _, v := range sockets {
			v.join()
		}
		await(ctx, nil, process.Patience, "kvroute connects to the publishers again", func(context.Context) string {
			return missingUnless(!slices.ContainsFunc(sockets, func(v *valve) bool { return !v.passing() }), "a connection is missing")
		})
		r.try(ctx, fmt.Sprintf("after cut %d", round), func() { w.settle(ctx) })
	}
	const counter = "kvroute_events_query_ends_total"
	for line := range strings.Lines(string(bench.Must(process.Get(ctx, "http://"+s.router.At.HTTP+"/metrics")))) {
		if rest, ok := strings.CutPrefix(line, counter); ok {
			r.note("queries: %s", strings.TrimSpace(rest))
		}
	}
	r.note("%s", w.summary())
}

// dynamoWorkers compares kvroute's workers with Dynamo's while these come and go.
func dynamoWorkers(ctx context.Context, e *env, r *result) {
	r.what = "kvroute's workers with Dynamo's"
	w := e.openDynamo(ctx, "dynamo-fleet", "zmq")
	const form = "%d/%d of %d blocks of %d at %v, "
	compare := func(when string, n int) {
		r.try(ctx, when, func() {
			await(ctx, nil, dynamoStart, "the workers are equal", func(ctx context.Context) string {
				var got, want string
				for _, state := range w.states(ctx) {
					got += fmt.Sprintf(form, state.ID, state.DPRank, state.TotalKVBlocks, state.BlockSize, state.Address)
				}
				for _, record := range w.dynamo.records().Workers {
					for rank := range record.DPSize {
						want += fmt.Sprintf(form, record.WorkerID, record.DPStart+rank, dynamoBlocks, dynamoBlock, w.dynamo.address)
					}
				}
				return missingUnless(got == want && strings.Count(got, "/") == n, "kvroute has %s, Dynamo %s", got, want)
			})
		})
	}
	compare("at the start", 4)
	w.dynamo.mocker.Stop()
	compare("after they stopped", 0)
	r.cases++
	if answer := ask(ctx, w.envoy.URL()+chatPath, chat("Hi", nil), nil); answer.status != http.StatusServiceUnavailable && answer.status != http.StatusNotFound {
		r.differ("without workers: status %d", answer.status)
	}
	w.dynamo.startMocker()
	compare("after they started", 4)
	w.dynamo.mocker.Kill()
	compare("after they died", 0)
}

// openDynamo starts Dynamo's processes and kvroute behind Envoy. The mock workers get the
// flags.
func (e *env) openDynamo(ctx context.Context, name, plane string, flags ...string) *world {
	f := e.newDynamo(name, flags...)
	// With NATS as the event plane kvroute has the server, so it starts first.
	s := e.startStack(ctx, name, f.config(f.store), []string{f.address}, "--router-temperature", "0.5")
	server := ""
	if plane == "nats" {
		server = s.router.At.NATS
	}
	f.start(plane, server)
	f.ready(ctx)
	s.waitWorkers(ctx, 4)
	s.waitRouted(ctx)
	return f.world(s)
}

func (f *dynamoFleet) world(s *stack) *world {
	return &world{stack: s, ledger: f.ledger, block: dynamoBlock, dynamo: f, requests: make(map[events.RankName]int)}
}

// talk sends n requests of conversations.
func (w *world) talk(ctx context.Context, r *result, n int, next func() string) {
	for i := range n {
		w.ask(ctx, r, fmt.Sprintf("request %d", i), chatPath, next())
	}
}

// conversations returns a function that makes the next request each time. It begins a new
// conversation with one of three system prompts, or continues an old one.
func conversations(seed uint64) (next func() string) {
	r := rand.New(rand.NewPCG(seed, 1))
	var all [][]any
	return func() string {
		if len(all) == 0 || r.IntN(3) == 0 {
			all = append(all, []any{message("system", words(r.Uint64N(3), 60))})
		}
		i := r.IntN(len(all))
		all[i] = append(all[i], message("user", words(r.Uint64(), 10+r.IntN(60))))
		text := body(map[string]any{"messages": all[i]}, map[string]any{"max_tokens": 1 + r.IntN(24), "nvext": map[string]any{"extra_fields": []string{"worker_id"}}})
		if all[i] = append(all[i], message("assistant", words(r.Uint64(), 5))); len(all[i]) > 12 {
			all = slices.Delete(all, i, i+1)
		}
		return text
	}
}
