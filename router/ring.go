// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"sync"
	"time"
)

// ring keeps the most recent decisions.
type ring struct {
	mu sync.Mutex
	// mu guards the fields below.
	kept []Decision // len grows to the limit, then next goes round
	next int
	byID map[string]int
}

func newRing(size int) *ring {
	return &ring{kept: make([]Decision, 0, size), byID: make(map[string]int, size)}
}

// add keeps a copy of d in place of the oldest one. It re-uses the memory of the
// one that leaves, so a full ring allocates nothing.
func (r *ring) add(d *Decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cap(r.kept) == 0 {
		return
	}
	if len(r.kept) < cap(r.kept) {
		r.kept = append(r.kept, Decision{})
	}
	at := &r.kept[r.next]
	delete(r.byID, at.ID)
	candidates := append(at.Candidates[:0], d.Candidates...)
	*at = *d
	at.Candidates = candidates
	r.byID[d.ID] = r.next
	r.next = (r.next + 1) % cap(r.kept)
}

// note lets set write to the kept decision id, if it is still there.
func (r *ring) note(id string, set func(*Decision)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i, ok := r.byID[id]; ok {
		set(&r.kept[i])
	}
}

func (r *ring) noteFirstToken(id string, now time.Time) {
	r.note(id, func(d *Decision) { d.FirstToken = now })
}

func (r *ring) noteFreed(id string, now time.Time) {
	r.note(id, func(d *Decision) { d.Freed = now })
}

func (r *ring) get(id string) (Decision, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, ok := r.byID[id]
	if !ok {
		return Decision{}, false
	}
	return clone(r.kept[i]), true
}

// recent returns up to n decisions, newest first.
func (r *ring) recent(n int) []Decision {
	r.mu.Lock()
	defer r.mu.Unlock()
	n = min(n, len(r.kept))
	out := make([]Decision, 0, max(n, 0))
	for i := range n {
		at := (r.next - 1 - i + 2*len(r.kept)) % len(r.kept)
		out = append(out, clone(r.kept[at]))
	}
	return out
}

func clone(d Decision) Decision {
	d.Candidates = slices.Clone(d.Candidates)
	return d
}
