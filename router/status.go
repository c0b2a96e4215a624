// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer"
)

// WorkerState is the state of one worker.
type WorkerState struct {
	Worker
	Name           string         `json:"name,omitempty"`
	Address        netip.AddrPort `json:"address"`
	Host           string         `json:"host,omitempty"`  // Host header of requests to it
	OwnHost        bool           `json:"-"`               // see [WorkerInfo.OwnHost]
	Group          string         `json:"group,omitempty"` // name of the router group; see Summary
	Model          string         `json:"model"`           // base model: the name of its pool
	TokenState                    // of the model
	LoRA           []string       `json:"lora,omitempty"`
	Role           Role           `json:"role"`
	Engine         string         `json:"engine,omitempty"`
	Transport      string         `json:"event_transport,omitempty"` // as registered
	Endpoint       string         `json:"event_endpoint,omitempty"`  // as registered
	Replay         string         `json:"event_replay,omitempty"`    // as registered
	Health         string         `json:"health"`
	HealthSince    time.Time      `json:"health_since,omitzero"`  // when its health became what it is; zero while it is healthy
	HealthCause    string         `json:"health_cause,omitempty"` // why it is not healthy, or why its last probes failed
	Pod            *Pod           `json:"pod,omitempty"`          // nil if the worker was not found in Kubernetes
	Failing        bool           `json:"failing,omitempty"`      // avoided because it failed lately
	AvoidedUntil   time.Time      `json:"avoided_until,omitzero"` // the end of its back-off, or of the time in which one request tries it; zero if it is not avoided
	AvoidedSince   time.Time      `json:"avoided_since,omitzero"` // when it began to be avoided; zero if it is not, and has responded since
	AvoidedFor     string         `json:"avoided_for,omitempty"`  // what it answered last that a worker must not, in words
	Tried          bool           `json:"-"`                      // failing, but its back-off is over, and a request tries it
	Refuses        bool           `json:"refuses,omitempty"`      // accepted no connection when it was last tried
	Draining       bool           `json:"draining"`
	Taints         []string       `json:"taints,omitempty"`
	BlockSize      int            `json:"block_size"`
	TotalKVBlocks  int            `json:"total_kv_blocks,omitempty"`
	KVEvents       indexer.State  `json:"kv_events"`
	NeverHeard     bool           `json:"never_heard,omitempty"`   // no event came, and the configuration does not say whether it publishes events
	CachedBlocks   int            `json:"cached_blocks"`           // in the index
	GuessedBlocks  int            `json:"guessed_blocks"`          // predicted without events
	ActiveRequests int            `json:"active_requests"`         // slots of requests in flight
	LeftRequests   int            `json:"left_requests,omitempty"` // slots of requests whose client left before an answer; see [Router.Leave]
	ActiveBlocks   int            `json:"active_blocks"`
	PendTokens     int            `json:"pend_tokens"`
	EngineBlocks   int            `json:"engine_blocks,omitempty"`  // in use, by its report of the last 10 s
	EngineRunning  int            `json:"engine_running,omitempty"` // requests, by the same report
	EngineWaiting  int            `json:"engine_waiting,omitempty"`
	EngineKVUse    float64        `json:"engine_kv_use,omitempty"` // share of its cache, by the same report
	Foreign        Foreign        `json:"foreign,omitzero"`        // reported load that kvroute did not send; the fields above do not contain it
	MaxNumSeqs     int            `json:"max_num_seqs,omitempty"`
	GPUType        string         `json:"gpu_type,omitempty"`
	PrefillTPS     float64        `json:"prefill_tps,omitempty"`  // prompt tokens a second, as registered
	Routed         uint64         `json:"routed"`                 // requests sent there so far
	Failures       uint64         `json:"failures"`               // requests that it refused, failed, or answered with a status of 500 or above
	Faults         []Fault        `json:"faults,omitempty"`       // those that explain others first, then in the order of their names
	Audit          *AuditState    `json:"audit,omitempty"`        // its cache by its responses; nil before the first one
	Hybrid         string         `json:"hybrid,omitempty"`       // of a hybrid model: whether the rule of its hits is "known"; with "unknown" no prompt counts as cached
	PrefillRate    float64        `json:"prefill_rate,omitempty"` // prompt tokens a second, as measured
	Speed          float64        `json:"speed"`                  // of prefill, compared with the pool: 1 is as fast as the median worker
	Reorders       bool           `json:"reorders,omitempty"`     // does not compute prompts in the order of their arrival
	Summary        *SummaryState  `json:"summary,omitempty"`
}

// hybridRule says whether the rule of a hybrid worker's hits is "known" or "unknown"; it is empty for other workers.
func hybridRule(ends indexer.Boundaries) string {
	switch {
	case ends.Step == 0:
		return "unknown"
	case ends.Sides:
		return "known"
	}
	return ""
}

// SummaryState is the state of a router group. The worker's load is the sum over the group's
// members, with the requests sent since the last summary.
type SummaryState struct {
	Members  int           `json:"members"`  // workers whose loads are summed
	Busy     int           `json:"busy"`     // further workers, above a threshold
	Age      time.Duration `json:"age_ns"`   // of the last summary
	Stale    bool          `json:"stale"`    // too old: the load is only that of requests sent from here
	Filtered bool          `json:"filtered"` // its cache is known
	Queued   int           `json:"queued"`   // requests that wait for one of its workers
}

// Traffic returns how many requests a worker has in flight, and how many it refused or failed so far, summed
// over its ranks. Both are 0 if the worker is unknown.
func (r *Router) Traffic(id uint64) (inFlight int, failures uint64) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[id]
	if p == nil {
		return 0, 0
	}
	p.read(func(c *core) {
		for _, ord := range c.ordinals(id) {
			inFlight += c.slots.Load(ord).Requests
			failures += c.entries[ord].failures
		}
	})
	return inFlight, failures
}

// Workers returns the state of all workers, in worker order.
func (r *Router) Workers() []WorkerState {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	ranks := 0
	for _, p := range r.pools {
		ranks += p.view.Load().size
	}
	states := make([]WorkerState, 0, ranks) // an empty list in JSON, not null
	for _, p := range r.pools {
		of := len(states)
		states = p.appendStates(r.conf.Now(), states)
		tokens := r.tokenState((*r.names.Load())[p.model].card, p.view.Load().needsPrompts)
		for i := range states[of:] {
			states[of+i].TokenState = tokens
			faults := &states[of+i].Faults
			*faults = append(*faults, r.faultsLocked(states[of+i].ID)...)
			slices.SortFunc(*faults, compareFaults)
		}
	}
	slices.SortFunc(states, func(a, b WorkerState) int {
		return cmp.Or(a.Worker.Compare(b.Worker), cmp.Compare(a.Model, b.Model))
	})
	return states
}

func (p *pool) appendStates(now time.Time, states []WorkerState) []WorkerState {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := &p.core
	c.advanceTime(now)
	for _, ord := range c.order {
		e, load := &c.entries[ord], c.slots.Load(ord)
		info := e.info
		if info.Health == expected {
			continue
		}
		s := WorkerState{
			Worker:         e.worker,
			Name:           info.Name,
			Address:        info.rankAddress(e.worker.DPRank),
			Host:           info.Host,
			OwnHost:        info.OwnHost,
			Model:          p.model,
			LoRA:           slices.Concat(info.LoRA, info.ListedLoRA),
			Role:           cmp.Or(info.Role, Aggregated),
			Engine:         info.Engine,
			Transport:      info.Events.Transport,
			Endpoint:       info.Events.Endpoint,
			Replay:         info.Events.Replay,
			Group:          info.Group,
			Health:         c.shownHealth(now, e).String(),
			HealthCause:    info.HealthCause,
			Pod:            info.Pod,
			Failing:        c.avoids(now, e),
			Tried:          now.Before(e.avoid.trial) && !now.Before(e.avoid.until),
			Refuses:        info.Refuses || e.avoid.refuses(now),
			Draining:       info.Draining,
			Taints:         info.Taints,
			BlockSize:      info.BlockSize,
			TotalKVBlocks:  info.TotalKVBlocks,
			KVEvents:       cmp.Or(e.events, info.KVEvents, indexer.StateOK), // a problem of our reader, or of the publisher
			CachedBlocks:   p.known.index().WorkerBlocks(ord),
			GuessedBlocks:  p.known.history.WorkerBlocks(ord),
			ActiveRequests: load.Requests - load.Left,
			LeftRequests:   load.Left,
			ActiveBlocks:   load.Blocks,
			PendTokens:     load.PendTokens,
			EngineBlocks:   e.reported(now),
			MaxNumSeqs:     info.MaxNumSeqs,
			GPUType:        info.GPUType,
			PrefillTPS:     info.PrefillThroughput,
			Routed:         e.routed,
			Failures:       e.failures,
			Audit:          e.audit.state(e.learned),
			Hybrid:         hybridRule(p.known.index().Boundaries(ord)),
			Foreign:        c.foreign(now, e, 0),
		}
		s.addAvoidance(c, now, ord)
		if fresh(now, e.report.requestsAt) {
			s.EngineRunning, s.EngineWaiting = e.report.running, e.report.waiting
		}
		if fresh(now, e.report.usedAt) {
			s.EngineKVUse = e.report.usage
			if info.TotalKVBlocks > 0 {
				s.EngineKVUse = min(1, float64(s.EngineBlocks)/float64(info.TotalKVBlocks))
			}
		}
		s.NeverHeard = e.unheard() && !c.conf.NoEvents
		s.Speed = cmp.Or(e.properties.Speed, 1)
		s.PrefillRate, s.Reorders = c.slots.PrefillRate(ord)
		switch {
		case c.conf.NoEvents:
			s.KVEvents = indexer.StateNone
		case info.BlockSize == 0 || info.NoEvents || e.unheard():
			s.KVEvents = cmp.Or(info.KVEvents, indexer.StateNone) // or the reason why it publishes none
		}
		if info.Group != "" {
			var in scorer.Input
			c.load(now, ord, 0, &in)
			e.groupState(now, &in, &s)
		}
		states = append(states, s)
	}
	return states
}

// addAvoidance adds since when a worker is not healthy, why it is avoided, and the faults that its responses show.
func (s *WorkerState) addAvoidance(c *core, now time.Time, ord int) {
	e := &c.entries[ord]
	if s.Health != Healthy.String() {
		s.HealthSince = e.healthSince
	}
	if s.Failing {
		s.AvoidedUntil = e.avoid.end()
	}
	if s.Failing || e.avoid.unanswered() {
		s.AvoidedSince, s.AvoidedFor = e.avoid.began, e.avoid.cause()
	}
	if fault, found := c.answerFault(now, ord); found {
		s.Faults = append(s.Faults, fault)
	}
	if fault, found := e.avoid.responseFault(); found && e.info.Health < Unhealthy { // else it has the fault silent
		s.Faults = append(s.Faults, fault)
	}
}

// ModelState is the state of one model.
type ModelState struct {
	Model   string   `json:"model"` // base model
	Names   []string `json:"names"` // all names that requests may use, with adapters and the base model
	Workers int      `json:"workers"`
	// BlockSizes are the block sizes of its workers: each has its own index.
	BlockSizes []int `json:"block_sizes"`
	TokenState
	Checks string `json:"checks"` // "unchecked", "agreed", "differs" or "drift": see [ChecksDrift]
	// Classes are the verdicts on the classes of its requests, by the events of the workers; nil without a tokenizer.
	Classes []confirm.ClassState `json:"classes,omitempty"`
}

// TokenState says how the token ids of a model's chats are made. TokenMode and TokenReason
// are as in a [Decision]; the mode is [tokenizer.None] if prompts are not read. Why is the
// reason as a sentence.
type TokenState struct {
	TokenMode   tokenizer.Mode `json:"token_mode"`
	TokenReason string         `json:"token_reason,omitempty"`
	Why         string         `json:"why,omitempty"`
}

// tokenState returns the state of a model. card is nil if the model is not configured. reads
// says whether its pool reads prompts.
func (r *Router) tokenState(card *Card, reads bool) TokenState {
	if !reads {
		return TokenState{TokenMode: tokenizer.None, Why: "no prompt is looked at in this mode"}
	}
	s := TokenState{Why: "it is none of the configured models"}
	var prompts *tokenizer.Model
	if card != nil {
		prompts, s.Why = card.Prompts, card.Why
	}
	s.TokenMode, s.TokenReason = prompts.Usual()
	if prompts != nil {
		s.Why = prompts.Degraded()
	}
	return s
}

// Models returns the state of all models that workers serve or served, by name.
func (r *Router) Models() []ModelState {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	states := []ModelState{} // an empty list in JSON, not null
	names := *r.names.Load()
	for name, t := range names {
		if name != t.pools[0].model {
			continue
		}
		states = append(states, r.modelState(name, t))
		s := &states[len(states)-1]
		for other, t := range names {
			if other != "" && t.pools[0].model == name {
				s.Names = append(s.Names, other)
			}
		}
		slices.Sort(s.Names)
	}
	slices.SortFunc(states, func(a, b ModelState) int { return cmp.Compare(a.Model, b.Model) })
	return states
}

func (r *Router) modelState(name string, t target) ModelState {
	s := ModelState{Model: name, Checks: checksNone}
	if t.card != nil {
		s.Classes = r.classStates(&t)
		s.Checks = checksOf(s.Classes)
	}
	reads := false
	for _, p := range t.pools {
		reads = reads || p.view.Load().needsPrompts
		s.BlockSizes = append(s.BlockSizes, p.blockSize)
		p.each(func(_ int, e *entry) {
			if e.info.Health != expected {
				s.Workers++
			}
		})
	}
	s.TokenState = r.tokenState(t.card, reads)
	return s
}
