// SPDX-License-Identifier: Apache-2.0

// Package extproc implements Envoy's external processing protocol: it reads each request,
// asks the router for a worker, and names the worker in a header.
//
// # Messages and answers
//
// One main stream accompanies each HTTP request from its headers to its end. The
// first message says how Envoy hands over the request's body:
//
//	whole   BUFFERED, BUFFERED_PARTIAL: in one message behind the answer to the headers
//	behind  STREAMED: in chunks behind that answer; NONE: not at all
//	ahead   STREAMED without waiting for that answer: in chunks
//	duplex  FULL_DUPLEX_STREAMED: in chunks that Envoy wants back, those of the response too
//
// With whole bodies:
//
//	after               may come            answer
//	nothing             request headers     empty, at once; an error response if no body can mend them;
//	                                        without the client's copies of headers that steer Envoy
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
// With bodies ahead and in duplex the headers and chunks are answered together when
// the last has come, and the worker's header stands in the answer to the headers.
// Behind, the choice is made at the headers, unread: by load alone.
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
// (override_message_timeout). A wait that takes too long is refused.
//
// When a stream's context ends, the router interrupts its decision.
//
// # Concurrency
//
// Each stream has the goroutine that gRPC gives its handler, which owns all state. A
// main stream has one more that only receives, so that the end of the stream interrupts a
// decision and a drain does not wait for Envoy. The receiver ends at the latest when the
// handler returns. An observer stream needs none: a drain ends its context.
package extproc

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/tap"

	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// What counts as the first token of a response.
const (
	// FirstTokenObserver waits for the observing stream.
	FirstTokenObserver = "observer"
	// FirstTokenResponseHeaders takes the response's headers for it. That is
	// right only for workers that send them that late.
	FirstTokenResponseHeaders = "response-headers"
)

// Config says how requests are processed. The zero value of each field means its
// default; negative sizes and times are refused.
type Config struct {
	// MaxBodyBytes is the largest request body; larger ones get status 413. It
	// should equal Envoy's request_body_buffer_limit. Default 16 MiB.
	MaxBodyBytes int

	// MaxHeldBytes bounds the request bodies that are held at a time, all together: as
	// they came, joined and inflated. A request that finds no room fails open. Default
	// 256 MiB, or four of the largest bodies if that is more.
	MaxHeldBytes int64

	// DecisionTimeout is the time that a decision may take before the request
	// fails open. It must be less than Envoy's message_timeout, or Envoy gives
	// up on us first. Default 1.5 s.
	DecisionTimeout time.Duration

	// QueueWait is the time that a request may wait for a worker before it is
	// refused with OverloadStatus. Half a second more must not exceed Envoy's
	// max_message_timeout. Default 9.5 s.
	QueueWait time.Duration

	// OverloadStatus is what clients get when all workers are busy, too many
	// requests wait, or the wait was too long: 429, 503 or 529. Default 429.
	OverloadStatus int

	// SessionHeaders are the request's headers that name its session, in lower
	// case; the first one that is present counts.
	SessionHeaders []string

	// TrustOverrides obeys headers and fields of the body that say how a request
	// is to be routed, AllowDirect those that name its worker. Without them they
	// are removed unread. For listeners that only trusted clients reach.
	TrustOverrides, AllowDirect bool

	// Group is the router group of the workers, if there is one: a router above may say
	// which of them it expects to be chosen, if AllowDirect.
	Group string

	// MaxStreams bounds the main streams at a time, and the observing ones.
	// Requests above it fail open at once. Default 40,000, the circuit breaker
	// of our Envoy configuration.
	MaxStreams int

	// DecisionHeaders tells worker, overlap and reason in the response's
	// headers. They tell clients about the inside of a fleet.
	DecisionHeaders bool

	// FirstToken is [FirstTokenObserver], the default, or
	// [FirstTokenResponseHeaders].
	FirstToken string

	// ForwardTokens names the forms, comma-separated, in which prompts are handed
	// on to workers as token ids: "prompt" of completions, "kv_transfer_params"
	// of vLLM's chats, "prompt_token_ids" of TensorRT-LLM's, or [ForwardAuto]
	// for all of them where the worker's version is known to take it. Default
	// none: bodies stay as they are.
	ForwardTokens string

	// SecondChoice is how Envoy is told where a request goes that its worker
	// refuses: [SecondHeader], the default, [SecondList] or [SecondNone].
	SecondChoice string

	// EndpointPicker also speaks the endpoint-picker protocol of the Gateway API
	// Inference Extension: the choices in x-gateway-destination-endpoint and in
	// dynamic metadata, and a choice for every request. With AllowDirect it obeys
	// the hooks of the extension's conformance tests.
	EndpointPicker bool

	// RouterID is this replica's part of the request ids that it hands out. It
	// should be another one for each replica.
	RouterID uint64

	// Networks are those that requests may be sent to, whatever address a worker
	// has: a decision for another one fails open. None allows all.
	Networks reach.Networks

	// ModeOverride asks Envoy, in the answer to the request's headers, for the
	// response's headers and trailers, which is what keeps a stream open to its end:
	// for filters that cannot be configured so but have allow_mode_override, such as
	// Envoy Gateway's. Bodies must be buffered there.
	ModeOverride bool

	// LoadReport, if not nil, is called for each header of a worker's response in which
	// the engine says how busy it is: the name begins with endpoint-load-metrics. The
	// worker is the one that served. It must not block.
	LoadReport func(w router.Worker, header, value string)

	// Started, if not nil, reports whether the fleet is known: until then requests
	// that no worker is known for fail open instead of being refused. It must not
	// block.
	Started func() bool
	// Synced says that the router knows the requests of other replicas: first tokens of
	// these are noticed, too.
	Synced bool

	// Log takes a few lines a minute at most, and one for each refused request
	// at level debug. Default none.
	Log *slog.Logger

	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// mayServe reports whether requests may be sent to an address.
func (c *Config) mayServe(a netip.AddrPort) bool { return c.Networks.Check(a) == nil }

func (c Config) withDefaults() (Config, error) {
	for _, setting := range []struct {
		name  string
		value any
		bad   bool
		want  string
	}{
		{"MaxBodyBytes", c.MaxBodyBytes, c.MaxBodyBytes < 0, "a number of bytes"},
		{"MaxHeldBytes", c.MaxHeldBytes, c.MaxHeldBytes < 0, "a number of bytes"},
		{"DecisionTimeout", c.DecisionTimeout, c.DecisionTimeout < 0, "a time"},
		{"QueueWait", c.QueueWait, c.QueueWait < 0, "a time"},
		{"OverloadStatus", c.OverloadStatus, !slices.Contains([]int{0, 429, 503, 529}, c.OverloadStatus), "429, 503 or 529"},
		{"MaxStreams", c.MaxStreams, c.MaxStreams < 0, "a number of streams"},
	} {
		if setting.bad {
			return c, fmt.Errorf("extproc: %s is %v, want %s", setting.name, setting.value, setting.want)
		}
	}
	c.MaxBodyBytes = cmp.Or(c.MaxBodyBytes, 16<<20)
	c.MaxHeldBytes = cmp.Or(c.MaxHeldBytes, max(256<<20, 4*int64(c.MaxBodyBytes)))
	c.DecisionTimeout = cmp.Or(c.DecisionTimeout, 1500*time.Millisecond)
	c.QueueWait = cmp.Or(c.QueueWait, 9500*time.Millisecond)
	c.OverloadStatus = cmp.Or(c.OverloadStatus, http.StatusTooManyRequests)
	c.MaxStreams = cmp.Or(c.MaxStreams, 40_000)
	c.SecondChoice = cmp.Or(c.SecondChoice, SecondHeader)
	c.FirstToken = cmp.Or(c.FirstToken, FirstTokenObserver)
	if err := checkSecond(c.SecondChoice); err != nil {
		return c, err
	}
	if c.FirstToken != FirstTokenObserver && c.FirstToken != FirstTokenResponseHeaders {
		return c, fmt.Errorf("extproc: FirstToken is %q, want %q or %q", c.FirstToken, FirstTokenObserver, FirstTokenResponseHeaders)
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	c.Meter = cmp.Or[metric.Meter](c.Meter, noop.Meter{})
	return c, nil
}

// answerTime is how much longer Envoy is asked to wait than a request does, so that
// kvroute refuses the request and not Envoy.
const answerTime = 500 * time.Millisecond

// Server is the external processor. Make one with [New]. Its methods may be called
// by any number of goroutines.
type Server struct {
	extprocv3.UnimplementedExternalProcessorServer

	conf    Config
	router  Router
	metrics *metrics
	forms   forms
	prefix  string // of our request ids

	held     heldBytes
	received receiveBuffers
	inflater inflater

	open  [kinds]atomic.Int64 // streams
	lines [failures]lineLimit // of the log
	apart lineLimit           // of those on workers that Envoy does not know
	// headersSent says that Envoy is configured to send response headers: a stream that
	// ends without them had no response.
	headersSent atomic.Bool

	drained context.Context //nolint:containedctx // ends with Drain; context.AfterFunc wants one
	drain   context.CancelFunc
}

// New returns a server that asks r. It fails if a setting is out of range, naming
// it, or if the instruments cannot be made.
func New(conf Config, r Router) (*Server, error) {
	conf, err := conf.withDefaults()
	if err != nil {
		return nil, err
	}
	if r == nil {
		return nil, errors.New("extproc: there is no router")
	}
	f, err := parseForms(conf.ForwardTokens)
	if err != nil {
		return nil, fmt.Errorf("extproc: ForwardTokens: %w", err)
	}
	m, err := newMetrics(conf.Meter)
	if err != nil {
		return nil, err
	}
	s := &Server{
		conf: conf, router: r, metrics: m, forms: f,
		prefix: IDPrefix(conf.RouterID),
		held:   heldBytes{most: conf.MaxHeldBytes},
	}
	s.inflater.held = &s.held
	s.received = receiveBuffers{held: &s.held, evict: make(chan struct{})}
	s.drained, s.drain = context.WithCancel(context.Background())
	return s, nil
}

// ServerOptions are the options that a gRPC server for Envoy needs: room for the
// largest body in one message, windows that let such a body through without
// waiting, tolerance for Envoy's keepalive, and an end of observing streams with [Server.Drain].
func (s *Server) ServerOptions() []grpc.ServerOption {
	// A body somewhat above the limit should get its 413. Above what gRPC takes
	// it breaks the stream, and Envoy goes on without us.
	const above = 1 << 20
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(s.conf.MaxBodyBytes + above),
		// The longest queue of unread data of a stream, beside one message.
		grpc.InitialWindowSize(256 << 10),
		grpc.InitialConnWindowSize(16 << 20),
		experimental.BufferPool(&s.received),
		grpc.InTapHandle(endable),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	}
}

// Register adds the server to a gRPC server. The health service that Envoy checks
// is the caller's to add.
func (s *Server) Register(to grpc.ServiceRegistrar) { extprocv3.RegisterExternalProcessorServer(to, s) }

// Drain ends all streams but those with a decision in progress, which get their
// answer first, and from now on each new one at once; Envoy goes on without us,
// live responses are not touched, and the slots are freed. All handlers have
// returned within DecisionTimeout if the router obeys its context, but for those whose
// responses come to us in chunks (full duplex), which stay to their end. Call it when
// the health service has told Envoy to send no new streams, and the gRPC server's
// GracefulStop after it.
func (s *Server) Drain() { s.drain() }

func (s *Server) draining() bool { return s.drained.Err() != nil }

// endKey is what the function that ends a stream's context is kept under there.
type endKey struct{}

// endable gives the context of a new stream an end that is ours to call. gRPC's own ends
// only when the handler returns, and so does a wait for a message by it.
func endable(ctx context.Context, _ *tap.Info) (context.Context, error) {
	ctx, end := context.WithCancel(ctx)
	return context.WithValue(ctx, endKey{}, end), nil
}

// endWithDrain ends a stream's context when the server drains, until stop is called. On a
// server without [Server.ServerOptions] it does nothing, and the drain waits for the stream.
func (s *Server) endWithDrain(ctx context.Context) (stop func() bool) {
	end, _ := ctx.Value(endKey{}).(context.CancelFunc)
	if end == nil {
		return func() bool { return false }
	}
	return context.AfterFunc(s.drained, end)
}

// kind is a kind of stream.
type kind uint8

const (
	mainStream kind = iota
	observerStream
	kinds // the number of kinds
)

func (k kind) String() string { return [...]string{"main", "observer"}[k] }

// How streams end, beside the states of main ones.
const (
	endPanic      = "panic"
	endLimit      = "limit"
	endUnrouted   = "unrouted"
	endElsewhere  = "elsewhere"
	endNoEvents   = "no_events"
	endFirstToken = "first_token"
	endEnded      = "ended"
	endDraining   = "draining"
)

// ends are the ends that streams of a kind may have.
func ends(k kind) []string {
	all := []string{endPanic, endLimit}
	if k == observerStream {
		return append(all, endUnrouted, endElsewhere, endNoEvents, endFirstToken, endEnded, endDraining)
	}
	for s := range states {
		all = append(all, s.String())
	}
	return all
}

// metaRole is the metadata that Envoy's configuration tells observing streams by.
// They also have headerRequestID. Envoy Gateway cannot add metadata: see [Server.shadow].
const metaRole = "x-dynamo-role"

// Process handles one stream. It never returns an error: after a nil return Envoy
// goes on without us, after an error it could fail the request.
func (s *Server) Process(g extprocv3.ExternalProcessor_ProcessServer) error {
	k := mainStream
	if first(metadata.ValueFromIncomingContext(g.Context(), metaRole)) == "observer" {
		k = observerStream
	}
	end := endPanic
	count := func(n int64) int64 {
		s.metrics.opened(k, n)
		return s.open[k].Add(n)
	}
	open := count(1)
	defer func() {
		count(-1)
		s.metrics.ended(k, end)
	}()
	defer s.recoverPanic(k)
	switch {
	case k == observerStream && open > int64(s.conf.MaxStreams):
		end = endLimit
	case k == observerStream:
		defer s.endWithDrain(g.Context())()
		end = s.observe(first(metadata.ValueFromIncomingContext(g.Context(), headerRequestID)), g.Recv)
	case open > int64(s.conf.MaxStreams):
		end = endLimit
		s.failOpen(failLimit, nil)
	default:
		end = s.serve(g, func() {
			count(-1)
			k = observerStream
			count(1)
		})
	}
	return nil
}

// IDPrefix is what the ids begin with that a replica gives to requests.
func IDPrefix(routerID uint64) string { return fmt.Sprintf("%016x-", routerID) }

// newID returns an id that no client can guess, so none can speak for another's
// request.
func (s *Server) newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return s.prefix + hex.EncodeToString(b[:])
}

func first(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}
