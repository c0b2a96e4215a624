// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// load fills in the load and the properties of a worker; see [entry.setKVUse], too. prompt is the length of a prompt
// that stands for the average one before the first booking; see [core.foreign].
func (c *core) load(now time.Time, ord, prompt int, in *scorer.Input) {
	e, load := &c.entries[ord], c.slots.Load(ord)
	*in = e.properties
	in.PendTokens, in.DecodeTokens, in.WaitingTokens = load.PendTokens, load.DecodeTokens, load.WaitingTokens
	in.ActiveRequests, in.WaitingRequests, in.ActiveBlocks = load.Requests, load.Waiting, load.Blocks
	if in.Members > 0 {
		c.groupLoad(now, ord, in)
	} else if r := &e.report; r.foreignRequests|r.foreignBlocks != 0 {
		f := c.foreign(now, e, prompt)
		in.PendTokens += f.Tokens
		in.ActiveRequests += f.Requests
		in.WaitingRequests += f.Waiting
		in.ActiveBlocks += f.Blocks
		in.DecodeTokens += f.Held
	}
}

// setKVUse fills in the share of a worker's cache that is in use. in has the other load.
func (e *entry) setKVUse(now time.Time, in *scorer.Input) {
	switch total := e.info.TotalKVBlocks; {
	case e.info.Group != "": // groupLoad did
	case total > 0:
		in.KVUse = min(1, float64(max(in.ActiveBlocks, e.reported(now)))/float64(total))
	case fresh(now, e.report.usedAt):
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
		c.held -= in.OverlapBlocks
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
