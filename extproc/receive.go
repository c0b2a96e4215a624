// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/tap"
)

// waitEnd is the reason why a stream's wait for Envoy's next message is over.
type waitEnd uint8

const (
	received       waitEnd = iota // a message has arrived
	outdated                      // the wake-up was meant for an earlier wait: wait again
	streamEnded                   // the stream has ended
	deadlinePassed                // Envoy waits no longer for the answer to the headers
	evicted                       // the bodies in memory take all of the budget
	drained                       // the server drains
)

// receive waits for the next message of Envoy.
//
// Where Envoy sends a small body in one message, the handler's own goroutine waits, and an eviction or
// a drain ends the stream's context: nothing has to be sent then. In the other modes held chunks
// must be answered, and a large body may need more of Envoy's time, so a second goroutine receives.
func (s *stream) receive() (req *extprocv3.ProcessingRequest, why waitEnd) {
	for why = outdated; why == outdated; {
		if s.keptInDrain {
			return s.await()
		}
		if !s.waits.add(&s.wait, s.state <= gathering) {
			return nil, drained
		}
		if s.wait.woken != nil || s.messages != nil {
			req, why = s.await()
		} else if req, _ = s.grpc.Recv(); req != nil {
			why = received
		} else {
			why = streamEnded
		}
		if by := s.waits.remove(&s.wait); by != received {
			if req != nil { // it came at the same time
				s.messages = make(chan *extprocv3.ProcessingRequest, 1)
				s.messages <- req
			}
			return nil, by
		}
	}
	return req, why
}

// waits has the handlers that wait for Envoy, so that a drain or an eviction can end the wait.
// Its methods may be called by any number of goroutines. The zero value is ready to use.
type waits struct {
	mu       sync.Mutex
	draining bool
	// Rings of waits, of which these are the heads: of streams without a decision, of those among them that end without
	// an answer, which have small bodies, and of the others. The one that has waited longest is the first.
	undecided, small, others wait
}

// wait is the wait of one stream.
type wait struct {
	end            func()        // ends the stream's context
	woken          chan struct{} // if not nil, it gets a value, and end is not called
	next, previous *wait         // nil while the stream does not wait
	by             waitEnd       // evicted or drained if that ended the wait, else received
}

// add notes that a stream begins to wait. It returns false if the server drains.
func (l *waits) add(w *wait, undecided bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.draining {
		return false
	}
	head := &l.others
	switch {
	case undecided && w.woken != nil:
		head = &l.undecided
	case undecided:
		head = &l.small
	}
	if head.next == nil {
		head.next, head.previous = head, head
	}
	w.by = received
	w.next, w.previous = head, head.previous
	w.previous.next, head.previous = w, w
	return true
}

// remove notes that a stream does not wait any more. It returns evicted or drained if that ended
// the wait, and else received.
func (l *waits) remove(w *wait) waitEnd {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.unlink()
	return w.by
}

func (w *wait) unlink() {
	if w.next != nil {
		w.next.previous, w.previous.next = w.previous, w.next
		w.next, w.previous = nil, nil
	}
}

// endKey is the key in a stream's context of the function that ends the context.
type endKey struct{}

// withEnd is the context of a stream, which kvroute can end. gRPC ends its own context, and with it
// a wait for a message, only when the handler returns.
type withEnd struct {
	context.Context //nolint:containedctx // it is one
	end             context.CancelFunc
}

func (c withEnd) Value(key any) any {
	if key == (endKey{}) {
		return c.end
	}
	return c.Context.Value(key)
}

// ending returns a stream's context and the function that ends it. On a server without
// [Server.ServerOptions] the function does not end a wait for a message.
func ending(ctx context.Context) (context.Context, context.CancelFunc) {
	if end, ok := ctx.Value(endKey{}).(context.CancelFunc); ok {
		return ctx, end
	}
	return context.WithCancel(ctx)
}

// endable makes the context of a new stream one that kvroute can end.
func endable(ctx context.Context, _ *tap.Info) (context.Context, error) {
	ctx, end := context.WithCancel(ctx)
	return withEnd{ctx, end}, nil
}

// bodyBudget is the budget of all request bodies in memory: as Envoy sent them, and joined. A body in
// chunks may never end, so Envoy's limits do not bound them. Any goroutine may use it.
type bodyBudget struct {
	most  int64
	taken atomic.Int64
	legs  atomic.Int64 // part of taken: of requests whose prefill leg runs
	other atomic.Int64 // part of taken: by HoldBody
}

// take reserves n bytes, if there are as many left.
func (b *bodyBudget) take(n int) bool {
	if b.taken.Add(int64(n)) > b.most {
		b.taken.Add(-int64(n))
		return false
	}
	return true
}

func (b *bodyBudget) give(n int) { b.taken.Add(-int64(n)) }

// HoldBody reserves n bytes of [Config.MaxHeldBytes] for a body that another server of this process receives. Such
// bodies get at most half, so that Envoy's requests find room. It returns false if there is no room.
func (s *Server) HoldBody(n int) bool {
	b := &s.bodies
	if b.other.Add(int64(n)) <= b.most/2 && b.take(n) {
		return true
	}
	b.other.Add(-int64(n))
	return false
}

// ReleaseBody returns n bytes of [Server.HoldBody].
func (s *Server) ReleaseBody(n int) {
	s.bodies.other.Add(-int64(n))
	s.bodies.give(n)
}

// reservation is the part of the budget that one stream has.
type reservation struct {
	of    *bodyBudget
	bytes int
}

// add reserves n more bytes. It returns false if they do not fit.
func (r *reservation) add(n int) bool {
	if !r.of.take(n) {
		return false
	}
	r.bytes += n
	return true
}

// giveBack returns all reserved bytes.
func (r *reservation) giveBack() {
	r.of.give(r.bytes)
	r.bytes = 0
}

// receiveBuffers is gRPC's pool of buffers for received data. gRPC keeps what it has of an
// unfinished message, which may be as large as a body, before extproc sees any of it. If the
// buffers and the reserved bytes exceed the budget together, the stream that has waited longest
// for a message leaves its request to Envoy, and its buffers are free.
//
// gRPC does not return the buffers that are unread at a stream's end. So the count has all
// buffers that exist: a buffer counts from its allocation until the garbage collector frees it.
type receiveBuffers struct {
	bodies *bodyBudget
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
	if n := r.bytes.Add(int64(size)); n > usualBytes && n+r.bodies.taken.Load() > r.bodies.most {
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
