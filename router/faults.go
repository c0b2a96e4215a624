// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"slices"
	"time"
)

// Fault is something wrong with a worker that a person must mend, as /v1/workers, `kvroute doctor`, the
// dashboard and a metric show it.
type Fault struct {
	What string `json:"what"` // one of the names in docs/workers.md, such as "block_size"
	Text string `json:"text"` // a sentence: what was found, what was expected, what to change
	// Since is when the fault began, if its source knows; otherwise when [Router.SetFaults] got it first.
	Since time.Time `json:"since,omitzero"`
}

// maxFaults limits the faults of one source for one worker.
const maxFaults = 16

// SetFaults replaces the faults that a source has found on a worker. A source is a part of the program that
// judges workers; each source replaces only its own faults. Faults beyond 16 are dropped. SetFaults does
// nothing if the worker is unknown. Removing the worker removes its faults. It may be called by any number of
// goroutines.
func (r *Router) SetFaults(id uint64, source string, faults []Fault) {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	if r.owners[id] != nil {
		r.setFaultsLocked(id, source, faults)
	}
}

func (r *Router) setFaultsLocked(id uint64, source string, faults []Fault) {
	if len(faults) == 0 {
		delete(r.faults[id], source)
		return
	}
	if r.faults[id] == nil {
		r.faults[id] = make(map[string][]Fault)
	}
	before, now := r.faults[id][source], slices.Clone(faults[:min(len(faults), maxFaults)])
	for i := range now {
		if f := &now[i]; f.Since.IsZero() {
			f.Since = r.conf.Now()
			if at := slices.IndexFunc(before, func(b Fault) bool { return b.What == f.What }); at >= 0 {
				f.Since = before[at].Since
			}
		}
	}
	r.faults[id][source] = now
}

// compareFaults orders faults: those that explain others come first, then the names count, then the texts.
func compareFaults(a, b Fault) int {
	explains := func(f Fault) int { return slices.Index([]string{"no_response", "silent"}, f.What) }
	return cmp.Or(cmp.Compare(explains(b), explains(a)), cmp.Compare(a.What, b.What), cmp.Compare(a.Text, b.Text))
}

// faultsLocked returns the faults of a worker, in any order.
func (r *Router) faultsLocked(id uint64) (all []Fault) {
	for _, faults := range r.faults[id] {
		all = append(all, faults...)
	}
	return all
}
