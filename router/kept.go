// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// Decision returns a kept decision by its request id, this router's or the client's.
func (r *Router) Decision(id string) (Decision, bool) { return r.kept.get(id) }

// Decisions returns up to n kept decisions, newest first.
func (r *Router) Decisions(n int) []Decision { return r.kept.recent(n) }

// keptDecisions is a ring of the latest booked decisions. A request takes a number before
// it is decided, and with that a place. The place's memory is used again, so a full ring
// allocates nothing. A refused request leaves its place as it is.
//
// Nothing finds a decision by its id but a search: people ask now and then, and an index
// would cost every request.
type keptDecisions struct {
	last atomic.Uint64 // number of the latest request

	mu sync.Mutex
	// mu guards the elements of ring.
	ring []keptDecision
}

// keptDecision is a decision with what it saw of each worker of its pool.
type keptDecision struct {
	number   uint64 // 0 = none
	decision Decision
	workers  []seenWorker
}

func newKept(size int) *keptDecisions { return &keptDecisions{ring: make([]keptDecision, size)} }

// next returns the number of a new request.
func (k *keptDecisions) next() uint64 { return k.last.Add(1) }

// add keeps a copy of a decision.
func (k *keptDecisions) add(number uint64, d *Decision, workers []seenWorker) {
	if len(k.ring) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	at := &k.ring[number%uint64(len(k.ring))]
	if at.number > number {
		return // this request took so long that a later one has the place
	}
	at.number, at.decision = number, *d
	at.workers = append(at.workers[:0], workers...)
}

// change changes a kept decision, if it is still there.
func (k *keptDecisions) change(number uint64, change func(*Decision)) {
	if len(k.ring) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if at := &k.ring[number%uint64(len(k.ring))]; at.number == number {
		change(&at.decision)
	}
}

// get returns the latest decision with an id.
func (k *keptDecisions) get(id string) (Decision, bool) {
	for _, number := range k.numbers() {
		d, workers, ok := k.copy(number, func(d *Decision) bool { return d.ID == id || id != "" && d.Labels.RequestID == id })
		if ok {
			d.Candidates = candidates(&d, workers)
			return d, true
		}
	}
	return Decision{}, false
}

// recent returns up to n decisions, newest first.
func (k *keptDecisions) recent(n int) []Decision {
	all := []Decision{}
	for _, number := range k.numbers() {
		if len(all) >= n {
			break
		}
		if d, workers, ok := k.copy(number, func(*Decision) bool { return true }); ok {
			d.Candidates = candidates(&d, workers)
			all = append(all, d)
		}
	}
	return all
}

// numbers returns the numbers of the kept decisions, the newest first.
func (k *keptDecisions) numbers() (all []uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range k.ring {
		if number := k.ring[i].number; number > 0 {
			all = append(all, number)
		}
	}
	slices.SortFunc(all, func(a, b uint64) int { return cmp.Compare(b, a) })
	return all
}

// copy returns a copy of the decision with a number, if it is there and meets a condition.
func (k *keptDecisions) copy(number uint64, meets func(*Decision) bool) (d Decision, workers []seenWorker, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	at := &k.ring[number%uint64(len(k.ring))]
	if at.number != number || !meets(&at.decision) {
		return d, nil, false
	}
	return at.decision, slices.Clone(at.workers), true
}

// seenWorker is a worker as a decision saw it.
type seenWorker struct {
	worker   Worker
	info     *WorkerInfo // replaced, never changed
	input    scorer.Input
	cost     float64
	excluded Exclusion // empty of candidates
	reported int       // blocks in use by the engine's own report
	foreign  Foreign
	age      time.Duration // of a group's summary
	probed   bool
}

// candidates describes the workers that a decision saw.
func candidates(d *Decision, workers []seenWorker) []Candidate {
	all := make([]Candidate, 0, len(workers))
	var costs []float64
	for i := range workers {
		w := &workers[i]
		to := Candidate{
			Worker: w.worker, WorkerName: w.info.Name, Address: w.info.rankAddress(w.worker.DPRank), Group: w.info.Group,
			Input: w.input, ReportedBlocks: w.reported, TotalBlocks: w.info.TotalKVBlocks, Cost: w.cost, Excluded: w.excluded,
		}
		if w.foreign != (Foreign{}) {
			to.Foreign = &w.foreign
		}
		if to.Group != "" {
			to.SummaryAge, to.Probed = w.age, w.probed
		}
		if w.excluded == "" {
			costs = append(costs, w.cost)
		}
		all = append(all, to)
	}
	if d.Policy == "" || d.Settings.Temperature == 0 {
		return all
	}
	chances := make([]float64, len(costs))
	scorer.Probabilities(costs, d.Settings.Temperature, chances)
	for i := range all {
		if all[i].Excluded == "" {
			all[i].Probability, chances = chances[0], chances[1:]
		}
	}
	return all
}
