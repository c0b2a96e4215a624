// SPDX-License-Identifier: Apache-2.0

package envoytest

import (
	"errors"
	"io"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
)

// Noop is the smallest external processor for kvroute's Envoy configuration: it routes every
// request to one worker without reading it, and ends observing streams at the first chunk. Its
// cost is the cost of Envoy and gRPC.
type Noop struct {
	extprocv3.UnimplementedExternalProcessorServer

	Worker string // ip:port
}

// Register adds the processor and a health service to a gRPC server.
func (n Noop) Register(s *grpc.Server) {
	extprocv3.RegisterExternalProcessorServer(s, n)
	healthpb.RegisterHealthServer(s, health.NewServer())
}

// Process handles one stream.
func (n Noop) Process(g extprocv3.ExternalProcessor_ProcessServer) error {
	observer := len(metadata.ValueFromIncomingContext(g.Context(), "x-dynamo-role")) > 0
	for {
		m, err := g.Recv()
		if errors.Is(err, io.EOF) || err != nil && fine(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if observer {
			if b := m.GetResponseBody(); b != nil {
				return nil
			}
			continue
		}
		if err := g.Send(n.answer(m)); err != nil {
			return err
		}
	}
}

func (n Noop) answer(m *extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
	set := func(name, value string) *corev3.HeaderValueOption {
		return &corev3.HeaderValueOption{
			Header:       &corev3.HeaderValue{Key: name, RawValue: []byte(value)},
			AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
		}
	}
	route := &extprocv3.CommonResponse{ClearRouteCache: true, HeaderMutation: &extprocv3.HeaderMutation{
		SetHeaders: []*corev3.HeaderValueOption{set("x-dynamo-worker", n.Worker), set("x-dynamo-request-id", "noop")},
	}}
	var a extprocv3.ProcessingResponse
	switch r := m.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		h := &extprocv3.HeadersResponse{}
		if r.RequestHeaders.GetEndOfStream() {
			h.Response = route
		}
		a.Response = &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: h}
	case *extprocv3.ProcessingRequest_RequestBody:
		a.Response = &extprocv3.ProcessingResponse_RequestBody{RequestBody: &extprocv3.BodyResponse{Response: route}}
	case *extprocv3.ProcessingRequest_RequestTrailers:
		a.Response = &extprocv3.ProcessingResponse_RequestTrailers{RequestTrailers: &extprocv3.TrailersResponse{}}
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		a.Response = &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocv3.HeadersResponse{}}
	case *extprocv3.ProcessingRequest_ResponseBody:
		a.Response = &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: &extprocv3.BodyResponse{}}
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		a.Response = &extprocv3.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocv3.TrailersResponse{}}
	}
	return &a
}
