// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// world is engines behind kvroute and Envoy, which get one request at a time. Each
// response is compared: the overlap that kvroute predicted with the tokens that the engine
// reports as cached. Before the next request the index is compared with the blocks that
// the engines announced.
type world struct {
	*stack
	engines []*vllmEngine
	byID    map[uint64]*vllmEngine // kvroute's ids of the workers
	cached  int                    // tokens, as the engines say
	each    map[string]int         // requests by worker
}

func newWorld(ctx context.Context, s *stack, engines []*vllmEngine) *world {
	w := &world{stack: s, engines: engines, byID: make(map[uint64]*vllmEngine), each: make(map[string]int)}
	ranks := 0
	for _, v := range engines {
		ranks += v.ranks
	}
	s.waitWorkers(ctx, ranks)
	for _, state := range s.states(ctx) {
		for _, v := range engines {
			if v.name == state.Name {
				w.byID[state.ID], v.id = v, state.ID
			}
		}
	}
	if len(w.byID) != len(engines) {
		bench.NoError(fmt.Errorf("kvroute knows %d of %d engines", len(w.byID), len(engines)))
	}
	s.waitRouted(ctx)
	for _, v := range engines {
		v.empty(ctx)
	}
	w.settle(ctx)
	return w
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
	v.expected[0] += a.Usage.stored(blockSize)
}

// compareAnswer compares a response with kvroute's decision.
func (w *world) compareAnswer(ctx context.Context, res *result, what string, r *response) answer {
	a := r.read()
	d := w.stack.compare(ctx, res, what, r, &a.Usage, blockSize)
	v := w.byID[d.Worker.ID]
	if v == nil || int(d.Worker.DPRank) >= len(v.expected) {
		bench.NoError(fmt.Errorf("it went to %+v", d.Worker))
	}
	v.expected[d.Worker.DPRank] += a.Usage.stored(blockSize)
	w.cached += a.Usage.Details.Cached
	w.each[fmt.Sprintf("%s/%d", v.name, d.Worker.DPRank)]++
	if said := r.header.Get("X-Dynamo-Overlap-Blocks"); said != strconv.Itoa(d.OverlapBlocks) {
		res.differ("%s: the header says %s blocks, the decision %d", what, said, d.OverlapBlocks)
	}
	return a
}

// settle waits until each engine has announced the blocks that it must have stored,
// and the index has the blocks that the engines have by their announcements.
func (w *world) settle(ctx context.Context) {
	await(ctx, nil, 20*time.Second, "the index equals what the engines announced", func(ctx context.Context) string {
		var theirs []blockAt
		for _, v := range w.engines {
			for rank, l := range v.heard {
				h := l.heard()
				if h.stored != v.expected[rank] {
					return fmt.Sprintf("engine %s, rank %d announced %d blocks, want %d", v.name, rank, h.stored, v.expected[rank])
				}
				for _, hash := range h.hashes {
					theirs = append(theirs, blockAt{worker: v.id, rank: uint32(rank), external: hash})
				}
			}
		}
		ours := w.blocks(ctx)
		for i := range ours {
			ours[i].local = 0 // an engine does not name it
		}
		return differing(ours, theirs)
	})
}

// announced adds up what the engines announced so far.
func (w *world) announced() (sum heard) {
	for _, v := range w.engines {
		for _, l := range v.heard {
			h := l.heard()
			sum.stored, sum.removed, sum.batches = sum.stored+h.stored, sum.removed+h.removed, sum.batches+h.batches
		}
	}
	return sum
}

func (w *world) summary() string {
	h := w.announced()
	return fmt.Sprintf("requests %v, %d tokens cached, %d blocks stored and %d evicted so far, in %d batches", w.each, w.cached, h.stored, h.removed, h.batches)
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
	w := newWorld(ctx, s, f.engines)
	p(ctx, w, res)
	res.note("%s; %s", w.summary(), f.tokenizer)
}

// noGuesses makes kvroute predict from events alone.
const noGuesses = "--router-predicted-ttl-secs=0"
