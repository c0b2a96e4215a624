// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer"
)

// Router decides where requests go. Make one with [New].
type Router struct {
	conf    Config
	metrics *metrics
	kept    *keptDecisions
	recent  *beginnings // of booked prompts
	// confirms has the booked requests whose blocks the workers' events will show.
	confirms confirm.Table
	scratch  sync.Pool // of *scratch

	// names has the pools of each model name. The map is replaced, never changed.
	names atomic.Pointer[map[string]target]

	dumping chan struct{}   // holds one value while a dump or a restore runs
	dumps   [3]atomic.Int64 // number of dumps, by their end: see dumpWhole

	fleet sync.RWMutex
	// fleet guards the fields below. An event is applied under the read lock, so that its
	// worker cannot be removed meanwhile.
	pools  map[poolKey]*pool
	owners map[uint64]*pool   // by worker id
	cards  map[string]*Card   // by name
	judged map[string]*judged // by base model
	// faults has the faults that [Router.SetFaults] was given, by worker id and source.
	faults map[uint64]map[string][]Fault

	// busy are the models' own thresholds, by base model.
	busy map[string]*scorer.Thresholds

	given       *givenIDs
	flights     *flights
	peerFlights atomic.Uint64 // flights of peers so far
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
		recent:  new(beginnings),
		pools:   make(map[poolKey]*pool),
		owners:  make(map[uint64]*pool),
		judged:  make(map[string]*judged),
		faults:  make(map[uint64]map[string][]Fault),
		busy:    make(map[string]*scorer.Thresholds),
		given:   newGivenIDs(),
		flights: &flights{byID: make(map[string]flight), peerBytes: make(map[uint64]int)},
	}
	if conf.Now == nil {
		r.conf.Now = time.Now
	}
	r.flights.endedEarly, _ = simplelru.NewLRU[string, time.Time](maxEnded, nil) // fails for a size below 1 only
	r.names.Store(&map[string]target{})
	r.SetCards(conf.Cards)
	r.scratch.New = func() any { return new(scratch) }
	if r.metrics, err = newMetrics(conf.Meter, r); err != nil {
		return nil, err
	}
	return r, nil
}

// BestWorker decides where a request goes. The decision for a request with an ID is booked:
//
//   - The request holds a slot on the worker.
//   - The caller should call [Router.MarkPrefillCompleted] at the first token of the request.
//   - The caller must call [Router.Free] when the request has ended, successfully or not, and not
//     before BestWorker has returned.
//
// After an error nothing is booked. The errors are those of this package, wrapped, and the cause
// of ctx's end. BestWorker looks at ctx after it has read the prompt, and while the request waits in
// the queue. Only a request with an ID waits, and only if there is a queue.
func (r *Router) BestWorker(ctx context.Context, req Request) (answer Decision, err error) {
	s := r.scratch.Get().(*scratch)
	defer r.release(s)
	s.request = req
	err = r.decide(ctx, s, &answer)
	return answer, err
}

// decide decides for the request in s, and writes the decision to answer. It returns errQueued if the
// request is one of [Router.Submit] and waits in the queue.
func (r *Router) decide(ctx context.Context, s *scratch, answer *Decision) error {
	if err := r.resolve(s); err != nil {
		return err
	}
	timed, cancel := s.request.timed(ctx)
	defer cancel()
	if s.request.Held != "" {
		r.hold(timed, s)
	}
	var err error
	if s.pool = s.target.pools[0]; len(s.target.pools) > 1 {
		s.pool, err = r.choosePool(timed, s)
	}
	if err == nil {
		err = r.input(timed, s.pool, s, forDecision)
	}
	if err == nil {
		err = r.book(ctx, s.pool, s)
	}
	if errors.Is(err, errQueued) {
		return err
	}
	return r.answer(ctx, s, err, answer)
}

// target is what a model name in a request stands for.
type target struct {
	pools []*pool // of the base model, by block size; at least one
	lora  string
	// adapter is lora if workers registered that adapter. If only the card names it, adapter is
	// empty: all workers are assumed to have it.
	adapter string
	card    *Card   // nil if the model has no card
	judged  *judged // nil if kvroute makes no token ids for the model
}

// resolve checks the request in s, and finds the pools of its model.
func (r *Router) resolve(s *scratch) error {
	req := &s.request
	names := *r.names.Load()
	t, ok := names[req.Model]
	switch {
	case !ok && len(names) == 0:
		return fmt.Errorf("router: model %q: %w", bounded(req.Model), ErrNoWorkers)
	case !ok:
		return fmt.Errorf("router: model %q: %w", bounded(req.Model), ErrUnknownModel)
	case r.conf.StrictModels && (t.card == nil || t.card.Prompts == nil):
		return fmt.Errorf("router: model %q has no tokenizer: %w", bounded(req.Model), ErrUnknownModel)
	}
	if err := req.check(); err != nil {
		return fmt.Errorf("router: model %q: %w", bounded(req.Model), err)
	}
	s.target = t
	return nil
}

// answer writes the decision in s to answer, or adds the name of the model to err. It counts the decision or
// the refusal of a request with an ID.
func (r *Router) answer(ctx context.Context, s *scratch, err error, answer *Decision) error {
	req, t, p := &s.request, &s.target, s.pool
	if err != nil {
		if req.ID != "" {
			r.metrics.refused(t.pools[0].model, err)
		}
		return fmt.Errorf("router: model %q: %w", t.pools[0].model, err)
	}
	d, list := s.decided(), &s.choices.list
	encoded := d.TokenMode == tokenizer.Exact && req.Tokens == nil && req.Blocks == nil
	ids := s.input.prompt.ids.IDs
	if req.ID != "" {
		r.metrics.decided(ctx, p.labels, d)
		r.notePanic(p, &s.input, d.Panic)
		r.kept.add(s.input.number, d, list.workers, list.omitted)
		r.recent.add(p.poolKey, s.input.hashes.local, s.input.hashes.sequence)
		if prompt := &s.input.prompt.ids; r.conf.Hooks.Observe != nil && (encoded || prompt.Checked != nil) {
			silent, suspect := r.compared(t, d.Worker, prompt.Class)
			o := Observation{
				ID: req.ID, Card: t.card, Model: p.model, Worker: d.Worker, Group: d.Group, Address: d.Address, Host: d.Host,
				Engine: d.Engine, BlockSize: p.blockSize,
				Events: !s.result.booked.unreported && !silent, Suspect: suspect, Class: prompt.Class, Prompt: req.Prompt, IDs: ids,
			}
			if !encoded {
				o.ByText, o.IDs = true, prompt.Checked
			}
			r.conf.Hooks.Observe(o)
		}
	}
	var seen []Candidate
	if req.Explain {
		seen = slices.Clone(list.workers)
	}
	if !req.WantTokens || !encoded {
		ids = nil
	}
	d.copyTo(answer, seen, 0, slices.Clone(ids), d.Prefill)
	return nil
}

// notePanic counts a booked request that went to an unhealthy worker. It calls the hook when the first plain request
// does, and when the first one no longer does. No lock is held.
func (r *Router) notePanic(p *pool, in *decisionInput, panics bool) {
	if panics {
		r.metrics.panics.AddTo(p.labels.pool, 1)
	}
	if in.Pinned != nil || !in.plain() || p.panics.Load() == panics || !p.panics.CompareAndSwap(!panics, panics) {
		return
	}
	if r.conf.Hooks.Panic != nil {
		r.conf.Hooks.Panic(p.model, panics)
	}
}
