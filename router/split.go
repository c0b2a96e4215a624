// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// A model with workers for prefill and workers for decode is split: a prefill worker computes
// the prompt, and a decode worker receives the blocks and generates the output. The request
// is the decode worker's. The work on the prefill worker is the request's prefill leg.
//
// # Invariants
//
//   - Both workers are chosen, and both slots are booked, in one critical section.
//   - The leg is a flight of its own, whose id is derived from the request's. It ends once:
//     by [Router.Free] with its own id, when it fails, or with the request's first token or end.
//   - A leg books prefill tokens and no blocks. A request with a leg books blocks and no
//     prefill tokens.
//   - A request without a leg is decided as if the model were not split.

// Split says whether the prefill of a request may run on another worker than its decode. The
// values are those of Dynamo's header x-dynamo-routing-mode.
type Split string

// The values of [Request.Split].
const (
	SplitAuto   Split = ""              // as [SplitConfig] says
	SplitNever  Split = "aggregated"    // one worker does both
	SplitAlways Split = "disaggregated" // if no prefill worker can take the leg, no worker gets the request
)

// SkipRule says when a request of a split model has no prefill leg. The rules are those of
// Dynamo's conditional disaggregation.
type SkipRule string

// The rules.
const (
	SkipNever  SkipRule = "never"
	SkipShort  SkipRule = "isl_bounding" // few tokens to compute, and part of the prompt cached
	SkipBusy   SkipRule = "prefill_load" // all prefill workers are above a threshold
	SkipEither SkipRule = "isl_or_load"
)

func (s SkipRule) skipsShort() bool { return s == SkipShort || s == SkipEither }

func (s SkipRule) skipsBusy() bool { return s == SkipBusy || s == SkipEither }

// SplitConfig says when the prefill of a request runs on another worker than its decode.
type SplitConfig struct {
	// Skip says which requests have no prefill leg. [SkipBusy] and [SkipEither] need a threshold
	// for prefill tokens, or the queue's. Default [SkipNever]: each request has a leg if a
	// prefill worker can take it.
	Skip SkipRule
	// A prompt is short if the decode worker would compute fewer tokens than SkipTokens, and a
	// smaller share of the prompt than SkipFraction. Defaults 2,048 and 0.7.
	SkipTokens   int
	SkipFraction float64
	// DecodeCredit is the weight of cached blocks in the choice of the decode worker, which
	// receives the blocks in any case. Default 0: the choice is by load alone.
	DecodeCredit float64
}

// NoLeg is why a request of a split model has no prefill leg.
type NoLeg string

// The reasons.
const (
	NoLegAsked      NoLeg = "asked"      // the request asks for one worker
	NoLegShort      NoLeg = "short"      // by [SkipShort]
	NoLegBusy       NoLeg = "busy"       // all prefill workers are busy
	NoLegMissing    NoLeg = "no_worker"  // no prefill worker can take it
	NoLegAggregated NoLeg = "aggregated" // the least loaded worker is an aggregated one
	NoLegFailed     NoLeg = "failed"     // the leg failed: the decode worker computes the prompt
	NoLegUnread     NoLeg = "unread"     // the prompt is not known
)

// check returns an error for the first setting that is out of range.
func (s *SplitConfig) check(t *scorer.Thresholds, queue *float64) error {
	return cmp.Or(
		check("Split.Skip", s.Skip, s.Skip == SkipNever || s.Skip.skipsShort() || s.Skip.skipsBusy(), "never, isl_bounding, prefill_load or isl_or_load"),
		check("Split.SkipTokens", s.SkipTokens, s.SkipTokens >= 0, "a number of tokens"),
		check("Split.SkipFraction", s.SkipFraction, s.SkipFraction >= 0 && s.SkipFraction <= 1, "0 to 1"),
		check("Split.DecodeCredit", s.DecodeCredit, s.DecodeCredit >= 0 && s.DecodeCredit <= 1e6, "0 to 1e6"),
		check("Split.Skip", s.Skip, !s.Skip.skipsBusy() || t.PrefillTokens != nil || t.PrefillFraction != nil || queue != nil, "beside it a threshold for prefill tokens, or the queue's"),
	)
}

// short reports whether a prompt is short, of which the decode worker has so many tokens cached.
func (s *SplitConfig) short(tokens, cached int) bool {
	uncached := max(0, tokens-cached)
	return uncached < s.SkipTokens && float64(uncached) < s.SkipFraction*float64(tokens)
}

// part is the part of a request that a worker is chosen for.
type part uint8

const (
	whole           part = iota // prefill and decode
	wholeAggregated             // the same, on a worker that cannot transfer blocks
	decodePart
	prefillPart
)

// takes reports whether a worker of this role may take a part.
func (r Role) takes(p part) bool {
	switch p {
	case prefillPart:
		return r == Prefill || r == Both
	case wholeAggregated:
		return r.aggregated()
	default:
		return r != Prefill
	}
}

// takes reports whether a worker may take a part. An SGLang engine with a role refuses whole requests.
func (i *WorkerInfo) takes(p part) bool {
	return i.Role.takes(p) && (p != whole || i.Role.aggregated() || i.Engine != EngineSGLang)
}

func (r Role) aggregated() bool { return r == "" || r == Aggregated }

// countRoles notes that the workers changed, and whether the pool has workers for prefill legs and
// workers for decodes.
func (c *core) countRoles() {
	c.changes++
	prefill, decode := false, false
	for _, ord := range c.order {
		r := c.entries[ord].info.Role
		prefill = prefill || r.takes(prefillPart)
		decode = decode || !r.aggregated() && r.takes(decodePart)
	}
	c.splits = prefill && decode
}

// pickWorkers is [core.pick] for a whole request; in a split model it also chooses the worker of the
// prefill leg.
func (c *core) pickWorkers(now time.Time, q *question, s *scorer.Settings, d *Decision, othersWait bool) (chosen int, err error) {
	q.leg, d.Prefill, d.NoLeg = nil, nil, ""
	switch {
	case c.splits && q.Split != SplitNever:
		return c.decideSplit(now, q, s, d, othersWait)
	case c.splits:
		d.NoLeg = NoLegAsked
	case q.PrefillPinned != nil && q.Split != SplitNever:
		return 0, fmt.Errorf("worker %d for prefill: %w", q.PrefillPinned.ID, ErrPinnedUnknown)
	case q.Split == SplitAlways:
		return 0, fmt.Errorf("no prefill worker: %w", ErrNoWorkers)
	}
	return c.pick(now, q, whole, s, d, othersWait)
}

// decideSplit is [core.pick] in a split model. d.Prefill is the prefill leg, or d.NoLeg says why
// there is none.
func (c *core) decideSplit(now time.Time, q *question, s *scorer.Settings, d *Decision, othersWait bool) (chosen int, err error) {
	conf := &c.conf.Split
	if q.Split == SplitAuto && conf.Skip.skipsShort() {
		chosen, err = c.pick(now, q, whole, s, d, othersWait)
		switch {
		case errors.Is(err, ErrNoWorkers): // none that takes whole requests
		case err != nil:
			return 0, err
		case conf.short(q.tokens, d.CachedTokens):
			d.NoLeg = NoLegShort
			return chosen, nil
		}
	}
	why := NoLegUnread
	if q.tokens > 0 {
		if chosen, err = c.pick(now, q, decodePart, c.decodeSettings(s), d, othersWait); err != nil {
			return 0, err
		}
		why = NoLegAggregated
		if e := &c.entries[c.candidates[chosen]]; !e.info.Role.aggregated() {
			why, err = c.pickPrefill(now, q, s, d, e.info, othersWait)
		}
		c.workspace = q.workspace
		if d.Prefill != nil && d.Second.Worker != (Worker{}) {
			d.Second = c.second(chosen, d.Prefill)
		}
		if why == "" || err != nil {
			return chosen, err
		}
	}
	if q.Split == SplitAlways {
		return 0, fmt.Errorf("no prefill worker (%s): %w", why, ErrNoWorkers)
	}
	p := whole
	if why == NoLegAggregated {
		p = wholeAggregated
	}
	d.NoLeg = why
	return c.pick(now, q, p, s, d, othersWait)
}

// decodeSettings are the settings for the choice of a decode worker: prompts arrive computed, and
// the worker is assumed to need memory for all of their blocks.
func (c *core) decodeSettings(s *scorer.Settings) *scorer.Settings {
	d := *s
	d.OverlapCredit, d.CreditDecay = c.conf.Split.DecodeCredit, 0
	if d.Policy = scorer.Tokens; s.Policy == scorer.Dynamo || s.Policy == scorer.DynamoNewer {
		d.Policy = scorer.DynamoNewer // a shared block counts once
	}
	d.HostWeight, d.DiskWeight = 0, 0
	d.AssumeKVReuse, d.TrackPrefill = false, false
	return &d
}

// pickPrefill chooses the worker of the prefill leg: it has the decode worker's engine and is another
// process. pickPrefill returns why there is no leg, or "" if there is one.
func (c *core) pickPrefill(now time.Time, q *question, s *scorer.Settings, d *Decision, decode *WorkerInfo, othersWait bool) (NoLeg, error) {
	if c.conf.Mode == Direct && q.PrefillPinned == nil {
		return NoLegAsked, nil
	}
	leg := &legQuestion{question: *q, request: *q.Request}
	lq, req := &leg.question, &leg.request
	lq.Request, lq.workspace, lq.decode, lq.session = req, &leg.workspace, decode, 0
	req.Pinned, req.AnyRank, req.Preferred, req.WantSecond = q.PrefillPinned, q.PrefillAnyRank, nil, true
	if q.ID != "" {
		req.ID = legID(q.ID)
	}
	ld := &Decision{ID: req.ID, Model: d.Model, Mode: d.Mode, Labels: d.Labels, TokenMode: d.TokenMode, PromptTokens: d.PromptTokens, PromptBlocks: d.PromptBlocks}
	chosen, err := c.pick(now, lq, prefillPart, s, ld, othersWait)
	switch {
	case err == nil:
	case errors.Is(err, ErrNoWorkers) && q.PrefillPinned == nil:
		return NoLegMissing, nil
	case !decode.takes(whole): // the request waits for a prefill worker, or is refused
		return "", err
	case errors.Is(err, errMustWait) && q.Split == SplitAuto && c.conf.Split.Skip.skipsBusy(), errors.Is(err, ErrAllBusy):
		return NoLegBusy, nil
	default:
		return "", err
	}
	leg.chosen, q.leg, d.Prefill = chosen, leg, ld
	d.PrefillTokens, d.CoarseTTFT, d.EstimatedTTFT = 0, ld.CoarseTTFT, ld.EstimatedTTFT
	return "", nil
}

// legQuestion is the question of a prefill leg.
type legQuestion struct {
	question
	request   Request
	workspace workspace
	chosen    int // candidate
}

// bookLeg records the candidates of the prefill leg of q, and takes its slot.
func (c *core) bookLeg(now time.Time, q *question, d *Decision) (booked bool) {
	leg := q.leg
	c.workspace = &leg.workspace
	defer func() { c.workspace = q.workspace }()
	if q.explain {
		c.explain(now, &leg.question, leg.chosen, d.Prefill)
		d.Prefill.Candidates = c.seen
	}
	return q.ID == "" || c.takeSlot(now, &leg.question, leg.chosen, d.Prefill)
}

// PrefillFailed notes that the prefill leg of a booked request failed: the request's worker computes
// the prompt. PrefillFailed returns [ErrNoWorkers] if that worker takes no whole requests.
func (r *Router) PrefillFailed(id string) (err error) {
	fl := r.flights.get(id)
	if !fl.leg {
		return nil
	}
	r.endLeg(id, false)
	computes := false
	fl.pool.update(r.conf.Now(), func(c *core) {
		if ord, taken := c.slots.Worker(id); taken && !c.entries[ord].info.takes(whole) {
			err = fmt.Errorf("the prefill leg failed: %w", ErrNoWorkers)
		}
		computes = c.settings.TrackPrefill && c.slots.ComputePrompt(id)
	})
	if computes {
		r.tellPeers(Change{Kind: PrefillFailed, ID: id})
	}
	r.note(&fl, func(d *Decision) { d.NoLeg = NoLegFailed })
	return err
}

// legSuffix ends the ids of prefill legs. Other replicas recognise a leg by it.
const legSuffix = "/prefill"

func legID(id string) string { return id + legSuffix }

func isLeg(id string) bool { return strings.HasSuffix(id, legSuffix) }

// endLeg ends the prefill leg of a request, unless it has ended. computed says that its worker
// computed the prompt.
func (r *Router) endLeg(id string, computed bool) {
	if id = legID(id); computed {
		r.Free(id)
	} else {
		r.Abandon(id)
	}
}

// beginLeg adds the prefill leg of a booked request to the flights.
func (r *Router) beginLeg(p *pool, q *question, ld *Decision) {
	lq := &q.leg.question
	fl := flight{pool: p, number: peerNumbers + r.peerFlights.Add(1), lapses: !q.Owned}
	fl.first, fl.second, fl.held = ld.Worker, ld.Second.Worker, int32(ld.Second.OverlapBlocks)
	fl.guess = p.known.guess(ld.Time, lq)
	r.flights.begin(lq.ID, fl)
	if r.conf.Hooks.Tell != nil {
		c := lq.slotTaken(ld)
		c.Sequence = nil // a leg has no active blocks
		r.tellPeers(c)
	}
}
