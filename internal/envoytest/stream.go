// SPDX-License-Identifier: Apache-2.0

package envoytest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TB has the methods of a test that a [Link] uses. It is not testing.TB itself, so that the
// demo, which starts Envoys with this package, does not link package testing.
type TB interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(f func())
	Context() context.Context
}

// stream is one gRPC stream to an external processor, main or observing. Its own goroutine
// receives messages; it ends with the stream, at the latest when the test ends.
type stream struct {
	t       TB
	grpc    extprocv3.ExternalProcessor_ProcessClient
	reset   context.CancelFunc
	answers chan *extprocv3.ProcessingResponse
	patient chan time.Duration // requested with override_message_timeout
	ended   chan struct{}
	ignored atomic.Int32 // requests for a longer timeout that Envoy ignores

	// duplex means that parts of bodies come back in any number, and messages with such a part
	// require no answer of their own.
	duplex bool

	mu sync.Mutex
	// mu guards the field below.
	due []string // types of the messages that wait for an answer
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
			s.mu.Lock()
			waits := len(s.due) > 0
			s.mu.Unlock()
			if !waits {
				s.ignored.Add(1)
				continue
			}
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
		case to == "" && a.GetImmediateResponse() == nil: // Envoy sends such a response at any time
			s.t.Errorf("envoytest: an answer that nobody waits for: %v", a)
		case a.GetImmediateResponse() == nil && kind(a.Response) != to:
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

// kind returns the name of a message's type, which is the same for a message and its answer.
func kind(message any) string {
	name := fmt.Sprintf("%T", message)
	return name[strings.LastIndexByte(name, '_')+1:]
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

// pairs returns the headers of a list of names and values.
func pairs(list []string) map[string]string {
	h := map[string]string{}
	for i := 0; i < len(list); i += 2 {
		h[list[i]] = list[i+1]
	}
	return h
}

// headers returns the message form of h.
func headers(h map[string]string) *extprocv3.HttpHeaders {
	var m corev3.HeaderMap
	for k, v := range h {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: k, RawValue: []byte(v)})
	}
	return &extprocv3.HttpHeaders{Headers: &m}
}

// fine reports whether a stream ended in an orderly way for Envoy, or was closed by this package.
func fine(err error) bool {
	code := status.Code(err)
	return code == codes.OK || code == codes.Canceled
}
