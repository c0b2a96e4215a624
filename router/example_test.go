// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/kvroute/kvroute/router"
)

// fleet returns a router with the given workers of one model.
func fleet(ids ...uint64) *router.Router {
	r, err := router.New(router.Config{})
	if err != nil {
		panic(err)
	}
	for _, id := range ids {
		if err := r.SetWorker(router.WorkerInfo{ID: id, Models: []string{"llama"}, BlockSize: 8, Address: netip.MustParseAddrPort("10.0.0.1:8000")}); err != nil {
			panic(err)
		}
	}
	return r
}

// Automatic: Generate routes the request, dispatches it and books its slot.
func ExampleRouter_Generate() {
	r := fleet(1)
	// A real dispatch posts to d.Address and yields the response.
	dispatch := func(_ context.Context, _ router.Request, d router.Decision) iter.Seq2[router.Chunk, error] {
		return func(yield func(router.Chunk, error) bool) {
			_ = yield(router.Chunk{Data: []byte("Hello"), Tokens: 1}, nil) &&
				yield(router.Chunk{Data: fmt.Appendf(nil, " from worker %d", d.Worker.ID), Tokens: 3}, nil)
		}
	}
	for chunk, err := range r.Generate(context.Background(), router.Request{ID: "r1", Model: "llama", Tokens: []uint32{1, 2, 3}}, dispatch) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Print(string(chunk.Data))
	}
	fmt.Println()
	fmt.Println("requests left:", r.Workers()[0].ActiveRequests)
	// Output:
	// Hello from worker 1
	// requests left: 0
}

// Manual: book with an id, note the first token, free at the end.
func ExampleRouter_BestWorker() {
	r := fleet(1)
	d, err := r.BestWorker(context.Background(), router.Request{ID: "r1", Model: "llama", Tokens: make([]uint32, 20)})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer r.Free("r1") // however the request ends

	fmt.Println("send it to", d.Address, "which computes", d.PrefillTokens, "tokens")
	fmt.Println("pending:", r.Workers()[0].PendTokens)
	r.MarkPrefillCompleted("r1") // at its first token
	fmt.Println("pending:", r.Workers()[0].PendTokens)
	// Output:
	// send it to 10.0.0.1:8000 which computes 20 tokens
	// pending: 20
	// pending: 0
}

// Hierarchical: ask several routers without an id, then book with the best one,
// pinned to the worker that it named.
func ExampleRouter_BestWorker_hierarchical() {
	ctx := context.Background()
	east, west := fleet(1, 2), fleet(11, 12)
	// Other requests keep both workers of the east busy.
	for i := range uint64(2) {
		_, _ = east.BestWorker(ctx, router.Request{ID: fmt.Sprint("busy", i), Model: "llama", Tokens: make([]uint32, 4000), Pinned: &router.Worker{ID: i + 1}})
	}
	req := router.Request{Model: "llama", Tokens: make([]uint32, 100)}

	var best *router.Router
	var at router.Decision
	for _, r := range []*router.Router{east, west} {
		if d, err := r.BestWorker(ctx, req); err == nil && (best == nil || d.Cost < at.Cost) {
			best, at = r, d
		}
	}
	if best == nil {
		fmt.Println("nobody can take it")
		return
	}
	req.ID, req.Pinned = "r1", &at.Worker
	d, err := best.BestWorker(ctx, req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer best.Free("r1")
	fmt.Println("west:", best == west, "cost:", at.Cost, "reason:", d.Reason)
	// Output:
	// west: true cost: 100 reason: pinned
}

// A custom rule: choose the worker with the earliest first token, as the engine's
// performance model predicts it.
func ExampleRouter_PotentialLoads() {
	ctx := context.Background()
	r := fleet(1, 2, 3)
	for id, tokens := range map[uint64]int{1: 9000, 2: 500, 3: 2000} {
		_, _ = r.BestWorker(ctx, router.Request{ID: fmt.Sprint("busy", id), Model: "llama", Tokens: make([]uint32, tokens), Pinned: &router.Worker{ID: id}})
	}
	req := router.Request{ID: "r1", Model: "llama", Tokens: slices.Repeat([]uint32{7}, 100)}

	loads, err := r.PotentialLoads(ctx, req)
	if err != nil {
		fmt.Println(err)
		return
	}
	first := slices.MinFunc(loads, func(a, b router.PotentialLoad) int { return cmp.Compare(a.EstimatedTTFT, b.EstimatedTTFT) })
	req.Pinned = &first.Worker
	d, err := r.BestWorker(ctx, req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer r.Free("r1")
	fmt.Printf("worker %d, first token in %.0f ms\n", d.Worker.ID, d.EstimatedTTFT)
	// Output:
	// worker 2, first token in 27 ms
}
