// SPDX-License-Identifier: Apache-2.0

package router

import (
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/kvroute/kvroute/internal/engine"
)

// PullConfig says when a request names the source of a part of its prompt: another worker, from whose host memory the
// chosen worker copies blocks instead of computing them. The choice of the worker does not depend on it.
type PullConfig struct {
	On bool
	// A pull of n tokens is expected to take Delay + n·PerToken, their computation n·ComputePerToken. The request names
	// a source only if the pull takes less time.
	Delay, PerToken, ComputePerToken time.Duration
	// MinTokens is the least number of tokens to pull.
	MinTokens int
	// Limit is the largest number of requests before their first token that name one source.
	Limit int
}

func (p *PullConfig) check() error {
	for _, err := range []error{
		within("Pull.Delay", p.Delay, 0, time.Hour, "0 to 1h"),
		within("Pull.PerToken", p.PerToken, 0, time.Second, "0 to 1s"),
		within("Pull.ComputePerToken", p.ComputePerToken, 0, time.Second, "0 to 1s"),
		within("Pull.MinTokens", p.MinTokens, 0, math.MaxInt, "a number of tokens"),
		within("Pull.Limit", p.Limit, 0, math.MaxInt, "a number of requests"),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

// times returns the times that a pull of some tokens and their computation are expected to take.
func (p *PullConfig) times(tokens int) (pull, compute time.Duration) {
	return p.Delay + time.Duration(tokens)*p.PerToken, time.Duration(tokens) * p.ComputePerToken
}

// pays says whether the request names a source for this number of tokens.
func (p *PullConfig) pays(tokens int) bool {
	pull, compute := p.times(tokens)
	return tokens >= max(1, p.MinTokens) && pull < compute
}

// Source is the worker from which the chosen worker copies a part of the prompt.
type Source struct {
	Worker     Worker         `json:"worker"`
	WorkerName string         `json:"worker_name,omitempty"`
	Address    netip.AddrPort `json:"address"` // of its OpenAI endpoint
	Pulls      netip.AddrPort `json:"pulls"`   // where it serves pulls, as registered
	Tokens     int            `json:"tokens"`  // that it holds and that the chosen worker does not hold
	// The expected times of the pull and of the computation of these tokens, in ms.
	PullMS    float64     `json:"pull_ms"`
	ComputeMS float64     `json:"compute_ms"`
	Outcome   PullOutcome `json:"outcome,omitempty"` // empty until it is known
}

// PullOutcome says what became of a request that names a source.
type PullOutcome string

// The outcomes. After all but the first and the last one, no request to the same worker names the same source for
// [pullPause].
const (
	PullInTime  PullOutcome = "in_time" // the first token came in time
	PullLate    PullOutcome = "late"    // it did not
	PullFailed  PullOutcome = "failed"  // the request failed
	PullMissed  PullOutcome = "missed"  // the response reports fewer cached tokens than the source and the worker held
	PullUnknown PullOutcome = "unknown" // another worker served the request, the client left, or no first token was seen
)

// Text says the outcome in words.
func (o PullOutcome) Text() string {
	switch o {
	case PullInTime:
		return "The first token came in time"
	case PullLate:
		return "The first token came late: the worker names this source no more for an hour"
	case PullFailed:
		return "The request failed: the worker names this source no more for an hour"
	case PullMissed:
		return "The response reports fewer cached tokens than that: the worker names this source no more for an hour"
	case PullUnknown:
	}
	return "Whether the copy succeeded is not known"
}

// pullEnd is an event that ends a pull.
type pullEnd uint8

const (
	pullFirstToken pullEnd = iota
	pullServed             // the response ended, and no first token was seen
	pullMoved              // another worker served the request
	pullError
	pullLeft // the client left
)

const (
	// pullPatience is the time by which a first token may be later than expected. vLLM waits up to 40 s for a source
	// that does not answer.
	pullPatience = 20 * time.Second
	// pullPause is the time for which a source that failed one worker is not named to that worker again.
	pullPause = time.Hour
	// maxPullPairs bounds the remembered failures, of some 150 bytes each.
	maxPullPairs = 1 << 14
)

// pulls are the requests of a pool that name a source, until their first token, and the pairs of source and target
// that failed. Only [PullConfig.On] makes the fields.
type pulls struct {
	open   map[string]openPull                  // by request id
	failed *simplelru.LRU[[2]Worker, time.Time] // by source and target: when
}

type openPull struct {
	pair [2]Worker // source and target
	due  time.Time // when the pull counts as late
}

func newPulls() pulls {
	failed, err := simplelru.NewLRU[[2]Worker, time.Time](maxPullPairs, nil)
	if err != nil {
		panic(err) // the size is a constant above 0
	}
	return pulls{make(map[string]openPull), failed}
}

// begin notes that a booked request names a source.
func (p *pulls) begin(id string, d *Decision) {
	expected := time.Duration((d.EstimatedTTFT + d.Source.PullMS) * float64(time.Millisecond))
	p.open[id] = openPull{[2]Worker{d.Source.Worker, d.Worker}, d.Time.Add(expected + pullPatience)}
}

// end ends the pull of a request. open says whether there was one.
func (p *pulls) end(now time.Time, id string, by pullEnd) (outcome PullOutcome, open bool) {
	o, open := p.open[id]
	if !open {
		return "", false
	}
	delete(p.open, id)
	late := now.After(o.due)
	switch {
	case by == pullError:
		outcome = PullFailed
	case by == pullMoved, by == pullServed && late: // the whole response may take that long
		return PullUnknown, true
	case late:
		outcome = PullLate
	case by == pullLeft:
		return PullUnknown, true
	default:
		return PullInTime, true
	}
	p.failed.Add(o.pair, now)
	return outcome, true
}

// load returns the number of open pulls from a source, and whether one of them is late.
func (p *pulls) load(now time.Time, source Worker) (n int, late bool) {
	for _, o := range p.open {
		if o.pair[0] == source {
			n++
			late = late || now.After(o.due)
		}
	}
	return n, late
}

// rests says whether a source failed a target lately.
func (p *pulls) rests(now time.Time, source, target Worker) bool {
	at, failed := p.failed.Peek([2]Worker{source, target})
	return failed && now.Sub(at) < pullPause
}

// pullAddress is the address at which a rank serves pulls; not valid if it serves none.
func (i *WorkerInfo) pullAddress(rank uint32) netip.AddrPort {
	port := uint64(i.KVSource.Port()) + uint64(rank)
	if !i.KVSource.IsValid() || port > math.MaxUint16 {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(i.KVSource.Addr(), uint16(port))
}

// name returns the source of a decision if a pull pays, nil otherwise, and the choices of the request after the first
// one. The source is the worker that holds most of the prompt in its host memory; of equal ones the one with the fewest
// pulls.
func (p *pulls) name(
	conf *PullConfig, r *ranks, in *decisionInput, ch *choice, d *Decision,
) (s *Source, second, third Second) {
	ord, host := ch.candidates[ch.chosen], in.overlap.host
	target, load := &r.entries[ord], &ch.inputs[ch.chosen]
	if d.Group != "" || !target.info.KVSource.IsValid() || !engine.Of(target.info.Engine).Pull.Known() {
		return nil, d.Second, d.Third
	}
	held := load.OverlapBlocks + load.HostBlocks + load.DiskBlocks
	if ord < len(host) && target.since <= in.overlap.version {
		held = max(held, int(host[ord]))
	}
	var best *entry
	most, fewest := 0, 0
	for _, ord := range r.order {
		if ord >= len(host) || int(host[ord]) < max(most, held+1) {
			continue
		}
		e, blocks := &r.entries[ord], int(host[ord])
		n, late := p.load(ch.time, e.worker)
		if late || n >= conf.Limit || blocks == most && n >= fewest || !p.maySend(r, in, ch.time, target, e) {
			continue
		}
		best, most, fewest = e, blocks, n
	}
	if best == nil {
		return nil, d.Second, d.Third
	}
	tokens := min(most*d.BlockSize, d.PromptTokens-1) - held*d.BlockSize
	second, third, enough := without(best.worker, d.Second, d.Third)
	if !enough || !conf.pays(tokens) {
		return nil, d.Second, d.Third
	}
	pull, compute := conf.times(tokens)
	return &Source{
		Worker: best.worker, WorkerName: best.info.Name, Address: best.address(),
		Pulls: best.info.pullAddress(best.worker.DPRank), Tokens: tokens,
		PullMS: float64(pull) / float64(time.Millisecond), ComputeMS: float64(compute) / float64(time.Millisecond),
	}, second, third
}

// maySend says whether a worker may be the source of a pull. The conditions of the request count for the source, too: a
// part of its prompt is copied from there.
func (p *pulls) maySend(r *ranks, in *decisionInput, now time.Time, target, e *entry) bool {
	health, _ := r.healthNow(now, e)
	lacks := func(taint string) bool { return !slices.Contains(e.info.Taints, taint) }
	switch {
	case e == target, e.since > in.overlap.version, e.info.Engine != target.info.Engine,
		!e.info.pullAddress(e.worker.DPRank).IsValid(), p.rests(now, e.worker, target.worker):
		return false
	case health != Healthy, e.info.Draining, e.info.Refuses, e.avoid.trying, e.avoid.failing:
		return false
	}
	return (in.adapter == "" || e.info.lists(in.adapter)) &&
		(in.Allowed == nil || slices.Contains(in.Allowed, e.worker)) && Allows(in.AllowedAddresses, e.address()) && !slices.ContainsFunc(in.RequiredTaints, lacks)
}

// without removes a worker from the choices after the first one: they get the same request, and no worker may pull from
// itself. enough is false if the request would have no second choice any more.
func without(w Worker, second, third Second) (_, _ Second, enough bool) {
	if third.Address.IsValid() && third.Worker == w {
		third = Second{}
	}
	if second.Address.IsValid() && second.Worker == w {
		return third, Second{}, third.Address.IsValid()
	}
	return second, third, true
}

// endPull ends the pull of a request, if it has one, and notes the outcome.
func (r *Router) endPull(fl *flight, id string, now time.Time, by pullEnd) {
	var outcome PullOutcome
	var open bool
	fl.pool.read(func(c *core) { outcome, open = c.pulls.end(now, id, by) })
	if open {
		r.metrics.pulls.Count(fl.pool.model, string(outcome))
		r.note(fl, later{pull: outcome})
	}
}

// auditPull compares the cached tokens of a response with those that the source and the worker held.
func (r *Router) auditPull(d *Decision) {
	s := d.Source
	if s == nil || !d.Usage.Cached || d.Served.IsValid() && d.Served != d.Address {
		return
	}
	if d.Usage.CachedTokens >= d.CachedTokens+s.Tokens/2 {
		return
	}
	p := r.poolOf(d.Worker.ID)
	if p == nil {
		return
	}
	p.read(func(c *core) {
		delete(c.pulls.open, d.ID)
		c.pulls.failed.Add([2]Worker{s.Worker, d.Worker}, r.conf.Now())
	})
	r.metrics.pulls.Count(d.Model, string(PullMissed))
	r.kept.each(func(kept *keptDecision) bool {
		if kept.ID == d.ID {
			kept.add(later{pull: PullMissed})
		}
		return kept.ID != d.ID
	})
}
