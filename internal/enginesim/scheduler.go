// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"slices"
	"time"

	"github.com/kvroute/kvroute/scorer"
)

// presets are models on their hardware. A step takes
//
//	max(Floor, Step + Token·(prefill tokens + decodes)) + Attention·Σ n·(ctx + n/2) + KVToken·(KV tokens of the decodes)
//
// milliseconds, where each prefilling request adds n tokens after ctx others. The values
// were fitted to published figures; those of 70B leave out attention and all-reduce, and
// are unchecked.
//
//nolint:gochecknoglobals // a table
var presets = map[string]scorer.Engine{"8b-1xh100": scorer.Dense8B(), "32b-2xh100": scorer.Dense32B(), "70b-4xh100": scorer.Dense70B()}

// request is one sequence on its way through the engine.
type request struct {
	prefix

	prompt int // tokens
	output int // tokens to generate, at least 1

	admitted func(cachedTokens int) // called when the request leaves the queue, in its first step
	token    func()                 // called for each token
	finished func()                 // called after the last one

	receiving bool // the blocks are fetched from a prefill engine, see receive
	leg       *leg // if set, the blocks stay after the last token, see release
	held      bool // they do

	hit      int // prompt blocks that the request references: found in the cache, or stored since
	reserve  int // output blocks held in reserve
	sides    sideBlocks
	cached   int // prompt tokens that need no computing
	computed int // prompt tokens that are computed or cached
	planned  int // prompt tokens that the current step computes
	made     int // tokens generated
	aborted  bool
}

// scheduler is the engine without clock and network: its input is requests, its output is steps.
// It does continuous batching: each step serves all running requests, and prefills share a token
// budget in order of arrival. As in vLLM V1:
//
//   - A waiting request is admitted only while the step has budget left.
//   - A request's cached blocks are counted in its first step, not when it arrives.
//   - The blocks of a chunk are cached when a step is planned that computes the chunk, so the
//     requests after it in the same step find them.
//
// Unlike vLLM, a request reserves room for its whole prompt and output, so none is preempted.
type scheduler struct {
	timing    scorer.Engine
	blockSize int
	maxSeqs   int
	maxTokens int // per step
	cache     *cache

	waiting []*request
	running []*request

	queries, hits, received int // prompt tokens: looked up in the cache, found there, fetched
	receiving               int // running requests whose blocks are being fetched
	held                    int // ended requests whose blocks stay
}

func (s *scheduler) submit(r *request) { s.waiting = append(s.waiting, r) }

// abort removes a request at the next step.
func (s *scheduler) abort(r *request) {
	if i := slices.Index(s.waiting, r); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
		return
	}
	r.aborted = true
}

// begin plans a step: first for the running requests, then for waiting ones. It returns how long the
// step takes; 0 if there is nothing to do.
func (s *scheduler) begin() time.Duration {
	s.running = slices.DeleteFunc(s.running, func(r *request) bool {
		if r.aborted {
			s.leave(r)
		}
		return r.aborted
	})

	var prefill, decodes, kv int
	var attention float64
	for _, r := range s.running {
		if r.made > 0 {
			decodes++
			kv += r.prompt + r.made
		}
	}
	budget := max(0, s.maxTokens-decodes)
	plan := func(r *request) {
		if r.planned = 0; r.made > 0 || r.receiving {
			return
		}
		n := s.cache.clip(r, min(budget, r.prompt-r.computed))
		r.planned = n
		budget -= n
		prefill += n
		attention += float64(n) * (float64(r.computed) + float64(n)/2)
		s.store(r, r.computed+n)
	}
	for _, r := range s.running {
		plan(r)
	}
	for budget > 0 {
		r := s.admit()
		if r == nil {
			break
		}
		plan(r)
	}
	if prefill+decodes == 0 {
		return 0
	}
	t := s.timing
	ms := max(t.Floor, t.Step+t.Token*float64(prefill+decodes)) + t.Attention*attention + t.KVToken*float64(kv)
	return time.Duration(ms * float64(time.Millisecond))
}

// admit moves the first waiting request to the running ones and counts its cached blocks. It
// returns nil if there is none, or no room for it.
func (s *scheduler) admit() *request {
	if len(s.waiting) == 0 || len(s.running) >= s.maxSeqs {
		return nil
	}
	r := s.waiting[0]
	// The last token is always computed, so a completely cached prompt computes its last
	// block.
	hit, unused, sides := s.cache.find(&r.prefix, (r.prompt-1)/s.blockSize)
	blocks := len(r.sequence)
	reserve := max(0, (r.prompt+r.output+s.blockSize-1)/s.blockSize-blocks)
	need := blocks - hit + unused + reserve + sides.reserve
	if s.cache.used()+need > s.cache.capacity && len(s.running)+s.held > 0 {
		return nil
	}
	s.waiting = s.waiting[1:]
	s.cache.acquire(r.sequence[:hit])
	s.cache.acquire(sides.held)
	s.cache.reserved += blocks - hit + reserve + sides.reserve
	s.cache.evict()
	r.hit, r.reserve, r.sides = hit, reserve, sides
	r.cached = min(hit*s.blockSize, r.prompt-1)
	r.computed = r.cached
	s.queries += r.prompt
	s.hits += r.cached
	s.running = append(s.running, r)
	if r.receiving {
		s.receiving++
	}
	r.admitted(r.cached)
	return r
}

// store caches the full blocks of a request's first tokens.
func (s *scheduler) store(r *request, tokens int) {
	end := max(r.hit, tokens/s.blockSize)
	s.cache.fill(&r.prefix, r.hit, end)
	s.cache.keepSides(&r.prefix, &r.sides, r.hit, end)
	r.hit = end
}

// finish completes the step that begin planned.
func (s *scheduler) finish() {
	s.running = slices.DeleteFunc(s.running, func(r *request) bool {
		if r.aborted {
			s.leave(r)
			return true
		}
		if r.made == 0 {
			if r.computed += r.planned; r.computed < r.prompt {
				return false
			}
		}
		r.made++
		r.token()
		if r.made < r.output {
			return false
		}
		if r.leg != nil {
			r.held = true
			s.held++
		} else {
			s.leave(r)
		}
		r.finished()
		return true
	})
	s.cache.evict()
}

// receive completes the fetch of a request's blocks. As in vLLM, the engine computes the last token.
func (s *scheduler) receive(r *request) {
	s.store(r, r.prompt)
	s.received += r.prompt - r.cached
	r.computed, r.receiving = r.prompt-1, false
	s.receiving--
}

// release frees the blocks that stayed after a request's end.
func (s *scheduler) release(r *request) {
	if r.held {
		r.held = false
		s.held--
		s.leave(r)
	}
}

// leave releases the blocks of a request. Its output is not cached.
func (s *scheduler) leave(r *request) {
	if r.receiving {
		s.receiving--
	}
	s.cache.reserved -= len(r.sequence) - r.hit + r.reserve + r.sides.reserve
	s.cache.release(r.sequence[:r.hit])
	s.cache.release(r.sides.held)
}
