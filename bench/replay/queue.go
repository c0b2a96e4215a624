// SPDX-License-Identifier: Apache-2.0

package replay

// event is something that is going to happen.
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
	heap heap[event]
	turn int64
}

func (q *queue) push(at int64, kind eventKind, a int32, b uint32) {
	q.turn++
	q.heap.push(entry[event]{at, q.turn, event{kind, a, b}})
}

// heap is a binary heap whose first entry comes first by at, then by turn.
type heap[T any] []entry[T]

type entry[T any] struct {
	at, turn int64
	value    T
}

func (e *entry[T]) before(f *entry[T]) bool { return e.at < f.at || e.at == f.at && e.turn < f.turn }

func (h *heap[T]) push(e entry[T]) {
	s := append(*h, e)
	i := len(s) - 1
	for i > 0 {
		p := (i - 1) / 2
		if !e.before(&s[p]) {
			break
		}
		s[i] = s[p]
		i = p
	}
	s[i] = e
	*h = s
}

// pop removes the first entry. The heap must have one.
func (h *heap[T]) pop() entry[T] {
	s := *h
	top, last := s[0], len(s)-1
	e := s[last]
	s = s[:last]
	i := 0
	for {
		c := 2*i + 1
		if c >= last {
			break
		}
		if c+1 < last && s[c+1].before(&s[c]) {
			c++
		}
		if !s[c].before(&e) {
			break
		}
		s[i] = s[c]
		i = c
	}
	if last > 0 {
		s[i] = e
	}
	*h = s
	return top
}
