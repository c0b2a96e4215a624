// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer"
)

// metrics are the router's instruments. docs/metrics.md lists them.
type metrics struct {
	decisions             metric.Int64Counter
	duration              metric.Float64Histogram
	overlap               metric.Float64Histogram
	blocks                metric.Int64Counter
	prompts               metric.Int64Counter
	text                  metric.Int64Counter
	reused                metric.Int64Counter
	refusals              metric.Int64Counter
	waits                 metric.Float64Histogram
	failovers, avoidances metric.Int64Counter
	firstTokens           metric.Int64Counter
}

// labels are those of one pool's measurements, made once.
type labels struct {
	model   attribute.KeyValue
	add     []metric.AddOption
	record  []metric.RecordOption
	exact   []metric.AddOption
	reasons map[Reason][]metric.AddOption
	signs   map[Sign][]metric.AddOption
}

func newLabels(model string) *labels {
	m := attribute.String("model", model)
	l := &labels{
		model:   m,
		add:     []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(m))},
		record:  []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(m))},
		exact:   []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(m, attribute.String("mode", string(tokenizer.Exact)), attribute.String("reason", "")))},
		reasons: make(map[Reason][]metric.AddOption),
		signs:   make(map[Sign][]metric.AddOption),
	}
	for _, by := range []Sign{SignTold, SignObserver, SignHeaders, SignOrder, SignRate, SignEnd} {
		l.signs[by] = []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(m, attribute.String("source", string(by))))}
	}
	for _, r := range []Reason{ReasonKV, ReasonLoad, ReasonRoundRobin, ReasonMode, ReasonPinned, ReasonPreferred, ReasonSession, ReasonUnread, ReasonTokenizer} {
		l.reasons[r] = []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(m, attribute.String("reason", string(r))))}
	}
	return l
}

// gauges are read when somebody looks.
type gauges struct {
	blocks, bytes, slots, foreign, workers, waiting, sessions, models metric.Int64ObservableGauge
	skipped, expired, evicted, dumps                                  metric.Int64ObservableCounter
}

func newMetrics(meter metric.Meter, r *Router) (*metrics, error) {
	var errs []error
	counter := func(name, unit, help string) metric.Int64Counter {
		c, err := meter.Int64Counter("kvroute."+name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	histogram := func(name, unit, help string, bounds ...float64) metric.Float64Histogram {
		h, err := meter.Float64Histogram("kvroute."+name, metric.WithUnit(unit), metric.WithDescription(help), metric.WithExplicitBucketBoundaries(bounds...))
		errs = append(errs, err)
		return h
	}
	gauge := func(name, unit, help string) metric.Int64ObservableGauge {
		g, err := meter.Int64ObservableGauge("kvroute."+name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return g
	}
	sum := func(name, unit, help string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter("kvroute."+name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	m := metrics{
		decisions: counter("router.decisions", "{decision}", "Booked decisions, by model and reason."),
		// From a short prompt that is matched in microseconds to the budget of a request.
		duration: histogram("router.decision.duration", "s", "Time of a decision: tokens, hashes, match, choice and booking; not waiting for a worker.",
			1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, .1, .25, .5, 1, 2.5),
		overlap: histogram("router.overlap.ratio", "1", "Share of a prompt's full blocks that the chosen worker holds.",
			0, .1, .2, .3, .4, .5, .6, .7, .8, .9, .95, .99, 1),
		blocks:   counter("router.event.blocks", "{block}", "Blocks in the events of workers, by what became of them."),
		prompts:  counter("tokenize.requests", "{request}", "Booked requests whose prompt was read, by model, by how its token ids were made and why not exactly."),
		text:     counter("tokenize.text.size", "By", "Text of prompts that was made into token ids, by model."),
		reused:   counter("tokenize.reused.size", "By", "Text of prompts whose token ids were known from earlier ones, by model."),
		refusals: counter("router.refusals", "{request}", "Requests with an id that no worker was found for, by reason."),
		// From a pause between two first tokens to the longest that Envoy waits.
		waits: histogram("router.queue.duration", "s", "Time that admitted requests waited in the queue, of those that waited.",
			.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30),
		failovers:   counter("router.failovers", "{request}", "Requests that another worker served than the decision's, by model."),
		avoidances:  counter("router.avoidances", "{period}", "Times that a worker began to be avoided because it failed, by model."),
		firstTokens: counter("router.first_tokens", "{request}", "Requests whose prompt was taken for computed, by model and by what said so first."),
	}
	g := gauges{
		blocks:   gauge("router.index.blocks", "{block}", "Pairs of block and worker in the index, by model and by where they are known from."),
		bytes:    gauge("router.index.size", "By", "Memory of the index, by model and by where its blocks are known from."),
		slots:    gauge("router.slots", "{request}", "Requests in flight that hold a slot, by model."),
		foreign:  gauge("router.foreign_requests", "{request}", "Requests that engines report and that neither this router nor its replicas sent, by model."),
		workers:  gauge("router.workers", "{worker}", "Workers known, by model and health."),
		waiting:  gauge("router.queue.size", "{request}", "Requests that wait for a worker, by model."),
		sessions: gauge("router.sessions", "{session}", "Sessions bound to a worker, by model."),
		models:   gauge("tokenize.models", "{model}", "Models known, by how the token ids of their chats are made and why not exactly; 1 for what is so."),
		skipped:  sum("router.threshold.skips", "{threshold}", "Thresholds that could not be looked at because a worker's capacity is unknown, by model."),
		expired:  sum("router.slots.expired", "{request}", "Slots that nobody owned and nobody freed for 300 s, by model."),
		evicted:  sum("router.index.evicted", "{block}", "Blocks forgotten for lack of room that no event counts, by model and by where they were known from."),
		dumps:    sum("router.dumps", "{dump}", "Dumps of the index, by how they ended."),
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("router: make instruments: %w", err)
	}
	_, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		r.observe(o, &g)
		return nil
	}, g.blocks, g.bytes, g.slots, g.foreign, g.workers, g.waiting, g.sessions, g.models, g.skipped, g.expired, g.evicted, g.dumps)
	return &m, err
}

// reading is what the gauges say of one model.
type reading struct {
	slots, foreign, waiting, sessions, skipped, expired int64
	workers                                             [Expired + 1]int64
}

func (r *Router) observe(o metric.Observer, g *gauges) {
	readings := make(map[string]*reading)
	indexes := make(map[string][]*known)
	r.fleet.RLock()
	for key, p := range r.pools {
		to := readings[key.model]
		if to == nil {
			to = new(reading)
			readings[key.model] = to
		}
		if p.known != nil {
			indexes[key.model] = append(indexes[key.model], p.known)
		}
		p.mu.Lock()
		c := &p.core
		to.slots += int64(c.slots.Len())
		to.sessions += int64(c.sessions.byKey.Len())
		to.skipped += int64(c.skipped)
		to.expired += int64(c.expired)
		if c.queue != nil {
			to.waiting += int64(c.queue.Len())
		}
		for _, ord := range c.order {
			if h := c.shownHealth(r.conf.Now(), &c.entries[ord]); h != expected {
				to.workers[min(h, Expired)]++
			}
			to.foreign += int64(c.foreign(r.conf.Now(), &c.entries[ord], 0).Requests)
		}
		p.mu.Unlock()
	}
	r.fleet.RUnlock()
	for _, m := range r.Models() {
		o.ObserveInt64(g.models, 1, metric.WithAttributes(attribute.String("model", m.Model), attribute.String("mode", string(m.TokenMode)), attribute.String("reason", m.TokenReason)))
	}
	for end := range r.dumps {
		o.ObserveInt64(g.dumps, r.dumps[end].Load(), metric.WithAttributes(attribute.String("outcome", [...]string{"whole", "overtaken", "left"}[end])))
	}
	for name, from := range readings {
		model := attribute.String("model", name)
		only := metric.WithAttributes(model)
		observeIndexes(o, g, model, indexes[name])
		o.ObserveInt64(g.slots, from.slots, only)
		o.ObserveInt64(g.foreign, from.foreign, only)
		o.ObserveInt64(g.waiting, from.waiting, only)
		o.ObserveInt64(g.sessions, from.sessions, only)
		o.ObserveInt64(g.skipped, from.skipped, only)
		o.ObserveInt64(g.expired, from.expired, only)
		for h, n := range from.workers {
			o.ObserveInt64(g.workers, n, metric.WithAttributes(model, attribute.String("health", Health(h).String())))
		}
	}
}

// observeIndexes looks at every node: nothing is held meanwhile that others need.
func observeIndexes(o metric.Observer, g *gauges, model attribute.KeyValue, indexes []*known) {
	sums := map[string]source{}
	for _, k := range indexes {
		for _, s := range k.sources() {
			sum := sums[s.name]
			sums[s.name] = source{s.name, sum.blocks + s.blocks, sum.bytes + s.bytes, sum.evicted + s.evicted}
		}
	}
	for name, s := range sums {
		of := metric.WithAttributes(model, attribute.String("source", name))
		o.ObserveInt64(g.blocks, int64(s.blocks), of)
		o.ObserveInt64(g.bytes, int64(s.bytes), of)
		o.ObserveInt64(g.evicted, int64(s.evicted), of)
	}
}

func (m *metrics) decided(ctx context.Context, l *labels, d *Decision) {
	m.decisions.Add(ctx, 1, l.reasons[d.Reason]...)
	m.duration.Record(ctx, (d.TokenizeTime + d.HashTime + d.MatchTime + d.PickTime).Seconds(), l.record...)
	switch d.TokenMode {
	case "":
	case tokenizer.Exact:
		m.prompts.Add(ctx, 1, l.exact...)
	default:
		m.prompts.Add(ctx, 1, metric.WithAttributes(l.model, attribute.String("mode", string(d.TokenMode)), attribute.String("reason", d.TokenReason)))
	}
	if d.TextBytes > 0 {
		m.text.Add(ctx, int64(d.TextBytes), l.add...)
	}
	if d.ReusedBytes > 0 {
		m.reused.Add(ctx, int64(d.ReusedBytes), l.add...)
	}
	if d.PromptBlocks > 0 {
		m.overlap.Record(ctx, float64(d.OverlapBlocks)/float64(d.PromptBlocks), l.record...)
	}
	if d.QueueTime > 0 {
		m.waits.Record(ctx, d.QueueTime.Seconds(), l.record...)
	}
}

// refused counts a request that no worker was found for.
func (m *metrics) refused(ctx context.Context, model string, err error) {
	reason := "other"
	for _, c := range []struct {
		err  error
		name string
	}{
		{ErrPinnedUnknown, "pinned_unknown"},
		{ErrPinnedNotAllowed, "pinned_not_allowed"},
		{ErrPinnedBusy, "pinned_busy"},
		{ErrPinMissing, "pin_missing"},
		{ErrQueueFull, "queue_full"},
		{ErrTooLate, "too_late"},
		{ErrAllBusy, "all_busy"},
		{ErrNoWorkers, "no_workers"},
		{ErrDuplicate, "duplicate"},
		{ErrFreed, "freed"},
		{ErrBadOverride, "bad_override"},
	} {
		if errors.Is(err, c.err) {
			reason = c.name
			break
		}
	}
	m.refusals.Add(ctx, 1, metric.WithAttributes(attribute.String("model", model), attribute.String("reason", reason)))
}

func (m *metrics) applied(out indexer.Outcome) {
	for _, c := range [...]struct {
		outcome string
		n       int
	}{
		{"stored", out.Stored},
		{"removed", out.Removed},
		{"duplicate", out.Duplicate},
		{"conflict", out.Conflict},
		{"orphan", out.Orphan},
		{"parked", out.Parked},
		{"evicted", out.Evicted},
		{"unknown", out.Unknown},
		{"refused", out.Refused},
		{"other_tier", out.OtherTier},
		{"invalid", out.Invalid},
	} {
		if c.n > 0 {
			m.blocks.Add(context.Background(), int64(c.n), metric.WithAttributes(attribute.String("outcome", c.outcome)))
		}
	}
}

func (m *metrics) firstToken(l *labels, by Sign) {
	m.firstTokens.Add(context.Background(), 1, l.signs[by]...)
}
