// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/router"
)

// quickRouter decides without any work.
type quickRouter struct{ extproc.Router }

func (quickRouter) BestWorker(context.Context, router.Request) (router.Decision, error) {
	return chosen, nil
}
func (quickRouter) FirstToken(string, router.Sign) bool                { return true }
func (quickRouter) Free(string) bool                                   { return true }
func (quickRouter) Abandon(string) bool                                { return true }
func (quickRouter) Leave(string, bool) bool                            { return true }
func (quickRouter) ReportUsage(string, router.Usage)                   {}
func (quickRouter) Attempted(string, router.Response) []router.Avoided { return nil }
func (quickRouter) BrokeOff(netip.AddrPort)                            {}
func (quickRouter) Gave(string, router.Worker) bool                    { return true }
func (quickRouter) Holder(context.Context, string) (router.Decision, bool) {
	return router.Decision{}, false
}

func (quickRouter) Giver(string, netip.AddrPort) (router.Worker, bool)      { return chosen.Worker, true }
func (quickRouter) Served(string, router.Response) (bool, []router.Avoided) { return false, nil }

// rawCodec sends messages that are encoded already, and does not read answers, so that a client
// costs little.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil //nolint:forcetypeassert // the benchmark sends nothing else
}

func (rawCodec) Unmarshal(b mem.BufferSlice, v any) error {
	*v.(*int) = b.Len() //nolint:forcetypeassert // as above
	return nil
}

func benchHeaders(pairs ...string) *extprocv3.HttpHeaders {
	h := &corev3.HeaderMap{}
	for i := 0; i < len(pairs); i += 2 {
		h.Headers = append(h.Headers, &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return &extprocv3.HttpHeaders{Headers: h}
}

// BenchmarkStream sends a request as Envoy does in its default configuration, over a real connection.
func BenchmarkStream(b *testing.B) {
	for _, size := range []int{1 << 10, 10 << 10, 100 << 10} {
		b.Run(fmt.Sprint(size>>10, "KB"), func(b *testing.B) {
			s, err := extproc.New(extproc.Config{RouterID: 1}, quickRouter{})
			if err != nil {
				b.Fatal(err)
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			g := grpc.NewServer(s.ServerOptions()...)
			s.Register(g)
			go func() { _ = g.Serve(l) }()
			defer g.Stop()
			c, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{})),
				grpc.WithInitialWindowSize(1<<20), grpc.WithInitialConnWindowSize(1<<24))
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			encode := func(m *extprocv3.ProcessingRequest) []byte {
				text, err := proto.Marshal(m)
				if err != nil {
					b.Fatal(err)
				}
				return text
			}
			attributes, err := structpb.NewStruct(map[string]any{"upstream.address": "10.0.0.7:8000", "upstream.request_attempt_count": 1, "response.code_details": "via_upstream"})
			if err != nil {
				b.Fatal(err)
			}
			body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", size) + `"}]}`
			messages := [][]byte{
				encode(&extprocv3.ProcessingRequest{
					Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: benchHeaders(":authority", "llm", ":path", "/v1/chat/completions",
						":method", "POST", ":scheme", "http", "user-agent", "Go-http-client/1.1", "content-length", fmt.Sprint(len(body)), "content-type", "application/json", "accept-encoding", "gzip",
						"x-forwarded-for", "127.0.0.1", "x-forwarded-proto", "http", "x-envoy-internal", "true", "x-request-id", "5a5d0d64-8ab5-4d7a-a1a5-7ddcd6b1de9b", "accept", "*/*")},
					ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED},
				}),
				encode(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte(body), EndOfStream: true}}}),
				encode(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: benchHeaders(":status", "200", "content-type", "application/json",
					"date", "Mon, 23 Nov 2026 21:00:00 GMT", "content-length", "300", "x-envoy-upstream-service-time", "3")}, Attributes: map[string]*structpb.Struct{"envoy.filters.http.ext_proc": attributes}}),
			}
			request := func() {
				ctx, cancel := context.WithCancel(b.Context())
				defer cancel()
				st, err := c.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/envoy.service.ext_proc.v3.ExternalProcessor/Process")
				if err != nil {
					b.Fatal(err)
				}
				var n int
				for _, m := range messages {
					if err := st.SendMsg(m); err != nil {
						b.Fatal(err)
					}
					if err := st.RecvMsg(&n); err != nil || n == 0 {
						b.Fatal(err, n)
					}
				}
			}
			request()
			b.ReportAllocs()
			before := cpu()
			b.ResetTimer()
			for range b.N {
				request()
			}
			b.ReportMetric(float64(cpu()-before)/float64(b.N)/1e3, "cpu-µs/op")
		})
	}
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
