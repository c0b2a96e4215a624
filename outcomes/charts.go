// SPDX-License-Identifier: Apache-2.0

package outcomes

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Charts are what each worker did in the last 10 minutes.
type Charts struct {
	StepMS  int64            `json:"step_ms"`
	EndMS   int64            `json:"end_ms"`  // Unix time of the last points; 0 without one
	Workers map[string]Chart `json:"workers"` // by worker_id/dp_rank/model
}

// Chart is what a worker did: lists of equal length, oldest first.
type Chart struct {
	TTFT   Points `json:"ttft_ms"`         // mean time to the first token of the requests that ended within the step
	Active Points `json:"active_requests"` // at the end of the step
	KVUse  Points `json:"kv_use"`          // share of the cache that requests in flight use, at the end of the step
}

// Points are numbers in JSON; NaN is null.
type Points []float32

// MarshalJSON writes the points.
func (p Points) MarshalJSON() ([]byte, error) {
	text := []byte{'['}
	for i, x := range p {
		if i > 0 {
			text = append(text, ',')
		}
		if x != x {
			text = append(text, "null"...)
		} else {
			text = strconv.AppendFloat(text, float64(x), 'g', 4, 32)
		}
	}
	return append(text, ']'), nil
}

func (p Points) with(x float64) Points {
	if len(p) == chartPoints {
		p = p[1:]
	}
	return append(slices.Clip(p), float32(x)) // in a new list: readers have the old one
}

const (
	chartStep   = 20 * time.Second
	chartPoints = 30
)

// chartKey names a worker of a model.
type chartKey struct {
	router.Worker
	model string
}

// chart is a Chart with what it is made of.
type chart struct {
	Chart
	ttft  float64 // mean of the last step with a first token, in ms; 0 = none
	sum   float64 // of the current step
	count int
}

// charts makes Charts.
type charts struct {
	end   time.Time // of the current step
	byKey map[chartKey]*chart
	shown Charts
}

// noteTTFT adds a time to the first token to the worker that computed the prompt.
func (c *charts) noteTTFT(d *router.Decision, ms float64) {
	if x := c.byKey[chartKey{d.Computing().Worker, d.Model}]; x != nil {
		n := weight(d)
		x.sum += ms * float64(n)
		x.count += n
	}
}

// ObserveWorkers adds the load of the workers to their charts, every 20 s. It is to be called at least as often, with
// all workers: others are forgotten. times has the mean time to the first token of each worker that has one, in ms and
// in the order of the workers; 0 for the others.
func (r *Recorder) ObserveWorkers(workers []router.WorkerState) (times []float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, now := &r.charts, r.now()
	step := !now.Before(c.end)
	known := make(map[chartKey]*chart, len(workers))
	shown := Charts{chartStep.Milliseconds(), now.UnixMilli(), make(map[string]Chart, len(workers))}
	for i := range workers {
		w := &workers[i]
		key := chartKey{w.Worker, w.Model}
		x := c.byKey[key]
		if x == nil {
			x = new(chart)
		}
		known[key] = x
		if step {
			x.step(w)
			shown.Workers[fmt.Sprintf("%d/%d/%s", w.ID, w.DPRank, w.Model)] = x.Chart
		}
		times = append(times, x.ttft)
	}
	c.byKey = known
	if step {
		c.end, c.shown = now.Truncate(chartStep).Add(chartStep), shown
	}
	return times
}

func (x *chart) step(w *router.WorkerState) {
	ttft, use := math.NaN(), math.NaN()
	if x.count > 0 {
		ttft = x.sum / float64(x.count)
		x.ttft = ttft
	}
	if w.TotalKVBlocks > 0 {
		use = float64(w.ActiveBlocks) / float64(w.TotalKVBlocks)
	}
	x.sum, x.count = 0, 0
	x.TTFT, x.Active, x.KVUse = x.TTFT.with(ttft), x.Active.with(float64(w.ActiveRequests)), x.KVUse.with(use)
}

// Charts returns the charts of the workers by the last call of ObserveWorkers.
func (r *Recorder) Charts() Charts {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.charts.shown
	c.Workers = maps.Clone(c.Workers)
	return c
}
