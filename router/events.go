// SPDX-License-Identifier: Apache-2.0

package router

import (
	"iter"
	"maps"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// WantsEvents says whether events of the workers' caches can change a decision.
func (r *Router) WantsEvents() bool { return r.conf.indexed() && !r.conf.NoEvents }

// ExpireEvents drops events that have waited 30 s for the blocks before theirs, and
// returns whose they were, in worker order: what these hold is not known for
// certain any more. It is to be called every few seconds.
func (r *Router) ExpireEvents() (whose []Worker) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	for _, p := range r.pools {
		workers, blocks := p.expireEvents(r.conf.Now())
		r.metrics.applied(indexer.Outcome{Orphan: blocks})
		whose = append(whose, workers...)
	}
	slices.SortFunc(whose, Worker.Compare)
	return whose
}

// SetEventState says how far what the events tell of a worker can be trusted: "ok",
// "partial" or "suspect". It is told on by [Router.Workers]. Of a worker that is
// not known it is nothing.
func (r *Router) SetEventState(w Worker, state string) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[w.ID]
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if ord, known := p.core.find(w); known {
		if state == "ok" {
			state = ""
		}
		p.core.entries[ord].events = state
	}
}

// IndexDump is what the events told to one pool hold at one moment.
type IndexDump struct {
	Model     string
	BlockSize int
	Workers   []Worker // by number; a number that nobody has stands for the zero Worker
	Runs      iter.Seq[indexer.Run]
}

// DumpIndexes calls use with a function that returns what all indexes hold at the
// moment when it is called; no other dump is under way meanwhile. Decisions and
// events go on. Each of the Runs must be read, from one goroutine, before use
// returns. The error is that of use.
func (r *Router) DumpIndexes(use func(begin func() []IndexDump) error) error {
	// A second dump would wait for the first with the fleet in its hands.
	r.dumping.Lock()
	defer r.dumping.Unlock()
	return use(r.beginDumps)
}

func (r *Router) beginDumps() (dumps []IndexDump) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	for _, key := range slices.SortedFunc(maps.Keys(r.pools), poolKey.compare) {
		p := r.pools[key]
		if p.known == nil {
			continue
		}
		d := IndexDump{Model: p.model, BlockSize: p.blockSize}
		p.mu.Lock()
		for i := range p.core.entries {
			d.Workers = append(d.Workers, p.core.entries[i].worker)
		}
		p.mu.Unlock()
		// The dump is of the moment when its first run is asked for.
		next, stop := iter.Pull(p.known.index().Dump())
		first, ok := next()
		d.Runs = func(yield func(indexer.Run) bool) {
			defer stop()
			for run := first; ok && yield(run); run, ok = next() {
				continue
			}
		}
		dumps = append(dumps, d)
	}
	return dumps
}
