// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"slices"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/scorer"
)

// rule is how the cached tokens of a worker's responses depart from what its events promise, where events cannot say
// it.
type rule uint8

// The rules. A rule ends when the responses contradict it, and when the worker restarts.
const (
	ruleNone rule = iota
	// ruleDrop: the engine uses one block less than it holds. vLLM does so with EAGLE or MTP and a KV connector.
	ruleDrop
	// ruleLimit: events are an upper limit. The engine loses parts of its cache without an event, or the index does not
	// know the kind of a group.
	ruleLimit
)

// limit is the limit that the rule is to a candidate.
func (r rule) limit() Limit {
	return [...]Limit{ruleNone: LimitNone, ruleDrop: LimitDrop, ruleLimit: LimitShare}[r]
}

// String returns the name of the rule in the API and in metrics.
func (r rule) String() string { return r.limit().String() }

// learned is what the audit of a worker has learned.
type learned struct {
	rule  rule
	share float32 // with ruleLimit: cached tokens by promised tokens of the latest responses, 0..1
}

// lower lowers the blocks that count for a worker from what its events promise to what its responses showed.
func (l learned) lower(o *overlap, ord, tokens, size int, to *scorer.Input) {
	ends, whole := indexer.Boundaries{Step: 1}, 0
	if ord < len(o.whole) {
		ends, whole = o.ends[ord], int(o.whole[ord])
	}
	promised := to.OverlapBlocks
	if ends.Step == 0 { // only responses say how much of the prefix can be used
		promised, l.rule = max(promised, whole), ruleLimit
	}
	step := max(1, ends.Step)
	to.UnusableBlocks = max(0, whole-promised)
	switch most := max(0, tokens-1) / size; {
	case l.rule == ruleLimit:
		to.OverlapBlocks = int(float64(l.share)*float64(promised)) / step * step
	case l.rule == ruleDrop && !(ends.Sides && promised == most/step*step && (promised+step)*size == tokens && whole*size >= tokens):
		// Otherwise the worker holds the block behind the last boundary before the prompt's end: that one is dropped.
		to.OverlapBlocks = max(0, min(promised, most)-step)
	}
	to.LoweredBlocks = promised - to.OverlapBlocks
	to.PendingBlocks = max(0, to.PendingBlocks-to.LoweredBlocks)
}

// Limit is what lowers the blocks that count for a candidate.
type Limit uint8

// The limits: the kinds of side groups, then the rules of the audit.
const (
	LimitNone Limit = iota
	LimitWindow
	LimitState
	LimitChunk
	LimitDrop
	LimitShare
)

//nolint:gochecknoglobals // a table
var limitNames = [...]string{"", "window", "state", "chunk", "drop", "limit"}

// String returns the name of the limit in the API; empty for LimitNone.
func (l Limit) String() string { return limitNames[l] }

// MarshalText returns the name of the limit.
func (l Limit) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText sets the limit by its name. A name that is not known is an error.
func (l *Limit) UnmarshalText(name []byte) error {
	at := slices.Index(limitNames[:], string(name))
	if at < 0 {
		return fmt.Errorf("%q is not window, state, chunk, drop or limit", name)
	}
	*l = Limit(at)
	return nil
}

// nameLimits names what lowers the blocks that count for a candidate. by is the rule of the audit for its worker.
func nameLimits(by rule, o *overlap, ord int, to *Candidate) {
	if ord < len(o.whole) {
		ends := o.ends[ord]
		if ends.Step == 0 {
			by = ruleLimit
		}
		if to.UnusableBlocks > 0 && ends.Lacks != indexer.NeedsUnknown {
			to.Lacks = [...]Limit{
				indexer.NeedsWindow: LimitWindow, indexer.NeedsState: LimitState, indexer.NeedsChunk: LimitChunk,
			}[ends.Lacks]
			to.LacksGroup = ends.Group
		}
	}
	if to.LoweredBlocks > 0 {
		to.Rule = by.limit()
	}
}

// learn looks for a rule in the latest responses. It reports whether the rule changed.
func (a *audit) learn(l *learned) (changed bool) {
	before := l.rule
	promised, fits, whole, over, tokens, cached := 0, 0, 0, 0, 0, 0
	first, varied := 0, false // responses that fit promise different numbers of tokens
	unknown := a.last[(a.n-1)%auditWindow].unknown
	for _, r := range a.window() {
		if r.promised == 0 || r.end && r.promised == r.cached {
			continue // it fits with and without ruleDrop
		}
		promised++
		tokens, cached = tokens+r.promised, cached+min(r.promised, r.cached)
		switch {
		case r.promised-r.cached == r.step:
			if fits++; first == 0 {
				first = r.promised
			}
			varied = varied || r.promised != first
		case r.cached >= r.promised:
			whole++
		}
		if r.promised-r.cached > r.blockSize {
			over++
		}
	}
	switch {
	case promised < auditDeviant:
		return false
	case !unknown && l.rule != ruleDrop && fits == promised && varied:
		*l = learned{rule: ruleDrop}
	case l.rule == ruleDrop && whole >= auditDeviant, l.rule == ruleLimit && !unknown && over == 0:
		*l = learned{}
	case unknown || l.rule == ruleLimit:
		*l = learned{ruleLimit, float32(cached) / float32(tokens)}
	}
	return l.rule != before
}
