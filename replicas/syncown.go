// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"slices"
	"sync"

	"github.com/kvroute/kvroute/router"
)

// syncPending is the limit of changes that wait to be sent.
const syncPending = 100_000

// ownRequests are the requests in flight of this replica, and their changes that wait to
// be sent. Its methods may be called by any number of goroutines.
//
// Invariant: the list of one moment and all changes since then result in the list of a
// later moment. If changes are dropped, a message number is skipped, so that peers request
// the list.
type ownRequests struct {
	id      uint64
	wake    chan struct{} // holds a token if changes wait
	metrics *syncMetrics

	mu sync.Mutex
	// mu guards the fields below.
	requests map[string]*ownRequest
	pending  []syncEvent
	skipped  bool // changes before the pending ones were dropped
}

// ownRequest is a request in flight, as in a list.
type ownRequest struct {
	router.Change
	started bool // it has its first token
}

// change notes a change of the router's requests.
func (o *ownRequests) change(c *router.Change) {
	o.mu.Lock()
	defer o.mu.Unlock()
	e := syncEvent{router: o.id, Change: *c}
	if c.Owner != 0 { // the first token of a peer's request: the peer publishes it to all
		e.router = c.Owner
	} else if !o.note(&e) {
		return
	}
	if len(o.pending) >= syncPending {
		o.metrics.drops.Add(len(o.pending), "change")
		clear(o.pending)
		o.pending, o.skipped = o.pending[:0], true
	}
	if len(o.pending) == 0 {
		signal(o.wake)
	}
	o.pending = append(o.pending, e)
}

// note applies an event to the list, and sets its worker. It returns false if nothing has
// changed.
func (o *ownRequests) note(e *syncEvent) bool {
	own := o.requests[e.ID]
	if e.Kind == router.SlotTaken {
		if own != nil || e.ID == "" || len(e.ID) > maxSyncID {
			return false
		}
		e.Sequence = slices.Clone(e.Sequence)
		o.requests[e.ID] = &ownRequest{Change: e.Change}
		return true
	}
	if own == nil {
		return false // the request never had a slot
	}
	switch e.Kind { //nolint:exhaustive // a slot taken is above
	case router.FirstToken:
		if own.started {
			return false
		}
		own.started = true
	case router.PrefillFailed:
		own.PrefillUntracked, own.CachedTokens = false, 0
	case router.SlotMoved:
		own.Worker, own.CachedTokens, own.OverlapBlocks = e.Worker, e.CachedTokens, 0
	case router.SlotFreed:
		delete(o.requests, e.ID)
	}
	e.Worker = own.Worker
	return true
}

// ownState is the state to publish at one moment.
type ownState struct {
	changes []syncEvent
	skipped bool         // changes before these were dropped
	active  int          // requests in flight after the changes
	list    []ownRequest // these requests, if requested
}

// take returns the waiting changes. The memory is reused for the next ones.
func (o *ownRequests) take(memory []syncEvent, withList bool) ownState {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := ownState{changes: o.pending, skipped: o.skipped, active: len(o.requests)}
	o.pending, o.skipped = memory, false
	if withList {
		s.list = make([]ownRequest, 0, len(o.requests))
		for _, own := range o.requests {
			s.list = append(s.list, *own)
		}
	}
	return s
}

func (o *ownRequests) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.requests)
}

// signal puts a token into a channel with room for one, unless it has one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
