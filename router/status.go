// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/kvroute/kvroute/tokenizer"
)

// WorkerState is what the router knows of one worker.
type WorkerState struct {
	Worker
	Name           string         `json:"name,omitempty"`
	Address        netip.AddrPort `json:"address"`
	Group          string         `json:"group,omitempty"` // the router group that it stands for; the fields of SummaryState are its
	Model          string         `json:"model"`           // base model: the name of its pool
	TokenState                    // of the model
	LoRA           []string       `json:"lora,omitempty"`
	Role           Role           `json:"role"`
	Engine         string         `json:"engine,omitempty"`
	Transport      string         `json:"event_transport,omitempty"` // as it registered
	Health         string         `json:"health"`
	Failing        bool           `json:"failing,omitempty"` // avoided, because it failed lately
	Draining       bool           `json:"draining"`
	Taints         []string       `json:"taints,omitempty"`
	BlockSize      int            `json:"block_size"`
	TotalKVBlocks  int            `json:"total_kv_blocks,omitempty"`
	KVEvents       string         `json:"kv_events"`             // "ok", "partial" or "suspect": see package events; "none": it tells of none
	NeverHeard     bool           `json:"never_heard,omitempty"` // the configuration does not say whether it publishes events, and none came
	CachedBlocks   int            `json:"cached_blocks"`         // in the index
	GuessedBlocks  int            `json:"guessed_blocks"`        // taken to be cached, without having been told
	ActiveRequests int            `json:"active_requests"`       // slots
	ActiveBlocks   int            `json:"active_blocks"`
	PendTokens     int            `json:"pend_tokens"`
	EngineBlocks   int            `json:"engine_blocks,omitempty"`  // in use, as it said itself within the last 10 s
	EngineRunning  int            `json:"engine_running,omitempty"` // requests, in the same way
	EngineWaiting  int            `json:"engine_waiting,omitempty"`
	EngineKVUse    float64        `json:"engine_kv_use,omitempty"` // share of its cache, in the same way
	Foreign        Foreign        `json:"foreign,omitzero"`        // load by these reports that kvroute did not send; the fields above are without it
	MaxNumSeqs     int            `json:"max_num_seqs,omitempty"`
	GPUType        string         `json:"gpu_type,omitempty"`
	PrefillTPS     float64        `json:"prefill_tps,omitempty"`  // prompt tokens a second, as registered
	Routed         uint64         `json:"routed"`                 // requests sent there so far
	PrefillRate    float64        `json:"prefill_rate,omitempty"` // prompt tokens a second, as seen
	Reorders       bool           `json:"reorders,omitempty"`     // computes prompts in an order of its own, as said or seen
	Summary        *SummaryState  `json:"summary,omitempty"`
}

// SummaryState is what is known of a router group. Its load is the sum over its members,
// with what it was sent since.
type SummaryState struct {
	Members  int           `json:"members"`  // workers that the load is of
	Busy     int           `json:"busy"`     // workers besides that are above a threshold
	Age      time.Duration `json:"age_ns"`   // of the last summary
	Stale    bool          `json:"stale"`    // too old: the load is what it was sent alone
	Filtered bool          `json:"filtered"` // what it holds is known
	Queued   int           `json:"queued"`   // requests that wait for one of its workers
}

// Workers returns what is known of every worker, in worker order.
func (r *Router) Workers() []WorkerState {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	states := []WorkerState{} // an empty list in JSON, not null
	for _, p := range r.pools {
		of := len(states)
		states = p.appendStates(r.conf.Now(), states)
		tokens := r.tokenState((*r.names.Load())[p.model].card, p.view.Load().reads)
		for i := range states[of:] {
			states[of+i].TokenState = tokens
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
	p.core.grow(now)
	for _, ord := range p.core.order {
		e, load := &p.core.entries[ord], p.core.slots.Load(ord)
		if e.info.Health == expected {
			continue
		}
		s := WorkerState{
			Worker:         e.worker,
			Name:           e.info.Name,
			Address:        e.info.rankAddress(e.worker.DPRank),
			Model:          p.model,
			LoRA:           e.info.LoRA,
			Role:           cmp.Or(e.info.Role, Aggregated),
			Engine:         e.info.Engine,
			Transport:      e.info.Events.Transport,
			Group:          e.info.Group,
			Health:         p.core.shownHealth(now, e).String(),
			Failing:        p.core.conf.Now().Before(e.avoid.until),
			Draining:       e.info.Draining,
			Taints:         e.info.Taints,
			BlockSize:      e.info.BlockSize,
			TotalKVBlocks:  e.info.TotalKVBlocks,
			KVEvents:       cmp.Or(e.events, e.info.KVEvents, "ok"), // what we miss, or what its publisher does
			CachedBlocks:   p.known.eventBlocks(ord),
			GuessedBlocks:  p.known.guessedBlocks(ord),
			ActiveRequests: load.Requests,
			ActiveBlocks:   load.Blocks,
			PendTokens:     load.PendTokens,
			EngineBlocks:   e.reported(now),
			MaxNumSeqs:     e.info.MaxNumSeqs,
			GPUType:        e.info.GPUType,
			PrefillTPS:     e.info.PrefillThroughput,
			Routed:         e.routed,
			Foreign:        p.core.foreign(now, e, 0),
		}
		if fresh(now, e.report.requestsAt) {
			s.EngineRunning, s.EngineWaiting = e.report.running, e.report.waiting
		}
		if fresh(now, e.report.usedAt) {
			s.EngineKVUse = e.report.usage
			if e.info.TotalKVBlocks > 0 {
				s.EngineKVUse = min(1, float64(s.EngineBlocks)/float64(e.info.TotalKVBlocks))
			}
		}
		s.NeverHeard = e.unheard() && !p.core.conf.NoEvents
		s.PrefillRate, s.Reorders = p.core.slots.PrefillRate(ord)
		switch {
		case p.core.conf.NoEvents:
			s.KVEvents = "none"
		case e.info.BlockSize == 0 || e.info.NoEvents || e.unheard():
			s.KVEvents = cmp.Or(e.info.KVEvents, "none") // or why it publishes none
		}
		if e.info.Group != "" {
			p.core.groupState(now, ord, &s)
		}
		states = append(states, s)
	}
	return states
}

// ModelState is what the router knows of one model.
type ModelState struct {
	Model   string   `json:"model"` // base model
	Names   []string `json:"names"` // all that requests may use, adapters' and the model's own included
	Workers int      `json:"workers"`
	// BlockSizes are those of its workers: each has its own index.
	BlockSizes []int `json:"block_sizes"`
	TokenState
	Checks string `json:"checks"` // "unchecked", "agreed", "differs" or "drift": see [tokenizer.Verdict]
}

// TokenState says how the token ids of a model's chats are made. TokenMode and
// TokenReason are as in a [Decision]; the mode is [tokenizer.None] where nobody looks at
// prompts. Why says the same to people, and what is slow.
type TokenState struct {
	TokenMode   tokenizer.Mode `json:"token_mode"`
	TokenReason string         `json:"token_reason,omitempty"`
	Why         string         `json:"why,omitempty"`
}

// tokenState returns the state of a model; card is nil if it is not configured, and
// reads says whether its pool looks at prompts.
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
	if s.TokenReason == tokenizer.NoTokenizer && r.conf.Remote != nil {
		s.TokenMode = tokenizer.Remote
	}
	return s
}

// Models returns what is known of every model that workers serve or served, by name.
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
	s := ModelState{Model: name, Checks: tokenizer.Unchecked.String()}
	if t.card != nil {
		s.Checks = t.card.Prompts.Verdict().String()
	}
	reads := false
	for _, p := range t.pools {
		reads = reads || p.view.Load().reads
		s.BlockSizes = append(s.BlockSizes, p.blockSize)
		p.mu.Lock()
		for _, ord := range p.core.order {
			if p.core.entries[ord].info.Health != expected {
				s.Workers++
			}
		}
		p.mu.Unlock()
	}
	s.TokenState = r.tokenState(t.card, reads)
	return s
}
