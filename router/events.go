// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/indexer"
)

// WantsEvents says whether events of the workers' caches can change a decision.
func (r *Router) WantsEvents() bool { return r.conf.indexed() && !r.conf.NoEvents }

// ExpireEvents drops events that have waited 30 s for their parent blocks, and returns their
// workers, in worker order: the caches of these are not known exactly any more. Call it
// every few seconds.
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

// SetEventState sets how well the cache of a worker is known. [Router.Workers] shows it. An unknown worker
// is ignored.
func (r *Router) SetEventState(w Worker, state indexer.State) {
	if state == indexer.StateOK {
		state = ""
	} else {
		r.confirms.Interrupt(confirm.Worker{ID: w.ID, Rank: w.DPRank})
	}
	r.reported(w, func(c *core, _ time.Time, ord int) bool {
		c.entries[ord].events = state
		return true
	})
}
