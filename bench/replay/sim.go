// SPDX-License-Identifier: Apache-2.0

// Package replay plays a workload against simulated engines on a virtual clock. The
// product's own router chooses the engines: package router with its index, slots and cost
// rules. It gets cache events, first tokens and ends of requests as in production, or
// later, or never, as the scenario says.
//
// The same scenario gives the same result, bit for bit. A [Trace] may be read by
// any number of simulations at a time; one simulation uses one goroutine.
package replay

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// sim is one simulation.
type sim struct {
	Scenario
	ctx   context.Context //nolint:containedctx // a simulation is one call
	now   int64           // ns
	queue queue
	reqs  []Request

	engines []*engine
	alive   []bool
	started []int64 // ms; of the workers' current lives
	routers []*replica
	decoder *replica // of the workers that only decode, nil if there are none
	upper   *replica // chooses among groups, nil if there are none
	rng     *rand.Rand
	jitter  *rand.Rand
	foreign *rand.Rand

	// The state of each request, by its index.
	ids      []string
	user     []int32 // closed loop
	next     []int32 // of each user: index in its requests
	due      []int64 // ns
	begun    []int64 // ns; when an engine began with the prompt, -1 = not yet
	first    []int64 // ns; 0 = none yet
	end      []int64 // ns; 0 = not yet
	cached   []int32 // tokens of the prompt that the engine found cached
	promised []int32 // cached tokens that the decision expected
	worker   []int32 // -1 = not with an engine
	second   []int32 // worker that decodes, if it is another one
	replica  []int32 // -1 = a foreign request
	left     int     // requests that have not ended
	retried  int

	// Delayed events and messages, by number.
	late     []lateEvent
	messages []syncMessage

	published []published // by group

	// Scratch of one event, and of one decision.
	stored    []indexer.Block
	externals []uint64
	local     []uint64
	sequence  []uint64

	decisions []time.Duration
}

// replica is one router of the simulation.
type replica struct {
	router  *router.Router
	workers []int  // candidates of the router
	broken  []bool // by worker: an event was lost since the last one
}

type lateEvent struct {
	worker int32
	life   int64 // value of sim.started when it was sent
	event  indexer.Event
}

type syncMessage struct {
	from   int
	change router.Change
}

const model = "model"

// tickEvery is how often routers look for requests without an end.
const tickEvery = 15 * time.Second

// Run simulates a scenario to its end, or until ctx ends.
func Run(ctx context.Context, c Scenario) (*Result, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	n := len(c.Trace.Requests)
	s := &sim{
		Scenario: c, ctx: ctx, reqs: c.Trace.Requests, left: n,
		rng: rand.New(rand.NewPCG(c.Seed, 0x7265706c6963)), jitter: rand.New(rand.NewPCG(c.Seed, 0x6a6974746572)),
		foreign: rand.New(rand.NewPCG(c.Seed, 0x666f726569676e)),
		ids:     make([]string, n), due: make([]int64, n), begun: make([]int64, n), first: make([]int64, n), end: make([]int64, n),
		cached: make([]int32, n), promised: make([]int32, n), worker: make([]int32, n), replica: make([]int32, n), second: make([]int32, n),
		alive: make([]bool, c.Workers), started: make([]int64, c.Workers),
	}
	for i := range s.ids {
		s.ids[i] = strconv.Itoa(i)
		s.worker[i], s.begun[i] = -1, -1
	}
	s.build()
	if err := s.newRouters(); err != nil {
		return nil, err
	}
	s.begin()
	wall := startTiming(c.Timing)
	if err := s.loop(); err != nil { //nolint:contextcheck // events have no context
		return nil, err
	}
	r := s.result()
	if c.Timing {
		r.Timing = wall.stop(n, s.decisions)
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
		e := &engine{model: s.Engine, speed: 1, block: s.Trace.BlockSize, cache: shared, shared: shared != nil, reqs: s.reqs, begun: s.begun, single: s.everyStep}
		if w < len(s.Speeds) {
			e.speed = s.Speeds[w]
		}
		if s.PrefillWorkers > 0 {
			e.role = decodeOnly
			if w < s.PrefillWorkers {
				e.role = prefillOnly
			}
		}
		if shared == nil {
			e.cache = newCache(s.KVBlocks, s.Trace.Distinct())
		}
		s.engines = append(s.engines, e)
		s.alive[w] = !slices.ContainsFunc(s.Changes, func(c Change) bool { return c.Worker == w && c.Kind == Join })
	}
}

// newRouters replaces the routers by new ones that know only the workers.
func (s *sim) newRouters() error {
	s.routers = nil
	for i := range max(s.Replicas, s.Groups) {
		rep := &replica{broken: make([]bool, s.Workers)}
		for w := range s.Workers {
			if s.engines[w].role != decodeOnly && (s.Groups == 1 || w*s.Groups/s.Workers == i) {
				rep.workers = append(rep.workers, w)
			}
		}
		conf := router.Config{
			Scoring: s.Rule.Settings, Rule: s.Rule.Choose, BlockSize: s.Trace.BlockSize,
			Seed: s.Seed + uint64(i), KeepDecisions: -1, PredictTTL: cmp.Or(s.Predict, -1), NoEvents: s.Approximate,
			Now: func() time.Time { return time.Unix(0, s.now) },
			// A worker that only prefills keeps nothing for later tokens.
			NoActiveBlocks: s.PrefillWorkers > 0,
		}
		if s.Replicas > 1 {
			conf.Tell = func(c router.Change) { s.sendChange(i, c) }
		}
		if err := s.start(rep, conf); err != nil {
			return err
		}
		s.routers = append(s.routers, rep)
	}
	if s.Groups > 1 {
		return s.newUpper()
	}
	if s.PrefillWorkers == 0 {
		return nil
	}
	s.decoder = &replica{broken: make([]bool, s.Workers)}
	for w := s.PrefillWorkers; w < s.Workers; w++ {
		s.decoder.workers = append(s.decoder.workers, w)
	}
	return s.start(s.decoder, router.Config{
		Scoring: decodeSettings(s.Rule.Settings), BlockSize: s.Trace.BlockSize,
		Seed: s.Seed, KeepDecisions: -1, PredictTTL: -1,
		Now: func() time.Time { return time.Unix(0, s.now) },
	})
}

// start makes a replica's router and registers the workers that are present.
func (s *sim) start(rep *replica, conf router.Config) (err error) {
	if rep.router, err = router.New(conf); err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	for _, w := range rep.workers {
		if s.alive[w] {
			if err := rep.router.SetWorker(s.info(w)); err != nil {
				return fmt.Errorf("replay: %w", err)
			}
		}
	}
	return nil
}

// decodeSettings choose by load alone: prompts arrive computed, so a decoding worker does
// not use its cache.
func decodeSettings(s scorer.Settings) scorer.Settings {
	s.AssumeKVReuse, s.TrackPrefill = false, false
	s.OverlapWeight, s.OverlapCredit = 0, 0
	if s.Policy != scorer.Dynamo && s.Policy != scorer.DynamoNewer {
		s.Policy = scorer.Tokens
	}
	return s
}

// id identifies a worker. It depends on the seed, so that no rule depends on one set of
// ids.
func (s *sim) id(w int) uint64 { return s.Seed<<20 + uint64(w) + 1 }

func (s *sim) info(w int) router.WorkerInfo {
	return router.WorkerInfo{
		ID: s.id(w), Name: "w" + strconv.Itoa(w), Models: []string{model},
		Address:   netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, byte(w >> 8), byte(w)}), 8000),
		BlockSize: s.Trace.BlockSize, TotalKVBlocks: s.KVBlocks, MaxNumSeqs: maxRunning,
		MaxBatchedTokens: int(s.Engine.Chunk), StartedMS: s.started[w] + 1,
	}
}

// begin plans the events that are known before the first request.
func (s *sim) begin() {
	for i, c := range s.Changes {
		s.queue.plan(c.At.Nanoseconds(), change, int32(i), 0)
	}
	if s.ColdStart > 0 {
		s.queue.plan(s.ColdStart.Nanoseconds(), coldStart, 0, 0)
	}
	if s.SyncLostFor > 0 {
		s.queue.plan(tickEvery.Nanoseconds(), tick, 0, 0)
	}
	for g := range s.published {
		// Groups do not know of each other, nor do their clocks.
		s.queue.plan(s.SummaryAge.Nanoseconds()*int64(g+1)/int64(s.Groups), summary, int32(g), 0)
	}
	if s.ForeignShare > 0 && !s.Rule.NoReports {
		for w := range s.Workers { // each at a moment of its own
			s.queue.plan(s.ReportEvery.Nanoseconds()*int64(w+1)/int64(s.Workers), engineReport, int32(w), 0)
		}
	}
	if len(s.Trace.Users) == 0 {
		s.arrive(0)
		return
	}
	s.user, s.next = make([]int32, len(s.reqs)), make([]int32, len(s.Trace.Users))
	for u := range s.Trace.Users {
		user := &s.Trace.Users[u]
		for _, r := range user.Requests {
			s.user[r] = int32(u)
		}
		if len(user.Requests) > 0 {
			s.queue.plan(user.Start.Nanoseconds(), arrival, user.Requests[0], 0)
		}
	}
}

// arrive plans a request of an open loop.
func (s *sim) arrive(req int) {
	if req >= len(s.reqs) {
		return
	}
	at := s.dueAt(req)
	if s.Jitter > 0 {
		at += s.jitter.Int64N(s.Jitter.Nanoseconds())
		if req+1 < len(s.reqs) {
			at = min(at, s.dueAt(req+1))
		}
	}
	s.queue.plan(at, arrival, int32(req), 0)
}

// dueAt is when a request of an open loop is due, in ns.
func (s *sim) dueAt(req int) int64 { return int64(math.Round(float64(s.reqs[req].At) / s.Speedup)) }

func (s *sim) loop() error {
	for n := 0; s.left > 0; n++ {
		if n%4096 == 0 && s.ctx.Err() != nil {
			return fmt.Errorf("replay: %w", context.Cause(s.ctx))
		}
		if len(s.queue.timeline) == 0 {
			return fmt.Errorf("replay: %d requests wait for ever", s.left)
		}
		next := s.queue.pop()
		e := next.value
		s.now = next.at
		var err error
		switch e.kind {
		case arrival:
			err = s.arrived(e.a)
		case stepEnd:
			s.stepped(int(e.a), e.b)
		case kvEvent:
			// Ignore an event of the worker before its restart.
			if l := &s.late[e.b]; s.started[l.worker] == l.life {
				s.deliver(l.worker, &l.event)
			}
			s.late[e.b] = lateEvent{}
		case message:
			s.receive(&s.messages[e.b])
		case change:
			err = s.changed(s.Changes[e.a])
		case coldStart:
			err = s.newRouters()
		case handOver:
			s.worker[e.a] = s.second[e.a]
			s.decoder.router.MarkPrefillCompleted(s.ids[e.a])
			s.send(int(s.second[e.a]), e.a)
		case tick:
			for _, r := range s.routers {
				r.router.Tick()
			}
			s.queue.plan(s.now+tickEvery.Nanoseconds(), tick, 0, 0)
		case engineReport:
			s.reportLoad(int(e.a))
			s.queue.plan(s.now+s.ReportEvery.Nanoseconds(), engineReport, e.a, 0)
		case summary:
			err = s.summarise(int(e.a))
			s.queue.plan(s.now+s.SummaryAge.Nanoseconds(), summary, e.a, 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// arrived routes a request, or sends it to a worker if it is foreign.
func (s *sim) arrived(req int32) error {
	s.due[req] = s.now
	if s.user == nil {
		s.arrive(int(req) + 1)
	}
	s.replica[req] = 0
	if s.isForeign(req) {
		s.replica[req] = -1
		w := s.foreign.IntN(s.ForeignWorkers)
		s.worker[req] = int32(w)
		s.send(w, req)
		return nil
	}
	if s.Replicas > 1 {
		s.replica[req] = int32(s.rng.IntN(s.Replicas))
	}
	return s.route(req)
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
func (s *sim) route(req int32) error {
	s.hash(req)
	if s.upper != nil {
		if err := s.chooseGroup(req); err != nil {
			return err
		}
	}
	d, err := s.decide(s.routers[s.replica[req]], req)
	if err != nil {
		if again, e := s.refused(req, err); e != nil || !again {
			return cmp.Or(e, err)
		}
		return s.route(req)
	}
	w := int(d.Worker.ID - s.id(0))
	s.promised[req] = int32(min(d.CachedTokens, s.reqs[req].Input))
	s.worker[req] = int32(w)
	if s.decoder != nil && s.reqs[req].Output > 1 {
		d, err := s.decide(s.decoder, req)
		if err != nil {
			return err
		}
		s.second[req] = int32(d.Worker.ID - s.id(0))
	}
	s.send(w, req)
	return nil
}

// send puts a request into the queue of an engine.
func (s *sim) send(w int, req int32) {
	e := s.engines[w]
	idle := e.head == len(e.waiting)
	e.waiting = append(e.waiting, req)
	switch {
	case !e.busy:
		s.proceed(w)
	case idle && e.cut(s.now):
		s.queue.plan(e.end, stepEnd, int32(w), e.version)
	}
}

// hash fills in the hashes of a request's blocks.
func (s *sim) hash(req int32) {
	b := &s.Trace.blocks
	s.local, s.sequence = s.local[:0], s.sequence[:0]
	for _, n := range s.reqs[req].Blocks {
		s.local = append(s.local, b.local[n])
		s.sequence = append(s.sequence, b.chain[n])
	}
}

// question is the router's view of a request. It uses the hashes of the last call of hash.
func (s *sim) question(req int32) router.Request {
	return router.Request{
		Model:  model,
		Blocks: &router.Blocks{Local: s.local, Sequence: s.sequence, Tokens: s.reqs[req].Input},
	}
}

func (s *sim) decide(r *replica, req int32) (router.Decision, error) {
	q := s.question(req)
	q.ID = s.ids[req]
	var start time.Time
	if s.Timing {
		start = time.Now()
	}
	d, err := r.router.BestWorker(s.ctx, q)
	if s.Timing {
		s.decisions = append(s.decisions, time.Since(start))
	}
	if s.decided != nil {
		s.decided(req, d)
	}
	if err != nil {
		return d, fmt.Errorf("replay: request %d at %v: %w", req, time.Duration(s.now), err)
	}
	return d, nil
}

// proceed admits waiting requests to an engine and plans its next step.
func (s *sim) proceed(w int) {
	e := s.engines[w]
	e.admit(s.cached)
	if e.plan(s.now) {
		s.queue.plan(e.end, stepEnd, int32(w), e.version)
	}
}

func (s *sim) stepped(w int, version uint32) {
	e := s.engines[w]
	if version != e.version {
		return
	}
	e.complete(s, w)
	s.proceed(w)
}

// firstToken ends the prefill of a request, of whose blocks the first known were cached
// before.
func (s *sim) firstToken(w int, req int32, known int) {
	s.first[req] = s.now
	if s.first[req] == 0 {
		s.first[req] = 1
	}
	// Removals come first, so that no cache ever holds more than its capacity.
	s.publishRemoved(w)
	s.publishStored(w, req, known)
	if s.replica[req] >= 0 {
		s.routers[s.replica[req]].router.MarkPrefillCompleted(s.ids[req])
	}
	if s.upper != nil {
		s.upper.router.MarkPrefillCompleted(s.ids[req])
	}
}

// ended ends a request on a worker.
func (s *sim) ended(w int, req int32) {
	s.publishRemoved(w)
	switch s.engines[w].role {
	case prefillOnly:
		s.free(req)
		if s.reqs[req].Output > 1 {
			took := float64(s.reqs[req].Input) / s.Transfer
			s.queue.plan(s.now+int64(took*1e9), handOver, req, 0)
			return
		}
	case decodeOnly:
		s.decoder.router.Free(s.ids[req])
	case both:
		s.free(req)
	}
	s.end[req] = s.now
	s.worker[req] = -1
	s.left--
	if s.user == nil {
		return
	}
	u := s.user[req]
	user := &s.Trace.Users[u]
	if s.next[u]++; int(s.next[u]) < len(user.Requests) {
		next := user.Requests[s.next[u]]
		s.queue.plan(s.now+s.reqs[next].Think.Nanoseconds(), arrival, next, 0)
	}
}
