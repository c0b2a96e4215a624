// SPDX-License-Identifier: Apache-2.0

package router

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// core is the state machine of one pool: the workers that serve one base model
// with blocks of one size, the slots of the requests on them, the requests that
// wait for one, and the sessions bound to them. Inputs are worker changes,
// requests and what becomes of them, engines' reports and the passing of time,
// each with the time it happened; outputs are decisions and requests that need
// not wait any more. It has no clock, no lock, no goroutine and no randomness of
// its own, so the same inputs give the same decisions.
//
// Invariants:
//
//   - Every rank of every worker has one ordinal, and order holds the ordinals in
//     use, sorted by Worker.
//   - An ordinal is handed out again only after its slots and sessions are dropped
//     and, by the core's owner, its blocks purged from the index.
//   - changes grows with every ordinal handed out, so overlaps counted before a
//     change are not mistaken for those of an ordinal's new worker. It also grows with each
//     change of the workers, and when one is avoided: then plain does not hold.
//   - A waiting request is in the queue once, and leaves the queue once: admitted, with an
//     error, removed by its caller, or freed. waiting has the same requests.
//   - After each input, the first request of each lane must still wait, or its caller
//     has been asked to count the overlap again.
type core struct {
	// Set once.
	conf      *Config
	blockSize int

	// Replaced, never changed: kept decisions refer to them.
	settings   *scorer.Settings // conf.Scoring with the model's attention
	thresholds *scorer.Thresholds

	entries  []entry
	free     []int // ordinals to hand out again
	order    []int
	slots    scorer.Slots
	sessions sessions
	queue    *scorer.Queue[*waiter] // nil without a queue
	waiting  map[string]*waiter     // the requests in the queue, by id
	woken    []*waiter              // requests that left the queue, or must count their overlap again
	changes  uint64
	turn     uint64 // booked requests so far
	asked    uint64 // decisions without an id so far
	expired  int    // slots that were neither owned nor freed
	skipped  int    // thresholds that could not be applied
	splits   bool   // some workers take prefill legs, and some the decode of split requests
	plain    [prefillPart + 1]plain

	typical typical // average of this router's requests
	outputs outputs // of this router's requests
	// When the speeds were computed last, whether a registration changes them, and scratch memory.
	speedsAt  time.Time
	newSpeeds bool
	values    []float64
	grown     time.Time // when outputs were estimated last

	inferredAt time.Time // when first tokens were inferred last

	*workspace // of the request that is being decided
}

// entry is the state of the worker with an ordinal. What every decision reads comes first.
type entry struct {
	properties scorer.Input // of info; without load
	since      uint64       // value of core.changes when the worker got the ordinal
	report     engineReport
	worker     Worker
	info       *WorkerInfo
	group      *group // last report of a router group; nil for workers, and before the first report
	routed     uint64 // requests sent here
	speed      speed
	events     string // why its events cannot be trusted; empty if they can
	hasEvents  bool   // an event of the worker came
	avoid      avoidance
	failures   uint64 // requests that it refused or failed
	audit      audit
}

// setInfo replaces the information about a worker.
func (e *entry) setInfo(info *WorkerInfo) {
	e.info = info
	e.properties = scorer.Input{CPU: info.CPU, DecodeOnly: info.Role == Decode, MaxBatchedTokens: info.MaxBatchedTokens, MaxRequests: info.MaxNumSeqs, LastCold: e.properties.LastCold, Speed: e.properties.Speed}
	if info.Group != "" {
		e.properties.Members = max(1, info.Members)
	}
}

func newCore(conf *Config, blockSize int) core {
	c := core{conf: conf, blockSize: blockSize, settings: &conf.Scoring, thresholds: new(conf.Thresholds)}
	c.sessions = newSessions(conf.Sessions)
	if conf.InferFirstTokens {
		c.slots.InferFirstTokens()
	}
	if conf.Queue.Threshold != nil {
		c.queue = scorer.NewQueue[*waiter](conf.Queue.Policy, conf.Queue.Limit)
		c.waiting = make(map[string]*waiter)
	}
	return c
}

// outdated returns the ordinals of info's process whose blocks are invalid: of ranks that
// info does not have, and of all ranks if the process restarted. The caller purges them
// from the index before it calls setWorker.
func (c *core) outdated(info *WorkerInfo) (ordinals []int) {
	for _, ord := range c.ordinals(info.ID) {
		e := &c.entries[ord]
		if !info.hasRank(e.worker.DPRank) || e.info.StartedMS != info.StartedMS {
			ordinals = append(ordinals, ord)
		}
	}
	return ordinals
}

// setWorker adds or updates the ranks of a worker process, and drops those that info does not
// have, with their slots.
func (c *core) setWorker(info *WorkerInfo) {
	for _, ord := range c.ordinals(info.ID) {
		if e := &c.entries[ord]; info.hasRank(e.worker.DPRank) {
			if e.info.StartedMS != info.StartedMS {
				e.avoid, e.report, e.speed = avoidance{}, engineReport{}, speed{} // it is another process
				c.newSpeeds = true
			}
			c.newSpeeds = c.newSpeeds || e.info.PrefillThroughput != info.PrefillThroughput
			e.setInfo(info)
			c.slots.SetReorders(ord, info.Reorders)
		} else {
			c.drop(ord)
		}
	}
	for i := range max(1, info.DPSize) {
		w := Worker{ID: info.ID, DPRank: info.DPStart + i}
		if _, known := c.find(w); !known {
			c.add(w, info)
			c.newSpeeds = true
		}
	}
	c.countRoles()
}

// removeWorker drops all ranks of a worker process with their slots. The caller
// has purged their ordinals from the index.
func (c *core) removeWorker(id uint64) {
	for _, ord := range c.ordinals(id) {
		c.drop(ord)
	}
	c.countRoles()
}

// ordinals returns the ordinals of a process's ranks.
func (c *core) ordinals(id uint64) (ordinals []int) {
	from, to := c.ranks(id)
	return slices.Clone(c.order[from:to])
}

// ranks returns the range of a process's ranks in the order.
func (c *core) ranks(id uint64) (from, to int) {
	from, _ = c.search(Worker{ID: id})
	for to = from; to < len(c.order) && c.entries[c.order[to]].worker.ID == id; to++ {
	}
	return from, to
}

func (c *core) add(w Worker, info *WorkerInfo) {
	c.changes++
	e := entry{worker: w, since: c.changes}
	e.setInfo(info)
	var ord int
	if last := len(c.free) - 1; last >= 0 {
		ord, c.free = c.free[last], c.free[:last]
		c.entries[ord] = e
	} else {
		ord = len(c.entries)
		c.entries = append(c.entries, e)
	}
	c.slots.SetReorders(ord, info.Reorders)
	at, _ := c.search(w)
	c.order = slices.Insert(c.order, at, ord)
}

func (c *core) drop(ord int) {
	at, _ := c.search(c.entries[ord].worker)
	c.order = slices.Delete(c.order, at, at+1)
	c.slots.RemoveWorker(ord)
	c.sessions.removeWorker(ord)
	c.entries[ord] = entry{}
	c.free = append(c.free, ord)
}

func (c *core) search(w Worker) (at int, found bool) {
	return slices.BinarySearchFunc(c.order, w, func(ord int, w Worker) int {
		return c.entries[ord].worker.Compare(w)
	})
}

func (c *core) find(w Worker) (ord int, found bool) {
	at, found := c.search(w)
	if found {
		ord = c.order[at]
	}
	return ord, found
}

// size is one more than the largest ordinal in use, which is what an index needs
// to count overlaps by ordinal.
func (c *core) size() int { return len(c.entries) }

// growEvery is how old estimates of outputs may be: a fast engine fills a block in
// about this time.
const growEvery = 250 * time.Millisecond

// grow estimates the length of outputs that no caller reports. It is called before loads
// are read.
func (c *core) grow(now time.Time) {
	if !c.conf.EstimateOutput || now.Sub(c.grown) < growEvery {
		return
	}
	c.grown = now
	for _, ord := range c.order {
		c.slots.Grow(now, ord, c.outputRate(ord))
	}
}

// settingsFor works out the settings of one decision.
func (c *core) settingsFor(q *question) (*scorer.Settings, error) {
	if q.Override == nil {
		return c.settings, nil
	}
	if c.conf.Mode != KV || c.conf.Rule != nil {
		return nil, fmt.Errorf("%w: nothing is compared that it could change: the mode is %s", ErrBadOverride, c.conf.Mode)
	}
	if q.Pinned != nil && !q.AnyRank && q.Override.Compares() {
		return nil, fmt.Errorf("%w: nothing is compared that it could change: the request names its worker", ErrBadOverride)
	}
	s, err := c.settings.With(q.Override)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadOverride, err)
	}
	return &s, nil
}

// turnOf returns the number of a decision for round-robin: the requests booked before, and without an
// id also the decisions before that had none, so that these do not all name the same worker.
func (c *core) turnOf(id string) uint64 {
	if id != "" {
		return c.turn
	}
	return c.turn + c.asked
}

// draw returns the one random number of the decision for a request, uniform in
// [0, 1). It depends on the seed and the id alone, not on other requests. Without an id it depends on
// the number of decisions before.
func (c *core) draw(id string) float64 {
	key := c.turnOf(id)
	if id != "" {
		key = scorer.DrawKey(id)
	}
	return scorer.Draw(c.conf.Seed, key)
}

// choose returns the chosen candidate, and the reason in d. bound is the candidate that the
// session is bound to, or -1. There is a candidate.
func (c *core) choose(q *question, s *scorer.Settings, bound int, d *Decision) (chosen int) {
	d.Reason, d.Cost, d.Policy, d.Equal = q.reason, 0, "", 0
	c.costs = slices.Grow(c.costs[:0], len(c.inputs))[:len(c.inputs)]
	clear(c.costs)
	switch {
	case bound >= 0:
		d.Reason = ReasonSession
		return bound
	case q.Pinned != nil:
		if d.Reason = ReasonPinned; len(c.candidates) == 1 {
			return 0
		}
	}
	chosen = c.best(s, d)
	if q.Preferred == nil || q.Pinned != nil {
		return chosen
	}
	at := slices.IndexFunc(c.candidates, func(ord int) bool { return c.entries[ord].worker == *q.Preferred })
	if at < 0 {
		return chosen
	}
	d.Reason, d.Cost = ReasonPreferred, c.costs[at]
	if d.Equal > 0 {
		d.Equal = scorer.Equals(c.costs, at)
	}
	return at
}

// best returns the candidate that the mode chooses.
func (c *core) best(s *scorer.Settings, d *Decision) (chosen int) {
	reason := ReasonMode
	switch c.conf.Mode {
	case RoundRobin:
		reason = ReasonRoundRobin
		chosen = scorer.RoundRobin(len(c.candidates), c.request.Turn)
	case Random:
		chosen = scorer.Random(len(c.candidates), c.request.U)
	case LeastLoaded:
		chosen = scorer.LeastLoaded(c.inputs, c.request.U)
	case PowerOfTwo:
		chosen = scorer.PowerOfTwo(c.inputs, c.request.U)
	case DeviceAware:
		chosen = scorer.DeviceAware(&c.request, c.inputs, c.conf.DeviceRatio)
		d.DeviceRatio = c.conf.DeviceRatio
	case KV, Direct: // Direct has only pinned workers
		if reason = ReasonLoad; c.held > 0 {
			reason = ReasonKV
		}
		if c.conf.Rule != nil && c.part != decodePart {
			chosen = c.conf.Rule(&c.request, c.inputs, c.costs)
			chosen = max(0, min(chosen, len(c.candidates)-1)) // a caller's rule may err
			scorer.Bound(c.costs)
		} else {
			chosen = s.Choose(&c.request, c.inputs, c.costs)
			d.Policy = s.Policy
		}
		d.Cost, d.Equal = c.costs[chosen], scorer.Equals(c.costs, chosen)
	}
	if d.Reason == "" {
		d.Reason = reason
	}
	return chosen
}
