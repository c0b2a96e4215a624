// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// Decision returns a kept decision by its request id, this router's or the client's.
func (r *Router) Decision(id string) (Decision, bool) {
	found := r.kept.find(1, true, func(d *Decision) bool { return d.ID == id || id != "" && d.Labels.RequestID == id })
	if len(found) == 0 {
		return Decision{}, false
	}
	return found[0], true
}

// Decisions returns up to n kept decisions, newest first.
func (r *Router) Decisions(n int) []Decision {
	return r.kept.find(n, true, func(*Decision) bool { return true })
}

// BriefDecisions returns the same as Decisions, without candidates: its cost does not depend on
// the number of workers.
func (r *Router) BriefDecisions(n int) []Decision {
	return r.kept.find(n, false, func(*Decision) bool { return true })
}

// keptDecisions is a ring of the latest booked decisions. A request takes a number, and
// with it a place, before it is decided. The place's memory is used again, so a full ring
// allocates nothing. A refused request leaves its place as it is.
//
// A decision can be found by its id only by a search: such queries are rare, and an index
// would cost every request.
type keptDecisions struct {
	last atomic.Uint64 // number of the latest request

	mu sync.Mutex
	// mu guards the elements of ring.
	ring []keptDecision
}

type keptDecision struct {
	number uint64 // 0 = none
	Decision
}

// next returns the number of a new request.
func (k *keptDecisions) next() uint64 { return k.last.Add(1) }

// add keeps a copy of a decision and of the candidates that it saw.
func (k *keptDecisions) add(number uint64, d *Decision, seen []Candidate) {
	if len(k.ring) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	at := &k.ring[number%uint64(len(k.ring))]
	if at.number > number {
		return // this request took so long that a later one has the place
	}
	room := at.Candidates[:0]
	at.number, at.Decision = number, *d
	at.Candidates = append(room, seen...)
}

// change calls a function with a kept decision, if it is still there.
func (k *keptDecisions) change(number uint64, change func(*Decision)) {
	if len(k.ring) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if at := &k.ring[number%uint64(len(k.ring))]; at.number == number {
		change(&at.Decision)
	}
}

// find returns up to n decisions that meet a condition, newest first, with copies of their
// candidates or without candidates.
func (k *keptDecisions) find(n int, candidates bool, meets func(*Decision) bool) []Decision {
	found := []Decision{} // an empty list in JSON, not null
	k.each(func(d *Decision) bool {
		if len(found) < n && meets(d) {
			one := d.brief()
			if candidates {
				one.Candidates, one.Omitted, one.Prefill = slices.Clone(d.Candidates), d.Omitted, d.Prefill
			}
			found = append(found, one)
		}
		return len(found) < n
	})
	return found
}

// each visits the decisions, newest first, until visit returns false. It holds the lock for one
// decision at a time, because decisions wait for it.
func (k *keptDecisions) each(visit func(*Decision) bool) {
	var numbers []uint64
	k.mu.Lock()
	for i := range k.ring {
		if number := k.ring[i].number; number > 0 {
			numbers = append(numbers, number)
		}
	}
	k.mu.Unlock()
	slices.Sort(numbers)
	for _, number := range slices.Backward(numbers) {
		more := true
		if k.change(number, func(d *Decision) { more = visit(d) }); !more {
			return
		}
	}
}

// brief returns the decision and its prefill leg without candidates.
func (d Decision) brief() Decision {
	d.Candidates, d.Omitted = nil, 0
	if d.Prefill != nil {
		leg := d.Prefill.brief() // other readers have the leg, too
		d.Prefill = &leg
	}
	return d
}

// keptCandidates bounds the candidates of a kept decision, so that the memory of kept decisions
// does not grow with the fleet.
const keptCandidates = 128

// explain records the inputs of the decision, before the booking changes them: for every worker
// of the pool, or in a larger pool for the candidates with the lowest costs if only the kept
// decision needs them.
func (c *core) explain(now time.Time, q *question, chosen int, d *Decision) {
	drawn := d.Policy != "" && d.Settings.Temperature > 0
	if drawn {
		c.chances = slices.Grow(c.chances[:0], len(c.costs))[:len(c.costs)]
		scorer.Probabilities(c.costs, d.Settings.Temperature, c.chances)
	}
	all, bound, equal := q.Explain || len(c.order) <= keptCandidates, 0., 0
	if !all {
		bound, equal = c.costBound()
	}
	c.seen = c.seen[:0]
	next := 0 // candidate, in the same order
	for i, ord := range c.order {
		at := next
		if at < len(c.candidates) && c.candidates[at] == ord {
			next++
		}
		switch {
		case all, at < next && at == chosen:
		case at == next, c.costs[at] > bound, c.costs[at] == bound && equal == 0:
			continue
		case c.costs[at] == bound:
			equal--
		}
		c.seen = append(c.seen, Candidate{})
		e, to := &c.entries[ord], &c.seen[len(c.seen)-1]
		to.Worker, to.WorkerName, to.Address = e.worker, e.info.Name, e.info.rankAddress(e.worker.DPRank)
		to.TotalBlocks, to.ReportedBlocks, to.Excluded = e.info.TotalKVBlocks, e.reported(now), c.verdicts[i]
		to.Foreign = c.foreign(now, e, q.tokens)
		if e.info.Group != "" {
			to.Group, to.SummaryAge, to.Probed = e.info.Group, e.group.age(now), to.Excluded == "" && q.probeOf(e) != nil
		}
		if to.Excluded != "" {
			c.load(now, ord, q.tokens, &to.Input)
			e.setKVUse(now, &to.Input)
			continue
		}
		if to.Input, to.Cost = c.inputs[at], c.costs[at]; !c.whole {
			c.complete(now, ord, q, d.Settings, &to.Input)
		}
		if d.Policy == scorer.Tokens || d.Policy == scorer.PredictedTTFT || d.Policy == scorer.Weighted {
			to.DecodeDelay = d.Settings.DecodeDelay(&c.request, &to.Input)
		}
		if drawn {
			to.Probability = c.chances[at]
		}
	}
	d.Omitted = len(c.order) - len(c.seen)
}

// costBound returns the highest of the lowest costs that are kept, and how many candidates
// with just this cost are kept.
func (c *core) costBound() (bound float64, equal int) {
	low := c.lowest[:0]
	for _, cost := range c.costs {
		if most := keptCandidates - 1; len(low) <= most || cost < low[most] {
			at, _ := slices.BinarySearch(low, cost)
			low = slices.Insert(low[:min(len(low), most)], at, cost)
		}
	}
	c.lowest = low
	bound = low[len(low)-1]
	below, _ := slices.BinarySearch(low, bound)
	return bound, len(low) - below
}
