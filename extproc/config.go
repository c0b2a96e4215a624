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
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// The signs of the first token of a response.
const (
	// FirstTokenObserver waits for the observer stream.
	FirstTokenObserver = "observer"
	// FirstTokenResponseHeaders takes the response's headers for the first token. That is
	// right only for workers that send their headers with the first token.
	FirstTokenResponseHeaders = "response-headers"
)

// The ways in which a request names the source of a pull.
const (
	// PullOff names none. It is the default.
	PullOff = "off"
	// pullByBody writes the engine's own field into the body.
	pullByBody = "body"
	// pullByHeader sets the header of llm-d, from which the sidecar of the worker makes that field.
	pullByHeader = "header"
)

// The ways in which Envoy receives the second choice, to which it sends a request that its worker refuses.
const (
	// SecondHeader names the second choice in x-dynamo-worker-fallback, the third in x-dynamo-worker-fallback-2.
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

	// Bodies reads the requests' bodies. The default knows no messages of earlier ones.
	Bodies openai.Reader

	// MaxHeldBytes bounds the memory of all request bodies together: as Envoy sent them,
	// received in part and joined. A request that finds no room fails open, or is refused if kvroute must check its body.
	// Default 256 MiB, or four of the largest bodies if that is more.
	MaxHeldBytes int64

	// DecisionTimeout is the time that a decision may take before the request
	// fails open. It must be less than Envoy's message_timeout, or Envoy gives
	// up first. Default 1.5 s.
	DecisionTimeout time.Duration

	// QueueWait is the time that a request may wait for a worker before it is
	// refused with OverloadStatus. Half a second more must not exceed Envoy's
	// max_message_timeout. Default 9.5 s.
	QueueWait time.Duration

	// OverloadStatus is the status of the error when all workers are busy, too many
	// requests wait, or the wait was too long: 429, 503 or 529. Default 429.
	OverloadStatus int

	// SessionHeaders are the request's headers that name its session, in lower
	// case; the first one that is present counts.
	SessionHeaders []string

	// TrustOverrides applies headers and fields of the body with hints for routing,
	// AllowDirect those that name the worker. Without these settings kvroute ignores
	// the fields and removes the headers. Set them only for listeners that only trusted
	// clients reach.
	TrustOverrides, AllowDirect bool

	// Group is the router group of the workers; "" for none. With AllowDirect, an upper
	// router may name the worker that it prefers.
	Group string

	// MaxStreams bounds the open main streams, and the open observer streams. Requests
	// above it fail open at once. Default 40,000, the circuit breaker of our Envoy
	// configuration.
	MaxStreams int

	// DecisionHeaders adds the id, worker, overlap and reason to the response's headers. These
	// show clients the inside of the fleet.
	DecisionHeaders bool

	// FirstToken is [FirstTokenObserver], the default, or
	// [FirstTokenResponseHeaders].
	FirstToken string

	// Client sends prefill requests. It must follow no redirects and use no proxies. Default
	// [reach.Networks.Client] of Networks.
	Client *http.Client
	// PrefillLeg says who sends the prefill request of a split request: [PrefillByRouter], the
	// default, or [PrefillByHeader].
	PrefillLeg string
	// PrefillTimeout is the time that a prefill leg may take; then the decode worker computes
	// the prompt. With QueueWait and half a second it must not exceed Envoy's
	// max_message_timeout. Default 30 s.
	PrefillTimeout time.Duration

	// KVPull says how requests name the source of a pull: [PullOff], the default, "body" or "header".
	KVPull string

	// MaxMessageTimeout is Envoy's max_message_timeout: Envoy ignores a request for more time. Default QueueWait and
	// PrefillTimeout and half a second.
	MaxMessageTimeout time.Duration

	// SecondChoice is how Envoy learns the second choice: [SecondHeader], the default,
	// [SecondList] or [SecondNone].
	SecondChoice string

	// EndpointPicker also speaks the endpoint-picker protocol of the Gateway API
	// Inference Extension: the choices in x-gateway-destination-endpoint and in
	// dynamic metadata, and a choice for every request. With AllowDirect it supports
	// the hooks of the extension's conformance tests.
	EndpointPicker bool

	// RouterID begins the ids that this replica gives to requests. Each replica needs a
	// different one.
	RouterID uint64

	// Networks are the networks to which requests may be sent. A request whose worker has
	// an address elsewhere fails open. The zero value allows all.
	Networks reach.Networks

	// ModeOverride asks Envoy, in the answer to the request's headers, for the response's
	// headers and trailers, so that the stream stays open to the response's end. It is for
	// filters with allow_mode_override that cannot be configured so, such as Envoy
	// Gateway's. Bodies must be buffered there.
	ModeOverride bool

	// NoResponse, if not nil, gets the id of a worker that begins to be avoided because it gave no response. It must not
	// block.
	NoResponse func(id uint64)
	// AuditShare is the share of requests, 0 to 1, whose observer stream stays to the end of the response
	// to read its usage. Default 0. kvroute reads the usage of each response that passes through it.
	AuditShare float64
	// ObserveShare is the share of requests, 0 to 1, whose first token is observed though the router would infer it;
	// audited ones are part of it. Their times to first tokens stand for those of the others. Default 0.
	ObserveShare float64

	// Started, if not nil, reports whether the fleet is known. Until then, requests for
	// which no worker is known fail open instead of being refused. It must not block.
	Started func() bool
	// Synced says that the router knows the requests of other replicas: an observer
	// stream may then belong to another replica's request.
	Synced bool

	// Models, if not nil, returns the names that requests may use, in any order: the answer to requests for the list of
	// models. Without it a worker answers them. It must not block for long.
	Models func() []router.ServedModel

	// Log gets a few lines a minute at most, and one for each refused request at level
	// debug. Default none.
	Log *slog.Logger

	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

func (c Config) withDefaults() (Config, error) {
	for name, value := range map[string]int64{
		"MaxBodyBytes": int64(c.MaxBodyBytes), "MaxHeldBytes": c.MaxHeldBytes, "MaxStreams": int64(c.MaxStreams),
		"DecisionTimeout": int64(c.DecisionTimeout), "QueueWait": int64(c.QueueWait),
		"PrefillTimeout": int64(c.PrefillTimeout), "MaxMessageTimeout": int64(c.MaxMessageTimeout),
	} {
		if value < 0 {
			return c, fmt.Errorf("extproc: %s is %d, want 0 or more", name, value)
		}
	}
	if c.AuditShare < 0 || c.AuditShare > 1 {
		return c, fmt.Errorf("extproc: AuditShare is %v, want 0 to 1", c.AuditShare)
	}
	if c.ObserveShare < 0 || c.ObserveShare > 1 {
		return c, fmt.Errorf("extproc: ObserveShare is %v, want 0 to 1", c.ObserveShare)
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
	c.Client = cmp.Or(c.Client, c.Networks.Client())
	c.PrefillLeg = cmp.Or(c.PrefillLeg, PrefillByRouter)
	c.PrefillTimeout = cmp.Or(c.PrefillTimeout, 30*time.Second)
	c.MaxMessageTimeout = cmp.Or(c.MaxMessageTimeout, c.QueueWait+c.PrefillTimeout+answerTime)
	c.SecondChoice = cmp.Or(c.SecondChoice, SecondHeader)
	c.KVPull = cmp.Or(c.KVPull, PullOff)
	c.FirstToken = cmp.Or(c.FirstToken, FirstTokenObserver)
	if !slices.Contains([]string{SecondHeader, SecondList, SecondNone}, c.SecondChoice) {
		return c, fmt.Errorf("extproc: SecondChoice is %q, want %q, %q or %q",
			c.SecondChoice, SecondHeader, SecondList, SecondNone)
	}
	if c.PrefillLeg != PrefillByRouter && c.PrefillLeg != PrefillByHeader {
		return c, fmt.Errorf("extproc: PrefillLeg is %q, want %q or %q", c.PrefillLeg, PrefillByRouter, PrefillByHeader)
	}
	if !slices.Contains([]string{PullOff, pullByBody, pullByHeader}, c.KVPull) {
		return c, fmt.Errorf("extproc: KVPull is %q, want %q, %q or %q", c.KVPull, PullOff, pullByBody, pullByHeader)
	}
	if c.FirstToken != FirstTokenObserver && c.FirstToken != FirstTokenResponseHeaders {
		return c, fmt.Errorf("extproc: FirstToken is %q, want %q or %q",
			c.FirstToken, FirstTokenObserver, FirstTokenResponseHeaders)
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return c, nil
}

// Router decides and counts the load. Any goroutine may call its methods at any time.
type Router interface {
	// BestWorker decides where a request goes and books it under its ID; after
	// an error nothing is booked. It returns soon after ctx ends. The spans of
	// req are not kept. It may call req.Waiting, in the caller's goroutine.
	// Errors other than the client's mistakes and a lack of workers or of room make the
	// request fail open.
	BestWorker(ctx context.Context, req router.Request) (router.Decision, error)
	// FirstToken notes a request's first token, or with [router.SignEnd] that the first
	// token is past, and reports whether that was unknown before. It ignores unknown ids.
	FirstToken(id string, by router.Sign) bool
	// Free ends a booking and reports whether there was one. Abandon does so for
	// a request that no worker served. Leave does so for a request whose client left before
	// the worker answered; sent says that the request may have reached its worker.
	Free(id string) bool
	Abandon(id string) bool
	Leave(id string, sent bool) bool
	// Served notes which worker answered a request when its response begins. It reports
	// whether it moved the booking to that worker, and which workers it avoids from now on.
	Served(id string, r router.Response) (moved bool, avoided []router.Avoided)
	// Attempted notes that a worker answered an attempt of a request with 429 or 503. It returns the
	// workers that it avoids from now on. The id may be empty or unknown.
	Attempted(id string, r router.Response) (avoided []router.Avoided)
	// BrokeOff notes that the worker at an address broke off a response that had begun.
	BrokeOff(at netip.AddrPort)
	// PrefillFailed notes that a booked request has no prefill leg after all: its worker
	// computes the prompt. It returns an error if that worker cannot.
	PrefillFailed(id string) error
	// Giver returns the worker that answers a request in flight: the one at an address, if the address is valid. It also
	// returns it for some time after the end of a request for which it was called before.
	Giver(request string, at netip.AddrPort) (w router.Worker, known bool)
	// Gave notes that a worker gave out an id in a response. It reports whether requests with the id go to that worker.
	Gave(id string, by router.Worker) bool
	// Holder returns the worker that gave out an id. It returns soon, also if it does not know the id.
	Holder(ctx context.Context, id string) (d router.Decision, known bool)
	// ReportUsage notes the usage in a response, the zero value if it has none. It may come after
	// the request's end.
	ReportUsage(id string, u router.Usage)
}
