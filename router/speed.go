// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// A worker's speed is how fast it computes prompts compared with the pool: 1 is as fast, 0.5 half
// as fast. Costs are divided by its power of .75. It follows from the times to first tokens that this router sees: the
// times that the engine's model expected at the decisions, divided by the times that there were.
// A wrong model of the engine changes no speed, because it is wrong for all workers. Only requests count
// before which no other one waited.
//
// # Invariants
//
//   - Sums decay by half in speedHalfLife. A worker without first tokens returns to its registered
//     speed (prefill_tps), or to that of the pool, so a slow worker is tried again.
//   - A speed within steadySpeed of the pool's is 1: the times vary by more than that by chance.
//   - One first token counts as between 1/mostSlow and mostSlow times its expectation.
type speed struct {
	expected, actual float64 // decayed sums, in s
}

const (
	speedHalfLife = 3 * time.Minute
	// speedPrior is the weight of the registered speed, in s of expected time.
	speedPrior = .5
	// steadySpeed is the ratio to the pool's speed, in either direction, below which a speed is 1.
	steadySpeed = 1.3
	mostSlow    = 10.
	// speedEvery is how old the speeds may be at a decision.
	speedEvery = 250 * time.Millisecond
	// leastExpected is the least time that counts: of shorter ones the network is a large part.
	leastExpected = 100 * time.Millisecond
)

// noteFirstToken compares the time to a first token with the expected one.
func (c *core) noteFirstToken(ord int, expected, actual time.Duration) {
	if c.conf.NoSpeeds || expected < leastExpected {
		return
	}
	e, s := expected.Seconds(), &c.entries[ord].speed
	s.expected += e
	s.actual += min(max(actual.Seconds(), e/mostSlow), e*mostSlow)
}

// refreshSpeeds applies new registrations, the first tokens since the last call, and the passing of time.
func (c *core) refreshSpeeds(now time.Time) {
	passed := now.Sub(c.speedsAt)
	if passed < speedEvery && !c.newSpeeds || c.conf.NoSpeeds {
		return
	}
	c.speedsAt, c.newSpeeds = now, false
	f := math.Exp2(-max(0, passed).Seconds() / speedHalfLife.Seconds())
	for _, ord := range c.order {
		s := &c.entries[ord].speed
		s.expected *= f
		s.actual *= f
	}
	c.setSpeeds()
}

// setSpeeds computes the speeds of all workers from the sums.
func (c *core) setSpeeds() {
	typical := c.median(func(e *entry) float64 { return e.info.PrefillThroughput })
	registered := func(e *entry) float64 {
		if e.info.PrefillThroughput == 0 {
			return 1
		}
		return e.info.PrefillThroughput / typical
	}
	// How much longer than expected prompts take in the pool, for the registered speeds.
	slowness := cmp.Or(c.median(func(e *entry) float64 { return registered(e) * e.speed.actual / max(e.speed.expected, 1e-9) }), 1)
	for _, ord := range c.order {
		e := &c.entries[ord]
		prior := registered(e)
		v := prior * slowness * (e.speed.expected + speedPrior) / (prior*e.speed.actual + speedPrior*slowness)
		if v < steadySpeed && v > 1/steadySpeed {
			v = 1
		}
		e.properties.Speed = v
	}
}

// median returns the median over the workers for which a value is known, 0 if there are none. Values of 0
// are unknown.
func (c *core) median(value func(e *entry) float64) float64 {
	known := c.values[:0]
	for _, ord := range c.order {
		if v := value(&c.entries[ord]); v > 0 {
			known = append(known, v)
		}
	}
	c.values = known
	if len(known) == 0 {
		return 0
	}
	slices.Sort(known)
	return known[(len(known)-1)/2]
}

// expectedTTFT is the time to the first token that a booking expects, 0 if it tells nothing about the
// worker's speed: the request waits for others, the candidate is a router group, or prefill does not
// count.
func expectedTTFT(d *Decision, in *scorer.Input) time.Duration {
	if in.Members > 0 || in.PendTokens > 0 || !d.Settings.TrackPrefill {
		return 0
	}
	return time.Duration(d.EstimatedTTFT * float64(time.Millisecond))
}
