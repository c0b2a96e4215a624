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

// PotentialLoads returns the load that each worker would have with the request. It lists the workers that may
// take the request, busy or not, in worker order. It books nothing and ignores the ID. The errors are those of
// [Router.BestWorker], except those about busy workers. In mode [Direct] the request need
// not name a worker.
func (r *Router) PotentialLoads(ctx context.Context, req Request) ([]PotentialLoad, error) {
	s := r.scratch.Get().(*scratch)
	defer r.release(s)
	req.ID = ""
	s.request = req
	if err := r.resolve(s); err != nil {
		return nil, err
	}
	ctx, cancel := req.timed(ctx)
	defer cancel()
	loads := []PotentialLoad{}
	model := s.target.pools[0].model
	var lack error
	for _, p := range s.target.pools {
		if err := r.input(ctx, p, s, forLoads); err != nil {
			return nil, fmt.Errorf("router: model %q: %w", model, err)
		}
		var err error
		if loads, err = p.potentialLoads(r.conf.Now, s, loads); err != nil {
			lack = err
		}
	}
	if len(loads) == 0 {
		return nil, fmt.Errorf("router: model %q: %w", model, lack)
	}
	slices.SortFunc(loads, func(a, b PotentialLoad) int { return a.Worker.Compare(b.Worker) })
	return loads, nil
}

// potentialLoads appends one entry for each worker that may take the request.
func (p *pool) potentialLoads(now func() time.Time, s *scratch, loads []PotentialLoad) ([]PotentialLoad, error) {
	p.countOverlap(now, s)
	in, ch := &s.input, &s.choices.worker
	p.mu.Lock()
	defer p.mu.Unlock()
	c := &p.core
	settings, err := c.settingsFor(in)
	if err != nil {
		return loads, err
	}
	ch.begin(in.completeAt, whole, settings)
	if err := c.eligible(in, ch); err != nil {
		return loads, err
	}
	c.grow(ch.time)
	c.measure(in, look, ch)
	for i, ord := range ch.candidates {
		load := &ch.inputs[i]
		c.complete(ch, ord, in.hashes.sequence, load)
		cached := settings.CachedTokens(&ch.request, load)
		loads = append(loads, PotentialLoad{
			Worker:                 c.entries[ord].worker,
			PotentialPrefillTokens: load.PendTokens + max(0, in.prompt.tokens-cached),
			PotentialDecodeBlocks:  load.ActiveBlocks + load.AdditionalBlocks,
			ActiveRequests:         load.ActiveRequests,
			OverlapBlocks:          load.OverlapBlocks,
			CoarseTTFT:             scorer.CoarseTTFT(settings.UncachedTokens(&ch.request, load), load.ActiveRequests, c.throughput(&c.entries[ord])),
			EstimatedTTFT:          settings.ModelTTFT(&ch.request, load),
		})
	}
	return loads, nil
}
