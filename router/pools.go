// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// choosePool returns the pool that a request goes to, of several pools of one model: the pool of the pinned
// worker or of the session's worker, or else the cheapest pool; see [pool.compare].
func (r *Router) choosePool(ctx context.Context, s *scratch) (*pool, error) {
	req, pools := &s.request, s.target.pools
	session := r.sessionKey(req.Session)
	at := slices.IndexFunc(pools, func(p *pool) bool {
		return req.Pinned != nil && p.has(req) || req.Pinned == nil && session != 0 && p.bound(r.conf.Now(), session)
	})
	if at >= 0 || req.Pinned != nil { // the first pool returns the error for an unknown worker
		return pools[max(0, at)], nil
	}
	best, least := pools[0], math.Inf(1)
	for _, p := range pools {
		if err := r.input(ctx, p, s, forComparison); err != nil {
			return nil, err
		}
		switch cost, err := p.compare(r.conf.Now, s); {
		case errors.Is(err, ErrAllBusy) && math.IsInf(least, 1):
			best = p // the request may wait there
		case err != nil && !isAbsence(err):
			return nil, err
		case err == nil && cost < least:
			best, least = p, cost
		}
	}
	return best, nil
}

// compare returns a cost of a pool for the request in s, to compare the pools of one model; lower is
// better. It is the cost of the chosen candidate; costs in blocks are converted to tokens. If the mode
// has no costs, it is the mean number of requests in flight of a candidate.
func (p *pool) compare(now func() time.Time, s *scratch) (float64, error) {
	p.countOverlap(now, s)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.core.chooseWorkers(s.input.completeAt, &s.input, look, &s.choices); err != nil {
		return 0, err
	}
	ch := &s.choices.worker
	switch cost := ch.costs[ch.chosen]; {
	case ch.policy == scorer.Dynamo || ch.policy == scorer.DynamoNewer:
		return cost * float64(p.blockSize), nil
	case ch.policy != "" || p.core.conf.Rule != nil:
		return cost, nil
	}
	var sum int
	for i := range ch.inputs {
		sum += ch.inputs[i].ActiveRequests
	}
	return float64(sum) / float64(len(ch.inputs)), nil
}

// isAbsence says whether another pool of the model may take the request that caused an error in one pool.
func isAbsence(err error) bool {
	return errors.Is(err, ErrNoWorkers) || errors.Is(err, ErrAllBusy)
}
