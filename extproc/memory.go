// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// heldBytes is the budget of all request bodies in memory: as Envoy sent them, and joined. A body in
// chunks may never end, so Envoy's limits do not bound them. Any goroutine may use it.
type heldBytes struct {
	most  int64
	taken atomic.Int64
	legs  atomic.Int64 // part of taken: of requests whose prefill leg runs
}

// take reserves n bytes, if there are as many left.
func (h *heldBytes) take(n int) bool {
	if h.taken.Add(int64(n)) > h.most {
		h.taken.Add(-int64(n))
		return false
	}
	return true
}

func (h *heldBytes) give(n int) { h.taken.Add(-int64(n)) }

// takeForLeg reserves n bytes for the time of a prefill leg. Legs get at most half of the budget:
// slow prefill workers must leave room for requests that are decided.
func (h *heldBytes) takeForLeg(n int) bool {
	if h.legs.Add(int64(n)) <= h.most/2 && h.take(n) {
		return true
	}
	h.legs.Add(-int64(n))
	return false
}

func (h *heldBytes) giveForLeg(n int) {
	h.legs.Add(-int64(n))
	h.give(n)
}

// receiveBuffers is gRPC's pool of buffers for received data. gRPC keeps what it has of an
// unfinished message, which may be as large as a body, before extproc sees any of it. If the
// buffers and the held bodies exceed the budget together, the stream that has waited longest
// for a message leaves its request to Envoy, and its buffers are free.
//
// gRPC does not return the buffers that are unread at a stream's end. So the count has all
// buffers that exist: a buffer counts from its allocation until the garbage collector frees it.
type receiveBuffers struct {
	held   *heldBytes
	bytes  atomic.Int64
	evict  func() // ends the stream that has waited longest
	unused [len(bufferSizes)]sync.Pool
}

// bufferSizes are the sizes of receive buffers. gRPC takes frames of at most 16 KiB, and joins
// small ones into somewhat more. It allocates up to 1 KiB without a pool.
//
//nolint:gochecknoglobals // a table
var bufferSizes = [...]int{4 << 10, 16 << 10, 64 << 10}

// usualBytes of receive buffers are no reason to end a stream.
const usualBytes = 32 << 20

// Get returns a buffer of a length. Its content is arbitrary.
func (r *receiveBuffers) Get(length int) *[]byte {
	size := length
	for i, s := range bufferSizes {
		if length > s {
			continue
		}
		if b, ok := r.unused[i].Get().(*[]byte); ok {
			*b = (*b)[:length]
			return b
		}
		size = s
		break
	}
	buffer := make([]byte, length, size)
	runtime.AddCleanup(&buffer, func(n int) { r.bytes.Add(-int64(n)) }, size)
	if n := r.bytes.Add(int64(size)); n > usualBytes && n+r.held.taken.Load() > r.held.most {
		r.evict()
	}
	return &buffer
}

// Put takes a buffer back.
func (r *receiveBuffers) Put(buffer *[]byte) {
	for i, s := range bufferSizes {
		if cap(*buffer) == s {
			r.unused[i].Put(buffer)
			return
		}
	}
}
