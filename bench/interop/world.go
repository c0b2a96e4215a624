// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/events"
)

// world is engines behind kvroute and Envoy, which get one request at a time. Each
// response is compared: the overlap that kvroute predicted with the tokens that the engine
// reports as cached. Before the next request the index is compared with the blocks that
// the engines announced.
type world struct {
	*stack
	*ledger
	block    int // tokens
	parts    int // kvroute has so many blocks for one of the engine; 0 counts as 1
	engines  []*vllmEngine
	dynamo   *dynamoFleet // nil for vLLM
	cached   int          // tokens, as the engines say
	requests map[events.RankName]int
}

// ask sends a request through Envoy, compares, and waits until the index has the blocks
// that the request stored and evicted.
func (w *world) ask(ctx context.Context, res *result, what, path, text string) (a answer) {
	bench.Within(what, func() {
		a = w.compareAnswer(ctx, res, what, ask(ctx, w.envoy.URL()+path, text, named()))
		w.settle(ctx)
	})
	return a
}

// askAll sends each of the prompts through Envoy.
func (w *world) askAll(ctx context.Context, res *result, what string, all []string) {
	for i, text := range all {
		w.ask(ctx, res, fmt.Sprintf("%s, prompt %d", what, i), chatPath, text)
	}
}

// direct sends a request to an engine without kvroute, which learns of it from events only.
func (w *world) direct(ctx context.Context, v *vllmEngine, text string) {
	a := ask(ctx, "http://"+v.address+chatPath, text, nil).read()
	w.expect(v.rank(0), a.Usage.stored(w.block))
}

// compareAnswer compares a response with kvroute's decision.
func (w *world) compareAnswer(ctx context.Context, res *result, what string, r *response) answer {
	a := r.read()
	d := w.compare(ctx, res, what, r, &a.Usage, w.block)
	at := events.RankName{WorkerID: d.Worker.ID, DPRank: d.Worker.DPRank}
	if by := events.RankName(a.Ext.Worker); w.dynamo != nil && by != at {
		res.differ("%s: sent to %v, answered by %v", what, at, by)
		at = by
	}
	if said := r.header.Get("X-Dynamo-Overlap-Blocks"); said != strconv.Itoa(d.OverlapBlocks) {
		res.differ("%s: the header says %s blocks, the decision %d", what, said, d.OverlapBlocks)
	}
	if leg := d.Prefill; leg != nil { // its worker generated one token
		used := usage{Prompt: a.Usage.Prompt, Completed: 1}
		used.Details.Cached = min(leg.OverlapBlocks, max(0, used.Prompt-1)/w.block) * w.block
		worker := events.RankName{WorkerID: leg.Worker.ID, DPRank: leg.Worker.DPRank}
		w.expect(worker, used.stored(w.block))
		w.requests[worker]++
	}
	w.expect(at, a.Usage.stored(w.block))
	w.cached += a.Usage.Details.Cached
	w.requests[at]++
	return a
}

// settle waits until each engine has announced the blocks that it must have stored,
// and the index has the blocks that the engines have by their announcements. Dynamo's own
// index says which these are.
func (w *world) settle(ctx context.Context) {
	await(ctx, nil, 20*time.Second, "the index equals what the engines announced", func(ctx context.Context) string {
		theirs, missing := w.announced()
		if missing != "" {
			return missing
		}
		if w.dynamo != nil {
			return differing(w.blocks(ctx), w.dynamo.index.dump())
		}
		ours := w.blocks(ctx)
		for i := range ours {
			ours[i].local = 0 // an engine does not name it
		}
		return differing(joined(ours, theirs, w.parts), theirs)
	})
}

func (w *world) summary() string {
	stored, removed := w.totals()
	return fmt.Sprintf("requests by rank %v, %d tokens cached, %d blocks stored and %d evicted so far", w.requests, w.cached, stored, removed)
}

// play sends requests to a world.
type play func(context.Context, *world, *result)

// inTurn plays one after the other.
func inTurn(all ...play) play {
	return func(ctx context.Context, w *world, res *result) {
		for _, p := range all {
			p(ctx, w, res)
		}
	}
}

// direct plays with the engines that all checks share, and with events straight from their
// sockets, whose addresses kvroute requests from the engines.
func direct(p play, flags ...string) func(context.Context, *env, *result) {
	return func(ctx context.Context, e *env, res *result) {
		f := e.fleet(ctx)
		e.play(ctx, res, "direct", f.config("{transport: zmq}"), flags, p)
	}
}

// play plays in a world of its own, with a configuration and flags of kvroute's.
func (e *env) play(ctx context.Context, res *result, name, config string, flags []string, p play) {
	res.what = "predicted overlap with cached_tokens, index with events"
	f := e.vllms
	s := e.startStack(ctx, name, config, f.addresses(), flags...)
	defer s.stop()
	w := &world{stack: s, ledger: f.ledger, block: blockSize, engines: f.engines, requests: make(map[events.RankName]int)}
	s.waitWorkers(ctx, f.ranks())
	s.waitRouted(ctx)
	for _, v := range f.engines {
		v.empty(ctx)
	}
	w.settle(ctx)
	p(ctx, w, res)
	res.note("%s; %s", w.summary(), f.tokenizer)
}

// noGuesses makes kvroute predict from events alone.
const noGuesses = "--router-predicted-ttl-secs=0"
