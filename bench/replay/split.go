// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"time"

	"github.com/kvroute/kvroute/router"
)

// With prefill workers, the router decides on both workers of a request. A request with a prefill leg
// passes these steps:
//
//  1. The prefill worker computes the prompt's tokens that it has not cached. The leg's slot is free.
//  2. The request waits at its decode worker, which begins with it when it has memory for it.
//  3. The blocks that the decode worker has not cached are transferred. The prefill worker holds the
//     blocks until then.
//  4. The decode worker computes the prompt's last token again, as vLLM does, which gives the first
//     token of the output. Then it generates the others.
//
// A decode worker serves a request without a leg as any worker does.

// noLeg is the leg of a request whose worker computes the prompt itself.
const noLeg = -1

// role is the registered role of a worker.
func (s *sim) role(w int) router.Role {
	switch {
	case s.PrefillWorkers == 0:
		return router.Aggregated
	case w < s.PrefillWorkers:
		return router.Prefill
	default:
		return router.Decode
	}
}

// split is the routers' configuration of prefill legs.
func (s *sim) split() router.SplitConfig {
	return router.SplitConfig{
		Skip: router.SkipRule(s.ConditionalDisaggregation), SkipTokens: s.DisaggregationTokens, SkipFraction: s.DisaggregationFraction,
		DecodeCredit: s.DecodeOverlapScoreCredit,
	}
}

// endLeg ends the prefill leg of a request whose prompt is computed, as package prefill does when the
// prefill worker has answered, and sends the request to its decode worker.
func (s *sim) endLeg(req int32) {
	state := &s.states[req]
	r := s.routers[state.router].router
	r.FirstToken(state.legID, router.SignTold)
	r.Free(state.legID)
	s.send(state.worker, req)
}

// transfer plans the transfer of a prompt's last tokens to the decode worker. A worker sends or
// receives one prompt at a time: the next one waits.
func (s *sim) transfer(req int32, tokens int) {
	state := &s.states[req]
	from, to := s.engines[state.leg], s.engines[state.worker]
	end := max(s.now, from.linkFree, to.linkFree) + s.transferTime(tokens).Nanoseconds()
	from.linkFree, to.linkFree = end, end
	s.transfers = append(s.transfers, time.Duration(end-s.now).Seconds())
	s.queue.plan(end, func() {
		from.release(req)
		s.publishRemoved(from.number)
		s.wake(from.number)
		last := s.reqs[req].Input - 1
		to.prefills = append(to.prefills, prefill{req: req, done: last, left: 1})
		s.wake(to.number)
	})
}

// checkSplit returns an error for settings that cannot be combined with prefill workers.
func (c *Scenario) checkSplit() error {
	var beside string
	switch {
	case c.PrefillWorkers == 0:
		return nil
	case c.PrefillWorkers >= c.Workers:
		return fmt.Errorf("prefill-workers is %d of %d workers, want at least one worker left for decode", c.PrefillWorkers, c.Workers)
	case c.Groups > 1:
		beside = "groups"
	case len(c.Changes) > 0:
		beside = "change"
	case c.Rule.Oracle:
		beside = "the rule " + c.Rule.Name
	default:
		return nil
	}
	return fmt.Errorf("prefill-workers cannot be combined with %s: leave out one of them", beside)
}
