// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
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
	// FirstToken notes a request's first token, or with [router.SignEnd] that it came
	// before, and reports whether that was news. Unknown ids are no error.
	FirstToken(id string, by router.Sign) bool
	// Free ends a booking and reports whether there was one. Abandon does so for
	// a request that no worker served.
	Free(id string) bool
	Abandon(id string) bool
	// Served notes who answered a request when its response begins, so that its
	// booking can follow, and reports whether it did and who is avoided from now.
	Served(id string, r router.Response) (moved bool, avoided []router.Worker)
}

// stream is one main stream. Its handler's goroutine owns it.
type stream struct {
	// Set once.
	server *Server
	grpc   extprocv3.ExternalProcessor_ProcessServer

	state state

	// From the first message.
	flow      flow
	partial   bool // Envoy may truncate the body
	truncated bool // Envoy sent only the beginning of the body
	echo      bool // Envoy wants the chunks of the response back
	endpoint  openai.Endpoint
	wrong     *openai.Error // why they are refused
	salt      string        // the tenant, of the header x-tenant-id
	forged    []string      // those of them that are ours to set, or to heed
	sized     bool          // they have the body's length
	encoding  string        // of the body; "" for none
	inflated  []byte        // what the inflater has made of it, while a decision needs it
	steering  steering

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
		// First of all, for select takes any that is ready.
		if s.draining() && drain != nil {
			if st.drain() {
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
			// Behind a refusal, or a response that overtook the request, nobody waits.
			if st.late = nil; st.state == gathering && !st.release(failBudget, nil) {
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

// drain leaves the stream, unless Envoy needs us for the rest of the request. It
// returns whether it has. A routed response goes on untouched.
func (s *stream) drain() bool {
	switch s.state {
	case gathering:
		if !s.release(failDraining, nil) {
			return true
		}
	case begun, waiting:
		s.server.failOpen(failDraining, nil)
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
		if s.served || !s.server.told.Load() {
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
		if s.forged != nil && (m == headersOther || m == headersOtherEnd || m == headersOurs) {
			return s.send(s.strip(m))
		}
		return s.send(empty(m))
	case relay:
		s.state = to
		return s.send(s.relay(m, req)...)
	case hold:
		s.state = to
		return s.hold(m, req.GetRequestBody().GetBody())
	case refuse:
		s.state = to
		return s.send(s.refuse(s.wrong))
	case tell:
		answer := s.tell(req)
		s.state = to
		return s.send(answer)
	default:
		return s.decide(ctx, m, req.GetRequestBody())
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

// hold keeps a part of the request, unanswered.
func (s *stream) hold(m message, chunk []byte) bool {
	if m == headersOurs {
		if s.flow == ahead {
			// Envoy waits for no answer longer than for this one. In full duplex
			// it waits for ever, as it must for a slow client.
			s.late = time.After(s.server.conf.DecisionTimeout)
		}
		return true
	}
	s.held = append(s.held, chunk)
	if s.size += len(chunk); s.size > s.server.conf.MaxBodyBytes {
		s.state = refused
		s.held = nil
		s.giveBack()
		return s.send(s.refuse(tooLarge(s.server.conf.MaxBodyBytes)))
	}
	if !s.take(len(chunk)) {
		return s.release(failHeld, nil)
	}
	return true
}

// take reserves room for n bytes of the request's body, if there is any.
func (s *stream) take(n int) bool {
	if !s.server.held.take(n) {
		return false
	}
	s.taken += n
	return true
}

// giveBack makes room: the stream holds nothing of the request's body any more.
func (s *stream) giveBack() {
	s.server.held.give(s.taken)
	s.taken = 0
}

// release answers all that is held without a decision, for a reason.
func (s *stream) release(why failure, err error) bool {
	defer s.giveBack()
	s.server.failOpen(why, err)
	if s.state = passing; s.ended {
		s.state = passed
	}
	if s.forged != nil {
		return s.flush(requestChunk, s.strip(headersOurs), nil)
	}
	return s.flush(requestChunk, empty(headersOurs), nil)
}

// flush sends the answer to headers that had to wait, the answers to the chunks
// that came meanwhile, and one to m if that is trailers. A body that is not nil
// takes the place of the chunks.
func (s *stream) flush(m message, headers *extprocv3.ProcessingResponse, body []byte) bool {
	s.late = nil
	answers := []*extprocv3.ProcessingResponse{headers}
	held := s.held
	s.held = nil
	if s.flow == ahead {
		for range held {
			answers = append(answers, empty(requestBody))
		}
	} else {
		if body != nil {
			held = [][]byte{body}
		}
		last := m == requestBody
		if len(held) == 0 && last {
			held = [][]byte{nil}
		}
		for i, chunk := range held {
			answers = appendChunks(answers, requestBody, chunk, last && i == len(held)-1)
		}
	}
	if m == requestTrailers {
		answers = append(answers, empty(m))
	}
	return s.send(answers...)
}

// relay answers a part of a body that stays as it is.
func (s *stream) relay(m message, req *extprocv3.ProcessingRequest) []*extprocv3.ProcessingResponse {
	b, back := req.GetRequestBody(), s.flow == duplex
	if m == responseBody {
		b, back = req.GetResponseBody(), s.echo
		if s.watching && s.booked && s.events.in(b.GetBody()) {
			s.watching = false // nothing behind the first token is read
			s.server.router.FirstToken(s.id, router.SignObserver)
		}
	}
	if b == nil || !back {
		return []*extprocv3.ProcessingResponse{empty(m)}
	}
	return appendChunks(nil, m, b.GetBody(), b.GetEndOfStream())
}

// decide answers what is unanswered of the request, the last of it m, with a
// worker, a refusal, or nothing: fail open. It does not answer if nobody waits.
func (s *stream) decide(ctx context.Context, m message, b *extprocv3.HttpBody) bool {
	blind := m == headersOurs
	var fields openai.Body
	defer s.giveBack()
	body, ok := s.body(b)
	if !ok {
		s.server.failOpen(failHeld, nil)
		return s.pass(m)
	}
	if !blind {
		s.server.metrics.received(len(body))
		if limit := s.server.conf.MaxBodyBytes; len(body) > limit {
			s.state = refused
			return s.send(s.refuse(tooLarge(limit)))
		}
		s.truncated = s.partial && m == requestBody && !b.GetEndOfStream()
		defer s.deflate()
		text, read, err := s.plain(ctx, body, s.truncated)
		if err != nil {
			s.state = refused
			return s.send(s.refuse(tooLarge(s.server.conf.MaxBodyBytes)))
		}
		var bad *openai.Error
		if read {
			fields, bad = openai.Parse(s.endpoint, text)
		} else {
			blind = true
		}
		if bad != nil && s.truncated {
			blind = true
			fields, bad = openai.ParseTruncated(text), nil
		}
		if bad != nil {
			s.state = refused
			return s.send(s.refuse(bad))
		}
		if fields.Model == "" && !blind && fields.Size > 0 {
			// A request without a prompt, for an engine that serves but one
			// model: any of the pool will do.
			return s.pass(m)
		}
	}
	req := router.Request{
		Owned: true,
		Model: fields.Model, Prompt: fields.Request, Tokens: fields.Tokens, Salt: fields.CacheSalt,
		Unread: blind && fields.Model == "",
		// What is not known to be a stream is taken for none: a first token that is seen
		// all the same counts as well.
		Unseen:     !fields.Stream,
		WantTokens: len(s.server.forms) > 0, WantSecond: s.server.conf.SecondChoice != SecondNone,
	}
	if s.salt != "" { // the header can be a gateway's; the body is always the client's
		req.Salt = s.salt
	}
	if bad := s.steer(&req, &fields); bad != nil {
		s.state = refused
		return s.send(s.refuse(bad))
	}
	if _, may := s.direct(); may && openai.Queries(fields.NVExt) {
		return s.query(ctx, req, fields.Model)
	}
	starting := s.server.starting()
	err := s.ask(ctx, &req)
	switch {
	case err == nil:
		s.state = routed
		if s.flow == whole || m == headersOurs || m == headersBodyless {
			return s.send(s.route(m, s.forward(&fields, m, body)))
		}
		out := s.forward(&fields, m, body)
		return s.flush(m, s.route(headersOurs, out), out)
	case ctx.Err() != nil:
		return false
	}
	if starting && unserved(err) {
		s.server.failOpen(failStarting, err)
		return s.pass(m)
	}
	if fields.Model == "" && !blind && errors.Is(err, router.ErrUnknownModel) {
		return s.pass(m) // there are several, and one of the pool knows its own
	}
	// Nothing is known of a request that was not seen, so it is not refused.
	if r := s.refusal(err, fields.Model); r != nil && (!blind || errors.Is(err, router.ErrNoWorkers)) {
		s.state = refused
		return s.send(s.refuse(r))
	}
	why := failInternal
	switch {
	case errors.Is(err, router.ErrDecisionTimeout) || errors.Is(err, context.DeadlineExceeded):
		why = failBudget
	case blind && s.encoding != "":
		why = failEncoding
	case blind:
		why = failMode
	}
	s.server.failOpen(why, err)
	return s.pass(m)
}

// deflate gives back what a compressed body has become.
func (s *stream) deflate() {
	s.server.inflater.giveBack(s.inflated)
	s.inflated = nil
}

// pass answers what is unanswered of the request, the last of it m, with nothing.
func (s *stream) pass(m message) bool {
	if s.state = passing; s.ended {
		s.state = passed
	}
	headers := empty(headersOurs)
	if s.forged != nil {
		headers = s.strip(headersOurs)
	}
	switch {
	case m == headersOurs || m == headersBodyless:
		return s.send(headers)
	case s.flow == whole:
		return s.send(empty(m))
	}
	return s.flush(m, headers, nil)
}

// body returns the request's body, of which b is the last part, if there is room for it.
func (s *stream) body(b *extprocv3.HttpBody) (body []byte, ok bool) {
	last := b.GetBody()
	if s.flow == whole {
		return last, s.take(len(last))
	}
	if b != nil {
		s.held = append(s.held, last)
	}
	switch {
	case !s.take(len(last)):
		return nil, false
	case len(s.held) == 1:
		return s.held[0], true
	case !s.take(s.size + len(last)): // of the joined copy, for as long as there are both
		return nil, false
	}
	body = bytes.Join(s.held, nil)
	if s.flow == ahead {
		clear(s.held) // only their number matters: each is answered
	} else {
		s.held = [][]byte{body}
	}
	return body, true
}

// forward returns the body with the prompt as ids, nil if it stays as it is.
func (s *stream) forward(fields *openai.Body, m message, body []byte) []byte {
	t := s.decision.Tokens
	if s.decision.Tokens = nil; t == nil || m != requestBody {
		return nil
	}
	switch {
	case s.encoding != "":
		s.server.metrics.forward("", keptEncoding)
		return nil
	case s.flow == ahead, s.truncated: // what follows a part is not ours to give a length to
		s.server.metrics.forward("", keptMode)
		return nil
	}
	out, form, outcome := s.server.forms.forward(s.endpoint, fields, t, body, s.server.conf.MaxBodyBytes)
	s.server.metrics.forward(form, outcome)
	return out
}

// ask gets a decision from the router. If the request has to wait for a worker, Envoy is
// told to wait, too.
func (s *stream) ask(ctx context.Context, req *router.Request) error {
	conf := &s.server.conf
	req.DecisionTimeout, req.QueueWait = conf.DecisionTimeout, conf.QueueWait
	req.Waiting = func() {
		// An error means that the stream is at its end, which ends ctx.
		_ = s.grpc.Send(&extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(conf.QueueWait + answerTime)})
	}
	s.id = s.server.newID()
	s.booked = true // before the call, which may panic behind its booking
	req.ID = s.id
	d, err := s.server.router.BestWorker(ctx, *req)
	if err != nil {
		// Nothing is booked, or somebody else's: see router.ErrDuplicate.
		s.booked = false
		return err
	}
	if !d.Address.IsValid() {
		s.free()
		return fmt.Errorf("extproc: worker %d has no address", d.Worker.ID)
	}
	if !s.server.conf.mayServe(d.Address) {
		s.free()
		return fmt.Errorf("extproc: worker %d at %s is outside the worker networks", d.Worker.ID, d.Address)
	}
	s.decision = d
	return nil
}

// tell answers the response headers.
func (s *stream) tell(req *extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
	h := req.GetResponseHeaders()
	s.server.told.Store(true)
	s.served = strings.HasPrefix(status(h), "2")
	if !s.booked {
		return empty(responseHeaders)
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
		return empty(responseHeaders)
	}
	return setHeaders(responseHeaders, false, headers...)
}
