// SPDX-License-Identifier: Apache-2.0

package router

import (
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// known has the indexes of a pool: which blocks its workers have cached. The overlap of a worker is the
// largest one of all indexes.
type known struct {
	block  int                        // tokens in a block
	chunk  atomic.Int64               // see [Card.Chunk]
	pulls  bool                       // blocks in host memory may be the source of a pull
	used   bool                       // cached blocks can change a decision; else all indexes stay empty
	events atomic.Pointer[eventIndex] // replaced by [Router.Restore]
	// history has the blocks of requests to workers without events, and of requests whose hashes
	// no engine has. predicted has the blocks of requests until the worker's events confirm
	// them; it is nil if such blocks are not predicted.
	history, predicted *indexer.Approx
	guesses            []*indexer.Approx // history, and predicted unless it is nil

	filters groupFilters
	shrunk  atomic.Int64 // blocks removed because a worker's cache became smaller
}

// eventIndex is the index of events, with the events that wait for their parent block. All
// events pass through parked.
type eventIndex struct {
	index  *indexer.Index
	parked *indexer.Parked
}

func newEventIndex(x *indexer.Index) *eventIndex { return &eventIndex{x, indexer.NewParked(x)} }

func (k *known) index() *indexer.Index { return k.events.Load().index }

func newKnown(c *Config, block int) *known {
	k := &known{block: block, used: c.indexed(), pulls: c.Pull.On, history: indexer.NewApprox(indexer.ApproxConfig{TTL: c.GuessTTL})}
	k.filters.byOrdinal = make(map[int]groupFilter)
	k.events.Store(newEventIndex(indexer.New(indexer.Config{MaxBlocks: c.MaxBlocks})))
	k.guesses = append(k.guesses, k.history)
	if c.PredictTTL > 0 && !c.NoEvents {
		k.predicted = indexer.NewApprox(indexer.ApproxConfig{TTL: c.PredictTTL})
		k.guesses = append(k.guesses, k.predicted)
	}
	return k
}

// match counts the overlap for the ordinals below size: the blocks on the device, the part of them that is
// only predicted, and the blocks that follow on lower tiers. The result is in s.overlap.
func (k *known) match(now time.Time, h *hashes, size int, s *scratch) {
	o := &s.overlap
	o.blocks = resize(o.blocks, size)
	m := indexer.Matches{Device: o.blocks, Tokens: h.tokens}
	for t := range m.Lower {
		o.lower[t] = resize(o.lower[t], size)
		m.Lower[t] = o.lower[t]
	}
	o.pending = o.pending[:0]
	x := k.index()
	if o.whole = o.whole[:0]; x.AnyHybrid() {
		o.whole, o.ends = resize(o.whole, size), resize(o.ends, size)
		m.Held, m.Ends = o.whole, o.ends
	}
	x.FindMatches(&m, h.local)
	if o.host = o.host[:0]; k.pulls {
		o.host = resize(o.host, size)
		x.MatchHost(o.host, h.local)
	}
	if k.filters.some.Load() {
		k.filters.match(o.blocks, h.sequence)
	}
	for _, a := range k.guesses {
		if a.Blocks() == 0 {
			continue
		}
		s.guessedBlocks = resize(s.guessedBlocks, size)
		a.Match(now, s.guessedBlocks, h.sequence)
		if a == k.predicted {
			o.pending = resize(o.pending, size)
			clear(o.pending)
		}
		for i, n := range s.guessedBlocks {
			if a == k.predicted && n > 0 && len(o.whole) > 0 {
				o.whole[i] = max(o.whole[i], n)
				n = k.usable(o.ends[i], i, n, h)
			}
			// A block that is predicted on the device does not count on a lower tier, too.
			more := n - o.blocks[i]
			if more <= 0 {
				continue
			}
			if a == k.predicted {
				o.pending[i] = more
			}
			o.blocks[i] = n
			if len(o.whole) > 0 {
				o.ends[i].Lacks = indexer.NeedsUnknown // of what events name
			}
			for t := range m.Lower {
				twice := min(more, m.Lower[t][i])
				m.Lower[t][i] -= twice
				more -= twice
			}
		}
	}
}

// begin makes room for predictions about the ranks of a worker.
func (k *known) begin(c *core, info *WorkerInfo) {
	for _, ord := range c.ordinals(info.ID) {
		since := c.entries[ord].since
		k.shrunk.Add(int64(k.index().SetLimit(ord, info.TotalKVBlocks)))
		for _, a := range k.guesses {
			a.Begin(ord, since, info.TotalKVBlocks)
		}
	}
}

// indexSource is one index, and the name of the source of its blocks.
type indexSource struct {
	name    string
	blocks  func() int
	bytes   func() int // looks at all nodes of the index
	evicted func() int // for the index of events: without the blocks that outcomes of events count
}

func (k *known) sources() (all []indexSource) {
	events := k.events.Load()
	x := events.index
	all = append(all, indexSource{"events", x.Blocks, func() int { return x.Bytes() + events.parked.Bytes() }, func() int { return int(k.shrunk.Load()) }})
	for i, a := range k.guesses {
		all = append(all, indexSource{[...]string{"history", "prediction"}[i], a.Blocks, a.Bytes, a.Evicted})
	}
	return all
}

func (k *known) removeWorker(ord int) {
	k.events.Load().parked.RemoveWorker(ord)
	for _, a := range k.guesses {
		a.Clear(ord)
	}
	k.filters.change(ord, func(f *groupFilter) { *f = groupFilter{} })
}

// apply applies an event of a worker.
func (k *known) apply(now time.Time, ord int, ev indexer.Event) indexer.Outcome {
	if chunk := k.chunk.Load(); ev.Shape != nil && chunk > 0 {
		ev.Shape = withChunk(ev.Shape, int(chunk))
	}
	if k.predicted != nil && k.predicted.WorkerBlocks(ord) > 0 {
		switch ev.Kind {
		case indexer.Removed, indexer.SideRemoved: // of a hybrid model, prompts through the block may need it
			if ev.Tier == indexer.Device {
				k.predicted.Forget(ord, k.index(), ev.Externals)
			}
		case indexer.Cleared:
			k.predicted.Clear(ord)
		case indexer.Shaped, indexer.SideStored:
			if ev.Shape != nil || ev.Kind == indexer.Shaped {
				was := k.index().Boundaries(ord)
				out := k.events.Load().parked.Apply(now, ord, ev)
				if k.index().Boundaries(ord) != was {
					k.predicted.Clear(ord) // usable prefixes end elsewhere now
				}
				return out
			}
		case indexer.Stored:
		}
	}
	return k.events.Load().parked.Apply(now, ord, ev)
}

// guess is the prediction that a booking added to an index.
type guess struct {
	in         *indexer.Approx // nil: no prediction
	ordinal    int
	generation uint64
	stamp      uint64
	last       uint64 // sequence hash of the last block that counts
}

// guess predicts that the worker of a booking will have the prompt cached. o is what the decision counted; nil if
// another replica decided.
func (k *known) guess(now time.Time, h *hashes, at *booking, o *overlap) guess {
	if !k.used || len(h.sequence) == 0 {
		return guess{}
	}
	g := guess{in: k.predicted, ordinal: at.ordinal, generation: at.generation}
	if h.ownHashes || at.unreported {
		g.in = k.history
	}
	if g.in == nil {
		return guess{}
	}
	if ends := k.index().Boundaries(at.ordinal); g.in == k.predicted && ends != plainEnds {
		g.stamp, g.last = k.insertHybrid(now, h, &g, ends, o)
	} else {
		g.stamp, g.last = g.in.Insert(now, g.ordinal, g.generation, h.sequence)
	}
	if g.stamp == 0 {
		return guess{}
	}
	return g
}

// withdraw removes the prediction.
func (g *guess) withdraw() {
	if g.in != nil {
		g.in.Withdraw(g.ordinal, g.generation, g.stamp, g.last)
	}
}
