// SPDX-License-Identifier: Apache-2.0

package replay

// event is something that is going to happen.
type event struct {
	at   int64  // ns
	turn uint64 // of events at one time the first one made comes first
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

// queue is a heap of events by time, then turn.
type queue struct {
	heap []event
	turn uint64
}

func (e *event) before(f *event) bool { return e.at < f.at || e.at == f.at && e.turn < f.turn }

func (q *queue) push(at int64, kind eventKind, a int32, b uint32) {
	q.turn++
	e := event{at, q.turn, kind, a, b}
	q.heap = append(q.heap, e)
	i := len(q.heap) - 1
	for i > 0 {
		p := (i - 1) / 4
		if !e.before(&q.heap[p]) {
			break
		}
		q.heap[i] = q.heap[p]
		i = p
	}
	q.heap[i] = e
}

func (q *queue) pop() (event, bool) {
	if len(q.heap) == 0 {
		return event{}, false
	}
	top, last := q.heap[0], len(q.heap)-1
	e := q.heap[last]
	q.heap = q.heap[:last]
	i := 0
	for {
		c := 4*i + 1
		if c >= last {
			break
		}
		least := c
		for k := c + 1; k < min(c+4, last); k++ {
			if q.heap[k].before(&q.heap[least]) {
				least = k
			}
		}
		if !q.heap[least].before(&e) {
			break
		}
		q.heap[i] = q.heap[least]
		i = least
	}
	if last > 0 {
		q.heap[i] = e
	}
	return top, true
}
