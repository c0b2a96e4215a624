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
	ctx, end := ending(g.Context())
	defer end()
	st := &stream{server: s, grpc: g, wait: wait{end: end}}
	defer st.free()
	defer st.giveBack()
	for {
		req, why := st.receive()
		switch why {
		case received:
			if st.state == begun && req.GetObservabilityMode() {
				observing()
				return s.shadow(g, &st.wait, req)
			}
			if st.handle(ctx, req) && !(st.lasting && st.mayEnd()) {
				continue
			}
		case late:
			// In another state Envoy does not wait: a refusal or a response came first.
			if st.state != gathering || st.release(failBudget) {
				continue
			}
		case evicted:
			if !st.giveUp(failHeld) {
				continue
			}
		case drained:
			if st.lasting = !st.giveUp(failDraining); st.lasting { // Envoy still needs the stream
				continue
			}
		case ended, woken:
		}
		return st.state.String()
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
