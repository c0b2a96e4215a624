// SPDX-License-Identifier: Apache-2.0

// Package replay plays a workload against simulated engines on a virtual clock. The
// product's own router chooses the engines: package router with its index, slots and cost
// rules. The router gets cache events, first tokens and ends of requests as in production. A
// scenario may delay or lose them.
//
// The same scenario gives the same result, bit for bit. A [Trace] may be read by
// any number of simulations at a time; one simulation uses one goroutine.
package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// sim is one simulation. Its methods end it early with [bench.NoError].
type sim struct {
	Scenario
	ctx   context.Context //nolint:containedctx // a simulation is one call
	now   int64           // ns
	queue queue

	reqs    []Request
	states  []state // of the requests
	loops   *loops  // nil for an open loop
	left    int     // requests that have not ended; closed loop: of those planned
	waiting int     // requests in the queues of routers
	retried int

	engines   []*engine
	hybrid    *hybrid     // nil: the model has full attention only
	routers   []*replica  // by replica, or by group
	upper     *replica    // the router whose candidates are the groups; nil without groups
	published []published // by group
	pulls     []float64   // from the arrival of a request at its worker to the end of its copy, in s
	transfers []float64   // times from the decode worker's request for blocks to their arrival, in s

	rng, jitter, foreign *rand.Rand

	// Scratch of one event, and of one decision.
	stored    []indexer.Block
	externals []uint64
	local     []uint64
	sequence  []uint64

	decisions []time.Duration
}

// state is the course of a request. Times are in ns.
type state struct {
	id       string
	due      int64
	begun    int64 // when an engine began with the prompt, -1 = not yet
	first    int64 // 0 = no token yet
	end      int64
	cached   int // tokens of the prompt that the engine found cached
	promised int // cached tokens that the decision expected
	router   int // -1 = a foreign request
	worker   int // that generates the output
	leg      int // worker of the prefill leg, or noLeg
	legID    string
	sides    sides
	admission
}

// replica is one router of the simulation.
type replica struct {
	router  *router.Router
	workers []int  // candidates of the router
	broken  []bool // by worker: its last event was lost
}

const model = "model"

// tickEvery is how often routers look for requests without an end.
const tickEvery = 15 * time.Second

// Run simulates a scenario to its end, or until ctx ends.
func Run(ctx context.Context, c Scenario) (*Result, error) {
	s, err := newSim(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	return s.play()
}

func newSim(ctx context.Context, c Scenario) (*sim, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	draw := func(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(c.Seed, stream)) }
	h, err := newHybrid(c.Hybrid, c.Trace)
	if err != nil {
		return nil, err
	}
	s := &sim{
		Scenario: c, ctx: ctx, hybrid: h, reqs: c.Trace.Requests, left: len(c.Trace.Requests), states: make([]state, len(c.Trace.Requests)),
		rng: draw(0x7265706c6963), jitter: draw(0x6a6974746572), foreign: draw(0x666f726569676e),
	}
	for i := range s.states {
		s.states[i] = state{id: strconv.Itoa(i), begun: -1, leg: noLeg}
	}
	s.prioritise(draw(0x7072696f72697479))
	return s, nil
}

func (s *sim) play() (r *Result, err error) {
	err = bench.Try(func() {
		s.build()
		s.newRouters()
		s.begin()
		timing := s.timing(s.loop)
		r = s.result()
		r.Timing = timing
	})
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	return r, nil
}

// build makes the engines.
func (s *sim) build() {
	var shared *cache
	if s.Rule.Oracle {
		shared = newCache(s.KVBlocks*s.Workers, s.Trace.Distinct())
	}
	for w := range s.Workers {
		e := &engine{number: w, model: s.Engine, speed: 1, block: s.Trace.BlockSize, cache: shared, shared: shared != nil, reqs: s.reqs, states: s.states, single: s.everyStep, hybrid: s.hybrid}
		if s.SharedAttention {
			e.readers = make([]int32, s.Trace.Distinct())
		}
		if w < len(s.Speeds) {
			e.speed = s.Speeds[w]
		}
		if shared == nil {
			e.cache = newCache(s.KVBlocks, s.Trace.Distinct()*(1+s.hybrid.groups()))
		}
		e.present = !slices.ContainsFunc(s.Changes, func(c Change) bool { return c.Worker == w && c.Kind == Join })
		s.engines = append(s.engines, e)
	}
}

// newRouters replaces the routers by new ones that know only the workers.
func (s *sim) newRouters() {
	s.routers = nil
	for i := range max(s.Replicas, s.Groups) {
		var workers []int
		for w := range s.engines {
			if s.Groups == 1 || w*s.Groups/s.Workers == i {
				workers = append(workers, w)
			}
		}
		conf := s.config(uint64(i))
		conf.NoEvents = s.Approximate
		conf.Queue = router.QueueConfig{Threshold: s.RouterQueueThreshold, Policy: slots.QueuePolicy(s.RouterQueuePolicy), Limit: s.RouterQueueLimit}
		if s.Replicas > 1 {
			conf.Hooks.Tell = func(c router.Change) { s.sendChange(i, c) }
		}
		s.routers = append(s.routers, s.newReplica(conf, workers))
	}
	if s.Groups > 1 {
		s.newUpper()
	}
}

// config is the configuration of the router with a number.
func (s *sim) config(number uint64) router.Config {
	scoring := s.Rule.Settings
	scoring.Engine, scoring.KVRead = s.Engine, s.Engine.KVRead() // as with the setting engine-preset
	rule := s.Rule.choose(scoring)
	if s.PullCost {
		rule = s.pullCost()
	}
	conf := router.Config{
		Scoring: scoring, Rule: rule, BlockSize: s.Trace.BlockSize, Pull: s.pullConfig(),
		Seed: s.Seed + number, KeepDecisions: -1, PredictTTL: cmp.Or(s.Predict, -1), Split: s.split(), EstimateOutput: true, NoSpeeds: s.Rule.Oracle, Hooks: router.Hooks{Tell: s.slotChanged},
		Now: func() time.Time { return time.Unix(0, s.now) }, HoldoutShare: s.holdout,
	}
	if s.edit != nil {
		s.edit(&conf)
	}
	return conf
}

// newReplica makes a router and registers the workers that are present.
func (s *sim) newReplica(conf router.Config, workers []int) *replica {
	r := &replica{bench.Must(router.New(conf)), workers, make([]bool, s.Workers)}
	for _, w := range workers {
		if s.engines[w].present {
			bench.NoError(r.router.SetWorker(s.info(w)))
		}
	}
	return r
}

// id identifies a worker. It depends on the seed, so that no rule depends on one set of
// ids.
func (s *sim) id(w int) uint64 { return s.Seed<<20 + uint64(w) + 1 }

func (s *sim) info(w int) router.WorkerInfo {
	return router.WorkerInfo{
		ID: s.id(w), Name: "w" + strconv.Itoa(w), Models: []string{model}, Role: s.role(w),
		Address:   netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, byte(w >> 8), byte(w)}), 8000),
		BlockSize: s.Trace.BlockSize, TotalKVBlocks: s.KVBlocks, MaxNumSeqs: maxRunning,
		MaxBatchedTokens: int(s.Engine.Chunk), StartedMS: s.engines[w].started + 1, Engine: engineName, KVSource: s.pullSource(w),
	}
}

// begin plans the events that are known before the first request.
func (s *sim) begin() {
	for _, c := range s.Changes {
		s.queue.plan(c.At.Nanoseconds(), func() { s.changed(c) })
	}
	if s.ColdStart > 0 {
		s.queue.plan(s.ColdStart.Nanoseconds(), s.newRouters)
	}
	if s.SyncLostFor > 0 {
		s.every(tickEvery, 0, 1, func() {
			for _, r := range s.routers {
				r.router.Tick()
			}
		})
	}
	for g := range s.published {
		// Groups do not know of each other, nor do their clocks.
		s.every(s.SummaryAge, g, s.Groups, func() { s.summarise(g) })
	}
	if s.ForeignShare > 0 && !s.Rule.NoReports {
		for w := range s.Workers {
			s.every(s.ReportEvery, w, s.Workers, func() { s.reportLoad(w) })
		}
	}
	if len(s.Trace.Users) == 0 {
		s.arrive(0)
		return
	}
	s.beginLoops()
}

// every plans a periodic event of the source i of n. Their phases are spread over the period.
func (s *sim) every(period time.Duration, i, n int, do func()) {
	var again func()
	again = func() {
		do()
		s.queue.plan(s.now+period.Nanoseconds(), again)
	}
	s.queue.plan(period.Nanoseconds()*int64(i+1)/int64(n), again)
}

func (s *sim) loop() {
	for n := 0; s.left > 0; n++ {
		if n%4096 == 0 && s.ctx.Err() != nil {
			bench.NoError(context.Cause(s.ctx))
		}
		if len(s.queue.timeline) == 0 {
			bench.NoError(fmt.Errorf("%d requests wait for ever", s.left))
		}
		next := s.queue.pop()
		s.now = next.at
		next.value()
		s.leaveQueues()
	}
}

// arrive plans a request of an open loop.
func (s *sim) arrive(req int32) {
	if int(req) >= len(s.reqs) {
		return
	}
	at := s.dueAt(req)
	if s.Jitter > 0 {
		at += s.jitter.Int64N(s.Jitter.Nanoseconds())
		if int(req)+1 < len(s.reqs) {
			at = min(at, s.dueAt(req+1))
		}
	}
	s.queue.plan(at, func() {
		s.arrive(req + 1)
		s.arrived(req)
	})
}

// dueAt is when a request of an open loop is due, in ns.
func (s *sim) dueAt(req int32) int64 {
	return int64(math.Round(float64(s.reqs[req].At) / s.Speedup))
}

// arrived routes a request, or sends it to a worker if it is foreign.
func (s *sim) arrived(req int32) {
	state := &s.states[req]
	state.due = s.now
	if s.isForeign(req) {
		state.router = -1
		s.send(s.foreign.IntN(s.ForeignWorkers), req)
		return
	}
	if s.Replicas > 1 {
		state.router = s.rng.IntN(s.Replicas)
	}
	s.route(req)
}

// isForeign reports whether a request reaches its worker without a router.
func (s *sim) isForeign(req int32) bool {
	if s.ForeignShare == 0 {
		return false
	}
	if session := s.reqs[req].Session; session != 0 {
		return scorer.Draw(s.Seed, session) < s.ForeignShare
	}
	return s.foreign.Float64() < s.ForeignShare
}

// reportLoad has an engine report its load to each router.
func (s *sim) reportLoad(w int) {
	e, name, now := s.engines[w], router.Worker{ID: s.id(w)}, time.Unix(0, s.now)
	for _, r := range s.routers {
		r.router.SetEngineRequests(name, len(e.decodes)+len(e.prefills), len(e.waiting)-e.head, now)
		r.router.SetEngineLoad(name, e.cache.live, now)
	}
}

// route makes a router choose a worker for a request, and sends the request there.
func (s *sim) route(req int32) {
	state, b := &s.states[req], &s.Trace.blocks
	s.local, s.sequence = s.local[:0], s.sequence[:0]
	for _, n := range s.reqs[req].Blocks {
		s.local = append(s.local, b.local[n])
		s.sequence = append(s.sequence, b.chain[n])
	}
	if s.upper != nil {
		d, _, err := s.decide(s.upper, req) // it has no queue
		bench.NoError(err)
		state.router = int(d.Worker.ID - s.groupID(0))
	}
	if d, waits, err := s.decide(s.routers[state.router], req); waits {
		s.wait(req)
	} else {
		s.routed(req, d, err)
	}
}

// routed sends a request to the worker that its router chose.
func (s *sim) routed(req int32, d router.Decision, err error) {
	state := &s.states[req]
	if refuses(err) {
		s.refuse(req)
		return
	}
	if s.upper != nil && errors.Is(err, router.ErrNoWorkers) {
		// The group has lost its last worker since its last summary: the upper router chooses again.
		s.upper.router.Free(state.id)
		s.summarise(state.router)
		s.route(req)
		return
	}
	if err != nil {
		bench.NoError(fmt.Errorf("request %d at %v: %w", req, time.Duration(s.now), err))
	}
	state.worker = s.number(&d)
	first := state.worker
	if leg := d.Prefill; leg != nil {
		d, state.leg, state.legID = *leg, s.number(leg), leg.ID
		first = state.leg
	}
	state.promised = min(d.CachedTokens, s.reqs[req].Input)
	if d.Source != nil {
		state.promised = min(d.CachedTokens+d.Source.Tokens, s.reqs[req].Input)
		s.pull(req, d.Source.Worker)
		return
	}
	s.send(first, req)
}

// number is the number of the decision's worker.
func (s *sim) number(d *router.Decision) int { return int(d.Worker.ID - s.id(0)) }

// decide makes a router choose for the request whose hashes [sim.route] has filled in.
func (s *sim) decide(r *replica, req int32) (d router.Decision, waits bool, err error) {
	state := &s.states[req]
	start := time.Now()
	session := ""
	if s.holdout > 0 { // a conversation stays on one side
		session = strconv.FormatUint(s.reqs[req].Session, 10)
	}
	d, waits, err = r.router.Submit(s.ctx, router.Request{
		ID: state.id, Model: model, Session: session, MayPull: s.Pull, StrictPriority: state.strict, Priority: state.jump,
		Blocks: &router.Blocks{Local: s.local, Sequence: s.sequence, Tokens: s.reqs[req].Input},
	})
	if s.Timing {
		s.decisions = append(s.decisions, time.Since(start))
	}
	if s.decided != nil && !waits {
		s.decided(req, d)
	}
	return d, waits, err
}

// send puts a request into the queue of an engine.
func (s *sim) send(w int, req int32) {
	e := s.engines[w]
	idle := e.head == len(e.waiting)
	e.waiting = append(e.waiting, req)
	if !e.busy || idle {
		s.wake(w)
	}
}

// wake has an engine look for work: now if it is idle, otherwise after its current step.
func (s *sim) wake(w int) {
	switch e := s.engines[w]; {
	case !e.busy:
		s.proceed(w)
	case e.cut(s.now):
		s.planSteps(w)
	}
}

// proceed admits waiting requests to an engine and plans its next step.
func (s *sim) proceed(w int) {
	e := s.engines[w]
	if e.plan(s) {
		s.planSteps(w)
	}
}

// planSteps plans the end of an engine's steps. It is ignored if the engine has another plan
// by then.
func (s *sim) planSteps(w int) {
	e := s.engines[w]
	version := e.version
	s.queue.plan(e.end, func() {
		if version == e.version {
			e.complete(s, w)
			s.proceed(w)
		}
	})
}

// firstToken notes the first token of a request.
func (s *sim) firstToken(req int32) {
	state := &s.states[req]
	state.first = max(1, s.now)
	if state.router >= 0 {
		s.routers[state.router].router.MarkPrefillCompleted(state.id)
	}
	if s.upper != nil {
		s.upper.router.MarkPrefillCompleted(state.id)
	}
}

// ended ends a request on a worker.
func (s *sim) ended(w int, req int32) {
	s.publishRemoved(w)
	s.free(req)
	state := &s.states[req]
	state.end = s.now
	s.over(req)
}

// over notes that a request has ended or was refused, and plans the next one of its user.
func (s *sim) over(req int32) {
	s.left--
	if s.loops != nil {
		s.follow(req)
	}
}

// free frees the slots of a request, at the router of its worker and at the upper router.
func (s *sim) free(req int32) {
	state := &s.states[req]
	if state.router >= 0 {
		s.routers[state.router].router.Free(state.id)
	}
	if s.upper != nil {
		s.upper.router.Free(state.id)
	}
}
