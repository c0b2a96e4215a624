// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"

	"github.com/kvroute/kvroute/scorer"
)

// publishedRules returns the rules of other routers, with their authors' settings.
func publishedRules() []Rule {
	rules := []Rule{
		{Name: "random", Choose: func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.Random(len(in), r.U) }},
		{Name: "round-robin", Choose: func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.RoundRobin(len(in), r.Turn) }},
		{Name: "power-of-two", Choose: func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.PowerOfTwo(in, r.U) }},
		{Name: "least-requests", Choose: func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.LeastLoaded(in, r.U) }},
		{Name: "vllm-dp", Choose: vllmDataParallel},
		{Name: "sglang-cache-aware", Choose: sglangCacheAware(.5, 32, 1.1)},
		{Name: "aibrix-prefix-cache", Choose: aibrixPrefixCache(8, 1)},
		{Name: "gie-3-2-2-2", Choose: gieBlend(3, 2, 2, 2)},
		{Name: "lmetric", Choose: lMetric},
	}
	for i := range rules {
		rules[i].Settings = scorer.Defaults()
	}
	return rules
}

// cachedShare returns the share of the prompt that the worker holds on its device.
func cachedShare(r *scorer.Request, in *scorer.Input) float64 {
	return float64(match(r, in)) / float64(max(1, r.PromptTokens))
}

// uncached returns the tokens that the worker would compute, at least one.
func uncached(r *scorer.Request, in *scorer.Input) int { return max(1, r.PromptTokens-match(r, in)) }

func match(r *scorer.Request, in *scorer.Input) int {
	return min(in.OverlapBlocks*max(1, r.BlockSize), max(0, r.PromptTokens))
}

// least fills costs and picks the lowest.
func least(r *scorer.Request, in []scorer.Input, costs []float64, cost func(in *scorer.Input) float64) int {
	for i := range in {
		costs[i] = cost(&in[i])
	}
	return scorer.Pick(costs, in, r.U)
}

// vllmDataParallel is the balancer between the ranks of a vLLM: 4 · waiting +
// running requests.
func vllmDataParallel(r *scorer.Request, in []scorer.Input, costs []float64) int {
	return least(r, in, costs, func(in *scorer.Input) float64 {
		return float64(4*in.WaitingRequests + in.ActiveRequests - in.WaitingRequests)
	})
}

// lMetric multiplies the prefill with the batch: (pend + own) · (requests + 1).
func lMetric(r *scorer.Request, in []scorer.Input, costs []float64) int {
	return least(r, in, costs, func(in *scorer.Input) float64 {
		return float64(in.PendTokens+uncached(r, in)) * float64(in.ActiveRequests+1)
	})
}

// longestPrefix takes the worker that holds most of the prompt, whatever its load.
func longestPrefix(r *scorer.Request, in []scorer.Input, _ []float64) int {
	return scorer.Best(len(in), r.U, func(i, j int) int { return longer(in, i, j) })
}

// longer orders by the length of the match, then by requests.
func longer(in []scorer.Input, i, j int) int {
	if c := in[j].OverlapBlocks - in[i].OverlapBlocks; c != 0 {
		return c
	}
	return scorer.Quieter(in, i, j)
}

// span returns the lowest and the highest value of a candidate.
func span(in []scorer.Input, of func(in *scorer.Input) int) (lowest, highest int) {
	for i := range in {
		n := of(&in[i])
		if i == 0 {
			lowest, highest = n, n
		}
		lowest, highest = min(lowest, n), max(highest, n)
	}
	return lowest, highest
}

func requests(in *scorer.Input) int { return in.ActiveRequests }

// sglangCacheAware is the router of SGLang: least requests when they differ by
// more than spread and by more than the factor ratio; else the longest match if it
// is more than share of the prompt; else the worker that holds the fewest blocks.
func sglangCacheAware(share float64, spread int, ratio float64) scorer.Rule { //nolint:unparam // the parameters are the published rule's
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		fewest, most := span(in, requests)
		if most-fewest > spread && float64(most) > ratio*float64(fewest) {
			return scorer.LeastLoaded(in, r.U)
		}
		i := longestPrefix(r, in, costs)
		if i < 0 || cachedShare(r, &in[i]) > share {
			return i
		}
		return least(r, in, costs, func(in *scorer.Input) float64 { return float64(in.CachedBlocks) })
	}
}

// aibrixPrefixCache is the prefix-cache router of AIBrix: when requests differ by
// more than spread, only the idlest workers count. The longest match wins, then
// fewer requests, among those with at most the mean and sigmas standard deviations
// of requests; without any match the fewest requests.
func aibrixPrefixCache(spread int, sigmas float64) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, _ []float64) int {
		fewest, most := span(in, requests)
		var sum, squares float64
		for i := range in {
			n := float64(in[i].ActiveRequests)
			sum, squares = sum+n, squares+n*n
		}
		mean := sum / float64(len(in))
		bound := mean + sigmas*math.Sqrt(max(0, squares/float64(len(in))-mean*mean))
		if most-fewest > spread {
			bound = float64(fewest)
		}
		counts := func(i int) bool {
			return in[i].OverlapBlocks > 0 && float64(in[i].ActiveRequests) <= bound*(1+1e-12)
		}
		return scorer.Best(len(in), r.U, func(i, j int) int {
			switch a, b := counts(i), counts(j); {
			case a && b:
				return longer(in, i, j)
			case a:
				return -1
			case b:
				return 1
			}
			return scorer.Quieter(in, i, j)
		})
	}
}

// gieBlend adds up scores as the endpoint picker of the Gateway API does: the
// share of the prompt that matches, how short the queue is among the candidates,
// free KV cache, and, for a prompt that no worker has cached, the time since the worker
// last got such a prompt. The highest sum wins; costs are the sums negated.
func gieBlend(prefix, queue, memory, cold float64) scorer.Rule { //nolint:unparam // the parameters are the published rule's
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		shortest, longest := span(in, func(in *scorer.Input) int { return in.WaitingRequests })
		_, known := span(in, func(in *scorer.Input) int { return in.OverlapBlocks })
		for i := range in {
			idle := 1.
			if longest > shortest {
				idle = float64(longest-in[i].WaitingRequests) / float64(longest-shortest)
			}
			rank := .5
			if known == 0 {
				rank = coldRank(in, i)
			}
			costs[i] = -(prefix*cachedShare(r, &in[i]) + queue*idle + memory*(1-in[i].KVUse) + cold*rank)
		}
		return scorer.Pick(costs, in, r.U)
	}
}

// coldRank is 1 for the worker whose last unknown prompt is longest ago, and falls
// to 0 for the latest one.
func coldRank(in []scorer.Input, i int) float64 {
	older := 0
	for j := range in {
		if in[j].LastCold < in[i].LastCold {
			older++
		}
	}
	return 1 - float64(older)/float64(max(1, len(in)-1))
}
