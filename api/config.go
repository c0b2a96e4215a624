// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"time"

	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/prefill"
	"github.com/kvroute/kvroute/router"
)

// Check is a condition for kvroute to route as configured.
type Check struct {
	Name string
	// OK reports whether the condition holds. It must not block.
	OK func() bool
	// Required says that without the condition kvroute cannot route and is not ready. Without
	// another condition it routes, degraded.
	Required bool
}

// Config is what an API serves.
type Config struct {
	// Router makes the decisions. Required.
	Router *router.Router
	// Metrics serves /metrics. Required.
	Metrics http.Handler
	// OverloadStatus is the status of requests that are refused because all
	// workers are busy. Default 429.
	OverloadStatus int
	// DecisionTimeout is how long a decision may take, without the time in the queue.
	// Default 0: no limit.
	DecisionTimeout time.Duration
	// QueueWait is the longest wait of a booking in the router's queue. Default 0: as long
	// as the client waits, or the request's own target.
	QueueWait time.Duration
	// Client sends the requests of /v1/generate. Default [fleet.Networks.Client] of all
	// networks: it follows neither proxies nor redirects.
	Client *http.Client
	// RunLeg runs the prefill leg of a decision and returns the body of the decode request; nil if the body stays as it
	// is. WorkerHeaders returns the headers that the request to the worker of a decision needs, as name, value, name,
	// value. Without RunLeg, requests of /v1/generate have no prefill leg, and without WorkerHeaders no such headers.
	RunLeg        func(ctx context.Context, d *router.Decision, leg prefill.Leg) (decode []byte, err error)
	WorkerHeaders func(d *router.Decision) []string
	// OneChoice sends a request of /v1/generate that its worker refuses to no second worker.
	OneChoice bool
	// TrustOverrides lets the body of /v1/generate have fields that steer workers. Default: they are an error.
	TrustOverrides bool
	// Ready are the checks of /readyz, beside the check that some worker can take requests.
	Ready []Check
	// Replica describes this router replica; the API adds time, scope and readiness. Default:
	// no description.
	Replica func() Replica
	// Scope is the scope of the workers, as namespace/component/endpoint.
	Scope string
	// Stream returns the position in the stream of events. Default: 0.
	Stream func() uint64
	// Fleet registers workers. Default: the API registers none.
	Fleet *fleet.Registry
	// BodyTime is how long a request's body may take to arrive. Default 1 minute.
	BodyTime time.Duration
	// HoldBody reserves memory, in bytes, for request bodies, and reports whether there was room; ReleaseBody
	// returns it. Without room a request gets 503. Default: only the size of each body is limited.
	HoldBody    func(n int) bool
	ReleaseBody func(n int)
	// Tokens are needed for everything but the probes and the metrics. Default: no token is
	// needed.
	Tokens *Tokens

	// Outcomes has what became of requests: the sections history, totals, benefit and worker_charts of /v1/live,
	// /v1/history, and with Holdout above 0, which is [router.Config.HoldoutShare], the section holdout. Default: all of
	// them are absent.
	Outcomes *outcomes.Recorder
	Holdout  float64
	// Attention notes what needs attention: the sections attention and events of /v1/live. Each reading of the workers
	// is passed on to it, and each call of [Config.Observe]. Default: the sections are absent.
	Attention *attention.Log
	// Docs is the address of the documentation of this version; see [attention.DocsOf].
	Docs string
	// Prefixes returns the section of this name, as a value for encoding/json. It is called at most once a second for
	// all streams, and for each other request. Default: the section is absent.
	Prefixes func() any
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Draining is closed when the server stops: the streams of /v1/live then end, for which
	// [http.Server.Shutdown] waits. Default: they end with their clients.
	Draining <-chan struct{}

	// For tests: the ticks of /v1/live in place of those of a clock, and the longest time of a
	// write there.
	ticks <-chan time.Time
	stall time.Duration
}

func (c *Config) now() time.Time {
	if c.Now == nil {
		return time.Now()
	}
	return c.Now()
}
