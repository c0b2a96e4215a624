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
	firstTokens, legs     metric.Int64Counter
}

// labels are the attributes of one pool's measurements, made once.
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
	with := func(more ...attribute.KeyValue) []metric.AddOption {
		return []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(append(more, m)...))}
	}
	l := &labels{
		model:   m,
		add:     with(),
		record:  []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(m))},
		exact:   with(attribute.String("mode", string(tokenizer.Exact)), attribute.String("reason", "")),
		reasons: make(map[Reason][]metric.AddOption),
		signs:   make(map[Sign][]metric.AddOption),
	}
	for _, by := range []Sign{SignTold, SignObserver, SignHeaders, SignOrder, SignRate, SignEnd} {
		l.signs[by] = with(attribute.String("source", string(by)))
	}
	for _, r := range []Reason{ReasonKV, ReasonLoad, ReasonRoundRobin, ReasonMode, ReasonPinned, ReasonPreferred, ReasonSession, ReasonUnread, ReasonTokenizer} {
		l.reasons[r] = with(attribute.String("reason", string(r)))
	}
	return l
}

// observe passes one value of an instrument to its reader.
type observe func(value int, attributes ...attribute.KeyValue)

// maker makes instruments.
type maker struct {
	meter metric.Meter
	errs  []error
}

func (k *maker) counter(name, unit, help string) metric.Int64Counter {
	c, err := k.meter.Int64Counter("kvroute."+name, metric.WithUnit(unit), metric.WithDescription(help))
	k.errs = append(k.errs, err)
	return c
}

func (k *maker) histogram(name, unit, help string, bounds ...float64) metric.Float64Histogram {
	h, err := k.meter.Float64Histogram("kvroute."+name, metric.WithUnit(unit), metric.WithDescription(help), metric.WithExplicitBucketBoundaries(bounds...))
	k.errs = append(k.errs, err)
	return h
}

// gauge and sum make instruments that are read when metrics are collected.
func (k *maker) gauge(name, unit, help string, read func(observe)) {
	_, err := k.meter.Int64ObservableGauge("kvroute."+name, metric.WithUnit(unit), metric.WithDescription(help), metric.WithInt64Callback(callback(read)))
	k.errs = append(k.errs, err)
}

func (k *maker) sum(name, unit, help string, read func(observe)) {
	_, err := k.meter.Int64ObservableCounter("kvroute."+name, metric.WithUnit(unit), metric.WithDescription(help), metric.WithInt64Callback(callback(read)))
	k.errs = append(k.errs, err)
}

func callback(read func(observe)) metric.Int64Callback {
	return func(_ context.Context, o metric.Int64Observer) error {
		read(func(v int, a ...attribute.KeyValue) { o.Observe(int64(v), metric.WithAttributes(a...)) })
		return nil
	}
}

func newMetrics(meter metric.Meter, r *Router) (*metrics, error) {
	k := maker{meter: meter}
	m := metrics{
		decisions: k.counter("router.decisions", "{decision}", "Booked decisions, by model and reason."),
		// From a short prompt that is matched in microseconds to the budget of a request.
		duration: k.histogram("router.decision.duration", "s", "Time of a decision: tokens, hashes, match, choice and booking; not waiting for a worker.",
			1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, .1, .25, .5, 1, 2.5),
		overlap: k.histogram("router.overlap.ratio", "1", "Share of a prompt's full blocks that the chosen worker holds.",
			0, .1, .2, .3, .4, .5, .6, .7, .8, .9, .95, .99, 1),
		blocks:   k.counter("router.event.blocks", "{block}", "Blocks in the events of workers, by what became of them."),
		prompts:  k.counter("tokenize.requests", "{request}", "Booked requests whose prompt was read, by model, by how its token ids were made and why not exactly."),
		text:     k.counter("tokenize.text.size", "By", "Text of prompts that was made into token ids, by model."),
		reused:   k.counter("tokenize.reused.size", "By", "Text of prompts whose token ids were known from earlier ones, by model."),
		refusals: k.counter("router.refusals", "{request}", "Requests with an id that no worker was found for, by reason."),
		// From a pause between two first tokens to the longest that Envoy waits.
		waits: k.histogram("router.queue.duration", "s", "Time that admitted requests waited in the queue, of those that waited.",
			.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30),
		failovers:   k.counter("router.failovers", "{request}", "Requests that another worker served than the decision's, by model."),
		avoidances:  k.counter("router.avoidances", "{period}", "Times that a worker began to be avoided because it failed, by model."),
		firstTokens: k.counter("router.first_tokens", "{request}", "Requests whose prompt was taken for computed, by model and by what said so first."),
	}
	m.legs = k.counter("router.prefill_legs", "{request}", "Booked requests of split models, by model and by why they have no prefill leg; skipped is empty for those with a leg.")
	r.observeWith(&k)
	if err := errors.Join(k.errs...); err != nil {
		return nil, fmt.Errorf("router: make instruments: %w", err)
	}
	return &m, nil
}

// observeWith makes the instruments that read the router's state.
func (r *Router) observeWith(k *maker) {
	k.gauge("router.index.blocks", "{block}", "Pairs of block and worker in the index, by model and by where they are known from.", r.perIndex(func(i *indexSource) int { return i.blocks() }))
	k.gauge("router.index.size", "By", "Memory of the index, by model and by where its blocks are known from.", r.perIndex(func(i *indexSource) int { return i.bytes() }))
	k.gauge("router.slots", "{request}", "Requests in flight that hold a slot, by model.", r.perModel(func(c *core) int { return c.slots.Len() }))
	k.gauge("router.foreign_requests", "{request}", "Requests that engines report and that neither this router nor its replicas sent, by model.", r.perModel(func(c *core) (n int) {
		for _, ord := range c.order {
			n += c.foreign(r.conf.Now(), &c.entries[ord], 0).Requests
		}
		return n
	}))
	k.gauge("router.workers", "{worker}", "Workers known, by model and health.", func(o observe) {
		for h := range expected {
			r.perModel(func(c *core) (n int) {
				for _, ord := range c.order {
					if c.shownHealth(r.conf.Now(), &c.entries[ord]) == h {
						n++
					}
				}
				return n
			})(func(n int, a ...attribute.KeyValue) { o(n, append(a, attribute.String("health", h.String()))...) })
		}
	})
	k.gauge("router.queue.size", "{request}", "Requests that wait for a worker, by model.", r.perModel(func(c *core) int { return len(c.waiting) }))
	k.gauge("router.sessions", "{session}", "Sessions bound to a worker, by model.", r.perModel(func(c *core) int { return c.sessions.byKey.Len() }))
	k.gauge("tokenize.models", "{model}", "Models known, by how the token ids of their chats are made and why not exactly; 1 for what is so.", func(o observe) {
		for _, m := range r.Models() {
			o(1, attribute.String("model", m.Model), attribute.String("mode", string(m.TokenMode)), attribute.String("reason", m.TokenReason))
		}
	})
	k.sum("router.threshold.skips", "{threshold}", "Thresholds that could not be looked at because a worker's capacity is unknown, by model.", r.perModel(func(c *core) int { return c.skipped }))
	k.sum("router.slots.expired", "{request}", "Slots that nobody owned and nobody freed for 300 s, by model.", r.perModel(func(c *core) int { return c.expired }))
	k.sum("router.index.evicted", "{block}", "Blocks forgotten for lack of room that no event counts, by model and by where they were known from.", r.perIndex(func(i *indexSource) int { return i.evicted() }))
	k.sum("router.dumps", "{dump}", "Dumps of the index, by how they ended.", func(o observe) {
		for end, name := range [...]string{"whole", "overtaken", "left"} {
			o(int(r.dumps[end].Load()), attribute.String("outcome", name))
		}
	})
}

// perModel reads a number of each pool, and observes the sums of the models.
func (r *Router) perModel(read func(*core) int) func(observe) {
	return func(o observe) {
		sums := make(map[string]int)
		for _, p := range r.allPools() {
			p.mu.Lock()
			sums[p.model] += read(&p.core)
			p.mu.Unlock()
		}
		for model, n := range sums {
			o(n, attribute.String("model", model))
		}
	}
}

// perIndex reads a number of each index, and observes the sums of the models by source.
func (r *Router) perIndex(read func(*indexSource) int) func(observe) {
	return func(o observe) {
		sums := make(map[[2]string]int)
		for _, p := range r.allPools() {
			for _, i := range p.known.sources() {
				sums[[2]string{p.model, i.name}] += read(&i)
			}
		}
		for of, n := range sums {
			o(n, attribute.String("model", of[0]), attribute.String("source", of[1]))
		}
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
	overlap := d.OverlapBlocks
	if d.Prefill != nil || d.NoLeg != "" {
		m.legs.Add(ctx, 1, metric.WithAttributes(l.model, attribute.String("skipped", string(d.NoLeg))))
	}
	if d.Prefill != nil {
		overlap = d.Prefill.OverlapBlocks
	}
	if d.PromptBlocks > 0 {
		m.overlap.Record(ctx, float64(overlap)/float64(d.PromptBlocks), l.record...)
	}
	if d.QueueTime > 0 {
		m.waits.Record(ctx, d.QueueTime.Seconds(), l.record...)
	}
}

// refused counts a request that got no worker.
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
