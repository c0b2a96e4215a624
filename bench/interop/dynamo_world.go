// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvroute/kvroute/engines"
)

// dynamoWorld is requests through Envoy and kvroute to Dynamo's workers, one at a time.
type dynamoWorld struct {
	*dynamoFleet
	*stack
	rng      *rand.Rand
	talks    [][]any                    // conversations so far
	expected map[engines.WorkerRank]int // blocks that each rank must have stored
	cached   int
	each     map[engines.WorkerRank]int // requests
}

// openDynamo starts Dynamo's processes and kvroute behind Envoy. The mock workers get the
// flags.
func (e *env) openDynamo(ctx context.Context, name, plane string, seed uint64, flags ...string) *dynamoWorld {
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
	return &dynamoWorld{dynamoFleet: f, stack: s, rng: rand.New(rand.NewPCG(seed, 1))}
}

// talk sends n requests and compares each response, and the index after it.
func (w *dynamoWorld) talk(ctx context.Context, r *result, n int) {
	for i := range n {
		what := fmt.Sprintf("request %d", i)
		resp, a := w.send(ctx)
		at := w.stack.compare(ctx, r, what, resp, &a.Usage, dynamoBlock).Worker
		if by := a.Ext.Worker; at.ID != by.ID || at.DPRank != by.Rank {
			r.differ("%s: sent to %d, rank %d; answered by %d, rank %d", what, at.ID, at.DPRank, by.ID, by.Rank)
		}
		w.heard(ctx)
		r.try(ctx, "after "+what, func() { w.equal(ctx, w.stack) })
	}
}

// send sends the next request and counts the blocks that the worker must store. It begins a
// new conversation with one of three system prompts, or continues an old one.
func (w *dynamoWorld) send(ctx context.Context) (*response, answer) {
	if n := len(w.talks); n == 0 || w.rng.IntN(3) == 0 {
		w.talks = append(w.talks, []any{message("system", words(w.rng.Uint64N(3), 60))})
	}
	i := w.rng.IntN(len(w.talks))
	w.talks[i] = append(w.talks[i], message("user", words(w.rng.Uint64(), 10+w.rng.IntN(60))))
	text := body(map[string]any{"messages": w.talks[i]}, map[string]any{"max_tokens": 1 + w.rng.IntN(24), "nvext": map[string]any{"extra_fields": []string{"worker_id"}}})
	w.talks[i] = append(w.talks[i], message("assistant", words(w.rng.Uint64(), 5)))
	if len(w.talks[i]) > 12 {
		w.talks = slices.Delete(w.talks, i, i+1)
	}
	r := ask(ctx, w.envoy.URL()+chatPath, text, named())
	a := r.read()
	if w.expected == nil {
		w.expected, w.each = make(map[engines.WorkerRank]int), make(map[engines.WorkerRank]int)
	}
	at := engines.WorkerRank{WorkerID: a.Ext.Worker.ID, DPRank: a.Ext.Worker.Rank}
	w.expected[at] += a.Usage.stored(dynamoBlock)
	w.cached += a.Usage.Details.Cached
	w.each[at]++
	return r, a
}

// heard waits until all blocks that the workers must have stored were announced.
func (w *dynamoWorld) heard(ctx context.Context) {
	await(ctx, nil, 20*time.Second, "the workers announce what they stored", func(context.Context) (missing string) {
		w.plane.mu.Lock()
		defer w.plane.mu.Unlock()
		if w.plane.err != nil {
			return w.plane.err.Error()
		}
		for at, n := range w.expected {
			if got := w.plane.stored[at]; got < n {
				missing += fmt.Sprintf("%v: %d blocks of %d; ", at, got, n)
			}
		}
		return missing
	})
}

// equal waits until a kvroute's index has the blocks that Dynamo's tree has.
func (w *dynamoWorld) equal(ctx context.Context, s *stack) {
	equalBlocks(ctx, s, func(context.Context) []blockAt { return w.index.dump() })
}

// equalBlocks waits until a kvroute's index has the blocks that another one has.
func equalBlocks(ctx context.Context, s *stack, dump func(context.Context) []blockAt) {
	await(ctx, nil, 20*time.Second, "kvroute's index equals Dynamo's", func(ctx context.Context) string {
		theirs := dump(ctx)
		return differing(s.blocks(ctx), theirs)
	})
}

func (w *dynamoWorld) summary() string {
	stored, removed := 0, 0
	w.plane.mu.Lock()
	defer w.plane.mu.Unlock()
	for _, n := range w.plane.stored {
		stored += n
	}
	for _, n := range w.plane.removed {
		removed += n
	}
	var each []int
	for _, n := range w.each {
		each = append(each, n)
	}
	slices.Sort(each)
	return fmt.Sprintf("requests by rank %v, %d tokens cached, %d blocks stored and %d evicted", each, w.cached, stored, removed)
}
