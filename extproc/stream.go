// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// Router decides and keeps account. All its methods may be called at any time, by
// any number of goroutines.
type Router interface {
	// BestWorker decides where a request goes and books it under its ID; after
	// an error nothing is booked. It returns soon after ctx ends. The spans of
	// req are not kept. It may call req.Waiting, in the caller's goroutine.
	// Errors that are neither the client's mistake nor a lack of workers or of
	// room make the request fail open.
	BestWorker(ctx context.Context, req router.Request) (router.Decision, error)
	// FirstToken notes a request's first token, or with [router.SignEnd] that it came
	// before, and reports whether that was news. Unknown ids are no error.
	FirstToken(id string, by router.Sign) bool
	// Free ends a booking and reports whether there was one. Abandon does so for
	// a request that no worker served.
	Free(id string) bool
	Abandon(id string) bool
	// Served notes which worker answered a request when its response begins, so that the
	// booking can follow. It reports whether the booking did, and which workers are avoided
	// from now on.
	Served(id string, r router.Response) (moved bool, avoided []router.Worker)
}

// stream is one main stream. Its handler's goroutine owns it.
type stream struct {
	// Set once.
	server *Server
	grpc   extprocv3.ExternalProcessor_ProcessServer

	state state

	// From the first message.
	flow         flow
	partial      bool // Envoy may truncate the body
	truncated    bool // Envoy sent only the beginning of the body
	echo         bool // Envoy wants the chunks of the response back
	endpoint     openai.Endpoint
	wrong        *openai.Error // why they are refused
	salt         string        // the tenant, of the header x-tenant-id
	stripHeaders []string      // client headers that only kvroute may set, or that steer it
	sized        bool          // they have the body's length
	encoding     string        // of the body; "" for none
	inflated     []byte        // what the inflater has made of it, while a decision needs it
	steering     steering

	ended bool             // the request's last part has come
	held  [][]byte         // the chunks that are unanswered
	late  <-chan time.Time // when Envoy will have waited too long for the answer to the headers
	size  int              // of them together
	taken int              // bytes of the server's budget that this stream has

	id       string // of our request; none before the decision
	booked   bool   // the slot must be freed
	served   bool   // the response began well
	decision router.Decision

	chunks   bool       // Envoy hands over the response's body, too
	watching bool       // for the first token, in those chunks
	events   firstEvent // what is carried over from one chunk to the next
}

// errEnded is why the context of a stream ends.
var errEnded = errors.New("the stream has ended")

// serve plays a main stream to its end and returns the name of the state that it
// ended in. However it ends, the slot is freed. A stream that turns out to be an
// observer's is played as one, after a call of observing.
func (s *Server) serve(g extprocv3.ExternalProcessor_ProcessServer, observing func()) string {
	st := &stream{server: s, grpc: g}
	defer st.free()
	defer st.giveBack()
	ctx, cancel, in := receive(g)
	defer cancel(errEnded)
	drain := s.drained.Done()
	for {
		evict := s.received.evict
		if st.state > gathering {
			evict = nil // the request is decided
		}
		// First of all, for select takes any that is ready.
		if s.draining() && drain != nil {
			if st.giveUp(failDraining) {
				return st.state.String()
			}
			drain = nil // it leaves later
		}
		select {
		case req := <-in:
			if st.state == begun && req.GetObservabilityMode() {
				observing()
				return s.shadow(ctx, req, in)
			}
			if !st.handle(ctx, req) || drain == nil && st.mayLeave() {
				return st.state.String()
			}
		case <-st.late:
			// After a refusal, or a response that overtook the request, Envoy does not wait.
			if st.late = nil; st.state == gathering && !st.release(failBudget, nil) {
				return st.state.String()
			}
		case <-evict:
			if st.giveUp(failHeld) {
				return st.state.String()
			}
		case <-ctx.Done():
			return st.state.String()
		case <-drain:
		}
	}
}

// receive hands over the messages of g until g ends, which ends the context that
// it returns; so does cancel, which the caller owes. A message is handed over
// before the next is received, and the end is noticed while a message is worked
// on.
//
// The goroutine ends with the context or with the caller, that is the handler of
// g: gRPC ends a Recv when the handler returns.
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

// giveUp leaves a request without a decision to Envoy. It reports whether the stream may
// end now: it may not while Envoy needs kvroute for the rest of the request or response.
func (s *stream) giveUp(why failure) bool {
	switch s.state {
	case gathering:
		if !s.release(why, nil) {
			return true
		}
	case begun, waiting:
		s.server.failOpen(why, nil)
	default: // the request is on its way
	}
	return s.mayLeave()
}

// mayLeave says whether Envoy can go on without us. Chunks of a request that it has
// handed over are ours to give back; of a response that comes to us in chunks, some may
// be on their way, and would be missing from it in silence.
func (s *stream) mayLeave() bool {
	if s.echo && s.state != begun && s.state != refused {
		return false
	}
	return s.ended || s.flow == whole || s.state == begun || s.state == refused
}

// free gives the slot back.
func (s *stream) free() {
	if s.booked {
		s.booked = false
		if s.served || !s.server.headersSent.Load() {
			s.server.router.Free(s.id)
		} else {
			s.server.router.Abandon(s.id)
		}
	}
}

// handle answers one message. It returns false if the stream is of no more use.
func (s *stream) handle(ctx context.Context, req *extprocv3.ProcessingRequest) bool {
	if s.state == begun {
		s.configure(req.GetProtocolConfig())
	}
	m := s.classify(req)
	act, to := next(s.flow, s.state, m)
	switch act {
	case leave:
		s.server.metrics.stray(m)
		return false
	case ignore:
		s.server.metrics.stray(m)
		return true
	case proceed:
		s.state = to
		if s.server.conf.EndpointPicker && (m == headersOther || m == headersOtherEnd) {
			return s.pickAny(ctx, m)
		}
		return s.send(s.unchanged(m))
	case relay:
		s.state = to
		return s.send(s.relay(m, req)...)
	case hold:
		s.state = to
		return s.hold(m, req.GetRequestBody().GetBody())
	case refuse:
		return s.refuse(s.wrong)
	case tell:
		answer := s.answerResponse(req)
		s.state = to
		return s.send(answer)
	default:
		return s.answerRequest(ctx, m, req.GetRequestBody())
	}
}

// send sends answers, and reports whether that is still of use.
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

// answerResponse answers the response headers.
func (s *stream) answerResponse(req *extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
	h := req.GetResponseHeaders()
	s.server.headersSent.Store(true)
	s.served = strings.HasPrefix(status(h), "2")
	if !s.booked {
		return answer(responseHeaders, nil)
	}
	s.note(req)
	switch {
	case status(h) != "200":
	case isWhole(h): // its prompt was computed some time ago
		s.server.router.FirstToken(s.id, router.SignEnd)
	case !isEventStream(h): // a stream of another kind: nothing is known before its end
	case s.server.conf.FirstToken == FirstTokenResponseHeaders:
		s.server.router.FirstToken(s.id, router.SignHeaders)
	default:
		s.watching = s.chunks
	}
	var headers []string
	if s.server.conf.DecisionHeaders {
		d := &s.decision
		headers = append(headers,
			"x-dynamo-worker-instance-id", strconv.FormatUint(d.Worker.ID, 10),
			"x-dynamo-overlap-blocks", strconv.Itoa(d.OverlapBlocks),
			"x-dynamo-reason", string(d.Reason))
	}
	if s.server.conf.ModeOverride {
		headers = append(headers, headerRequestID, s.id)
	}
	if s.steering.test {
		headers = append(headers, s.testHeaders(req)...)
	}
	if headers == nil {
		return answer(responseHeaders, nil)
	}
	return setHeaders(responseHeaders, false, headers...)
}
