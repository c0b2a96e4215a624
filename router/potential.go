// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// PotentialLoad is the load of a worker with one more request.
type PotentialLoad struct {
	Worker
	PotentialPrefillTokens int     `json:"potential_prefill_tokens"` // pending, and the request's tokens that are not cached
	PotentialDecodeBlocks  int     `json:"potential_decode_blocks"`  // active, and those that the request adds
	ActiveRequests         int     `json:"active_requests"`          // without it
	OverlapBlocks          int     `json:"overlap_blocks"`
	CoarseTTFT             float64 `json:"coarse_ttft_ms"`
	EstimatedTTFT          float64 `json:"estimated_ttft_ms"` // by the model of the engine
}

// PotentialLoads returns the load with a request of each worker that may take it, busy or
// not, in worker order. It books nothing and ignores the ID. The errors are those of
// [Router.BestWorker], except those about busy workers. In mode [Direct] the request need
// not name a worker.
func (r *Router) PotentialLoads(ctx context.Context, req Request) ([]PotentialLoad, error) {
	s := r.scratch.Get().(*scratch)
	defer r.release(s)
	req.ID = ""
	s.request = req
	t, err := r.prepare(s)
	if err != nil {
		return nil, err
	}
	ctx, cancel := req.timed(ctx)
	defer cancel()
	loads := []PotentialLoad{}
	var lack error
	for _, p := range t.pools {
		r.read(ctx, p, s, t.card) // in all modes
		if err := context.Cause(ctx); err != nil {
			return nil, fmt.Errorf("router: model %q: %w", p.model, err)
		}
		p.match(r.conf.Now(), &s.question, s)
		p.read(func(c *core) { loads, err = c.potentialLoads(r.conf.Now(), &s.question, loads) })
		if err != nil {
			lack = err
		}
	}
	if len(loads) == 0 {
		return nil, fmt.Errorf("router: model %q: %w", t.pools[0].model, lack)
	}
	slices.SortFunc(loads, func(a, b PotentialLoad) int { return a.Worker.Compare(b.Worker) })
	return loads, nil
}

// potentialLoads appends one entry for each worker that may take the request.
func (c *core) potentialLoads(now time.Time, q *question, loads []PotentialLoad) ([]PotentialLoad, error) {
	c.workspace, q.workspace.part = q.workspace, whole
	settings, err := c.settingsFor(q)
	if err != nil {
		return loads, err
	}
	if err := c.eligible(now, q); err != nil {
		return loads, err
	}
	c.grow(now)
	c.measure(now, q, settings)
	for i, ord := range c.candidates {
		in := &c.inputs[i]
		c.complete(now, ord, q, settings, in)
		loads = append(loads, PotentialLoad{
			Worker:                 c.entries[ord].worker,
			PotentialPrefillTokens: in.PendTokens + max(0, q.tokens-settings.CachedTokens(&c.request, in)),
			PotentialDecodeBlocks:  in.ActiveBlocks + in.AdditionalBlocks,
			ActiveRequests:         in.ActiveRequests,
			OverlapBlocks:          in.OverlapBlocks,
			CoarseTTFT:             scorer.CoarseTTFT(settings.UncachedTokens(&c.request, in), in.ActiveRequests, c.throughput(&c.entries[ord])),
			EstimatedTTFT:          settings.ModelTTFT(&c.request, in),
		})
	}
	return loads, nil
}
