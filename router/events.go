// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// WantsEvents says whether events of the workers' caches can change a decision.
func (r *Router) WantsEvents() bool { return r.conf.indexed() && !r.conf.NoEvents }

// ExpireEvents drops events that have waited 30 s for the blocks before theirs, and
// returns whose they were, in worker order: what these hold is not known for
// certain any more. It is to be called every few seconds.
func (r *Router) ExpireEvents() (whose []Worker) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	for _, p := range r.pools {
		workers, blocks := p.expireEvents(r.conf.Now())
		r.metrics.applied(indexer.Outcome{Orphan: blocks})
		whose = append(whose, workers...)
	}
	slices.SortFunc(whose, Worker.Compare)
	return whose
}

// SetEventState says how far what the events tell of a worker can be trusted: "ok",
// "partial" or "suspect". It is told on by [Router.Workers]. Of a worker that is
// not known it is nothing.
func (r *Router) SetEventState(w Worker, state string) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[w.ID]
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if ord, known := p.core.find(w); known {
		if state == "ok" {
			state = ""
		}
		p.core.entries[ord].events = state
	}
}
