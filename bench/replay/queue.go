// SPDX-License-Identifier: Apache-2.0

package replay

import "container/heap"

// queue holds planned events by time in ns. Of events at one time the one that was planned first
// comes first.
type queue struct {
	timeline[func()]
	turn int64
}

func (q *queue) plan(at int64, do func()) {
	q.turn++
	q.push(entry[func()]{at, q.turn, do})
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
