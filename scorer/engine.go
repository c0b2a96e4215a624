// SPDX-License-Identifier: Apache-2.0

package scorer

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

// KVRead is the time to read the keys and values of one held token in a step, in times to compute
// one token.
func (e *Engine) KVRead() float64 { return e.KVToken / e.Token }

// own is the time in ms that the uncached tokens of one prompt take.
func (e *Engine) own(uncached, prompt int) float64 {
	u := float64(uncached)
	return e.Token*u + e.Attention*u*(float64(prompt)-u/2)
}

// pendingFactor is the cost of a pending token relative to its linear part. It contains
// attention, for prompts whose length is not known any more.
const pendingFactor = 1.15

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
func (e *Engine) PrefillTime(tokens float64) float64 { return pendingFactor * e.Token * tokens }
