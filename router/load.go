// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"math"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

const (
	// growEvery is how old estimates of outputs may be: a fast engine fills a block in
	// about this time.
	growEvery = 250 * time.Millisecond
	// inferEvery is how old the inferred first tokens may be at a decision: much less than a
	// prefill that matters takes.
	inferEvery = time.Millisecond
	// inferQueued is how often first tokens are inferred while requests wait in a queue.
	inferQueued = 50 * time.Millisecond
)

// advanceTime applies the passing of time before the loads of a choice are read.
func (c *core) advanceTime(now time.Time) {
	c.grow(now)
	if !c.conf.NoSpeeds && (c.speeds.changed || now.Sub(c.speeds.at) >= speedEvery) {
		c.speeds.refresh(now, &c.ranks)
	}
}

// grow estimates the length of outputs that no caller reports. It is called before loads
// are read.
func (c *core) grow(now time.Time) {
	if !c.conf.EstimateOutput || now.Sub(c.grown) < growEvery {
		return
	}
	c.grown = now
	for _, ord := range c.order {
		c.slots.Grow(now, ord, c.outputRate(ord))
	}
}

// outputRate is the number of output tokens a second of a request on a worker: as configured, as
// measured there, or by the model of the engine.
func (c *core) outputRate(ord int) float64 {
	rate := cmp.Or(c.conf.OutputRate, c.slots.OutputRate(ord))
	if rate > 0 {
		return rate
	}
	l, members := c.slots.Load(ord), max(1, c.entries[ord].members())
	return 1000 / c.settings.Engine.DecodeStep((l.Requests-l.Waiting)/members, l.DecodeTokens/members)
}

// infer starts the requests whose prefill should be done by now. It is called before
// loads are read.
//
// It looks at every rank, since the decision that follows does so, too: to keep the ranks
// sorted by what is due next would cost more than the comparison saves.
func (c *core) infer(now time.Time) {
	if !c.conf.InferFirstTokens || now.Sub(c.inferredAt) < inferEvery {
		return
	}
	c.inferredAt = now
	inferred := 0
	for _, ord := range c.order {
		inferred += c.slots.InferByRate(now, ord)
	}
	if inferred > 0 {
		c.pump(now)
	}
}

// inferable says whether the first token of a request can be inferred if it is booked on a rank. It is observed if
// one of these needs it:
//
//   - the load: the worker has many tokens to compute, or nobody knows how many, or in which order; it is a group
//   - the measurement of the rank's rate, which also shows that the rank does not hang: see Config.ObservePerMinute
//   - requests that were left on the rank, whose load ends with the first token of another request
//   - a session that the first token binds, a pull that it ends, and the comparison of Config.HoldoutShare
func (in *decisionInput) inferable(c *core, now time.Time, ord int, d *Decision) bool {
	switch e := &c.entries[ord]; {
	case !in.MayInfer || in.Unseen || in.decode != nil || d.Prefill != nil || !c.conf.InferFirstTokens:
		return false
	case in.prompt.tokens == 0 || in.prompt.fallback != "":
		return false
	case d.PrefillTokens > c.conf.InferTokens || c.conf.InferTokens == 0:
		return false
	case e.info.Group != "" || d.Source != nil || in.holdout.side != "":
		return false
	case now.Sub(e.observed) >= time.Minute/time.Duration(c.conf.ObservePerMinute):
		return false
	case c.slots.Load(ord).Left > 0:
		return false
	}
	if seat, bound := c.sessions.worker(now, in.session); in.session != 0 && (!bound || seat != ord) {
		return false
	}
	_, reorders := c.slots.PrefillRate(ord)
	return !reorders
}

// load fills in the properties of a worker and its load, except the fields of [core.complete]. prompt is the
// length of the request's prompt; see [core.foreign].
func (c *core) load(now time.Time, ord, prompt int, in *scorer.Input) {
	e, load := &c.entries[ord], c.slots.Load(ord)
	*in = e.properties
	in.PendTokens, in.DecodeTokens, in.WaitingTokens = load.PendTokens, load.DecodeTokens, load.WaitingTokens
	in.ActiveRequests, in.WaitingRequests, in.ActiveBlocks = load.Requests, load.Waiting, load.Blocks
	in.LeftTokens = load.LeftTokens
	if in.Members > 0 {
		e.groupLoad(now, &c.slots, ord, c.blockSize, in)
	} else if r := &e.report; r.foreignRequests|r.foreignBlocks != 0 {
		f := c.foreign(now, e, prompt)
		in.PendTokens += f.Tokens
		in.ActiveRequests += f.Requests
		in.WaitingRequests += f.Waiting
		in.ActiveBlocks += f.Blocks
		in.DecodeTokens += f.Held
	}
}

// complete fills in the fields of an input that take long to compute: the blocks that the request would add to
// the active ones, and the share of the cache in use. The costs of [scorer.Tokens] and
// [scorer.PredictedTTFT] do not need these fields.
func (c *core) complete(ch *choice, ord int, sequence []uint64, to *scorer.Input) {
	c.entries[ord].setKVUse(ch.time, to)
	switch {
	case c.conf.NoActiveBlocks, ch.part == prefillPart:
	case ch.settings.AssumeKVReuse:
		to.AdditionalBlocks = c.slots.AdditionalBlocks(ord, sequence)
	default:
		to.AdditionalBlocks = len(sequence)
	}
}

// setKVUse fills in the share of a worker's cache that is in use. The active blocks in in are already set.
func (e *entry) setKVUse(now time.Time, in *scorer.Input) {
	switch total := e.info.TotalKVBlocks; {
	case e.info.Group != "": // groupLoad has set it
	case total > 0:
		in.KVUse = min(1, float64(max(in.ActiveBlocks, e.reported(now)))/float64(total))
	case fresh(now, e.report.usedAt):
		in.KVUse = min(1, e.report.usage)
	}
}

// reportLife is how long an engine's report counts. An engine that stops reporting must not
// stay busy forever.
const reportLife = 10 * time.Second

func fresh(now, at time.Time) bool { return !at.IsZero() && now.Sub(at) <= reportLife }

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

// busy says whether the load of a worker, or the mean load of a group's members, is above a threshold. skipped
// is the number of thresholds that could not be applied.
func (c *core) busy(now time.Time, e *entry, in *scorer.Input, members int) (busy bool, skipped int) {
	total := e.info.TotalKVBlocks
	if e.group != nil {
		total = e.group.load.TotalBlocks
	}
	return c.thresholds.Busy(scorer.Occupancy{
		ActiveBlocks: in.ActiveBlocks, PendTokens: in.OwnedTokens() / members,
		EngineBlocks: e.reported(now),
		TotalBlocks:  total, MaxBatchedTokens: e.info.MaxBatchedTokens,
	})
}

// foreign returns the foreign load of a worker. It needs the average length of prompts; before the first
// booking, prompt stands for this average.
func (c *core) foreign(now time.Time, e *entry, prompt int) (f Foreign) {
	r, mean := &e.report, c.typical
	if mean.prompt == 0 {
		mean.note(prompt, prompt)
	}
	requests := fresh(now, r.requestsAt)
	if requests {
		f.Requests, f.Waiting = r.foreignRequests, r.foreignWaiting
		if c.settings.TrackPrefill {
			f.Tokens = int(math.Round(float64(f.Waiting) * mean.prefill))
		}
	}
	switch {
	case c.conf.NoActiveBlocks || requests && f.Requests == 0:
	case e.reported(now) > 0:
		f.Blocks = r.foreignBlocks
	default:
		f.Blocks = int(math.Ceil(float64(f.Requests-f.Waiting) * mean.prompt / float64(c.blockSize)))
	}
	f.Held = max(f.Blocks*c.blockSize, int(float64(f.Requests)*mean.prompt))
	return f
}

// summarize makes the summary of the load of all workers that may take requests.
func (c *core) summarize(now time.Time) Summary {
	c.grow(now)
	var standing [Degraded + 1][]int // ordinals by health
	for _, ord := range c.order {
		e := &c.entries[ord]
		if e.info.Draining || e.info.Role == Prefill {
			continue
		}
		if h, _ := c.healthNow(now, e); h <= Degraded {
			standing[h] = append(standing[h], ord)
		}
	}
	members := standing[Healthy]
	if len(members) == 0 {
		members = standing[Degraded]
	}
	s := Summary{Taken: now, Healthy: len(standing[Healthy]), Degraded: len(standing[Degraded]), Silent: len(members) > 0}
	busy, loads := make([]bool, len(members)), make([]scorer.Input, len(members))
	for i, ord := range members {
		e, in := &c.entries[ord], &loads[i]
		c.load(now, ord, 0, in)
		if busy[i], _ = c.busy(now, e, in, 1); busy[i] {
			s.Busy++
		}
		s.Silent = s.Silent && e.silent(c.conf.NoEvents)
	}
	known := true
	for i, ord := range members {
		if busy[i] && s.Busy < len(members) {
			continue // requests go to the others
		}
		s.PendTokens += loads[i].PendTokens
		s.ActiveRequests += loads[i].ActiveRequests
		s.ActiveBlocks += loads[i].ActiveBlocks
		s.HeldTokens += loads[i].DecodeTokens + loads[i].WaitingTokens
		blocks := c.entries[ord].info.TotalKVBlocks
		s.TotalBlocks += blocks
		known = known && blocks > 0
	}
	if !known {
		s.TotalBlocks = 0
	}
	if c.queue != nil {
		s.Queued, s.QueuedTokens = c.queue.Len(), c.queue.Uncached()
	}
	return s
}

// typical has the average lengths of a pool's requests; newer requests count more.
type typical struct{ prompt, prefill float64 }

func (t *typical) note(prompt, prefill int) {
	const weight = 1. / 16
	if t.prompt == 0 {
		*t = typical{float64(prompt), float64(prefill)}
		return
	}
	t.prompt += (float64(prompt) - t.prompt) * weight
	t.prefill += (float64(prefill) - t.prefill) * weight
}

// outputs is the mean length of the outputs of a pool's requests. Costs need it, because the output of a new
// request is still unknown. The mean is over this router's requests that have ended; newer ones count more. If
// nobody reported the tokens of a response, its length is estimated by its duration.
type outputs struct {
	mean float64 // tokens
	n    int     // requests so far, up to outputWindow
}

const (
	// defaultOutput is the mean output before any request has ended: about that of public chat
	// traces. It counts as defaultOutputs requests.
	defaultOutput  = 256
	defaultOutputs = 8
	// outputWindow is about the number of requests that the mean covers.
	outputWindow = 64
)

func (o *outputs) note(tokens float64) {
	o.n = min(o.n+1, outputWindow-defaultOutputs)
	mean := o.tokens()
	o.mean = mean + (tokens-mean)/float64(o.n+defaultOutputs)
}

// tokens is the mean output.
func (o *outputs) tokens() float64 { return cmp.Or(o.mean, defaultOutput) }

// expected is the expected output of a part of a request in tokens: the number in the request, or else the mean
// of the pool, but at most the number that the request allows. It is 0 for a prefill leg.
func (o *outputs) expected(in *decisionInput, p part) float64 {
	switch {
	case p == prefillPart:
		return 0
	case in.ExpectedOutput > 0:
		return float64(in.ExpectedOutput)
	case in.MaxOutput > 0:
		return min(o.tokens(), float64(in.MaxOutput))
	}
	return o.tokens()
}
