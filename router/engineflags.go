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

// sameEngine reports whether two descriptions of a worker have the same version and flags of the engine.
func sameEngine(a, b *WorkerInfo) bool {
	return a.EngineVersion == b.EngineVersion && a.EngineFlags.Equal(b.EngineFlags)
}

// engineLocked tells a card how its engines make prompts: the version and the flags of the worker with the lowest id
// that has one. Workers with other flags, or with flags that contradict the card's settings, get a fault. pools are
// those of all models with the card.
func (r *Router) engineLocked(card *Card, pools []*pool) {
	var workers []*WorkerInfo
	versioned := new(WorkerInfo)
	for _, p := range pools {
		p.each(func(_ int, e *entry) {
			if e.info.EngineVersion != "" && (versioned.EngineVersion == "" || e.info.ID < versioned.ID) {
				versioned = e.info
			}
			if e.worker.DPRank == e.info.DPStart && (e.info.EngineFlags != nil || r.faults[e.info.ID][faultsOfFlags] != nil) {
				workers = append(workers, e.info)
			}
		})
	}
	card.Prompts.SetEngineVersion(versioned.EngineVersion)
	slices.SortFunc(workers, func(a, b *WorkerInfo) int { return cmp.Compare(a.ID, b.ID) })
	var first *WorkerInfo
	for _, w := range workers {
		var faults []Fault
		switch f := w.EngineFlags; {
		case f == nil:
		case first == nil:
			first = w
			fallthrough
		case f.Equal(first.EngineFlags):
			if text := card.Prompts.Contradicts(f); text != "" {
				faults = []Fault{{What: faultEngineFlags, Text: text}}
			}
		default:
			faults = []Fault{{What: faultEngineFlags, Text: fmt.Sprintf(
				"its engine runs with %s, and worker %q of the same model with %s: kvroute makes the prompts of both as the latter does; start both with the same flags",
				f, cmp.Or(first.Name, fmt.Sprint(first.ID)), first.EngineFlags)}}
		}
		if before := r.faults[w.ID][faultsOfFlags]; r.conf.Hooks.Flags != nil && (before == nil) != (faults == nil) {
			r.conf.Hooks.Flags(w.ID, before, faults)
		}
		r.setFaultsLocked(w.ID, faultsOfFlags, faults)
	}
	card.Prompts.SetEngineFlags(cmp.Or(first, new(WorkerInfo)).EngineFlags)
}
