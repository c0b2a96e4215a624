// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// If there are few router groups, the router can ask each of them about a request. The
// answer is exact, and takes a round trip. A probe books nothing, so other requests may
// be sent to the group after the answer. Their load is then added to the answer, and the request
// does not name the worker that the group chose.

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
// are those of [Router.BestWorker]. If all workers are busy, the answer says so, and there is no error.
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

// probe asks the router groups of a pool about a request, if their answers can change the decision.
func (r *Router) probe(ctx context.Context, p *pool, in *decisionInput) (got probed) {
	groups := p.view.Load().groups
	if groups == nil || r.conf.Mode != KV || in.Pinned != nil || len(in.hashes.local) == 0 ||
		in.session != 0 && p.bound(r.conf.Now(), in.session) {
		return got
	}
	got.askedAt = r.conf.Now()
	got.answers = r.conf.Probe(ctx, Probe{
		ID: in.ID, Model: p.model, BlockSize: p.blockSize, Tokens: in.prompt.tokens, Local: in.hashes.local, Groups: groups,
	})
	got.took = r.conf.Now().Sub(got.askedAt)
	return got
}

// probeAnswer returns a group's answer to the probe, or nil without an answer.
func (in *decisionInput) probeAnswer(e *entry) *ProbeAnswer {
	for i := range in.probed.answers {
		if a := &in.probed.answers[i]; e.info.Group != "" && a.Group == e.info.Group {
			return a
		}
	}
	return nil
}

// probeOf returns a group's answer to the probe, or nil without an answer and if all
// workers are busy.
func (in *decisionInput) probeOf(e *entry) *ProbeAnswer {
	if a := in.probeAnswer(e); a != nil && !a.Busy {
		return a
	}
	return nil
}

// applyProbe replaces a group's summary by its answer to the probe: the load of the worker that the group
// would choose, and that worker's share of the requests that were sent to the group after the probe.
func (in *decisionInput) applyProbe(e *entry, booked *slots.Table, ord int, to *scorer.Input) {
	a := in.probeOf(e)
	if a == nil {
		return
	}
	since := booked.UnreportedSince(ord, in.probed.askedAt.Add(-GroupTransit))
	to.OverlapBlocks = min(max(0, a.OverlapBlocks), len(in.hashes.sequence))
	to.PendTokens = a.PendTokens + since.PendTokens/to.Members
	to.ActiveRequests = a.ActiveRequests + since.Requests/to.Members
	to.ActiveBlocks = a.ActiveBlocks
	to.DecodeTokens /= to.Members // of an answer without the number, the mean stands for it
	if a.HeldTokens > 0 || a.ActiveRequests == 0 {
		to.DecodeTokens = a.HeldTokens + since.HeldTokens/to.Members
	}
	to.WaitingTokens = 0
	to.WaitingRequests /= to.Members
	to.Members = 1
}

// member returns the worker of a group that a request prefers there: the one that the group
// named, unless other requests were sent to the group since.
func (in *decisionInput) member(e *entry, booked *slots.Table, ord int) *Worker {
	a := in.probeOf(e)
	if a == nil || booked.UnreportedSince(ord, in.probed.askedAt.Add(-GroupTransit)).Requests > 0 {
		return nil
	}
	return new(a.Worker)
}
