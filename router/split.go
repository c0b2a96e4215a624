// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"errors"
	"fmt"
	"math"
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
	// LegTimeout is the time that a prefill leg may take: as long, one leg tries a worker whose legs hang. Default 0:
	// as long as [Config.AvoidFailing].
	LegTimeout time.Duration
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
	NoLegFailing    NoLeg = "failing"    // all prefill workers are avoided because they fail
)

// check returns an error for the first setting that is out of range.
func (s *SplitConfig) check(t *scorer.Thresholds, queue *float64) error {
	return cmp.Or(
		check("Split.Skip", s.Skip, s.Skip == SkipNever || s.Skip.skipsShort() || s.Skip.skipsBusy(), "never, isl_bounding, prefill_load or isl_or_load"),
		within("Split.SkipTokens", s.SkipTokens, 0, math.MaxInt, "a number of tokens"),
		within("Split.SkipFraction", s.SkipFraction, 0, 1, "0 to 1"),
		within("Split.LegTimeout", s.LegTimeout, 0, math.MaxInt64, "0 or more"),
		within("Split.DecodeCredit", s.DecodeCredit, 0, 1e6, "0 to 1e6"),
		check("Split.Skip", s.Skip, !s.Skip.skipsBusy() || t.PrefillTokens != nil || t.PrefillFraction != nil || queue != nil, "beside it a threshold for prefill tokens, or the queue's"),
	)
}

// short reports whether a prompt is short; see [SplitConfig]. cached is how many of its tokens the decode
// worker has cached.
func (s *SplitConfig) short(tokens, cached int) bool {
	uncached := max(0, tokens-cached)
	return uncached < s.SkipTokens && float64(uncached) < s.SkipFraction*float64(tokens)
}

// chooseSplit is [core.choose] for a request of a split model, and for one that asks for a prefill leg. It
// chooses two workers, or it chooses one worker and sets ch.noLeg to the reason.
func (c *core) chooseSplit(now time.Time, in *decisionInput, s *scorer.Settings, why purpose, ch *choices) error {
	conf := &c.conf.Split
	worker := &ch.worker
	switch {
	case c.splits && in.Split == SplitNever:
		ch.noLeg = NoLegAsked
		return c.choose(now, in, whole, s, why, worker)
	case c.splits:
	case in.PrefillPinned != nil && in.Split != SplitNever:
		return fmt.Errorf("worker %d for prefill: %w", in.PrefillPinned.ID, ErrPinnedUnknown)
	case in.Split == SplitAlways:
		return fmt.Errorf("no prefill worker: %w", ErrNoWorkers)
	default:
		return c.choose(now, in, whole, s, why, worker)
	}
	if in.Split == SplitAuto && conf.Skip.skipsShort() {
		switch err := c.choose(now, in, whole, s, why, worker); {
		case errors.Is(err, ErrNoWorkers): // no worker takes whole requests
		case err != nil:
			return err
		case conf.short(in.prompt.tokens, worker.inputs[worker.chosen].OverlapBlocks*c.blockSize):
			ch.noLeg = NoLegShort
			return nil
		}
	}
	ch.noLeg = NoLegUnread
	if in.prompt.tokens > 0 {
		if err := c.choose(now, in, decodePart, conf.decodeSettings(s), why, worker); err != nil {
			return err
		}
		ch.noLeg = NoLegAggregated
		if e := &c.entries[worker.candidates[worker.chosen]]; !e.info.Role.aggregated() {
			var err error
			if ch.noLeg, err = c.choosePrefill(now, in, s, e.info, why, ch); err != nil {
				return err
			}
		}
		if ch.hasLeg {
			return nil
		}
	}
	if in.Split == SplitAlways {
		return fmt.Errorf("no prefill worker (%s): %w", ch.noLeg, ErrNoWorkers)
	}
	p := whole
	if ch.noLeg == NoLegAggregated {
		p = wholeAggregated
	}
	return c.choose(now, in, p, s, why, worker)
}

// decodeSettings are the settings for the choice of a decode worker: prompts arrive computed, and
// the worker is assumed to need memory for all of their blocks.
func (s *SplitConfig) decodeSettings(of *scorer.Settings) *scorer.Settings {
	d := *of
	d.OverlapCredit, d.CreditDecay = s.DecodeCredit, 0
	if d.Policy = scorer.Tokens; of.Policy == scorer.Dynamo || of.Policy == scorer.DynamoNewer {
		d.Policy = scorer.DynamoNewer // a shared block counts once
	}
	d.HostWeight, d.DiskWeight = 0, 0
	d.AssumeKVReuse, d.TrackPrefill = false, false
	return &d
}

// choosePrefill chooses the worker of the prefill leg: it has the engine of the worker that decodes, and is
// another process. choosePrefill returns why there is no leg, or "" if there is one.
func (c *core) choosePrefill(now time.Time, in *decisionInput, s *scorer.Settings, decode *WorkerInfo, why purpose, ch *choices) (NoLeg, error) {
	if c.conf.Mode == Direct && in.PrefillPinned == nil {
		return NoLegAsked, nil
	}
	ch.makeLegInput(in, decode)
	leg := &ch.leg
	err := c.choose(now, &ch.legInput, prefillPart, s, why, leg)
	switch {
	case err == nil:
	case errors.Is(err, ErrNoWorkers) && in.PrefillPinned == nil:
		return NoLegMissing, nil
	case !decode.takes(whole): // the request waits for a prefill worker, or is refused
		return "", err
	case errors.Is(err, errMustWait) && in.Split == SplitAuto && c.conf.Split.Skip.skipsBusy(), errors.Is(err, ErrAllBusy):
		return NoLegBusy, nil
	default:
		return "", err
	}
	e := &c.entries[leg.candidates[leg.chosen]]
	if now.Before(e.avoid.end()) && decode.takes(whole) && in.PrefillPinned == nil && in.Split == SplitAuto {
		return NoLegFailing, nil
	}
	ch.hasLeg = true
	return "", nil
}

// makeLegInput makes the input of the prefill leg from that of the request. decode is the worker that
// decodes. The decision of the leg shows only the length and the mode of the prompt, and no durations.
func (ch *choices) makeLegInput(in *decisionInput, decode *WorkerInfo) {
	ch.legRequest = *in.Request
	req := &ch.legRequest
	req.Pinned, req.AnyRank, req.Preferred, req.Held = in.PrefillPinned, in.PrefillAnyRank, nil, ""
	req.WantSecond, req.RankPerAttempt, req.HostPerAttempt = true, true, true // see package prefill
	if in.ID != "" {
		req.ID = legID(in.ID)
	}
	ch.legInput = *in
	leg := &ch.legInput
	leg.Request, leg.decode, leg.session = req, decode, 0
	leg.prompt = prompt{tokens: in.prompt.tokens, fallback: in.prompt.fallback}
	leg.prompt.ids.Mode = in.prompt.ids.Mode
	leg.hashes.took, leg.overlap.took, leg.probed.took = 0, 0, 0
}

// PrefillFailed notes that the prefill leg of a booked request failed: the request's worker computes
// the prompt. PrefillFailed returns [ErrNoWorkers] if that worker takes no whole requests.
func (r *Router) PrefillFailed(id string) (err error) {
	fl := r.flights.get(id)
	if !fl.leg {
		return nil
	}
	r.endLeg(id, false)
	r.confirms.Drop(fl.number)
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
	r.note(&fl, later{noLeg: NoLegFailed})
	return err
}

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
func (r *Router) beginLeg(p *pool, s *scratch) {
	in, d := &s.choices.legInput, s.result.decision.Prefill
	fl := flight{pool: p, number: peerNumbers + r.peerFlights.Add(1), lapses: !in.Owned, origin: originOf(in.Request, in.hashes.local)}
	fl.chose(d.Worker, d.Second.Worker, d.Second.OverlapBlocks)
	fl.guess = p.known.guess(d.Time, &in.hashes, &s.result.legBooked, &in.overlap)
	r.flights.begin(in.ID, fl)
	if r.conf.Hooks.Tell != nil {
		c := in.slotTaken(d)
		c.Sequence = nil // a leg has no active blocks
		r.conf.Hooks.Tell(c)
	}
}
