// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"time"
)

// outputs is how long the outputs of a pool's requests are. Costs need it before a request has
// an output. The mean is over this router's requests that have ended; newer ones count more. Of a response
// whose tokens nobody reported, the length is estimated by its time.
type outputs struct {
	mean float64 // tokens
	n    int     // requests so far, up to outputWindow
}

const (
	// defaultOutput is the mean output before any request has ended: about that of public chat
	// traces. It counts as defaultOutputs requests.
	defaultOutput  = 256
	defaultOutputs = 8
	// outputWindow is the number of requests whose mean counts, about.
	outputWindow = 64
)

func (o *outputs) note(tokens float64) {
	o.n = min(o.n+1, outputWindow-defaultOutputs)
	mean := o.tokens()
	o.mean = mean + (tokens-mean)/float64(o.n+defaultOutputs)
}

// tokens is the mean output.
func (o *outputs) tokens() float64 { return cmp.Or(o.mean, defaultOutput) }

// expectedOutput is the expected output of a request in tokens: as the request says, or the mean of the
// pool, and at most what the request allows. A prefill leg has none.
func (c *core) expectedOutput(q *question) float64 {
	switch {
	case c.part == prefillPart:
		return 0
	case q.ExpectedOutput > 0:
		return float64(q.ExpectedOutput)
	case q.MaxOutput > 0:
		return min(c.outputs.tokens(), float64(q.MaxOutput))
	}
	return c.outputs.tokens()
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

// end gives the slot of a request back, and learns the length of its output. silent says that no first
// token was known.
func (c *core) end(now time.Time, id string) (silent bool) {
	e := c.slots.Finish(now, id)
	if e.Started {
		if e.Unestimated > 0 {
			e.OutputTokens += e.Unestimated.Seconds() * c.outputRate(e.Worker)
		}
		c.outputs.note(e.OutputTokens)
	}
	return e.Existed && !e.Started
}

// noteUsage takes the number of output tokens that a response reported. Of a request in flight it
// replaces the estimate; of one that has ended the worker's rate is learnt from it.
func (c *core) noteUsage(now time.Time, d *Decision, tokens int) {
	ord, known := c.find(d.Worker)
	switch {
	case !known:
	case d.Freed.IsZero():
		c.slots.ReportOutput(now, d.ID, tokens)
	case !d.FirstToken.IsZero():
		c.slots.LearnOutputRate(ord, tokens, d.Freed.Sub(d.FirstToken))
	}
}
