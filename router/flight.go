// SPDX-License-Identifier: Apache-2.0

package router

import (
	"hash/maphash"
	"sync"
)

// flights says which pool has the slot of each request in flight. It is in parts,
// each with a lock, so that requests seldom wait for each other here.
type flights struct {
	seed  maphash.Seed
	parts [64]part
}

type part struct {
	mu sync.Mutex
	// mu guards the fields below.
	byID   map[string]*flight
	vacant []*flight // to be used again
	_      [64]byte  // no two locks on one cache line
}

// maxVacant bounds the memory that is kept for flights to come.
const maxVacant = 1024

// flight is a request from its question to its end.
type flight struct {
	pool    *pool
	number  uint64 // of its decision in the ring
	first   Worker // that it was booked on
	second  Worker
	held    int32  // blocks of the prompt that the second choice holds
	session uint64 // to be bound at its first token; 0 = none
	anew    bool   // even if it is bound by then
	name    string // of the session, if others are told of it
	guess   guess  // until it is confirmed by the first token
	peer    uint64 // replica whose request it is; 0 = ours
	booked  bool   // known to have a slot, so that one without has lost it; only of requests that nobody owns
}

func newFlights() *flights {
	f := &flights{seed: maphash.MakeSeed()}
	for i := range f.parts {
		f.parts[i].byID = make(map[string]*flight)
	}
	return f
}

func (f *flights) part(id string) int {
	return int(maphash.String(f.seed, id) % uint64(len(f.parts)))
}

// ticket finds a flight without looking its id up. The number tells whether it has
// landed: then what it points to is another one's, or nobody's.
type ticket struct {
	part   int
	flight *flight
	number uint64
}

// begin returns false if the id is in flight already.
func (f *flights) begin(id string, fl flight) (t ticket, ok bool) {
	t.part, t.number = f.part(id), fl.number
	p := &f.parts[t.part]
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, exists := p.byID[id]; exists {
		return t, false
	}
	if last := len(p.vacant) - 1; last >= 0 {
		t.flight, p.vacant = p.vacant[last], p.vacant[:last]
	} else {
		t.flight = new(flight)
	}
	*t.flight = fl
	p.byID[id] = t.flight
	return t, true
}

// change replaces what is known of a request. It returns false if that has landed,
// whether or not its id has taken off again.
func (f *flights) change(t ticket, fl flight) bool {
	p := &f.parts[t.part]
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.flight.number != t.number {
		return false
	}
	*t.flight = fl
	return true
}

// holds says whether a ticket is good: its flight has not landed.
func (f *flights) holds(t ticket) bool {
	p := &f.parts[t.part]
	p.mu.Lock()
	defer p.mu.Unlock()
	return t.flight.number == t.number
}

// replace is change for who has no ticket, but a copy of the flight.
func (f *flights) replace(id string, fl flight) bool {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.byID[id]
	if was == nil || was.number != fl.number {
		return false
	}
	*was = fl
	return true
}

func (f *flights) get(id string) flight {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	if fl := p.byID[id]; fl != nil {
		return *fl
	}
	return flight{}
}

// confirm is get at the first token of a request: what it left as a guess is true.
func (f *flights) confirm(id string) flight {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	fl := p.byID[id]
	if fl == nil {
		return flight{}
	}
	was := *fl
	was.guess, fl.guess = guess{}, guess{}
	return was
}

// end takes a request of ours (0) or of a peer out of flight and returns what was
// known of it.
func (f *flights) end(id string, peer uint64) flight {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	fl := p.byID[id]
	if fl == nil || fl.peer != peer {
		return flight{}
	}
	return p.land(id, fl)
}

// endAll takes all requests of a peer out of flight.
func (f *flights) endAll(peer uint64) {
	for i := range f.parts {
		p := &f.parts[i]
		p.mu.Lock()
		for id, fl := range p.byID {
			if fl.peer == peer {
				p.land(id, fl)
			}
		}
		p.mu.Unlock()
	}
}

// endOf is end for a flight that never got far, unless it has landed already.
func (f *flights) endOf(id string, t ticket) {
	p := &f.parts[t.part]
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.flight.number == t.number {
		p.land(id, t.flight)
	}
}

// land takes out what stands under an id; nil is nothing. mu is held.
func (p *part) land(id string, fl *flight) (was flight) {
	if fl == nil {
		return flight{}
	}
	was, *fl = *fl, flight{}
	delete(p.byID, id)
	if len(p.vacant) < maxVacant {
		p.vacant = append(p.vacant, fl)
	}
	return was
}

// sweep ends the requests that nobody owns, and those of peers, that have lost their
// slot: to time, or with their worker. It returns those of ours.
func (f *flights) sweep() (ended []string) {
	for i := range f.parts {
		p := &f.parts[i]
		p.mu.Lock()
		for id, fl := range p.byID {
			// A pool's lock under ours: nobody takes them the other way round.
			if fl.booked && !fl.pool.holds(id) {
				if p.land(id, fl).peer == 0 {
					ended = append(ended, id)
				}
			}
		}
		p.mu.Unlock()
	}
	return ended
}
