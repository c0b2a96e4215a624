// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"

	"github.com/kvroute/kvroute/scorer"
)

// engine is a simulated worker with continuous batching and chunked prefill. Time
// moves in steps; a step computes one token for each decoding request and as much
// of the prompts, first come first served, as its budget leaves. Requests change their
// state at the ends of steps.
//
// Each step without prefill takes longer than the one before by a known time, so all
// steps up to the next end of a request are one event. A request that arrives cuts them
// at the end of the current step.
//
// Package enginesim has another engine with the same timing. It serves HTTP on the real
// clock, step by step, with tokens and block hashes of real engines. This one plays
// 100,000 requests a second on numbered blocks; neither can do the other's work.
//
// # Invariants
//
//   - A request is in waiting, in prefills, in decodes, or its blocks are being transferred.
//   - admitted is the number of requests that hold blocks: all but the waiting ones.
//   - A waiting request is admitted only while the step has budget left. Its cached tokens are
//     those of that moment.
//   - The blocks of a chunk are cached when the step that computes the chunk is planned, as in
//     vLLM. So of several equal prompts only the first one is computed. Routers hear of the
//     blocks at the end of the step.
//   - version changes with each planned end; an event with an older version is ignored.
//   - held is the sum over the decoding requests of prompt and output so far.
//   - readers counts the decoding requests of each block, and repeated is the sum over all blocks of
//     the readers beyond the first. Both are empty without shared-prefix attention.
type engine struct {
	number int
	model  scorer.Engine
	speed  float64 // the times of the model are divided by this
	block  int     // tokens
	cache  *cache
	hybrid *hybrid // nil: the model has full attention only
	reqs   []Request
	states []state // of the requests

	present bool
	started int64 // ms; of its current life

	waiting  []int32
	head     int // of waiting
	admitted int
	prefills []prefill
	decodes  timeline[int32] // requests, by the step after which they end, then by number
	steps    int64           // so far
	held     int64           // tokens of the decoding requests
	readers  []int32         // by block; nil: attention reads a block once for each request
	repeated int64           // blocks

	// The plan: count steps from start, the last one ending at end. Prefills are
	// in a plan of one step.
	busy       bool
	version    uint32
	start, end int64 // ns
	count      int64
	mixed      bool // has prefills

	linkFree int64 // ns; when the transfers of blocks that have begun or wait will have ended
	computed int64 // prompt tokens so far
	shared   bool  // the cache is that of all engines
	single   bool  // tests: plan every step
}

// prefill is an admitted request whose prompt is being computed.
type prefill struct {
	req        int32
	done, left int     // tokens of the prompt; done includes the cached ones
	now        int     // tokens in the current step
	known, to  int     // the current step caches the blocks from known to to
	sides      []int32 // and these blocks of side groups
}

// maxRunning is the most requests that an engine computes at a time.
const maxRunning = 256

// admit begins with waiting requests, in their order, until one does not fit or the step has no
// budget left, and notes how many tokens of their prompts were cached. It returns the budget that
// is left.
func (e *engine) admit(s *sim, budget int) int {
	for budget > 0 && e.head < len(e.waiting) && e.admitted < maxRunning {
		n := e.waiting[e.head]
		r := &e.reqs[n]
		need := e.cache.missing(r.Blocks) + e.reserve(n)
		hit := e.cache.leading(r.Blocks)
		if hit*e.block >= r.Input {
			hit = (r.Input - 1) / e.block
		}
		var own sides
		if e.hybrid != nil {
			hit, own = e.hybrid.find(e.cache, r, hit)
			e.hybrid.each(own.held, func(number []int32) { need += e.cache.missing(number) })
		}
		if e.cache.live+e.cache.reserved+need > e.cache.capacity && e.admitted > 0 {
			return budget
		}
		e.admitted++
		e.cache.acquire(r.Blocks)
		e.hybrid.each(own.held, e.cache.acquire)
		e.states[n].sides = own
		e.cache.reserved += e.reserve(n)
		done := hit * e.block
		if leg := e.states[n].leg; leg != noLeg && leg != e.number {
			s.transfer(n, r.Input-done)
		} else {
			e.prefills = append(e.prefills, prefill{req: n, done: done, left: r.Input - done})
			e.states[n].cached = done
			budget -= e.schedule(&e.prefills[len(e.prefills)-1], s.now, budget)
		}
		if e.head++; e.head == len(e.waiting) {
			e.waiting, e.head = e.waiting[:0], 0
		}
	}
	return budget
}

// schedule puts tokens of a prompt into the next step, at most budget, and caches the blocks that they
// fill. It returns the number of tokens.
func (e *engine) schedule(p *prefill, now int64, budget int) int {
	r := &e.reqs[p.req]
	p.now = e.hybrid.clip(&e.states[p.req].sides, p.done, min(p.left, budget), p.left)
	p.to = min(len(r.Blocks), (p.done+p.now)/e.block)
	if p.now == p.left {
		p.to = len(r.Blocks) // a trace may have a block for the prompt's rest
	}
	if e.states[p.req].begun < 0 {
		e.states[p.req].begun = now
	}
	p.known = e.cache.computed(r.Blocks[:p.to])
	p.sides = e.storeSides(p.req, p.to)
	return p.now
}

// decode begins the output of a request behind its first token.
func (e *engine) decode(n int32) {
	r := &e.reqs[n]
	e.held += int64(r.Input) + 1
	e.read(r.Blocks, 1)
	e.decodes.push(entry[int32]{e.steps + int64(r.Output) - 1, int64(n), n})
}

// read notes that one more decoding request reads the blocks, or, if by is -1, one fewer.
func (e *engine) read(blocks []int32, by int32) {
	if e.readers == nil {
		return
	}
	for _, n := range blocks {
		if e.readers[n] += by; max(e.readers[n], e.readers[n]-by) > 1 {
			e.repeated += int64(by)
		}
	}
}

// reads is the number of tokens whose keys and values a step reads for the decoding requests.
func (e *engine) reads() float64 { return float64(e.held - e.repeated*int64(e.block)) }

// reserve is how many blocks are kept free for the output of a request.
func (e *engine) reserve(n int32) int {
	if e.states[n].leg == e.number {
		return 0
	}
	r := &e.reqs[n]
	return max(0, (r.Input+r.Output+e.block-1)/e.block-len(r.Blocks)) + e.hybrid.groups()
}

// plan sets the end of the next step, or steps, and admits waiting requests to it. It returns false
// if the engine has no requests.
func (e *engine) plan(s *sim) bool {
	e.version++
	n := len(e.decodes)
	budget := max(0, int(e.model.Chunk)-n)
	for i := range e.prefills {
		budget -= e.schedule(&e.prefills[i], s.now, budget)
	}
	e.admit(s, budget)
	e.busy = n+len(e.prefills) > 0
	if !e.busy {
		return false
	}
	e.start, e.count, e.mixed = s.now, 1, len(e.prefills) > 0
	if !e.mixed {
		if e.count = e.decodes[0].at - e.steps; e.single || e.shared && e.head < len(e.waiting) {
			// Another engine may free blocks of a shared cache at any time.
			e.count = 1
		}
		e.end = s.now + e.duration(e.count)
		return true
	}
	tokens, attention := n, 0.
	for i := range e.prefills {
		p := &e.prefills[i]
		tokens += p.now
		attention += float64(p.now) * (float64(p.done) + float64(p.now)/2)
	}
	ms := max(e.model.Floor, e.model.Step+e.model.Token*float64(tokens)) + e.model.Attention*attention + e.model.KVToken*e.reads()
	e.end = s.now + e.ns(ms)
	return true
}

func (e *engine) ns(ms float64) int64 { return int64(math.Round(ms / e.speed * 1e6)) }

// duration returns how long k steps of the decoding requests take, in ns.
func (e *engine) duration(k int64) int64 {
	n := float64(len(e.decodes))
	step := max(e.model.Floor, e.model.Step+e.model.Token*n) + e.model.KVToken*e.reads()
	growth := e.model.KVToken * n // ms that each step takes longer than the one before
	return e.ns(float64(k)*step + growth*float64(k)*float64(k-1)/2)
}

// cut ends the planned steps with the current one. It returns whether that changed the
// plan.
func (e *engine) cut(now int64) bool {
	if e.mixed || e.count == 1 || now >= e.end {
		return false
	}
	low, high := int64(1), e.count // the first k with start + duration(k) ≥ now
	for low < high {
		k := (low + high) / 2
		if e.start+e.duration(k) >= now {
			high = k
		} else {
			low = k + 1
		}
	}
	if low == e.count {
		return false
	}
	e.version++
	e.count, e.end = low, e.start+e.duration(low)
	return true
}

// complete ends the planned steps.
func (e *engine) complete(t *sim, w int) {
	e.steps += e.count
	e.held += e.count * int64(len(e.decodes))
	for len(e.decodes) > 0 && e.decodes[0].at <= e.steps {
		e.finish(t, w, e.decodes.pop().value)
	}
	if !e.mixed {
		return
	}
	left := e.prefills[:0]
	for _, p := range e.prefills {
		p.done += p.now
		p.left -= p.now
		e.computed += int64(p.now)
		e.cache.trim(e.cache.capacity)
		t.publishComputed(w, &p)
		if p.left > 0 {
			left = append(left, p)
			continue
		}
		r := &e.reqs[p.req]
		if e.states[p.req].leg == w {
			t.endLeg(p.req)
			continue
		}
		t.firstToken(p.req)
		if r.Output == 1 {
			e.release(p.req)
			t.ended(w, p.req)
			continue
		}
		e.decode(p.req)
	}
	e.prefills = left
}

func (e *engine) finish(t *sim, w int, req int32) {
	r := &e.reqs[req]
	e.held -= int64(r.Input + r.Output)
	e.read(r.Blocks, -1)
	e.release(req)
	t.ended(w, req)
}

// release ends the engine's part of a request: its blocks stay cached as long as there is room.
func (e *engine) release(req int32) {
	e.admitted--
	e.cache.release(e.reqs[req].Blocks)
	e.hybrid.each(e.states[req].sides.held, e.cache.release)
	e.cache.reserved -= e.reserve(req)
	e.cache.trim(e.cache.capacity)
}

// reset empties the engine and returns the requests that it had. A shared cache keeps
// its blocks.
func (e *engine) reset(distinct int) (lost []int32) {
	var running []int32
	for _, p := range e.prefills {
		running = append(running, p.req)
	}
	for len(e.decodes) > 0 {
		running = append(running, e.decodes.pop().value)
	}
	for _, n := range running {
		e.cache.release(e.reqs[n].Blocks)
		e.cache.reserved -= e.reserve(n)
	}
	if !e.shared {
		e.cache = newCache(e.cache.capacity, distinct*(1+e.hybrid.groups()))
	}
	lost = append(running, e.waiting[e.head:]...)
	e.waiting, e.head, e.prefills = nil, 0, nil
	e.held, e.repeated, e.admitted, e.busy = 0, 0, 0, false
	clear(e.readers)
	e.version++
	return lost
}
