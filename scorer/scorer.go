// SPDX-License-Identifier: Apache-2.0

// Package scorer holds the arithmetic of a routing decision: the cost of each worker, the
// choice, and the thresholds.
//
// It has pure functions: no state, I/O, clock, goroutine or randomness of its own. The one random
// number of a decision is an argument. Candidates are always given in worker order, so that
// equal inputs give equal decisions.
//
// The functions may be called by any number of goroutines.
package scorer

import (
	"cmp"
	"math"
	"math/rand/v2"
)

// Rule chooses one of the candidates; it returns -1 without candidates. costs is
// scratch, as long as in; a rule that computes costs leaves them there, lower ones
// better.
//
// Every cost policy is a rule: [Settings.Choose].
type Rule func(r *Request, in []Input, costs []float64) int

// Request has the inputs of a decision that are the same for all candidates.
type Request struct {
	PromptTokens int
	BlockSize    int // of the candidates' model; below 1 counts as 1
	// OutputTokens is the expected length of the output; 0 expects none, so that decoding requests
	// delay nothing.
	OutputTokens float64
	// ActivePrefix is how many leading tokens of the prompt are computed on the candidate that has most of
	// them, and are also those of a request in flight there.
	ActivePrefix int
	// Sharers is the number of requests on that candidate.
	Sharers int

	// U is the one random number of the decision, uniform in [0, 1); see [Draw].
	U float64

	// PrefillUntracked leaves all prefill out of the cost, as for the decode leg
	// of a split request, whose prompt arrives computed.
	PrefillUntracked bool
	// Pinned switches preferred taints off: the request names its worker.
	Pinned bool
	// EmbeddingHit says that all embeddings of the request are cached; see [DeviceAware].
	EmbeddingHit bool

	Turn uint64 // requests of this model so far; only rules of a caller look at it
}

// Input has the inputs of a decision about one candidate. Its JSON is part of the API's
// decisions.
type Input struct {
	// Cached blocks of the prompt: the leading ones on the device, those behind them in host
	// memory, and those behind these on disk or in external storage.
	OverlapBlocks int `json:"overlap_blocks"`
	HostBlocks    int `json:"host_blocks,omitempty"`
	DiskBlocks    int `json:"disk_blocks,omitempty"`
	// PendingBlocks is the part of OverlapBlocks that the worker has not reported yet. Another request
	// is computing these blocks there, or was sent there to compute them.
	PendingBlocks int `json:"pending_blocks,omitempty"`
	// UnusableBlocks are the leading blocks on the device behind OverlapBlocks that the worker's hybrid model cannot
	// use, because it lacks other blocks that it needs there.
	UnusableBlocks int `json:"unusable_blocks,omitempty"`
	// LoweredBlocks is how many blocks OverlapBlocks is lower than the worker's events promise, because its responses
	// reported fewer.
	LoweredBlocks int `json:"lowered_blocks,omitempty"`

	// Load, without the new request.
	PendTokens       int     `json:"pend_tokens"`       // prefill tokens of requests before their first token
	ActiveRequests   int     `json:"active_requests"`   // requests on the worker
	WaitingRequests  int     `json:"waiting_requests"`  // those of them before their first token
	WaitingTokens    int     `json:"waiting_tokens"`    // prompts of the waiting ones
	DecodeTokens     int     `json:"decode_tokens"`     // prompt and output of the others
	ActiveBlocks     int     `json:"active_blocks"`     // distinct blocks of its requests
	AdditionalBlocks int     `json:"additional_blocks"` // blocks that the new request would add to ActiveBlocks
	KVUse            float64 `json:"kv_use"`            // share of its KV cache in use, 0..1

	// LeftTokens is the part of PendTokens of requests whose client left before an answer. It raises costs. It
	// makes no request wait or fail, because the worker may be idle.
	LeftTokens int `json:"-"`

	// Members is the number of workers in a router group; the load above is their sum. Costs
	// use the mean. 0 and 1 mean a single worker.
	Members int `json:"members,omitempty"`

	// Properties of the worker. Speed is how fast it computes, compared with the pool; 0 counts as 1. The
	// costs of Tokens and PredictedTTFT are divided by its power of .75.
	Speed            float64 `json:"speed,omitempty"`
	MaxRequests      int     `json:"max_requests,omitempty"`       // that its engine computes at a time; 0 = unknown
	MaxBatchedTokens int     `json:"max_batched_tokens,omitempty"` // 0 = unknown
	CPU              bool    `json:"cpu,omitempty"`                // its device class, for [DeviceAware]
	DecodeOnly       bool    `json:"decode_only,omitempty"`        // takes no prefill
	TaintWeight      float64 `json:"taint_weight,omitempty"`       // sum of the preferred taints that match; all policies but Weighted

	// Only rules of a caller look at this.
	LastCold uint64 `json:"-"` // number of the last request sent here of which no worker held a block; 0 = none
}

func (r *Request) block() float64 { return float64(max(1, r.BlockSize)) }

// match returns the number of the prompt's tokens that the worker holds on its device.
func (r *Request) match(in *Input) int {
	return min(in.OverlapBlocks*max(1, r.BlockSize), max(0, r.PromptTokens))
}

// share returns match as a share of the prompt.
func (r *Request) share(in *Input) float64 {
	return float64(r.match(in)) / float64(max(1, r.PromptTokens))
}

// Draw returns the one random number of a decision, uniform in [0, 1). It depends
// on the configured seed and on the request's key alone, so that other requests
// in flight do not change the decision. The key of a request with an id is
// [DrawKey] of the id; the key of a request without one is a counter.
func Draw(seed, key uint64) float64 {
	var p rand.PCG
	p.Seed(seed, key)
	return float64(p.Uint64()<<11>>11) / (1 << 53)
}

// DrawKey returns a 64-bit hash of a request's id.
func DrawKey(id string) uint64 {
	h := uint64(14695981039346656037) // FNV-1a
	for i := range len(id) {
		h = (h ^ uint64(id[i])) * 1099511628211
	}
	return h
}

// tie is the relative difference below which two costs are equal: far above the
// rounding of a sum of a few terms, far below a token.
const tie = 1e-12

// Pick returns the index of the candidate with the lowest cost. Among equal
// costs (relative difference up to 1e-12) those with the fewest active requests
// stay, among these the ones with the fewest active blocks, and u, uniform in
// [0, 1), draws one of the rest. Without that last draw several idle routers
// would all choose the same worker first.
//
// costs and in have the same length and belong together. Pick returns -1 if there
// is no candidate. A cost that is not a number never wins against one that is.
func Pick(costs []float64, in []Input, u float64) int {
	return Best(len(costs), u, func(i, j int) int {
		if c := compare(costs[i], costs[j]); c != 0 {
			return c
		}
		return Quieter(in, i, j)
	})
}

// Best returns the first of n candidates by order, and draws among the candidates that
// are equal to it; -1 if n is 0. order is negative if candidate i beats candidate j, and
// 0 if they are equal.
func Best(n int, u float64, order func(i, j int) int) int {
	first, equal := -1, 0
	for i := range n {
		c := -1
		if first >= 0 {
			c = order(i, first)
		}
		switch {
		case c < 0:
			first, equal = i, 1
		case c == 0:
			equal++
		}
	}
	if equal <= 1 {
		return first
	}
	skip := Random(equal, u)
	for i := first; i < n; i++ {
		if order(i, first) != 0 {
			continue
		}
		if skip == 0 {
			return i
		}
		skip--
	}
	return first
}

// Random returns one of n candidates with equal chances, by u in [0, 1). It returns -1
// if n is 0.
func Random(n int, u float64) int {
	return min(max(0, int(u*float64(n))), n-1)
}

// Equals returns the number of costs that are equal to that of candidate i, with candidate i;
// see [Pick].
func Equals(costs []float64, i int) (n int) {
	for _, c := range costs {
		if compare(c, costs[i]) == 0 {
			n++
		}
	}
	return n
}

// compare orders two costs, the lower one first.
func compare(a, b float64) int {
	switch d := math.Abs(a - b); {
	case d > tie*math.Abs(a) && d > tie*math.Abs(b): // false unless both are finite
		return sign(a < b)
	case math.IsNaN(a) || math.IsNaN(b): // NaN comes last
		return cmp.Compare(b, a)
	case !finite(d): // an infinite cost equals only itself
		return cmp.Compare(a, b)
	}
	return 0
}

// Quieter orders candidates that cost the same: fewer requests, then fewer blocks.
func Quieter(in []Input, i, j int) int {
	a, b := &in[i], &in[j]
	if c := a.ActiveRequests*b.workers() - b.ActiveRequests*a.workers(); c != 0 {
		return c
	}
	return a.ActiveBlocks*b.workers() - b.ActiveBlocks*a.workers()
}

// workers returns the number of workers whose loads the load is the sum of.
func (in *Input) workers() int { return max(1, in.Members) }

// mean returns a part of the load for each worker.
func (in *Input) mean(sum int) float64 {
	if in.Members > 1 {
		return float64(sum) / float64(in.Members)
	}
	return float64(sum)
}

// held is the number of tokens that the worker's requests hold: each request counts all of its tokens,
// shared blocks included.
func (in *Input) held() float64 { return in.mean(in.WaitingTokens + in.DecodeTokens) }

func sign(less bool) int {
	if less {
		return -1
	}
	return 1
}

// Softmax draws a candidate. Lower costs are more likely; a higher temperature makes the
// chances more equal. The weight of a candidate is
//
//	exp(−(cost − lowest) / ((highest − lowest) · temperature))
//
// so the scale of the costs does not matter. Equal costs have equal chances.
// The first candidate whose cumulative probability reaches u wins. A cost that is
// not finite never wins against one that is. Softmax returns -1 if there is no
// candidate; temperature must be above 0.
func Softmax(costs []float64, temperature, u float64) int {
	s := newSoftmax(costs, temperature)
	last, cumulative := len(costs)-1, 0.
	for i, c := range costs {
		w := s.weight(c)
		if w == 0 {
			continue
		}
		if cumulative += w / s.sum; u <= cumulative {
			return i
		}
		last = i
	}
	return last
}

// Probabilities fills p, as long as costs, with the chance that [Softmax] gives to
// each candidate.
func Probabilities(costs []float64, temperature float64, p []float64) {
	s := newSoftmax(costs, temperature)
	for i, c := range costs {
		p[i] = s.weight(c) / s.sum
	}
}

// softmax computes the weights of costs.
type softmax struct {
	scale, low, spread float64 // of the finite costs, after scaling
	temperature        float64
	none               bool    // no cost is finite
	sum                float64 // of all weights
}

func newSoftmax(costs []float64, temperature float64) softmax {
	s := softmax{scale: 1, temperature: temperature, none: true}
	var low, high float64
	for _, c := range costs {
		if finite(c) {
			if s.none {
				low, high, s.none = c, c, false
			}
			low, high = min(low, c), max(high, c)
		}
	}
	if !finite(high - low) {
		s.scale = max(math.Abs(low), math.Abs(high))
		low, high = low/s.scale, high/s.scale
	}
	s.low, s.spread = low, high-low
	for _, c := range costs {
		s.sum += s.weight(c)
	}
	return s
}

func (s *softmax) weight(cost float64) float64 {
	switch {
	case s.none:
		return 1
	case !finite(cost):
		return 0
	case s.spread == 0:
		return 1
	}
	// Two divisions: the product of a small spread and a small temperature
	// would be 0.
	return math.Exp(-(cost/s.scale - s.low) / s.spread / s.temperature)
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
