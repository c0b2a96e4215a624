// SPDX-License-Identifier: Apache-2.0

package replay

import "container/heap"

// event is a planned event of the simulation.
type event struct {
	kind eventKind
	a    int32
	b    uint32
}

type eventKind uint8

const (
	arrival eventKind = iota // of request a
	stepEnd                  // of engine a, plan b
	kvEvent                  // delayed event number b
	message                  // between replicas, number b
	change                   // of the workers, number a
	coldStart
	summary      // of router group a
	handOver     // of request a from prefill to decode
	tick         // of the routers
	engineReport // of engine a
)

// queue holds events by time in ns; of events at one time the first one made comes first.
type queue struct {
	timeline[event]
	turn int64
}

func (q *queue) plan(at int64, kind eventKind, a int32, b uint32) {
	q.turn++
	q.push(entry[event]{at, q.turn, event{kind, a, b}})
}

// timeline is a heap of values: the first one comes first by at, then by turn.
type timeline[T any] []entry[T]

type entry[T any] struct {
	at, turn int64
	value    T
}

func (t timeline[T]) Len() int { return len(t) }

func (t timeline[T]) Less(i, j int) bool {
	return t[i].at < t[j].at || t[i].at == t[j].at && t[i].turn < t[j].turn
}

func (t timeline[T]) Swap(i, j int) { t[i], t[j] = t[j], t[i] }

// Push implements [heap.Interface].
func (t *timeline[T]) Push(e any) { *t = append(*t, e.(entry[T])) }

// Pop implements [heap.Interface].
func (t *timeline[T]) Pop() any {
	s := *t
	e := s[len(s)-1]
	*t = s[:len(s)-1]
	return e
}

func (t *timeline[T]) push(e entry[T]) { heap.Push(t, e) }

// pop removes the first entry. The timeline must have one.
func (t *timeline[T]) pop() entry[T] { return heap.Pop(t).(entry[T]) }
