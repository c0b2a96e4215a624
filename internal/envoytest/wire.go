// SPDX-License-Identifier: Apache-2.0

package envoytest

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/metadata"
)

// stream is one gRPC stream to an external processor, main or observing. Its own goroutine
// receives messages; it ends with the stream, at the latest when the test ends.
type stream struct {
	t       TB
	grpc    extprocv3.ExternalProcessor_ProcessClient
	reset   context.CancelFunc
	answers chan *extprocv3.ProcessingResponse
	patient chan time.Duration // requested with override_message_timeout
	ended   chan struct{}

	// duplex means that parts of bodies come back in any number, and messages with such a part
	// require no answer of their own.
	duplex bool

	mu sync.Mutex
	// mu guards the field below.
	due []string // types of the messages that wait for an answer
}

// open begins a stream. meta are the pairs of its metadata. An observing stream has metadata and
// must not be answered.
func (l *Link) open(observer, duplex bool, meta ...string) *stream {
	l.t.Helper()
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(l.t.Context(), meta...))
	g, err := l.client.Process(ctx)
	if err != nil {
		cancel()
		l.t.Fatalf("envoytest: open a stream: %v", err)
	}
	s := &stream{
		t: l.t, grpc: g, reset: cancel, ended: make(chan struct{}), duplex: duplex,
		// Room for the largest number of answers that a test waits for at once.
		answers: make(chan *extprocv3.ProcessingResponse, 1024),
		patient: make(chan time.Duration, 16),
	}
	go s.receive(observer)
	l.t.Cleanup(func() {
		cancel()
		<-s.ended
	})
	return s
}

func (s *stream) receive(observer bool) {
	defer close(s.ended)
	for {
		a, err := s.grpc.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return
		case err != nil:
			if !fine(err) {
				s.t.Errorf("envoytest: the stream ended with %v", err)
			}
			return
		case observer:
			s.t.Errorf("envoytest: an observing stream was answered: %v", a)
			continue
		}
		if s.duplex && streamed(a) != nil {
			s.answers <- a
			continue
		}
		if d := a.GetOverrideMessageTimeout(); d != nil && a.Response == nil {
			s.patient <- d.AsDuration()
			continue
		}
		s.mu.Lock()
		var to string
		if len(s.due) > 0 {
			to, s.due = s.due[0], s.due[1:]
		}
		s.mu.Unlock()
		switch {
		case to == "":
			s.t.Errorf("envoytest: an answer that nobody waits for: %v", a)
		case !answers(a, to):
			s.t.Errorf("envoytest: the answer to %s is %T", to, a.Response)
		default:
			s.answers <- a
		}
	}
}

// streamed returns the part of a body that an answer gives back in full duplex.
func streamed(a *extprocv3.ProcessingResponse) *extprocv3.StreamedBodyResponse {
	c := a.GetRequestBody().GetResponse()
	if a.GetResponseBody() != nil {
		c = a.GetResponseBody().GetResponse()
	}
	return c.GetBodyMutation().GetStreamedResponse()
}

// answers reports whether a is a correct answer to a message of type to. The type names of both
// sides differ only in the side.
func answers(a *extprocv3.ProcessingResponse, to string) bool {
	switch a.Response.(type) {
	case *extprocv3.ProcessingResponse_ImmediateResponse:
		return true
	case *extprocv3.ProcessingResponse_RequestHeaders:
		return strings.HasSuffix(to, "_RequestHeaders")
	case *extprocv3.ProcessingResponse_RequestBody:
		return strings.HasSuffix(to, "_RequestBody")
	case *extprocv3.ProcessingResponse_RequestTrailers:
		return strings.HasSuffix(to, "_RequestTrailers")
	case *extprocv3.ProcessingResponse_ResponseHeaders:
		return strings.HasSuffix(to, "_ResponseHeaders")
	case *extprocv3.ProcessingResponse_ResponseBody:
		return strings.HasSuffix(to, "_ResponseBody")
	case *extprocv3.ProcessingResponse_ResponseTrailers:
		return strings.HasSuffix(to, "_ResponseTrailers")
	}
	return false
}

// send sends m. If want is not empty, m requires an answer. A stream that the other side has ended
// causes no error: Envoy then continues alone.
func (s *stream) send(m *extprocv3.ProcessingRequest, want string) {
	s.t.Helper()
	if want != "" {
		s.mu.Lock()
		s.due = append(s.due, want)
		s.mu.Unlock()
	}
	if err := s.grpc.Send(m); err != nil && !errors.Is(err, io.EOF) && !fine(err) {
		s.t.Errorf("envoytest: send: %v", err)
	}
}

func (s *stream) closeSend() { _ = s.grpc.CloseSend() } // fails harmlessly if the stream has ended

func (s *stream) over() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// Observer is the observing filter's stream of an exchange. The test fails if an answer arrives on
// it or it ends with an error.
type Observer struct{ stream *stream }

// Observe opens the observing stream, as Envoy does at the response's headers.
func (x *Exchange) Observe() *Observer {
	x.link.t.Helper()
	id := x.Header["x-dynamo-request-id"]
	if id == "" {
		id = "-"
	}
	return x.link.Observe(id)
}

// Observe opens an observing stream for a request id.
func (l *Link) Observe(id string) *Observer {
	l.t.Helper()
	return &Observer{l.open(true, false, "x-dynamo-request-id", id, "x-dynamo-role", "observer")}
}

// Respond sends the response's headers.
func (o *Observer) Respond(status int, header ...string) {
	o.stream.send(&extprocv3.ProcessingRequest{
		Request:           &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers(responseHeaders(status, header))},
		ObservabilityMode: true,
	}, "")
}

// Chunk sends a part of the response's body; end marks the last part.
func (o *Observer) Chunk(data []byte, end bool) {
	o.stream.send(&extprocv3.ProcessingRequest{
		Request:           &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: data, EndOfStream: end}},
		ObservabilityMode: true,
	}, "")
}

// End closes the stream from Envoy's side.
func (o *Observer) End() {
	o.stream.closeSend()
	o.stream.reset()
}

// Ended reports whether the stream has ended, by either side.
func (o *Observer) Ended() bool { return o.stream.over() }
