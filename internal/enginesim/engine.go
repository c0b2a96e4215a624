// SPDX-License-Identifier: Apache-2.0

// Package enginesim is a simulated engine: an OpenAI server as vLLM's, with a
// paged prefix cache, continuous batching, KV events and metrics. Only the GPU is
// simulated: each step takes the time that a model of the hardware computes, and the
// words of an answer mean nothing.
//
// Prompts pass through a model's chat template and tokenizer, by default those of
// [ModelFiles]. Clients may send token ids in the form that the engine accepts. The
// response header x-sim-prompt describes the prompt, and return_token_ids returns its ids and
// those of the output. As in vLLM, the headers of a streamed response leave
// when the request is admitted, its first chunk when the prompt is computed.
//
// With a role the engine takes part in prefill legs, in the protocol of its kind. The decode engine
// fetches blocks with a request to /sim/blocks of the prefill engine, which answers after the
// time of the transfer. The blocks are stored as if they were computed, but count as not cached.
//
// # Guarantees
//
// The cache holds at most its capacity; its events, replayed in order, give its contents.
// The time of a step depends on all running requests. A client that leaves frees its request
// at the next step. A slow client delays no other request.
//
// # Concurrency
//
// An [Engine] serves any number of requests at once. One goroutine, in [Engine.Run],
// plays the steps.
package enginesim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/tokenizer"
)

// Config describes an engine. The zero value of each field means its default.
type Config struct {
	Name  string // in the header x-sim-worker and in metrics; default "engine"
	Model string // default "sim"
	// Aliases are other names of the model. LoRA are the names of its adapters, which share no
	// blocks with the model.
	Aliases, LoRA []string

	// Engine is the kind of engine to simulate: [VLLM] (default), [SGLang] or [TRTLLM].
	Engine string

	// Prompts makes the token ids. Default: the model of [ModelFiles].
	Prompts *tokenizer.Model

	BlockSize int // tokens; default 16
	NumBlocks int // capacity of the cache in blocks; default 8,192
	// Hybrid gives the model side groups: "window=1024" a group with a sliding window of so many tokens, "state=640"
	// three groups with recurrent states in blocks of so many tokens, or of BlockSize if that is more; BlockSize is then
	// this size. NumBlocks counts the blocks of all groups. Only with vLLM. Default: full attention only.
	Hybrid string
	// MaxNumSeqs limits the requests running at once. Default 256.
	MaxNumSeqs int
	// MaxBatchedTokens limits the tokens of a step. Default 8,192.
	MaxBatchedTokens int

	// Preset is the hardware: "8b-1xh100", "32b-2xh100" (default) or
	// "70b-4xh100".
	Preset string
	// Speed is the number of simulated seconds per real second. Default 1.
	Speed float64

	// StoreResponses stores the responses of /v1/responses, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1.
	StoreResponses bool

	// Role is "prefill", "decode" or "both" if the engine's model is split. Default: none.
	Role string
	// TokenBytes is the size of a token's part of the cache, and Bandwidth in GB/s the rate at which
	// a prefill engine sends it. Each transfer has the whole rate. Defaults 262,144 and 50.
	TokenBytes int
	Bandwidth  float64
	// Pulls has the engine keep its blocks in host memory, too, serve other engines that copy them, and copy blocks
	// from the engine that a request names. Only Publish is called for host memory.
	Pulls bool
	// HoldTime is how long a prefill engine keeps the blocks of a prompt that no decode engine
	// fetches, in real time. Default 8 minutes, as vLLM's.
	HoldTime time.Duration

	// BlockHash selects how the engine names its blocks: "sim" (default), "vllm" (sha256_cbor),
	// "sglang", "sequence" as Dynamo's mock engine does, or "random", with different names in each
	// process.
	BlockHash string

	// Publish is called with each change of the cache, one call at a time, in order. It must
	// not wait. Optional.
	Publish func(indexer.Event)
	// Sockets publish each change as a real engine does. The caller runs them. Default: none.
	Sockets *Sockets

	hybrid *hybrid // what Hybrid says
}

func (c Config) withDefaults() (_ Config, err error) {
	c.Name, c.Model, c.Engine = cmp.Or(c.Name, "engine"), cmp.Or(c.Model, "sim"), cmp.Or(c.Engine, VLLM)
	c.BlockSize, c.NumBlocks = cmp.Or(c.BlockSize, 16), cmp.Or(c.NumBlocks, 8192)
	c.MaxNumSeqs, c.MaxBatchedTokens = cmp.Or(c.MaxNumSeqs, 256), cmp.Or(c.MaxBatchedTokens, 8192)
	c.Preset, c.Speed, c.BlockHash = cmp.Or(c.Preset, "32b-2xh100"), cmp.Or(c.Speed, 1), cmp.Or(c.BlockHash, "sim")
	c.TokenBytes, c.Bandwidth, c.HoldTime = cmp.Or(c.TokenBytes, 262_144), cmp.Or(c.Bandwidth, 50), cmp.Or(c.HoldTime, 8*time.Minute)
	if c.hybrid, c.BlockSize, err = parseHybrid(c.Hybrid, c.BlockSize); err != nil {
		return c, err
	}
	if c.Prompts == nil {
		if c.Prompts, err = tokenizer.LoadModel(ModelFiles(), tokenizer.ModelConfig{}); err != nil {
			return c, fmt.Errorf("enginesim: %w", err)
		}
	}
	if c.Publish == nil {
		c.Publish = func(indexer.Event) {}
	}
	for name, n := range map[string]int{"BlockSize": c.BlockSize, "NumBlocks": c.NumBlocks, "MaxNumSeqs": c.MaxNumSeqs, "MaxBatchedTokens": c.MaxBatchedTokens, "TokenBytes": c.TokenBytes} {
		if n < 1 || n > 1<<26 {
			return c, fmt.Errorf("enginesim: %s is %d, want 1 to %d", name, n, 1<<26)
		}
	}
	if c.Engine != VLLM && c.Engine != SGLang && c.Engine != TRTLLM {
		return c, fmt.Errorf("enginesim: Engine is %q, want vllm, sglang or trtllm", c.Engine)
	}
	if c.hybrid != nil && (c.Engine != VLLM || c.Sockets != nil && c.Sockets.conf.Format != VLLM) {
		return c, errors.New("--hybrid needs the engine vllm and its format of events: others do not report groups")
	}
	if c.hybrid != nil && c.Pulls {
		return c, errors.New("--kv-pulls cannot be combined with --hybrid: copies have no blocks of side groups")
	}
	switch c.Role {
	case "", rolePrefill, roleDecode:
	case roleBoth:
		if c.Engine == SGLang {
			return c, errors.New(`enginesim: Role is "both", want prefill or decode for SGLang`)
		}
	default:
		return c, fmt.Errorf("enginesim: Role is %q, want prefill, decode or both", c.Role)
	}
	if !(c.Bandwidth > 0) || c.HoldTime <= 0 {
		return c, fmt.Errorf("enginesim: Bandwidth is %v and HoldTime %v, want more than 0", c.Bandwidth, c.HoldTime)
	}
	if _, ok := presets[c.Preset]; !ok {
		return c, fmt.Errorf("enginesim: Preset is %q, want 8b-1xh100, 32b-2xh100 or 70b-4xh100", c.Preset)
	}
	if !(c.Speed >= .001 && c.Speed <= 1e6) {
		return c, fmt.Errorf("enginesim: Speed is %v, want 0.001 to 1,000,000", c.Speed)
	}
	return c, nil
}

// Engine is a simulated engine. It is an [http.Handler]; [Engine.Run] must run for
// requests to be answered.
type Engine struct {
	conf    Config
	mux     *http.ServeMux
	metrics *metrics
	wake    chan struct{} // holds one token while there may be work
	peers   http.Client   // for prefill engines
	stored  responses

	mu sync.Mutex
	// mu guards the fields below. Events are published under it.
	scheduler scheduler
	pending   []indexer.Event // changes of the cache that are not published yet
	legs      map[string]*leg // by id
	pulled    int             // blocks that other engines copied
}

// New returns an engine with an empty cache. The error names a setting that is out of range.
func New(conf Config) (*Engine, error) {
	conf, err := conf.withDefaults()
	if err != nil {
		return nil, err
	}
	hash, err := newBlockHash(conf.BlockHash)
	if err != nil {
		return nil, err
	}
	e := &Engine{conf: conf, wake: make(chan struct{}, 1), peers: http.Client{Transport: &http.Transport{}}, legs: make(map[string]*leg)}
	e.stored.byID = make(map[string]*storedResponse)
	e.scheduler = scheduler{
		timing: presets[conf.Preset], blockSize: conf.BlockSize, maxSeqs: conf.MaxNumSeqs, maxTokens: conf.MaxBatchedTokens,
		cache: newCache(conf.NumBlocks, hash, e.publish),
	}
	if e.scheduler.cache.hybrid = conf.hybrid; conf.hybrid != nil {
		e.pending = append(e.pending, indexer.Event{Kind: indexer.Shaped, Shape: &conf.hybrid.shape})
	}
	// Only subscribers of the sockets receive copies.
	e.scheduler.cache.copies = conf.Sockets != nil && conf.Sockets.conf.Format == VLLM
	e.metrics = newMetrics(conf.Model, conf.BlockSize, conf.NumBlocks, e.Stats)
	e.mux = e.routes()
	return e, nil
}

// Config returns the settings with their defaults.
func (e *Engine) Config() Config { return e.conf }

// Stats returns the current load of the engine.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := &e.scheduler
	return Stats{
		Running: len(s.running) - s.receiving, Waiting: len(s.waiting) + s.receiving, ReceivedTokens: s.received,
		CachedBlocks: len(s.cache.blocks), UsedBlocks: s.cache.used(), PromptTokens: s.queries, CachedTokens: s.hits,
	}
}

// Cached returns the engine's own names of the full-attention blocks in its cache, in no order.
func (e *Engine) Cached() []uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]uint64, 0, len(e.scheduler.cache.blocks))
	for _, b := range e.scheduler.cache.blocks {
		if b.group == 0 {
			all = append(all, b.External)
		}
	}
	return all
}

// lag is how late a step may end before the clock is set again: a stall of the machine must not
// cause a burst of steps.
const lag = 100 * time.Millisecond

// Run plays the steps until ctx ends. Requests in progress are then left without an
// end; their handlers see it by their own contexts.
func (e *Engine) Run(ctx context.Context) error {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	defer e.peers.CloseIdleConnections()
	defer e.stored.cancelAll()
	var due time.Time // simulated end of the last step
	for {
		e.mu.Lock()
		step := e.scheduler.begin()
		if step == 0 {
			e.flush()
		}
		e.mu.Unlock()
		if step == 0 {
			select {
			case <-ctx.Done():
				return nil
			case <-e.wake:
				due = time.Time{} // the time without work computes nothing
				continue
			}
		}
		now := time.Now()
		if now.Sub(due) > lag {
			due = now
		}
		due = due.Add(time.Duration(float64(step) / e.conf.Speed))
		if wait := due.Sub(now); wait > 0 {
			timer.Reset(wait)
			select {
			case <-ctx.Done():
				return nil
			case <-timer.C:
			}
		}
		e.mu.Lock()
		e.flush() // as in vLLM, before the step's tokens
		e.scheduler.finish()
		e.mu.Unlock()
	}
}

// publish has a change of the cache published at the end of the step; mu is held. As in vLLM, no
// event of a block precedes the step that computes the block.
func (e *Engine) publish(c Change) {
	if !c.Copy && (c.Kind != indexer.SideStored || len(c.Externals) > 0) {
		e.pending = append(e.pending, c.Event)
		e.inHost(c)
	}
	if e.conf.Sockets != nil {
		e.conf.Sockets.add(c)
	}
}

// deliver gives the pending changes to Config.Publish; mu is held.
func (e *Engine) deliver() {
	for _, ev := range e.pending {
		e.conf.Publish(ev)
	}
	e.pending = nil
}

// flush publishes the pending changes; mu is held.
func (e *Engine) flush() {
	e.deliver()
	if e.conf.Sockets != nil {
		e.conf.Sockets.flush()
	}
}

// submit adds a request to the engine.
func (e *Engine) submit(r *request) {
	e.mu.Lock()
	e.scheduler.submit(r)
	e.mu.Unlock()
	e.work()
}

// abort ends a request whose client left, and its leg.
func (e *Engine) abort(r *request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.scheduler.abort(r)
	if r.leg != nil {
		e.end(r.leg, false)
	}
	e.work()
}

// work has Run look for work.
func (e *Engine) work() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}
