// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
)

// QueuePolicy names the order in which requests wait.
type QueuePolicy string

// The queue policies. With a priority jump a request counts as if it had arrived that many
// seconds earlier (FCFS) or later (LCFS); for WSPT it increases the weight.
const (
	FCFS QueuePolicy = "fcfs" // first come, first served
	LCFS QueuePolicy = "lcfs" // last come, first served
	WSPT QueuePolicy = "wspt" // shortest prefill first
)

// Validate returns an error if the policy is unknown.
func (p QueuePolicy) Validate() error {
	if all := []QueuePolicy{FCFS, LCFS, WSPT}; !slices.Contains(all, p) {
		return fmt.Errorf("router_queue_policy is %s, want one of %v", string(p), all)
	}
	return nil
}

// Waiting is a request in the queue.
type Waiting struct {
	Strict   int           // higher values come first, whatever the policy
	Jump     float64       // priority jump; below 0 counts as 0
	Arrival  time.Duration // since some moment that is the same for all
	Uncached int           // prompt tokens to compute on the best worker
	Lane     int           // worker that the request is pinned to, or AnyWorker
}

// AnyWorker is the lane of the requests that are not pinned.
const AnyWorker = -1

// Key returns the policy's sort key; the highest key is first.
func (p QueuePolicy) Key(w *Waiting) float64 {
	jump := 0.
	if w.Jump > 0 { // not if it is not a number
		jump = w.Jump
	}
	switch p {
	case LCFS:
		return jump + w.Arrival.Seconds()
	case WSPT:
		return (1 + jump) / float64(max(1, w.Uncached))
	default:
		return jump - w.Arrival.Seconds()
	}
}

// ErrQueueFull is returned by [Queue.Push] when the limit is reached.
var ErrQueueFull = errors.New("the queue is full")

// Queue holds the waiting requests of one model, sorted by strict priority, then by the
// policy's key, then by arrival, then in the order of Push. Requests that are pinned to a
// worker wait in a lane of their own, so that lanes do not delay each other.
//
// # Invariants
//
//   - Len is the number of items pushed and neither admitted nor removed;
//     it is at most the limit.
//   - Within a lane no item is admitted before an item that sorts before it.
//
// Make one with [NewQueue]. It has no lock and no clock.
type Queue[T any] struct {
	policy QueuePolicy
	limit  int
	count  int
	total  int // of Uncached
	pushed uint64
	lanes  []*lane[T] // sorted by number
}

// Item is a place in a queue.
type Item[T any] struct {
	Value T
	Waiting
	key   float64
	order uint64
	left  bool // it is no longer in the queue
}

// compare orders items, the first to be admitted first. No two items are equal.
func (it *Item[T]) compare(other *Item[T]) int {
	return cmp.Or(cmp.Compare(other.Strict, it.Strict), cmp.Compare(other.key, it.key),
		cmp.Compare(it.Arrival, other.Arrival), cmp.Compare(it.order, other.order))
}

type lane[T any] struct {
	number int
	items  []*Item[T] // sorted: most requests come last and leave first
}

func (l *lane[T]) find(it *Item[T]) int {
	at, _ := slices.BinarySearchFunc(l.items, it, (*Item[T]).compare)
	return at
}

// NewQueue returns an empty queue for limit items at most.
func NewQueue[T any](policy QueuePolicy, limit int) *Queue[T] {
	return &Queue[T]{policy: policy, limit: limit}
}

// Push puts a request into the queue, or returns [ErrQueueFull].
func (q *Queue[T]) Push(w Waiting, value T) (*Item[T], error) {
	if q.count >= q.limit {
		return nil, ErrQueueFull
	}
	q.count++
	q.total += w.Uncached
	q.pushed++
	it := &Item[T]{Value: value, Waiting: w, key: q.policy.Key(&w), order: q.pushed}
	at, found := q.find(w.Lane)
	if !found {
		q.lanes = slices.Insert(q.lanes, at, &lane[T]{number: w.Lane})
	}
	l := q.lanes[at]
	l.items = slices.Insert(l.items, l.find(it), it)
	return it, nil
}

func (q *Queue[T]) find(number int) (at int, found bool) {
	return slices.BinarySearchFunc(q.lanes, number, func(l *lane[T], n int) int { return cmp.Compare(l.number, n) })
}

// Waits reports whether requests wait in a lane.
func (q *Queue[T]) Waits(lane int) bool {
	_, found := q.find(lane)
	return found
}

// Len returns the number of requests that wait.
func (q *Queue[T]) Len() int { return q.count }

// Uncached returns the sum of [Waiting.Uncached].
func (q *Queue[T]) Uncached() int { return q.total }

// Remove removes a cancelled request. It returns false if the request has left already.
func (q *Queue[T]) Remove(it *Item[T]) bool {
	if it.left {
		return false
	}
	number, _ := q.find(it.Lane)
	l := q.lanes[number]
	at := l.find(it)
	l.items = slices.Delete(l.items, at, at+1)
	q.leave(it)
	q.removeEmptyLanes()
	return true
}

// leave notes that an item is no longer in its lane.
func (q *Queue[T]) leave(it *Item[T]) {
	it.left = true
	q.count--
	q.total -= it.Uncached
}

func (q *Queue[T]) removeEmptyLanes() {
	q.lanes = slices.DeleteFunc(q.lanes, func(l *lane[T]) bool { return len(l.items) == 0 })
}

// Admit calls fits with the first item of each lane, and with the next ones as long as fits
// returns true. An item for which it returns true leaves the queue. So a request that
// needs much room is not overtaken by requests that need less. fits must not use the queue.
func (q *Queue[T]) Admit(fits func(*Item[T]) bool) {
	for _, l := range q.lanes {
		for len(l.items) > 0 && fits(l.items[0]) {
			first := l.items[0]
			l.items[0] = nil // the array may stay
			l.items = l.items[1:]
			q.leave(first)
		}
	}
	q.removeEmptyLanes()
}
