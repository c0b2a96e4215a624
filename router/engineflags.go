// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"slices"
)

// faultEngineFlags is the name of the fault that a worker's engine runs with other flags for prompts than kvroute's
// settings, or than another worker of the model. faultsOfFlags is its source for [Router.SetFaults].
const (
	faultEngineFlags = "engine_flags"
	faultsOfFlags    = "flags"
)

// engineLocked tells a model how its engines make prompts: the last version that a worker registered, and the flags
// that the worker with the lowest id reports. Workers with other flags, or with flags that contradict the model's
// settings, get a fault.
func (r *Router) engineLocked(t *target) {
	if t.card == nil || t.card.Prompts == nil {
		return
	}
	var workers []*WorkerInfo
	for _, p := range t.pools {
		if p.version != "" {
			t.card.Prompts.SetEngineVersion(p.version)
		}
		p.each(func(_ int, e *entry) {
			if e.worker.DPRank == e.info.DPStart && (e.info.EngineFlags != nil || r.faults[e.info.ID][faultsOfFlags] != nil) {
				workers = append(workers, e.info)
			}
		})
	}
	slices.SortFunc(workers, func(a, b *WorkerInfo) int { return cmp.Compare(a.ID, b.ID) })
	var first *WorkerInfo
	for _, w := range workers {
		var faults []Fault
		switch f := w.EngineFlags; {
		case f == nil:
		case first == nil:
			first = w
			fallthrough
		case *f == *first.EngineFlags:
			if text := t.card.Prompts.Contradicts(f); text != "" {
				faults = []Fault{{faultEngineFlags, text}}
			}
		default:
			faults = []Fault{{faultEngineFlags, fmt.Sprintf(
				"its engine runs with %s, and worker %q of the same model with %s: kvroute makes the prompts of both as the latter does; start both with the same flags",
				f, cmp.Or(first.Name, fmt.Sprint(first.ID)), first.EngineFlags)}}
		}
		r.setFaultsLocked(w.ID, faultsOfFlags, faults)
	}
	if first == nil {
		t.card.Prompts.SetEngineFlags(nil)
		return
	}
	t.card.Prompts.SetEngineFlags(first.EngineFlags)
}
