// SPDX-License-Identifier: Apache-2.0

//go:build !race

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
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
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/internal/reach"
)

// turns is the number of requests of a conversation of [conversations].
const turns = 4

// conversations returns the bodies of n conversations of four turns, whose last turn has about size bytes. As in
// bench-front, a fifth of a prompt is the same in all conversations; a first turn has two fifths of new text, each
// further turn a tenth.
func conversations(n, size int) (bodies [][]byte) {
	rng := rand.New(rand.NewPCG(1, 2))
	text := func(size int) string {
		var b strings.Builder
		for b.Len() < size {
			for range 2 + rng.IntN(7) {
				b.WriteByte(byte('a' + rng.IntN(26)))
			}
			b.WriteString([]string{" ", " ", " ", ", ", ".\n"}[rng.IntN(5)])
		}
		return b.String()[:size]
	}
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	system := message{"system", text(size / 5)}
	for range n {
		messages := []message{system, {"user", text(size * 2 / 5)}}
		for range turns {
			body, _ := json.Marshal(map[string]any{ // never fails
				"model": "sim", "stream": true, "max_tokens": 100, "messages": messages,
			})
			bodies = append(bodies, body)
			messages = append(messages, message{"assistant", text(size / 20)}, message{"user", text(size / 20)})
		}
	}
	return bodies
}

// encodedCodec sends messages that are encoded already, and keeps answers as they come, so that the client allocates
// little.
type encodedCodec struct{}

func (encodedCodec) Name() string { return "proto" }

func (encodedCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil //nolint:forcetypeassert // the test sends nothing else
}

func (encodedCodec) Unmarshal(b mem.BufferSlice, v any) error {
	to := v.(*[]byte) //nolint:forcetypeassert // as above
	*to = slices.Grow((*to)[:0], b.Len())[:b.Len()]
	b.CopyTo(*to)
	return nil
}

// allocating is a kvroute with default settings and four workers. Its goroutines do not run.
type allocating struct {
	t       testing.TB
	conn    *grpc.ClientConn
	headers map[string][]byte // the message with the response's headers, by the address of the worker
	// The messages of an observer stream.
	observed [][]byte
	answer   []byte // the last one, encoded
}

func newAllocating(t testing.TB) *allocating {
	t.Helper()
	limit := debug.SetMemoryLimit(-1) // open sets it
	t.Cleanup(func() { debug.SetMemoryLimit(limit) })
	var file strings.Builder
	fmt.Fprintf(&file, "version: 1\nmodels:\n- {name: sim, tokenizer: %q}\nworkers:\n", modelFolder(t))
	for id := range 4 {
		fmt.Fprintf(&file, "- {worker_id: %d, address: '10.0.0.%[1]d:8000', models: [sim], engine: none}\n", id+1)
	}
	conf, _, err := readConfig("serve", []string{
		"--config", writeFile(t, file.String()), "--nats-listen", "127.0.0.1:0",
		"--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0",
	}, func(*flag.FlagSet) {})
	if err != nil {
		t.Fatal(err)
	}
	networks, err := reach.Parse(conf.WorkerNetworks)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{
		conf: conf, log: slog.New(slog.DiscardHandler), names: new(workerNames), networks: networks, id: 1,
		client: http.DefaultClient,
	}
	s.shared.Store(conf.shared())
	t.Cleanup(func() { _ = s.close() })
	if err := s.open(); err != nil {
		t.Fatal(err)
	}
	a := &allocating{t: t, headers: make(map[string][]byte)}
	l := bufconn.Listen(1 << 20)
	go func() { _ = s.grpc.Serve(l) }()
	if a.conn, err = grpc.NewClient("passthrough:kvroute", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{}))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.conn.Close() })
	shown := &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: encodedHeaders(":status", "200",
		"content-type", "text/event-stream", "date", "Mon, 23 Nov 2026 21:00:00 GMT", "x-envoy-upstream-service-time", "3")}
	for _, w := range s.router.Workers() {
		attributes, err := structpb.NewStruct(map[string]any{
			"upstream.address": w.Address.String(), "upstream.request_attempt_count": 1, "response.code_details": "via_upstream",
		})
		if err != nil {
			t.Fatal(err)
		}
		a.headers[w.Address.String()] = a.encode(&extprocv3.ProcessingRequest{
			Request: shown, Attributes: map[string]*structpb.Struct{"envoy.filters.http.ext_proc": attributes},
		})
	}
	a.observed = [][]byte{
		a.encode(&extprocv3.ProcessingRequest{Request: shown, ObservabilityMode: true}),
		a.encode(&extprocv3.ProcessingRequest{
			Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{
				Body:        []byte(`data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"token"}}]}` + "\n\n"),
				EndOfStream: true,
			}}, ObservabilityMode: true,
		}),
	}
	return a
}

func (a *allocating) encode(m *extprocv3.ProcessingRequest) []byte {
	text, err := proto.Marshal(m)
	if err != nil {
		a.t.Fatal(err)
	}
	return text
}

func encodedHeaders(pairs ...string) *extprocv3.HttpHeaders {
	h := &corev3.HeaderMap{}
	for i := 0; i < len(pairs); i += 2 {
		h.Headers = append(h.Headers, &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return &extprocv3.HttpHeaders{Headers: h}
}

// messages returns the messages of the request with a body.
func (a *allocating) messages(body []byte) [][]byte {
	return [][]byte{
		a.encode(&extprocv3.ProcessingRequest{
			Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: encodedHeaders(
				":authority", "llm", ":path", chatPath, ":method", "POST", ":scheme", "http", "user-agent", "openai",
				"content-length", fmt.Sprint(len(body)), "content-type", "application/json", "accept-encoding", "gzip",
				"x-forwarded-for", "127.0.0.1", "x-forwarded-proto", "http", "x-envoy-internal", "true",
				"x-request-id", "5a5d0d64-8ab5-4d7a-a1a5-7ddcd6b1de9b", "accept", "*/*")},
			ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED},
		}),
		a.encode(&extprocv3.ProcessingRequest{
			Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: body, EndOfStream: true}},
		}),
	}
}

// open begins a stream.
func (a *allocating) open(meta ...string) (_ grpc.ClientStream, end func()) {
	ctx, end := context.WithCancel(metadata.NewOutgoingContext(a.t.Context(), metadata.Pairs(meta...)))
	s, err := a.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
		extprocv3.ExternalProcessor_Process_FullMethodName)
	if err != nil {
		a.t.Fatal(err)
	}
	return s, end
}

// send sends a message and waits for its answer.
func (a *allocating) send(s grpc.ClientStream, message []byte) {
	if err := s.SendMsg(&message); err != nil {
		a.t.Fatal(err)
	}
	for a.answer = a.answer[:0]; len(a.answer) == 0 || a.answer[0] == timeoutTag; {
		if err := s.RecvMsg(&a.answer); err != nil {
			a.t.Fatal(err)
		}
	}
}

// timeoutTag begins an answer that asks for more time.
const timeoutTag = 10<<3 | 2

// after returns the value of a header in the last answer.
func (a *allocating) after(name string) string {
	_, rest, found := strings.Cut(string(a.answer), "\n"+string(rune(len(name)))+name+"\x1a")
	if !found {
		a.t.Fatalf("an answer has no %s: %q", name, a.answer)
	}
	return rest[1 : 1+rest[0]]
}

// play plays one request: its stream, and the stream that observes its response.
func (a *allocating) play(messages [][]byte) {
	s, end := a.open()
	defer end()
	for _, m := range messages {
		a.send(s, m)
	}
	worker, id := a.after("x-dynamo-worker"), a.after("x-dynamo-request-id")
	a.send(s, a.headers[worker])
	observer, endObserver := a.open("x-dynamo-role", "observer", "x-dynamo-request-id", id)
	defer endObserver()
	for _, m := range a.observed {
		if err := observer.SendMsg(&m); err != nil {
			a.t.Fatal(err)
		}
	}
	var none []byte
	if err := observer.RecvMsg(&none); !errors.Is(err, io.EOF) {
		a.t.Fatalf("the observer stream ended with %v", err)
	}
	if err := s.CloseSend(); err != nil {
		a.t.Fatal(err)
	}
	if err := s.RecvMsg(&none); !errors.Is(err, io.EOF) {
		a.t.Fatalf("the stream ended with %v", err)
	}
}

// A request makes at most this many allocations, and allocates at most this many bytes, by the size of its body. The
// request is a chat with a stream as response, and an observer stream. gRPC is included, on the client's side too: it
// makes about 370 of the allocations. A limit is 3 % above the measured value.
func TestAllocationsOfARequest(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // otherwise pools lose their buffers at an unknown time
	for _, c := range []struct{ size, objects, bytes int }{
		{1 << 10, 630, 55_500},
		{10 << 10, 630, 80_500},
		{100 << 10, 708, 282_000},
	} {
		const warm, measured = 50, 50
		a := newAllocating(t)
		var requests [][][]byte
		for _, body := range conversations(warm+measured, c.size) {
			requests = append(requests, a.messages(body))
		}
		for _, r := range requests[:warm*turns] {
			a.play(r)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for _, r := range requests[warm*turns:] {
			a.play(r)
		}
		runtime.ReadMemStats(&after)
		const n = measured * turns
		objects, bytes := int(after.Mallocs-before.Mallocs)/n, int(after.TotalAlloc-before.TotalAlloc)/n
		t.Logf("%d KB: %d allocations, %d bytes", c.size>>10, objects, bytes)
		if objects > c.objects || bytes > c.bytes {
			t.Errorf("a request of %d KB makes %d allocations of %d bytes, want at most %d of %d",
				c.size>>10, objects, bytes, c.objects, c.bytes)
		}
	}
}

// BenchmarkRequest measures the same requests one after the other, with the CPU time of kvroute and its client. All
// bodies are in memory before, so give the number of requests: -benchtime 2000x.
func BenchmarkRequest(b *testing.B) {
	for _, size := range []int{1 << 10, 10 << 10, 100 << 10} {
		b.Run(fmt.Sprint(size>>10, "KB"), func(b *testing.B) {
			a := newAllocating(b)
			var requests [][][]byte
			for _, body := range conversations((b.N+turns-1)/turns, size) {
				requests = append(requests, a.messages(body))
			}
			runtime.GC()
			var used syscall.Rusage
			cpu := func() time.Duration {
				_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
				return time.Duration(used.Utime.Nano() + used.Stime.Nano())
			}
			before := cpu()
			b.ReportAllocs()
			b.ResetTimer()
			for _, r := range requests[:b.N] {
				a.play(r)
			}
			b.ReportMetric(float64(cpu()-before)/float64(b.N)/1e3, "cpu-µs/op")
			b.ReportMetric(float64(used.Maxrss)/1024, "rss-MiB")
		})
	}
}
