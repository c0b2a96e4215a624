// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"net"
	"slices"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	datav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/natstest"
)

// Envoy's log of attempts reaches the router. Entries that it should not contain are ignored, and a drain ends the stream.
func TestAttemptsAreLogged(t *testing.T) {
	h := newUnserved(t, extproc.Config{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.grpc.Serve(l) }() // ends with Stop
	t.Cleanup(h.grpc.Stop)
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	log, err := accesslogv3.NewAccessLogServiceClient(conn).StreamAccessLogs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	entry := func(ip string, status uint32, after string) *datav3.HTTPAccessLogEntry {
		return &datav3.HTTPAccessLogEntry{
			CommonProperties: &datav3.AccessLogCommon{UpstreamRemoteAddress: &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
				Address: ip, PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: 8000},
			}}}},
			Request:  &datav3.HTTPRequestProperties{RequestHeaders: map[string]string{"x-dynamo-request-id": "r1"}},
			Response: &datav3.HTTPResponseProperties{ResponseCode: wrapperspb.UInt32(status), ResponseHeaders: map[string]string{"retry-after": after}},
		}
	}
	// Envoy's own responses, by their details or their flags.
	local := func(details string, flags *datav3.ResponseFlags) *datav3.HTTPAccessLogEntry {
		e := entry("10.0.0.4", 503, "")
		e.Response.ResponseCodeDetails, e.CommonProperties.ResponseFlags = details, flags
		return e
	}
	answer := entry("10.0.0.5", 503, "")
	answer.Response.ResponseCodeDetails = "via_upstream"
	broken := func(status uint32) *datav3.HTTPAccessLogEntry {
		e := entry("10.0.0.3", status, "")
		e.CommonProperties.ResponseFlags = &datav3.ResponseFlags{UpstreamConnectionTermination: true}
		return e
	}
	for _, entries := range [][]*datav3.HTTPAccessLogEntry{
		nil,
		{{}, entry("10.0.0.1", 200, "5"), entry("worker", 429, "5"), entry("", 429, "")},
		{entry("10.0.0.1", 429, "5"), entry("::ffff:10.0.0.2", 503, ""), broken(0), broken(200)},
		{
			local("upstream_reset_before_response_started{connection_termination}", nil), local("upstream_response_timeout", nil),
			local("", &datav3.ResponseFlags{UpstreamConnectionFailure: true}), local("", &datav3.ResponseFlags{UpstreamRequestTimeout: true}), answer,
		},
	} {
		if err := log.Send(&accesslogv3.StreamAccessLogsMessage{LogEntries: &accesslogv3.StreamAccessLogsMessage_HttpLogs{
			HttpLogs: &accesslogv3.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: entries},
		}}); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		`attempt of "r1" by 10.0.0.1:8000, status 429, retry after 5s`, `attempt of "r1" by 10.0.0.2:8000, status 503, retry after 0s`, "broken off by 10.0.0.3:8000",
		`attempt of "r1" by 10.0.0.5:8000, status 503, retry after 0s`,
	}
	var got []string
	natstest.Eventually(t, func() bool {
		got = append(got, h.router.newCalls()...)
		return slices.Equal(got, want)
	})
	for status, want := range map[string]int64{"429": 1, "503": 2, "broken_off": 1} {
		if n := h.count(t, "kvroute.extproc.attempts", status); n != want {
			t.Errorf("%d attempts with status %s are counted, want %d", n, status, want)
		}
	}
	h.server.Drain()
	h.grpc.GracefulStop() // waits for the stream
}
