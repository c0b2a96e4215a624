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

// pinError says why the pinned worker is not a candidate; nil if it is one.
// In the mode Direct a worker that does not exist is also a lack of workers.
func (c *core) pinError(q *question) error {
	from, to := c.pin(q)
	switch {
	case len(c.candidates) > 0:
		return nil
	case from == to && c.conf.Mode == Direct:
		return q.pinned(fmt.Errorf("%w: %w", ErrPinnedUnknown, ErrNoWorkers))
	case from == to:
		return q.pinned(ErrPinnedUnknown)
	}
	switch why := c.verdicts[to-1]; why {
	case ExcludedDraining, ExcludedHealth:
		return q.pinned(fmt.Errorf("%w: %s", ErrNoWorkers, why))
	default:
		return q.pinned(fmt.Errorf("%w: %s", ErrPinnedNotAllowed, why))
	}
}

// pinned adds the pinned worker to an error.
func (q *question) pinned(err error) error {
	if q.AnyRank {
		return fmt.Errorf("worker %d: %w", q.Pinned.ID, err)
	}
	return fmt.Errorf("worker %d, rank %d: %w", q.Pinned.ID, q.Pinned.DPRank, err)
}

// exclude returns why a worker may not take a request, apart from its health and load.
func (c *core) exclude(e *entry, q *question) Exclusion {
	switch info := e.info; {
	case q.Pinned != nil && (e.worker.ID != q.Pinned.ID || !q.AnyRank && e.worker != *q.Pinned):
		return ExcludedPin
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

// pin returns the range of the pinned worker, or of its ranks, in the order.
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

// lane is the lane of the queue in which a request waits.
func (c *core) lane(q *question) int {
	if q.Pinned == nil {
		return scorer.AnyWorker
	}
	if from, to := c.pin(q); from < to {
		return c.order[from]
	}
	return scorer.AnyWorker
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

// load fills in the load and the properties of a worker. prompt is the length of a prompt
// that stands for the average one before the first booking; see [core.foreign].
func (c *core) load(now time.Time, ord, prompt int, in *scorer.Input) {
	e, load := &c.entries[ord], c.slots.Load(ord)
	// Field by field: a literal would be made elsewhere and copied.
	*in = scorer.Input{}
	in.PendTokens, in.DecodeTokens = load.PendTokens, load.DecodeTokens
	in.ActiveRequests, in.WaitingRequests, in.ActiveBlocks = load.Requests, load.Waiting, load.Blocks
	info := e.info
	in.CPU, in.DecodeOnly = info.CPU, info.Role == Decode
	in.MaxBatchedTokens, in.MaxRequests = info.MaxBatchedTokens, info.MaxNumSeqs
	in.LastCold = e.cold
	if info.Group != "" {
		c.groupLoad(now, ord, in)
		return
	}
	f := c.foreign(now, e, prompt)
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

// reportLife is how long an engine's report counts. An engine that stops reporting must not
// stay busy forever.
const reportLife = 10 * time.Second

// reported returns the blocks in use by the engine's report, 0 if the report is too old.
func (e *entry) reported(now time.Time) int {
	if !fresh(now, e.report.usedAt) {
		return 0
	}
	return e.report.usedBlocks
}

// throughput returns the number of prompt tokens that a worker computes in a second.
func (c *core) throughput(e *entry) float64 {
	return cmp.Or(e.info.PrefillThroughput, c.conf.PrefillThroughput)
}

// leaveOutBusy removes the candidates that are above a threshold. It is an error if none is
// left.
func (c *core) leaveOutBusy(now time.Time, q *question) error {
	if *c.thresholds == (scorer.Thresholds{}) {
		return nil
	}
	kept := 0
	for i, ord := range c.candidates {
		e, in := &c.entries[ord], &c.inputs[i]
		busy, skipped := c.busy(now, e, in.ActiveBlocks, in.PendTokens, max(1, in.Members))
		c.skipped += skipped
		if !busy {
			c.candidates[kept], c.inputs[kept] = ord, *in
			kept++
			continue
		}
		at, _ := c.search(e.worker)
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
		return q.pinned(fmt.Errorf("%w: %w", ErrPinnedBusy, ErrAllBusy))
	}
	return q.pinned(ErrPinnedBusy)
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
