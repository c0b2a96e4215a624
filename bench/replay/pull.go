// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
	engines "github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// With [Scenario.Pull] each block of a worker's cache is in its host memory, too, and another worker may copy it from
// there. The router names the source as in production. The copy begins when the request reaches its worker, which puts
// the request into its queue when the blocks have come. A worker sends or receives one copy at a time.
//
// Left out: the time to make a session between two workers (about 6 s in one report), the load that copies put on the
// engines, host memory that is larger than the cache, and sources that fail.

// engineName is the engine of the workers: one that copies blocks.
const engineName = engines.VLLM

// pullConfig is the routers' configuration of pulls.
func (s *sim) pullConfig() router.PullConfig {
	return router.PullConfig{
		On: s.Pull, Delay: s.PullDelay, PerToken: s.transferTime(1), ComputePerToken: time.Duration(s.Engine.Token * 1e6),
		MinTokens: s.PullMinTokens, Limit: s.PullLimit,
	}
}

// pullSource is the address at which a worker serves pulls.
func (s *sim) pullSource(w int) (a netip.AddrPort) {
	if s.Pull {
		a = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, byte(w >> 8), byte(w)}), 5710)
	}
	return a
}

// transferTime is the time in which a worker sends tokens.
func (s *sim) transferTime(tokens int) time.Duration {
	return time.Duration(math.Round(float64(tokens) * float64(s.KVBytesPerToken) / s.TransferRate)) // 1 GB/s is 1 byte/ns
}

// publishHost sends an event about host memory that equals an event of a worker's cache.
func (s *sim) publishHost(w int, ev indexer.Event) {
	if s.Pull && ev.Tier == indexer.Device {
		ev.Tier = indexer.HostPinned
		s.publish(w, ev)
	}
}

// pull copies blocks of a request to its worker, and then sends the request there.
func (s *sim) pull(req int32, source router.Worker) {
	state, blocks := &s.states[req], s.reqs[req].Blocks
	w := state.worker
	from, to := s.engines[int(source.ID-s.id(0))], s.engines[w]
	have := to.cache.leading(blocks)
	n := from.cache.leading(blocks)
	if n <= have {
		s.send(w, req)
		return
	}
	end := max(s.now+s.PullDelay.Nanoseconds(), from.linkFree, to.linkFree) + s.transferTime((n-have)*to.block).Nanoseconds()
	from.linkFree, to.linkFree = end, end
	s.pulls = append(s.pulls, float64(end-s.now)/1e9)
	life := to.started
	s.queue.plan(end, func() {
		if !to.present || to.started != life { // the worker left or restarted, and its requests are routed again
			s.free(req)
			s.retried++
			s.route(req)
			return
		}
		s.adopt(w, blocks[:n])
		s.send(w, req)
	})
}

// adopt caches the leading blocks of a prompt, if there is room.
func (s *sim) adopt(w int, blocks []int32) {
	c := s.engines[w].cache
	if c.live+c.reserved+c.missing(blocks) > c.capacity {
		return
	}
	c.acquire(blocks)
	known := c.computed(blocks)
	c.trim(c.capacity)
	s.publishBlocks(w, blocks, known)
	c.release(blocks)
}

// pullCost is a rule that knows the price of a pull: a candidate that lacks a part of the prompt pays at most the time
// of a pull for it, so that an idle worker far from the cache may win. No router of `kvroute serve` has this cost.
func (c *Scenario) pullCost() scorer.Rule {
	perToken := float64(c.KVBytesPerToken) / c.TransferRate / 1e6 // ms
	delay := float64(c.PullDelay) / float64(time.Millisecond)
	settings := c.Rule.Settings
	settings.Engine, settings.KVRead = c.Engine, c.Engine.KVRead()
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		most := 0
		for i := range in {
			most = max(most, in[i].OverlapBlocks)
		}
		priced := slices.Clone(in)
		for i := range priced {
			blocks := most - in[i].OverlapBlocks
			tokens := float64(blocks * r.BlockSize)
			// The time that a pull saves, in blocks that the worker then need not compute.
			saved := tokens - (delay+tokens*perToken)/c.Engine.Token
			if blocks*r.BlockSize >= c.PullMinTokens && saved > 0 {
				priced[i].OverlapBlocks += int(saved) / max(1, r.BlockSize)
			}
		}
		return settings.Choose(r, priced, costs)
	}
}

// checkPull returns an error for settings that cannot be combined with pulls.
func (c *Scenario) checkPull() error {
	switch {
	case c.Pull && c.Hybrid != "":
		return errors.New("pull cannot be combined with hybrid: copies have no blocks of side groups")
	case c.Pull && (c.PrefillWorkers > 0 || c.Groups > 1 || c.Rule.Oracle || c.Approximate):
		return errors.New("pull cannot be combined with prefill-workers, groups, no-kv-events and the rule oracle: leave out one of them")
	case c.PullCost && (!c.Pull || c.Rule.Choose != nil):
		return errors.New("pull-cost needs pull, and a rule with a cost of kvroute")
	}
	return nil
}
