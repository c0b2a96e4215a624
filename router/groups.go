// SPDX-License-Identifier: Apache-2.0

package router

import (
	"errors"
	"iter"
	"slices"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/scorer"
)

// A router may route to router groups instead of workers: each is a set of workers
// behind a router of its own, and stands in a pool as one candidate
// ([WorkerInfo.Group]). What it does and holds it says itself: the group's router makes
// a [Summary] now and then ([Router.Summarize], [Router.Checkpoints]), this one takes it
// ([Router.SetSummary]). The router does not carry summaries
// (package fleet does).
//
// # Invariants
//
//   - The load of a group is that of its latest summary by [Summary.Taken], its slots
//     taken here after that, less what of its slots here has ended after that. Where the
//     summary is stale it is the slots here, and nothing else: what was true long ago says
//     nothing of now.
//   - What a group holds of a prompt is the most of what its filter has and what this
//     router lately sent there.
//   - A group is a candidate of the second rank, as a degraded worker is, while its
//     summary is stale or missing, and while all of its workers are busy; one without
//     workers is none. So the lack of summaries takes nothing away that is there.
//   - A summary changes candidates' inputs, never slots.

// Summary is what a group of workers that serve one base model with blocks of one size
// does. Its counts of load are sums over [Summary.Members].
type Summary struct {
	Model     string
	BlockSize int
	// Taken is when, by the clock of the router that takes it; Interval how often there
	// is another one: it is stale after three. Default 1 s.
	Taken    time.Time
	Interval time.Duration

	Healthy        int // workers that are, by rank
	Degraded       int // workers that stand in for these
	Busy           int // of the healthy ones, or if there are none of the degraded: above a threshold
	PendTokens     int // prefill tokens of requests before their first token
	ActiveRequests int
	ActiveBlocks   int
	TotalBlocks    int // that they can hold; 0 if that is not known of all
	// Queued are the requests that wait for a worker, QueuedTokens what they have to
	// compute.
	Queued, QueuedTokens int

	// Silent says that no worker reports what it holds.
	Silent bool
	// Filter, if not nil, is what the workers hold from now on: checkpoints every Stride
	// blocks. It belongs to the router then; its maker must not add to it. Added are sequence
	// hashes of further checkpoints, to be added to the filter.
	Filter *indexer.Filter
	Stride int
	Added  []uint64
}

// candidates is how many workers may take requests, whether or not they are busy.
func (s *Summary) candidates() int {
	if s.Healthy > 0 {
		return s.Healthy
	}
	return max(0, s.Degraded)
}

// Members is how many workers the load is of: those that may take requests and are not
// busy, or all that are, if there are no others.
func (s *Summary) Members() int {
	n := s.candidates()
	if s.Busy < n {
		n -= max(0, s.Busy)
	}
	return n
}

// defaultInterval is that of a summary that does not say, staleAfter after how many a
// summary is stale.
const (
	defaultInterval = time.Second
	staleAfter      = 3
)

// GroupTransit is how long a request is under way to a group before its router has booked
// it: what was sent so shortly before a group said what it does is not in there.
const GroupTransit = 20 * time.Millisecond

// group is what the core knows of a router group. It is replaced, never changed.
type group struct {
	load     Summary // without what it holds
	filtered bool    // what it holds is known
}

// stale says whether a summary is too old to say something of now.
func (g *group) stale(now time.Time) bool {
	return g == nil || now.Sub(g.load.Taken) > staleAfter*g.load.Interval
}

// standing says how well a worker is for a decision, and why no better.
func (c *core) standing(now time.Time, e *entry) (Health, Exclusion) {
	switch {
	case e.info.Health != Healthy:
		return e.info.Health, ExcludedHealth
	case now.Before(e.avoid.until):
		return Degraded, ExcludedFailing
	case e.info.Group == "":
		return Healthy, ""
	case e.group.stale(now):
		return Degraded, ExcludedStale
	}
	switch n := e.group.load.candidates(); {
	case n == 0:
		return Unhealthy, ExcludedHealth
	case e.group.load.Busy >= n:
		return Degraded, ExcludedBusy
	case e.group.load.Healthy == 0:
		return Degraded, ExcludedHealth
	}
	return Healthy, ""
}

// silent says whether no events of a worker are expected.
func (c *core) silent(e *entry) bool {
	return c.conf.NoEvents || e.info.NoEvents || e.info.BlockSize == 0 || e.unheard()
}

// unheard says whether no event of a worker has come that may publish none.
func (e *entry) unheard() bool { return e.info.EventsUnsure && !e.hasEvents }

// unknown says whether neither events nor the filter of a group say what a worker holds.
func (c *core) unknown(e *entry) bool {
	return c.silent(e) && (e.group == nil || !e.group.filtered)
}

// age returns how old a group's summary is; below 0 there is none.
func (g *group) age(now time.Time) time.Duration {
	if g == nil {
		return -1
	}
	return max(0, now.Sub(g.load.Taken))
}

// groupLoad fills in what a group does.
func (c *core) groupLoad(now time.Time, ord int, in *scorer.Input) {
	g := c.entries[ord].group
	in.Members = max(1, c.entries[ord].info.Members)
	if g == nil {
		return
	}
	in.Members = max(1, g.load.Members())
	if g.stale(now) {
		return
	}
	reported := [2]int{g.load.ActiveRequests + g.load.Queued, g.load.PendTokens + g.load.QueuedTokens}
	if g.load.Busy == 0 { // or they may have been where the report does not count them
		requests, pend := c.slots.Over(ord)
		reported[0], reported[1] = max(0, reported[0]-requests), max(0, reported[1]-pend)
	}
	requests, pend := c.slots.Unreported(ord)
	in.ActiveRequests, in.PendTokens = reported[0]+requests, reported[1]+pend
	in.ActiveBlocks = g.load.ActiveBlocks
	if g.load.TotalBlocks > 0 {
		in.KVUse = min(1, float64(in.ActiveBlocks)/float64(g.load.TotalBlocks))
	}
}

// groupState fills in the state of a group.
func (c *core) groupState(now time.Time, ord int, s *WorkerState) {
	g := c.entries[ord].group
	var in scorer.Input
	c.load(now, ord, 0, &in)
	s.PendTokens, s.ActiveRequests, s.ActiveBlocks = in.PendTokens, in.ActiveRequests, in.ActiveBlocks
	s.KVEvents = "none"
	if g == nil {
		s.Summary = &SummaryState{Age: -1, Stale: true}
		return
	}
	s.TotalKVBlocks = g.load.TotalBlocks
	s.Summary = &SummaryState{
		Members: g.load.Members(), Busy: g.load.Busy, Queued: g.load.Queued,
		Age: g.age(now), Stale: g.stale(now), Filtered: g.filtered,
	}
	if g.filtered {
		s.KVEvents = "summary"
	}
}

// shownHealth is the health that people are shown.
func (c *core) shownHealth(now time.Time, e *entry) Health {
	if e.info.Group == "" {
		return e.info.Health
	}
	h, why := c.standing(now, e)
	if why == ExcludedFailing || why == ExcludedBusy {
		return Healthy // said elsewhere
	}
	return h
}

// SetSummary takes what a router group says. It returns false, and does nothing, if
// there is no such group; see [WorkerInfo.Group]. An older one than the last changes no
// load. Summaries of one group must come one at a time.
func (r *Router) SetSummary(id uint64, s Summary) (known bool) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[id]
	if p == nil {
		return false
	}
	now := r.conf.Now()
	if s.Interval <= 0 {
		s.Interval = defaultInterval
	}
	if s.Taken.After(now) {
		s.Taken = now
	}
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
	if !known || p.known == nil {
		return known
	}
	p.known.claims.change(ord, func(c *claim) {
		switch {
		case s.Silent:
			c.filter = nil
		case filter != nil && stride > 0:
			c.filter, c.stride = filter, stride
		}
		if c.filter != nil {
			for _, h := range added {
				c.filter.Add(h)
			}
		}
	})
	return known
}

// ErrNoModel says that nothing is known of a model.
var ErrNoModel = errors.New("router: no worker serves the model")

// Summarize returns what the workers of a base model do, for each size of their blocks:
// without what they hold; see [Router.Checkpoints]. It is as cheap as a decision.
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

func (p *pool) summarize(now time.Time) Summary {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.core.summarize(now)
	s.Model, s.BlockSize = p.model, p.blockSize
	return s
}

func (c *core) summarize(now time.Time) Summary {
	c.grow(now)
	var standing [Degraded + 1][]int // ordinals by health
	for _, ord := range c.order {
		e := &c.entries[ord]
		if e.info.Draining || e.info.Role == Prefill {
			continue
		}
		if h, _ := c.standing(now, e); h <= Degraded {
			standing[h] = append(standing[h], ord)
		}
	}
	members := standing[Healthy]
	if len(members) == 0 {
		members = standing[Degraded]
	}
	s := Summary{Taken: now, Healthy: len(standing[Healthy]), Degraded: len(standing[Degraded]), Silent: len(members) > 0}
	busy, loads := make([]bool, len(members)), make([]scorer.Input, len(members))
	for i, ord := range members {
		e, in := &c.entries[ord], &loads[i]
		c.load(now, ord, 0, in)
		if busy[i], _ = c.busy(now, e, in.ActiveBlocks, in.PendTokens, 1); busy[i] {
			s.Busy++
		}
		s.Silent = s.Silent && c.silent(e)
	}
	known := true
	for i, ord := range members {
		if busy[i] && s.Busy < len(members) {
			continue // requests go to the others
		}
		s.PendTokens += loads[i].PendTokens
		s.ActiveRequests += loads[i].ActiveRequests
		s.ActiveBlocks += loads[i].ActiveBlocks
		blocks := c.entries[ord].info.TotalKVBlocks
		s.TotalBlocks += blocks
		known = known && blocks > 0
	}
	if !known {
		s.TotalBlocks = 0
	}
	if c.queue != nil {
		s.Queued, s.QueuedTokens = c.queue.Len(), c.queue.Uncached()
	}
	return s
}

// Checkpoints yields the sequence hashes of the blocks that workers of a base model hold
// at depths, counted from 1, that are divisible by stride, as far as events tell: each
// once. Its errors, and what it costs others, are those of [indexer.Index.Checkpoints];
// [ErrNoModel] if no worker has the model and blocks of this size.
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
		if k := t.pools[at].known; k != nil {
			k.index().Checkpoints(stride)(yield)
		}
	}
}
