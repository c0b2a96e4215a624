// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
)

// played is a stream without a connection: it receives messages, then one that nobody
// knows, which makes the handler leave when it has seen the others, and then its end.
type played struct {
	grpc.ServerStream

	ctx      context.Context //nolint:containedctx // of the stream
	messages []*extprocv3.ProcessingRequest
	left     bool
	answers  []*extprocv3.ProcessingResponse
}

// process plays the messages to a server.
func process(t *testing.T, s *extproc.Server, messages ...*extprocv3.ProcessingRequest) []*extprocv3.ProcessingResponse {
	ctx, end := context.WithCancel(t.Context())
	defer end()
	p := &played{ctx: ctx, messages: messages}
	if err := s.Process(p); err != nil {
		t.Errorf("the stream ends with %v", err)
	}
	return p.answers
}

func (p *played) Context() context.Context { return p.ctx }

func (p *played) Recv() (*extprocv3.ProcessingRequest, error) {
	switch {
	case p.left:
		<-p.ctx.Done()
		return nil, io.EOF
	case len(p.messages) == 0:
		p.left = true
		return &extprocv3.ProcessingRequest{}, nil
	}
	m := p.messages[0]
	p.messages = p.messages[1:]
	return m, nil
}

func (p *played) Send(a *extprocv3.ProcessingResponse) error {
	p.answers = append(p.answers, a)
	return nil
}

// play runs a stream of messages and checks what must hold of any: no panic, nothing
// held at the end, no address but the decision's, nothing behind a refusal. The slots
// are the fake router's to check.
func play(t *testing.T, conf extproc.Config, messages ...*extprocv3.ProcessingRequest) (h *harness, answers []*extprocv3.ProcessingResponse) {
	t.Helper()
	h = newUnserved(t, conf)
	answers = process(t, h.server, messages...)
	if strings.Contains(h.log.String(), "panic") {
		t.Errorf("a handler panicked: %s", h.log)
	}
	if n := h.server.Held(); n != 0 {
		t.Errorf("%d bytes are held at the end", n)
	}
	for i, a := range answers {
		if a.GetImmediateResponse() != nil && i < len(answers)-1 {
			t.Errorf("a refusal is followed by %v", answers[i+1])
		}
		for _, set := range a.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
			if h := set.GetHeader(); h.GetKey() == "x-dynamo-worker" && string(h.GetRawValue()) != chosen.Address.String() {
				t.Errorf("the request goes to %s", h.GetRawValue())
			}
		}
	}
	return h, answers
}

// begin is a request's headers, and how Envoy hands over bodies.
func begin(last bool, request, response filterv3.ProcessingMode_BodySendMode, ahead bool, pairs ...string) *extprocv3.ProcessingRequest {
	var all []*corev3.HeaderValue
	for i := 0; i+1 < len(pairs); i += 2 {
		all = append(all, &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return &extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: all}, EndOfStream: last}},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{
			RequestBodyMode: request, ResponseBodyMode: response, SendBodyWithoutWaitingForHeaderResponse: ahead,
		},
	}
}

// FuzzStreams sends any messages in any order, in any mode.
func FuzzStreams(f *testing.F) {
	f.Add([]byte{0, 0, 10, 14})                       // BUFFERED
	f.Add([]byte{3, 0, 8, 9, 10, 13, 14, 17, 18, 19}) // full duplex
	f.Add([]byte{4, 0, 8, 10, 14, 17})                // ahead
	f.Add([]byte{1, 4, 8, 10, 13, 14, 17, 20})
	f.Add([]byte{2 + 5*3, 0, 8, 8, 8, 8, 13, 10})
	const cut = len(hello) / 2
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) < 2 || len(script) > 64 {
			return
		}
		modes := []filterv3.ProcessingMode_BodySendMode{
			filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_BUFFERED_PARTIAL, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, filterv3.ProcessingMode_STREAMED,
		}
		request, response := modes[script[0]%5], filterv3.ProcessingMode_NONE
		duplex := request == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
		if duplex {
			response = request
		}
		conf := extproc.Config{EndpointPicker: script[0]/5%2 == 1, MaxBodyBytes: 1 << 10}
		if script[0]/10%2 == 1 {
			conf.MaxHeldBytes = int64(len(hello)) + 8
		}
		var messages []*extprocv3.ProcessingRequest
		sent, responds, overtaken := "", false, false
		for _, b := range script[1:] {
			var m *extprocv3.ProcessingRequest
			switch b %= 21; {
			case b < 8: // the method in bit 0, the path in bit 1, the end in bit 2
				m = begin(b&4 != 0, request, response, script[0]%5 == 4, ":method", []string{"POST", "GET"}[b&1], ":path", []string{"/v1/chat/completions", "/x"}[b>>1&1])
			case b < 13:
				text := []string{hello[:cut], hello[cut:], hello, "", strings.Repeat(" ", 600)}[b-8]
				m = part(text, b == 9 || b == 10)
				sent += text
				overtaken = overtaken || responds // then nobody waits for what was held
			case b == 13:
				m = &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}}
			case b < 17:
				m = &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
					{Key: ":status", Value: []string{"200", "503", "200"}[b-14]}, {Key: "content-type", Value: []string{"text/event-stream", "text/plain", "application/json"}[b-14]},
				}}}}}
			case b < 19:
				m = &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte("data: {}\n\n"), EndOfStream: b == 18}}}
			case b == 19:
				m = &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}}
			default:
				m = &extprocv3.ProcessingRequest{}
			}
			responds = responds || b >= 14
			messages = append(messages, m)
		}
		total := len(messages)
		_, answers := play(t, conf, messages...)
		var back strings.Builder
		for _, a := range answers {
			back.WriteString(string(a.GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetBody()))
		}
		if !duplex && len(answers) > total {
			t.Errorf("%d answers to %d messages", len(answers), total)
		}
		if !overtaken && !strings.HasPrefix(sent, back.String()) {
			t.Errorf("of the body %q comes back %q", sent, back.String())
		}
	})
}

// FuzzSteering sends any headers and hints, to listeners of any trust.
func FuzzSteering(f *testing.F) {
	f.Add("x-dynamo-worker-instance-id: 7\nx-dynamo-dp-rank: 1", `{"decode_worker_id":7,"dp_rank":1}`, byte(3))
	f.Add("x-worker-instance-id: 99999999999999999999\nx-dynamo-router-group: g", `{"backend_instance_id":-1}`, byte(2))
	f.Add("x-dynamo-slo-ttft-ms: NaN\nx-dynamo-request-priority: 1e9", `{"agent_hints":{"priority":1e300,"strict_priority":-1,"osl":2}}`, byte(1))
	f.Add(`x-dynamo-router-override: {"temperature":1}`, `{"routing_constraints":{"required_taints":["a"],"preferred_taints":{"b":1e999}}}`, byte(1))
	f.Add("x-gateway-destination-endpoint-subset: 10.0.0.1\ntest-epp-endpoint-selection: 10.0.0.7:8000", `{"annotations":["query_instance_id:"]}`, byte(6))
	f.Fuzz(func(t *testing.T, lines, nvext string, trust byte) {
		conf := extproc.Config{TrustOverrides: trust&1 != 0, AllowDirect: trust&2 != 0, EndpointPicker: trust&4 != 0, Group: "g", SessionHeaders: []string{"x-session-id"}}
		pairs := []string{":method", "POST", ":path", "/v1/chat/completions"}
		for line := range strings.Lines(lines) {
			if name, text, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && !strings.HasPrefix(name, ":") && !strings.HasPrefix(name, "content-") {
				pairs = append(pairs, name, text)
			}
		}
		h := newUnserved(t, conf)
		h.router.queries = true
		h.router.will(func(context.Context, router.Request) (router.Decision, error) { return chosen, nil })
		answers := process(t, h.server, begin(false, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_NONE, false, pairs...),
			part(fmt.Sprintf(`{"model":"m","messages":[1],"nvext":%s}`, nvext), true))
		if strings.Contains(h.log.String(), "panic") {
			t.Fatalf("a handler panicked: %s", h.log)
		}
		last := answers[len(answers)-1]
		if r := last.GetImmediateResponse(); r != nil {
			if status := r.GetStatus().GetCode(); status != 400 && (status != 200 || !conf.AllowDirect) || !json.Valid(r.GetBody()) {
				t.Errorf("refused with %d: %s", status, r.GetBody())
			}
			return
		}
		for _, req := range h.router.asked {
			switch {
			case !conf.AllowDirect && (req.Pinned != nil || req.Preferred != nil):
				t.Errorf("a client names a worker: %v, %v", req.Pinned, req.Preferred)
			case !conf.TrustOverrides && (req.Priority != 0 || req.StrictPriority != 0 || req.Override != nil || req.TTFTTarget != 0 || req.RequiredTaints != nil):
				t.Errorf("a client has overrides: %+v", req)
			case math.IsNaN(req.Priority) || math.IsInf(req.Priority, 0) || req.StrictPriority < 0 || req.TTFTTarget < 0 || req.ExpectedOutput < 0:
				t.Errorf("hints out of range: %+v", req)
			}
		}
		mutation := last.GetRequestBody().GetResponse().GetHeaderMutation()
		for i := 4; i < len(pairs); i += 2 {
			if name := pairs[i]; name == "x-dynamo-worker" || name == "x-dynamo-worker-instance-id" || name == "x-gateway-destination-endpoint" {
				if !slices.Contains(mutation.GetRemoveHeaders(), name) {
					t.Errorf("the client's %s is not removed: %v", name, mutation)
				}
			}
		}
	})
}
