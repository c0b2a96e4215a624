// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// serve handles a main stream and returns the name of its last state. It frees the slot at the end
// of the stream, whatever the cause. If the first message is that of an observer stream, serve
// calls observing and handles the stream as one.
func (s *Server) serve(g extprocv3.ExternalProcessor_ProcessServer, observing func()) string {
	st := &stream{server: s, grpc: g}
	defer st.free()
	defer st.giveBack()
	ctx, cancel, messages := receive(g)
	defer cancel(errEnded)
	drained := s.drained.Done()
	for {
		if s.draining() && drained != nil { // before select, which chooses any ready case
			if st.giveUp(failDraining) {
				return st.state.String()
			}
			drained = nil // Envoy still needs the stream
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
			// In another state Envoy does not wait: a refusal or a response came first.
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

// handle answers one message. It returns false if the stream must end.
func (s *stream) handle(ctx context.Context, req *extprocv3.ProcessingRequest) bool {
	if s.state == begun {
		s.arrival.Began = time.Now()
		s.server.seen.Add(1)
		s.configure(req.GetProtocolConfig())
	}
	m := s.classify(req)
	act, to := next(s.flow, s.state, m)
	if act == proceed && m.isOther() && s.server.conf.EndpointPicker {
		act = decide // a gateway with that protocol cannot choose an endpoint itself
	}
	switch act {
	case leave, ignore:
		s.server.metrics.strays.Count(m.String())
		return act == ignore
	case decide:
		return s.answerRequest(ctx, m, req.GetRequestBody())
	case refuse:
		return s.refuse(s.wrong)
	case respond:
		answer := s.answerResponse(req)
		s.state = to
		return s.send(answer)
	default: // these actions may change the state again
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

// send sends answers. It returns false if the stream must end.
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
