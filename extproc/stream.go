// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"net/http"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/metadata"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// metaRole is the metadata that Envoy's configuration marks observer streams with.
// They also have headerRequestID. Envoy Gateway cannot add metadata: see [Server.shadow].
const metaRole = "x-dynamo-role"

// metaRanks is in the metadata of the streams of an Envoy that reads headerFirstRank and headerFallbackRank.
const metaRanks = "x-dynamo-rank-per-attempt"

// metaHosts is in the metadata of the streams of an Envoy that reads headerFallbackHost.
const metaHosts = "x-dynamo-host-per-attempt"

// metaInfers is in the metadata of the streams of an Envoy that opens no observer stream for ids with inferredMark.
const metaInfers = "x-dynamo-infers"

// Process handles one stream. It never returns an error: after a nil return Envoy
// continues without kvroute, after an error it could fail the request.
func (s *Server) Process(g extprocv3.ExternalProcessor_ProcessServer) error {
	k := mainStream
	if incoming(g.Context(), metaRole) == "observer" {
		k = observerStream
	}
	end := endPanic
	open := s.open[k].Add(1)
	defer func() {
		s.open[k].Add(-1)
		s.metrics.ends.Count(k.String(), end)
	}()
	defer s.recoverPanic(k)
	switch {
	case open > int64(s.conf.MaxStreams):
		if end = endLimit; k == mainStream {
			s.failOpen(failLimit, nil)
		}
	case k == observerStream:
		_, stop := ending(g.Context())
		defer stop()
		end = s.observe(incoming(g.Context(), headerRequestID), &wait{end: stop}, g.Recv)
	default:
		end = s.serve(g, &k)
	}
	return nil
}

// incoming returns the first value of a name in a stream's metadata, "" if there is none.
func incoming(ctx context.Context, name string) string {
	for _, v := range metadata.ValueFromIncomingContext(ctx, name) {
		return v
	}
	return ""
}

// stream is one main stream. Its handler's goroutine owns it.
type stream struct {
	*Server // with the settings, the router and the metrics
	grpc    extprocv3.ExternalProcessor_ProcessServer
	state   state

	// The wait for Envoy's next message.
	wait        wait
	keptInDrain bool // the server drains, and Envoy still needs the stream
	// messages is not nil while a goroutine receives. It gets the next message, nil at the stream's end.
	messages chan *extprocv3.ProcessingRequest

	// The request.
	head      // what the first message says
	arrival   router.Arrival
	ended     bool        // the last part of the request has come
	reserved  reservation // of memory, for the body
	chunks    [][]byte    // parts of the body that are not answered yet
	size      int         // bytes of these chunks
	malformed bool        // the body is not JSON
	checked   bool        // the body: it has no fields that steer, or replaced is without them
	replaced  []byte      // the body without the fields that steer; nil if it stays as it is
	// Of the answer to the headers if Envoy waits for it, or while a large body comes, of the next call of moreTime.
	deadline <-chan time.Time

	// A body that Envoy passes on before kvroute has checked it.
	unchecked bool
	parts     [][]byte

	// The decision.
	id       string // the request's id; "" before the decision
	gives    bool   // the response may give out an id
	booked   bool   // the slot must be freed
	extended bool   // Envoy has been asked for more time
	hasTurn  bool   // see takeTurn
	decision router.Decision

	// The response.
	served   bool                // it has a status 2xx
	awaited  bool                // it is a stream, and has no token yet as far as this stream knows
	usage    *openai.UsageReader // of the response's body; nil if Envoy does not send it
	given    *givenReader        // of the response's body; nil if it gives out no id, or Envoy does not send it
	watching bool                // the stream looks for the first token in the response's body, whose end has not come
	events   firstEvent          // the state of that search
}

// serve handles a main stream and returns the name of its last state. It frees the slot at the end
// of the stream, whatever the cause. If the first message is that of an observer stream, serve
// handles the stream as one, and changes its kind.
func (s *Server) serve(g extprocv3.ExternalProcessor_ProcessServer, k *kind) string {
	ctx, end := ending(g.Context())
	defer end()
	st := &stream{Server: s, grpc: g, wait: wait{end: end}, reserved: reservation{of: &s.bodies}}
	defer st.free()
	defer st.reserved.giveBack()
	for more := true; more; {
		req, why := st.receive()
		switch why {
		case received:
			if st.state == begun && req.GetObservabilityMode() {
				return s.shadow(g, k, &st.wait, req)
			}
			more = st.handle(ctx, req) && !(st.keptInDrain && st.mayEnd())
		case deadlinePassed:
			more = st.passDeadline()
		case evicted:
			more = !st.giveUp(failHeld)
		case drained:
			st.keptInDrain = !st.giveUp(failDraining)
			more = st.keptInDrain
			st.watching = st.watching && more // the client has not left
		case streamEnded, outdated:
			more = false
		}
	}
	return st.state.String()
}

// handle answers one message. It returns false if the stream must end.
func (s *stream) handle(ctx context.Context, req *extprocv3.ProcessingRequest) bool {
	if s.state == begun {
		s.arrival.Began = time.Now()
		s.seen.Add(1)
		s.readModes(req.GetProtocolConfig())
		if s.mode != buffered || s.echo {
			s.wait.woken = make(chan struct{}, 1)
		}
	}
	m := s.classify(req)
	if s.mode == buffered && m == headersOurs && s.large() {
		s.wait.woken = make(chan struct{}, 1)
		s.deadline = s.nextReminder()
	}
	act, to := next(s.mode, s.state, m)
	if act == proceed && m.isOther() && s.held != "" {
		if answer := s.holder(ctx, m); answer != nil {
			s.state = to
			return s.send(answer)
		}
	}
	if act == proceed && m.isOther() && s.conf.EndpointPicker {
		act, to = decide, s.state // a gateway with that protocol cannot choose an endpoint itself
	}
	if s.unchecked && s.state != refused && (m == requestChunk || m == requestBody || m == requestTrailers) {
		passes, more := s.inspect(m, req.GetRequestBody())
		if !passes || !more {
			return more
		}
	}
	s.state = to
	switch act {
	case proceed:
		return s.send(s.unchanged(m))
	case decide:
		return s.answerRequest(ctx, m, req.GetRequestBody())
	case refuse:
		if s.models != nil {
			s.metrics.lists.Count()
			return s.send(immediate(http.StatusOK, []string{"content-type", "application/json"}, s.models, "kvroute_models"))
		}
		return s.refuse(s.wrong)
	case hold:
		return s.hold(m, req.GetRequestBody().GetBody())
	case relay:
		return s.send(s.relay(m, req)...)
	case respond:
		return s.send(s.answerResponse(req))
	case leave, ignore:
	}
	s.metrics.strays.Count(m.String())
	return act == ignore
}

// send sends answers. It returns false if the stream must end.
func (s *stream) send(answers ...*extprocv3.ProcessingResponse) bool {
	for _, a := range answers {
		if a.GetRequestHeaders() != nil && s.conf.ModeOverride && s.mode == buffered {
			a.ModeOverride = s.override()
		}
		if s.grpc.Send(a) != nil {
			return false
		}
	}
	return true
}

// free frees the slot, if there is one, or leaves that to the observer stream: only that one sees whether the
// client left before the first token.
func (s *stream) free() {
	if !s.booked {
		return
	}
	s.usage.Report(s.id, s.router.ReportUsage)
	s.booked = false
	switch {
	case s.watching: // the client left, or the response broke off, before the first token
		s.router.Leave(s.id, true)
	case s.awaited && s.watched.handOver(s.id):
	case s.served || !s.headersSent.Load():
		s.router.Free(s.id)
	case s.state == responding:
		s.router.Abandon(s.id)
	default:
		s.router.Leave(s.id, s.state == routed)
	}
}
