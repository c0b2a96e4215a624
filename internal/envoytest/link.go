// SPDX-License-Identifier: Apache-2.0

package envoytest

import (
	"context"
	"net"
	"strconv"
	"sync"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"
)

// Link is a connection from Envoy to an external processor. It may be used by any
// number of goroutines; each [Exchange] belongs to one.
type Link struct {
	t      TB
	conn   *grpc.ClientConn
	client extprocv3.ExternalProcessorClient
}

// Serve runs server in memory until the test ends. It works in a synctest bubble.
func Serve(t TB, server *grpc.Server) *Link {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(l); err != nil {
			t.Errorf("envoytest: serve: %v", err)
		}
	})
	t.Cleanup(func() {
		server.Stop()
		serving.Wait()
	})
	return Dial(t, "passthrough:///bufconn", grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return l.DialContext(ctx)
	}))
}

// Dial connects to an external processor that is served elsewhere.
func Dial(t TB, target string, more ...grpc.DialOption) *Link {
	t.Helper()
	conn, err := grpc.NewClient(target, append(more, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatalf("envoytest: connect: %v", err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // may be closed already, see Kill
	return &Link{t: t, conn: conn, client: extprocv3.NewExternalProcessorClient(conn)}
}

// Kill closes the connection with all its streams, as the end of Envoy does.
func (l *Link) Kill() { _ = l.conn.Close() } // a second time is harmless

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

// Observer is the observing filter's stream of an exchange. The test fails if an answer arrives on
// it or it ends with an error.
type Observer struct{ stream *stream }

// Observe opens an observing stream for a request id.
func (l *Link) Observe(id string) *Observer {
	l.t.Helper()
	return &Observer{l.open(true, false, "x-dynamo-request-id", id, "x-dynamo-role", "observer")}
}

// Respond sends the response's headers.
func (o *Observer) Respond(status int, header ...string) {
	o.stream.send(&extprocv3.ProcessingRequest{
		Request:           &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers(pairs(append([]string{":status", strconv.Itoa(status)}, header...)))},
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
