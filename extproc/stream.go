// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"io"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// errEnded is why the context of a stream ends.
var errEnded = errors.New("the stream has ended")

// serve handles a main stream and returns the name of its last state. The slot is freed however
// the stream ends. If the first message shows that it is an observer stream, serve calls
// observing and handles it as one.
func (s *Server) serve(g extprocv3.ExternalProcessor_ProcessServer, observing func()) string {
	st := &stream{server: s, grpc: g}
	defer st.free()
	defer st.giveBack()
	ctx, cancel, messages := receive(g)
	defer cancel(errEnded)
	drained := s.drained.Done()
	for {
		if s.draining() && drained != nil { // before select, which takes any case that is ready
			if st.giveUp(failDraining) {
				return st.state.String()
			}
			drained = nil // the stream ends later
		}
		evict := s.received.evict
		if st.state > gathering {
			evict = nil // the request is decided
		}
		select {
		case req := <-messages:
			if st.state == begun && req.GetObservabilityMode() {
				observing()
				return s.shadow(ctx, req, messages)
			}
			if !st.handle(ctx, req) || drained == nil && st.mayEnd() {
				return st.state.String()
			}
		case <-st.late:
			// After a refusal, or a response that overtook the request, Envoy does not wait.
			if st.late = nil; st.state == gathering && !st.release(failBudget) {
				return st.state.String()
			}
		case <-evict:
			if st.giveUp(failHeld) {
				return st.state.String()
			}
		case <-ctx.Done():
			return st.state.String()
		case <-drained:
		}
	}
}

// receive returns the messages of g, and a context that ends with g or by cancel, which the
// caller must call. It receives a message after the previous one is taken, so it notices the end
// of g during a decision. Its goroutine ends with the context, or when the handler of g returns,
// which ends a Recv.
func receive(g extprocv3.ExternalProcessor_ProcessServer) (ctx context.Context, cancel context.CancelCauseFunc, messages <-chan *extprocv3.ProcessingRequest) {
	ctx, cancel = context.WithCancelCause(g.Context())
	in := make(chan *extprocv3.ProcessingRequest)
	go func() {
		for {
			req, err := g.Recv()
			if err != nil {
				if errors.Is(err, io.EOF) {
					err = errEnded
				}
				cancel(err)
				return
			}
			select {
			case in <- req:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, cancel, in
}

// handle answers one message. It returns false if the stream is of no more use.
func (s *stream) handle(ctx context.Context, req *extprocv3.ProcessingRequest) bool {
	if s.state == begun {
		s.configure(req.GetProtocolConfig())
	}
	m := s.classify(req)
	act, to := next(s.flow, s.state, m)
	if act == proceed && m.isOther() && s.server.conf.EndpointPicker {
		act = decide // a gateway with that protocol has no other choice for the request
	}
	switch act {
	case leave, ignore:
		count(s.server.metrics.strays, label("message", m.String()))
		return act == ignore
	case decide:
		return s.answerRequest(ctx, m, req.GetRequestBody())
	case refuse:
		return s.refuse(s.wrong)
	case tell:
		answer := s.answerResponse(req)
		s.state = to
		return s.send(answer)
	default: // the other actions change the state first
	}
	s.state = to
	switch act {
	case hold:
		return s.hold(m, req.GetRequestBody().GetBody())
	case relay:
		return s.send(s.relay(m, req)...)
	default:
		return s.send(s.unchanged(m))
	}
}

// send sends answers, and reports whether the stream is of further use.
func (s *stream) send(answers ...*extprocv3.ProcessingResponse) bool {
	for _, a := range answers {
		if a.GetRequestHeaders() != nil && s.server.conf.ModeOverride && s.flow == whole {
			a.ModeOverride = s.override()
		}
		if a == nil || s.grpc.Send(a) != nil {
			return false
		}
	}
	return true
}
