// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// eligible collects the ordinals that may take a request: the healthy workers, or the
// degraded ones if no worker is healthy. A worker that failed lately and a router group
// without a recent summary count as degraded. A pinned worker may be healthy or degraded.
func (c *core) eligible(now time.Time, q *question) error {
	c.verdicts = slices.Grow(c.verdicts[:0], len(c.order))[:len(c.order)]
	if q.Pinned != nil {
		c.collect(now, q, Degraded)
		return c.pinError(q)
	}
	p := &c.plain[c.part]
	if q.plain() && p.changes == c.changes && !now.Before(p.from) && now.Before(p.until) {
		c.candidates = append(c.candidates[:0], p.candidates...)
		copy(c.verdicts, p.verdicts)
		return nil
	}
	if until := c.collect(now, q, Healthy); len(c.candidates) == 0 {
		c.collect(now, q, Degraded)
	} else if q.plain() && now.Before(until) {
		*p = plain{c.changes, now, until, append(p.candidates[:0], c.candidates...), append(p.verdicts[:0], c.verdicts...)}
	}
	if len(c.candidates) == 0 {
		return ErrNoWorkers
	}
	return nil
}

// plain is what [core.eligible] found for a request that excludes no workers by itself.
type plain struct {
	changes     uint64    // core.changes
	from, until time.Time // when it holds
	candidates  []int
	verdicts    []Exclusion
}

// plain says whether a request that is not pinned excludes no workers by itself.
func (q *question) plain() bool {
	return q.decode == nil && q.adapter == "" && q.Allowed == nil && q.AllowedAddresses == nil && len(q.RequiredTaints)+len(q.answers) == 0
}

// collect makes candidates of the workers that may take the request and whose health is
// not worse than the given one. It returns when their health may change without an input.
func (c *core) collect(now time.Time, q *question, worst Health) (until time.Time) {
	c.candidates, until = c.candidates[:0], now.Add(time.Second)
	for i, ord := range c.order {
		e := &c.entries[ord]
		why := c.exclude(e, q)
		if why == "" {
			var h Health
			if h, why = c.standing(now, e); why == ExcludedFailing {
				until = earlier(until, e.avoid.until)
			} else if e.info.Group != "" {
				until = now // its reports decide
			}
			switch a := q.probeAnswer(e); {
			case a == nil:
			case a.Busy && h == Healthy:
				h, why = Degraded, ExcludedBusy
			case !a.Busy && why == ExcludedStale:
				h, why = Healthy, "" // the group answered just now
			}
			if h <= worst {
				why = ""
				c.candidates = append(c.candidates, ord)
			}
		}
		c.verdicts[i] = why
	}
	return until
}

// exclude returns why a worker may not take a request, apart from its health and load.
func (c *core) exclude(e *entry, q *question) Exclusion {
	switch info := e.info; {
	case q.Pinned != nil && (e.worker.ID != q.Pinned.ID || !q.AnyRank && e.worker != *q.Pinned):
		return ExcludedPin
	case info.Draining:
		return ExcludedDraining
	case !info.takes(q.workspace.part),
		q.decode != nil && (info.ID == q.decode.ID || info.Engine != q.decode.Engine):
		return ExcludedRole
	case q.adapter != "" && !slices.Contains(info.LoRA, q.adapter):
		return ExcludedAdapter
	case q.Allowed != nil && !slices.Contains(q.Allowed, e.worker):
		return ExcludedAllowed
	case q.AllowedAddresses != nil && !allows(q.AllowedAddresses, info.rankAddress(e.worker.DPRank)):
		return ExcludedAllowed
	case slices.ContainsFunc(q.RequiredTaints, func(t string) bool { return !slices.Contains(info.Taints, t) }):
		return ExcludedTaint
	}
	return ""
}

// measure fills in the inputs of the decision: of the request and of each candidate.
func (c *core) measure(now time.Time, q *question, s *scorer.Settings) {
	c.request = scorer.Request{
		PromptTokens: q.tokens, BlockSize: c.blockSize, OutputTokens: c.expectedOutput(q),
		U: c.draw(q.ID), Turn: c.turnOf(q.ID),
		PrefillUntracked: !s.TrackPrefill, Pinned: q.Pinned != nil, EmbeddingHit: q.EmbeddingHit,
	}
	c.inputs = slices.Grow(c.inputs[:0], len(c.candidates))[:len(c.candidates)]
	idle, holder, most := false, -1, 0 // holder has computed most of the prompt
	c.held, c.whole = 0, c.conf.Rule != nil || q.Explain || s.Policy != scorer.Tokens && s.Policy != scorer.PredictedTTFT || !s.TrackPrefill
	for i, ord := range c.candidates {
		e, in := &c.entries[ord], &c.inputs[i]
		c.load(now, ord, q.tokens, in)
		in.DecodeOnly = in.DecodeOnly || c.part == decodePart
		if c.whole {
			c.complete(now, ord, q, s, in)
		}
		if e.since <= q.version {
			if ord < len(q.overlap) {
				in.OverlapBlocks = int(q.overlap[ord])
			}
			if ord < len(q.pending) {
				in.PendingBlocks = int(q.pending[ord])
			}
			if ord < len(q.lower[0]) {
				in.HostBlocks, in.DiskBlocks = int(q.lower[0][ord]), int(q.lower[1][ord]+q.lower[2][ord])
			}
		}
		c.applyProbe(q, ord, i)
		c.held += in.OverlapBlocks
		idle = idle || in.ActiveRequests == 0
		if n := in.OverlapBlocks - in.PendingBlocks; n > most {
			holder, most = i, n
		}
		for _, t := range q.taints {
			if slices.Contains(e.info.Taints, t.name) {
				in.TaintWeight += t.weight
			}
		}
	}
	// It matters only to an idle candidate, if the holder is not idle.
	if idle && holder >= 0 && c.inputs[holder].ActiveRequests > 0 && s.Policy == scorer.Tokens && s.TrackPrefill {
		c.request.Sharers = c.inputs[holder].ActiveRequests
		c.request.ActivePrefix = min(most, len(q.sequence)-c.slots.AdditionalBlocks(c.candidates[holder], q.sequence)) * c.blockSize
	}
}

// complete adds to an input what takes long and what [scorer.Tokens] and [scorer.PredictedTTFT] do not count:
// the blocks that q would add to the active ones, and the share of the cache in use.
func (c *core) complete(now time.Time, ord int, q *question, s *scorer.Settings, in *scorer.Input) {
	c.entries[ord].setKVUse(now, in)
	switch {
	case c.conf.NoActiveBlocks, c.part == prefillPart:
	case s.AssumeKVReuse:
		in.AdditionalBlocks = c.slots.AdditionalBlocks(ord, q.sequence)
	default:
		in.AdditionalBlocks = len(q.sequence)
	}
}
