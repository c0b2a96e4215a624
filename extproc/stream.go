// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/durationpb"

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
	forged   bool // they have some that are ours to set, or to heed
	sized    bool // they have the body's length
	steering steering

	id       string // of our request; none before the decision
	booked   bool   // the slot must be freed
	served   bool   // the response began well
	decision router.Decision
}

// Causes of a context's end.
var (
	errEnded  = errors.New("the stream has ended")
	errBudget = errors.New("the decision took too long")
	// errQueueWait is told to the client.
	errQueueWait = errors.New("the request waited too long for a worker")
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
	req := router.Request{
		Owned: true,
		Model: fields.Model, Prompt: fields.Request, Tokens: fields.Tokens, Salt: fields.CacheSalt,
		WantTokens: len(s.server.forms) > 0,
	}
	if req.Salt == "" {
		req.Salt = s.salt
	}
	if bad = s.steer(&req, &fields); bad != nil {
		return s.refuse(bad), refused
	}
	err := s.ask(ctx, req)
	if err == nil {
		return s.route(m, s.forward(&fields, m, body)), routed
	}
	if ctx.Err() != nil {
		return nil, s.state
	}
	if r := refusal(err, fields.Model, s.server.conf.OverloadStatus); r != nil {
		return s.refuse(r), refused
	}
	why := failInternal
	if errors.Is(err, errBudget) || errors.Is(err, context.DeadlineExceeded) {
		why = failBudget
	}
	s.server.failOpen(why, err)
	return empty(m), passed
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

// ask gets a decision from the router. It takes as long as a decision may; if the
// request has to wait for a worker, Envoy is told to be patient, and it may take
// as long as a wait may.
func (s *stream) ask(ctx context.Context, req router.Request) error {
	conf := &s.server.conf
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	budget := time.AfterFunc(conf.DecisionTimeout, func() { cancel(errBudget) })
	defer budget.Stop()
	var patience *time.Timer
	req.Waiting = func() {
		if !budget.Stop() {
			return // it is over
		}
		patience = time.AfterFunc(conf.QueueWait, func() { cancel(errQueueWait) })
		// An error means that the stream is at its end, which ends ctx.
		_ = s.grpc.Send(&extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(conf.QueueWait + answerTime)})
	}
	defer func() {
		if patience != nil {
			patience.Stop()
		}
	}()
	s.id = s.server.newID()
	s.booked = true // before the call, which may panic behind its booking
	req.ID = s.id
	d, err := s.server.router.BestWorker(ctx, req)
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

// tell answers the response headers.
func (s *stream) tell(h *extprocv3.HttpHeaders) *extprocv3.ProcessingResponse {
	s.server.told.Store(true)
	s.served = strings.HasPrefix(status(h), "2")
	if s.state != routed {
		return empty(responseHeaders)
	}
	// An answer that is no stream comes as a whole: its prompt is computed.
	if status(h) == "200" && (s.server.conf.FirstToken == FirstTokenResponseHeaders || !isEventStream(h)) {
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
