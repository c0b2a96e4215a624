// SPDX-License-Identifier: Apache-2.0

package scorer

import "math"

// Rule chooses one of the candidates, -1 if there is none. costs is scratch, as
// long as in; a rule that counts costs leaves them there, lower ones better.
//
// Every cost policy is a rule, [Settings.Choose]; the functions of this file are
// rules that others have published, for comparison.
type Rule func(r *Request, in []Input, costs []float64) int

// PublishedRule is a rule with its name.
type PublishedRule struct {
	Name string
	Rule Rule
}

// PublishedRules returns the published rules with their authors' settings.
func PublishedRules() []PublishedRule {
	return []PublishedRule{
		{"random", func(r *Request, in []Input, _ []float64) int { return Random(len(in), r.U) }},
		{"round-robin", func(r *Request, in []Input, _ []float64) int { return RoundRobin(len(in), r.Turn) }},
		{"power-of-two", func(r *Request, in []Input, _ []float64) int { return PowerOfTwo(in, r.U) }},
		{"least-requests", func(r *Request, in []Input, _ []float64) int { return LeastLoaded(in, r.U) }},
		{"vllm-dp", VLLMDataParallel},
		{"least-pending", LeastPending},
		{"longest-prefix", LongestPrefix},
		{"session-hash", SessionHash},
		{"chwbl-1.25", CHWBL(1.25, false)},
		{"chwbl-1.25-scattered", CHWBL(1.25, true)},
		{"sglang-cache-aware", SGLangCacheAware(.5, 32, 1.1)},
		{"aibrix-prefix-cache", AIBrixPrefixCache(8, 1)},
		{"gie-3-2-2-2", GIEBlend(3, 2, 2, 2)},
		{"dualmap", DualMap(5, false)},
		{"dualmap-first", DualMap(5, true)},
		{"two-tier-8", TwoTier(8)},
		{"token-aware-18s", TokenAwareFilter(18)},
		{"token-aware-2s", TokenAwareFilter(2)},
		{"lmetric", LMetric},
	}
}

// PeakPrefill is what the published rules that think in seconds take an engine to
// compute: tokens per second, of a dense model of 32B on two H100.
const PeakPrefill = 20480

// least fills costs and picks the lowest.
func least(r *Request, in []Input, costs []float64, cost func(in *Input) float64) int {
	for i := range in {
		costs[i] = cost(&in[i])
	}
	return Pick(costs, in, r.U)
}

// VLLMDataParallel is the balancer between the ranks of a vLLM: 4 · waiting +
// running requests.
func VLLMDataParallel(r *Request, in []Input, costs []float64) int {
	return least(r, in, costs, func(in *Input) float64 {
		return float64(4*in.WaitingRequests + in.ActiveRequests - in.WaitingRequests)
	})
}

// LeastPending takes the worker with the least prefill waiting.
func LeastPending(r *Request, in []Input, costs []float64) int {
	return least(r, in, costs, func(in *Input) float64 { return float64(in.PendTokens) })
}

// LMetric multiplies the prefill with the batch: (pend + own) · (requests + 1).
func LMetric(r *Request, in []Input, costs []float64) int {
	return least(r, in, costs, func(in *Input) float64 {
		return float64(in.PendTokens+r.uncached(in)) * float64(in.ActiveRequests+1)
	})
}

// LongestPrefix takes the worker that holds most of the prompt, whatever its load.
func LongestPrefix(r *Request, in []Input, _ []float64) int {
	return best(len(in), r.U, func(i, j int) int { return longer(in, i, j) })
}

// longer orders by the length of the match, then by requests.
func longer(in []Input, i, j int) int {
	if c := in[j].OverlapBlocks - in[i].OverlapBlocks; c != 0 {
		return c
	}
	return quieter(in, i, j)
}

// SessionHash sends a session to one worker for good.
func SessionHash(r *Request, in []Input, _ []float64) int {
	first, _ := ring(in, r.Session)
	return first
}

// ring returns the two workers that a key hashes to, -1 for those that are not
// there. When a worker comes or goes, only keys that it gains or owned move.
func ring(in []Input, key uint64) (first, second int) {
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
func (r *Request) prefixKey(n int) uint64 {
	if n = min(n, len(r.Sequence)); n > 0 {
		return r.Sequence[n-1]
	}
	return 0
}

// CHWBL is consistent hashing of the first two blocks with bounded loads: a worker
// with more than factor times the mean of the requests is passed over for the next
// one in worker order, or, scattered, for the next one that the hash leads to, which
// is another one for each prefix, as on a ring with very many points.
func CHWBL(factor float64, scattered bool) Rule {
	return func(r *Request, in []Input, _ []float64) int {
		key := r.prefixKey(2)
		start, _ := ring(in, key)
		if scattered {
			bound := loadBound(in, factor)
			return best(len(in), 0, func(i, j int) int {
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
func loadBound(in []Input, factor float64) float64 {
	total := 1
	for i := range in {
		total += in[i].ActiveRequests
	}
	return factor * float64(total) / float64(len(in))
}

func bounded(in []Input, start int, factor float64) int {
	bound := loadBound(in, factor)
	for k := range in {
		if i := (start + k) % len(in); float64(in[i].ActiveRequests) <= bound {
			return i
		}
	}
	return start
}

// loads returns the fewest and the most requests of a candidate.
func loads(in []Input) (fewest, most int) {
	for i := range in {
		n := in[i].ActiveRequests
		if i == 0 {
			fewest, most = n, n
		}
		fewest, most = min(fewest, n), max(most, n)
	}
	return fewest, most
}

// SGLangCacheAware is the router of SGLang: least requests when they differ by
// more than spread and by more than the factor ratio; else the longest match if it
// is more than share of the prompt; else the worker that holds the fewest blocks.
func SGLangCacheAware(share float64, spread int, ratio float64) Rule {
	return func(r *Request, in []Input, costs []float64) int {
		fewest, most := loads(in)
		if most-fewest > spread && float64(most) > ratio*float64(fewest) {
			return LeastLoaded(in, r.U)
		}
		i := LongestPrefix(r, in, costs)
		if i < 0 || r.share(&in[i]) > share {
			return i
		}
		return least(r, in, costs, func(in *Input) float64 { return float64(in.CachedBlocks) })
	}
}

// AIBrixPrefixCache is the prefix-cache router of AIBrix: when requests differ by
// more than spread, only the idlest workers count. The longest match wins, then
// fewer requests, among those with at most the mean and sigmas standard deviations
// of requests; without any match the fewest requests.
func AIBrixPrefixCache(spread int, sigmas float64) Rule {
	return func(r *Request, in []Input, _ []float64) int {
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
			return in[i].OverlapBlocks > 0 && float64(in[i].ActiveRequests) <= bound*(1+tie)
		}
		return best(len(in), r.U, func(i, j int) int {
			if a, b := counts(i), counts(j); a != b {
				return sign(a)
			} else if a {
				return longer(in, i, j)
			}
			return quieter(in, i, j)
		})
	}
}

// GIEBlend adds up scores as the endpoint picker of the Gateway API does: the
// share of the prompt that matches, how short the queue is among the candidates,
// free KV cache, and, for a prompt that nobody knows, how long ago the worker last
// got such a one. The highest sum wins; costs are the sums negated.
func GIEBlend(prefix, queue, memory, cold float64) Rule {
	return func(r *Request, in []Input, costs []float64) int {
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
			costs[i] = -(prefix*r.share(&in[i]) + queue*idle + memory*(1-in[i].KVUse) + cold*rank)
		}
		return Pick(costs, in, r.U)
	}
}

// coldRank is 1 for the worker whose last unknown prompt is longest ago, and falls
// to 0 for the latest one.
func coldRank(in []Input, i int) float64 {
	older := 0
	for j := range in {
		if in[j].LastCold < in[i].LastCold {
			older++
		}
	}
	return 1 - float64(older)/float64(max(1, len(in)-1))
}

// DualMap hashes the first four blocks to two workers and takes the one with the
// longer match, unless the prefill there takes more than gate seconds; then the
// quicker one. Of equal matches it takes the quicker one, or, if first is set, the
// first as if its match were longer.
func DualMap(gate float64, first bool) Rule {
	return func(r *Request, in []Input, costs []float64) int {
		i, j := ring(in, r.prefixKey(4))
		if j < 0 {
			return i
		}
		return dual(r, in, i, j, gate, first)
	}
}

func dual(r *Request, in []Input, i, j int, gate float64, first bool) int {
	seconds := func(i int) float64 { return float64(in[i].PendTokens+r.uncached(&in[i])) / PeakPrefill }
	if in[j].OverlapBlocks > in[i].OverlapBlocks {
		i, j = j, i
	}
	longer := first || in[i].OverlapBlocks > in[j].OverlapBlocks
	if longer && seconds(i) <= gate || seconds(i) <= seconds(j) {
		return i
	}
	return j
}

// TwoTier takes the fewest requests when they differ by more than spread; else the
// longest match if it is more than half of the prompt; else the fewest requests.
func TwoTier(spread int) Rule {
	return func(r *Request, in []Input, costs []float64) int {
		if fewest, most := loads(in); most-fewest <= spread {
			if i := LongestPrefix(r, in, costs); i < 0 || r.share(&in[i]) > .5 {
				return i
			}
		}
		return LeastLoaded(in, r.U)
	}
}

// TokenAwareFilter keeps the workers that hold at least .8 of the prompt, unless
// all of them have at least gate seconds more prefill waiting than the idlest
// other; of what is left it takes the least prefill with the prompt's.
func TokenAwareFilter(gate float64) Rule {
	return func(r *Request, in []Input, costs []float64) int {
		warm, cold := math.MaxInt, math.MaxInt // least pend of either kind
		for i := range in {
			if r.share(&in[i]) >= .8 {
				warm = min(warm, in[i].PendTokens)
			} else {
				cold = min(cold, in[i].PendTokens)
			}
		}
		all := warm == math.MaxInt || float64(warm-cold) > gate*PeakPrefill
		for i := range in {
			costs[i] = math.Inf(1)
			if all || r.share(&in[i]) >= .8 {
				costs[i] = float64(in[i].PendTokens + r.uncached(&in[i]))
			}
		}
		return Pick(costs, in, r.U)
	}
}

// SessionOverloaded says whether the worker that a session is bound to has so much
// more to do than the others that the session should move: more than twice the
// mean of pending and held tokens, and 50,000 on top.
func SessionOverloaded(in []Input, bound int) bool {
	var sum float64
	for i := range in {
		sum += float64(in[i].PendTokens + in[i].DecodeTokens)
	}
	return float64(in[bound].PendTokens+in[bound].DecodeTokens) > 2*sum/float64(len(in))+50_000
}
