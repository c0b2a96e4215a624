// SPDX-License-Identifier: Apache-2.0

package router

import (
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// workspace is the memory of one decision. It is the request's and not the pool's, so
// that it stays near the processor that the request is on: what processors share
// must travel between them while others wait for the pool's lock.
type workspace struct {
	considered

	request    scorer.Request
	verdicts   []Exclusion // along core.order
	candidates []int
	eligibles  int // of these and inputs, before a session left but one
}

// considered is what a decision knew of each worker of its pool.
type considered struct {
	workers []seen         // in worker order; filled if somebody wants to know
	inputs  []scorer.Input // first those of the candidates, in worker order
	costs   []float64      // of the candidates
}

// copy makes c the same as from, in its own memory.
func (c *considered) copy(from *considered) {
	c.workers = append(c.workers[:0], from.workers...)
	c.inputs = append(c.inputs[:0], from.inputs...)
	c.costs = append(c.costs[:0], from.costs...)
}

// seen is a worker in a decision.
type seen struct {
	worker   Worker
	info     *WorkerInfo // replaced, never changed
	excluded Exclusion
	input    int // its place in inputs
	reported int // blocks in use by the engine's own report
	foreign  Foreign
	age      time.Duration // of a group's summary
	probed   bool
}

// list names the workers for people.
func (c *considered) list(d *Decision) []Candidate {
	all := make([]Candidate, 0, len(c.workers))
	var chances []float64
	if d.Policy != "" && d.Settings.Temperature > 0 {
		chances = make([]float64, len(c.costs))
		scorer.Probabilities(c.costs, d.Settings.Temperature, chances)
	}
	for i := range c.workers {
		w := &c.workers[i]
		in := &c.inputs[w.input]
		to := Candidate{
			Worker: w.worker, WorkerName: w.info.Name, Address: w.info.rankAddress(w.worker.DPRank),
			OverlapBlocks: in.OverlapBlocks, HostBlocks: in.HostBlocks, DiskBlocks: in.DiskBlocks,
			PendTokens: in.PendTokens, ActiveRequests: in.ActiveRequests, WaitingRequests: in.WaitingRequests, DecodeTokens: in.DecodeTokens,
			ActiveBlocks: in.ActiveBlocks, AdditionalBlocks: in.AdditionalBlocks, ReportedBlocks: w.reported,
			KVUse: in.KVUse, TotalBlocks: w.info.TotalKVBlocks, MaxRequests: in.MaxRequests, MaxBatchedTokens: in.MaxBatchedTokens,
			CPU: in.CPU, DecodeOnly: in.DecodeOnly, TaintWeight: in.TaintWeight, Excluded: w.excluded,
		}
		if f := w.foreign; f != (Foreign{}) {
			to.Foreign = &f
		}
		if to.Group = w.info.Group; to.Group != "" {
			to.Members, to.SummaryAge, to.Probed = in.Members, w.age, w.probed
		}
		if w.excluded == "" {
			to.Cost = c.costs[w.input]
			if chances != nil {
				to.Probability = chances[w.input]
			}
		}
		all = append(all, to)
	}
	return all
}
