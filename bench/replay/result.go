// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// Result has the measures of a simulation. Times are in seconds, from when a request was
// due.
type Result struct {
	Trace    string  `json:"trace"`
	Rule     string  `json:"rule"`
	Requests int     `json:"requests"`
	Load     float64 `json:"load"` // factor by which the trace was played faster
	Seed     uint64  `json:"seed"`
	Retried  int     `json:"retried,omitempty"` // requests whose worker went away
	Foreign  int     `json:"foreign,omitempty"` // requests that no router sent

	TTFT bench.Quantiles `json:"ttft_s"`
	// Wait is the part of TTFT before an engine began with the prompt, in the queues of router
	// and engine; the rest of it is computing.
	Wait bench.Quantiles `json:"wait_s"`
	TPOT bench.Quantiles `json:"tpot_s"` // time between two tokens of one response
	E2E  bench.Quantiles `json:"e2e_s"`

	// Goodput is the number of requests a second with a TTFT of at most 2 s and
	// a TPOT of at most 50 ms.
	Goodput float64 `json:"goodput_rps"`
	Span    float64 `json:"span_s"` // from the first request to the last end

	HitRate float64 `json:"token_hit_rate"` // cached share of prompt tokens
	// LRUShare is HitRate divided by that of one LRU cache of the summed size; open loop only,
	// and only if no request was refused.
	LRUShare float64 `json:"lru_share,omitempty"`
	// Imbalance is the largest of the workers' computed prompt tokens divided by
	// their mean, with prefill workers only theirs.
	Imbalance float64 `json:"imbalance"`
	// Busiest is the largest of the workers' running requests, as means over time, divided by their
	// mean over the workers, with prefill workers only those that decode. A request runs from when an
	// engine begins with it.
	Busiest float64 `json:"busiest_running"`
	// Promised is the mean of the cached tokens that a decision expected minus
	// those there were, Misjudged the mean of the differences' sizes.
	Promised  float64 `json:"promised_minus_real_tokens"`
	Misjudged float64 `json:"misjudged_tokens"`
	// Hybrid has the sums of hybrid models; nil for other models.
	Hybrid *hybridResult `json:"hybrid,omitempty"`

	// Legs is the number of requests with a prefill leg. Transfer is the time until their decode
	// worker has the blocks: waiting for the link, and the transfer itself.
	Legs     int             `json:"prefill_legs,omitempty"`
	Transfer bench.Quantiles `json:"transfer_s,omitzero"`
	// Pulls is the number of requests whose worker copied blocks. Pull is the time from the arrival of the request at its
	// worker to the end of the copy.
	Pulls int             `json:"pulls,omitempty"`
	Pull  bench.Quantiles `json:"pull_s,omitzero"`

	Queue *queueResult `json:"queue,omitempty"` // nil without a queue

	Timing *Timing `json:"timing,omitempty"`
}

// Timing is the cost of the simulation on the real clock.
type Timing struct {
	DecisionP50 time.Duration `json:"decision_p50_ns"`
	DecisionP99 time.Duration `json:"decision_p99_ns"`
	Rate        float64       `json:"requests_per_s"` // simulated
	Bytes       float64       `json:"bytes_per_request"`
}

// timing measures a part of the simulation, in which the routers' decisions are noted.
func (s *sim) timing(play func()) *Timing {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	play()
	taken := time.Since(start)
	if !s.Timing {
		return nil
	}
	runtime.ReadMemStats(&after)
	slices.Sort(s.decisions)
	n, requests := len(s.decisions), float64(len(s.reqs))
	return &Timing{
		DecisionP50: s.decisions[n/2], DecisionP99: s.decisions[n*99/100],
		Rate: requests / taken.Seconds(), Bytes: float64(after.TotalAlloc-before.TotalAlloc) / requests,
	}
}

const (
	goodTTFT = 2.   // s
	goodTPOT = .050 // s
)

func (s *sim) result() *Result {
	r := &Result{Trace: s.Trace.Name, Rule: s.Rule.Name, Requests: len(s.reqs), Load: s.Speedup, Seed: s.Seed, Retried: s.retried}
	r.Hybrid = s.hybridResult()
	var ttft, waits, tpot, e2e []float64
	var tokens, hit, promised, misjudged, routed float64
	begin, last := int64(math.MaxInt64), int64(0)
	good, refused := 0, 0
	for i := range s.reqs {
		req, state := &s.reqs[i], &s.states[i]
		if req.Warm || state.end == 0 && !state.refused {
			r.Requests-- // fills caches, or the measurement ended before it
			continue
		}
		a, f, e := state.due, state.first, state.end
		begin, last = min(begin, a), max(last, e)
		if state.refused {
			refused++
			continue
		}
		wait, gap := float64(f-a)/1e9, 0.
		ttft = append(ttft, wait)
		waits = append(waits, float64(state.begun-a)/1e9)
		e2e = append(e2e, float64(e-a)/1e9)
		if req.Output > 1 {
			gap = float64(e-f) / 1e9 / float64(req.Output-1)
			tpot = append(tpot, gap)
		}
		if wait <= goodTTFT && gap <= goodTPOT {
			good++
		}
		tokens += float64(req.Input)
		hit += float64(state.cached)
		if state.router < 0 {
			continue // kvroute made no decision
		}
		routed++
		r.Hybrid.add(req, state)
		d := float64(state.promised - state.cached)
		promised += d
		misjudged += math.Abs(d)
	}
	n := max(1, routed)
	r.Queue = s.queueResult()
	r.Foreign = r.Requests - int(routed) - refused
	r.TTFT, r.Wait, r.TPOT, r.E2E = bench.NewQuantiles(ttft), bench.NewQuantiles(waits), bench.NewQuantiles(tpot), bench.NewQuantiles(e2e)
	r.Span = float64(last-begin) / 1e9
	r.Goodput = float64(good) / r.Span
	r.HitRate = hit / tokens
	r.Promised, r.Misjudged = promised/n, misjudged/n
	if s.loops == nil && refused == 0 {
		h := s.Trace.HitRate(1, s.KVBlocks*s.Workers)
		if h.HitTokens > 0 {
			r.LRUShare = r.HitRate / (float64(h.HitTokens) / float64(h.Tokens))
		}
	}
	var most, sum int64
	able := cmp.Or(s.PrefillWorkers, s.Workers)
	for _, e := range s.engines[:able] {
		most, sum = max(most, e.computed), sum+e.computed
	}
	r.Imbalance = float64(most) * float64(able) / float64(max(1, sum))
	r.Busiest = s.busiest()
	r.Pulls, r.Pull = len(s.pulls), bench.NewQuantiles(s.pulls)
	r.Legs, r.Transfer = len(s.transfers), bench.NewQuantiles(s.transfers)
	return r
}

// busiest is [Result.Busiest].
func (s *sim) busiest() float64 {
	running := make([]float64, s.Workers) // sums of the times
	all := 0.
	for i := range s.states {
		state := &s.states[i]
		if state.end == 0 || state.refused {
			continue
		}
		running[state.worker] += float64(state.end - state.begun)
		all += float64(state.end - state.begun)
	}
	return slices.Max(running) * float64(s.Workers-s.PrefillWorkers) / max(1, all)
}

// writeJSON writes results as a JSON array.
func writeJSON(w io.Writer, results []*Result) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(results)
}

// writeTable writes results as a table, one a line. The cost of decisions is at the end of
// a line if it was measured.
func writeTable(w io.Writer, results []*Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	timed := slices.ContainsFunc(results, func(r *Result) bool { return r.Timing != nil })
	split := slices.ContainsFunc(results, func(r *Result) bool { return r.Legs > 0 })
	fmt.Fprint(t, "rule\tload\tseed\tTTFT mean\tp50\tp90\tp99 s\tTPOT mean\tp99 ms\tE2E mean\tp99 s\tgoodput/s\thits\tof LRU\timbalance\tbusiest\tmisjudged\t")
	if split {
		fmt.Fprint(t, "legs\ttransfer ms\t")
	}
	pulled := slices.ContainsFunc(results, func(r *Result) bool { return r.Pulls > 0 })
	if pulled {
		fmt.Fprint(t, "pulls\tpull ms\t")
	}
	queued := slices.ContainsFunc(results, func(r *Result) bool { return r.Queue != nil })
	classes := slices.ContainsFunc(results, func(r *Result) bool { return r.Queue != nil && r.Queue.Prioritised != nil })
	if queued {
		fmt.Fprint(t, "waited\trefused\tqueue mean\tp99 s\t")
	}
	if classes {
		fmt.Fprint(t, "priority TTFT mean\tp99\tE2E mean s\tothers TTFT mean\tp99\tE2E mean s\t")
	}
	hybrid := slices.ContainsFunc(results, func(r *Result) bool { return r.Hybrid != nil })
	if hybrid {
		fmt.Fprint(t, "promised\thit tokens\tof second sharers\t")
	}
	if timed {
		fmt.Fprint(t, "decision p50\tp99 µs\trequests/s\tB/request\t")
	}
	fmt.Fprintln(t)
	for _, r := range results {
		share := "-" // of a closed loop, whose order depends on the rule
		if r.LRUShare > 0 {
			share = fmt.Sprintf("%.2f", r.LRUShare)
		}
		fmt.Fprintf(t, "%s\t%g\t%d\t%.3f\t%.3f\t%.2f\t%.2f\t%.1f\t%.1f\t%.2f\t%.1f\t%.2f\t%.3f\t%s\t%.3f\t%.3f\t%.0f\t", r.Rule, r.Load, r.Seed,
			r.TTFT.Mean, r.TTFT.P50, r.TTFT.P90, r.TTFT.P99, r.TPOT.Mean*1e3, r.TPOT.P99*1e3, r.E2E.Mean, r.E2E.P99,
			r.Goodput, r.HitRate, share, r.Imbalance, r.Busiest, r.Misjudged)
		if split {
			fmt.Fprintf(t, "%.3f\t%.0f\t", float64(r.Legs)/float64(r.Requests), r.Transfer.Mean*1e3)
		}
		if pulled {
			fmt.Fprintf(t, "%.3f\t%.0f\t", float64(r.Pulls)/float64(r.Requests), r.Pull.Mean*1e3)
		}
		if r.Queue != nil {
			r.Queue.writeCells(t, classes)
		}
		if h := r.Hybrid; h != nil {
			fmt.Fprintf(t, "%d\t%d\t%d\t", h.Promised, h.Hit, h.SecondSharers)
		}
		if c := r.Timing; c != nil {
			fmt.Fprintf(t, "%.1f\t%.1f\t%.0f\t%.0f\t", float64(c.DecisionP50)/1e3, float64(c.DecisionP99)/1e3, c.Rate, c.Bytes)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}
