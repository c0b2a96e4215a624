// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// If there are few router groups, the router can ask each of them about a request. The
// answer is exact, and takes a round trip. A probe books nothing, so other requests may
// reach the group meanwhile: their load is added to the answer, and then the request does
// not prefer the worker that the group named.

// Probe asks router groups for the load and overlap of a request.
type Probe struct {
	ID        string // of the request
	Model     string // base model
	BlockSize int
	Tokens    int      // length of the prompt
	Local     []uint64 // local hashes of its full blocks; good during the call only
	Groups    []string // names of the groups
}

// ProbeAnswer is the answer of a group to a [Probe]: the worker that it would choose, and
// the load there without the request.
type ProbeAnswer struct {
	Group          string
	Worker         Worker // of the group
	OverlapBlocks  int
	PendTokens     int
	ActiveBlocks   int
	ActiveRequests int
	HeldTokens     int     // by its requests, each with all of its tokens; 0 = unknown
	Cost           float64 // in the unit of the group's policy
	// Busy says that no worker of the group would take it now.
	Busy bool
}

// Answer answers a probe of another router's [Config.Probe]. It books nothing. The errors
// are those of [Router.BestWorker], but if all workers are busy, that is the answer.
func (r *Router) Answer(ctx context.Context, p Probe) (ProbeAnswer, error) {
	d, err := r.BestWorker(ctx, Request{
		Model: p.Model, Explain: true,
		Blocks: &Blocks{Local: p.Local, Sequence: indexer.AppendSequenceHashes(nil, p.Local), Tokens: p.Tokens, BlockSize: p.BlockSize},
	})
	switch {
	case errors.Is(err, ErrAllBusy), errors.Is(err, ErrPinnedBusy), errors.Is(err, ErrQueueFull), errors.Is(err, ErrTooLate):
		return ProbeAnswer{Busy: true}, nil
	case err != nil:
		return ProbeAnswer{}, err
	}
	a := ProbeAnswer{Worker: d.Worker, OverlapBlocks: d.OverlapBlocks, Cost: d.Cost}
	for i := range d.Candidates {
		if c := &d.Candidates[i]; c.Worker == d.Worker {
			a.PendTokens, a.ActiveBlocks, a.ActiveRequests = c.PendTokens, c.ActiveBlocks, c.ActiveRequests
			a.HeldTokens = c.DecodeTokens + c.WaitingTokens
		}
	}
	return a, nil
}

// probe asks the groups of a pool, if the answers can change the decision.
func (r *Router) probe(ctx context.Context, p *pool, s *scratch) {
	q := &s.question
	groups := p.view.Load().groups
	if r.conf.Probe == nil || groups == nil || r.conf.Mode != KV || q.Pinned != nil || len(q.local) == 0 ||
		q.session != 0 && p.bound(r.conf.Now(), q.session) {
		return
	}
	q.probed = r.conf.Now()
	q.answers = r.conf.Probe(ctx, Probe{
		ID: q.ID, Model: p.model, BlockSize: p.blockSize, Tokens: q.tokens, Local: q.local, Groups: groups,
	})
	s.hashed = r.conf.Now() // the match begins now
	s.decision.ProbeTime = s.hashed.Sub(q.probed)
}

// probeAnswer returns a group's answer to the probe, or nil without an answer.
func (q *question) probeAnswer(e *entry) *ProbeAnswer {
	if len(q.answers) == 0 || e.info.Group == "" {
		return nil
	}
	at := slices.IndexFunc(q.answers, func(a ProbeAnswer) bool { return a.Group == e.info.Group })
	if at < 0 {
		return nil
	}
	return &q.answers[at]
}

// probeOf returns a group's answer to the probe, or nil without an answer and if all
// workers are busy.
func (q *question) probeOf(e *entry) *ProbeAnswer {
	if a := q.probeAnswer(e); a != nil && !a.Busy {
		return a
	}
	return nil
}

// applyProbe replaces a group's summary by its answer to the probe: the load of the worker
// that it would choose, and that worker's share of the requests sent to the group since.
func (c *core) applyProbe(q *question, ord, at int) {
	a := q.probeOf(&c.entries[ord])
	if a == nil {
		return
	}
	in := &c.inputs[at]
	since := c.slots.UnreportedSince(ord, q.probed.Add(-GroupTransit))
	in.OverlapBlocks = min(max(0, a.OverlapBlocks), len(q.sequence))
	in.PendTokens = a.PendTokens + since.PendTokens/in.Members
	in.ActiveRequests = a.ActiveRequests + since.Requests/in.Members
	in.ActiveBlocks = a.ActiveBlocks
	in.DecodeTokens /= in.Members // of an answer without the number, the mean stands for it
	if a.HeldTokens > 0 || a.ActiveRequests == 0 {
		in.DecodeTokens = a.HeldTokens + since.HeldTokens/in.Members
	}
	in.WaitingTokens = 0
	in.WaitingRequests /= in.Members
	in.Members = 1
}

// member returns the worker of a group that a request prefers there: the one that the group
// named, unless other requests were sent to the group since.
func (c *core) member(q *question, ord int) *Worker {
	a := q.probeOf(&c.entries[ord])
	if a == nil {
		return nil
	}
	if c.slots.UnreportedSince(ord, q.probed.Add(-GroupTransit)).Requests > 0 {
		return nil
	}
	w := a.Worker
	return &w
}
