// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"math"

	"github.com/kvroute/kvroute/scorer"
)

// Published returns the names of the rules of other routers.
func Published() []string {
	names := []string{"dynamo", "dynamo-agentic", "dynamo-load-aware"}
	for _, r := range publishedRules() {
		names = append(names, r.Name)
	}
	return names
}

// publishedRules returns the rules of other routers, with their authors' settings.
func publishedRules() []Rule {
	rules := []Rule{
		{Name: "random", Choose: func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.Random(len(in), r.U) }},
		{Name: "round-robin", Choose: func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.RoundRobin(len(in), r.Turn) }},
		{Name: "power-of-two", Choose: func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.PowerOfTwo(in, r.U) }},
		{Name: "least-requests", Choose: func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.LeastLoaded(in, r.U) }},
		{Name: "vllm-dp", Choose: vllmDataParallel},
		{Name: "sglang-cache-aware", Choose: sglangCacheAware(.3, 64, 1.5)},
		{Name: "aibrix-prefix-cache", Choose: aibrixPrefixCache(8, 1)},
		{Name: "gie-3-2-2", Choose: gieBlend(3, 2, 2, 0)},
		{Name: "gie-3-2-2-2", Choose: gieBlend(3, 2, 2, 2)},
		{Name: "llm-d-baseline", Choose: llmdSticky(.8, 286_720)},
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

// lMetric multiplies the prefill with the batch: (pend + own) · (requests + 1). The source is
// "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling" (OSDI '26,
// arXiv 2603.15202v3). Its first factor is the new prefill tokens, with those of queued requests.
// Its second factor is the requests that run or wait. Both include the new request.
// Left out: the paper's detector, which excludes the holders of a hot prefix.
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

// sglangCacheAware is the policy cache_aware of sglang-router 0.3.2, with its defaults. The fewest
// requests win when requests differ by more than spread and by more than the factor ratio. Otherwise
// the longest match wins if it is more than share of the prompt. Otherwise the fewest requests win;
// before pull request 14650 the smallest tree did.
//
// Left out: the product guesses matches. Its tree has the characters of prompts that this router sent,
// up to 2^26 a worker, and knows no evictions of engines. Of equally long matches the product takes the
// worker that got such a prompt last. The simulator takes the fewest requests, which favors the rule.
func sglangCacheAware(share float64, spread int, ratio float64) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		fewest, most := span(in, requests)
		if most-fewest <= spread || float64(most) <= ratio*float64(fewest) {
			if i := longestPrefix(r, in, costs); i < 0 || cachedShare(r, &in[i]) > share {
				return i
			}
		}
		return scorer.LeastLoaded(in, r.U)
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

// gieBlend adds up scores as the endpoint picker of the Gateway API Inference Extension does: the
// share of the prompt that matches, how short the queue is between the shortest and the longest one,
// free KV cache, and, for a prompt that no worker has cached, the time since the worker last got
// such a prompt. The highest sum wins, a random one of equal sums. Costs are the sums negated.
//
// The weights 3, 2, 2 are the default of Gateway API Inference Extension 1.5.0 and of llm-d-router,
// its successor. The fourth weight is that of no-hit-lru-scorer: 2 in the former guide
// optimized-baseline of llm-d, otherwise 0.
//
// Left out: the product guesses matches from the prompts that it sent, in blocks of 16 tokens. It looks
// at the first 4,096 tokens in 1.5.0, at 131,072 in llm-d-router. Its queue and KV use are metrics that
// the engine reports later; the queue here is all requests before their first token. llm-d-router takes
// equal sums in turn.
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
		return scorer.Best(len(in), r.U, func(i, j int) int { return cmp.Compare(costs[i], costs[j]) })
	}
}

// coldRank is 1 for the worker whose last unknown prompt is longest ago, and falls
// to 0 for the latest one. Workers that never got one come first, in their order.
func coldRank(in []scorer.Input, i int) float64 {
	older := 0
	for j := range in {
		if c := cmp.Compare(in[j].LastCold, in[i].LastCold); c < 0 || c == 0 && j < i {
			older++
		}
	}
	return 1 - float64(older)/float64(max(1, len(in)-1))
}

// llmdSticky is the guide optimized-baseline of llm-d at commit 0a3b0c9, newer than the weights 3, 2,
// 2, 2. Workers that hold at least share of the prompt are candidates. All workers are if none holds as
// much, or if the idlest holder has more than gap pending tokens above the idlest other worker. The
// candidate with the fewest tokens to compute wins. The gap is the guide's, for a 32B model on two H100.
//
// Left out: the product guesses matches, as in [gieBlend], and takes equal workers in turn.
func llmdSticky(share float64, gap int) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		sticky, other := math.MaxInt, math.MaxInt // least pending tokens
		for i := range in {
			if cachedShare(r, &in[i]) >= share {
				sticky = min(sticky, in[i].PendTokens)
			} else {
				other = min(other, in[i].PendTokens)
			}
		}
		all := sticky == math.MaxInt || other < sticky-gap
		for i := range in {
			costs[i] = float64(in[i].PendTokens + r.PromptTokens - match(r, &in[i]))
			if !all && cachedShare(r, &in[i]) < share {
				costs[i] = math.Inf(1)
			}
		}
		return scorer.Best(len(in), r.U, func(i, j int) int { return cmp.Compare(costs[i], costs[j]) })
	}
}
