// SPDX-License-Identifier: Apache-2.0

package router

import (
	"github.com/kvroute/kvroute/scorer"
)

// considered is what one decision knew of each worker of its pool. It is handed on
// from the core to who asked and to the ring by exchange, so that a decision copies
// nothing that is seldom looked at.
type considered struct {
	workers []seen         // in worker order
	inputs  []scorer.Input // first those of the candidates, in worker order
	costs   []float64      // of the candidates
}

// seen is a worker in a decision.
type seen struct {
	worker   Worker
	info     *WorkerInfo // replaced, never changed
	excluded Exclusion
	input    int // its place in inputs
	reported int // blocks in use by the engine's own report
}

// candidates lists the workers for people.
func (c *considered) candidates(d *Decision) []Candidate {
	list := make([]Candidate, 0, len(c.workers))
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
		if w.excluded == "" {
			to.Cost = c.costs[w.input]
			if chances != nil {
				to.Probability = chances[w.input]
			}
		}
		list = append(list, to)
	}
	return list
}
