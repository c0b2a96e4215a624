// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"

	"github.com/kvroute/kvroute/scorer"
)

// publishedRules returns the rules that others have published, with their authors' settings.
func publishedRules() []Rule {
	rules := []struct {
		name   string
		choose scorer.Rule
	}{
		{"random", func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.Random(len(in), r.U) }},
		{"round-robin", func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.RoundRobin(len(in), r.Turn) }},
		{"power-of-two", func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.PowerOfTwo(in, r.U) }},
		{"least-requests", func(r *scorer.Request, in []scorer.Input, _ []float64) int { return scorer.LeastLoaded(in, r.U) }},
		{"vllm-dp", vllmDataParallel},
		{"least-pending", leastPending},
		{"longest-prefix", longestPrefix},
		{"session-hash", sessionHash},
		{"chwbl-1.25", chwbl(1.25, false)},
		{"chwbl-1.25-scattered", chwbl(1.25, true)},
		{"sglang-cache-aware", sglangCacheAware(.5, 32, 1.1)},
		{"aibrix-prefix-cache", aibrixPrefixCache(8, 1)},
		{"gie-3-2-2-2", gieBlend(3, 2, 2, 2)},
		{"dualmap", dualMap(5, false)},
		{"dualmap-first", dualMap(5, true)},
		{"two-tier-8", twoTier(8)},
		{"token-aware-18s", tokenAwareFilter(18)},
		{"token-aware-2s", tokenAwareFilter(2)},
		{"lmetric", lMetric},
	}
	all := make([]Rule, 0, len(rules))
	for _, r := range rules {
		all = append(all, Rule{Name: r.name, Settings: scorer.Defaults(), Choose: r.choose})
	}
	return all
}

// peakPrefill is what the published rules that think in seconds take an engine to
// compute: tokens per second, of a dense model of 32B on two H100.
const peakPrefill = 20480

// sign orders two candidates: the first one goes first if less.
func sign(less bool) int {
	if less {
		return -1
	}
	return 1
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

// leastPending takes the worker with the least prefill waiting.
func leastPending(r *scorer.Request, in []scorer.Input, costs []float64) int {
	return least(r, in, costs, func(in *scorer.Input) float64 { return float64(in.PendTokens) })
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

// sessionHash sends a session to one worker for good.
func sessionHash(r *scorer.Request, in []scorer.Input, _ []float64) int {
	first, _ := ring(in, r.Session)
	return first
}

// ring returns the two workers that a key hashes to, -1 for those that are not
// there. When a worker comes or goes, only keys that it gains or owned move.
func ring(in []scorer.Input, key uint64) (first, second int) {
	first, second = -1, -1
	var high, next uint64
	for i := range in {
		switch h := mix(key ^ mix(in[i].Key)); {
		case first < 0 || h > high:
			second, next = first, high
			first, high = i, h
		case second < 0 || h > next:
			second, next = i, h
		}
	}
	return first, second
}

// mix spreads the bits of x: the finaliser of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// prefixKey is the hash of the prompt's first n blocks.
func prefixKey(r *scorer.Request, n int) uint64 {
	if n = min(n, len(r.Sequence)); n > 0 {
		return r.Sequence[n-1]
	}
	return 0
}

// chwbl is consistent hashing of the first two blocks with bounded loads: a worker
// with more than factor times the mean of the requests is passed over for the next
// one in worker order, or, scattered, for the next one that the hash leads to, which
// is another one for each prefix, as on a ring with very many points.
func chwbl(factor float64, scattered bool) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, _ []float64) int {
		key := prefixKey(r, 2)
		start, _ := ring(in, key)
		if scattered {
			bound := loadBound(in, factor)
			return scorer.Best(len(in), 0, func(i, j int) int {
				if a, b := float64(in[i].ActiveRequests) <= bound, float64(in[j].ActiveRequests) <= bound; a != b {
					return sign(a)
				}
				return sign(mix(key^mix(in[i].Key)) > mix(key^mix(in[j].Key)))
			})
		}
		return bounded(in, start, factor)
	}
}

// loadBound is factor times the mean of the requests, the new one included.
func loadBound(in []scorer.Input, factor float64) float64 {
	total := 1
	for i := range in {
		total += in[i].ActiveRequests
	}
	return factor * float64(total) / float64(len(in))
}

func bounded(in []scorer.Input, start int, factor float64) int {
	bound := loadBound(in, factor)
	for k := range in {
		if i := (start + k) % len(in); float64(in[i].ActiveRequests) <= bound {
			return i
		}
	}
	return start
}

// loads returns the fewest and the most requests of a candidate.
func loads(in []scorer.Input) (fewest, most int) {
	for i := range in {
		n := in[i].ActiveRequests
		if i == 0 {
			fewest, most = n, n
		}
		fewest, most = min(fewest, n), max(most, n)
	}
	return fewest, most
}

// sglangCacheAware is the router of SGLang: least requests when they differ by
// more than spread and by more than the factor ratio; else the longest match if it
// is more than share of the prompt; else the worker that holds the fewest blocks.
func sglangCacheAware(share float64, spread int, ratio float64) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		fewest, most := loads(in)
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
		fewest, most := loads(in)
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
			if a, b := counts(i), counts(j); a != b {
				return sign(a)
			} else if a {
				return longer(in, i, j)
			}
			return scorer.Quieter(in, i, j)
		})
	}
}

// gieBlend adds up scores as the endpoint picker of the Gateway API does: the
// share of the prompt that matches, how short the queue is among the candidates,
// free KV cache, and, for a prompt that nobody knows, how long ago the worker last
// got such a one. The highest sum wins; costs are the sums negated.
func gieBlend(prefix, queue, memory, cold float64) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		known := false
		var shortest, longest int
		for i := range in {
			n := in[i].WaitingRequests
			if i == 0 {
				shortest, longest = n, n
			}
			shortest, longest = min(shortest, n), max(longest, n)
			known = known || in[i].OverlapBlocks > 0
		}
		for i := range in {
			idle := 1.
			if longest > shortest {
				idle = float64(longest-in[i].WaitingRequests) / float64(longest-shortest)
			}
			rank := .5
			if !known {
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

// dualMap hashes the first four blocks to two workers and takes the one with the
// longer match, unless the prefill there takes more than gate seconds; then the
// quicker one. Of equal matches it takes the quicker one, or, if first is set, the
// first as if its match were longer.
func dualMap(gate float64, first bool) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		i, j := ring(in, prefixKey(r, 4))
		if j < 0 {
			return i
		}
		return dual(r, in, i, j, gate, first)
	}
}

func dual(r *scorer.Request, in []scorer.Input, i, j int, gate float64, first bool) int {
	seconds := func(i int) float64 { return float64(in[i].PendTokens+uncached(r, &in[i])) / peakPrefill }
	if in[j].OverlapBlocks > in[i].OverlapBlocks {
		i, j = j, i
	}
	longer := first || in[i].OverlapBlocks > in[j].OverlapBlocks
	if longer && seconds(i) <= gate || seconds(i) <= seconds(j) {
		return i
	}
	return j
}

// twoTier takes the fewest requests when they differ by more than spread; else the
// longest match if it is more than half of the prompt; else the fewest requests.
func twoTier(spread int) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		if fewest, most := loads(in); most-fewest <= spread {
			if i := longestPrefix(r, in, costs); i < 0 || cachedShare(r, &in[i]) > .5 {
				return i
			}
		}
		return scorer.LeastLoaded(in, r.U)
	}
}

// tokenAwareFilter keeps the workers that hold at least .8 of the prompt, unless
// all of them have at least gate seconds more prefill waiting than the idlest
// other; of what is left it takes the least prefill with the prompt's.
func tokenAwareFilter(gate float64) scorer.Rule {
	return func(r *scorer.Request, in []scorer.Input, costs []float64) int {
		warm, cold := math.MaxInt, math.MaxInt // least pend of either kind
		for i := range in {
			if cachedShare(r, &in[i]) >= .8 {
				warm = min(warm, in[i].PendTokens)
			} else {
				cold = min(cold, in[i].PendTokens)
			}
		}
		all := warm == math.MaxInt || float64(warm-cold) > gate*peakPrefill
		for i := range in {
			costs[i] = math.Inf(1)
			if all || cachedShare(r, &in[i]) >= .8 {
				costs[i] = float64(in[i].PendTokens + uncached(r, &in[i]))
			}
		}
		return scorer.Pick(costs, in, r.U)
	}
}
