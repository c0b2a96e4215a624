// SPDX-License-Identifier: Apache-2.0

// Package replay plays a workload against simulated engines, on a virtual clock,
// and has the product's own router choose among them: package router with its
// index, slots and cost rules, told of cached blocks, first tokens and ends as in
// production, only late or not at all where the scenario says so.
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

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// Scenario is what is simulated. The zero value of each field means its default.
type Scenario struct {
	Trace *Trace // required
	Rule  Rule   // required

	// Speedup divides the times at which requests of an open loop are due.
	// Default 1.
	Speedup float64
	// Jitter moves each request of an open loop later by up to this much, by the
	// seed, but never past the next one: how far results hang on nothing at all.
	// Default 0.
	Jitter time.Duration

	Workers  int           // default 8
	Engine   scorer.Engine // of each worker; default [scorer.Dense32B]
	KVBlocks int           // blocks of the trace's size that a worker's cache has; default 2,000
	// Speeds divide the times of the engine, worker by worker; those without
	// one have 1.
	Speeds []float64

	// Replicas is the number of router replicas that requests are spread over
	// at random. Each hears of its own requests at once, and of the others' after
	// SyncDelay, or, if that is negative, never: what a router tells of its requests
	// is what it tells in production. Default 1.
	Replicas  int
	SyncDelay time.Duration
	// SyncLost is when replicas stop to hear of each other, for SyncLostFor:
	// messages of that time are lost for good. What they would have ended, ends
	// when the router gives it up, so they do not heal as those of package fleet do.
	// SyncLostFor 0 = they always hear.
	SyncLost, SyncLostFor time.Duration
	// Groups parts the workers, in order, into router groups, each with a router of its
	// own, below an upper tier: a router that knows of each group what the group tells
	// every SummaryAge, by default 1 s, as in production: its load, and a filter of
	// each Stride-th block that it has cached. Default of Stride is 1, as blocks of
	// traces are larger than those of engines; of Groups 1, which is none. Not with
	// Replicas.
	Groups     int
	SummaryAge time.Duration
	Stride     int

	EventDelay time.Duration // of the workers' cache events
	// EventLoss is the share of cache events lost on the way to a replica. The
	// next one of the worker makes its blocks forgotten, as a gap does.
	EventLoss float64

	// Predict is how long the routers believe that a worker will have cached a
	// prompt that they sent it; 0 = not at all.
	Predict time.Duration
	// Approximate says that workers publish no events: the routers guess what they
	// have cached, from what they were sent and how large their caches are.
	Approximate bool

	// PrefillWorkers is how many of the workers, the first ones, compute prompts
	// only; the others get the KV cache of these at Transfer tokens a second and
	// make the output. 0 = each worker does both. Not with Replicas, Groups,
	// Changes, ColdStart or an oracle.
	PrefillWorkers int
	// Transfer is by default 190,000: 50 GB/s of a cache with 262 kB a token.
	Transfer float64

	// ForeignShare is the share of requests, 0 to below 1, that reach workers past the
	// routers: those of a session all or none, each at a random one of the first
	// ForeignWorkers workers (default half of them: other clients know some workers alone).
	// Engines report their load every ReportEvery, by default 2.5 s, unless the rule ignores it. Not with Groups, PrefillWorkers, Changes or
	// ColdStart.
	ForeignShare   float64
	ForeignWorkers int
	ReportEvery    time.Duration

	Changes []Change // of the workers
	// ColdStart is when the routers are replaced by new ones that know no block
	// and no request; 0 = never.
	ColdStart time.Duration

	Seed uint64

	// Timing measures the routers' decisions on the real clock. Only the fields
	// of [Result.Timing] depend on it.
	Timing bool

	everyStep bool                               // tests: no runs of steps
	decided   func(req int32, d router.Decision) // tests: told of each decision
}

// Change is something that happens to a worker. What a worker was computing when
// it went is asked for again, at once.
type Change struct {
	At     time.Duration
	Worker int // from 0; one whose first change is Join is not there before
	Kind   ChangeKind
}

// ChangeKind says what happens to a worker.
type ChangeKind string

// The changes of a worker.
const (
	Join    ChangeKind = "join"
	Leave   ChangeKind = "leave"
	Restart ChangeKind = "restart" // comes back empty, at once
)

const (
	maxWorkers  = 4096
	maxReplicas = 64
	maxKVBlocks = 1 << 26
	maxJitter   = time.Hour
	maxStride   = 1 << 16
)

func (c Scenario) withDefaults() (Scenario, error) {
	if c.Speedup == 0 {
		c.Speedup = 1
	}
	if c.Workers == 0 {
		c.Workers = 8
	}
	if c.Engine == (scorer.Engine{}) {
		c.Engine = scorer.Dense32B()
	}
	if c.KVBlocks == 0 {
		c.KVBlocks = 2000
	}
	c.Replicas, c.Groups = cmp.Or(c.Replicas, 1), cmp.Or(c.Groups, 1)
	c.SummaryAge, c.Stride = cmp.Or(c.SummaryAge, time.Second), cmp.Or(c.Stride, 1)
	c.Transfer = cmp.Or(c.Transfer, 190_000)
	c.ForeignWorkers, c.ReportEvery = cmp.Or(c.ForeignWorkers, (c.Workers+1)/2), cmp.Or(c.ReportEvery, 2500*time.Millisecond)
	positive := func(v float64) bool { return v > 0 && !math.IsInf(v, 0) }
	switch {
	case c.Trace == nil || len(c.Trace.Requests) == 0:
		return c, fmt.Errorf("replay: no trace")
	case c.Jitter < 0 || c.Jitter > maxJitter:
		return c, fmt.Errorf("replay: jitter is %v, want 0 to %v", c.Jitter, maxJitter)
	case !positive(c.Speedup):
		return c, fmt.Errorf("replay: speedup is %v, want a number above 0", c.Speedup)
	case c.Workers < 1 || c.Workers > maxWorkers:
		return c, fmt.Errorf("replay: %d workers, want 1 to %d", c.Workers, maxWorkers)
	case c.KVBlocks < 1 || c.KVBlocks > maxKVBlocks:
		return c, fmt.Errorf("replay: %d KV blocks, want 1 to %d", c.KVBlocks, maxKVBlocks)
	case len(c.Speeds) > c.Workers:
		return c, fmt.Errorf("replay: %d speeds for %d workers", len(c.Speeds), c.Workers)
	case slices.ContainsFunc(c.Speeds, func(v float64) bool { return !positive(v) }):
		return c, fmt.Errorf("replay: speeds are %v, want numbers above 0", c.Speeds)
	case c.Replicas < 1 || c.Replicas > maxReplicas:
		return c, fmt.Errorf("replay: %d replicas, want 1 to %d", c.Replicas, maxReplicas)
	case c.Groups < 1 || c.Groups > c.Workers:
		return c, fmt.Errorf("replay: %d groups of %d workers", c.Groups, c.Workers)
	case c.Stride < 1 || c.Stride > maxStride:
		return c, fmt.Errorf("replay: a stride of %d blocks, want 1 to %d", c.Stride, maxStride)
	case c.Groups > 1 && c.Replicas > 1:
		return c, fmt.Errorf("replay: %d groups and %d replicas, want one of them 1", c.Groups, c.Replicas)
	case c.EventDelay < 0 || c.Predict < 0 || c.SummaryAge < 0 || c.ColdStart < 0:
		return c, fmt.Errorf("replay: event delay %v, prediction %v, summary age %v and cold start %v must not be negative", c.EventDelay, c.Predict, c.SummaryAge, c.ColdStart)
	case !(c.EventLoss >= 0 && c.EventLoss <= 1):
		return c, fmt.Errorf("replay: event loss is %v, want 0 to 1", c.EventLoss)
	}
	switch alone := c.Replicas == 1 && c.Groups == 1 && len(c.Changes) == 0 && c.ColdStart == 0 && !c.Rule.Oracle; {
	case c.SyncLost < 0 || c.SyncLostFor < 0:
		return c, fmt.Errorf("replay: sync lost at %v for %v, want no negative times", c.SyncLost, c.SyncLostFor)
	case c.PrefillWorkers < 0 || c.PrefillWorkers > 0 && c.PrefillWorkers >= c.Workers:
		return c, fmt.Errorf("replay: %d prefill workers of %d workers, want at least one of either kind", c.PrefillWorkers, c.Workers)
	case c.PrefillWorkers > 0 && !alone:
		return c, errors.New("replay: prefill workers go with one router, and workers that stay; there is no oracle for them")
	case !(c.ForeignShare >= 0 && c.ForeignShare < 1):
		return c, fmt.Errorf("replay: foreign share is %v, want 0 to below 1", c.ForeignShare)
	case c.ForeignWorkers < 1 || c.ForeignWorkers > c.Workers:
		return c, fmt.Errorf("replay: foreign requests go to %d workers, want 1 to %d", c.ForeignWorkers, c.Workers)
	case c.ReportEvery < time.Millisecond:
		return c, fmt.Errorf("replay: engines report every %v, want at least 1ms", c.ReportEvery)
	case c.ForeignShare > 0 && (c.Groups > 1 || c.PrefillWorkers > 0 || len(c.Changes) > 0 || c.ColdStart > 0):
		return c, errors.New("replay: foreign requests go with workers and routers that stay, and with neither groups nor prefill workers")
	case c.Approximate && c.Rule.Oracle:
		return c, errors.New("replay: the oracle knows all caches: not without events")
	case !positive(c.Transfer):
		return c, fmt.Errorf("replay: transfer is %v tokens a second, want a number above 0", c.Transfer)
	}
	for _, ch := range c.Changes {
		if ch.Worker < 0 || ch.Worker >= c.Workers || ch.At < 0 || !slices.Contains([]ChangeKind{Join, Leave, Restart}, ch.Kind) {
			return c, fmt.Errorf("replay: change %+v, want join, leave or restart of a worker from 0 to %d", ch, c.Workers-1)
		}
	}
	return c, nil
}

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

	// What became of each request.
	ids      []string
	sessions []string
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

// replica is one router with what the simulation knows of it.
type replica struct {
	router  *router.Router
	workers []int  // that it routes to
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

// tickEvery is how often routers look for what nobody ended.
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
		ids:     make([]string, n), sessions: make([]string, n), due: make([]int64, n), begun: make([]int64, n), first: make([]int64, n), end: make([]int64, n),
		cached: make([]int32, n), promised: make([]int32, n), worker: make([]int32, n), replica: make([]int32, n), second: make([]int32, n),
		alive: make([]bool, c.Workers), started: make([]int64, c.Workers),
	}
	for i := range s.ids {
		s.ids[i] = strconv.Itoa(i)
		s.worker[i], s.begun[i] = -1, -1
		switch session := s.reqs[i].Session; {
		case session == 0:
		case i > 0 && s.reqs[i-1].Session == session:
			s.sessions[i] = s.sessions[i-1]
		default:
			s.sessions[i] = strconv.FormatUint(session, 10)
		}
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

// newRouters replaces the routers by ones that know the workers only.
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
			Scoring: s.Rule.Settings, Rule: s.choose(rep), BlockSize: s.Trace.BlockSize,
			Seed: s.Seed + uint64(i), KeepDecisions: -1, PredictTTL: cmp.Or(s.Predict, -1), NoEvents: s.Approximate,
			Now: func() time.Time { return time.Unix(0, s.now) },
			// A worker that only prefills keeps nothing for later tokens.
			NoActiveBlocks: s.PrefillWorkers > 0,
		}
		if s.Rule.Sticky {
			conf.Sessions.TTL = 24 * time.Hour
		}
		if s.Replicas > 1 {
			conf.Tell = func(c router.Change) { s.tell(i, c) }
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

// start makes a replica's router and tells it of the workers that are there.
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

// decodeSettings choose by load alone: what such a worker has cached is of no use,
// and prompts arrive computed.
func decodeSettings(s scorer.Settings) scorer.Settings {
	s.AssumeKVReuse, s.TrackPrefill = false, false
	s.OverlapWeight, s.OverlapCredit = 0, 0
	if s.Policy != scorer.Dynamo && s.Policy != scorer.DynamoNewer {
		s.Policy = scorer.Tokens
	}
	return s
}

// id is the name of a worker. It depends on the seed, as where a prompt hashes to
// is chance.
func (s *sim) id(w int) uint64 { return s.Seed<<20 + uint64(w) + 1 }

func (s *sim) info(w int) router.WorkerInfo {
	return router.WorkerInfo{
		ID: s.id(w), Name: "w" + strconv.Itoa(w), Models: []string{model},
		Address:   netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, byte(w >> 8), byte(w)}), 8000),
		BlockSize: s.Trace.BlockSize, TotalKVBlocks: s.KVBlocks, MaxNumSeqs: maxRunning,
		MaxBatchedTokens: int(s.Engine.Chunk), StartedMS: s.started[w] + 1,
	}
}

// begin plans what is known beforehand.
func (s *sim) begin() {
	for i, c := range s.Changes {
		s.queue.push(c.At.Nanoseconds(), change, int32(i), 0)
	}
	if s.ColdStart > 0 {
		s.queue.push(s.ColdStart.Nanoseconds(), coldStart, 0, 0)
	}
	if s.SyncLostFor > 0 {
		s.queue.push(tickEvery.Nanoseconds(), tick, 0, 0)
	}
	for g := range s.published {
		// Groups do not know of each other, nor do their clocks.
		s.queue.push(s.SummaryAge.Nanoseconds()*int64(g+1)/int64(s.Groups), summary, int32(g), 0)
	}
	if s.ForeignShare > 0 && !s.Rule.NoReports {
		for w := range s.Workers { // each at a moment of its own
			s.queue.push(s.ReportEvery.Nanoseconds()*int64(w+1)/int64(s.Workers), engineReport, int32(w), 0)
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
			s.queue.push(user.Start.Nanoseconds(), arrival, user.Requests[0], 0)
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
	s.queue.push(at, arrival, int32(req), 0)
}

// dueAt is when a request of an open loop is due, in ns.
func (s *sim) dueAt(req int) int64 { return int64(math.Round(float64(s.reqs[req].At) / s.Speedup)) }

func (s *sim) loop() error {
	for n := 0; s.left > 0; n++ {
		if n%4096 == 0 && s.ctx.Err() != nil {
			return fmt.Errorf("replay: %w", context.Cause(s.ctx))
		}
		e, ok := s.queue.pop()
		if !ok {
			return fmt.Errorf("replay: %d requests wait for ever", s.left)
		}
		s.now = e.at
		var err error
		switch e.kind {
		case arrival:
			err = s.arrived(e.a)
		case stepEnd:
			s.stepped(int(e.a), e.b)
		case kvEvent:
			// Nobody listens to what a worker said in an earlier life.
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
			s.queue.push(s.now+tickEvery.Nanoseconds(), tick, 0, 0)
		case engineReport:
			s.reportLoad(int(e.a))
			s.queue.push(s.now+s.ReportEvery.Nanoseconds(), engineReport, e.a, 0)
		case summary:
			err = s.summarise(int(e.a))
			s.queue.push(s.now+s.SummaryAge.Nanoseconds(), summary, e.a, 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// arrived takes in a request for the first time.
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

// isForeign says whether a request reaches its worker past the routers.
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

// route has a router choose a worker for a request, and sends it there.
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
		s.queue.push(e.end, stepEnd, int32(w), e.version)
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

// question is what a router is asked; the hashes are those of the last call of hash.
func (s *sim) question(req int32) router.Request {
	return router.Request{
		Model:  model,
		Blocks: &router.Blocks{Local: s.local, Sequence: s.sequence, Tokens: s.reqs[req].Input},
	}
}

func (s *sim) decide(r *replica, req int32) (router.Decision, error) {
	q := s.question(req)
	q.ID, q.Session = s.ids[req], s.sessions[req]
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

// proceed lets an engine take up what waits and plan its next step.
func (s *sim) proceed(w int) {
	e := s.engines[w]
	e.admit(s.cached)
	if e.plan(s.now) {
		s.queue.push(e.end, stepEnd, int32(w), e.version)
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

// firstToken is told that the prompt of a request is computed; the first known
// blocks of it were cached before.
func (s *sim) firstToken(w int, req int32, known int) {
	s.first[req] = s.now
	if s.first[req] == 0 {
		s.first[req] = 1
	}
	// What must go for it goes first: no cache ever holds more than it can.
	s.publishRemoved(w)
	s.publishStored(w, req, known)
	if s.replica[req] >= 0 {
		s.routers[s.replica[req]].router.MarkPrefillCompleted(s.ids[req])
	}
	if s.upper != nil {
		s.upper.router.MarkPrefillCompleted(s.ids[req])
	}
}

// ended is told that a request is over on a worker.
func (s *sim) ended(w int, req int32) {
	s.publishRemoved(w)
	switch s.engines[w].role {
	case prefillOnly:
		s.free(req)
		if s.reqs[req].Output > 1 {
			took := float64(s.reqs[req].Input) / s.Transfer
			s.queue.push(s.now+int64(took*1e9), handOver, req, 0)
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
		s.queue.push(s.now+s.reqs[next].Think.Nanoseconds(), arrival, next, 0)
	}
}

// publishStored sends the event of the blocks of a prompt behind the known ones.
func (s *sim) publishStored(w int, req int32, known int) {
	all := s.reqs[req].Blocks
	if known == len(all) {
		return
	}
	b := &s.Trace.blocks
	ev := indexer.Event{Kind: indexer.Stored}
	if known > 0 {
		ev.HasParent, ev.Parent = true, b.chain[all[known-1]]
	}
	s.stored = s.stored[:0]
	for _, n := range all[known:] {
		s.stored = append(s.stored, indexer.Block{External: b.chain[n], Local: b.local[n]})
	}
	ev.Blocks = s.stored
	s.publish(w, ev)
}

func (s *sim) publishRemoved(w int) {
	gone := s.engines[w].cache.evicted
	if len(gone) == 0 {
		return
	}
	s.externals = s.externals[:0]
	for _, n := range gone {
		s.externals = append(s.externals, s.Trace.blocks.chain[n])
	}
	s.publish(w, indexer.Event{Kind: indexer.Removed, Externals: s.externals})
}

// publish sends an event of a worker to the routers. All workers of an oracle hold
// what one of them holds.
func (s *sim) publish(w int, ev indexer.Event) {
	if s.EventDelay > 0 {
		ev.Blocks, ev.Externals = slices.Clone(ev.Blocks), slices.Clone(ev.Externals)
	}
	if s.engines[w].role == decodeOnly || s.Approximate {
		return
	}
	from, to := w, w+1
	if s.Rule.Oracle {
		from, to = 0, s.Workers
	}
	for w := from; w < to; w++ {
		if s.EventDelay == 0 {
			s.deliver(int32(w), &ev)
			continue
		}
		s.late = append(s.late, lateEvent{int32(w), s.started[w], ev})
		s.queue.push(s.now+s.EventDelay.Nanoseconds(), kvEvent, 0, uint32(len(s.late)-1))
	}
}

// deliver applies an event in each router.
func (s *sim) deliver(w int32, ev *indexer.Event) {
	name := router.Worker{ID: s.id(int(w))}
	for _, r := range s.routers {
		if s.EventLoss > 0 {
			if s.rng.Float64() < s.EventLoss {
				r.broken[w] = true
				continue
			}
			if r.broken[w] {
				r.broken[w] = false
				r.router.ApplyEvent(name, indexer.Event{Kind: indexer.Cleared})
			}
		}
		r.router.ApplyEvent(name, *ev)
	}
}

// free ends a request at the routers that decided.
func (s *sim) free(req int32) {
	if s.replica[req] >= 0 {
		s.routers[s.replica[req]].router.Free(s.ids[req])
	}
	if s.upper != nil {
		s.upper.router.Free(s.ids[req])
	}
}

// tell takes what a replica tells the others of its requests.
func (s *sim) tell(from int, c router.Change) {
	lost := s.now >= s.SyncLost.Nanoseconds() && s.now < (s.SyncLost+s.SyncLostFor).Nanoseconds()
	if s.SyncDelay < 0 || lost {
		return
	}
	c.Sequence = slices.Clone(c.Sequence)
	c.Expires = s.SyncLostFor > 0
	s.messages = append(s.messages, syncMessage{from, c})
	s.queue.push(s.now+s.SyncDelay.Nanoseconds(), message, 0, uint32(len(s.messages)-1))
}

// receive brings a message to the other replicas.
func (s *sim) receive(m *syncMessage) {
	for i, r := range s.routers {
		if i != m.from {
			r.router.PeerChanged(uint64(m.from)+1, m.change)
		}
	}
	*m = syncMessage{}
}

// changed applies a change of a worker.
func (s *sim) changed(c Change) error {
	w := c.Worker
	if s.alive[w] == (c.Kind == Join) {
		return nil
	}
	s.alive[w] = c.Kind != Leave
	s.started[w] = s.now/1e6 + 1
	for _, r := range s.routers {
		if !slices.Contains(r.workers, w) {
			continue
		}
		if c.Kind == Leave {
			r.router.RemoveWorker(s.id(w))
		} else if err := r.router.SetWorker(s.info(w)); err != nil {
			return fmt.Errorf("replay: %w", err)
		}
	}
	if c.Kind == Join {
		return nil
	}
	lost := s.engines[w].reset(s.Rule.Oracle, s.Trace.Distinct())
	for _, req := range lost {
		s.free(req)
		s.worker[req] = -1
		s.begun[req], s.first[req] = -1, 0
		s.retried++
	}
	for _, req := range lost {
		if err := s.route(req); err != nil {
			return err
		}
	}
	return nil
}
