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
	parts [64]struct {
		mu sync.Mutex
		// mu guards the field below.
		byID map[string]flight
		_    [64]byte // no two locks on one cache line
	}
}

// flight is a request from its question to its end.
type flight struct {
	pool    *pool
	number  uint64 // of its decision in the ring
	first   Worker // that it was booked on
	second  Worker
	held    int32  // blocks of the prompt that the second choice holds
	session uint64 // to be bound at its first token; 0 = none
	anew    bool   // even if it is bound by then
	guess   guess  // until it is confirmed by the first token
	booked  bool   // known to have a slot, so that one without has lost it; only of requests that nobody owns
}

func newFlights() *flights {
	f := &flights{seed: maphash.MakeSeed()}
	for i := range f.parts {
		f.parts[i].byID = make(map[string]flight)
	}
	return f
}

func (f *flights) part(id string) int {
	return int(maphash.String(f.seed, id) % uint64(len(f.parts)))
}

// begin returns false if the id is in flight already.
func (f *flights) begin(id string, fl flight) bool {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, exists := p.byID[id]; exists {
		return false
	}
	p.byID[id] = fl
	return true
}

// change replaces what is known of a request. It returns false if that has landed,
// whether or not its id has taken off again.
func (f *flights) change(id string, fl flight) bool {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	was, exists := p.byID[id]
	if !exists || was.pool != fl.pool || was.number != fl.number {
		return false
	}
	p.byID[id] = fl
	return true
}

func (f *flights) get(id string) flight {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.byID[id]
}

// confirm is get at the first token of a request: what it left as a guess is true.
func (f *flights) confirm(id string) flight {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	fl, exists := p.byID[id]
	if exists && fl.guess.in != nil {
		fl.guess = guess{}
		p.byID[id] = fl
	}
	return fl
}

// end takes a request out of flight and returns what was known of it.
func (f *flights) end(id string) flight {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	fl := p.byID[id]
	delete(p.byID, id)
	return fl
}

// endOf is end for a flight that never got far, unless it has landed already and its
// id has taken off again.
func (f *flights) endOf(id string, fl flight) {
	p := &f.parts[f.part(id)]
	p.mu.Lock()
	defer p.mu.Unlock()
	if was := p.byID[id]; was.pool == fl.pool && was.number == fl.number {
		delete(p.byID, id)
	}
}

// sweep ends the requests that nobody owns and that have lost their slot: to time,
// or with their worker.
func (f *flights) sweep() {
	for i := range f.parts {
		p := &f.parts[i]
		p.mu.Lock()
		for id, fl := range p.byID {
			// A pool's lock under ours: nobody takes them the other way round.
			if fl.booked && !fl.pool.holds(id) {
				delete(p.byID, id)
			}
		}
		p.mu.Unlock()
	}
}
