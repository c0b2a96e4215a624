// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// Router decides and keeps account. All its methods may be called at any time, by
// any number of goroutines.
type Router interface {
	// BestWorker decides where a request goes and books it under its ID; after
	// an error nothing is booked. It returns soon after ctx ends. The spans of
	// req are not kept. Errors other than [router.ErrUnknownModel] and
	// [router.ErrNoWorkers] make the request fail open.
	BestWorker(ctx context.Context, req router.Request) (router.Decision, error)
	// MarkPrefillCompleted notes a request's first token and reports whether
	// that was news. Unknown ids are no error.
	MarkPrefillCompleted(id string) bool
	// Free ends a booking and reports whether there was one. Abandon does so for
	// a request that no worker served.
	Free(id string) bool
	Abandon(id string) bool
}

// stream is one main stream. Its handler's goroutine owns it.
type stream struct {
	// Set once.
	server *Server
	grpc   extprocv3.ExternalProcessor_ProcessServer

	state state

	// From the request headers.
	partial  bool // Envoy may cut the body off
	endpoint openai.Endpoint
	wrong    *openai.Error // why they are refused
	salt     string
	forged   bool // they have some that are ours to set
	sized    bool // they have the body's length

	id       string // of our request; none before the decision
	booked   bool   // the slot must be freed
	served   bool   // the response began well
	decision router.Decision
}

// Causes of a context's end.
var (
	errEnded  = errors.New("the stream has ended")
	errBudget = errors.New("the decision took too long")
)

// serve plays a main stream to its end and returns the name of the state that it
// ended in. However it ends, the slot is freed.
func (s *Server) serve(g extprocv3.ExternalProcessor_ProcessServer) string {
	st := &stream{server: s, grpc: g}
	defer st.free()
	ctx, cancel, in := receive(g)
	defer cancel(errEnded)
	for {
		// First of all, for select takes any that is ready.
		if s.draining() {
			st.drain()
			return st.state.String()
		}
		select {
		case req := <-in:
			if !st.handle(ctx, req) {
				return st.state.String()
			}
		case <-ctx.Done():
			return st.state.String()
		case <-s.drain:
		}
	}
}

func (s *Server) draining() bool {
	select {
	case <-s.drain:
		return true
	default:
		return false
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

// drain leaves the stream. A routed response goes on untouched.
func (s *stream) drain() {
	if s.state == begun || s.state == waiting {
		s.server.failOpen(failDraining, nil)
	}
}

// free gives the slot back.
func (s *stream) free() {
	if s.booked {
		s.booked = false
		if s.served || !s.server.told.Load() {
			s.server.router.Free(s.id)
		} else {
			s.server.router.Abandon(s.id)
		}
	}
}

// handle answers one message. It returns false if the stream is of no more use.
func (s *stream) handle(ctx context.Context, req *extprocv3.ProcessingRequest) bool {
	if s.state == begun && !s.supported(req.GetProtocolConfig()) {
		// Nothing is held back yet, so Envoy can go on with all of the request.
		s.server.failOpen(failMode, nil)
		return false
	}
	m := s.classify(req)
	act, to := next(s.state, m)
	var answer *extprocv3.ProcessingResponse
	switch act {
	case leave:
		s.server.metrics.stray(m)
		return false
	case ignore:
		s.server.metrics.stray(m)
		return true
	case proceed:
		if answer = empty(m); s.forged && s.state == begun {
			answer = strip(m)
		}
	case refuse:
		answer = s.refuse(s.wrong)
	case decide:
		answer, to = s.decide(ctx, m, req.GetRequestBody())
	case tell:
		answer = s.tell(req.GetResponseHeaders())
	}
	if answer == nil {
		return false
	}
	s.state = to
	return s.grpc.Send(answer) == nil
}

// decide answers the message m, which completed the request, with a worker, a
// refusal, or nothing: fail open. The answer is nil if nobody waits for it.
func (s *stream) decide(ctx context.Context, m message, b *extprocv3.HttpBody) (*extprocv3.ProcessingResponse, state) {
	if s.partial && m == requestBody && !b.GetEndOfStream() {
		s.server.failOpen(failMode, errors.New("the body was cut off"))
		return empty(m), passed
	}
	body := b.GetBody()
	s.server.metrics.received(len(body))
	if limit := s.server.conf.MaxBodyBytes; len(body) > limit {
		return s.refuse(tooLarge(limit)), refused
	}
	fields, bad := openai.Parse(s.endpoint, body)
	if bad != nil {
		return s.refuse(bad), refused
	}
	if fields.Model == "" {
		// An endpoint without a prompt, of an engine that serves but one model:
		// any of the pool will do.
		return empty(m), passed
	}
	err := s.ask(ctx, &fields)
	if err == nil {
		return s.route(m, s.forward(&fields, m, body)), routed
	}
	if ctx.Err() != nil {
		return nil, s.state
	}
	if r := refusal(err, fields.Model); r != nil {
		return s.refuse(r), refused
	}
	why := failInternal
	if errors.Is(err, errBudget) || errors.Is(err, context.DeadlineExceeded) {
		why = failBudget
	}
	s.server.failOpen(why, err)
	return empty(m), passed
}

// ask gets a decision from the router.
func (s *stream) ask(ctx context.Context, fields *openai.Body) error {
	salt := fields.CacheSalt
	if salt == "" {
		salt = s.salt
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.server.conf.DecisionTimeout, errBudget)
	defer cancel()
	s.id = s.server.newID()
	s.booked = true // before the call, which may panic behind its booking
	d, err := s.server.router.BestWorker(ctx, router.Request{
		ID:     s.id,
		Model:  fields.Model,
		Prompt: fields.Request,
		Tokens: fields.Tokens,
		Salt:   salt,

		WantTokens: len(s.server.forms) > 0,
	})
	if err != nil {
		// Nothing is booked, or somebody else's: see router.ErrDuplicate.
		s.booked = false
		return err
	}
	if !d.Address.IsValid() {
		s.free()
		return fmt.Errorf("extproc: worker %d has no address", d.Worker.ID)
	}
	s.decision = d
	return nil
}

// forward returns the body with the prompt as ids, nil if it stays as it is.
func (s *stream) forward(fields *openai.Body, m message, body []byte) []byte {
	t := s.decision.Tokens
	if s.decision.Tokens = nil; t == nil || m != requestBody {
		return nil
	}
	out, form, outcome := s.server.forms.forward(s.endpoint, fields, t, body, s.server.conf.MaxBodyBytes)
	s.server.metrics.forward(form, outcome)
	return out
}

// tell answers the response headers.
func (s *stream) tell(h *extprocv3.HttpHeaders) *extprocv3.ProcessingResponse {
	s.server.told.Store(true)
	s.served = strings.HasPrefix(status(h), "2")
	if s.state != routed {
		return empty(responseHeaders)
	}
	if s.server.conf.FirstToken == FirstTokenResponseHeaders && status(h) == "200" {
		s.server.firstToken(s.id, FirstTokenResponseHeaders)
	}
	if !s.server.conf.DecisionHeaders {
		return empty(responseHeaders)
	}
	d := &s.decision
	return setHeaders(responseHeaders, false,
		"x-dynamo-worker-instance-id", strconv.FormatUint(d.Worker.ID, 10),
		"x-dynamo-overlap-blocks", strconv.Itoa(d.OverlapBlocks),
		"x-dynamo-reason", string(d.Reason))
}
