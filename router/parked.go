// SPDX-License-Identifier: Apache-2.0

package router

import "github.com/kvroute/kvroute/indexer"

// ParkedEvent is an event that waits for the one that stores its blocks' parent.
type ParkedEvent struct {
	Worker Worker
	Event  indexer.Event
}

// ParkedEvents returns the events that wait, of each worker in the order in which they
// are to be applied. A [Router.Dump] has nothing of them, so whoever says that it is
// what the events up to some number make needs these, too.
func (r *Router) ParkedEvents() (all []ParkedEvent) {
	r.fleet.Lock() // nobody applies an event meanwhile
	defer r.fleet.Unlock()
	for _, p := range r.pools {
		if p.known == nil {
			continue
		}
		waiting := p.known.events.Load().parked.Waiting()
		p.mu.Lock()
		for _, ord := range p.core.order {
			for _, ev := range waiting[ord] {
				all = append(all, ParkedEvent{p.core.entries[ord].worker, ev})
			}
		}
		p.mu.Unlock()
	}
	return all
}
