// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"errors"
	"iter"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// A router may route to router groups instead of workers. A group is a set of workers behind
// a router of its own, and one candidate of a pool ([WorkerInfo.Group]). The group's router
// makes a [Summary] of its load and its caches at an interval ([Router.Summarize],
// [Router.Checkpoints]). The upper router takes it ([Router.SetSummary]). Package replicas
// carries summaries.
//
// # Invariants
//
//   - The load of a group is the load of its latest summary by [Summary.Taken], plus its
//     slots taken here after that, minus its slots here that have ended after that. If the
//     summary is stale, the load is only the slots here.
//   - The overlap of a group is the larger one of its filter and the predictions of this
//     router.
//   - A group counts as a degraded worker while its summary is stale or missing, and while
//     all of its workers are busy. So a lack of summaries does not make groups unusable. A
//     group without workers is no candidate.
//   - A summary changes the inputs of costs, never slots.

// Summary is the load, and optionally the caches, of a group's workers that serve one base
// model with blocks of one size. Loads are sums over [Summary.Members].
type Summary struct {
	Model     string
	BlockSize int
	// Taken is the time of the summary by the clock of the router that takes it. Interval is
	// the time between two summaries, default 1 s. A summary is stale after three intervals.
	Taken    time.Time
	Interval time.Duration

	Healthy        int // healthy workers, by rank
	Degraded       int // degraded workers
	Busy           int // workers above a threshold: healthy ones, or degraded ones if there are no healthy ones
	PendTokens     int // prefill tokens of requests before their first token
	ActiveRequests int
	ActiveBlocks   int
	TotalBlocks    int // capacity; 0 if it is not known of all workers
	// Queued is the number of requests that wait for a worker, QueuedTokens their prefill
	// tokens.
	Queued, QueuedTokens int
	// HeldTokens are the tokens that requests hold, each with all of its tokens; 0 if there are requests
	// and the group's router does not report it.
	HeldTokens int

	// Silent says that no worker publishes events of its cache.
	Silent bool
	// Filter, if not nil, replaces the group's filter: checkpoints every Stride blocks of
	// the workers' caches. The router owns it; the caller must not change it. Added are
	// sequence hashes of further checkpoints, to be added to the filter.
	Filter *indexer.Filter
	Stride int
	Added  []uint64
}

// candidates is the number of workers that may take requests, busy or not.
func (s *Summary) candidates() int {
	if s.Healthy > 0 {
		return s.Healthy
	}
	return max(0, s.Degraded)
}

// Members is the number of workers that the load is the sum of: those that may take
// requests and are not busy, or all of them if all are busy.
func (s *Summary) Members() int {
	n := s.candidates()
	if s.Busy < n {
		n -= max(0, s.Busy)
	}
	return n
}

// staleAfter is the number of intervals after which a summary is stale.
const staleAfter = 3

// GroupTransit is the time from the decision for a group until the group's router has booked
// the request. The summary of a group does not contain requests that were sent so shortly
// before.
const GroupTransit = 20 * time.Millisecond

// group is the latest report of a router group. It is replaced, never changed.
type group struct {
	load     Summary // without the filter
	filtered bool    // there is a filter
}

// members returns the number of workers that a candidate stands for.
func (e *entry) members() int {
	if e.group != nil {
		return e.group.load.Members()
	}
	return e.properties.Members
}

// stale says whether the summary is too old or missing.
func (g *group) stale(now time.Time) bool {
	return g == nil || now.Sub(g.load.Taken) > staleAfter*g.load.Interval
}

// groupHealth is [ranks.healthNow] for a healthy group.
func (e *entry) groupHealth(now time.Time) (Health, Exclusion) {
	if e.group.stale(now) {
		return Degraded, ExcludedStale
	}
	l := &e.group.load
	switch n := l.candidates(); {
	case n == 0:
		return Unhealthy, ExcludedHealth
	case l.Busy >= n:
		return Degraded, ExcludedBusy
	case l.Healthy == 0:
		return Degraded, ExcludedHealth
	}
	return Healthy, ""
}

// age returns the age of a group's summary; below 0 without a summary.
func (g *group) age(now time.Time) time.Duration {
	if g == nil {
		return -1
	}
	return max(0, now.Sub(g.load.Taken))
}

// groupLoad fills in the load of a group.
func (e *entry) groupLoad(now time.Time, booked *slots.Table, ord, blockSize int, in *scorer.Input) {
	g := e.group
	if g == nil {
		return
	}
	l := &g.load
	in.Members = max(1, l.Members())
	if g.stale(now) {
		return
	}
	in.ActiveRequests, in.PendTokens = l.ActiveRequests+l.Queued, l.PendTokens+l.QueuedTokens
	in.DecodeTokens, in.WaitingTokens = cmp.Or(l.HeldTokens, l.ActiveBlocks*blockSize), 0
	if l.Busy == 0 { // else ended requests may have been on busy workers, which the report does not contain
		over := booked.Over(ord)
		in.ActiveRequests, in.PendTokens = max(0, in.ActiveRequests-over.Requests), max(0, in.PendTokens-over.PendTokens)
		in.DecodeTokens = max(0, in.DecodeTokens-over.HeldTokens)
	}
	since := booked.Unreported(ord)
	in.ActiveRequests += since.Requests
	in.PendTokens += since.PendTokens
	in.DecodeTokens += since.HeldTokens
	in.ActiveBlocks = l.ActiveBlocks
	if l.TotalBlocks > 0 {
		in.KVUse = min(1, float64(in.ActiveBlocks)/float64(l.TotalBlocks))
	}
}

// groupState fills in the state of a group with this load.
func (e *entry) groupState(now time.Time, in *scorer.Input, s *WorkerState) {
	s.PendTokens, s.ActiveRequests, s.ActiveBlocks = in.PendTokens, in.ActiveRequests, in.ActiveBlocks
	s.KVEvents = indexer.StateNone
	g := e.group
	if g == nil {
		s.Summary = &SummaryState{Age: -1, Stale: true}
		return
	}
	l := &g.load
	s.TotalKVBlocks = l.TotalBlocks
	s.Summary = &SummaryState{
		Members: l.Members(), Busy: l.Busy, Queued: l.Queued,
		Age: g.age(now), Stale: g.stale(now), Filtered: g.filtered,
	}
	if g.filtered {
		s.KVEvents = indexer.StateSummary
	}
}

// shownHealth is the health in the API and in metrics.
func (r *ranks) shownHealth(now time.Time, e *entry) Health {
	if e.info.Group == "" {
		return e.info.Health
	}
	h, why := r.healthNow(now, e)
	if why == ExcludedFailing || why == ExcludedBusy {
		return Healthy // other fields show the reason
	}
	return h
}

// SetSummary takes the summary of a router group. It returns false, and does nothing, if
// there is no such group; see [WorkerInfo.Group]. A summary that is older than the last one
// changes no load. Summaries of one group must come one at a time.
func (r *Router) SetSummary(id uint64, s Summary) (known bool) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[id]
	if p == nil {
		return false
	}
	now := r.conf.Now()
	if s.Interval <= 0 {
		s.Interval = time.Second
	}
	s.Taken = earlier(s.Taken, now)
	filter, stride, added := s.Filter, s.Stride, s.Added
	s.Filter, s.Added = nil, nil
	ord := 0
	p.update(now, func(c *core) {
		if ord, known = c.find(Worker{ID: id}); !known || c.entries[ord].info.Group == "" {
			known = false
			return
		}
		e := &c.entries[ord]
		g := group{load: s, filtered: filter != nil && stride > 0}
		if was := e.group; was != nil {
			g.filtered = g.filtered || was.filtered && !s.Silent
			if s.Taken.Before(was.load.Taken) {
				g.load = was.load
			}
		}
		e.group = &g
		c.slots.Reported(ord, g.load.Taken)
	})
	if !known || !p.known.used {
		return known
	}
	p.known.filters.change(ord, func(f *groupFilter) {
		switch {
		case s.Silent:
			f.Filter = nil
		case filter != nil && stride > 0:
			*f = groupFilter{filter, stride}
		}
		if f.Filter != nil {
			for _, h := range added {
				f.Add(h)
			}
		}
	})
	return known
}

// ErrNoModel says that a model is unknown.
var ErrNoModel = errors.New("router: no worker serves the model")

// Summarize returns the load of a base model's workers, for each block size, without
// their caches; see [Router.Checkpoints]. It costs as much as a decision.
func (r *Router) Summarize(model string) (all []Summary) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	t, known := (*r.names.Load())[model]
	if !known {
		return nil
	}
	for _, p := range t.pools {
		all = append(all, p.summarize(r.conf.Now()))
	}
	return all
}

func (p *pool) summarize(now time.Time) (s Summary) {
	p.read(func(c *core) { s = c.summarize(now) })
	s.Model, s.BlockSize = p.model, p.blockSize
	return s
}

// Checkpoints yields the sequence hashes of the blocks that workers of a base model hold by
// their events, at depths (counted from 1) that are divisible by stride: each once. Its
// errors and its costs are those of [indexer.Index.Checkpoints]; [ErrNoModel] if no worker
// has the model and blocks of this size.
func (r *Router) Checkpoints(model string, blockSize, stride int) iter.Seq2[uint64, error] {
	return func(yield func(uint64, error) bool) {
		r.fleet.RLock()
		t := (*r.names.Load())[model]
		at := slices.IndexFunc(t.pools, func(p *pool) bool { return p.blockSize == blockSize })
		r.fleet.RUnlock()
		if at < 0 {
			yield(0, ErrNoModel)
			return
		}
		t.pools[at].known.index().Checkpoints(stride)(yield)
	}
}
