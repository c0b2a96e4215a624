// SPDX-License-Identifier: Apache-2.0

package outcomes

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvroute/kvroute/router"
)

// Span is a length of history that is kept.
type Span struct {
	Name string        // in the API
	Step time.Duration // of one sample
	kept int           // samples
}

// Spans returns the spans: 10 minutes, an hour and a day.
func Spans() []Span {
	return []Span{{"10m", 2 * time.Second, 300}, {"1h", 15 * time.Second, 240}, {"24h", 5 * time.Minute, 288}}
}

// mostSeries limits the histories, so that all of them take less than 4 MB.
const mostSeries = 40

// Series names a history: of the requests for a model that went to a router group, or to workers if Group is empty. The
// zero value is that of all requests.
type Series struct {
	Model string `json:"model"`
	Group string `json:"group"`
}

// Totals are sums over requests that ended.
type Totals struct {
	Requests     int `json:"requests"`
	Failed       int `json:"failed"` // no worker served the request, or the status was 500 or above
	PromptTokens int `json:"prompt_tokens"`
	CachedTokens int `json:"cached_tokens"` // by kvroute's index, on the workers that computed the prompts
	// MeanCachedTokens is the mean over the candidates: what a random choice would have found, in
	// the caches as they are.
	MeanCachedTokens float64 `json:"mean_cached_tokens"`
}

// Sample has the requests that ended within a step.
type Sample struct {
	TimeMS int64 `json:"time_ms"` // end of the step, Unix time
	Totals
	// Saved is the time in ms that the workers needed less for the prompts than they would have needed with
	// MeanCachedTokens, at their measured marginal rates: a sum over the Rated requests, whose worker had one.
	Saved float64 `json:"saved_ms"`
	Rated int     `json:"rated"`
	// Mean and 90th percentile of the time to the first token in ms, of the requests whose first token
	// was seen; 0 without one. The percentile is exact to 2.5 %.
	TTFT    float64 `json:"ttft_ms"`
	TTFTP90 float64 `json:"ttft_p90_ms"`
}

// measures are what a recorder adds up of one request.
type measures struct {
	Totals
	saved float64 // ms
	rated int
	ttft  float64 // ms; below 0 if it was not seen
	ttfts int     // requests for which ttft stands
	// estimated says that kvroute looked for the prompt's blocks in the caches.
	estimated bool
	mode      router.Mode
}

// measured returns the measures of an outcome.
func measured(o *router.Outcome, ttft float64) measures {
	c := o.Computing()
	m := measures{ttft: ttft, ttfts: weight(&o.Decision), mode: c.Mode}
	m.Totals = Totals{1, 0, o.PromptTokens, c.CachedTokens, c.MeanCachedTokens}
	m.estimated = o.PromptTokens > 0 && (c.Settings == nil || c.Settings.UsesOverlap())
	if failed(o) {
		m.Failed = 1
	}
	if c.MarginalRate > 0 {
		m.saved, m.rated = (float64(c.CachedTokens)-c.MeanCachedTokens)/c.MarginalRate*1000, 1
	}
	return m
}

func (t *Totals) add(o *Totals) {
	t.Requests += o.Requests
	t.Failed += o.Failed
	t.PromptTokens += o.PromptTokens
	t.CachedTokens += o.CachedTokens
	t.MeanCachedTokens += o.MeanCachedTokens
}

// history has the samples of a span.
type history struct {
	Span
	current Sample
	ttfts   histogram // of current
	ended   []Sample  // oldest first, at most Span.kept
}

// roll ends the current sample if its time is over. Times without requests have no sample.
func (h *history) roll(now time.Time) {
	if now.UnixMilli() < h.current.TimeMS {
		return
	}
	if h.current.Requests > 0 {
		h.current.TTFT, h.current.TTFTP90 = h.ttfts.mean(), h.ttfts.percentile(.9)
		if len(h.ended) == h.kept {
			h.ended = h.ended[:copy(h.ended, h.ended[1:])]
		} else if len(h.ended) == cap(h.ended) {
			more := make([]Sample, len(h.ended), min(h.kept, len(h.ended)+h.kept/4))
			copy(more, h.ended)
			h.ended = more
		}
		h.ended = append(h.ended, h.current)
		h.ttfts = histogram{}
	}
	h.current = Sample{TimeMS: now.Truncate(h.Step).Add(h.Step).UnixMilli()}
}

func (h *history) add(now time.Time, m *measures) {
	h.roll(now)
	h.current.Totals.add(&m.Totals)
	h.current.Saved += m.saved
	h.current.Rated += m.rated
	if m.ttft >= 0 {
		h.ttfts.add(m.ttft, m.ttfts)
	}
}

// samples returns the ended samples that are not older than the span, oldest first.
func (h *history) samples(now time.Time) []Sample {
	h.roll(now)
	since := now.Add(-time.Duration(h.kept) * h.Step).UnixMilli()
	return slices.DeleteFunc(slices.Clone(h.ended), func(s Sample) bool { return s.TimeMS < since })
}

// series has the histories of one [Series], and its sums since the start.
type series struct {
	spans   []history
	last    time.Time // of a request
	benefit Benefit
}

func newSeries(of Series) *series {
	s := &series{benefit: Benefit{Series: of}}
	for _, span := range Spans() {
		s.spans = append(s.spans, history{Span: span})
	}
	return s
}

func (s *series) add(now time.Time, m *measures, held bool) {
	s.last = now
	for i := range s.spans {
		s.spans[i].add(now, m)
	}
	if !held {
		s.benefit.add(m)
	}
}

// seriesOf returns the series of a request; nil if there are too many. A series without a request for a day makes room.
func (r *Recorder) seriesOf(now time.Time, of Series) *series {
	s := r.series[of]
	if s != nil {
		return s
	}
	if len(r.series) >= mostSeries {
		maps.DeleteFunc(r.series, func(_ Series, s *series) bool { return now.Sub(s.last) > 24*time.Hour })
	}
	if len(r.series) < mostSeries {
		s = newSeries(of)
		r.series[of] = s
	}
	return s
}

// History returns the samples of the last 10 minutes of all requests, oldest first, without the current one.
func (r *Recorder) History() []Sample {
	samples, _ := r.Samples(Series{}, Spans()[0])
	return samples
}

// Samples returns the ended samples of a series within a span, oldest first. known is false if the series has no
// history. A step without an ended request has no sample.
func (r *Recorder) Samples(of Series, span Span) (samples []Sample, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.series[of]
	if of == (Series{}) {
		s = r.all
	}
	if s == nil {
		return nil, false
	}
	for i := range s.spans {
		if s.spans[i].Span == span {
			samples = s.spans[i].samples(r.now())
		}
	}
	return samples, true
}

// Series returns the names of the histories but that of all requests, in order.
func (r *Recorder) Series() []Series {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Keys(r.series), func(a, b Series) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group))
	})
}

// Benefit is an estimate of what routing by cache saves, since the start: for each request the tokens that are cached
// at the chosen worker less the mean over all candidates. Requests that are routed round robin by
// [router.Config.HoldoutShare] do not count.
type Benefit struct {
	Series
	Requests         int     `json:"requests"`
	PromptTokens     int     `json:"prompt_tokens"`
	CachedTokens     int     `json:"cached_tokens"`
	MeanCachedTokens float64 `json:"mean_cached_tokens"`
	// SavedTokens is nil if kvroute has not looked for any prompt in the caches. Why then says why.
	SavedTokens *float64 `json:"saved_tokens,omitempty"`
	// SavedShare is SavedTokens as a share of what a random candidate would have to compute; 0 if that is nothing.
	SavedShare *float64 `json:"saved_share,omitempty"`
	Why        string   `json:"why,omitempty"`
	Rated      int      `json:"rated_requests"` // whose worker had a measured prefill rate
	// SavedTime is the mean time in ms, over the rated requests, that the worker saved of its prefill.
	SavedTime float64 `json:"saved_ms,omitempty"`

	saved     float64 // sum in ms
	estimated bool
	mode      router.Mode // of the latest request
}

func (b *Benefit) add(m *measures) {
	b.Requests += m.Requests
	b.PromptTokens += m.PromptTokens
	b.CachedTokens += m.CachedTokens
	b.MeanCachedTokens += m.MeanCachedTokens
	b.Rated += m.rated
	b.saved += m.saved
	b.estimated = b.estimated || m.estimated
	b.mode = m.mode
}

// estimate sets the estimate, or why there is none.
func (b *Benefit) estimate() {
	switch {
	case b.estimated:
		saved, share := float64(b.CachedTokens)-b.MeanCachedTokens, 0.
		if computed := float64(b.PromptTokens) - b.MeanCachedTokens; computed > 0 {
			share = saved / computed
		}
		b.SavedTokens, b.SavedShare = &saved, &share
	case b.mode != router.KV && b.mode != "":
		b.Why = fmt.Sprintf("router mode %s does not look for cached prompts", b.mode)
	default:
		b.Why = "kvroute could read none of the prompts, or its costs do not count cached prompts"
	}
	if b.Rated > 0 && b.estimated {
		b.SavedTime = b.saved / float64(b.Rated)
	}
}

// Benefits returns the estimates, the series with most requests first.
func (r *Recorder) Benefits() []Benefit {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := []Benefit{} // an empty list in JSON, not null
	for _, s := range r.series {
		b := s.benefit
		if b.Requests == 0 {
			continue
		}
		b.estimate()
		all = append(all, b)
	}
	slices.SortFunc(all, func(a, b Benefit) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group))
	})
	return all
}
