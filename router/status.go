// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// WorkerState is what the router knows of one worker.
type WorkerState struct {
	Worker
	Name           string         `json:"name,omitempty"`
	Address        netip.AddrPort `json:"address"`
	Model          string         `json:"model"` // base model: the name of its pool
	LoRA           []string       `json:"lora,omitempty"`
	Role           Role           `json:"role"`
	Engine         string         `json:"engine,omitempty"`
	Transport      string         `json:"event_transport,omitempty"` // as it registered
	Health         string         `json:"health"`
	Draining       bool           `json:"draining"`
	Taints         []string       `json:"taints,omitempty"`
	BlockSize      int            `json:"block_size"`
	TotalKVBlocks  int            `json:"total_kv_blocks,omitempty"`
	KVEvents       string         `json:"kv_events"`       // "ok", "partial" or "suspect": see package events; "none": it tells of none
	CachedBlocks   int            `json:"cached_blocks"`   // in the index
	GuessedBlocks  int            `json:"guessed_blocks"`  // taken to be cached, without having been told
	ActiveRequests int            `json:"active_requests"` // slots
	ActiveBlocks   int            `json:"active_blocks"`
	PendTokens     int            `json:"pend_tokens"`
	Routed         uint64         `json:"routed"` // requests sent there so far
}

// Workers returns what is known of every worker, in worker order.
func (r *Router) Workers() []WorkerState {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	states := []WorkerState{} // an empty list in JSON, not null
	for _, p := range r.pools {
		states = p.appendStates(r.conf.Now(), states)
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
			Health:         e.info.Health.String(),
			Draining:       e.info.Draining,
			Taints:         e.info.Taints,
			BlockSize:      e.info.BlockSize,
			TotalKVBlocks:  e.info.TotalKVBlocks,
			KVEvents:       cmp.Or(e.events, e.info.KVEvents, "ok"), // what we miss, or what its publisher does
			CachedBlocks:   p.known.toldOf(ord),
			GuessedBlocks:  p.known.guessedOf(ord),
			ActiveRequests: load.Requests,
			ActiveBlocks:   load.Blocks,
			PendTokens:     load.PendTokens,
			Routed:         e.routed,
		}
		switch {
		case p.core.conf.NoEvents:
			s.KVEvents = "none"
		case e.info.BlockSize == 0 || e.info.NoEvents:
			s.KVEvents = cmp.Or(e.info.KVEvents, "none") // or why it publishes none
		}
		states = append(states, s)
	}
	return states
}

// Decision returns a kept decision by its request id.
func (r *Router) Decision(id string) (Decision, bool) { return r.ring.get(id) }

// Decisions returns up to n kept decisions, newest first.
func (r *Router) Decisions(n int) []Decision { return r.ring.recent(n) }
