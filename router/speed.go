// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// A worker's speed is how fast it computes prompts compared with the pool: 1 is as fast, 0.5 half
// as fast. Costs are divided by speed^0.75. The speed follows from the times to first tokens that this router
// sees: the times that the model of the engine predicted at the decisions, divided by the actual times.
// A wrong model of the engine changes no speed, because it is wrong for all workers. Only requests count
// that did not wait behind other requests.
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
	// leastExpected is the least expected time that counts: the network is a large part of shorter times.
	leastExpected = 100 * time.Millisecond
)

// speeds computes the speeds of a pool's workers.
type speeds struct {
	at      time.Time // when they were computed last
	changed bool      // a registration changes them
	values  []float64 // scratch memory
}

// note compares the time to a first token with the expected one.
func (s *speed) note(expected, actual time.Duration) {
	if expected < leastExpected {
		return
	}
	e := expected.Seconds()
	s.expected += e
	s.actual += min(max(actual.Seconds(), e/mostSlow), e*mostSlow)
}

// refresh applies new registrations, the first tokens since the last call, and the passing of time.
func (s *speeds) refresh(now time.Time, workers *ranks) {
	passed := now.Sub(s.at)
	s.at, s.changed = now, false
	f := math.Exp2(-max(0, passed).Seconds() / speedHalfLife.Seconds())
	for _, ord := range workers.order {
		v := &workers.entries[ord].speed
		v.expected *= f
		v.actual *= f
	}
	s.set(workers)
}

// set computes the speeds of all workers from the sums.
func (s *speeds) set(workers *ranks) {
	typical := s.median(workers, func(e *entry) float64 { return e.info.PrefillThroughput })
	registered := func(e *entry) float64 {
		if e.info.PrefillThroughput == 0 {
			return 1
		}
		return e.info.PrefillThroughput / typical
	}
	// How much longer than expected prompts take in the pool, for the registered speeds.
	slowness := cmp.Or(s.median(workers, func(e *entry) float64 {
		return registered(e) * e.speed.actual / max(e.speed.expected, 1e-9)
	}), 1)
	for _, ord := range workers.order {
		e := &workers.entries[ord]
		prior := registered(e)
		v := prior * slowness * (e.speed.expected + speedPrior) / (prior*e.speed.actual + speedPrior*slowness)
		if v < steadySpeed && v > 1/steadySpeed {
			v = 1
		}
		e.properties.Speed = v
	}
}

// median returns the median of the workers' values. It leaves out values of 0, which are unknown, and
// returns 0 if all are unknown.
func (s *speeds) median(workers *ranks, value func(e *entry) float64) float64 {
	known := s.values[:0]
	for _, ord := range workers.order {
		if v := value(&workers.entries[ord]); v > 0 {
			known = append(known, v)
		}
	}
	s.values = known
	if len(known) == 0 {
		return 0
	}
	slices.Sort(known)
	return known[(len(known)-1)/2]
}
