// SPDX-License-Identifier: Apache-2.0

package scorer

import "math"

// Costs fills costs, as long as in, with the cost of each candidate by the policy. A
// candidate with preferred taints has its cost multiplied by e^−tanh(weight), which is
// between .37 and 2.72. Costs are finite; see [Bound]. The settings must be valid.
func (s *Settings) Costs(r *Request, in []Input, costs []float64) {
	least := 0.
	if s.Policy == DynamoNewer {
		least = leastPending(in)
	}
	taints := s.Policy != Weighted && !r.Pinned // a weighted cost may be negative: the factor would have the opposite effect
	for i := range in {
		costs[i] = s.cost(r, &in[i], least)
		if w := in[i].TaintWeight; w != 0 && taints {
			costs[i] *= math.Exp(-math.Tanh(w))
		}
	}
	Bound(costs)
}

// cost returns the cost of a candidate. least is the lowest pending prefill of all candidates,
// which only DynamoNewer uses.
func (s *Settings) cost(r *Request, in *Input, least float64) float64 {
	switch s.Policy {
	case Dynamo:
		return dynamo(s, r, in)
	case DynamoNewer:
		return s.dynamoNewer(r, in, least)
	case PredictedTTFT:
		return predictedTTFT(s, r, in)
	case Weighted:
		return weighted(s, r, in)
	default:
		return tokens(s, r, in)
	}
}

// Bound makes all costs finite. NaN becomes the highest cost. Very large weights are
// allowed, but JSON has no infinite numbers.
func Bound(costs []float64) {
	for i, c := range costs {
		if math.IsNaN(c) {
			c = math.MaxFloat64
		}
		costs[i] = min(max(c, -math.MaxFloat64), math.MaxFloat64)
	}
}

// Choose fills costs and returns the index of the chosen candidate, -1 without candidates:
// by [Softmax] if there is a temperature, by [Pick] otherwise. It is a [Rule].
func (s *Settings) Choose(r *Request, in []Input, costs []float64) int {
	s.Costs(r, in, costs)
	switch {
	case s.Temperature > 0:
		return Softmax(costs, s.Temperature, r.U)
	case s.Policy == Weighted:
		return Best(len(costs), 0, func(i, j int) int { return compare(costs[i], costs[j]) })
	default:
		return Pick(costs, in, r.U)
	}
}

func dynamo(s *Settings, r *Request, in *Input) float64 {
	decode := in.mean(in.ActiveBlocks) + float64(in.AdditionalBlocks)
	if r.PrefillUntracked {
		return decode
	}
	prefill := in.mean(in.PendTokens) + float64(r.PromptTokens-in.OverlapBlocks*max(1, r.BlockSize))
	return s.OverlapWeight*max(0, prefill)/r.block() + decode
}

// leastPending returns the lowest pending prefill of the candidates.
func leastPending(in []Input) float64 {
	least := math.Inf(1)
	for i := range in {
		least = min(least, in[i].mean(in[i].PendTokens))
	}
	return least
}

func (s *Settings) dynamoNewer(r *Request, in *Input, leastPend float64) float64 {
	block := r.block()
	decay := 1.
	if s.CreditDecay > 0 && !r.PrefillUntracked {
		prompt := max(1, math.Ceil(float64(r.PromptTokens)/block))
		decay = 1 / (1 + s.CreditDecay*((in.mean(in.PendTokens)-leastPend)/block)/prompt)
	}
	credit := s.OverlapCredit*decay*float64(in.OverlapBlocks) + s.lowerTiers(in)
	decode := in.mean(in.ActiveBlocks) + float64(in.AdditionalBlocks)
	var cost float64
	if in.DecodeOnly && r.PrefillUntracked && s.OverlapCredit > 0 {
		cost = max(0, decode-credit)
	} else {
		cost = s.PrefillScale*max(0, s.rawPrefill(r, in)-credit) + decode
	}
	return cost + s.RequestWeight*in.mean(in.ActiveRequests)
}

// rawPrefill returns the prefill blocks of the worker as if nothing of the new
// prompt were cached.
func (s *Settings) rawPrefill(r *Request, in *Input) float64 {
	if r.PrefillUntracked {
		return 0
	}
	cached := s.CachedTokens(r, in)
	return (in.mean(in.PendTokens) + float64(max(0, r.PromptTokens-cached)+cached)) / r.block()
}

// lowerTiers returns the value of blocks on lower tiers in blocks on the device.
func (s *Settings) lowerTiers(in *Input) float64 {
	return s.HostWeight*float64(in.HostBlocks) + s.DiskWeight*float64(in.DiskBlocks)
}

// CachedTokens returns the tokens of the prompt that the worker need not compute,
// those of lower tiers by their weight. There may be more of them than the prompt has.
func (s *Settings) CachedTokens(r *Request, in *Input) int {
	if in.HostBlocks|in.DiskBlocks == 0 {
		return in.OverlapBlocks * max(1, r.BlockSize) // nothing to round
	}
	return int(math.Round(min((float64(in.OverlapBlocks)+s.lowerTiers(in))*r.block(), MostTokens)))
}

// UncachedTokens returns the tokens of the prompt that the worker would compute,
// at least one.
func (s *Settings) UncachedTokens(r *Request, in *Input) int {
	return max(1, r.PromptTokens-s.CachedTokens(r, in))
}

// TokenCost is the cost of the tokens policy:
//
//	pend + own · (1 + attention · (prompt − own/2)) · (1 + alpha · requests)
//
// pend is the pending prefill of the worker, own the tokens of the prompt that it would
// compute, requests the number of requests on it. The sum is the wait before the first
// token. The product is the delay that the prefill causes to the decoding requests. All
// may be means over the members of a router group. Memory in use does not count: it would
// make the worker expensive that holds the prefix. The policy adds the wait for a place in
// the engine's batch; see crowding.
func TokenCost(pend, own, prompt, requests, alpha, attention float64) float64 {
	return pend + own*(1+attention*(prompt-own/2))*(1+alpha*requests)
}

func tokens(s *Settings, r *Request, in *Input) float64 {
	if r.PrefillUntracked {
		// Without prefill only the use of memory differs.
		return in.mean(in.ActiveBlocks) + float64(in.AdditionalBlocks)
	}
	return TokenCost(in.mean(in.PendTokens), float64(s.UncachedTokens(r, in)), float64(r.PromptTokens),
		in.mean(in.ActiveRequests), s.Alpha, s.Attention) + crowding(r, in)
}

// roomy is the share of the engine's batch up to which a new request does not wait for a
// place. It is below 1 because other routers decide at the same time.
const roomy = .9

// crowding is the wait for a place in the engine's batch, which pending prefill does not
// show: for each request above roomy the whole prompt counts once more. Without it, short
// prompts with a common prefix all go to the worker that holds the prefix, and wait there
// while other workers have room.
func crowding(r *Request, in *Input) float64 {
	if in.MaxRequests <= 0 {
		return 0
	}
	return float64(r.PromptTokens) * max(0, in.mean(in.ActiveRequests)+1-roomy*float64(in.MaxRequests))
}

func predictedTTFT(s *Settings, r *Request, in *Input) float64 {
	own := s.UncachedTokens(r, in)
	return s.Engine.ttft(own, r.PromptTokens, in) + s.Alpha*in.mean(in.ActiveRequests)*s.Engine.own(own, r.PromptTokens)
}

func weighted(s *Settings, r *Request, in *Input) float64 {
	batch := s.MaxBatch
	if in.MaxRequests > 0 {
		batch = float64(in.MaxRequests)
	}
	return -(s.WeightedOverlap*r.share(in) - s.WeightedRequests*in.mean(in.ActiveRequests)/batch - s.WeightedKVUse*in.KVUse)
}

// ModelTTFT estimates by the engine's model when the first token of the request
// would come from this worker, in ms.
func (s *Settings) ModelTTFT(r *Request, in *Input) float64 {
	return s.Engine.ttft(s.UncachedTokens(r, in), r.PromptTokens, in)
}

// CoarseTTFT estimates the time to the first token in ms without a model of the engine.
// tokensPerSecond is the prefill throughput of the engine.
func CoarseTTFT(uncached, requests int, tokensPerSecond float64) float64 {
	return 1000*float64(uncached)/tokensPerSecond + 10*float64(requests)
}
