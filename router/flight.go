// SPDX-License-Identifier: Apache-2.0

package router

import "sync"

// flights holds the requests in flight: from the decision to the end of the response.
type flights struct {
	mu sync.Mutex
	// mu guards the fields below.
	byID   map[string]*flight
	vacant []*flight // kept for later requests
}

// maxVacant bounds the memory that is kept for later requests.
const maxVacant = 1 << 16

// flight is what the router remembers of a request in flight.
type flight struct {
	pool    *pool  // that has the request's slot; nil of a flight that is not in use
	number  uint64 // of the decision in the ring: no two flights have the same
	first   Worker // that the request was booked on
	second  Worker // second choice
	held    int32  // blocks of the prompt that the second choice holds
	session uint64 // to be bound at the first token; 0 = none
	anew    bool   // bind the session even if it is bound by then
	name    string // of the session, if other replicas are told of it
	guess   guess  // of cached blocks, until the first token confirms it
	peer    uint64 // router replica whose request it is; 0 = this one
	// lapses says that the request ends with its slot, whatever takes that away: it has its
	// slot, and nobody need free it.
	lapses bool
}

// A ticket finds a flight without a look-up by id. If the flight has another number than
// the ticket, the request has ended.
type ticket struct {
	flight *flight
	number uint64
}

func newFlights() *flights { return &flights{byID: make(map[string]*flight)} }

// begin returns false if a request with this id is in flight.
func (f *flights) begin(id string, fl flight) (ticket, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byID[id] != nil {
		return ticket{}, false
	}
	var to *flight
	if last := len(f.vacant) - 1; last >= 0 {
		to, f.vacant = f.vacant[last], f.vacant[:last]
	} else {
		to = new(flight)
	}
	*to = fl
	f.byID[id] = to
	return ticket{to, fl.number}, true
}

// change replaces what is known of a request. It returns false if the request has ended.
func (f *flights) change(t ticket, fl flight) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.flight == nil || t.flight.number != t.number {
		return false
	}
	*t.flight = fl
	return true
}

// holds reports whether a request is still in flight.
func (f *flights) holds(t ticket) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return t.flight.number == t.number
}

// get returns what is known of a request; its pool is nil if it is not in flight.
func (f *flights) get(id string) (flight, ticket) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl := f.byID[id]; fl != nil {
		return *fl, ticket{fl, fl.number}
	}
	return flight{}, ticket{}
}

// confirm is get at the first token of a request: what was guessed to be cached is.
func (f *flights) confirm(id string) flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl := f.byID[id]
	if fl == nil {
		return flight{}
	}
	fl.guess = guess{}
	return *fl
}

// end takes a request of a replica out of flight and returns what was known of it.
func (f *flights) end(id string, peer uint64) flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl := f.byID[id]
	if fl == nil || fl.peer != peer {
		return flight{}
	}
	return f.landLocked(id, fl)
}

// endOf takes the request with a ticket out of flight, unless it has ended.
func (f *flights) endOf(id string, t ticket) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.flight.number == t.number {
		f.landLocked(id, t.flight)
	}
}

// endAll takes all requests of a replica out of flight.
func (f *flights) endAll(peer uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, fl := range f.byID {
		if fl.peer == peer {
			f.landLocked(id, fl)
		}
	}
}

// sweep takes requests out of flight that have lost their slot, by time or with their
// worker, if nobody need free them. It returns those of this replica.
func (f *flights) sweep() (ended []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, fl := range f.byID {
		// This takes a pool's lock under ours. Nobody takes them in the other order.
		if fl.lapses && !fl.pool.holds(id) && f.landLocked(id, fl).peer == 0 {
			ended = append(ended, id)
		}
	}
	return ended
}

func (f *flights) landLocked(id string, fl *flight) (was flight) {
	was, *fl = *fl, flight{}
	delete(f.byID, id)
	if len(f.vacant) < maxVacant {
		f.vacant = append(f.vacant, fl)
	}
	return was
}
