// SPDX-License-Identifier: Apache-2.0

// Package extproc implements Envoy's external processing protocol: it reads each request,
// asks the router for a worker, and names the worker in a header.
//
// # The files
//
// A plain chat runs through six files:
//
//	stream.go   handles the messages of a stream
//	receive.go  waits for a message, and bounds the memory for bodies
//	headers.go  reads the request's headers
//	state.go    says how to react to a message
//	request.go  reads the body and gets a decision
//	answer.go   names the worker
//
// extproc.go and config.go have the start, served.go, observer.go and usage.go the response. The code of
// the other files runs for some requests only.
//
// # Messages and answers
//
// One main stream accompanies each HTTP request from its headers to its end. The
// first message says how Envoy sends the request's body:
//
//	buffered        BUFFERED, BUFFERED_PARTIAL: in one message after the answer to the headers
//	streamed        STREAMED: in chunks after that answer; NONE: not at all
//	streamed ahead  STREAMED without waiting for that answer: in chunks
//	full duplex     FULL_DUPLEX_STREAMED: in chunks that kvroute must send back, also those of the response
//
// With buffered bodies:
//
//	after               may come            answer
//	nothing             request headers     empty, at once, without the client's headers that steer
//	                                        Envoy; an error response if they are wrong in any case
//	request headers     request body        the worker's header, an error response, or empty: fail open
//	                    request trailers    the same, of a request without body
//	request body        request trailers    empty
//	                    request body        none: Envoy repeats the end of some large bodies
//	any of these        response headers    empty, or the decision's headers
//	                    response trailers   empty
//	response headers    response body       empty, or the chunk; not in our default configuration.
//	                                        The first event with content ends the prefill
//	                    response trailers   empty
//	error response      nothing
//
// In the modes streamed ahead and full duplex, kvroute answers headers and chunks together when it has
// the last chunk. The answer to the headers has the worker's header. In the mode streamed, it decides at
// the headers, without the body: by load alone.
//
// The function next has the whole protocol in one switch. On an unexpected message the server
// ends the stream, so that Envoy does not wait for an answer. The stream may end at any time.
//
// An observer stream receives copies of the response's headers and chunks. It gets no answer.
// It ends at the first event of an event stream, or as soon as no event can follow.
//
// # Guarantees
//
// Each message that needs an answer gets exactly one, and x-dynamo-worker has only addresses
// that the router chose. The slot of a request is freed once, when its main stream ends for any
// reason. If kvroute cannot decide (time, a panic, an unknown processing mode), the request
// fails open: Envoy routes it without kvroute. A client's mistake and a lack of workers get an
// error in OpenAI's form; they never become unrouted traffic.
//
// If a request has to wait for a worker, kvroute asks Envoy to wait longer, once
// (override_message_timeout). A wait that takes too long is refused. While a large body comes, kvroute asks for
// more time repeatedly, so that Envoy does not send the body to a worker before kvroute has checked it.
//
// When a stream's context ends, the router interrupts its decision.
//
// # Concurrency
//
// Each stream has the goroutine that gRPC gives its handler, which owns all state. While it waits for a message, a
// drain or an eviction may end its context, see waits. With buffered bodies a second goroutine receives only beside a
// large body and during a decision that takes long, so that the end of the stream interrupts the decision. In the
// other modes a second goroutine receives each message, since held chunks must be answered before the stream ends.
// The second goroutine ends at the latest when the handler returns.
package extproc

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"runtime"
	"sync/atomic"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"

	"github.com/kvroute/kvroute/prefill"
)

// Server is the external processor. Make one with [New]. Its methods may be called
// by any number of goroutines.
type Server struct {
	extprocv3.UnimplementedExternalProcessorServer

	conf    Config
	router  Router
	metrics *metrics
	prefill prefill.Client
	prefix  string       // of our request ids
	seed    maphash.Seed // of the hashes of clients and prompts

	bodies   bodyBudget
	received receiveBuffers
	turns    chan struct{} // has a value for each large body that is being read

	open [kinds]atomic.Int64 // streams
	// seen counts the requests that Envoy sent, routed those whose worker kvroute named.
	seen, routed atomic.Uint64
	lines        [failures]lineLimit // of the log, on requests that fail open
	apart        lineLimit           // of the log, on workers that Envoy does not know
	// headersSent says that Envoy is configured to send response headers: a stream that
	// ends without them had no response.
	headersSent atomic.Bool

	waits   waits   // of all streams
	watched watched // the responses that observer streams watch
}

// New returns a server that gets its decisions from r. It fails if a setting is out of range,
// which the error names, or if the instruments cannot be made.
func New(conf Config, r Router) (*Server, error) {
	conf, err := conf.withDefaults()
	if err != nil {
		return nil, err
	}
	if r == nil {
		return nil, errors.New("extproc: there is no router")
	}
	s := &Server{
		conf: conf, router: r,
		prefix:  IDPrefix(conf.RouterID),
		seed:    maphash.MakeSeed(),
		prefill: prefill.Client{HTTP: conf.Client, Router: r},
		bodies:  bodyBudget{most: conf.MaxHeldBytes},
		turns:   make(chan struct{}, 2*runtime.GOMAXPROCS(0)),
	}
	s.received = receiveBuffers{bodies: &s.bodies, evict: s.waits.evict}
	s.metrics, err = newMetrics(conf.Meter, s)
	return s, err
}

// ServerOptions are the options that a gRPC server for Envoy needs: room for the
// largest body in one message, windows that let such a body through without
// waiting, tolerance for Envoy's keepalive, and an end of observing streams with [Server.Drain].
func (s *Server) ServerOptions() []grpc.ServerOption {
	// Goroutines that stay, so that their stacks need not grow for each stream.
	const streamWorkers = 32
	return []grpc.ServerOption{
		// A message above gRPC's own limit breaks the stream, and Envoy continues without kvroute. A body above
		// MaxBodyBytes gets status 413, if Envoy sends it at all.
		grpc.MaxRecvMsgSize(math.MaxInt32),
		// The longest queue of unread data of a stream, beside one message.
		grpc.InitialWindowSize(256 << 10),
		grpc.InitialConnWindowSize(16 << 20),
		experimental.BufferPool(&s.received),
		grpc.InTapHandle(endable),
		grpc.NumStreamWorkers(streamWorkers),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: 10 * time.Second, PermitWithoutStream: true,
		}),
	}
}

// Register adds the server to a gRPC server. The caller adds the health service that Envoy
// checks.
func (s *Server) Register(to grpc.ServiceRegistrar) {
	extprocv3.RegisterExternalProcessorServer(to, s)
	accesslogv3.RegisterAccessLogServiceServer(to, attemptLog{Server: s})
}

// Counts returns how many requests Envoy has sent since the start, and for how many of them the server
// named a worker.
func (s *Server) Counts() (requests, routed uint64) { return s.seen.Load(), s.routed.Load() }

// Drain ends all streams, and from now on each new one at once. Streams with a decision in
// progress get their answer first. Envoy continues without kvroute, responses are not affected,
// and the slots are freed. All handlers return within DecisionTimeout if the router respects its
// context, except those that receive the response in chunks (full duplex): these stay to the
// response's end. Call Drain when the health service has told Envoy to send no new streams, and
// then the gRPC server's GracefulStop.
func (s *Server) Drain() { s.waits.drain() }

// IDPrefix begins the ids that a replica gives to requests.
func IDPrefix(routerID uint64) string { return fmt.Sprintf("%016x-", routerID) }
