// SPDX-License-Identifier: Apache-2.0

// Package outcomes makes visible what became of requests: as histograms, as histories of the last day, as sums since
// the start, and as spans of traces. It compares them with requests that are routed round robin.
//
// A [Recorder] may be used by any number of goroutines.
package outcomes

import (
	"context"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/router"
)

// Recorder records the outcomes of requests.
type Recorder struct {
	now                              func() time.Time
	ttft, perToken, duration, tokens metric.Float64Histogram

	mu sync.Mutex
	// mu guards the fields below.
	totals Totals
	all    *series
	series map[Series]*series
	sides  map[string]*sides // by model
	charts charts
	sets   map[labels][]metric.RecordOption
}

// New returns a recorder whose clock is now. It fails if the instruments, which docs/metrics.md lists, cannot be made.
func New(from metric.Meter, now func() time.Time) (*Recorder, error) {
	m := meter.New(from)
	// The boundaries are those of OpenTelemetry's conventions for GenAI.
	seconds := []float64{.01, .02, .04, .08, .16, .32, .64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92}
	return &Recorder{
		now: now, all: newSeries(Series{}), series: make(map[Series]*series), sides: make(map[string]*sides),
		sets: make(map[labels][]metric.RecordOption),
		ttft: m.Seconds("gen_ai.server.time_to_first_token",
			"Time from a request's arrival to its first token, of requests whose first token was seen.",
			.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10),
		perToken: m.Seconds("gen_ai.server.time_per_output_token",
			"Time between two output tokens, of responses whose usage was read.",
			.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5),
		duration: m.Seconds("gen_ai.server.request.duration", "Time from a request's arrival to its end.", seconds...),
		tokens: m.Histogram("gen_ai.client.token.usage", "{token}",
			"Tokens of a request: input, and output of responses whose usage was read.",
			1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864),
	}, m.Err()
}

// failed reports whether the outcome counts as a failure. A client that leaves before the response is one, too:
// kvroute cannot tell it from a worker that does not answer.
func failed(o *router.Outcome) bool { return o.Abandoned || o.Status >= 500 }

// errorType returns the attribute error.type of an outcome, "" if there was no error.
func errorType(o *router.Outcome) string {
	switch {
	case o.Status >= 400:
		return strconv.Itoa(o.Status)
	case o.Abandoned:
		return "no_response"
	}
	return ""
}

// seen reports whether the time of a first token was observed, not inferred.
func seen(d *router.Decision) bool {
	by := d.FirstTokenBy
	return !d.FirstToken.IsZero() && (by == router.SignObserver || by == router.SignHeaders || by == router.SignTold)
}

// weight is the number of requests for which the time to the first token of a request stands.
func weight(d *router.Decision) int { return max(1, d.Represents) }

// Finished records an outcome. It is for [router.Hooks.Finished].
func (r *Recorder) Finished(o router.Outcome) {
	ctx := context.Background()
	d := &o.Decision
	r.duration.Record(ctx, o.Freed.Sub(o.Began).Seconds(), r.attributes(d, "error.type", errorType(&o))...)
	ttft := -1.
	if seen(&o.Decision) {
		ttft = o.FirstToken.Sub(o.Began).Seconds()
		about := r.attributes(d, holdoutAttribute, string(o.Holdout))
		for range weight(d) {
			r.ttft.Record(ctx, ttft, about...)
		}
	}
	if o.PromptTokens > 0 {
		r.tokens.Record(ctx, float64(o.PromptTokens), r.attributes(d, "gen_ai.token.type", "input")...)
	}
	r.add(&o, ttft*1000)
}

// Used records the usage in a response. It is for [router.Hooks.Used].
func (r *Recorder) Used(d router.Decision) {
	ctx := context.Background()
	if n := d.Usage.OutputTokens; n > 0 {
		r.tokens.Record(ctx, float64(n), r.attributes(&d, "gen_ai.token.type", "output")...)
		end := d.Freed
		if end.IsZero() {
			end = r.now()
		}
		if n > 1 && seen(&d) {
			r.perToken.Record(ctx, end.Sub(d.FirstToken).Seconds()/float64(n-1), r.attributes(&d, "", "")...)
		}
	}
}

// holdoutAttribute is the name of the attribute with the side of a request, of requests that have one.
const holdoutAttribute = "kvroute.holdout"

// ModelAttribute is the name of the attribute with the base model.
const ModelAttribute = "gen_ai.request.model"

// labels are what the attributes of a request depend on.
type labels struct{ model, operation, name, value string }

// mostSets limits the sets of attributes that a recorder keeps.
const mostSets = 512

// attributes returns the attributes of a request, with one more attribute if it has a value. Models are those of the
// fleet, and operations a fixed list, so a client cannot make new ones.
func (r *Recorder) attributes(d *router.Decision, name, value string) []metric.RecordOption {
	of := labels{d.Model, d.Labels.Operation, name, value}
	r.mu.Lock()
	defer r.mu.Unlock()
	if set, ok := r.sets[of]; ok {
		return set
	}
	about := []attribute.KeyValue{attribute.String(ModelAttribute, of.model)}
	if of.operation != "" {
		about = append(about, attribute.String("gen_ai.operation.name", of.operation))
	}
	if value != "" {
		about = append(about, attribute.String(name, value))
	}
	if len(r.sets) >= mostSets { // models that the fleet no longer has
		clear(r.sets)
	}
	set := []metric.RecordOption{metric.WithAttributes(about...)}
	r.sets[of] = set
	return set
}

// add adds an outcome to the sums. ttft, in ms, is below 0 if it was not seen.
func (r *Recorder) add(o *router.Outcome, ttft float64) {
	m := measured(o, ttft)
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	r.totals.add(&m.Totals)
	held := o.Holdout == router.SideRoundRobin
	r.all.add(now, &m, held)
	if s := r.seriesOf(now, Series{o.Model, o.Group}); s != nil {
		s.add(now, &m, held)
	}
	if ttft < 0 {
		return
	}
	r.charts.noteTTFT(&o.Decision, ttft)
	if o.Holdout != "" && !failed(o) {
		r.compareSides(&o.Decision, ttft)
	}
}

// Totals returns the sums since the start.
func (r *Recorder) Totals() Totals {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.totals
}
