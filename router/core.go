// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// core is the state machine of one pool: the workers that serve one base model,
// and the slots of the requests on them. Inputs are worker changes, requests and
// what becomes of them, each with the time it happened; outputs are decisions.
// It has no clock, no lock, no goroutine and no randomness of its own, so the
// same inputs give the same decisions.
//
// Invariants:
//
//   - Every rank of every worker has one ordinal, and order holds the ordinals in
//     use, sorted by Worker.
//   - An ordinal is handed out again only after its slots are dropped and, by the
//     core's owner, its blocks purged from the index.
//   - changes grows with every ordinal handed out, so overlaps counted before a
//     change are not mistaken for those of an ordinal's new worker.
type core struct {
	mode     Mode
	settings scorer.Settings
	rule     scorer.Rule // instead of settings, if not nil
	seed     uint64

	entries []entry
	free    []int // ordinals to hand out again
	order   []int
	slots   scorer.Slots
	changes uint64
	turn    uint64 // round robin: requests so far

	// Scratch of one decision.
	candidates []int
	request    scorer.Request
	inputs     []scorer.Input
	costs      []float64
}

// entry is what the core knows of the worker with its ordinal.
type entry struct {
	worker Worker
	info   *WorkerInfo
	since  uint64 // value of core.changes when the worker got the ordinal
	routed uint64 // requests sent here
}

// question is a request, prepared for the core: what the locks need not cover.
type question struct {
	id        string
	lora      string   // adapter of the request
	adapter   string   // the same, if workers say which ones they have
	tokens    int      // length of the prompt; 0 if unknown
	sequence  []uint64 // sequence hashes of its full blocks
	blockSize int
	overlap   []int32 // by ordinal, counted at version
	version   uint64  // value of core.changes when overlap was counted
	reason    Reason  // of the decision, unless the policy has a better one
	guessed   bool    // hashes that no engine has

	// Of a booking.
	ordinal    int
	generation uint64 // entry.since of the worker
	silent     bool   // no events of it are expected
}

// outdated returns the ordinals of info's process whose blocks no longer count:
// of ranks that info does not have, and of all ranks if the process restarted.
// The caller purges them from the index before it calls setWorker.
func (c *core) outdated(info *WorkerInfo) (ordinals []int) {
	for _, ord := range c.ordinals(info.ID) {
		e := &c.entries[ord]
		if !info.hasRank(e.worker.DPRank) || e.info.StartedMS != info.StartedMS {
			ordinals = append(ordinals, ord)
		}
	}
	return ordinals
}

// setWorker adds the ranks of a worker process, updates what is known of them and
// drops those that are gone, with their slots.
func (c *core) setWorker(info *WorkerInfo) {
	for _, ord := range c.ordinals(info.ID) {
		if e := &c.entries[ord]; info.hasRank(e.worker.DPRank) {
			e.info = info
		} else {
			c.drop(ord)
		}
	}
	for i := range max(1, info.DPSize) {
		w := Worker{ID: info.ID, DPRank: info.DPStart + i}
		if _, known := c.find(w); !known {
			c.add(w, info)
		}
	}
}

// removeWorker drops all ranks of a worker process with their slots. The caller
// has purged their ordinals from the index.
func (c *core) removeWorker(id uint64) {
	for _, ord := range c.ordinals(id) {
		c.drop(ord)
	}
}

// ordinals returns those of a process's ranks.
func (c *core) ordinals(id uint64) (ordinals []int) {
	at, _ := c.search(Worker{ID: id})
	for _, ord := range c.order[at:] {
		if c.entries[ord].worker.ID != id {
			break
		}
		ordinals = append(ordinals, ord)
	}
	return ordinals
}

func (c *core) add(w Worker, info *WorkerInfo) {
	c.changes++
	e := entry{worker: w, info: info, since: c.changes}
	var ord int
	if last := len(c.free) - 1; last >= 0 {
		ord, c.free = c.free[last], c.free[:last]
		c.entries[ord] = e
	} else {
		ord = len(c.entries)
		c.entries = append(c.entries, e)
	}
	at, _ := c.search(w)
	c.order = slices.Insert(c.order, at, ord)
}

func (c *core) drop(ord int) {
	at, _ := c.search(c.entries[ord].worker)
	c.order = slices.Delete(c.order, at, at+1)
	c.slots.RemoveWorker(ord)
	c.entries[ord] = entry{}
	c.free = append(c.free, ord)
}

func (c *core) search(w Worker) (at int, found bool) {
	return slices.BinarySearchFunc(c.order, w, func(ord int, w Worker) int {
		return c.entries[ord].worker.Compare(w)
	})
}

func (c *core) find(w Worker) (ord int, found bool) {
	if at, ok := c.search(w); ok {
		return c.order[at], true
	}
	return 0, false
}

// decide chooses a worker for q and, if q has an id, takes its slot. d gets the
// choice and its inputs, the candidates appended to d.Candidates. The caller has
// filled in what it knows.
func (c *core) decide(now time.Time, q *question, d *Decision) error {
	c.eligible(q.adapter)
	if len(c.candidates) == 0 {
		return ErrNoWorkers
	}
	c.measure(q)

	var chosen int
	d.Time, d.Reason = now, q.reason
	switch c.mode {
	case RoundRobin:
		c.settings.Costs(&c.request, c.inputs, c.costs)
		chosen = scorer.RoundRobin(len(c.candidates), c.turn)
		d.Reason = ReasonRoundRobin
	default:
		if c.rule != nil {
			chosen = c.rule(&c.request, c.inputs, c.costs)
		} else {
			chosen = c.settings.Choose(&c.request, c.inputs, c.costs)
		}
		d.Cost = c.costs[chosen]
		if d.Reason == "" {
			d.Reason = c.kvReason()
		}
	}

	ord := c.candidates[chosen]
	e, in := &c.entries[ord], &c.inputs[chosen]
	d.OverlapBlocks = in.OverlapBlocks
	d.CachedTokens = in.OverlapBlocks * q.blockSize
	// The engine computes the last token of a prompt even if it holds them all.
	d.PrefillTokens = max(min(1, q.tokens), q.tokens-d.CachedTokens)
	if q.id != "" {
		if !c.slots.Add(now, q.id, &scorer.Booking{
			Worker: ord, Blocks: q.sequence, BlockSize: q.blockSize,
			PromptTokens: q.tokens, CachedTokens: q.tokens - d.PrefillTokens, Owned: true,
		}) {
			return ErrDuplicate
		}
		c.turn++
		e.routed++
		q.ordinal, q.generation = ord, e.since
		q.silent = e.info.NoEvents || e.info.BlockSize != q.blockSize
	}
	d.Worker, d.WorkerName, d.Address = e.worker, e.info.Name, e.info.rankAddress(e.worker.DPRank)
	c.explain(d)
	return nil
}

// eligible collects the ordinals that may take a request: the healthy workers, or
// the degraded ones while there are no healthy ones. A request for an adapter
// goes to workers that have it.
func (c *core) eligible(adapter string) {
	for _, want := range []Health{Healthy, Degraded} {
		c.candidates = c.candidates[:0]
		for _, ord := range c.order {
			info := c.entries[ord].info
			if info.Health == want && !info.Draining && info.Role != Prefill &&
				(adapter == "" || slices.Contains(info.LoRA, adapter)) {
				c.candidates = append(c.candidates, ord)
			}
		}
		if len(c.candidates) > 0 {
			return
		}
	}
}

// measure fills in what the request and each candidate bring to the decision.
func (c *core) measure(q *question) {
	c.request = scorer.Request{PromptTokens: q.tokens, BlockSize: q.blockSize, Sequence: q.sequence, U: c.draw(q.id), Turn: c.turn}
	c.inputs = c.inputs[:0]
	for _, ord := range c.candidates {
		load := c.slots.Load(ord)
		in := scorer.Input{
			PendTokens:       load.PendTokens,
			ActiveRequests:   load.Requests,
			WaitingRequests:  load.Waiting,
			DecodeTokens:     load.DecodeTokens,
			ActiveBlocks:     load.Blocks,
			AdditionalBlocks: c.slots.AdditionalBlocks(ord, q.sequence),
		}
		if ord < len(q.overlap) && c.entries[ord].since <= q.version {
			in.OverlapBlocks = int(q.overlap[ord])
		}
		c.inputs = append(c.inputs, in)
	}
	c.costs = slices.Grow(c.costs[:0], len(c.inputs))[:len(c.inputs)]
}

func (c *core) kvReason() Reason {
	for i := range c.inputs {
		if c.inputs[i].OverlapBlocks > 0 {
			return ReasonKV
		}
	}
	return ReasonLoad
}

// draw returns the one random number of the decision for a request, uniform in
// [0, 1). It depends on the seed and the id alone, not on other requests.
func (c *core) draw(id string) float64 {
	key := c.turn
	if id != "" {
		key = scorer.DrawKey(id)
	}
	return scorer.Draw(c.seed, key)
}

func (c *core) explain(d *Decision) {
	for i, ord := range c.candidates {
		e, in := &c.entries[ord], &c.inputs[i]
		d.Candidates = append(d.Candidates, Candidate{
			Worker:           e.worker,
			WorkerName:       e.info.Name,
			Address:          e.info.rankAddress(e.worker.DPRank),
			OverlapBlocks:    in.OverlapBlocks,
			PendTokens:       in.PendTokens,
			ActiveRequests:   in.ActiveRequests,
			ActiveBlocks:     in.ActiveBlocks,
			AdditionalBlocks: in.AdditionalBlocks,
			Cost:             c.costs[i],
		})
	}
}

// size is one more than the largest ordinal in use, which is what an index needs
// to count overlaps by ordinal.
func (c *core) size() int { return len(c.entries) }

// blockSizes counts the workers that say how large their blocks are.
func (c *core) blockSizes() (n int) {
	for _, ord := range c.order {
		if c.entries[ord].info.BlockSize > 0 {
			n++
		}
	}
	return n
}

// names calls yield for each model name that the pool answers to, with the
// adapter that the name stands for, if any.
func (c *core) names(yield func(name, lora string)) {
	for _, ord := range c.order {
		info := c.entries[ord].info
		for _, m := range info.Models {
			yield(m, "")
		}
		for _, l := range info.LoRA {
			yield(l, l)
		}
	}
}
