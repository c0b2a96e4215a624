// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// This file and texts.tmpl have all texts that explain a decision or a worker to people. The API sends them, so
// that `kvroute explain`, `kvroute top`, `kvroute doctor`, the dashboard and the log show the same.
// The texts are functions of the decision alone and name only numbers that the decision has.

// Label is the text by which people know a worker: its name, or its id if it has none, and its rank
// unless that is 0.
func (w Worker) Label(name string) string {
	name = cmp.Or(name, strconv.FormatUint(w.ID, 10))
	if w.DPRank > 0 {
		name += fmt.Sprintf("/%d", w.DPRank)
	}
	return name
}

// exclusionTexts continue "excluded: " and "1 worker is ".
//
//nolint:gochecknoglobals // a table
var exclusionTexts = map[Exclusion]string{
	ExcludedHealth:   "not healthy, while other workers are",
	ExcludedRefused:  "not accepting connections",
	ExcludedFailing:  "avoided after a failure",
	ExcludedStale:    "without a recent summary, while other groups have one",
	ExcludedDraining: "draining: no new requests",
	ExcludedRole:     "of a role or an engine that does not take this part of the request",
	ExcludedAdapter:  "without the LoRA adapter of the request",
	ExcludedPin:      "not the worker that the request names",
	ExcludedAllowed:  "not among the workers that the request allows",
	ExcludedTaint:    "without a taint that the request requires",
	ExcludedBusy:     "above a busy threshold",
	ExcludedSession:  "not the worker that the session is bound to",
}

// Text says in words why the worker could not be chosen.
func (e Exclusion) Text() string { return cmp.Or(exclusionTexts[e], string(e)) }

// Verdict says in words what became of a candidate of the decision. It is empty for a worker that only
// lost the comparison.
func (d *Decision) Verdict(c *Candidate) string {
	var text string
	switch {
	case c.Worker == d.Worker:
		text = "chosen"
	case c.Excluded != "":
		text = "excluded: " + c.Excluded.Text()
	}
	switch {
	case c.Group == "":
	case c.Probed:
		text += " (group, asked: load and blocks are those of the worker that it names)"
	case c.SummaryAge < 0:
		text += fmt.Sprintf(" (group of %s without a summary)", plural(c.Members, "worker"))
	default:
		age := c.SummaryAge.Round(time.Millisecond)
		text += fmt.Sprintf(" (group of %s, summary %v old: load is the sum, cost has the mean)", plural(c.Members, "worker"), age)
	}
	switch usable := c.OverlapBlocks + c.LoweredBlocks; {
	case c.UnusableBlocks > 0 && c.Lacks != LimitNone:
		text += fmt.Sprintf(" (full prefix %s, %s group %d → hit %d, until a request there makes the rest usable)",
			plural(usable+c.UnusableBlocks, "block"), c.Lacks, c.LacksGroup, usable)
	case c.UnusableBlocks > 0:
		text += fmt.Sprintf(" (holds %s of the prompt; its hybrid model can use %d, until a request there makes the rest usable)",
			plural(c.OverlapBlocks+c.UnusableBlocks, "block"), c.OverlapBlocks)
	}
	if c.LoweredBlocks > 0 {
		text += fmt.Sprintf(" (its events promise %s of the prompt; by its responses kvroute counts %d: rule %s)",
			plural(c.OverlapBlocks+c.LoweredBlocks, "block"), c.OverlapBlocks, c.Rule)
	}
	if f := c.Foreign; f != (Foreign{}) {
		text += fmt.Sprintf(" (the load includes what kvroute did not send: %s, %d of them waiting with about %s, %s)",
			plural(f.Requests, "request"), f.Waiting, plural(f.Tokens, "token"), plural(f.Blocks, "block"))
	}
	return strings.TrimPrefix(text, " ")
}

// noLegTexts continue "one worker computes the prompt and the output, because ".
//
//nolint:gochecknoglobals // a table
var noLegTexts = map[NoLeg]string{
	NoLegAsked:      "the request asks for one worker",
	NoLegShort:      "little of the prompt is left to compute",
	NoLegBusy:       "all prefill workers are busy",
	NoLegMissing:    "no prefill worker can take the request",
	NoLegAggregated: "the decode worker with the lowest cost takes whole requests only",
	NoLegFailed:     "the prefill worker failed",
	NoLegFailing:    "all prefill workers are avoided because they failed",
	NoLegUnread:     "the length of the prompt is not known",
}

// Text says in words why one worker computes the prompt and the output of a request.
func (n NoLeg) Text() string { return cmp.Or(noLegTexts[n], string(n)) }

// EventsLevel says whether the events of a worker's cache need attention.
type EventsLevel string

// The levels.
const (
	EventsOK    EventsLevel = "ok"    // they arrive completely
	EventsOff   EventsLevel = "off"   // none are expected: the cache is predicted
	EventsFault EventsLevel = "fault" // some are missing that should be there
)

// EventsState is [EventsState] for a worker of the router.
func (r *Router) EventsState(s *WorkerState) (level EventsLevel, text string) {
	return EventsState(s, r.conf.NoEvents)
}

// EventsState judges the events of a worker's cache, and says in words what is the matter. noEvents says
// that the router expects events of no worker.
func EventsState(s *WorkerState, noEvents bool) (level EventsLevel, text string) {
	switch s.KVEvents {
	case indexer.StateSummary:
		return EventsOK, "the group sends summaries of its cache"
	case indexer.StateOK:
		return EventsOK, "its events arrive completely"
	case indexer.StatePartial:
		return EventsFault, "the first events are missing, so part of its cache is not known"
	case indexer.StateSuspect:
		return EventsFault, "events were lost, so its cache may differ from what kvroute knows"
	case indexer.StateNone: // below
	case indexer.StateMisfit:
		return EventsFault, "its block size does not fit that of the index, so kvroute cannot use its events: set block_size to that of the engine"
	}
	healthy := s.Health == Healthy.String() && !noEvents
	if healthy && s.Unheard() {
		return EventsFault, "no event has come, although it should send some: kvroute predicts its cache"
	}
	if healthy && s.KVEvents == indexer.StateNone && s.fromEngine() {
		return EventsFault, "kvroute is not connected to the source of its events, so its cache may differ from what kvroute knows"
	}
	if s.Group != "" {
		return EventsOff, "the group has sent no summary of its cache"
	}
	if !healthy && !noEvents && s.KVEvents == indexer.StateNone && s.fromEngine() {
		return EventsOff, "the worker is not healthy, and kvroute is not connected to the source of its events"
	}
	return EventsOff, "it sends no events: kvroute predicts its cache from the requests that it sends there"
}

// Unheard reports whether no event of a worker was ever heard, although it may publish some.
func (s *WorkerState) Unheard() bool {
	viaSidecar := s.Transport == "nats" && s.BlockSize > 0
	return s.KVEvents == indexer.StateNone && s.CachedBlocks == 0 && (s.NeverHeard || s.fromEngine() || viaSidecar)
}

// fromEngine reports whether kvroute reads the events from the engine itself.
func (s *WorkerState) fromEngine() bool { return s.Transport == "zmq" || s.Transport == "http_poll" }
