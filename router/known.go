// SPDX-License-Identifier: Apache-2.0

package router

import (
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// known is what a pool knows of its workers' caches. What a worker holds of a
// prompt is the most that one of the indexes says. A nil known knows nothing, and
// learns nothing.
type known struct {
	events atomic.Pointer[eventIndex] // replaced by [Router.Restore]
	// history is what was routed, for workers without events and for prompts
	// whose hashes no engine has; predicted is what was routed and is about to
	// come as an event; nil for none.
	history, predicted *indexer.Approx

	claims claims       // what router groups and heartbeats say
	shrunk atomic.Int64 // blocks forgotten since a worker's cache turned out to be smaller
}

// eventIndex is an index of what events say, with what waits in front of it: all events
// come this way.
type eventIndex struct {
	index  *indexer.Index
	parked *indexer.Parked
}

func newEventIndex(x *indexer.Index) *eventIndex { return &eventIndex{x, indexer.NewParked(x)} }

func (k *known) index() *indexer.Index { return k.events.Load().index }

func newKnown(c *Config) *known {
	k := &known{
		history: indexer.NewApprox(indexer.ApproxConfig{TTL: c.GuessTTL}),
	}
	k.events.Store(newEventIndex(indexer.New(indexer.Config{MaxBlocks: c.MaxBlocks})))
	if c.PredictTTL > 0 && !c.NoEvents {
		k.predicted = indexer.NewApprox(indexer.ApproxConfig{TTL: c.PredictTTL})
	}
	return k
}

// match fills in the overlap of every ordinal, and what follows it on lower tiers. plain is
// as in claims.match.
func (k *known) match(now time.Time, local, sequence []uint64, plain bool, blockSize int, s *scratch) {
	m := indexer.Matches{Device: s.overlap}
	for t := range m.Lower {
		s.lower[t] = resize(s.lower[t], len(s.overlap))
		m.Lower[t] = s.lower[t]
	}
	k.index().FindMatches(&m, local)
	k.claims.match(s.overlap, sequence, s.encoded.IDs, plain, blockSize)
	for _, a := range [...]*indexer.Approx{k.history, k.predicted} {
		if a == nil || a.Blocks() == 0 {
			continue
		}
		s.guessed = resize(s.guessed, len(s.overlap))
		a.Match(now, s.guessed, sequence)
		for i, n := range s.guessed {
			// What is guessed to be on the device is not counted below it again.
			more := max(0, n-s.overlap[i])
			s.overlap[i] += more
			for t := range m.Lower {
				twice := min(more, m.Lower[t][i])
				m.Lower[t][i] -= twice
				more -= twice
			}
		}
	}
}

// begin makes room for guesses about the ranks of a worker.
func (k *known) begin(c *core, info *WorkerInfo) {
	if k == nil {
		return
	}
	for _, ord := range c.ordinals(info.ID) {
		since := c.entries[ord].since
		k.shrunk.Add(int64(k.index().SetLimit(ord, info.TotalKVBlocks)))
		k.history.Begin(ord, since, info.TotalKVBlocks)
		if k.predicted != nil {
			k.predicted.Begin(ord, since, info.TotalKVBlocks)
		}
	}
}

// indexSource is an index by where its blocks are known from.
type indexSource struct {
	name    string
	blocks  func() int
	bytes   func() int // looks at all nodes of the index
	evicted func() int // of the index of events, only blocks that no outcome of an event counts
}

func (k *known) sources() (all []indexSource) {
	if k == nil {
		return nil
	}
	events := k.events.Load()
	x := events.index
	all = append(all, indexSource{"events", x.Blocks, func() int { return x.Bytes() + events.parked.Bytes() }, func() int { return int(k.shrunk.Load()) }})
	for i, a := range [...]*indexer.Approx{k.history, k.predicted} {
		if a != nil {
			all = append(all, indexSource{[...]string{"history", "prediction"}[i], a.Blocks, a.Bytes, a.Evicted})
		}
	}
	return all
}

func (k *known) removeWorker(ord int) {
	if k == nil {
		return
	}
	k.events.Load().parked.RemoveWorker(ord)
	k.history.Clear(ord)
	k.claims.change(ord, func(c *claim) { *c = claim{} })
	if k.predicted != nil {
		k.predicted.Clear(ord)
	}
}

// apply applies an event of a worker.
func (k *known) apply(now time.Time, ord int, ev indexer.Event) indexer.Outcome {
	if k.predicted != nil && k.predicted.WorkerBlocks(ord) > 0 {
		switch ev.Kind {
		case indexer.Removed:
			if ev.Tier == indexer.Device {
				k.predicted.Forget(ord, k.index(), ev.Externals)
			}
		case indexer.Cleared:
			k.predicted.Clear(ord)
		case indexer.Stored:
		}
	}
	return k.events.Load().parked.Apply(now, ord, ev)
}

// eventBlocks returns how many blocks events say that a worker holds, guessedBlocks how many
// it is taken to hold without having been told.
func (k *known) eventBlocks(ord int) int {
	if k == nil {
		return 0
	}
	return k.index().WorkerBlocks(ord)
}

func (k *known) guessedBlocks(ord int) int {
	if k == nil {
		return 0
	}
	return k.history.WorkerBlocks(ord)
}

// guess is what a booking left in an index of guesses.
type guess struct {
	in         *indexer.Approx // nil for nothing
	ordinal    int
	generation uint64
	stamp      uint64
	last       uint64 // sequence hash of the last block that counts
}

// guess remembers a booking as something that its worker will hold.
func (k *known) guess(now time.Time, q *question) guess {
	if k == nil || len(q.sequence) == 0 {
		return guess{}
	}
	g := guess{in: k.predicted, ordinal: q.ordinal, generation: q.generation}
	if q.guessed || q.unreported {
		g.in = k.history
	}
	if g.in == nil {
		return guess{}
	}
	if g.stamp, g.last = g.in.Insert(now, g.ordinal, g.generation, q.sequence); g.stamp == 0 {
		return guess{}
	}
	return g
}

// withdraw forgets what a booking left.
func (g *guess) withdraw() {
	if g.in != nil {
		g.in.Withdraw(g.ordinal, g.generation, g.stamp, g.last)
	}
}
