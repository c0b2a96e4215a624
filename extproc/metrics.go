// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
)

// kind is a kind of stream.
type kind uint8

const (
	mainStream kind = iota
	observerStream
	kinds // the number of kinds
)

func (k kind) String() string { return [...]string{"main", "observer"}[k] }

// How streams end, beside the states of main streams.
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

// metrics are the package's instruments. docs/metrics.md lists them.
type metrics struct {
	ends, failOpen, refusals, strays, compressed, steering, queries, lists, unreached, attempts, given, held meter.Counter
	bodySize, legs                                                                                           metric.Float64Histogram
}

func newMetrics(from metric.Meter, s *Server) (*metrics, error) {
	m := meter.New(from)
	m.Gauge("kvroute.extproc.streams", "{stream}", "Streams open, by kind: main or observer.", func(o meter.Observe) {
		for k := range kinds {
			o(float64(s.open[k].Load()), "kind", k.String())
		}
	})
	return &metrics{
		ends: m.Counter("kvroute.extproc.stream.ends", "{stream}",
			"Streams ended, by kind and last state.", "kind", "end"),
		failOpen: m.Counter("kvroute.extproc.fail_open", "{request}",
			"Requests that Envoy routes without kvroute, by reason.", "reason"),
		refusals: m.Counter("kvroute.extproc.refusals", "{request}",
			"Requests answered with an error, by status.", "status"),
		strays:     m.Counter("kvroute.extproc.strays", "{message}", "Unexpected messages of Envoy, by message.", "message"),
		lists:      m.Counter("kvroute.extproc.lists", "{request}", "Requests for the list of models, or for one model, that kvroute answered."),
		queries:    m.Counter("kvroute.extproc.queries", "{request}", "Requests that only queried their worker."),
		compressed: m.Counter("kvroute.extproc.compressed", "{request}", "Requests with a compressed body."),
		steering: m.Counter("kvroute.extproc.steering", "{request}",
			"Requests whose body had fields that steer workers, or that kvroute could not check for them, by what became of the fields or the request.", "action"),
		unreached: m.Counter("kvroute.extproc.unreached", "{request}",
			"Requests that Envoy could not send to the chosen worker, because it has no endpoint there."),
		attempts: m.Counter("kvroute.extproc.attempts", "{attempt}",
			"Attempts of requests that a worker answered with 429 or 503, from Envoy's log of attempts, by status.", "status"),
		given: m.Counter("kvroute.extproc.given.ids", "{response}",
			"Responses that may give out an id of what their worker keeps, by what became of the id.", "outcome"),
		held: m.Counter("kvroute.extproc.held", "{request}",
			"Requests with the id of a stored response in their path, by whether the worker that gave it out is known.", "outcome"),
		// From a question to a long document, in powers of four.
		bodySize: m.Histogram("kvroute.extproc.request.body.size", "By",
			"Size of the bodies of requests that kvroute routes.",
			256, 1<<10, 4<<10, 16<<10, 64<<10, 256<<10, 1<<20, 4<<20, 16<<20),
		// From a prefill worker that is not reached to the longest prompts.
		legs: m.Seconds("kvroute.extproc.prefill.duration", "Time that requests waited for their prefill leg, by outcome.",
			.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30),
	}, m.Err()
}
