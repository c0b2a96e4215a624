// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/router"
)

// hybridModel is a model of several cache groups, with the sizes of its engine.
type hybridModel struct {
	name   string
	config map[string]any // beside the fields of all models
	flags  []string
	most   int // tokens in a new prompt
}

// hybridModels are of the two kinds that hybrid models have beside full attention.
func hybridModels() []hybridModel {
	const window, full, linear = "sliding_attention", "full_attention", "linear_attention"
	common := []string{"--load-format", "dummy", "--num-gpu-blocks-override"}
	return []hybridModel{
		{"sliding windows", map[string]any{ // as Gemma 3: five groups with a window, one of full attention
			"architectures": []string{"Gemma3ForCausalLM"}, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 128, "sliding_window_pattern": 6,
			"layer_types": []string{window, window, window, window, window, full}, "query_pre_attn_scalar": headSize, "rope_local_base_freq": 10000,
			"hidden_activation": "gelu_pytorch_tanh",
		}, append(common, "240", "--max-num-batched-tokens", "512"), 900},
		{"recurrent states", map[string]any{ // as Qwen3-Next: three groups of states, one of full attention
			"architectures": []string{"Qwen3NextForCausalLM"}, "model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4,
			"layer_types": []string{linear, linear, linear, full}, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 1,
			"linear_num_value_heads": 2, "linear_value_head_dim": 128, "head_dim": 64, "mlp_only_layers": []int{0, 1, 2}, "decoder_sparse_step": 1,
			"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "norm_topk_prob": true,
			"partial_rotary_factor": 0.25,
		}, append(common, "60", "--max-num-batched-tokens", "2048"), 3000},
	}
}

func hybridChecks() (all []check) {
	for _, m := range hybridModels() {
		all = append(all, check{"hybrid: " + m.name, 3 * engineStart, m.run})
	}
	return all
}

// The requests of a check of a hybrid model.
const (
	hybridBefore = 80 // before the engine is killed
	hybridAfter  = 80 // after that
	hybridFresh  = 40 // to another kvroute, which begins with what the engine repeats
	hybridAtOnce = 50
	hybridShare  = 0.98 // of the predictions of requests one after the other that must be exact
)

// run compares predictions with the engine's cached tokens. Meanwhile the engine is killed and started again. Then
// another kvroute starts, which has blocks of 32 tokens, also if the engine's are larger.
func (m hybridModel) run(ctx context.Context, e *env, res *result) {
	e.endGroup() // the memory is needed
	f := &vllmFleet{model: filepath.Join(e.dir, m.config["model_type"].(string)), ledger: newLedger(), flags: m.flags, tokenizer: "prompts are token ids"}
	writeModel(f.model, "", m.config)
	v := e.launch(f, m.config["model_type"].(string), 1, router.Aggregated)
	e.atEnd(v.stop)
	v.ready(ctx)
	f.ledger.keeps = true
	res.what = "predicted cached tokens with cached_tokens, index with events"
	t := &hybridTest{res: res, most: m.most, r: rand.New(rand.NewPCG(39, uint64(len(m.config))))}
	began := time.Now()
	t.start(ctx, e, f, "hybrid", 0)
	t.askAll(ctx, "before the restart", hybridBefore)
	v.stopListening()
	v.process.Kill()
	e.begin(v)
	v.ready(ctx)
	t.world.waitWorkers(ctx, 1)
	t.world.settle(ctx)
	t.askAll(ctx, "after the restart", hybridAfter)
	t.world.stack.stop()
	t.start(ctx, e, f, "hybrid-fresh", blockSize)
	t.world.settle(ctx)
	t.askAll(ctx, "another kvroute", hybridFresh)
	t.sum(m, time.Since(began))
	t.atOnce(ctx, m)
}

// sum adds what the requests one after the other have shown.
func (t *hybridTest) sum(m hybridModel, took time.Duration) {
	res := t.res
	stored, removed := t.world.totals()
	res.note("%d of %d predictions are exact, %d of them above 0; %d tokens predicted, %d cached; blocks of full attention for %d", res.cases-t.wrong, res.cases,
		t.hits, t.predicted, t.cached, t.whole)
	res.note("blocks of %d tokens; since the restart full attention stored %d blocks and evicted %d; %v with the restart", t.block, stored, removed,
		took.Round(time.Second))
	exact := float64(res.cases-t.wrong) / float64(res.cases)
	res.figures = append(res.figures, bench.NewFigure("hybrid: "+m.name+": exact predictions, one request at a time", "", bench.AtLeast(hybridShare), exact))
	if exact < hybridShare {
		res.differ("%d predictions of %d are wrong", t.wrong, res.cases)
	}
	if removed == 0 || t.hits < res.cases/4 || t.whole == t.cached {
		res.differ("the requests show too little: too few hits, nothing evicted, or all of full attention could be used")
	}
}

// hybridTest sends prompts that share beginnings with earlier ones.
type hybridTest struct {
	world *world
	res   *result
	block int // tokens in a block of the engine; vLLM raises it for states
	most  int // tokens in a new prompt
	r     *rand.Rand
	past  [][]uint32 // prompts with their outputs
	left  []uint32   // the beginning of an earlier prompt until the last prompt left it

	causes causes

	wrong, hits              int // requests
	predicted, cached, whole int // tokens
}

// start starts a kvroute beside the engine. Its blocks have the engine's size if size is 0.
func (t *hybridTest) start(ctx context.Context, e *env, f *vllmFleet, name string, size int) {
	config := f.config(fmt.Sprintf("{transport: zmq}, block_size: %d", size))
	s := e.startStack(ctx, name, config, f.addresses(), noGuesses)
	s.waitWorkers(ctx, f.ranks())
	if got := s.states(ctx)[0].BlockSize; size == 0 {
		t.block = got
		t.causes.now.block, t.causes.before.block = got, got
	}
	t.world = &world{stack: s, ledger: f.ledger, block: t.block, parts: t.block / max(1, cmp.Or(size, t.block)), engines: f.engines}
	s.waitRouted(ctx)
}

// next makes a prompt: a new one, an earlier one again, an earlier one until some token, or the next turn of a
// conversation.
func (t *hybridTest) next() (prompt []uint32, what string) {
	fresh := func(prompt []uint32, n int) []uint32 {
		for range n {
			prompt = append(prompt, uint32(100+t.r.IntN(1000)))
		}
		return prompt
	}
	kind := t.r.IntN(10)
	if len(t.past) < 3 {
		kind = 0
	}
	// Recent prompts are likelier, because old ones are evicted.
	var old []uint32
	if n := len(t.past); n > 0 {
		old = slices.Clone(t.past[max(0, n-1-min(t.r.IntN(16), t.r.IntN(16)))])
	}
	switch {
	case kind < 2:
		prompt, what = fresh(nil, 50+t.r.IntN(t.most)), "new"
	case kind < 4:
		prompt, what = old, "again"
	case kind < 6:
		prompt, what = fresh(old, 1+t.r.IntN(t.most/4)), "next turn"
	case kind < 8:
		prompt, what = fresh(slices.Clone(t.left), 1+t.r.IntN(t.most/2)), fmt.Sprintf("leaves at %d as another did", len(t.left))
	default:
		t.left = old[:1+t.r.IntN(len(old))]
		prompt, what = fresh(slices.Clone(t.left), 1+t.r.IntN(t.most/2)), fmt.Sprintf("leaves at %d", len(t.left))
	}
	if t.r.IntN(8) == 0 && len(prompt) > t.block { // whole blocks
		prompt = prompt[:len(prompt)/t.block*t.block]
	}
	return prompt[:min(len(prompt), maxLen-64)], what
}

// body is a request for the prompt.
func (t *hybridTest) body(prompt []uint32) string {
	n := 1
	if t.r.IntN(6) == 0 { // a step of the engine for each token
		n += t.r.IntN(20)
	}
	return body(map[string]any{"prompt": prompt, "max_tokens": n, "ignore_eos": true, "return_token_ids": true}, nil)
}

func (t *hybridTest) askAll(ctx context.Context, what string, n int) {
	for i := range n {
		prompt, kind := t.next()
		bench.Within(fmt.Sprintf("%s, prompt %d", what, i), func() {
			t.causes.begin(t.world.ledger, t.rank())
			a, d := t.ask(ctx, t.body(prompt))
			t.compare(fmt.Sprintf("%s, prompt %d (%s)", what, i, kind), prompt, a, d)
			t.past = append(t.past, slices.Concat(prompt, a.Choices[0].Tokens))
			t.world.settle(ctx)
		})
	}
}

// ask sends a request through Envoy and reads kvroute's decision.
func (t *hybridTest) ask(ctx context.Context, text string) (a answer, d router.Decision) {
	r := ask(ctx, t.world.envoy.URL()+completionPath, text, named())
	a = r.read()
	bench.NoError(process.GetJSON(ctx, "http://"+t.world.router.At.HTTP+"/v1/decisions?id="+r.id, &d))
	if said := r.header.Get("X-Dynamo-Overlap-Blocks"); said != strconv.Itoa(d.OverlapBlocks) {
		bench.NoError(fmt.Errorf("the header says %s blocks, the decision %d", said, d.OverlapBlocks))
	}
	if len(a.Choices) != 1 || r.status != http.StatusOK {
		bench.NoError(errors.New("no output"))
	}
	return a, d
}

func (t *hybridTest) rank() events.RankName { return t.world.engines[0].rank(0) }

// compare compares a prediction of a request that ran alone. A wrong one has a cause.
func (t *hybridTest) compare(what string, prompt []uint32, a answer, d router.Decision) {
	u, whole := &a.Usage, d.CachedTokens
	if len(d.Candidates) > 0 {
		whole += d.Candidates[0].UnusableBlocks * d.BlockSize
	}
	t.res.cases++
	t.predicted, t.cached, t.whole = t.predicted+d.CachedTokens, t.cached+u.Details.Cached, t.whole+whole
	switch {
	case d.TokenMode != "exact" || d.PromptTokens != u.Prompt:
		t.res.differ("%s: %d prompt tokens here (%q: %s), %d there", what, d.PromptTokens, d.TokenMode, d.TokenReason, u.Prompt)
	case d.CachedTokens != u.Details.Cached:
		t.wrong++
		cause, known := t.causes.name(t.world.ledger, t.rank(), prompt, d.CachedTokens, u.Details.Cached)
		say := t.res.note
		if !known {
			say = t.res.differ
		}
		say("%s: of %d tokens %d are predicted, %d in full attention; %d were cached; %s", what, u.Prompt, d.CachedTokens, whole, u.Details.Cached, cause)
	case d.CachedTokens > 0:
		t.hits++
	}
	t.world.expect(t.rank(), u.stored(t.block))
}

// atOnce sends requests from four clients, and reports how many predictions were exact: the requests change the cache
// meanwhile. Then the index must have what the engine announced.
func (t *hybridTest) atOnce(ctx context.Context, m hybridModel) {
	t.world.ledger.mayStoreMore = true
	var mu sync.Mutex // of the three below
	var failed error
	exact, high := 0, 0
	var clients sync.WaitGroup
	next := make(chan []uint32)
	for range 4 {
		clients.Go(func() {
			for prompt := range next {
				err := bench.Try(func() {
					mu.Lock()
					text := t.body(prompt)
					mu.Unlock()
					a, d := t.ask(ctx, text)
					mu.Lock()
					defer mu.Unlock()
					switch cached := a.Usage.Details.Cached; {
					case d.CachedTokens == cached:
						exact++
					case d.CachedTokens > cached:
						high++
					}
				})
				mu.Lock()
				failed = errors.Join(failed, err)
				mu.Unlock()
			}
		})
	}
	for range hybridAtOnce {
		mu.Lock()
		prompt, _ := t.next()
		mu.Unlock()
		next <- prompt
	}
	close(next)
	clients.Wait()
	bench.NoError(failed)
	t.world.settle(ctx)
	t.res.note("four at a time: %d of %d predictions are exact, %d too high", exact, hybridAtOnce, high)
	t.res.figures = append(t.res.figures, bench.NewFigure("hybrid: "+m.name+": exact predictions, four requests at a time", "", bench.Target{},
		float64(exact)/hybridAtOnce))
}

// joined returns the engine's blocks, of each of which the index has some parts. The last part has the engine's id.
// It returns ours unchanged if a part is missing.
func joined(ours, theirs []blockAt, parts int) (whole []blockAt) {
	for _, b := range ours {
		if parts > 1 && slices.Contains(theirs, b) {
			whole = append(whole, b)
		}
	}
	if len(whole)*parts != len(ours) {
		return ours
	}
	return whole
}
