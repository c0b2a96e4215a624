// SPDX-License-Identifier: Apache-2.0

package outcomes

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/kvroute/kvroute/router"
)

// Holdout compares the times to first tokens of both sides of [router.Config.HoldoutShare], since the start.
type Holdout struct {
	Share      float64      `json:"share"`
	Confidence float64      `json:"confidence"` // of the intervals
	Models     []Comparison `json:"models"`     // by name
}

// Comparison compares the sides of a model.
type Comparison struct {
	Model      string `json:"model"`
	Routed     Times  `json:"routed"`
	RoundRobin Times  `json:"round_robin"`
	// Difference is the mean of round robin less the mean of the routed side in ms, with the limits of its interval. It
	// is nil while Why says what is missing.
	Difference *float64 `json:"difference_ms,omitempty"`
	Low        *float64 `json:"low_ms,omitempty"`
	High       *float64 `json:"high_ms,omitempty"`
	Why        string   `json:"why,omitempty"`
	Buckets    []Bucket `json:"buckets"` // from the first to the last one with a request
}

// Times are the times to first tokens of a side in ms, of the requests whose first token was seen.
type Times struct {
	Requests int     `json:"requests"`
	Mean     float64 `json:"mean_ms"`
	P50      float64 `json:"p50_ms"` // exact to 2.5 %, as the other percentiles
	P90      float64 `json:"p90_ms"`
	P99      float64 `json:"p99_ms"`
}

// Bucket has the number of requests of each side with a time to the first token within its limits.
type Bucket struct {
	From       float64 `json:"from_ms"`
	To         float64 `json:"to_ms"`
	Routed     int     `json:"routed"`
	RoundRobin int     `json:"round_robin"`
}

const (
	// shards is the number of groups of conversations of a side. The requests of a conversation depend on each other:
	// the variance of a mean follows from the differences between groups, not between requests.
	shards = 32
	// leastShards and leastRequests are the groups with a request, and the requests, that each side needs for an
	// interval.
	leastShards, leastRequests = 8, 30
	// confidence is that of the interval, and normal its quantile of the normal distribution.
	confidence, normal = .95, 1.959963984540054
	// mostCompared limits the models with a comparison.
	mostCompared = 64
)

// side has the times of one side of a model.
type side struct {
	histogram
	shards [shards]struct {
		n   int
		sum float64 // ms
	}
}

func (s *side) add(conversation uint64, ttft float64) {
	s.histogram.add(ttft, 1)
	at := &s.shards[conversation*0x9e3779b97f4a7c15>>59]
	at.n++
	at.sum += ttft
}

func (s *side) times() Times {
	return Times{s.n, s.mean(), s.percentile(.5), s.percentile(.9), s.percentile(.99)}
}

// variance returns the variance of the mean by the jackknife over the groups of conversations, and the number of groups
// with a request. A side with fewer than two such groups has no variance.
func (s *side) variance() (v float64, groups int) {
	var without []float64 // the means without one of the groups
	mean := 0.
	for i := range s.shards {
		if at := &s.shards[i]; at.n > 0 && at.n < s.n {
			m := (s.sum - at.sum) / float64(s.n-at.n)
			without = append(without, m)
			mean += m
		}
	}
	groups = len(without)
	mean /= float64(max(1, groups))
	for _, m := range without {
		v += (m - mean) * (m - mean)
	}
	return v * float64(groups-1) / float64(max(1, groups)), groups
}

// sides are the sides of a model.
type sides struct{ routed, roundRobin side }

// compare makes the comparison of a model.
func (s *sides) compare(model string) Comparison {
	c := Comparison{Model: model, Routed: s.routed.times(), RoundRobin: s.roundRobin.times(), Buckets: s.buckets()}
	v, n := s.routed.variance()
	w, m := s.roundRobin.variance()
	switch {
	case min(s.routed.n, s.roundRobin.n) < leastRequests:
		c.Why = fmt.Sprintf("each side needs the first tokens of %d requests", leastRequests)
		return c
	case min(n, m) < leastShards:
		c.Why = fmt.Sprintf("each side needs more conversations: they are in %d and %d groups, of at least %d",
			n, m, leastShards)
		return c
	}
	difference := c.RoundRobin.Mean - c.Routed.Mean
	half := 0.
	if v+w > 0 {
		half = student((v+w)*(v+w)/(v*v/float64(n-1)+w*w/float64(m-1))) * math.Sqrt(v+w)
	}
	c.Difference, c.Low, c.High = new(difference), new(difference-half), new(difference+half)
	return c
}

// student returns the quantile of Student's t distribution for the confidence, by the expansion of Cornish and Fisher:
// exact to 0.1 % from 7 degrees of freedom on.
func student(freedom float64) float64 {
	z, z2 := normal, normal*normal
	return z + z*(z2+1)/(4*freedom) + z*(5*z2*z2+16*z2+3)/(96*freedom*freedom) +
		z*(3*z2*z2*z2+19*z2*z2+17*z2-15)/(384*freedom*freedom*freedom)
}

// buckets returns the times of both sides, without empty buckets at the ends.
func (s *sides) buckets() []Bucket {
	all := []Bucket{} // an empty list in JSON, not null
	last := 0
	for i := 0; i < bins; i += coarseBin {
		b := Bucket{From: binStart(i), To: binStart(i + coarseBin)}
		for j := i; j < i+coarseBin; j++ {
			b.Routed += int(s.routed.bins[j])
			b.RoundRobin += int(s.roundRobin.bins[j])
		}
		if b.Routed+b.RoundRobin == 0 && len(all) == 0 {
			continue
		}
		if all = append(all, b); b.Routed+b.RoundRobin > 0 {
			last = len(all)
		}
	}
	return all[:last]
}

// compareSides adds a time to the first token to the comparison of its model.
func (r *Recorder) compareSides(d *router.Decision, ttft float64) {
	s := r.sides[d.Model]
	if s == nil {
		if len(r.sides) >= mostCompared {
			return
		}
		s = new(sides)
		r.sides[d.Model] = s
	}
	if d.Holdout == router.SideRoundRobin {
		s.roundRobin.add(d.Conversation, ttft)
	} else {
		s.routed.add(d.Conversation, ttft)
	}
}

// Holdout returns the comparison for a share of requests that are routed round robin.
func (r *Recorder) Holdout(share float64) Holdout {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := Holdout{share, confidence, []Comparison{}}
	for _, model := range slices.Sorted(maps.Keys(r.sides)) {
		h.Models = append(h.Models, r.sides[model].compare(model))
	}
	return h
}
