// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// This file and sentence.go have all texts that explain a decision or a worker to people. The API sends
// them, so that `kvroute explain`, `kvroute top`, `kvroute doctor`, the dashboard and the log show the same.
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
		text += fmt.Sprintf(" (group of %d workers without a summary)", c.Members)
	default:
		age := c.SummaryAge.Round(time.Millisecond)
		text += fmt.Sprintf(" (group of %d workers, summary %v old: load is the sum, cost has the mean)", c.Members, age)
	}
	if f := c.Foreign; f != (Foreign{}) {
		text += fmt.Sprintf(" (the load includes what kvroute did not send: %s, %d of them waiting with about %s, %s)",
			plural(f.Requests, "request"), f.Waiting, plural(f.Tokens, "token"), plural(f.Blocks, "block"))
	}
	return strings.TrimPrefix(text, " ")
}

// FirstTokenText says how kvroute noticed the first token. It is empty until then.
func (d *Decision) FirstTokenText() string {
	switch d.FirstTokenBy {
	case "":
		return ""
	case SignTold:
		return "reported by the caller of the API"
	case SignObserver:
		return "seen in the response"
	case SignHeaders:
		return "reported by the headers of the response"
	case SignOrder:
		return "inferred: a later request had its first token"
	case SignRate:
		return "inferred from the worker's rate"
	case SignEnd:
		if d.FirstToken.IsZero() {
			return "not seen before the end of the response"
		}
		return "at the latest: the response was not streamed"
	}
	return "reported by " + string(d.FirstTokenBy)
}

// ModeText is the mode with its inputs.
func (d *Decision) ModeText() string {
	switch d.Mode {
	case RoundRobin:
		return fmt.Sprintf("%s, turn %d", d.Mode, d.Turn)
	case DeviceAware:
		return fmt.Sprintf("%s, ratio %s, random number %s", d.Mode, exact(d.DeviceRatio), exact(d.Draw))
	case Direct, LeastLoaded, KV, Random, PowerOfTwo:
	}
	return fmt.Sprintf("%s, random number %s", d.Mode, exact(d.Draw))
}

// setting is a setting of the cost by its name in JSON.
type setting struct {
	name  string
	value float64
}

// usedSettings are the settings that change the costs of a policy.
func usedSettings(s *scorer.Settings) []setting {
	host, disk := setting{"host_cache_weight", s.HostWeight}, setting{"disk_cache_weight", s.DiskWeight}
	decode, read := setting{"decode_weight", s.DecodeWeight}, setting{"kv_read", s.KVRead}
	alpha, credit := setting{"alpha", s.Alpha}, setting{"overlap_score_credit", s.OverlapCredit}
	request := setting{"active_request_weight", s.RequestWeight}
	floor, token := setting{"engine floor", s.Engine.Floor}, setting{"engine token", s.Engine.Token}
	switch {
	case s.Policy == scorer.PredictedTTFT:
		return []setting{
			alpha, decode, read, host, disk, floor, token,
			{"engine attention", s.Engine.Attention},
			{"engine kv_token", s.Engine.KVToken},
			{"engine chunk", s.Engine.Chunk},
		}
	case s.Policy == scorer.Weighted:
		return []setting{
			{"max_batch", s.MaxBatch},
			{"weighted_overlap", s.WeightedOverlap},
			{"weighted_requests", s.WeightedRequests},
			{"weighted_kv_use", s.WeightedKVUse},
			decode, read,
		}
	case s.Policy == scorer.Tokens && s.TrackPrefill:
		return []setting{alpha, {"attention", s.Attention}, decode, read, host, disk, floor, token}
	case s.Policy == scorer.Tokens:
		return []setting{decode, credit}
	case s.Policy == scorer.DynamoNewer && s.TrackPrefill:
		return []setting{
			credit, {"overlap_score_credit_decay", s.CreditDecay}, {"prefill_load_scale", s.PrefillScale}, request, host, disk,
		}
	case s.Policy == scorer.DynamoNewer:
		return []setting{credit, request, host, disk}
	case s.TrackPrefill:
		return []setting{{"overlap_score_weight", s.OverlapWeight}}
	}
	return nil
}

// SettingsText lists the settings that the costs of the decision depend on. It is empty if no costs were
// compared.
func (d *Decision) SettingsText() string {
	s := d.Settings
	if d.Policy == "" || s == nil {
		return ""
	}
	parts := []string{"cost " + string(s.Policy)}
	for _, one := range append(usedSettings(s), setting{"router_temperature", s.Temperature}) {
		parts = append(parts, one.name+" "+exact(one.value))
	}
	if !s.TrackPrefill {
		parts = append(parts, "prefill is not tracked")
	}
	if !s.AssumeKVReuse {
		parts = append(parts, "no reuse is assumed")
	}
	return strings.Join(parts, ", ")
}

// exact prints a number without rounding: costs can be computed again from it.
func exact(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

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

// EventsState judges the events of a worker's cache, and says in words what is the matter.
func (r *Router) EventsState(s *WorkerState) (level EventsLevel, text string) {
	switch s.KVEvents {
	case "summary":
		return EventsOK, "the group sends summaries of its cache"
	case "ok":
		return EventsOK, "its events arrive completely"
	case "partial":
		return EventsFault, "the first events are missing, so part of its cache is not known"
	case "suspect":
		return EventsFault, "events were lost, so its cache may differ from what kvroute knows"
	case "block_size_mismatch":
		return EventsFault, "its block size does not fit, so it sends no events: set block_size to that of the engine"
	}
	if s.Unheard() && s.Health == Healthy.String() && !r.conf.NoEvents {
		return EventsFault, "no event has come, although it should send some: kvroute predicts its cache"
	}
	if s.Group != "" {
		return EventsOff, "the group has sent no summary of its cache"
	}
	return EventsOff, "it sends no events: kvroute predicts its cache from the requests that it sends there"
}

// Unheard reports whether no event of a worker was ever heard, although it may publish some.
func (s *WorkerState) Unheard() bool {
	fromEngine := s.Transport == "zmq" || s.Transport == "http_poll"
	viaSidecar := s.Transport == "nats" && s.BlockSize > 0
	return s.KVEvents == "none" && s.CachedBlocks == 0 && (s.NeverHeard || fromEngine || viaSidecar)
}
