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

	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer"
)

// Router decides where requests go. Make one with [New].
type Router struct {
	conf    Config
	metrics *metrics
	kept    *keptDecisions
	recent  *beginnings // of booked prompts
	scratch sync.Pool   // of *scratch

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
	busy map[string]*scorer.Thresholds

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
		busy:    make(map[string]*scorer.Thresholds),
		flights: &flights{byID: make(map[string]flight)},
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
	err = r.decide(ctx, s, &answer)
	return answer, err
}

// decide fills in the decision for the request in s, or returns errQueued for a request of
// [Router.Submit] that waits.
func (r *Router) decide(ctx context.Context, s *scratch, answer *Decision) error {
	t, err := r.prepare(s)
	if err != nil {
		return err
	}
	timed, cancel := s.request.timed(ctx)
	defer cancel()
	p, err := r.place(timed, t, s)
	s.target, s.pool = t, p
	if err == nil {
		r.probe(timed, p, s)
		err = r.book(ctx, p, s)
	}
	if errors.Is(err, errQueued) {
		return err
	}
	return r.answer(ctx, s, err, answer)
}

// answer fills in the decision in s, or returns the error of the pool, and counts either.
func (r *Router) answer(ctx context.Context, s *scratch, err error, answer *Decision) error {
	req, t, p := &s.request, &s.target, s.pool
	if err != nil {
		if req.ID != "" {
			r.metrics.refused(t.pools[0].model, err)
		}
		return fmt.Errorf("router: model %q: %w", t.pools[0].model, err)
	}

	d := &s.decision
	if req.ID != "" {
		r.metrics.decided(ctx, p.labels, d)
		r.kept.add(s.question.number, d, s.workspace.seen)
		r.recent.add(p.poolKey, s.question.local, s.question.sequence)
		if r.conf.Hooks.Observe != nil && d.TokenMode == tokenizer.Exact && req.Tokens == nil && req.Blocks == nil {
			r.conf.Hooks.Observe(Observation{ID: req.ID, Card: t.card, Model: p.model, Worker: d.Worker, Address: d.Address, BlockSize: p.blockSize, Prompt: req.Prompt, IDs: s.tokens})
		}
	}
	*answer = *d
	answer.Omitted = 0 // of the kept decision
	if req.WantTokens && d.TokenMode == tokenizer.Exact && req.Tokens == nil && req.Blocks == nil {
		answer.Tokens = slices.Clone(s.tokens)
	}
	if req.Explain {
		answer.Candidates = slices.Clone(s.workspace.seen)
	}
	return nil
}

// book has the pool decide and take a slot, and adds the request to the flights.
func (r *Router) book(ctx context.Context, p *pool, s *scratch) error {
	q := &s.question
	if q.ID == "" {
		return p.admit(ctx, r.conf.Now, s)
	}
	q.number = r.kept.next()
	if !r.flights.begin(q.ID, flight{pool: p, session: q.session, number: q.number}) {
		return ErrDuplicate
	}
	q.flights = r.flights
	ends := true
	defer func() {
		if ends {
			r.flights.end(q.ID, 0, q.number)
		}
	}()
	err := p.admit(ctx, r.conf.Now, s)
	if ends = err != nil && !errors.Is(err, errQueued); err != nil {
		return err
	}
	return r.booked(p, s)
}

// booked adds what the decision in s says to the flight of a request that has its slot.
func (r *Router) booked(p *pool, s *scratch) error {
	q := &s.question
	fl := flight{pool: p, session: q.session, number: q.number}
	if q.SessionFinal {
		fl.session = 0
	} else if q.session != 0 && r.conf.Hooks.TellSession != nil {
		fl.name = new(q.Session)
	}
	fl.lapses, fl.rebind = !q.Owned, q.rebind
	fl.first, fl.second, fl.held = s.decision.Worker, s.decision.Second.Worker, int32(s.decision.Second.OverlapBlocks)
	fl.guess = p.known.guess(s.decision.Time, q)
	if fl.leg = s.decision.Prefill != nil; fl.leg {
		r.beginLeg(p, q, s.decision.Prefill)
	}
	fl.outcome = r.beginOutcome(&s.decision, q.Arrival)
	if !r.flights.change(q.ID, fl) {
		// Free was called between the booking and here. It did not free the slot, and it is
		// not called again.
		fl.guess.withdraw()
		p.update(r.conf.Now(), func(c *core) { c.slots.Free(q.ID) })
		if fl.leg {
			r.Abandon(legID(q.ID))
		}
		return ErrFreed
	}
	if r.conf.Hooks.Tell != nil {
		r.tellPeers(q.slotTaken(&s.decision))
	}
	if q.SessionFinal && q.session != 0 && r.conf.Hooks.TellSession != nil {
		r.conf.Hooks.TellSession(SessionBinding{Session: q.Session, Worker: s.decision.Worker, Over: true})
	}
	return nil
}
