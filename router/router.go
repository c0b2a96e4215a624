// SPDX-License-Identifier: Apache-2.0

// Package router decides which worker a request goes to.
//
// A [Router] knows workers, what they cache and what they are busy with. The caller
// passes in workers ([Router.SetWorker]) and the events of their caches
// ([Router.ApplyEvent]); the load follows from the requests that the router routed
// itself. [Router.BestWorker] turns a prompt into tokens, tokens into block hashes, hashes into each worker's
// overlap, and overlap and load into a cost; the lowest cost wins and the request
// takes a slot there, until [Router.Free].
//
// # Guarantees
//
// Workers of one base model with blocks of one size are a pool; pools share
// nothing. Two requests decided
// at the same time are decided one after the other, so the second sees the slot
// of the first. Only workers that were passed in are ever chosen. It never fails
// a request because of its prompt: what it cannot tokenize is routed by load.
//
// It does not retry, starts no goroutine, and uses the network only through the functions
// [Config.Remote] and [Config.Probe]. Requests wait only if a queue is configured. Slots,
// sessions and the queue expire when [Router.Run] runs, or the caller calls [Router.Tick].
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
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer"
)

// Router decides where requests go. Make one with [New].
type Router struct {
	conf    Config
	metrics *metrics
	kept    *keptDecisions
	scratch sync.Pool // of *scratch

	// names has the pools of each model name. The map is replaced, never changed.
	names atomic.Pointer[map[string]target]

	dumping chan struct{}   // has something in it while a dump is under way
	dumps   [3]atomic.Int64 // by how they ended: see dumpWhole

	fleet sync.RWMutex
	// fleet guards the fields below. An event is applied under the read lock, so that its
	// worker cannot be removed meanwhile.
	pools  map[poolKey]*pool
	owners map[uint64]*pool // by worker id
	cards  map[string]*Card // by name

	// busy are the models' own thresholds, by base model.
	busy map[string]scorer.Thresholds

	flights     *flights
	peerFlights atomic.Uint64 // flights of peers so far
}

// target is the meaning of a model name.
type target struct {
	pools []*pool // of the base model, by block size; at least one
	lora  string
	// adapter is lora if workers registered it. All workers are assumed to have an adapter
	// that only the card names.
	adapter string
	card    *Card // nil if the model has no card
}

// New returns a router that knows no workers. It fails if a setting is out of
// range, naming it, or if the instruments cannot be made.
func New(conf Config) (*Router, error) {
	conf, err := conf.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &Router{
		dumping: make(chan struct{}, 1),
		conf:    conf,
		kept:    &keptDecisions{ring: make([]keptDecision, max(0, conf.KeepDecisions))},
		pools:   make(map[poolKey]*pool),
		owners:  make(map[uint64]*pool),
		busy:    make(map[string]scorer.Thresholds),
		flights: &flights{byID: make(map[string]flight)},
	}
	if conf.Now == nil {
		r.conf.Now = time.Now
	}
	r.names.Store(&map[string]target{})
	r.SetCards(conf.Cards)
	r.scratch.New = func() any { return new(scratch) }
	if r.metrics, err = newMetrics(conf.Meter, r); err != nil {
		return nil, err
	}
	return r, nil
}

// BestWorker decides where a request goes. With an ID the decision is booked: the request
// holds a slot on the worker, and the caller must call [Router.Free] once it is over,
// however it ends (but not before BestWorker has returned), and should call
// [Router.MarkPrefillCompleted] at its first token. After an error nothing is booked.
//
// The errors are those of this package, wrapped, and ctx's. The steps of a decision check
// ctx before they begin. Only a request with an ID waits, and only if there is a queue.
func (r *Router) BestWorker(ctx context.Context, req Request) (answer Decision, err error) {
	s := r.scratch.Get().(*scratch)
	defer r.release(s)
	s.request = req
	t, err := r.prepare(s)
	if err != nil {
		return Decision{}, err
	}
	timed, cancel := req.timed(ctx)
	defer cancel()
	p, err := r.place(timed, t, s)
	if err == nil {
		r.probe(timed, p, s)
		err = r.book(ctx, p, s)
	}
	if err != nil {
		if req.ID != "" {
			r.metrics.refused(ctx, t.pools[0].model, err)
		}
		return Decision{}, fmt.Errorf("router: model %q: %w", t.pools[0].model, err)
	}

	d := &s.decision
	if req.ID != "" {
		r.metrics.decided(ctx, p.labels, d)
		if r.conf.Observe != nil && d.TokenMode == tokenizer.Exact && req.Tokens == nil && req.Blocks == nil {
			r.conf.Observe(Observation{ID: req.ID, Card: t.card, Model: p.model, Address: d.Address, BlockSize: p.blockSize, Prompt: req.Prompt, IDs: s.tokens})
		}
	}
	answer = *d
	if req.WantTokens {
		answer.Tokens = r.tokensFor(t, p, s)
	}
	if req.Explain {
		answer.Candidates = slices.Clone(s.workspace.seen)
	}
	if req.ID != "" {
		r.kept.add(s.question.number, d, s.workspace.seen)
	}
	return answer, nil
}

// prepare checks the request in s and fills in what does not depend on the pool.
func (r *Router) prepare(s *scratch) (target, error) {
	req := &s.request
	names := *r.names.Load()
	t, ok := names[req.Model]
	switch {
	case !ok && len(names) == 0:
		return t, fmt.Errorf("router: model %q: %w", bounded(req.Model), ErrNoWorkers)
	case !ok:
		return t, fmt.Errorf("router: model %q: %w", bounded(req.Model), ErrUnknownModel)
	case r.conf.StrictModels && (t.card == nil || t.card.Prompts == nil):
		return t, fmt.Errorf("router: model %q has no tokenizer: %w", bounded(req.Model), ErrUnknownModel)
	}
	if err := req.check(); err != nil {
		return t, fmt.Errorf("router: model %q: %w", bounded(req.Model), err)
	}
	// It is empty; a literal would be made elsewhere and copied here, as below.
	q := &s.question
	q.Request, q.lora, q.adapter, q.workspace = req, t.lora, t.adapter, &s.workspace
	q.explain = req.Explain || req.ID != "" && r.conf.KeepDecisions > 0
	if r.conf.Sessions.TTL > 0 && req.Session != "" {
		q.session = sessionKey(req.Session)
	}
	if len(req.PreferredTaints) > 0 {
		s.taints = s.taints[:0]
		for name, weight := range req.PreferredTaints {
			s.taints = append(s.taints, taint{name, min(max(weight, -mostWeight), mostWeight)})
		}
		slices.SortFunc(s.taints, func(a, b taint) int { return strings.Compare(a.name, b.name) })
		q.taints = s.taints
	}
	d := &s.decision
	*d = Decision{}
	d.ID, d.Model, d.Mode, d.Labels = req.ID, t.pools[0].model, r.conf.Mode, req.Labels
	return t, nil
}

// place returns the pool that the request in s goes to, and hashes the prompt for it. Of
// several pools of one model it is the pool of the pinned worker or of the session's
// worker, or else the cheapest pool; see [pool.appeal].
func (r *Router) place(ctx context.Context, t target, s *scratch) (*pool, error) {
	q, best := &s.question, t.pools[0]
	ready := func(p *pool) error {
		if p.view.Load().reads {
			r.read(ctx, p, s, t.card)
		}
		return context.Cause(ctx)
	}
	if len(t.pools) == 1 {
		return best, ready(best)
	}
	at := slices.IndexFunc(t.pools, func(p *pool) bool {
		return q.Pinned != nil && p.has(q) || q.Pinned == nil && q.session != 0 && p.bound(r.conf.Now(), q.session)
	})
	if at >= 0 || q.Pinned != nil { // the first pool returns the error for an unknown worker
		best = t.pools[max(0, at)]
		return best, ready(best)
	}
	least := math.Inf(1)
	for _, p := range t.pools {
		if err := ready(p); err != nil {
			return nil, err
		}
		switch a, err := p.appeal(r.conf.Now, s); {
		case errors.Is(err, ErrAllBusy) && math.IsInf(least, 1):
			best = p // the request may wait there
		case err != nil && !isAbsence(err):
			return nil, err
		case err == nil && a < least:
			best, least = p, a
		}
	}
	return best, ready(best)
}

// book has the pool decide and take a slot, and adds the request to the flights.
func (r *Router) book(ctx context.Context, p *pool, s *scratch) error {
	q := &s.question
	if q.ID == "" {
		return p.admit(ctx, r.conf.Now, s)
	}
	q.number = r.kept.next()
	fl := flight{pool: p, session: q.session, number: q.number}
	if !r.flights.begin(q.ID, fl) {
		return ErrDuplicate
	}
	q.flights = r.flights
	booked := false
	defer func() {
		if !booked {
			r.flights.end(q.ID, 0, q.number)
		}
	}()
	if err := p.admit(ctx, r.conf.Now, s); err != nil {
		return err
	}
	booked = true
	if q.SessionFinal {
		fl.session = 0
	} else if q.session != 0 && r.conf.TellSession != nil {
		fl.name = q.Session
	}
	fl.lapses, fl.rebind = !q.Owned, q.rebind
	fl.first, fl.second, fl.held = s.decision.Worker, s.decision.Second.Worker, int32(s.decision.Second.OverlapBlocks)
	fl.guess = p.known.guess(s.decision.Time, q)
	if !r.flights.change(q.ID, fl) {
		// Free was called between the booking and here. It did not free the slot, and it is
		// not called again.
		fl.guess.withdraw()
		p.update(r.conf.Now(), func(c *core) { c.slots.Free(q.ID) })
		return ErrFreed
	}
	if r.conf.Tell != nil {
		r.tellPeers(q.slotTaken(&s.decision))
	}
	if q.SessionFinal && q.session != 0 && r.conf.TellSession != nil {
		r.conf.TellSession(SessionBinding{Session: q.Session, Worker: s.decision.Worker, Over: true})
	}
	return nil
}

// release gives the memory of a decision back, without the request's data. Memory that an
// unusually long prompt made large is not kept.
func (r *Router) release(s *scratch) {
	const keepTokens = 1 << 20
	if cap(s.tokens) > keepTokens {
		return
	}
	s.request, s.question, s.encoded, s.hasRead, s.hashed = Request{}, question{}, tokenizer.Prompt{}, false, time.Time{}
	clear(s.taints)
	r.scratch.Put(s)
}
