// SPDX-License-Identifier: Apache-2.0

package router

import "github.com/kvroute/kvroute/indexer"

// ParkedEvent is an event that waits for an event that stores the parent of its blocks.
type ParkedEvent struct {
	Worker Worker
	Event  indexer.Event
}

// ParkedEvents returns the waiting events, of each worker in the order in which they are
// to be applied. A [Router.Dump] does not contain them, so a snapshot of all events up to
// a number needs both.
func (r *Router) ParkedEvents() (all []ParkedEvent) {
	r.fleet.Lock() // no event is applied meanwhile
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
