// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"math"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// groupSummary is what the upper router knows of a group: what the group last
// said, and what it was sent since.
type groupSummary struct {
	members        int
	pend, requests float64 // means over the members
	ownPend        float64 // uncached tokens sent since
	ownRequests    float64
}

// chooseGroup chooses the group of a request by the cost of package scorer, with
// the group's mean load and the best overlap of a member.
func (s *sim) chooseGroup(req int32) error {
	set := &s.Rule.Settings
	r := scorer.Request{PromptTokens: s.reqs[req].Input, BlockSize: s.Trace.BlockSize}
	own := make([]float64, s.Groups)
	for g := range s.Groups {
		s.costs[g] = math.Inf(1)
		candidates, err := s.probe(g, req)
		if err != nil {
			return err
		}
		if len(candidates) == 0 {
			continue
		}
		best := scorer.Input{}
		for i := range candidates {
			best.OverlapBlocks = max(best.OverlapBlocks, candidates[i].OverlapBlocks)
		}
		if s.SummaryAge == 0 {
			s.summaries[g] = summariseGroup(candidates)
		}
		m := &s.summaries[g]
		members := float64(max(1, m.members))
		own[g] = float64(set.UncachedTokens(&r, &best))
		s.costs[g] = scorer.TokenCost(m.pend+m.ownPend/members, own[g], float64(r.PromptTokens),
			m.requests+m.ownRequests/members, set.Alpha, set.Attention)
	}
	g := scorer.Pick(s.costs, s.inputs, scorer.Draw(s.Seed, scorer.DrawKey(s.ids[req])))
	s.summaries[g].ownPend += own[g]
	s.summaries[g].ownRequests++
	s.replica[req] = int32(g)
	return nil
}

// probe asks a group's router for the load of its members and their overlap with
// the request that was hashed last.
func (s *sim) probe(g int, req int32) ([]router.Candidate, error) {
	q := s.question(req)
	q.Explain = true
	d, err := s.routers[g].router.BestWorker(s.ctx, q)
	switch {
	case errors.Is(err, router.ErrNoWorkers):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("replay: group %d: %w", g, err)
	}
	return d.Candidates, nil
}

func summariseGroup(candidates []router.Candidate) (m groupSummary) {
	m.members = len(candidates)
	for i := range candidates {
		m.pend += float64(candidates[i].PendTokens) / float64(len(candidates))
		m.requests += float64(candidates[i].ActiveRequests) / float64(len(candidates))
	}
	return m
}

// summarise takes the summaries of all groups, and comes again.
func (s *sim) summarise() error {
	if s.SummaryAge == 0 {
		return nil
	}
	s.local, s.sequence = s.local[:0], s.sequence[:0]
	for g := range s.summaries {
		candidates, err := s.probe(g, 0)
		if err != nil {
			return err
		}
		s.summaries[g] = summariseGroup(candidates)
	}
	s.queue.push(s.now+s.SummaryAge.Nanoseconds(), summary, 0, 0)
	return nil
}
