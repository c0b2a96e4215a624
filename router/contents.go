// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/kvroute/kvroute/indexer"
)

// Contents is what a router knows of its workers' caches by their events, at one moment.
type Contents struct {
	Pools []PoolContents
	// Holders are the ranks that the runs name by number.
	Holders []Worker
	// Workers are the processes that the holders belong to.
	Workers []WorkerInfo
	// Runs are the runs of the pools, one pool after the other, each with the
	// number of its pool; see [indexer.Run]. They can be read once. The slices of
	// a run are valid until the next one.
	Runs iter.Seq2[int, indexer.Run]
	// Parked are the events that the runs do not contain, of each worker in the order in which they are to be applied:
	// the shape and blocks of side groups, and events that wait for a parent block. Events of workers that are not in
	// Holders are ignored.
	Parked []ParkedEvent
	// Keep selects workers that a restore leaves as they are, even if they are in the
	// contents. Nil selects none.
	Keep func(id uint64) bool

	kept  map[uint64]bool // ids that Keep selects
	heard map[Worker]bool // ranks with events in Parked
}

// PoolContents names a pool and the size of its blocks in tokens.
type PoolContents struct {
	Model     string
	BlockSize int
}

// Dump is a router's contents at one moment. The caller reads and closes it.
type Dump struct {
	Contents
	// Blocks is the number of (block, owner) pairs; an owner is one tier of a rank's
	// cache.
	Blocks int

	router *Router
	pools  []poolDump
	read   bool // Runs was read to its end
	err    error
}

// ParkedEvent is an event that no run contains.
type ParkedEvent struct {
	Worker Worker
	Event  indexer.Event
}

// poolDump is the running dump of a pool.
type poolDump struct {
	runs    iter.Seq2[indexer.Run, error]
	stop    func()
	numbers []int // of the holders, by ordinal; -1 for others
}

// ErrDumping means that another dump is running.
var ErrDumping = errors.New("a dump is under way")

// Dump begins a dump of all pools as they are at this moment: the result of all events
// applied by now, and of no later ones. mine, if not nil, selects the workers in it. Events
// and decisions continue meanwhile; see [indexer.Index.Dump] for how long an event waits
// and how much memory a dump takes for each pool: it does not grow with the index. Only one dump
// can run at a time: ok is false while another one has not been closed.
func (r *Router) Dump(mine func(id uint64) bool) (d *Dump, ok bool) {
	select {
	case r.dumping <- struct{}{}:
	default:
		return nil, false
	}
	return r.begin(mine), true
}

// AwaitDump waits until no other dump is running, then begins one of all workers. The error
// wraps [ErrDumping] if ctx ends before.
func (r *Router) AwaitDump(ctx context.Context) (*Dump, error) {
	select {
	case r.dumping <- struct{}{}:
		return r.begin(nil), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("router: %w: %w", ErrDumping, context.Cause(ctx))
	}
}

func (r *Router) begin(mine func(id uint64) bool) *Dump {
	d := &Dump{router: r}
	// No event is applied and no worker changes until all dumps have begun.
	r.fleet.Lock()
	defer r.fleet.Unlock()
	for _, key := range slices.SortedFunc(maps.Keys(r.pools), poolKey.compare) {
		p := r.pools[key]
		d.Pools = append(d.Pools, PoolContents{key.model, key.blockSize})
		pd := poolDump{numbers: make([]int, p.view.Load().size)}
		parked := p.known.events.Load().parked.Events()
		p.each(func(ord int, e *entry) {
			if mine != nil && !mine(e.worker.ID) {
				pd.numbers[ord] = -1
				return
			}
			if last := len(d.Holders) - 1; last < 0 || d.Holders[last].ID != e.worker.ID {
				d.Workers = append(d.Workers, *e.info)
			}
			pd.numbers[ord] = len(d.Holders)
			d.Holders = append(d.Holders, e.worker)
			for _, ev := range parked[ord] {
				d.Parked = append(d.Parked, ParkedEvent{e.worker, ev})
			}
		})
		x := p.known.index()
		d.Blocks += x.Blocks()
		pd.runs, pd.stop = x.DumpNow()
		d.pools = append(d.pools, pd)
	}
	d.Runs = d.runs
	return d
}

// The ends of a dump: read to its end, aborted because too much changed meanwhile, or
// closed early by its reader.
const (
	dumpWhole = iota
	dumpOvertaken
	dumpLeft
)

// Close ends the dump. It need not be read to its end.
func (d *Dump) Close() {
	if d.router == nil {
		return
	}
	for _, p := range d.pools {
		p.stop()
	}
	end := dumpLeft
	if errors.Is(d.err, indexer.ErrOvertaken) {
		end = dumpOvertaken
	} else if d.read {
		end = dumpWhole
	}
	d.router.dumps[end].Add(1)
	<-d.router.dumping
	d.router = nil
}

// Err returns the reason why Runs, or the events made of them, ended early. It is nil if they
// did not, or if their reader stopped.
func (d *Dump) Err() error { return d.err }

func (d *Dump) runs(yield func(int, indexer.Run) bool) {
	for i := range d.pools {
		p := &d.pools[i]
		for run, err := range p.runs {
			if err != nil {
				d.err = err
				return
			}
			kept := run.Holders[:0]
			for _, h := range run.Holders {
				if h.Worker = p.numbers[h.Worker]; h.Worker >= 0 {
					kept = append(kept, h)
				}
			}
			run.Holders = kept
			if !yield(i, run) {
				return
			}
		}
	}
	d.read = true
}
