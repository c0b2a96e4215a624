// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"sync"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/tap"
)

// event is what ends a stream's wait.
type event uint8

const (
	received event = iota // a message
	woken                 // by a cause that is past
	ended                 // the stream has ended
	late                  // Envoy waits too long for the answer to the headers
	evicted               // the bodies in memory take all of the budget
	drained               // the server drains
)

// receive waits for the next message of Envoy.
//
// Where Envoy sends the body in one message, the handler's own goroutine waits, and an eviction or
// a drain ends the stream's context: nothing has to be sent then. In the other flows held chunks
// must be answered, so a second goroutine receives.
func (s *stream) receive() (req *extprocv3.ProcessingRequest, why event) {
	for why = woken; why == woken; {
		if s.lasting {
			return s.await()
		}
		if !s.server.waits.add(&s.wait, s.state <= gathering) {
			return nil, drained
		}
		if s.wait.woken == nil {
			req, why = s.next()
		} else {
			req, why = s.await()
		}
		if by := s.server.waits.remove(&s.wait); by != received {
			if req != nil { // it came at the same time
				s.messages = make(chan *extprocv3.ProcessingRequest, 1)
				s.messages <- req
			}
			return nil, by
		}
	}
	return req, why
}

// next returns the next message, which [stream.watch] may have received already.
func (s *stream) next() (*extprocv3.ProcessingRequest, event) {
	var m *extprocv3.ProcessingRequest
	if s.messages == nil {
		m, _ = s.grpc.Recv()
	} else {
		m = <-s.messages
		s.messages = nil
	}
	if m == nil {
		return nil, ended
	}
	return m, received
}

// watch receives the next message beside a decision that takes long, so that the end of the stream
// ends ctx. Envoy ends some streams in a way that only a receiver notices.
func (s *stream) watch() {
	if s.messages != nil {
		return
	}
	in := make(chan *extprocv3.ProcessingRequest, 1)
	s.messages = in
	go func() {
		m, err := s.grpc.Recv()
		if err != nil {
			s.wait.end()
		}
		in <- m
	}()
}

// await is next for streams whose waits end otherwise, too.
func (s *stream) await() (*extprocv3.ProcessingRequest, event) {
	s.watch()
	select {
	case m := <-s.messages:
		if s.messages = nil; m == nil {
			return nil, ended
		}
		return m, received
	case <-s.late:
		s.late = nil
		return nil, late
	case <-s.wait.woken:
		return nil, woken // waits.remove has the cause, unless it was an earlier wait's
	}
}

// waits has the handlers that wait for Envoy, so that a drain or an eviction can end the wait.
// Its methods may be called by any number of goroutines. The zero value is ready to use.
type waits struct {
	mu       sync.Mutex
	draining bool
	// Rings of waits, of which these are the heads: of streams without a decision, and of the
	// others. The one that has waited longest is the first.
	undecided, others wait
}

// wait is the wait of one stream.
type wait struct {
	end            func()        // the stream's context
	woken          chan struct{} // if not nil, is sent to instead
	next, previous *wait         // nil while the stream does not wait
	by             event         // evicted or drained: the cause of the end
}

// add notes that a stream begins to wait. It returns false if the server drains.
func (l *waits) add(w *wait, undecided bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.draining {
		return false
	}
	head := &l.others
	if undecided {
		head = &l.undecided
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
func (l *waits) remove(w *wait) event {
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

// evict ends the longest wait of a stream without a decision.
func (l *waits) evict() { l.stop(evicted, 1, &l.undecided) }

// drain ends all waits, and keeps new ones from beginning.
func (l *waits) drain() {
	l.mu.Lock()
	l.draining = true
	l.mu.Unlock()
	l.stop(drained, -1, &l.undecided, &l.others)
}

// stop ends the first n waits of the rings, or all if n is negative.
func (l *waits) stop(why event, n int, heads ...*wait) {
	var stopped []*wait
	l.mu.Lock()
	for _, head := range heads {
		for n != 0 && head.next != nil && head.next != head {
			w := head.next
			w.unlink()
			w.by = why
			stopped = append(stopped, w)
			n--
		}
	}
	l.mu.Unlock()
	for _, w := range stopped {
		if w.woken == nil {
			w.end()
			continue
		}
		select {
		case w.woken <- struct{}{}:
		default: // it was woken before
		}
	}
}

func (l *waits) isDraining() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.draining
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
