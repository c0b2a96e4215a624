// SPDX-License-Identifier: Apache-2.0

package envoytest_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/internal/envoytest"
)

// recorder is a TB that only records failures.
type recorder struct {
	*testing.T

	mu   sync.Mutex
	said []string
}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = append(r.said, fmt.Sprintf(format, args...))
}

func (r *recorder) all() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.said, "\n")
}

// processor is an external processor that handles each message with the given function.
type processor struct {
	extprocv3.UnimplementedExternalProcessorServer

	on func(g extprocv3.ExternalProcessor_ProcessServer, m *extprocv3.ProcessingRequest) error
}

func (p processor) Process(g extprocv3.ExternalProcessor_ProcessServer) error {
	for {
		m, err := g.Recv()
		if err != nil {
			return nil //nolint:nilerr // the end of a stream is not an error
		}
		if err := p.on(g, m); err != nil {
			return err
		}
	}
}

// play sends a request and the response's headers to a processor whose correct answers are changed
// by twist, which returns the answers to send.
func play(t *testing.T, twist func(*extprocv3.ProcessingResponse) ([]*extprocv3.ProcessingResponse, error)) (*envoytest.Exchange, string) {
	r := &recorder{T: t}
	server := grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(server, processor{on: func(g extprocv3.ExternalProcessor_ProcessServer, m *extprocv3.ProcessingRequest) error {
		answers, err := twist(right(m))
		for _, a := range answers {
			if sendErr := g.Send(a); sendErr != nil {
				return sendErr
			}
		}
		return err
	}})
	link := envoytest.Serve(r, server)
	x := link.Do(envoytest.Request{Path: "/", Body: []byte("{}")})
	x.Respond(200)
	synctest.Wait()
	if !x.Ended() {
		x.End()
	}
	return x, r.all()
}

func right(m *extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
	switch m.Request.(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}}}
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocv3.HeadersResponse{}}}
	}
	return bodyAnswer(&extprocv3.CommonResponse{
		ClearRouteCache: true,
		HeaderMutation: &extprocv3.HeaderMutation{
			SetHeaders:    []*corev3.HeaderValueOption{option("x-dynamo-worker", "", "a:1", corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD)},
			RemoveHeaders: []string{"x-dynamo-request-id"},
		},
	})
}

func bodyAnswer(c *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: &extprocv3.BodyResponse{Response: c}}}
}

func option(name, value, raw string, how corev3.HeaderValueOption_HeaderAppendAction) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: name, Value: value, RawValue: []byte(raw)}, AppendAction: how}
}

type answers = []*extprocv3.ProcessingResponse

func TestAnExchangeThatKeepsTheRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, said := play(t, func(a *extprocv3.ProcessingResponse) (answers, error) { return answers{a}, nil })
		if said != "" || x.Header["x-dynamo-worker"] != "a:1" || !x.Rerouted || x.Left || x.Refusal != nil {
			t.Errorf("got %+v and %q, want a routed exchange", x, said)
		}
	})
}

// Each violation of the protocol is reported, including those that would only affect Envoy.
func TestBreachesAreReported(t *testing.T) {
	const overwrite = corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
	set := func(o *corev3.HeaderValueOption) func(*extprocv3.ProcessingResponse) (answers, error) {
		return func(a *extprocv3.ProcessingResponse) (answers, error) {
			if a.GetRequestBody() == nil {
				return answers{a}, nil
			}
			return answers{bodyAnswer(&extprocv3.CommonResponse{HeaderMutation: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{o}}})}, nil
		}
	}
	for _, c := range []struct {
		name, want string
		twist      func(*extprocv3.ProcessingResponse) (answers, error)
	}{
		{"two answers", "an answer that nobody waits for", func(a *extprocv3.ProcessingResponse) (answers, error) {
			if a.GetRequestBody() == nil {
				return answers{a}, nil
			}
			return answers{a, a}, nil
		}},
		{"an answer of another kind", "the answer to", func(*extprocv3.ProcessingResponse) (answers, error) {
			return answers{bodyAnswer(nil)}, nil
		}},
		{"no answer in time", "", func(*extprocv3.ProcessingResponse) (answers, error) { return nil, nil }},
		{"an end with an error", "the stream ended with", func(*extprocv3.ProcessingResponse) (answers, error) {
			return nil, errors.New("broken")
		}},
		{"a forbidden header", "not allowed by mutation_rules", set(option("x-other", "", "a", overwrite))},
		{"a value instead of a raw value", "want raw_value", set(option("x-dynamo-worker", "a", "", overwrite))},
		{"a repeated header", "want it overwritten", set(option("x-dynamo-worker", "", "a", corev3.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD))},
		{"an empty body", "or taken away", func(a *extprocv3.ProcessingResponse) (answers, error) {
			if a.GetRequestBody() == nil {
				return answers{a}, nil
			}
			return answers{bodyAnswer(&extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{}})}, nil
		}},
		{"a forbidden removal", "the removal of header", func(a *extprocv3.ProcessingResponse) (answers, error) {
			if h := a.GetRequestHeaders(); h != nil {
				h.Response = &extprocv3.CommonResponse{HeaderMutation: &extprocv3.HeaderMutation{RemoveHeaders: []string{"cookie"}}}
			}
			return answers{a}, nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				x, said := play(t, c.twist)
				if !strings.Contains(said, c.want) {
					t.Errorf("got %q, want %q in it", said, c.want)
				}
				if c.want == "" && (said != "" || !x.Left || time.Since(start) != 2*time.Second) {
					t.Errorf("left: %v after %v, said %q; want Envoy to go on alone after 2s", x.Left, time.Since(start), said)
				}
			})
		})
	}
}

func TestAnObserverMustNotBeAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorder{T: t}
		server := grpc.NewServer()
		extprocv3.RegisterExternalProcessorServer(server, processor{on: func(g extprocv3.ExternalProcessor_ProcessServer, m *extprocv3.ProcessingRequest) error {
			return g.Send(right(m))
		}})
		o := envoytest.Serve(r, server).Observe("1")
		o.Respond(200)
		synctest.Wait()
		o.End()
		if said := r.all(); !strings.Contains(said, "an observing stream was answered") {
			t.Errorf("got %q", said)
		}
	})
}

// A stream ends after a refusal.
func TestARefusalEndsTheExchange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := grpc.NewServer()
		extprocv3.RegisterExternalProcessorServer(server, processor{on: func(g extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return g.Send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
				ImmediateResponse: &extprocv3.ImmediateResponse{Body: []byte("no")},
			}})
		}})
		x := envoytest.Serve(t, server).Do(envoytest.Request{Path: "/", Body: []byte("{}")})
		if x.Refusal == nil || x.Refusal.Body != "no" || !x.Ended() {
			t.Errorf("got %+v, want a refusal and the stream's end", x)
		}
	})
}
