// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"

	"github.com/kvroute/kvroute/extproc"
)

// framed returns the beginning of a gRPC message: its length, and some of its bytes.
func framed(length int, message []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(length)), message...)
}

// gRPC buffers messages that are never finished before extproc sees them. Above the budget,
// the streams that have waited longest are refused until the rest fits: kvroute has not checked their bodies.
func TestUnfinishedMessagesTakeABoundedRoom(t *testing.T) {
	const budget, streams, size = 40 << 20, 24, 4 << 20
	h := newUnserved(t, extproc.Config{MaxHeldBytes: budget})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.grpc.Serve(l) }() // until Stop
	defer h.grpc.Stop()
	transport := new(http.Transport{Protocols: new(http.Protocols)})
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()

	headers, err := proto.Marshal(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
		RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":method", Value: "POST"}, {Key: ":path", Value: "/v1/chat/completions"}}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	begin := append(framed(len(headers), headers), framed(size, bytes.Repeat([]byte(" "), size-1))...)
	var all sync.WaitGroup
	defer all.Wait()
	unfinished, finish := io.Pipe()
	defer finish.Close()
	for range streams {
		all.Go(func() {
			body := io.MultiReader(bytes.NewReader(begin), unfinished)
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+l.Addr().String()+extprocv3.ExternalProcessor_Process_FullMethodName, body)
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/grpc")
			resp, err := transport.RoundTrip(req)
			if err != nil {
				return // the server ends what it did not answer
			}
			_, _ = io.Copy(io.Discard, resp.Body) // until the stream ends
			_ = resp.Body.Close()
		})
	}
	// 24 times 4 MiB are 96 MiB, and 40 fit.
	for end := time.Now().Add(time.Minute); h.count(t, "kvroute.extproc.refusals", "503") < streams/2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d requests are refused for want of room, want half of them", h.count(t, "kvroute.extproc.refusals", "503"), streams)
		}
	}
}
