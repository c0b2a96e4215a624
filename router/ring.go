// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// ring keeps recent decisions. A request gets a number before it is decided, and
// with it a place; it keeps the memory of the decision that it replaces there, so
// a full ring allocates nothing. Requests wait for each other only at one place.
// One that was refused leaves its place to the decision from before.
//
// To look a decision up by its id is to look at all: somebody asks once in a
// while, and every request would pay for a map.
type ring struct {
	kept []place
	last atomic.Uint64 // number of the last request
}

type place struct {
	mu sync.Mutex
	// mu guards the fields below.
	number     uint64 // 0 = nothing
	decision   Decision
	considered considered
}

func newRing(size int) *ring { return &ring{kept: make([]place, size)} }

// next returns the number of a request that begins.
func (r *ring) next() uint64 { return r.last.Add(1) }

func (r *ring) place(number uint64) *place { return &r.kept[number%uint64(len(r.kept))] }

// add keeps a copy of a request's decision and of what it considered.
func (r *ring) add(number uint64, d *Decision, c *considered) {
	if len(r.kept) == 0 {
		return
	}
	p := r.place(number)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.number > number {
		return // it took so long that a later one stands there
	}
	p.number, p.decision = number, *d
	p.considered.copy(c)
}

// note notes the time of something that became of a request, if its decision is
// still there.
func (r *ring) note(number uint64, what func(*Decision) *time.Time, now time.Time) {
	r.change(number, func(d *Decision) { *what(d) = now })
}

// change changes what is kept of a request's decision, if it is still there.
func (r *ring) change(number uint64, to func(*Decision)) {
	if len(r.kept) == 0 {
		return
	}
	p := r.place(number)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.number == number {
		to(&p.decision)
	}
}

func freed(d *Decision) *time.Time { return &d.Freed }

// get returns the latest decision of an id, ours or the client's.
func (r *ring) get(id string) (found Decision, ok bool) {
	var number uint64
	for i := range r.kept {
		p := &r.kept[i]
		p.mu.Lock()
		if p.number > number && (p.decision.ID == id || id != "" && p.decision.Labels.RequestID == id) {
			number, found = p.number, p.tell()
		}
		p.mu.Unlock()
	}
	return found, number > 0
}

// recent returns up to n decisions, newest first.
func (r *ring) recent(n int) []Decision {
	type numbered struct {
		number uint64
		place  *place
	}
	var all []numbered
	for i := range r.kept {
		p := &r.kept[i]
		p.mu.Lock()
		if p.number > 0 {
			all = append(all, numbered{p.number, p})
		}
		p.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b numbered) int { return cmp.Compare(b.number, a.number) })
	out := make([]Decision, 0, max(0, min(n, len(all))))
	for _, one := range all[:max(0, min(n, len(all)))] {
		one.place.mu.Lock()
		out = append(out, one.place.tell()) // or one that came in its place
		one.place.mu.Unlock()
	}
	return out
}

// tell returns the decision that stands there, for people. mu is held.
func (p *place) tell() Decision {
	d := p.decision
	d.Candidates = p.considered.list(&d)
	return d
}
