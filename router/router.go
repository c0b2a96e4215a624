// SPDX-License-Identifier: Apache-2.0

// Package router decides which worker a request goes to.
//
// A [Router] knows workers, what they cache and what they are busy with. It is
// told of the first two by whoever finds workers and hears their events; the
// third it knows from the requests that it routed itself. [Router.BestWorker]
// turns a prompt into tokens, tokens into block hashes, hashes into each worker's
// overlap, and overlap and load into a cost; the lowest cost wins and the request
// takes a slot there, until [Router.Free].
//
// # What the router promises
//
// Workers of one base model are a pool; pools share nothing. Two requests decided
// at the same time are decided one after the other, so the second sees the slot
// of the first. Only workers that it was told of are ever chosen. It never fails
// a request because of its prompt: what it cannot tokenize is routed by load.
//
// It does not queue, retry or talk to anybody, unless [Config.Remote] does, and it
// starts no goroutine.
//
// # Concurrency
//
// A [Router] may be used by any number of goroutines. Reading the index takes no
// lock that a decision holds; load, choice and booking of one pool are one
// critical section.
package router

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer"
)

// Mode is a way of choosing.
type Mode string

// The modes.
const (
	// KV chooses the lowest cost of cached blocks and load.
	KV Mode = "kv"
	// RoundRobin takes the candidates in turn, whatever they cache or do. It
	// reads no prompts.
	RoundRobin Mode = "round-robin"
)

// Config says how a [Router] decides. The zero value of each field means its
// default.
type Config struct {
	// Mode is the way of choosing. Default [KV].
	Mode Mode

	// Scoring says what a worker costs in the mode KV. Without a policy it is
	// [scorer.Defaults].
	Scoring scorer.Settings
	// Rule, if not nil, chooses in the mode KV instead of Scoring: one of
	// [scorer.PublishedRules], or the caller's own. It is called under the
	// pool's lock, with candidates in worker order.
	Rule scorer.Rule

	// BlockSize is the number of tokens in a block of the workers' caches. 0
	// takes that of a pool's first worker, or 16 if it names none. Workers of
	// another size are still routed to, by load alone.
	BlockSize int

	// NoEvents is for fleets that do not tell what they cache: the router
	// guesses from the requests that it sent, and takes no events.
	NoEvents bool
	// GuessTTL is how long such a guess counts after the last request that
	// confirms it. Default 120 s.
	GuessTTL time.Duration
	// PredictTTL is how long a worker counts as holding the blocks of a request
	// sent there before its events say so. It should exceed the wait in the
	// worker's queue, the prefill and the delay of events. Default 10 s; negative
	// for not at all.
	PredictTTL time.Duration

	// Cards are the models known beforehand; see [Router.SetCards].
	Cards []Card

	// Observe, if not nil, is told of each booked request whose prompt was
	// tokenized exactly, before the decision returns: it must be quick, and must
	// copy what it keeps.
	Observe func(Observation)

	// Remote, if not nil, asks a worker for the ids of a prompt whose model has no
	// tokenizer here. The decision waits for it: it must return soon after ctx
	// ends, and keep nothing of the prompt.
	Remote func(ctx context.Context, worker netip.AddrPort, model string, p Prompt) ([]uint32, error)

	// StrictModels refuses models without a card that makes exact prompts, as
	// if they did not exist.
	StrictModels bool

	// Seed makes ties reproducible. Any value.
	Seed uint64

	// KeepDecisions is how many recent decisions can be asked for. Default
	// 1,024; negative keeps none.
	KeepDecisions int

	// Now is the clock. Default [time.Now].
	Now func() time.Time

	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

func (c Config) withDefaults() (Config, error) {
	if c.Mode == "" {
		c.Mode = KV
	}
	if c.Mode != KV && c.Mode != RoundRobin {
		return c, fmt.Errorf("router: Mode is %q, want %q or %q", c.Mode, KV, RoundRobin)
	}
	if c.Scoring.Policy == "" {
		c.Scoring = scorer.Defaults()
	}
	if err := c.Scoring.Validate(); err != nil {
		return c, fmt.Errorf("router: %w", err)
	}
	if c.BlockSize < 0 || c.BlockSize > maxBlockSize {
		return c, fmt.Errorf("router: BlockSize is %d, want 0 to %d tokens", c.BlockSize, maxBlockSize)
	}
	if c.GuessTTL < 0 {
		return c, fmt.Errorf("router: GuessTTL is %v, want 0 or more", c.GuessTTL)
	}
	if c.PredictTTL == 0 {
		c.PredictTTL = 10 * time.Second
	}
	if c.KeepDecisions == 0 {
		c.KeepDecisions = 1024
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Meter == nil {
		c.Meter = noop.Meter{}
	}
	return c, nil
}

const (
	// maxBlockSize is far above any engine's; it guards against a typing error
	// that would make every prompt shorter than a block.
	maxBlockSize = 1 << 16
	// maxPools bounds what registrations can make us keep, and the values of
	// the label "model".
	maxPools = 1024
	// maxRanks bounds the ranks of one worker process.
	maxRanks = 1024
)

// Router decides where requests go. Make one with [New].
type Router struct {
	conf    Config
	metrics *metrics
	ring    *ring
	scratch sync.Pool // of *scratch

	// names says which pool answers to a model name. The map is replaced, never
	// changed.
	names atomic.Pointer[map[string]target]

	fleet sync.RWMutex
	// fleet guards the fields below. Who applies an event holds it for reading,
	// so that a worker's events cannot meet its leaving.
	pools  map[string]*pool // by base model
	saved  map[Worker]saved // guesses of an earlier process, for workers to come
	owners map[uint64]*pool // by worker id
	cards  map[string]*Card // by name

	flightMu sync.Mutex
	// flightMu guards the field below.
	flight map[string]flight // requests with a slot
}

// flight is a request with a slot.
type flight struct {
	pool  *pool
	guess guess
}

// target is what a model name stands for.
type target struct {
	pool *pool
	lora string
	// adapter is lora if workers named it in their registration; an adapter that
	// only the card names is taken to be on all of them.
	adapter string
	card    *Card // nil if there is none
}

// New returns a router that knows no workers. It fails if a setting is out of
// range, naming it, or if the instruments cannot be made.
func New(conf Config) (*Router, error) {
	conf, err := conf.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &Router{
		conf:   conf,
		ring:   newRing(max(0, conf.KeepDecisions)),
		pools:  make(map[string]*pool),
		owners: make(map[uint64]*pool),
		flight: make(map[string]flight),
	}
	r.names.Store(&map[string]target{})
	r.SetCards(conf.Cards)
	r.scratch.New = func() any { return new(scratch) }
	if r.metrics, err = newMetrics(conf.Meter, r); err != nil {
		return nil, err
	}
	return r, nil
}

// BestWorker decides where a request goes. With an ID the decision is booked: the
// request holds a slot on the worker, and the caller must call [Router.Free] once
// it is over, however it ends (but not before BestWorker has returned), and should
// call [Router.MarkPrefillCompleted] at its first token. After an error nothing is
// booked.
//
// The errors are [ErrUnknownModel], [ErrNoWorkers] and [ErrDuplicate], wrapped,
// and ctx's. ctx is looked at between the steps of a decision; none waits.
func (r *Router) BestWorker(ctx context.Context, req Request) (Decision, error) {
	names := *r.names.Load()
	t, ok := names[req.Model]
	switch {
	case !ok && len(names) == 0:
		return Decision{}, fmt.Errorf("router: model %q: %w", bounded(req.Model), ErrNoWorkers)
	case !ok:
		return Decision{}, fmt.Errorf("router: model %q: %w", bounded(req.Model), ErrUnknownModel)
	case r.conf.StrictModels && (t.card == nil || t.card.Prompts == nil):
		return Decision{}, fmt.Errorf("router: model %q has no tokenizer: %w", bounded(req.Model), ErrUnknownModel)
	case req.Blocks != nil && len(req.Blocks.Local) != len(req.Blocks.Sequence):
		return Decision{}, fmt.Errorf("router: %w: %d local and %d sequence hashes", ErrBadBlocks, len(req.Blocks.Local), len(req.Blocks.Sequence))
	}
	s := r.scratch.Get().(*scratch)
	defer r.release(s)
	s.decision = Decision{ID: req.ID, Model: t.pool.model, Mode: r.conf.Mode, Candidates: s.decision.Candidates[:0]}

	cache := t.pool.cache.Load()
	q := question{id: req.ID, lora: t.lora, adapter: t.adapter, blockSize: cache.blockSize}
	if r.conf.Mode == KV {
		r.hash(ctx, &q, s, t, req)
	}
	if err := context.Cause(ctx); err != nil {
		return Decision{}, fmt.Errorf("router: decide for model %q: %w", t.pool.model, err)
	}
	if err := r.decide(t.pool, cache, &q, s); err != nil {
		return Decision{}, fmt.Errorf("router: model %q: %w", t.pool.model, err)
	}

	d := s.decision
	if req.ID != "" {
		r.ring.add(&d)
		r.metrics.decided(ctx, &d)
		if r.conf.Observe != nil && d.TokenMode == tokenizer.Exact && req.Tokens == nil && req.Blocks == nil {
			r.conf.Observe(Observation{Card: t.card, Model: t.pool.model, Address: d.Address, BlockSize: q.blockSize, Prompt: req.Prompt, IDs: s.tokens})
		}
	}
	if req.WantTokens && req.ID != "" {
		d.Tokens = r.tokensFor(t, &d, &req, s.tokens)
	}
	if d.Candidates = nil; req.Explain {
		d.Candidates = slices.Clone(s.decision.Candidates)
	}
	return d, nil
}

// bytesSeed keeps the blocks of text-block mode apart from all others: no hash of
// one is the hash of the other, whatever tokens they have.
const bytesSeed = 0x6b76726f75746521

// hash fills in the prompt's tokens and hashes, or the reason why there are none.
func (r *Router) hash(ctx context.Context, q *question, s *scratch, t target, req Request) {
	start := r.conf.Now()
	d := &s.decision
	if b := req.Blocks; b != nil {
		s.local = append(s.local[:0], b.Local...)
		s.sequence = append(s.sequence[:0], b.Sequence...)
		q.tokens, q.sequence = b.Tokens, s.sequence
		d.TokenMode, d.PromptTokens, d.PromptBlocks = tokenizer.Exact, b.Tokens, len(s.local)
		return
	}
	prompt := tokenizer.Prompt{IDs: req.Tokens, Exact: len(req.Tokens), Mode: tokenizer.Exact}
	if req.Tokens == nil {
		var m *tokenizer.Model
		if t.card != nil {
			m = t.card.Prompts
		}
		var err error
		if prompt, err = m.Encode(ctx, s.tokens[:0], req.Prompt, start); err != nil {
			q.reason = ReasonTokenizer
			// A guess for the load: a token is about four bytes of English.
			q.tokens = (len(req.Prompt.Messages) + len(req.Prompt.Tools) + len(req.Prompt.Prompt)) / 4
			d.PromptTokens = q.tokens
			return
		}
		s.tokens = prompt.IDs
		if r.conf.Remote != nil && prompt.Reason == tokenizer.NoTokenizer {
			r.askWorker(ctx, t.pool, &req, &prompt)
		}
	}
	d.TokenMode, d.TokenReason, d.ReusedBytes = prompt.Mode, prompt.Reason, prompt.Reused
	seed := indexer.Seed(q.lora, req.Salt)
	tokens := prompt.IDs
	switch prompt.Mode {
	case tokenizer.Bytes:
		seed ^= bytesSeed
		q.guessed = true
	case tokenizer.ExactPrefix:
		tokens = tokens[:prompt.Exact]
	case tokenizer.Exact, tokenizer.Remote, tokenizer.None:
	}
	s.local = indexer.AppendLocalHashes(s.local[:0], tokens, q.blockSize, seed)
	s.sequence = indexer.AppendSequenceHashes(s.sequence[:0], s.local)
	q.tokens, q.sequence = len(prompt.IDs)+prompt.Others, s.sequence
	d.PromptTokens, d.PromptBlocks = q.tokens, len(s.local)
	d.TokenizeTime = r.conf.Now().Sub(start)
}

// SetCards replaces what is known of models. Decisions in progress go on with
// what they began with. Of two cards with one name the first counts.
func (r *Router) SetCards(cards []Card) {
	known := make(map[string]*Card, len(cards))
	for i := range cards {
		if known[cards[i].Name] == nil {
			c := cards[i]
			known[c.Name] = &c
		}
	}
	r.fleet.Lock()
	defer r.fleet.Unlock()
	r.cards = known
	r.renameLocked()
}

// cardLocked returns what is known of a pool's model, or nil.
func (r *Router) cardLocked(p *pool) *Card {
	if c := r.cards[p.model]; c != nil {
		return c
	}
	return r.cards[p.card]
}

// decide asks the pool, and keeps track of which pool has the request's slot.
func (r *Router) decide(p *pool, c *cache, q *question, s *scratch) error {
	if q.id == "" {
		return p.decide(r.conf.Now, c, q, s)
	}
	r.flightMu.Lock()
	if _, exists := r.flight[q.id]; exists {
		r.flightMu.Unlock()
		return ErrDuplicate
	}
	r.flight[q.id] = flight{pool: p}
	r.flightMu.Unlock()

	err := p.decide(r.conf.Now, c, q, s)
	if err != nil {
		r.landed(q.id)
		return err
	}
	if g := p.guess(s.decision.Time, c, q, s); g.in != nil {
		r.flightMu.Lock()
		r.flight[q.id] = flight{p, g}
		r.flightMu.Unlock()
	}
	return nil
}

// landed takes a request out of flight; without a pool it was not there.
func (r *Router) landed(id string) flight {
	r.flightMu.Lock()
	defer r.flightMu.Unlock()
	f := r.flight[id]
	delete(r.flight, id)
	return f
}

// release gives the memory of a decision back, unless an unusual prompt made it
// large: such a one should not be kept for ever.
func (r *Router) release(s *scratch) {
	const keepTokens = 1 << 20
	if cap(s.tokens) <= keepTokens {
		r.scratch.Put(s)
	}
}

// MarkPrefillCompleted notes the first token of a booked request: its prompt
// tokens no longer wait to be computed. It reports whether that was news: false
// for an id without a slot and for a repetition, both harmless.
func (r *Router) MarkPrefillCompleted(id string) bool {
	r.flightMu.Lock()
	f := r.flight[id]
	if f.guess.in != nil {
		r.flight[id] = flight{pool: f.pool} // what it said is confirmed
	}
	p := f.pool
	r.flightMu.Unlock()
	if p == nil {
		return false
	}
	now := r.conf.Now()
	p.mu.Lock()
	news := p.core.slots.MarkPrefillCompleted(now, id)
	p.mu.Unlock()
	if news {
		r.ring.noteFirstToken(id, now)
	}
	return news
}

// Free gives the slot of a booked request back. It reports whether there was one:
// false for an unknown id and for a repetition, both harmless.
func (r *Router) Free(id string) bool { return r.free(r.landed(id), id) }

// Abandon is [Router.Free] for a request that its worker did not serve: its blocks
// do not count as cached there because of it, unless its first token was noted.
func (r *Router) Abandon(id string) bool {
	f := r.landed(id)
	f.guess.withdraw()
	return r.free(f, id)
}

func (r *Router) free(f flight, id string) bool {
	if f.pool == nil {
		return false
	}
	f.pool.mu.Lock()
	f.pool.core.slots.Free(id)
	f.pool.mu.Unlock()
	r.ring.noteFreed(id, r.conf.Now())
	return true
}

// ApplyEvent applies one event of a worker's cache. Events of one worker must
// come in the order in which they happened. It returns false, and does nothing,
// if the worker is not known.
func (r *Router) ApplyEvent(w Worker, ev indexer.Event) (known bool) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[w.ID]
	if p == nil {
		return false
	}
	out, known := p.applyEvent(w, ev)
	if known {
		r.metrics.applied(out)
	}
	return known
}

// ErrBadWorker is wrapped by the errors of [Router.SetWorker].
var ErrBadWorker = errors.New("worker refused")

// SetWorker tells of a worker process, new or changed. A worker that changed its
// base model leaves its old pool. Worker information that nothing can be routed by
// is refused with an error that names the field, and whatever was known before
// stays.
func (r *Router) SetWorker(info WorkerInfo) error {
	switch {
	case len(info.Models) == 0 || slices.Contains(info.Models, ""):
		return fmt.Errorf("router: %w: worker %d: Models is %q, want names", ErrBadWorker, info.ID, info.Models)
	case !info.Address.IsValid() || info.Address.Port() == 0:
		return fmt.Errorf("router: %w: worker %d: Address is %q, want ip:port", ErrBadWorker, info.ID, info.Address)
	case info.BlockSize < 0 || info.BlockSize > maxBlockSize:
		return fmt.Errorf("router: %w: worker %d: BlockSize is %d, want 0 to %d", ErrBadWorker, info.ID, info.BlockSize, maxBlockSize)
	case info.DPSize > maxRanks || info.DPStart > math.MaxUint32-maxRanks:
		return fmt.Errorf("router: %w: worker %d: ranks %d+%d, want at most %d", ErrBadWorker, info.ID, info.DPStart, info.DPSize, maxRanks)
	}
	r.fleet.Lock()
	defer r.fleet.Unlock()
	model := info.Models[0]
	p := r.pools[model]
	if p == nil {
		if len(r.pools) >= maxPools {
			return fmt.Errorf("router: %w: worker %d: model %q would be number %d of at most %d", ErrBadWorker, info.ID, bounded(model), maxPools+1, maxPools)
		}
		p = &pool{model: model, guessing: guessing{r.conf.NoEvents, r.conf.GuessTTL, r.conf.PredictTTL}, core: core{mode: r.conf.Mode, settings: r.conf.Scoring, rule: r.conf.Rule, seed: r.conf.Seed}}
		r.pools[model] = p
	}
	if old := r.owners[info.ID]; old != nil && old != p {
		old.removeWorker(info.ID)
	}
	r.owners[info.ID] = p
	if info.ModelCard != "" {
		p.card = info.ModelCard
	}
	blockSize := r.conf.BlockSize
	if c := r.cardLocked(p); c != nil && c.BlockSize > 0 {
		blockSize = c.BlockSize
	}
	p.setWorker(&info, blockSize)
	r.recallLocked(p, &info)
	r.renameLocked()
	return nil
}

// RemoveWorker forgets a worker process with all its blocks and slots.
func (r *Router) RemoveWorker(id uint64) {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	p := r.owners[id]
	if p == nil {
		return
	}
	delete(r.owners, id)
	p.removeWorker(id)
	r.renameLocked()
}

// renameLocked works out anew which pool answers to which name. The name of a
// pool stays when its last worker leaves: its model is away, not unknown. Where
// two pools claim a name, the base model's own goes first.
func (r *Router) renameLocked() {
	names := make(map[string]target)
	for _, p := range r.pools {
		names[p.model] = target{pool: p, card: r.cardLocked(p)}
	}
	for _, m := range slices.Sorted(maps.Keys(r.pools)) {
		p := r.pools[m]
		card := r.cardLocked(p)
		add := func(name, lora, adapter string) {
			if _, taken := names[name]; !taken {
				names[name] = target{pool: p, lora: lora, adapter: adapter, card: card}
			}
		}
		p.mu.Lock()
		p.core.names(func(name, lora string) { add(name, lora, lora) })
		p.mu.Unlock()
		if card == nil {
			continue
		}
		for _, name := range card.Aliases {
			add(name, "", "")
		}
		for _, name := range card.LoRA {
			add(name, name, "")
		}
	}
	r.names.Store(&names)
}

// bounded cuts a name that came from a client to what a log line can bear.
func bounded(s string) string { return s[:min(len(s), 128)] }
