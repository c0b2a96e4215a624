// SPDX-License-Identifier: Apache-2.0

package epptest_test

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"
)

// The names in the protocol.
const (
	destinationKey       = "x-gateway-destination-endpoint"
	destinationNamespace = "envoy.lb"
	servedKey            = "x-gateway-destination-endpoint-served"
	subsetNamespace      = "envoy.lb.subset_hint"
	subsetKey            = "x-gateway-destination-endpoint-subset"
)

// maxChunk is the size of the largest body part that a gateway accepts in one answer.
const maxChunk = 62_000

// stream is one request and its response, in full duplex. It is for one goroutine.
type stream struct {
	grpc     extprocv3.ExternalProcessor_ProcessClient
	end      context.CancelFunc
	Subset   *structpb.Value // hint of the endpoints allowed, or nil
	answered bool            // the request's headers were answered
}

// openStream begins a stream. Each answer of the picker must arrive within limit.
func openStream(ctx context.Context, conn *grpc.ClientConn, limit time.Duration) (*stream, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	s, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	return &stream{grpc: s, end: cancel}, nil
}

// Close ends the stream as a gateway does.
func (s *stream) Close() {
	_ = s.grpc.CloseSend() // fails harmlessly if the stream has ended
	for {
		if _, err := s.grpc.Recv(); err != nil {
			s.end()
			return
		}
	}
}

// Headers sends the request's headers, given as name, value and so on.
func (s *stream) Headers(last bool, pairs ...string) error {
	m := &extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: headers(pairs), EndOfStream: last}},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{
			RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, ResponseBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
		},
	}
	if s.Subset != nil {
		m.MetadataContext = metadata(subsetNamespace, subsetKey, s.Subset)
	}
	return s.grpc.Send(m)
}

// Body sends a part of the request's body.
func (s *stream) Body(part string, last bool) error {
	return s.grpc.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
		RequestBody: &extprocv3.HttpBody{Body: []byte(part), EndOfStream: last},
	}})
}

// Trailers sends the request's trailers.
func (s *stream) Trailers() error {
	return s.grpc.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}})
}

// pick is a picker's answer to a request.
type pick struct {
	Header   string // the destination header's value
	Metadata string // the same in the dynamic metadata
	Set      map[string]string
	Removed  []string
	Body     string // the body that came back
	Chunks   int

	// Of an immediate response.
	Status  int
	Headers map[string]string
	Error   string
}

// Endpoints returns the destinations in their order.
func (p *pick) Endpoints() []string { return strings.Split(p.Header, ",") }

// Pick receives all answers to a request. body means that a body comes back, trailers that
// trailers are answered, too.
func (s *stream) Pick(body, trailers bool) (*pick, error) {
	p := &pick{Set: map[string]string{}, Headers: map[string]string{}}
	for {
		a, err := s.grpc.Recv()
		if err != nil {
			return p, fmt.Errorf("after %+v: %w", *p, err)
		}
		if v := a.GetDynamicMetadata().GetFields()[destinationNamespace].GetStructValue().GetFields()[destinationKey]; v != nil {
			p.Metadata = v.GetStringValue()
		}
		switch r := a.GetResponse().(type) {
		case *extprocv3.ProcessingResponse_ImmediateResponse:
			p.Status, p.Error = int(r.ImmediateResponse.GetStatus().GetCode()), string(r.ImmediateResponse.GetBody())
			read(p.Headers, r.ImmediateResponse.GetHeaders())
			return p, nil
		case *extprocv3.ProcessingResponse_RequestHeaders:
			if s.answered {
				return p, fmt.Errorf("the headers are answered twice")
			}
			s.answered = true
			m := r.RequestHeaders.GetResponse().GetHeaderMutation()
			read(p.Set, m)
			p.Removed = m.GetRemoveHeaders()
			p.Header = p.Set[destinationKey]
			if !body {
				return p, nil
			}
		case *extprocv3.ProcessingResponse_RequestBody:
			part := r.RequestBody.GetResponse().GetBodyMutation().GetStreamedResponse()
			switch {
			case !s.answered:
				return p, fmt.Errorf("the body is answered before the headers")
			case part == nil:
				return p, fmt.Errorf("the body does not come back")
			case len(part.GetBody()) > maxChunk:
				return p, fmt.Errorf("a chunk of %d bytes, above %d", len(part.GetBody()), maxChunk)
			}
			p.Body += string(part.GetBody())
			p.Chunks++
			if part.GetEndOfStream() {
				if trailers {
					return p, fmt.Errorf("the body ends, but trailers follow")
				}
				return p, nil
			}
		case *extprocv3.ProcessingResponse_RequestTrailers:
			return p, nil
		default:
			return p, fmt.Errorf("an answer to nothing: %v", a)
		}
	}
}

// Respond sends the response's headers, with the endpoint that served if it is not empty, and
// waits for the answer.
func (s *stream) Respond(served string, pairs ...string) (set map[string]string, err error) {
	m := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{Headers: headers(pairs)}}}
	if served != "" {
		m.MetadataContext = metadata(destinationNamespace, servedKey, structpb.NewStringValue(served))
	}
	if err := s.grpc.Send(m); err != nil {
		return nil, err
	}
	a, err := s.grpc.Recv()
	if err != nil {
		return nil, err
	}
	if a.GetResponseHeaders() == nil {
		return nil, fmt.Errorf("the response's headers are answered with %v", a)
	}
	set = map[string]string{}
	read(set, a.GetResponseHeaders().GetResponse().GetHeaderMutation())
	return set, nil
}

// RespondBody sends a part of the response and returns the part that comes back.
func (s *stream) RespondBody(part string, last bool) (back string, err error) {
	if err := s.grpc.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
		ResponseBody: &extprocv3.HttpBody{Body: []byte(part), EndOfStream: last},
	}}); err != nil {
		return "", err
	}
	for {
		a, err := s.grpc.Recv()
		if err != nil {
			return back, err
		}
		p := a.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		if p == nil || len(p.GetBody()) > maxChunk {
			return back, fmt.Errorf("a part of the response is answered with %v", a)
		}
		if back += string(p.GetBody()); len(back) >= len(part) && p.GetEndOfStream() == last {
			return back, nil
		}
	}
}

// RespondTrailers sends the response's trailers and waits for the answer.
func (s *stream) RespondTrailers() error {
	if err := s.grpc.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}}); err != nil {
		return err
	}
	a, err := s.grpc.Recv()
	if err == nil && a.GetResponseTrailers() == nil {
		err = fmt.Errorf("the response's trailers are answered with %v", a)
	}
	return err
}

func headers(pairs []string) *corev3.HeaderMap {
	m := &corev3.HeaderMap{}
	for i := 0; i+1 < len(pairs); i += 2 {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return m
}

func read(into map[string]string, m *extprocv3.HeaderMutation) {
	for _, h := range m.GetSetHeaders() {
		v := string(h.GetHeader().GetRawValue())
		if v == "" {
			v = h.GetHeader().GetValue()
		}
		into[strings.ToLower(h.GetHeader().GetKey())] = v
	}
}

func metadata(namespace, key string, v *structpb.Value) *corev3.Metadata {
	return &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{namespace: {Fields: map[string]*structpb.Value{key: v}}}}
}
