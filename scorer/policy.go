// SPDX-License-Identifier: Apache-2.0

package scorer

import (
	"cmp"
	"math"
	"slices"
)

// Costs fills costs, as long as in, with the cost of each candidate by the policy. A
// candidate with preferred taints has its cost multiplied by e^−tanh(weight), which is
// between .37 and 2.72. Costs are finite; see [Bound]. The settings must be valid.
func (s *Settings) Costs(r *Request, in []Input, costs []float64) {
	s.costsOf(r, in, costs, traitsOf(in))
}

func (s *Settings) costsOf(r *Request, in []Input, costs []float64, some traits) {
	switch {
	case s.Policy == DynamoNewer:
		least := math.Inf(1)
		for i := range in {
			least = min(least, in[i].mean(in[i].PendTokens))
		}
		for i := range in {
			costs[i] = s.dynamoNewer(r, &in[i], least)
		}
	case s.Policy == Tokens && !r.PrefillUntracked:
		s.tokens(r, in, costs)
	default:
		for i := range in {
			costs[i] = s.cost(r, &in[i])
		}
	}
	if some.speed {
		s.bySpeed(r, in, costs)
	}
	// A weighted cost may be negative: the factor would have the opposite effect.
	if some.taint && s.Policy != Weighted && !r.Pinned {
		for i := range in {
			if w := in[i].TaintWeight; w != 0 {
				costs[i] *= math.Exp(-math.Tanh(w))
			}
		}
	}
	Bound(costs)
}

// traits are properties that at least one candidate has. They are found in one pass, because inputs of thousands of
// workers are in no fast cache.
type traits struct {
	speed    bool // other than 1
	taint    bool // a preferred one
	unusable bool // blocks
}

func traitsOf(in []Input) (some traits) {
	for i := range in {
		c := &in[i]
		some.speed = some.speed || c.Speed > 0 && c.Speed != 1
		some.taint = some.taint || c.TaintWeight != 0
		some.unusable = some.unusable || c.UnusableBlocks > 0
	}
	return some
}

// mostTokens bounds the cached tokens of a prompt, far above what any engine computes, so that no sum
// overflows.
const mostTokens = 1 << 30

// speedPower is the power of a speed by which costs are divided. It was found by simulation: with 1, slow
// workers stay idle while the queues of fast ones grow; with less, a few shared prompts wait on slow workers.
const speedPower = .75

// bySpeed divides the costs of the candidates by their speeds, if the costs stand for times. Before, each cost gets
// the time of the steps of the output itself, with the share that DecodeDelay has.
func (s *Settings) bySpeed(r *Request, in []Input, costs []float64) {
	base := s.DecodeWeight * s.Engine.Floor * r.OutputTokens / 3 // ms
	switch {
	case s.Policy == PredictedTTFT:
	case s.Policy == Tokens && !r.PrefillUntracked:
		base /= s.Engine.Token
	default:
		return
	}
	for i := range in {
		costs[i] += base
		if v := in[i].Speed; v > 0 {
			costs[i] /= math.Pow(v, speedPower)
		}
	}
}

// cost returns the cost of a candidate by a policy that compares it with no other one.
func (s *Settings) cost(r *Request, in *Input) float64 {
	switch s.Policy {
	case Dynamo:
		return dynamo(s, r, in)
	case PredictedTTFT:
		return predictedTTFT(s, r, in)
	case Weighted:
		return weighted(s, r, in)
	default: // Tokens
		return s.memory(r, in)
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
	some := traitsOf(in)
	s.costsOf(r, in, costs, some)
	switch {
	case s.Temperature > 0:
		return Softmax(costs, s.Temperature, r.U)
	case s.Policy == Weighted:
		return Best(len(costs), 0, func(i, j int) int { return compare(costs[i], costs[j]) })
	case s.Policy == Tokens && some.unusable:
		return s.junction(r, in, costs)
	default:
		return Pick(costs, in, r.U)
	}
}

// junctionShare is the share of a later prompt's prefill that a request may cost more, if the worker then saves this
// prefill. It was found by simulation: a margin of one block alone has little effect, since with blocks of 16 tokens
// costs within one block of the lowest are rare under load.
const junctionShare = .5

// junction chooses for a hybrid model. If a worker holds more of the prompt than its model can use, computing the
// prompt there makes the held part usable for later prompts that share it. Later prompts save the part that no
// candidate can use now. So a candidate counts if its cost exceeds the lowest one by at most junctionShare of that
// prefill, or by at most the prefill of the prompt's last block if that is more. The one that holds most blocks wins,
// and of equal ones that with the lower cost. It is no part of the cost, which would fill one worker.
func (s *Settings) junction(r *Request, in []Input, costs []float64) int {
	least, end, usable := slices.Min(costs), float64(max(r.PromptTokens, 0)), 0
	last := s.prefill(max(0, end-r.block()), end)
	for i := range in {
		usable = max(usable, in[i].OverlapBlocks)
	}
	holds := func(i int) int {
		n := in[i].OverlapBlocks + in[i].UnusableBlocks
		saved := s.prefill(float64(usable)*r.block(), float64(max(usable, n))*r.block())
		if costs[i] > least+max(last, junctionShare*saved) {
			return -1
		}
		return n
	}
	return Best(len(in), r.U, func(i, j int) int {
		return cmp.Or(holds(j)-holds(i), compare(costs[i], costs[j]), Quieter(in, i, j))
	})
}

func dynamo(s *Settings, r *Request, in *Input) float64 {
	decode := in.mean(in.ActiveBlocks) + float64(in.AdditionalBlocks)
	if r.PrefillUntracked {
		return decode
	}
	prefill := in.mean(in.PendTokens) + float64(r.PromptTokens-in.OverlapBlocks*max(1, r.BlockSize))
	return s.OverlapWeight*max(0, prefill)/r.block() + decode
}

// dynamoNewer is the cost of a candidate by DynamoNewer. leastPend is the lowest pending prefill of the
// candidates.
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
	return int(math.Round(min((float64(in.OverlapBlocks)+s.lowerTiers(in))*r.block(), mostTokens)))
}

// UncachedTokens returns the tokens of the prompt that the worker would compute,
// at least one.
func (s *Settings) UncachedTokens(r *Request, in *Input) int {
	return max(1, r.PromptTokens-s.CachedTokens(r, in))
}

// TokenCost is the cost of the tokens policy without the terms of prefixWait, copyCost, crowding and
// DecodeDelay:
//
//	pend + own · (1 + attention · (prompt − own/2)) · (1 + alpha · requests)
//
// pend is the pending prefill of the worker, own the tokens of the prompt that it would
// compute, requests the number of requests on it. The sum is the wait before the first
// token. The product is the delay that the prefill causes to the decoding requests. All
// may be means over the members of a router group. Memory in use does not count: it would
// make the worker expensive that holds the prefix.
func TokenCost(pend, own, prompt, requests, alpha, attention float64) float64 {
	return pend + own*(1+attention*(prompt-own/2))*(1+alpha*requests)
}

func (s *Settings) tokens(r *Request, in []Input, costs []float64) {
	most, ready := 0., 0. // cached tokens, and those of them that are computed
	for i := range in {
		costs[i] = float64(s.CachedTokens(r, &in[i]))
		most, ready = max(most, costs[i]), max(ready, costs[i]-float64(in[i].PendingBlocks)*r.block())
	}
	prompt, copies, delay := float64(r.PromptTokens), min(1, s.DecodeWeight), s.delayByToken(r)
	most = min(most, prompt)
	for i := range in {
		c, cached := &in[i], costs[i]
		cost := TokenCost(c.mean(c.PendTokens), max(1, prompt-cached), prompt, c.mean(c.ActiveRequests), s.Alpha, s.Attention)
		// Copies of a prefix have their own cost only where there is a reason to make some.
		if c.PendingBlocks > 0 {
			cost += copies * s.prefixWait(r, c, ready)
		}
		if cached < most {
			cost += copies * s.copyCost(r, c, cached, most)
		}
		if c.MaxRequests > 0 {
			cost += crowding(r, c)
		}
		costs[i] = cost + delay*c.held()
	}
}

// memory is the cost of the tokens policy without prefill, in blocks: what the requests on the worker
// hold and what the new one adds, less the credit for cached blocks of a decode worker.
func (s *Settings) memory(r *Request, in *Input) float64 {
	blocks := in.mean(in.ActiveBlocks)
	if s.DecodeWeight > 0 { // a shared block is read once for each request
		blocks = in.held() / r.block()
	}
	blocks += float64(in.AdditionalBlocks)
	if in.DecodeOnly {
		blocks = max(0, blocks-s.OverlapCredit*float64(in.OverlapBlocks))
	}
	return blocks
}

// DecodeDelay is the delay of the new request by the requests that decode on the worker, in tokens:
//
//	DecodeWeight · KVRead · output · held / 3
//
// Before the new request gets its next token, a step reads the keys and values of all held tokens.
// The tokens count for each request, because engines read a shared block once for each request. Of the
// difference between two workers a third remains on average while the output is generated: it falls
// as (1 − x)², since requests end, and new requests go to the worker that holds fewer tokens.
// Requests that wait will decode at the same time, so their prompts count, too.
func (s *Settings) DecodeDelay(r *Request, in *Input) float64 { return s.delayByToken(r) * in.held() }

// delayByToken is the delay for each held token.
func (s *Settings) delayByToken(r *Request) float64 {
	return s.DecodeWeight * s.KVRead * r.OutputTokens / 3
}

// prefixWait is the cost of waiting for blocks of the prompt that another request still computes on
// the worker, beyond the pending tokens, which contain these blocks once. The attention of the blocks
// makes the wait as long as computing the prefix on an idle worker. Blocks that another candidate has
// ready count once more: a worker that computes a copy has it to take the load of later requests, and
// until then requests go to workers that have the prefix. ready are the most tokens of the prompt that
// a candidate has computed.
func (s *Settings) prefixWait(r *Request, in *Input, ready float64) float64 {
	prefix, wait := r.pending(in)
	return s.prefill(prefix-wait, prefix) - wait + min(wait, max(0, ready-(prefix-wait)))
}

// busyCopy is the share of a copy's prefill by which the copy costs more on a worker with requests. It was
// found by simulation: without it, balanced workers make copies of each other's prefixes by chance.
const busyCopy = .25

// copyCost corrects the prefill of tokens that the worker would compute although another candidate has
// them cached. On a worker with requests the copy costs more, because it takes the room of other
// blocks. An idle worker shares the part of a prefix that requests in flight use: the copy serves
// this request and about as many later ones as there are now where the prefix is, so it costs this one
// 1 / (sharers + 1). mostCached are the most tokens that a candidate has cached, more than the worker's.
func (s *Settings) copyCost(r *Request, in *Input, cached, mostCached float64) float64 {
	switch {
	case in.Members > 1: // of a group's members some have requests, and some do not
		return 0
	case in.ActiveRequests > 0:
		return busyCopy * s.prefill(cached, mostCached)
	case float64(r.ActivePrefix) > cached:
		sharers := float64(r.Sharers)
		return -sharers / (sharers + 1) * s.prefill(cached, min(mostCached, float64(r.ActivePrefix)))
	}
	return 0
}

// prefill is the work, in tokens, to compute the tokens of a prompt from one position to another.
func (s *Settings) prefill(from, to float64) float64 {
	return (to - from) * (1 + s.Attention*(from+to)/2)
}

// pending returns the length of the prefix that the worker holds or will hold, and how much of it is
// still to be computed there, in tokens.
func (r *Request) pending(in *Input) (prefix, wait float64) {
	prefix = float64(r.match(in))
	return prefix, min(float64(in.PendingBlocks)*r.block(), in.mean(in.PendTokens), prefix)
}

// roomy is the share of the engine's batch up to which a new request does not wait for a
// place. It is below 1 because other routers decide at the same time.
const roomy = .9

// crowding is the wait for a place in the engine's batch, which pending prefill does not
// show: for each request above roomy the whole prompt counts once more. Without it, short
// prompts with a common prefix all go to the worker that holds the prefix, and wait there
// while other workers have room.
func crowding(r *Request, in *Input) float64 {
	return float64(r.PromptTokens) * max(0, in.mean(in.ActiveRequests)+1-roomy*float64(in.MaxRequests))
}

func predictedTTFT(s *Settings, r *Request, in *Input) float64 {
	own := s.UncachedTokens(r, in)
	return s.ttft(r, in, own) + s.Alpha*in.mean(in.ActiveRequests)*s.Engine.own(own, r.PromptTokens) + s.Engine.Token*s.DecodeDelay(r, in)
}

func weighted(s *Settings, r *Request, in *Input) float64 {
	batch := s.MaxBatch
	if in.MaxRequests > 0 {
		batch = float64(in.MaxRequests)
	}
	// The delay counts like tokens of the prompt that are not cached.
	share := r.share(in) - s.DecodeDelay(r, in)/float64(max(1, r.PromptTokens))
	return -(s.WeightedOverlap*share - s.WeightedRequests*in.mean(in.ActiveRequests)/batch - s.WeightedKVUse*in.KVUse)
}

// ModelTTFT estimates by the engine's model when the first token of the request
// would come from this worker, in ms.
func (s *Settings) ModelTTFT(r *Request, in *Input) float64 {
	return s.ttft(r, in, s.UncachedTokens(r, in))
}

func (s *Settings) ttft(r *Request, in *Input, own int) float64 {
	ms := s.Engine.ttft(own, r.PromptTokens, in)
	if in.PendingBlocks > 0 { // of these tokens the attention is known
		prefix, wait := r.pending(in)
		ms += s.Engine.own(int(wait), int(prefix)) - s.Engine.PrefillTime(wait)
	}
	return ms
}

// CoarseTTFT estimates the time to the first token in ms without a model of the engine.
// tokensPerSecond is the prefill throughput of the engine.
func CoarseTTFT(uncached, requests int, tokensPerSecond float64) float64 {
	return 1000*float64(uncached)/tokensPerSecond + 10*float64(requests)
}
