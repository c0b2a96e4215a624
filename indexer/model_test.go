// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"flag"
	"fmt"
	"iter"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

var modelBlocks = flag.Int("model-blocks", 2_000_000, "random block operations of the model test, a fifth of it with -short")

// model is a model of the index: each owner's blocks by external hash, each with the
// chain of local hashes that leads to it. An owner is a worker on one tier.
type model struct {
	workers int
	owners  []modelOwner
	chains  map[[2]uint64]uint64 // previous chain and local hash -> chain; 0 is the empty chain
	before  [][2]uint64          // by chain: previous chain and local hash
}

type modelOwner struct {
	held   map[uint64]uint64 // external hash -> chain
	chains map[uint64]int    // number of external hashes of a chain
	seen   []uint64          // recent external hashes, to choose from
	tails  []uint64          // external hashes to remove, last one first
}

const modelTiers = 4

func newModel(workers int) *model {
	m := &model{workers: workers, chains: map[[2]uint64]uint64{}, before: [][2]uint64{{}}}
	for range workers * modelTiers {
		m.owners = append(m.owners, modelOwner{held: map[uint64]uint64{}, chains: map[uint64]int{}})
	}
	return m
}

func (m *model) owner(worker int, t indexer.Tier) *modelOwner {
	return &m.owners[int(t)*m.workers+worker]
}

// held returns the number of a worker's external hashes.
func (m *model) held(worker int) (n int) {
	for t := range indexer.Tier(modelTiers) {
		n += len(m.owner(worker, t).held)
	}
	return n
}

// parent returns the chain of a worker's block on a tier. If the next block is not on the
// device, the parent may be on another tier.
func (m *model) parent(worker int, t indexer.Tier, external uint64) (chain uint64, ok bool) {
	if chain, ok = m.owner(worker, t).held[external]; ok || t == indexer.Device {
		return chain, ok
	}
	for t := range indexer.Tier(modelTiers) {
		if chain, ok = m.owner(worker, t).held[external]; ok {
			break
		}
	}
	return chain, ok
}

func (m *model) chain(before, local uint64) uint64 {
	c, ok := m.chains[[2]uint64{before, local}]
	if !ok {
		c = uint64(len(m.before))
		m.chains[[2]uint64{before, local}] = c
		m.before = append(m.before, [2]uint64{before, local})
	}
	return c
}

// locals returns the local hashes of a chain.
func (m *model) locals(chain uint64) (local []uint64) {
	for ; chain != 0; chain = m.before[chain][0] {
		local = append(local, m.before[chain][1])
	}
	slices.Reverse(local)
	return local
}

func (w *modelOwner) remove(external uint64) {
	if c, ok := w.held[external]; ok {
		delete(w.held, external)
		if w.chains[c]--; w.chains[c] == 0 {
			delete(w.chains, c)
		}
	}
}

func (m *model) apply(worker int, ev indexer.Event) (out indexer.Outcome) {
	w := m.owner(worker, ev.Tier)
	switch ev.Kind {
	case indexer.Shaped, indexer.SideStored, indexer.SideRemoved: // of hybrid models
	case indexer.Cleared:
		for t := range indexer.Tier(modelTiers) {
			w := m.owner(worker, t)
			out.Removed += len(w.held)
			clear(w.held)
			clear(w.chains)
		}
	case indexer.Removed:
		before := len(w.held)
		for _, e := range ev.Externals {
			w.remove(e)
		}
		out.Removed = before - len(w.held)
		out.Unknown = len(ev.Externals) - out.Removed
	case indexer.Stored:
		seen := map[uint64]bool{ev.Parent: ev.HasParent}
		for _, b := range ev.Blocks {
			if seen[b.External] {
				out.Invalid = len(ev.Blocks)
				return out
			}
			seen[b.External] = true
		}
		chain := uint64(0)
		if ev.HasParent {
			var ok bool
			if chain, ok = m.parent(worker, ev.Tier, ev.Parent); !ok {
				out.Orphan = len(ev.Blocks)
				return out
			}
		}
		for _, b := range ev.Blocks {
			next := m.chain(chain, b.Local)
			if stored, ok := w.held[b.External]; ok {
				if stored == next {
					out.Duplicate++
				} else {
					out.Conflict++
				}
				chain = stored
				continue
			}
			chain = next
			w.held[b.External] = chain
			w.seen = append(w.seen, b.External)
			w.chains[chain]++
			out.Stored++
			if ev.Tier != indexer.Device {
				out.OtherTier++
			}
		}
	}
	return out
}

// some returns an external hash of the worker, if it finds one soon.
func (w *modelOwner) some(rng *rand.Rand) (external uint64) {
	for range 4 {
		if len(w.seen) == 0 {
			break
		}
		i := rng.IntN(len(w.seen))
		external = w.seen[i]
		if _, ok := w.held[external]; ok {
			return external
		}
		w.seen[i] = w.seen[len(w.seen)-1]
		w.seen = w.seen[:len(w.seen)-1]
	}
	return external
}

// next returns an external hash of the worker. The next calls return its neighbours in
// the chain, towards its begin or its end.
func (w *modelOwner) next(rng *rand.Rand, m *model) (external uint64) {
	if len(w.tails) == 0 {
		of := make(map[uint64]uint64, len(w.held)) // chain -> external hash
		for e, chain := range w.held {
			of[chain] = max(of[chain], e)
		}
		for chain := w.held[w.some(rng)]; chain != 0; chain = m.before[chain][0] {
			if e, held := of[chain]; held {
				w.tails = append(w.tails, e)
			}
		}
		if rng.IntN(4) > 0 {
			slices.Reverse(w.tails)
		}
	}
	if last := len(w.tails) - 1; last >= 0 {
		external, w.tails = w.tails[last], w.tails[:last]
	}
	return external
}

// match returns the overlaps with a prompt by tier, and the chain of each worker's last
// block on the device.
func (m *model) match(local []uint64) (counts [modelTiers][]int32, last []uint64) {
	last = make([]uint64, m.workers)
	for t := range counts {
		counts[t] = make([]int32, m.workers)
	}
	var path []uint64 // the longest path of any worker
	chain := uint64(0)
	for _, l := range local {
		var ok bool
		if chain, ok = m.chains[[2]uint64{chain, l}]; !ok {
			break
		}
		path = append(path, chain)
	}
	for i := range m.workers {
		rest := path
		for t := range counts {
			held := m.owner(i, indexer.Tier(t)).chains
			for len(rest) > 0 && held[rest[0]] > 0 {
				if t == 0 {
					last[i] = rest[0]
				}
				rest = rest[1:]
				counts[t][i]++
			}
		}
	}
	return counts, last
}

// pairs counts (block, owner) pairs: several external hashes of one block count as one.
func (m *model) pairs() (n int) {
	for i := range m.owners {
		n += len(m.owners[i].chains)
	}
	return n
}

// shape configures random events.
type shape struct {
	workers   int
	locals    uint64 // number of different local hashes
	externals uint64 // number of different external hashes; 0: derived from the chain, so engines agree
	batch     int    // most blocks in an event
	stores    int    // stored events in 100
	lower     bool   // half of the events are on tiers below the device
	tails     bool   // removals take neighbours one after the other
	engines   int    // kinds of engines, each with its own hashes; worker 0 has them to itself
}

func shapes() []shape {
	return []shape{
		{workers: 4, locals: 3, externals: 12, batch: 4, stores: 60},
		{workers: 3, locals: 2, externals: 300, batch: 90, stores: 50},
		{workers: 6, locals: 2, batch: 40, stores: 50},
		{workers: 70, locals: 2, batch: 70, stores: 55},
		{workers: 5, locals: 1, batch: 9, stores: 45},
		{workers: 130, locals: 3, externals: 40, batch: 8, stores: 70},
		{workers: 5, locals: 2, batch: 40, stores: 55, lower: true},
		{workers: 3, locals: 2, externals: 60, batch: 6, stores: 60, lower: true},
		{workers: 4, locals: 1, externals: 10, batch: 6, stores: 60},
		{workers: 3, locals: 1, externals: 30, batch: 12, stores: 60, lower: true},
		{workers: 9, locals: 2, batch: 40, stores: 60, engines: 2},
		{workers: 20, locals: 2, batch: 70, stores: 55, engines: 3, lower: true},
		{workers: 3, locals: 1, batch: 60, stores: 5, engines: 2, tails: true},
		{workers: 5, locals: 2, batch: 60, stores: 7, engines: 3, tails: true, lower: true},
	}
}

// event returns a random event of a worker that m has.
func (s *shape) event(rng *rand.Rand, m *model, worker int) indexer.Event {
	tier := indexer.Device
	if s.lower {
		tier = indexer.Tier(max(0, rng.IntN(7)-3))
	}
	w := m.owner(worker, tier)
	some := func() uint64 { // mostly a known hash
		if s.externals > 0 {
			return rng.Uint64N(s.externals)
		}
		return w.some(rng)
	}
	switch n := rng.IntN(100); {
	case n < s.stores:
		ev := indexer.Event{Kind: indexer.Stored, Tier: tier, HasParent: rng.IntN(3) > 0, Parent: some()}
		if s.lower && rng.IntN(2) == 0 {
			ev.Parent = m.owner(worker, indexer.Device).some(rng)
		}
		chain := uint64(0)
		if ev.HasParent {
			chain, _ = m.parent(worker, tier, ev.Parent)
		}
		dialect := uint64(0) // variant of the engine's hashes
		if s.engines > 0 && worker > 0 {
			dialect = uint64(1 + worker%(s.engines-1))
		}
		if rng.IntN(8) == 0 {
			dialect = 1000 + uint64(worker)
		}
		for range 1 + rng.IntN(s.batch) {
			b := indexer.Block{External: some(), Local: rng.Uint64N(s.locals)}
			chain = m.chain(chain, b.Local)
			if s.externals == 0 {
				b.External = indexer.NextSequenceHash(chain, dialect)
			}
			ev.Blocks = append(ev.Blocks, b)
		}
		return ev
	case n < 99 || rng.IntN(4) > 0 || s.tails && rng.IntN(10) > 0:
		ev := indexer.Event{Kind: indexer.Removed, Tier: tier}
		if s.tails {
			for range max(1, rng.IntN(12)-8) {
				ev.Externals = append(ev.Externals, w.next(rng, m))
			}
			return ev
		}
		for range 1 + rng.IntN(s.batch) {
			ev.Externals = append(ev.Externals, some())
		}
		return ev
	default:
		return indexer.Event{Kind: indexer.Cleared}
	}
}

// prompt returns a prompt that resembles a held one.
func (s *shape) prompt(rng *rand.Rand, m *model) []uint64 {
	w := m.owner(rng.IntN(s.workers), indexer.Device)
	if s.lower {
		w = &m.owners[rng.IntN(len(m.owners))]
	}
	local := m.locals(w.held[w.some(rng)])
	for range rng.IntN(4) {
		local = append(local, rng.Uint64N(s.locals))
	}
	if len(local) > 0 && rng.IntN(2) == 0 {
		local[rng.IntN(len(local))] = rng.Uint64N(s.locals)
	}
	return local
}

// equal compares the matches of the index and of the model for a prompt.
func equal(x *indexer.Index, m *model, prompt []uint64) error {
	got := indexer.Matches{Device: make([]int32, m.workers)}
	for t := range got.Lower {
		got.Lower[t] = make([]int32, m.workers)
	}
	x.FindMatches(&got, prompt)
	want, chains := m.match(prompt)
	for t, counts := range append([][]int32{got.Device}, got.Lower[:]...) {
		if !slices.Equal(counts, want[t]) {
			return fmt.Errorf("match of %d on tier %d is %d, want %d", prompt, t, counts, want[t])
		}
	}
	for w, n := range got.Device {
		if e := x.Last(w, n, prompt); n > 0 && m.owner(w, indexer.Device).held[e] != chains[w] {
			return fmt.Errorf("match of %d: the last external hash of worker %d is %d, which is not that of block %d", prompt, w, e, n)
		}
		for e, chain := range m.owner(w, indexer.Device).held {
			if got, want := x.AppendChain([]uint64{1}, w, e), append([]uint64{1}, m.locals(chain)...); !slices.Equal(got, want) {
				return fmt.Errorf("chain of external hash %d of worker %d is %d, want %d", e, w, got, want)
			}
			break // the first of a map is a random one
		}
	}
	return nil
}

func TestIndexEqualsSlowModel(t *testing.T) {
	for i, s := range shapes() {
		t.Run(fmt.Sprintf("%+v", s), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			x, m := indexer.New(indexer.Config{}), newModel(s.workers)
			budget := *modelBlocks
			if testing.Short() {
				budget /= 5
			}
			budget /= len(shapes())
			for step := 0; budget > 0; step++ {
				w := rng.IntN(s.workers)
				ev := s.event(rng, m, w)
				budget -= len(ev.Blocks) + len(ev.Externals)
				if got, want := x.Apply(w, ev), m.apply(w, ev); got != want {
					t.Fatalf("step %d: outcome %+v, want %+v, of %+v of worker %d", step, got, want, ev, w)
				}
				if step%(1+s.workers/16) == 0 { // comparing many workers is slow
					if err := equal(x, m, s.prompt(rng, m)); err != nil {
						t.Fatalf("step %d: after %+v of worker %d: %v", step, ev, w, err)
					}
				}
				if got, want := x.Blocks(), m.pairs(); got != want {
					t.Fatalf("step %d: %d blocks, want %d", step, got, want)
				}
				if got, want := x.WorkerBlocks(w), m.held(w); got != want {
					t.Fatalf("step %d: %d external hashes of worker %d, want %d", step, got, w, want)
				}
				if step%(500+50*s.workers) == 0 {
					if err := x.Check(); err != nil {
						t.Fatalf("step %d: %v", step, err)
					}
					sameAfterDump(t, x, m, &s, rng)
				}
				if len(m.before) > 1<<16 { // the model only grows: restart with an empty one
					emptied(t, x, s.workers)
					x, m = indexer.New(indexer.Config{}), newModel(s.workers)
				}
			}
			emptied(t, x, s.workers)
		})
	}
}

func emptied(t *testing.T, x *indexer.Index, workers int) {
	t.Helper()
	for w := range workers {
		x.RemoveWorker(w)
	}
	if n, nodes := x.Blocks(), x.Nodes(); n != 0 || nodes != 0 {
		t.Fatalf("%d blocks and %d nodes left after all workers were removed", n, nodes)
	}
	if err := x.Check(); err != nil {
		t.Fatal(err)
	}
}

// sameAfterDump compares the model with an index restored from a dump. Events continue
// during the dump; the model gets them only afterwards.
func sameAfterDump(t *testing.T, x *indexer.Index, m *model, s *shape, rng *rand.Rand) {
	t.Helper()
	type applied struct {
		worker int
		ev     indexer.Event
	}
	var meanwhile []applied
	y, out, err := indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
		for r := range x.Dump() {
			for range rng.IntN(3) {
				w := rng.IntN(s.workers)
				ev := s.event(rng, m, w)
				x.Apply(w, ev)
				meanwhile = append(meanwhile, applied{w, ev})
			}
			if !yield(r, nil) {
				return
			}
		}
	})
	if err != nil || out.Conflict > 0 || out.Refused > 0 {
		t.Fatalf("restore: %+v, %v", out, err)
	}
	if err := y.Check(); err != nil {
		t.Fatal(err)
	}
	if y.Blocks() != m.pairs() {
		t.Fatalf("%d blocks restored, want %d", y.Blocks(), m.pairs())
	}
	for w, got := range held(y, s.workers) {
		if want := slices.Sorted(maps.Keys(m.owners[w].held)); !slices.Equal(got, want) {
			t.Fatalf("owner %d: external hashes %d restored, want %d", w, got, want)
		}
	}
	for range 20 {
		if err := equal(y, m, s.prompt(rng, m)); err != nil {
			t.Fatalf("restored: %v", err)
		}
	}
	for _, a := range meanwhile {
		m.apply(a.worker, a.ev)
	}
}

// held returns the owners' external hashes in the order of a dump.
func held(x *indexer.Index, workers int) [][]uint64 {
	externals := make([][]uint64, workers*modelTiers)
	for r := range x.Dump() {
		for _, h := range r.Holders {
			o := int(h.Tier)*workers + h.Worker
			externals[o] = append(externals[o], h.Externals...)
		}
	}
	for _, e := range externals {
		slices.Sort(e)
	}
	return externals
}

// Workers on their own goroutines end with the same blocks as each would alone, whatever
// matches and dumps run at the same time.
func TestIndexIsSafeForConcurrentUse(t *testing.T) {
	s := shape{workers: 6, locals: 2, batch: 40, stores: 52, lower: true}
	x := indexer.New(indexer.Config{})
	models := make([]*model, s.workers)
	var writers, readers sync.WaitGroup
	var done atomic.Bool
	for w := range s.workers {
		models[w] = newModel(s.workers)
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 2))
			for range 8000 / min(raceSlows, 3) {
				ev := s.event(rng, models[w], w)
				if got, want := x.Apply(w, ev), models[w].apply(w, ev); got != want {
					t.Errorf("worker %d: outcome %+v, want %+v", w, got, want)
				}
			}
		})
	}
	for r := range uint64(2) {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(r, 3))
			all := matches(s.workers)
			for n := 0; !done.Load(); n++ {
				prompt := make([]uint64, rng.IntN(60))
				for i := range prompt {
					prompt[i] = rng.Uint64N(s.locals)
				}
				x.FindMatches(all, prompt)
				for w, c := range all.Device {
					sum := int(c + all.Lower[0][w] + all.Lower[1][w] + all.Lower[2][w])
					if sum > len(prompt) {
						t.Errorf("worker %d: overlap %d, %d on all tiers, of %d", w, c, sum, len(prompt))
					}
				}
				if n%1000 == 0 {
					x.SetLimit(0, 1<<20) // never reached
					for range x.Dump() {
					}
					x.Bytes()
				}
			}
		})
	}
	writers.Wait()
	done.Store(true)
	readers.Wait()
	if err := x.Check(); err != nil {
		t.Error(err)
	}
	rng := rand.New(rand.NewPCG(4, 4))
	for range 500 {
		w := rng.IntN(s.workers)
		prompt := s.prompt(rng, models[w])
		got := make([]int32, s.workers)
		x.Match(got, prompt)
		for w := range s.workers {
			if want, _ := models[w].match(prompt); got[w] != want[0][w] {
				t.Errorf("worker %d, prompt %d: overlap %d, want %d", w, prompt, got[w], want[0][w])
			}
		}
	}
}

func TestRestoreRefusesWhatIsNoDump(t *testing.T) {
	one := indexer.Run{ID: 1, Local: []uint64{1, 2}, Holders: []indexer.Holder{{Worker: 0, Externals: []uint64{7, 8}}}}
	for what, runs := range map[string][]indexer.Run{
		"a run that is not there":  {one, {ID: 2, Parent: 3, Local: []uint64{1}}},
		"a number left out":        {one, {ID: 3, Parent: 1, Local: []uint64{1}}},
		"no blocks":                {{ID: 1}},
		"more hashes than blocks":  {{ID: 1, Local: []uint64{1}, Holders: one.Holders}},
		"a worker below 0":         {{ID: 1, Local: []uint64{1}, Holders: []indexer.Holder{{Worker: -1}}}},
		"a start behind the end":   {{ID: 1, Local: []uint64{1}, Holders: []indexer.Holder{{Start: 2}}}},
		"a start before the begin": {{ID: 1, Local: []uint64{1}, Holders: []indexer.Holder{{Start: -1}}}},
		"a start without an end":   {{ID: 1, Local: []uint64{1}, Holders: []indexer.Holder{{Start: math.MaxInt, Externals: []uint64{7}}}}},
	} {
		if _, _, err := indexer.Restore(indexer.Config{}, all(runs)); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	twice := indexer.Run{ID: 2, Parent: 1, Local: []uint64{3}, Holders: []indexer.Holder{{Worker: 0, Externals: []uint64{7}}}}
	x, out, err := indexer.Restore(indexer.Config{}, all([]indexer.Run{one, twice}))
	if err != nil || out != (indexer.Outcome{Stored: 2, Conflict: 1}) || x.Nodes() != 1 {
		t.Errorf("a hash used twice: %+v, %v, %d nodes", out, err, x.Nodes())
	}
	if _, out, _ := indexer.Restore(indexer.Config{MaxBlocks: 1}, all([]indexer.Run{one})); out.Refused != 2 {
		t.Errorf("above the bound: %+v", out)
	}
}

// If one run splits another, or ends within another, the next run follows the run that it
// names and not the one in its place.
func TestRestoreOfRunsThatShareBlocks(t *testing.T) {
	run := func(id, parent uint32, worker int, externals []uint64, local ...uint64) indexer.Run {
		return indexer.Run{ID: id, Parent: parent, Local: local, Holders: []indexer.Holder{{Worker: worker, Externals: externals}}}
	}
	x, out, err := indexer.Restore(indexer.Config{}, all([]indexer.Run{
		run(1, 0, 0, []uint64{1, 2, 3, 4}, 1, 2, 3, 4),
		run(2, 0, 1, []uint64{1, 2}, 1, 2),
		run(3, 0, 2, []uint64{1, 9}, 1, 9), // splits run 1 behind the first block
		run(4, 2, 1, []uint64{8}, 8),       // splits run 1 behind the second block
		run(5, 1, 0, []uint64{5}, 5),
	}))
	if err != nil || out.Stored != 10 {
		t.Fatalf("restore: %+v, %v", out, err)
	}
	for _, c := range []struct{ prompt, want []uint64 }{
		{[]uint64{1, 2, 3, 4, 5}, []uint64{5, 2, 1}},
		{[]uint64{1, 2, 8}, []uint64{2, 3, 1}},
		{[]uint64{1, 9}, []uint64{1, 1, 2}},
	} {
		got := make([]int32, 3)
		x.Match(got, c.prompt)
		for w := range got {
			if uint64(got[w]) != c.want[w] {
				t.Errorf("prompt %d: overlaps %d, want %d", c.prompt, got, c.want)
				break
			}
		}
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}

func all(runs []indexer.Run) iter.Seq2[indexer.Run, error] {
	return func(yield func(indexer.Run, error) bool) {
		for _, r := range runs {
			if !yield(r, nil) {
				return
			}
		}
	}
}
