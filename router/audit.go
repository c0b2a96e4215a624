// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"context"
	"time"

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
}

// audit is the comparison of a worker's last responses.
type audit struct {
	last     [auditWindow]audited
	n        int // responses since the window began
	departs  bool
	reported time.Time // when departs was reported last
}

type audited struct{ predicted, cached, blockSize int }

const (
	auditWindow  = 8
	auditDeviant = auditWindow / 2
	// auditRepeat is the least time between two reports that a worker departs.
	auditRepeat = time.Minute
)

// differs returns −1, 0 or 1 if the worker had more tokens cached than predicted, about as many,
// or fewer. Engines count whole blocks, or single tokens.
func (a audited) differs() int {
	if diff := a.predicted - a.cached; diff > a.blockSize || diff < -a.blockSize {
		return cmp.Compare(diff, 0)
	}
	return 0
}

// add adds a response. It returns true if departs must be reported: departs has changed, or the worker
// still departs. The window begins again when a worker departs: the caller then reads its events again.
func (a *audit) add(now time.Time, r audited) (report bool) {
	a.last[a.n%auditWindow] = r
	a.n++
	differ := 0
	for _, r := range a.window() {
		if r.differs() != 0 {
			differ++
		}
	}
	departs := differ >= auditDeviant
	switch {
	case departs && a.departs && now.Sub(a.reported) < auditRepeat,
		!departs && (!a.departs || len(a.window())-differ < auditDeviant):
		return false
	}
	if a.departs, a.reported = departs, now; departs {
		a.n = 0
	}
	return true
}

func (a *audit) window() []audited { return a.last[:min(a.n, auditWindow)] }

func (a *audit) state() *AuditState {
	if a.n == 0 && !a.departs {
		return nil
	}
	s := &AuditState{Departs: a.departs}
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
		predicted, w, compares := d.predicted()
		if u.Cached && compares {
			r.audit(&d, w, audited{predicted, u.CachedTokens, d.BlockSize})
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
func (d *Decision) predicted() (tokens int, w Worker, compares bool) {
	tokens, w = d.CachedTokens, d.Worker
	if d.Served.IsValid() && d.Served != d.Address {
		if d.Served != d.Second.Address {
			return 0, w, false
		}
		tokens, w = d.Second.OverlapBlocks*d.BlockSize, d.Second.Worker
	}
	exact := d.TokenMode == tokenizer.Exact
	// An engine computes the last token in any case, so it uses no block that has this token.
	most := (d.PromptTokens - 1) / max(1, d.BlockSize) * d.BlockSize
	return min(tokens, most), w, exact && d.Prefill == nil && d.Group == ""
}

// audit compares a response with its decision.
func (r *Router) audit(d *Decision, w Worker, a audited) {
	p := r.poolOf(w.ID)
	if p == nil {
		return // the worker left
	}
	m := r.metrics
	outcome := [...]string{"under", "equal", "over"}[a.differs()+1]
	m.audits.Count(d.Model, outcome)
	prompt := float64(d.Usage.PromptTokens)
	of := p.labels.record
	m.cachedRatio.Record(context.Background(), float64(a.cached)/prompt, of...)
	m.auditError.Record(context.Background(), float64(a.predicted-a.cached)/prompt, of...)

	var report, departs bool
	now := r.conf.Now()
	p.update(now, func(c *core) {
		if ord, known := c.find(w); known {
			e := &c.entries[ord]
			report, departs = e.audit.add(now, a), e.audit.departs
		}
	})
	if report && r.conf.Hooks.Departs != nil {
		r.conf.Hooks.Departs(w, departs)
	}
}
