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
	if c.collect(now, q, Healthy); len(c.candidates) == 0 {
		c.collect(now, q, Degraded)
	}
	if len(c.candidates) == 0 {
		return ErrNoWorkers
	}
	return nil
}

// collect makes candidates of the workers that may take the request and whose health is
// not worse than the given one.
func (c *core) collect(now time.Time, q *question, worst Health) {
	c.candidates = c.candidates[:0]
	for i, ord := range c.order {
		e := &c.entries[ord]
		why := c.exclude(e, q)
		if why == "" {
			var h Health
			h, why = c.standing(now, e)
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
	}
	for _, t := range q.RequiredTaints {
		if !slices.Contains(e.info.Taints, t) {
			return ExcludedTaint
		}
	}
	return ""
}

// measure fills in the inputs of the decision: of the request and of each candidate.
func (c *core) measure(now time.Time, q *question, s *scorer.Settings) {
	c.request = scorer.Request{
		PromptTokens: q.tokens, BlockSize: c.blockSize,
		U: c.draw(q.ID), Turn: c.turn,
		PrefillUntracked: !s.TrackPrefill, Pinned: q.Pinned != nil, EmbeddingHit: q.EmbeddingHit,
	}
	c.inputs = slices.Grow(c.inputs[:0], len(c.candidates))[:len(c.candidates)]
	for i, ord := range c.candidates {
		e, in := &c.entries[ord], &c.inputs[i]
		c.load(now, ord, q.tokens, in)
		in.DecodeOnly = in.DecodeOnly || c.part == decodePart
		switch {
		case c.conf.NoActiveBlocks, c.part == prefillPart:
		case s.AssumeKVReuse:
			in.AdditionalBlocks = c.slots.AdditionalBlocks(ord, q.sequence)
		default:
			in.AdditionalBlocks = len(q.sequence)
		}
		if e.since <= q.version {
			if ord < len(q.overlap) {
				in.OverlapBlocks = int(q.overlap[ord])
			}
			if ord < len(q.lower[0]) {
				in.HostBlocks, in.DiskBlocks = int(q.lower[0][ord]), int(q.lower[1][ord]+q.lower[2][ord])
			}
			if ord < len(q.cached) {
				in.CachedBlocks = q.cached[ord]
			}
		}
		c.applyProbe(q, ord, i)
		for _, t := range q.taints {
			if slices.Contains(e.info.Taints, t.name) {
				in.TaintWeight += t.weight
			}
		}
	}
}
