// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer"
)

// Usage is the number of tokens that a response names in its field usage.
type Usage struct {
	PromptTokens int `json:"prompt_tokens"`
	OutputTokens int `json:"output_tokens"`
	CachedTokens int `json:"cached_tokens"` // of the prompt
	// Cached says that the response names the cached tokens.
	Cached bool `json:"cached_reported"`
	// Bad says that the response has a usage that kvroute cannot read.
	Bad bool `json:"-"`
}

// AuditState compares the predicted cached tokens of a worker's last responses, at most 8, with those
// that the responses report.
type AuditState struct {
	Responses       int  `json:"responses"`
	PredictedTokens int  `json:"predicted_tokens"`
	CachedTokens    int  `json:"cached_tokens"`
	Departs         bool `json:"departs"` // half of the responses, and at least 4, differ by more than a block
	// Rule is how the cached tokens depart from the worker's events, if they do so by a rule: "drop" is one block less,
	// "limit" is less without a pattern. Predictions follow the rule. Share is the part of the promised tokens that
	// predictions count.
	Rule  string  `json:"rule,omitempty"`
	Share float64 `json:"share,omitempty"`
}

// audit is the comparison of a worker's last responses.
type audit struct {
	last     [auditWindow]audited
	n        int // responses since the window began
	departs  bool
	reported time.Time     // when departs was reported last
	wait     time.Duration // the least time between that report and the next one that the worker departs
}

// audited is one response. Numbers are tokens.
type audited struct {
	promised  int  // cached by the worker's events, without a rule
	predicted int  // the same with the rule that was known
	cached    int  // by the response
	blockSize int  // of the index
	step      int  // between two boundaries
	end       bool // a block that the engine drops may be the one behind the prompt's last boundary
	unknown   bool // the worker's rule of hits is unknown
	limit     bool // promised is only an upper limit
	guessed   bool // no event has named a part of promised yet, so the response says nothing of events
}

const (
	auditWindow  = 8
	auditDeviant = auditWindow / 2
	// auditRepeat is the first time between two reports that a worker departs. It doubles with each report, up to
	// maxAuditRepeat, until the worker agrees: to read its events again did not help.
	auditRepeat, maxAuditRepeat = time.Minute, time.Hour
)

// differs returns −1, 0 or 1 if the worker had more tokens cached than predicted, about as many,
// or fewer. Engines count whole blocks, or single tokens.
func (a *audited) differs() int {
	diff := a.predicted - a.cached
	if a.limit {
		diff = min(0, a.promised-a.cached)
	}
	if diff > a.blockSize || diff < -a.blockSize {
		return cmp.Compare(diff, 0)
	}
	return 0
}

// news is what an audited response changes.
type news uint8

const (
	newsNone    news = iota
	newsDeparts      // the worker departs, perhaps still: its events should be read again
	newsAgrees
	newsRule // the worker has another rule
)

// add adds a response. The window begins again when a worker departs, and when its rule changes.
func (a *audit) add(now time.Time, r audited, l *learned) news {
	a.last[a.n%auditWindow] = r
	if a.n++; a.learn(l) {
		a.n, a.departs = 0, false
		return newsRule
	}
	differ, over := 0, 0
	for i := range a.window() {
		switch a.last[i].differs() {
		case 1:
			over++
			differ++
		case -1:
			differ++
		}
	}
	departs := differ >= auditDeviant
	switch {
	case departs && a.departs && now.Sub(a.reported) < a.wait,
		!departs && (!a.departs || len(a.window())-differ < auditDeviant):
		return newsNone
	case departs && a.departs && over == differ: // reading its events again did not help
		l.rule = ruleLimit
		a.learn(l)
		a.departs = false
		for i := range a.last {
			a.last[i].limit = true
		}
		return newsRule
	case departs:
		a.wait = min(max(auditRepeat, 2*a.wait), maxAuditRepeat)
		a.departs, a.reported, a.n = true, now, 0
		return newsDeparts
	}
	a.departs, a.reported, a.wait = false, now, 0
	return newsAgrees
}

func (a *audit) window() []audited { return a.last[:min(a.n, auditWindow)] }

func (a *audit) state(l learned) *AuditState {
	if a.n == 0 && !a.departs && l.rule == ruleNone {
		return nil
	}
	s := &AuditState{Departs: a.departs, Rule: l.rule.String(), Share: float64(l.share)}
	for _, r := range a.window() {
		s.Responses++
		s.PredictedTokens += r.predicted
		s.CachedTokens += r.cached
	}
	return s
}

// ReportUsage notes the usage in the response to a booked request, during the request or soon
// after its end, and compares it with the decision. The zero value says that the response has no
// usage. A usage with more cached tokens than tokens of the prompt counts as bad.
func (r *Router) ReportUsage(id string, u Usage) {
	if u.CachedTokens > u.PromptTokens {
		u = Usage{Bad: true}
	}
	d, known := r.noteUsage(id, u)
	outcome := "unreported"
	switch {
	case !known:
		outcome = "unknown"
	case u.Bad:
		outcome = "bad"
	case u.PromptTokens != 0:
		r.noteOutput(&d)
		if r.conf.Hooks.Used != nil {
			r.conf.Hooks.Used(d)
		}
		if d.TokenMode == tokenizer.Exact {
			length := "equal"
			if u.PromptTokens != d.PromptTokens {
				length = "different"
			}
			r.metrics.auditedPrompts.Count(d.Model, length)
		}
		r.auditPull(&d)
		a, w, compares := d.predicted()
		if u.Cached && compares {
			a.cached = u.CachedTokens
			r.audit(&d, w, a)
			return
		}
		if u.Cached {
			outcome = "inexact"
		}
	}
	r.metrics.audits.Count(d.Model, outcome)
}

// noteOutput takes the output tokens of a response for the pool of its worker.
func (r *Router) noteOutput(d *Decision) {
	p := r.poolOf(d.Worker.ID)
	if p == nil || d.Usage.OutputTokens <= 0 || d.Served.IsValid() && d.Served != d.Address {
		return
	}
	now := r.conf.Now()
	p.read(func(c *core) { c.noteUsage(now, d, d.Usage.OutputTokens) })
}

// noteUsage adds the usage to the kept decision and to the outcome of a request.
func (r *Router) noteUsage(id string, u Usage) (d Decision, known bool) {
	note := func(kept *Decision) {
		if kept.ID == id {
			kept.add(later{usage: &u})
			kept.copyTo(&d, nil, 0, nil, kept.Prefill)
			known = true
		}
	}
	fl := r.flights.get(id)
	if fl.pool != nil {
		r.kept.change(fl.number, func(kept *keptDecision) { note(&kept.Decision) })
		fl.outcome.change(func(o *Outcome) { note(&o.Decision) })
	} else {
		r.kept.each(func(kept *keptDecision) bool { note(&kept.Decision); return !known })
	}
	return d, known
}

// predicted returns the tokens of the prompt that the worker that served was expected to have
// cached. compares is false if the engine counts something else: kvroute has no exact tokens,
// another worker computed the prompt, or the worker is not known.
func (d *Decision) predicted() (a audited, w Worker, compares bool) {
	a.blockSize, w = d.BlockSize, d.Worker
	blocks, lowered := d.OverlapBlocks, d.LoweredBlocks
	a.guessed = d.guessed
	if d.Served.IsValid() && d.Served != d.Address {
		if d.Served != d.Second.Address {
			return a, w, false
		}
		blocks, lowered, w = d.Second.OverlapBlocks, d.Second.LoweredBlocks, d.Second.Worker
		a.guessed = d.Second.guessed
	}
	exact := d.TokenMode == tokenizer.Exact
	// An engine computes the last token in any case, so it uses no block that has this token.
	most := (d.PromptTokens - 1) / max(1, d.BlockSize)
	a.predicted, a.promised = min(blocks, most)*d.BlockSize, min(blocks+lowered, most)*d.BlockSize
	return a, w, exact && d.Prefill == nil && d.Source == nil && d.Group == ""
}

// audit compares a response with its decision.
func (r *Router) audit(d *Decision, w Worker, a audited) {
	p := r.poolOf(w.ID)
	if p == nil {
		return // the worker left
	}
	var is news
	var l learned
	now, n := r.conf.Now(), d.PromptTokens
	ordinal := -1
	p.read(func(c *core) {
		if ord, known := c.find(w); known {
			ordinal = ord
		}
	})
	var ends indexer.Boundaries
	if ordinal >= 0 { // not under the pool's lock: it waits for an event that is being applied
		ends = p.known.index().Boundaries(ordinal)
	}
	p.update(now, func(c *core) {
		if ord, known := c.find(w); known && ord == ordinal {
			e := &c.entries[ord]
			a.step, a.unknown = max(1, ends.Step)*a.blockSize, ends.Step == 0
			a.end = ends.Sides && n%a.step == 0 && a.promised == n-a.step
			a.limit = a.unknown || e.learned.rule == ruleLimit
			if !a.guessed {
				is = e.audit.add(now, a, &e.learned)
			}
			l = e.learned
		}
	})
	m := r.metrics
	outcome := [...]string{"under", "equal", "over"}[a.differs()+1]
	if a.limit && outcome == "equal" {
		outcome = "limited"
	}
	m.audits.Count(d.Model, outcome)
	prompt := float64(d.Usage.PromptTokens)
	of := p.labels.record
	m.cachedRatio.Record(context.Background(), float64(a.cached)/prompt, of...)
	m.auditError.Record(context.Background(), float64(a.predicted-a.cached)/prompt, of...)

	hooks := &r.conf.Hooks
	switch {
	case is == newsRule && hooks.Learned != nil:
		hooks.Learned(w, l.rule.String())
	case (is == newsDeparts || is == newsAgrees) && hooks.Departs != nil:
		hooks.Departs(w, is == newsDeparts)
	}
}
