// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// eligible collects the ordinals that may take a request: the healthy workers, or
// the degraded ones, and those that failed lately, while there are no healthy ones.
// A pinned worker may be any of them.
func (c *core) eligible(now time.Time, q *question) error {
	c.candidates = c.candidates[:0]
	if q.Pinned != nil {
		return c.pinned(now, q)
	}
	c.verdicts = slices.Grow(c.verdicts[:0], len(c.order))[:len(c.order)]
	var degraded bool
	for i, ord := range c.order {
		e := &c.entries[ord]
		if c.verdicts[i] = c.exclude(e, q); c.verdicts[i] != "" {
			continue
		}
		h, why := c.standing(now, e)
		switch a := q.probeAnswer(e); {
		case a == nil:
		case a.Busy && h == Healthy:
			h, why = Degraded, ExcludedBusy
		case !a.Busy && why == ExcludedStale:
			h, why = Healthy, "" // it was heard just now
		}
		c.verdicts[i] = why
		if h == Healthy {
			c.candidates = append(c.candidates, ord)
		}
		degraded = degraded || h == Degraded
	}
	if len(c.candidates) > 0 {
		return nil
	}
	if !degraded {
		return ErrNoWorkers
	}
	for i, ord := range c.order {
		switch c.verdicts[i] {
		case ExcludedFailing, ExcludedHealth, ExcludedStale, ExcludedBusy:
		default:
			continue
		}
		if h, _ := c.standing(now, &c.entries[ord]); h == Degraded || h == Healthy {
			c.candidates = append(c.candidates, ord)
			c.verdicts[i] = ""
		}
	}
	return nil
}

// pinned makes the pinned worker the only candidate, or its ranks, or says why not.
// In the mode Direct a worker that does not exist is also a lack of workers.
func (c *core) pinned(now time.Time, q *question) error {
	from, to := c.pin(q)
	if from == to {
		err := ErrPinnedUnknown
		if c.conf.Mode == Direct {
			err = fmt.Errorf("%w: %w", ErrPinnedUnknown, ErrNoWorkers)
		}
		return q.pinError(err)
	}
	c.verdicts = slices.Grow(c.verdicts[:0], len(c.order))[:len(c.order)]
	for i := range c.verdicts {
		c.verdicts[i] = ExcludedPin
	}
	var err error
	for at := from; at < to; at++ {
		ord := c.order[at]
		e := &c.entries[ord]
		why := c.exclude(e, q)
		if h, _ := c.standing(now, e); why == "" && h != Healthy && h != Degraded {
			why = ExcludedHealth
		}
		switch c.verdicts[at] = why; why {
		case "":
			c.candidates = append(c.candidates, ord)
		case ExcludedDraining, ExcludedHealth:
			err = fmt.Errorf("%w: %s", ErrNoWorkers, why)
		default:
			err = fmt.Errorf("%w: %s", ErrPinnedNotAllowed, why)
		}
	}
	if len(c.candidates) > 0 {
		return nil
	}
	return q.pinError(err)
}

// exclude says why a worker may not take a request, whatever its health and load.
func (c *core) exclude(e *entry, q *question) Exclusion {
	switch info := e.info; {
	case info.Draining:
		return ExcludedDraining
	case info.Role == Prefill:
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

func allows(list []netip.AddrPort, a netip.AddrPort) bool {
	return slices.ContainsFunc(list, func(l netip.AddrPort) bool {
		return l.Addr() == a.Addr() && (l.Port() == 0 || l.Port() == a.Port())
	})
}

// pin returns where the pinned worker stands in the order, or its ranks.
func (c *core) pin(q *question) (from, to int) {
	if !q.AnyRank {
		at, known := c.search(*q.Pinned)
		if !known {
			return 0, 0
		}
		return at, at + 1
	}
	from, _ = c.search(Worker{ID: q.Pinned.ID})
	for to = from; to < len(c.order) && c.entries[c.order[to]].worker.ID == q.Pinned.ID; to++ {
	}
	return from, to
}

// lane is where a request waits.
func (c *core) lane(q *question) int {
	if q.Pinned == nil {
		return scorer.AnyWorker
	}
	if from, to := c.pin(q); from < to {
		return c.order[from]
	}
	return scorer.AnyWorker
}

func (q *question) pinError(err error) error {
	if q.AnyRank {
		return fmt.Errorf("worker %d: %w", q.Pinned.ID, err)
	}
	return fmt.Errorf("worker %d, rank %d: %w", q.Pinned.ID, q.Pinned.DPRank, err)
}

// measure fills in what the request and each candidate bring to the decision.
func (c *core) measure(now time.Time, q *question, s *scorer.Settings) {
	c.request = scorer.Request{
		PromptTokens: q.tokens, BlockSize: c.blockSize, Sequence: q.sequence,
		U: c.draw(q.ID), Turn: c.turn, Session: q.session,
		PrefillUntracked: !s.TrackPrefill, Pinned: q.Pinned != nil, EmbeddingHit: q.EmbeddingHit,
	}
	if c.conf.Rule != nil && q.Session != "" {
		// A rule may look at the session where nothing is bound to it.
		c.request.Session = sessionKey(q.Session)
	}
	c.inputs = slices.Grow(c.inputs[:0], len(c.candidates))[:len(c.candidates)]
	for i, ord := range c.candidates {
		e, in := &c.entries[ord], &c.inputs[i]
		c.load(now, ord, in)
		switch {
		case c.conf.NoActiveBlocks:
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

// load fills in what a worker is and does, whatever the request.
func (c *core) load(now time.Time, ord int, in *scorer.Input) {
	e, load := &c.entries[ord], c.slots.Load(ord)
	// Field by field, since a literal would be made elsewhere and copied here.
	*in = scorer.Input{}
	in.PendTokens, in.DecodeTokens = load.PendTokens, load.DecodeTokens
	in.ActiveRequests, in.WaitingRequests, in.ActiveBlocks = load.Requests, load.Waiting, load.Blocks
	info := e.info
	in.CPU, in.DecodeOnly = info.CPU, info.Role == Decode
	in.MaxBatchedTokens, in.MaxRequests = info.MaxBatchedTokens, info.MaxNumSeqs
	in.LastCold, in.Key = e.cold, e.key
	if info.Group != "" {
		c.groupLoad(now, ord, in)
		return
	}
	f := c.foreign(now, e, c.request.PromptTokens)
	in.PendTokens += f.Tokens
	in.ActiveRequests += f.Requests
	in.WaitingRequests += f.Waiting
	in.ActiveBlocks += f.Blocks
	in.DecodeTokens += f.Blocks * c.blockSize
	if info.TotalKVBlocks > 0 {
		in.KVUse = min(1, float64(max(in.ActiveBlocks, e.reported(now)))/float64(info.TotalKVBlocks))
	} else if fresh(now, e.report.usedAt) {
		in.KVUse = min(1, e.report.usage)
	}
}

// reportLife is how long an engine's own report counts. An engine that stops reporting
// must not stay busy for ever.
const reportLife = 10 * time.Second

// reported returns the blocks in use by the engine's own report, 0 if that is too
// old.
func (e *entry) reported(now time.Time) int {
	if !fresh(now, e.report.usedAt) {
		return 0
	}
	return e.report.usedBlocks
}

// throughput returns how many prompt tokens a worker computes a second.
func (c *core) throughput(e *entry) float64 {
	return cmp.Or(e.info.PrefillThroughput, c.conf.PrefillThroughput)
}

// leaveOutBusy takes the candidates out that are above a threshold. That none are
// left is an error.
func (c *core) leaveOutBusy(now time.Time, q *question) error {
	if *c.thresholds == (scorer.Thresholds{}) {
		return nil
	}
	kept, at := 0, 0
	for i, ord := range c.candidates {
		e, in := &c.entries[ord], &c.inputs[i]
		busy, skipped := c.busy(now, e, in.ActiveBlocks, in.PendTokens, max(1, in.Members))
		c.skipped += skipped
		if !busy {
			c.candidates[kept], c.inputs[kept] = ord, *in
			kept++
			continue
		}
		for c.order[at] != ord { // both are in worker order
			at++
		}
		c.verdicts[at] = ExcludedBusy
	}
	if kept > 0 {
		c.candidates, c.inputs = c.candidates[:kept], c.inputs[:kept]
		return nil
	}
	if q.Pinned == nil {
		return ErrAllBusy
	}
	if c.conf.Mode == Direct {
		return q.pinError(fmt.Errorf("%w: %w", ErrPinnedBusy, ErrAllBusy))
	}
	return q.pinError(ErrPinnedBusy)
}

// busy says whether a worker is above a threshold, or the mean of the members of a
// group, and how many thresholds could not be applied.
func (c *core) busy(now time.Time, e *entry, blocks, pend, members int) (busy bool, skipped int) {
	total := e.info.TotalKVBlocks
	if e.group != nil {
		total = e.group.load.TotalBlocks
	}
	return c.thresholds.Busy(scorer.Occupancy{
		ActiveBlocks: blocks, PendTokens: pend / members,
		EngineBlocks: e.reported(now),
		TotalBlocks:  total, MaxBatchedTokens: e.info.MaxBatchedTokens,
	})
}
