// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"cmp"
	"context"
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

// How Envoy is told the second choice, to which it sends a request that its worker refuses.
const (
	// SecondHeader names the second choice in x-dynamo-worker-fallback.
	SecondHeader = "header"
	// SecondList names it behind the first one in x-dynamo-worker.
	SecondList = "list"
	// SecondNone names none.
	SecondNone = "none"
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
	for name, value := range map[string]int64{
		"MaxBodyBytes": int64(c.MaxBodyBytes), "MaxHeldBytes": c.MaxHeldBytes, "MaxStreams": int64(c.MaxStreams),
		"DecisionTimeout": int64(c.DecisionTimeout), "QueueWait": int64(c.QueueWait),
	} {
		if value < 0 {
			return c, fmt.Errorf("extproc: %s is %d, want 0 or more", name, value)
		}
	}
	if !slices.Contains([]int{0, 429, 503, 529}, c.OverloadStatus) {
		return c, fmt.Errorf("extproc: OverloadStatus is %d, want 429, 503 or 529", c.OverloadStatus)
	}
	c.MaxBodyBytes = cmp.Or(c.MaxBodyBytes, 16<<20)
	c.MaxHeldBytes = cmp.Or(c.MaxHeldBytes, max(256<<20, 4*int64(c.MaxBodyBytes)))
	c.DecisionTimeout = cmp.Or(c.DecisionTimeout, 1500*time.Millisecond)
	c.QueueWait = cmp.Or(c.QueueWait, 9500*time.Millisecond)
	c.OverloadStatus = cmp.Or(c.OverloadStatus, http.StatusTooManyRequests)
	c.MaxStreams = cmp.Or(c.MaxStreams, 40_000)
	c.SecondChoice = cmp.Or(c.SecondChoice, SecondHeader)
	c.FirstToken = cmp.Or(c.FirstToken, FirstTokenObserver)
	if !slices.Contains([]string{SecondHeader, SecondList, SecondNone}, c.SecondChoice) {
		return c, fmt.Errorf("extproc: SecondChoice is %q, want %q, %q or %q", c.SecondChoice, SecondHeader, SecondList, SecondNone)
	}
	if c.FirstToken != FirstTokenObserver && c.FirstToken != FirstTokenResponseHeaders {
		return c, fmt.Errorf("extproc: FirstToken is %q, want %q or %q", c.FirstToken, FirstTokenObserver, FirstTokenResponseHeaders)
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	c.Meter = cmp.Or[metric.Meter](c.Meter, noop.Meter{})
	return c, nil
}

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

	open  [kinds]atomic.Int64 // streams
	lines [failures]lineLimit // of the log, on requests that fail open
	apart lineLimit           // of the log, on workers that Envoy does not know
	// headersSent says that Envoy is configured to send response headers: a stream that
	// ends without them had no response.
	headersSent atomic.Bool

	drained context.Context //nolint:containedctx // ends with Drain; context.AfterFunc wants one
	drain   context.CancelFunc
}

// Router decides and keeps account. All its methods may be called at any time, by
// any number of goroutines.
type Router interface {
	// BestWorker decides where a request goes and books it under its ID; after
	// an error nothing is booked. It returns soon after ctx ends. The spans of
	// req are not kept. It may call req.Waiting, in the caller's goroutine.
	// Errors that are neither the client's mistake nor a lack of workers or of
	// room make the request fail open.
	BestWorker(ctx context.Context, req router.Request) (router.Decision, error)
	// FirstToken notes a request's first token, or with [router.SignEnd] that it came
	// before, and reports whether that was news. Unknown ids are no error.
	FirstToken(id string, by router.Sign) bool
	// Free ends a booking and reports whether there was one. Abandon does so for
	// a request that no worker served.
	Free(id string) bool
	Abandon(id string) bool
	// Served notes which worker answered a request when its response begins, so that the
	// booking can follow. It reports whether the booking did, and which workers are avoided
	// from now on.
	Served(id string, r router.Response) (moved bool, avoided []router.Worker)
}
