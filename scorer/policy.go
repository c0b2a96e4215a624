// SPDX-License-Identifier: Apache-2.0

package scorer

import "math"

// Policy names a formula for the cost of a candidate.
type Policy string

// The policies. All are costs, in a unit of their own; lower wins.
const (
	// Tokens is the default: the tokens to wait for, and the delay that the prefill causes
	// to requests that decode on the worker; see [TokenCost].
	Tokens Policy = "tokens"
	// Dynamo is the cost of NVIDIA Dynamo's KV router in its classic form, in
	// blocks: OverlapWeight · prefill blocks + decode blocks. The prefill blocks
	// are all prompt tokens that the worker has to compute with the new request.
	// They may be fractional and are never negative. The decode blocks are the blocks
	// active on the worker with the new request.
	Dynamo Policy = "dynamo"
	// DynamoNewer is the newer form of that cost: cached blocks are subtracted from the
	// prefill, by tier, and each request may add to the load.
	DynamoNewer Policy = "dynamo_newer"
	// PredictedTTFT is the time to the first token in ms by a model of the
	// engine, plus the delay of other requests as in Tokens; see [Engine].
	PredictedTTFT Policy = "predicted_ttft"
	// Weighted is −(WeightedOverlap · cached share − WeightedRequests ·
	// requests / largest batch of the engine − WeightedKVUse · KV use). The first
	// of equal candidates wins.
	Weighted Policy = "weighted"
)

// Policies returns the names of all policies, the default first.
func Policies() []Policy {
	return []Policy{Tokens, Dynamo, DynamoNewer, PredictedTTFT, Weighted}
}

// Costs fills costs, as long as in, with the cost of each candidate by the policy. A
// candidate with preferred taints has its cost multiplied by e^−tanh(weight), which is
// between .37 and 2.72. Costs are finite; see [Bound]. The settings must be valid.
func (s *Settings) Costs(r *Request, in []Input, costs []float64) {
	switch s.Policy {
	case Tokens:
		for i := range in {
			costs[i] = tokens(s, r, &in[i])
		}
	case Dynamo:
		for i := range in {
			costs[i] = dynamo(s, r, &in[i])
		}
	case DynamoNewer:
		dynamoNewer(s, r, in, costs)
	case PredictedTTFT:
		for i := range in {
			costs[i] = predictedTTFT(s, r, &in[i])
		}
	case Weighted:
		for i := range in {
			costs[i] = weighted(s, r, &in[i])
		}
	default:
		return
	}
	if s.Policy != Weighted && !r.Pinned { // a weighted cost may be negative: the factor would have the opposite effect
		for i := range in {
			if w := in[i].TaintWeight; w != 0 {
				costs[i] *= math.Exp(-math.Tanh(w))
			}
		}
	}
	Bound(costs)
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

// Choose fills costs and returns the index of the chosen candidate, -1 if there is
// none: by [Softmax] if there is a temperature, by [Pick] otherwise. It is a
// [Rule].
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

func dynamoNewer(s *Settings, r *Request, in []Input, costs []float64) {
	var least float64
	for i := range in {
		if pend := in[i].mean(in[i].PendTokens); i == 0 || pend < least {
			least = pend
		}
	}
	for i := range in {
		costs[i] = s.dynamoNewer(r, &in[i], least)
	}
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

// Engine is a model of an engine: how long one of its steps takes, in ms.
//
//	max(Floor, Step + Token · tokens) + Attention · Σ new · (context + new/2) + KVToken · tokens held
type Engine struct {
	Floor     float64 `json:"floor"`           // of a step
	Step      float64 `json:"step"`            // each step
	Token     float64 `json:"token" want:">0"` // each token computed
	Attention float64 `json:"attention"`       // each pair of a token and one before it
	KVToken   float64 `json:"kv_token"`        // each token held by a decoding request
	Chunk     float64 `json:"chunk" want:">0"` // prefill tokens in a step at most
}

// Dense32B is the engine of a dense model of 32B on two H100.
func Dense32B() Engine {
	return Engine{Floor: 11, Step: 6, Token: .0386, Attention: 2.33e-6, KVToken: 5.6e-5, Chunk: 8192}
}

// Dense8B is the engine of a dense model of 8B on one H100.
func Dense8B() Engine {
	return Engine{Floor: 5.8, Step: 2.9, Token: .0154, Attention: 1.3e-6, KVToken: 5.6e-5, Chunk: 8192}
}

// Dense70B is the engine of a dense model of 70B on four H100.
func Dense70B() Engine {
	return Engine{Floor: 15, Step: 10, Token: .0535, Attention: 4e-6, KVToken: 6e-5, Chunk: 8192}
}

// AttentionWeight is the attention weight of the tokens policy for this engine.
func (e *Engine) AttentionWeight() float64 { return e.Attention / e.Token }

// own is the time in ms that the uncached tokens of one prompt take.
func (e *Engine) own(uncached, prompt int) float64 {
	u := float64(uncached)
	return e.Token*u + e.Attention*u*(float64(prompt)-u/2)
}

// waiting is the cost of a pending token relative to its linear part. It contains
// attention, for prompts whose length is not known any more.
const waiting = 1.15

func (e *Engine) ttft(uncached, prompt int, in *Input) float64 {
	pend := in.mean(in.PendTokens)
	step := e.Floor + e.KVToken*in.mean(in.DecodeTokens)
	return e.own(uncached, prompt) + e.PrefillTime(pend) + (pend+float64(uncached))/e.Chunk*step
}

// DecodeStep is the time in ms of a step that computes one token of each of some
// requests, which hold so many tokens together.
func (e *Engine) DecodeStep(requests, held int) float64 {
	return max(e.Floor, e.Step+e.Token*float64(requests)) + e.KVToken*float64(held)
}

// PrefillTime is the time in ms that pending prefill tokens take.
func (e *Engine) PrefillTime(tokens float64) float64 { return waiting * e.Token * tokens }

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
