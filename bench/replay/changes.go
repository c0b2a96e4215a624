// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"slices"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// publishComputed sends the events of a part of a prompt that was computed or received. Removals come
// first, so that no cache ever holds more than its capacity.
func (s *sim) publishComputed(w int, p *prefill) {
	s.publishBlocks(w, s.reqs[p.req].Blocks[:p.to], p.known)
	s.publishSides(w, indexer.SideStored, p.sides)
}

// publishBlocks sends the leading blocks of a prompt behind those that the routers know.
func (s *sim) publishBlocks(w int, all []int32, known int) {
	s.publishRemoved(w)
	if known >= len(all) {
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
		if int(n) < s.Trace.Distinct() {
			s.externals = append(s.externals, s.Trace.blocks.chain[n])
		}
	}
	if len(s.externals) > 0 {
		s.publish(w, indexer.Event{Kind: indexer.Removed, Externals: s.externals})
	}
	s.publishSides(w, indexer.SideRemoved, gone)
}

// publish sends an event of a worker to the routers. With an oracle the event is one of
// all workers, since they share a cache.
func (s *sim) publish(w int, ev indexer.Event) {
	s.publishHost(w, ev)
	if s.EventDelay > 0 {
		ev.Blocks, ev.Externals = slices.Clone(ev.Blocks), slices.Clone(ev.Externals)
	}
	if s.Approximate {
		return
	}
	from, to := w, w+1
	if s.Rule.Oracle {
		from, to = 0, s.Workers
	}
	for w := from; w < to; w++ {
		if s.EventDelay == 0 {
			s.deliver(w, &ev)
			continue
		}
		life := s.engines[w].started
		s.queue.plan(s.now+s.EventDelay.Nanoseconds(), func() {
			if s.engines[w].started == life { // ignore an event of the worker before its restart
				s.deliver(w, &ev)
			}
		})
	}
}

// deliver applies an event in each router.
func (s *sim) deliver(w int, ev *indexer.Event) {
	name := router.Worker{ID: s.id(w)}
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

// sendChange sends a change of a replica's requests to the other replicas.
func (s *sim) sendChange(from int, c router.Change) {
	lost := s.now >= s.SyncLost.Nanoseconds() && s.now < (s.SyncLost+s.SyncLostFor).Nanoseconds()
	if s.SyncDelay < 0 || lost {
		return
	}
	c.Sequence = slices.Clone(c.Sequence)
	c.Expires = s.SyncLostFor > 0
	s.queue.plan(s.now+s.SyncDelay.Nanoseconds(), func() {
		for i, r := range s.routers {
			if i != from {
				r.router.PeerChanged(uint64(from)+1, c)
			}
		}
	})
}

// publishCached sends a worker's cached blocks to the routers: a new worker of the oracle shares the cache.
func (s *sim) publishCached(w int) {
	b := &s.Trace.blocks
	for n := range int32(s.Trace.Distinct()) { // a block comes after those before it in a prompt
		if s.engines[w].cache.leading([]int32{n}) == 0 {
			continue
		}
		ev := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: b.chain[n], Local: b.local[n]}}}
		if parent := b.parent[n]; parent != none {
			ev.HasParent, ev.Parent = true, b.chain[parent]
		}
		s.deliver(w, &ev)
	}
}

// changed applies a change of a worker.
func (s *sim) changed(c Change) {
	e := s.engines[c.Worker]
	if e.present == (c.Kind == Join) {
		return
	}
	e.present, e.started = c.Kind != Leave, s.now/1e6+1
	for _, r := range s.routers {
		switch {
		case !slices.Contains(r.workers, c.Worker):
		case c.Kind == Leave:
			r.router.RemoveWorker(s.id(c.Worker))
		default:
			bench.NoError(r.router.SetWorker(s.info(c.Worker)))
		}
	}
	if c.Kind == Join {
		if s.Rule.Oracle {
			s.publishCached(c.Worker)
		}
		return
	}
	lost := e.reset(s.Trace.Distinct())
	for _, req := range lost {
		s.free(req)
		s.states[req].begun, s.states[req].first = -1, 0
		s.retried++
	}
	for _, req := range lost {
		s.route(req)
	}
}
