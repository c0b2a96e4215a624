// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Decision returns a kept decision by its request id, this router's or the client's.
func (r *Router) Decision(id string) (Decision, bool) {
	found := r.kept.find(1, time.Time{}, func(d *Decision) bool { return d.ID == id || id != "" && d.Labels.RequestID == id })
	if len(found) == 0 {
		return Decision{}, false
	}
	return found[0], true
}

// Decisions returns up to n kept decisions, newest first.
func (r *Router) Decisions(n int) []Decision {
	return r.kept.find(n, time.Time{}, func(*Decision) bool { return true })
}

// BriefDecisions returns the same as Decisions, with the candidates only of the decisions after a time: where
// no request comes, its cost does not depend on the number of workers.
func (r *Router) BriefDecisions(n int, after time.Time) []Decision {
	return r.kept.find(n, after, func(*Decision) bool { return true })
}

// keptDecisions is a ring of the latest booked decisions. A request takes a number, and
// with it a place, before it is decided. The place's memory is used again, so a full ring
// allocates nothing. A refused request leaves its place as it is.
//
// A decision can be found by its id only by a search: such queries are rare, and an index
// would cost every request.
type keptDecisions struct {
	last atomic.Uint64 // number of the latest request

	mu sync.Mutex
	// mu guards the elements of ring.
	ring []keptDecision
}

type keptDecision struct {
	number uint64 // 0: the place is empty
	Decision
	seen    []Candidate // the decision's candidates, in memory that is used again
	omitted int
}

// next returns the number of a new request.
func (k *keptDecisions) next() uint64 { return k.last.Add(1) }

// add keeps a copy of a decision and of the candidates that it saw.
func (k *keptDecisions) add(number uint64, d *Decision, seen []Candidate, omitted int) {
	if len(k.ring) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	at := &k.ring[number%uint64(len(k.ring))]
	if at.number > number {
		return // this request took so long that a later one has the place
	}
	at.number, at.omitted = number, omitted
	at.Decision = *d
	at.seen = append(at.seen[:0], seen...)
}

// change calls a function with a kept decision, if it is still there.
func (k *keptDecisions) change(number uint64, change func(*keptDecision)) {
	if len(k.ring) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if at := &k.ring[number%uint64(len(k.ring))]; at.number == number {
		change(at)
	}
}

// find returns up to n decisions that meet a condition, newest first, with copies of the candidates of
// those after a time.
func (k *keptDecisions) find(n int, after time.Time, meets func(*Decision) bool) []Decision {
	found := []Decision{} // an empty list in JSON, not null
	k.each(func(d *keptDecision) bool {
		switch {
		case len(found) >= n || !meets(&d.Decision):
		case !d.Time.After(after):
			found = append(found, *d.Brief())
		default:
			var whole Decision
			d.copyTo(&whole, slices.Clone(d.seen), d.omitted, nil, d.Prefill)
			found = append(found, whole)
		}
		return len(found) < n
	})
	return found
}

// each visits the decisions, newest first, until visit returns false. It holds the lock for one
// decision at a time, because decisions wait for it.
func (k *keptDecisions) each(visit func(*keptDecision) bool) {
	var numbers []uint64
	k.mu.Lock()
	for i := range k.ring {
		if number := k.ring[i].number; number > 0 {
			numbers = append(numbers, number)
		}
	}
	k.mu.Unlock()
	slices.Sort(numbers)
	for _, number := range slices.Backward(numbers) {
		more := true
		if k.change(number, func(d *keptDecision) { more = visit(d) }); !more {
			return
		}
	}
}

// recentPrompts is the number of prompts whose beginnings are kept, prefixBlocks the
// number of leading blocks of each. Together they take at most half a megabyte.
const recentPrompts, prefixBlocks = 512, 64

// beginning is the beginning of a booked prompt.
type beginning struct {
	pool            poolKey
	local, sequence []uint64
}

// beginnings is a ring of the beginnings of the latest booked prompts. Its memory is used again.
type beginnings struct {
	mu sync.Mutex
	// mu guards the fields below.
	ring [recentPrompts]beginning
	next int
}

// add copies the beginning of a prompt. Prompts without a full block are not added.
func (b *beginnings) add(key poolKey, local, sequence []uint64) {
	n := min(len(sequence), prefixBlocks)
	if n == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	at := &b.ring[b.next]
	b.next = (b.next + 1) % recentPrompts
	at.pool = key
	at.local = append(slices.Grow(at.local[:0], prefixBlocks), local[:n]...)
	at.sequence = append(slices.Grow(at.sequence[:0], prefixBlocks), sequence[:n]...)
}

// list copies the ring. It holds the lock for one prompt at a time, because decisions wait for it.
func (b *beginnings) list() (list []beginning) {
	for i := range recentPrompts {
		b.mu.Lock()
		at := b.ring[i]
		at.local, at.sequence = slices.Clone(at.local), slices.Clone(at.sequence)
		b.mu.Unlock()
		if len(at.sequence) > 0 {
			list = append(list, at)
		}
	}
	return list
}
