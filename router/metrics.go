// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"strconv"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/tokenizer"
)

// metrics are the router's instruments. docs/metrics.md lists them.
type metrics struct {
	decisions, prompts, text, reused, refusals, blocks meter.Counter
	failovers, avoidances, firstTokens, legs, panics   meter.Counter
	peersRefused                                       meter.Counter
	audits, auditedPrompts, pulls                      meter.Counter
	promptTokens, cachedTokens, meanTokens             meter.Counter
	duration, overlap, waits, cachedRatio, auditError  metric.Float64Histogram
}

// labels are the attributes of one pool's measurements, made once.
type labels struct {
	model   string
	pool    meter.Set
	record  []metric.RecordOption
	exact   meter.Set
	reasons map[Reason]meter.Set
	signs   map[Sign]meter.Set
}

func newLabels(model string) *labels {
	l := &labels{
		model:   model,
		pool:    meter.NewSet("model", model),
		record:  []metric.RecordOption{metric.WithAttributes(attribute.String("model", model))},
		exact:   meter.NewSet("model", model, "mode", string(tokenizer.Exact), "reason", ""),
		reasons: make(map[Reason]meter.Set),
		signs:   make(map[Sign]meter.Set),
	}
	for _, by := range []Sign{SignTold, SignObserver, SignHeaders, SignOrder, SignRate, SignEnd} {
		l.signs[by] = meter.NewSet("model", model, "source", string(by))
	}
	for _, r := range []Reason{ReasonKV, ReasonLoad, ReasonRoundRobin, ReasonHoldout, ReasonMode, ReasonPinned, ReasonPreferred, ReasonSession, ReasonUnread, ReasonTokenizer} {
		l.reasons[r] = meter.NewSet("model", model, "reason", string(r))
	}
	return l
}

func newMetrics(from metric.Meter, r *Router) (*metrics, error) {
	k := meter.New(from)
	shares := []float64{0, .1, .2, .3, .4, .5, .6, .7, .8, .9, .95, .99, 1}
	m := metrics{
		decisions: k.Counter("kvroute.router.decisions", "{decision}", "Booked decisions, by model and reason.", "model", "reason"),
		// From a short prompt that is matched in microseconds to the budget of a request.
		duration: k.Seconds("kvroute.router.decision.duration", "Time of a decision: tokens, hashes, match, choice and booking; not waiting for a worker.",
			1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, .1, .25, .5, 1, 2.5),
		overlap: k.Histogram("kvroute.router.overlap.ratio", "1", "Share of a prompt's full blocks that the chosen worker holds.",
			shares...),
		blocks:   k.Counter("kvroute.router.event.blocks", "{block}", "Blocks in the events of workers, by what became of them.", "outcome"),
		prompts:  k.Counter("kvroute.tokenize.requests", "{request}", "Booked requests whose prompt was read, by model, by how its token ids were made and why not exactly.", "model", "mode", "reason"),
		text:     k.Counter("kvroute.tokenize.text.size", "By", "Text of prompts that was made into token ids, by model.", "model"),
		reused:   k.Counter("kvroute.tokenize.reused.size", "By", "Text of prompts whose token ids were known from earlier ones, by model.", "model"),
		refusals: k.Counter("kvroute.router.refusals", "{request}", "Requests with an id that no worker was found for, by reason.", "model", "reason"),
		// From a pause between two first tokens to the longest that Envoy waits.
		waits: k.Seconds("kvroute.router.queue.duration", "Time that admitted requests waited in the queue, of those that waited.",
			.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30),
		failovers:    k.Counter("kvroute.router.failovers", "{request}", "Requests that another worker served than the decision's, by model.", "model"),
		avoidances:   k.Counter("kvroute.router.avoidances", "{period}", "Times that a worker began to be avoided because it failed, by model.", "model"),
		panics:       k.Counter("kvroute.router.panics", "{request}", "Booked requests that went to an unhealthy worker because no worker was healthy, degraded or starting, by model.", "model"),
		peersRefused: k.Counter("kvroute.router.peer_requests.refused", "{request}", "Requests of other replicas that are not counted as load, because their memory has a limit."),
		firstTokens:  k.Counter("kvroute.router.first_tokens", "{request}", "Requests whose prompt was taken for computed, by model and by what said so first.", "model", "source"),
		legs:         k.Counter("kvroute.router.prefill_legs", "{request}", "Booked requests of split models, by model and by why they have no prefill leg; skipped is empty for those with a leg.", "model", "skipped"),
		pulls: k.Counter("kvroute.router.kv_pulls", "{request}", "Booked requests that name a source of blocks, by model and outcome.",
			"model", "outcome"),
		promptTokens:   k.Counter("kvroute.router.prompt_tokens", "{token}", "Prompt tokens of booked requests, by model.", "model"),
		cachedTokens:   k.Counter("kvroute.router.cached_tokens", "{token}", "Prompt tokens of booked requests that the chosen worker has cached by the index, by model.", "model"),
		meanTokens:     k.Counter("kvroute.router.mean_cached_tokens", "{token}", "The same as the mean over all candidates: what a random choice would find, by model.", "model"),
		audits:         k.Counter("kvroute.audit.responses", "{response}", "Responses whose usage was read, by model and by the comparison of the cached tokens with the prediction.", "model", "outcome"),
		auditedPrompts: k.Counter("kvroute.audit.prompts", "{response}", "Responses whose usage was read, by model and by the comparison of the prompt's length with kvroute's.", "model", "outcome"),
		cachedRatio: k.Histogram("kvroute.audit.cached.ratio", "1", "Share of the prompt that was cached, by the response's usage.",
			shares...),
		auditError: k.Histogram("kvroute.audit.error", "1", "Predicted less reported cached tokens, as a share of the prompt.",
			-1, -.5, -.2, -.1, -.05, -.02, 0, .02, .05, .1, .2, .5, 1),
	}
	r.observeWith(k)
	return &m, k.Err()
}

// observeWith makes the instruments that read the router's state.
func (r *Router) observeWith(k *meter.Maker) {
	k.Gauge("kvroute.router.index.blocks", "{block}", "Pairs of block and worker in the index, by model and by where they are known from.", r.perIndex(func(i *indexSource) int { return i.blocks() }))
	k.Gauge("kvroute.router.index.size", "By", "Memory of the index, by model and by where its blocks are known from.", r.perIndex(func(i *indexSource) int { return i.bytes() }))
	k.Gauge("kvroute.router.slots", "{request}", "Requests in flight that hold a slot, by model.", r.perModel(func(c *core) int { return c.slots.Len() }))
	k.Gauge("kvroute.router.foreign_requests", "{request}", "Requests that engines report and that neither this router nor its replicas sent, by model.", r.perModel(func(c *core) (n int) {
		for _, ord := range c.order {
			n += c.foreign(r.conf.Now(), &c.entries[ord], 0).Requests
		}
		return n
	}))
	k.Gauge("kvroute.router.hybrid_workers", "{worker}", "Workers of hybrid models, by model and by whether the rule of their hits is known or unknown: then no prompt counts as cached there.", func(o meter.Observe) {
		sums := make(map[[2]string]int)
		for _, p := range r.allPools() {
			x := p.known.index()
			if !x.AnyHybrid() {
				continue
			}
			p.each(func(ord int, _ *entry) {
				if rule := hybridRule(x.Boundaries(ord)); rule != "" {
					sums[[2]string{p.model, rule}]++
				}
			})
		}
		for of, n := range sums {
			o(float64(n), "model", of[0], "rule", of[1])
		}
	})
	k.Gauge("kvroute.audit.rules", "{worker}", "Workers whose responses report fewer cached tokens than their events promise, by model and by the rule that predictions follow.", func(o meter.Observe) {
		for rule := ruleDrop; rule <= ruleLimit; rule++ {
			r.perModel(func(c *core) (n int) {
				for _, ord := range c.order {
					if c.entries[ord].learned.rule == rule {
						n++
					}
				}
				return n
			})(func(n float64, a ...string) { o(n, append(a, "rule", rule.String())...) })
		}
	})
	k.Gauge("kvroute.router.workers", "{worker}", "Workers known, by model and health.", func(o meter.Observe) {
		count := func(shown string, counts func(c *core, e *entry) bool) {
			r.perModel(func(c *core) (n int) {
				for _, ord := range c.order {
					if counts(c, &c.entries[ord]) {
						n++
					}
				}
				return n
			})(func(n float64, a ...string) { o(n, append(a, "health", shown)...) })
		}
		for h := range expected {
			count(h.String(), func(c *core, e *entry) bool { return !e.info.Draining && c.shownHealth(r.conf.Now(), e) == h })
		}
		count("draining", func(_ *core, e *entry) bool { return e.info.Draining && e.info.Health != expected })
	})
	k.Gauge("kvroute.router.queue.size", "{request}", "Requests that wait for a worker, by model.", r.perModel(func(c *core) int { return len(c.waiting) }))
	k.Gauge("kvroute.router.given.ids", "{id}", "Ids of stored responses and sessions that are bound to the worker that gave them out.", func(o meter.Observe) { o(float64(r.given.len())) })
	k.Gauge("kvroute.router.sessions", "{session}", "Sessions bound to a worker, by model.", r.perModel(func(c *core) int { return c.sessions.byKey.Len() }))
	k.Gauge("kvroute.tokenize.models", "{model}", "Models known, by how the token ids of their chats are made and why not exactly; 1 for what is so.", func(o meter.Observe) {
		for _, m := range r.Models() {
			o(1, "model", m.Model, "mode", string(m.TokenMode), "reason", m.TokenReason)
		}
	})
	r.observeClasses(k)
	k.Total("kvroute.router.threshold.skips", "{threshold}", "Thresholds that could not be looked at because a worker's capacity is unknown, by model.", r.perModel(func(c *core) int { return c.skipped }))
	k.Total("kvroute.router.slots.expired", "{request}", "Slots that nobody owned and nobody freed for 300 s, by model.", r.perModel(func(c *core) int { return c.expired }))
	k.Total("kvroute.router.index.evicted", "{block}", "Blocks forgotten for lack of room that no event counts, by model and by where they were known from.", r.perIndex(func(i *indexSource) int { return i.evicted() }))
	k.Total("kvroute.router.dumps", "{dump}", "Dumps of the index, by how they ended.", func(o meter.Observe) {
		for end, name := range [...]string{"whole", "overtaken", "left"} {
			o(float64(r.dumps[end].Load()), "outcome", name)
		}
	})
}

// observeClasses makes the instruments that read the verdicts on token ids.
func (r *Router) observeClasses(k *meter.Maker) {
	perClass := func(read func(model string, c *confirm.ClassState, o meter.Observe)) func(meter.Observe) {
		return func(o meter.Observe) {
			for _, m := range r.Models() {
				for i := range m.Classes {
					read(m.Model, &m.Classes[i], o)
				}
			}
		}
	}
	k.Gauge("kvroute.confirm.unconfirmed", "{class}", "1 for each class of requests for which workers make other tokens than kvroute, else 0, by model.", perClass(func(model string, c *confirm.ClassState, o meter.Observe) {
		n := 0.
		if c.Unconfirmed {
			n = 1
		}
		o(n, "model", model, "class", c.Class)
	}))
	k.Total("kvroute.confirm.requests", "{request}", "Requests whose blocks were compared with those that their worker stored, by model, class and outcome.", perClass(func(model string, c *confirm.ClassState, o meter.Observe) {
		for outcome, n := range c.Requests {
			o(float64(n), "model", model, "class", c.Class, "outcome", outcome)
		}
	}))
	k.Total("kvroute.confirm.blocks", "{block}", "Blocks of these requests that their worker had or stored, or did not, by model, class, worker and version of its engine.", func(o meter.Observe) {
		versions := r.versions()
		perClass(func(model string, c *confirm.ClassState, o meter.Observe) {
			for _, w := range c.Workers {
				worker, version := strconv.FormatUint(w.ID, 10), versions[w.ID]
				o(float64(w.Confirmed), "model", model, "class", c.Class, "worker", worker, "rank", strconv.Itoa(int(w.Rank)), "engine_version", version, "outcome", "confirmed")
				o(float64(w.Unconfirmed), "model", model, "class", c.Class, "worker", worker, "rank", strconv.Itoa(int(w.Rank)), "engine_version", version, "outcome", "unconfirmed")
			}
		})(o)
	})
}

// versions returns the versions of the workers' engines.
func (r *Router) versions() map[uint64]string {
	versions := make(map[uint64]string)
	for _, p := range r.allPools() {
		p.each(func(_ int, e *entry) { versions[e.worker.ID] = e.info.EngineVersion })
	}
	return versions
}

// perModel reads a number of each pool, and observes the sums of the models.
func (r *Router) perModel(read func(*core) int) func(meter.Observe) {
	return func(o meter.Observe) {
		sums := make(map[string]int)
		for _, p := range r.allPools() {
			p.read(func(c *core) { sums[p.model] += read(c) })
		}
		for model, n := range sums {
			o(float64(n), "model", model)
		}
	}
}

// perIndex reads a number of each index, and observes the sums of the models by source.
func (r *Router) perIndex(read func(*indexSource) int) func(meter.Observe) {
	return func(o meter.Observe) {
		sums := make(map[[2]string]int)
		for _, p := range r.allPools() {
			for _, i := range p.known.sources() {
				sums[[2]string{p.model, i.name}] += read(&i)
			}
		}
		for of, n := range sums {
			o(float64(n), "model", of[0], "source", of[1])
		}
	}
}

func (m *metrics) decided(ctx context.Context, l *labels, d *Decision) {
	m.decisions.AddTo(l.reasons[d.Reason], 1)
	m.duration.Record(ctx, (d.TokenizeTime + d.HashTime + d.MatchTime + d.PickTime).Seconds(), l.record...)
	switch d.TokenMode {
	case "":
	case tokenizer.Exact:
		m.prompts.AddTo(l.exact, 1)
	default:
		m.prompts.Count(l.model, string(d.TokenMode), d.TokenReason)
	}
	m.text.AddTo(l.pool, d.TextBytes)
	m.reused.AddTo(l.pool, d.ReusedBytes)
	if d.Prefill != nil || d.NoLeg != "" {
		m.legs.Count(l.model, string(d.NoLeg))
	}
	if d.Source != nil {
		m.pulls.Count(l.model, "named")
	}
	computing := d.Computing()
	m.promptTokens.AddTo(l.pool, d.PromptTokens)
	m.cachedTokens.AddTo(l.pool, computing.CachedTokens)
	m.meanTokens.AddTo(l.pool, int(computing.MeanCachedTokens+.5))
	if d.PromptBlocks > 0 {
		m.overlap.Record(ctx, float64(computing.OverlapBlocks)/float64(d.PromptBlocks), l.record...)
	}
	if d.QueueTime > 0 {
		m.waits.Record(ctx, d.QueueTime.Seconds(), l.record...)
	}
}

// refused counts a request that got no worker.
func (m *metrics) refused(model string, err error) {
	reason := "other"
	// In this order: an error about a pin may also say that no worker is free.
	names := [...]string{"pinned_unknown", "pinned_not_allowed", "pinned_busy", "pin_missing", "queue_full", "too_late", "all_busy", "no_workers", "duplicate", "freed", "bad_override"}
	for i, known := range [...]error{ErrPinnedUnknown, ErrPinnedNotAllowed, ErrPinnedBusy, ErrPinMissing, ErrQueueFull, ErrTooLate, ErrAllBusy, ErrNoWorkers, ErrDuplicate, ErrFreed, ErrBadOverride} {
		if errors.Is(err, known) {
			reason = names[i]
			break
		}
	}
	m.refusals.Count(model, reason)
}

func (m *metrics) applied(out indexer.Outcome) {
	counts := [...]int{out.Stored, out.Removed, out.Duplicate, out.Conflict, out.Orphan, out.Parked, out.Evicted, out.Unknown, out.Refused, out.OtherTier, out.Invalid}
	for i, outcome := range [...]string{"stored", "removed", "duplicate", "conflict", "orphan", "parked", "evicted", "unknown", "refused", "other_tier", "invalid"} {
		m.blocks.Add(counts[i], outcome)
	}
}
