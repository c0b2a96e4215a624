// SPDX-License-Identifier: Apache-2.0

// Package scorer holds the arithmetic of a routing decision: what a worker would
// cost, which cost wins, and what the requests in flight occupy.
//
// It promises pure functions and plain bookkeeping: no I/O, no clock, no
// goroutine, no randomness of its own, and no knowledge of where the numbers come
// from. Workers are small numbers, dense, handed out by the caller.
//
// Functions may be called by any number of goroutines. [Slots] must be guarded by
// its owner, together with the reads that a decision makes before it books.
package scorer

import "math"

// Input is what one candidate brings to a decision.
type Input struct {
	PromptTokens     int // length of the prompt
	OverlapBlocks    int // leading blocks of the prompt that the worker holds
	PendTokens       int // prefill tokens of its requests before their first token
	ActiveRequests   int // requests on the worker, without the new one
	ActiveBlocks     int // distinct blocks of those requests
	AdditionalBlocks int // blocks that the new request would add to ActiveBlocks
}

// Dynamo is the cost of NVIDIA Dynamo's KV router in its classic form, in
// blocks; lower wins:
//
//	weight · prefill blocks + decode blocks
//
// The prefill blocks are all prompt tokens that the worker would still have to
// compute, the new request's included, divided by the block size; they may be
// fractional and are never negative. The decode blocks are the blocks active on
// the worker with the new request. A higher weight favours re-use of the cache, a
// lower one an even load; weight 0 routes by load alone.
//
// blockSize must be positive, weight finite and not negative.
func Dynamo(in Input, blockSize int, weight float64) float64 {
	prefillTokens := in.PendTokens + in.PromptTokens - in.OverlapBlocks*blockSize
	prefillBlocks := float64(max(0, prefillTokens)) / float64(blockSize)
	return weight*prefillBlocks + float64(in.ActiveBlocks+in.AdditionalBlocks)
}

// tie is the relative difference below which two costs are one: far above the
// rounding of a sum of a few terms, far below a token.
const tie = 1e-12

// Pick returns the index of the candidate with the lowest cost. Among equal
// costs (relative difference up to 1e-12) those with the fewest active requests
// stay, among these the ones with the fewest active blocks, and u, uniform in
// [0, 1), draws one of the rest. Without that last draw several idle routers
// would all begin with the same worker.
//
// costs and in have the same length and belong together. Pick returns -1 if there
// is no candidate. A cost that is not a number never wins against one that is.
func Pick(costs []float64, in []Input, u float64) int {
	best, equal := -1, 0
	for i := range costs {
		switch order := compare(costs, in, i, best); {
		case order < 0:
			best, equal = i, 1
		case order == 0:
			equal++
		}
	}
	if equal <= 1 {
		return best
	}
	skip := min(int(u*float64(equal)), equal-1)
	for i := best; i < len(costs); i++ {
		if compare(costs, in, i, best) != 0 {
			continue
		}
		if skip == 0 {
			return i
		}
		skip--
	}
	return best
}

// compare is negative if candidate i beats candidate j, and 0 if only a draw can
// tell them apart. Everybody beats -1.
func compare(costs []float64, in []Input, i, j int) int {
	if j < 0 {
		return -1
	}
	a, b := costs[i], costs[j]
	switch {
	case math.IsNaN(a) || math.IsNaN(b):
		if math.IsNaN(a) != math.IsNaN(b) {
			return sign(math.IsNaN(b))
		}
	case math.IsInf(a, 0) || math.IsInf(b, 0):
		if a != b {
			return sign(a < b)
		}
	case math.Abs(a-b) > tie*max(math.Abs(a), math.Abs(b)):
		return sign(a < b)
	}
	switch {
	case in[i].ActiveRequests != in[j].ActiveRequests:
		return in[i].ActiveRequests - in[j].ActiveRequests
	default:
		return in[i].ActiveBlocks - in[j].ActiveBlocks
	}
}

func sign(less bool) int {
	if less {
		return -1
	}
	return 1
}
