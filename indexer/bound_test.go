// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// forget removes from the model the blocks that the index dropped. It returns an error if
// these are not ends of chains, or not as many as the index counted.
func forget(x *indexer.Index, m *model, evicted int) error {
	before := m.pairs()
	for o, got := range held(x, m.workers) {
		owner := &m.owners[o]
		gone := map[uint64]bool{} // chains
		for _, e := range slices.Collect(maps.Keys(owner.held)) {
			if _, ok := slices.BinarySearch(got, e); !ok {
				gone[owner.held[e]] = true
				owner.remove(e)
			}
		}
		for chain := range owner.chains {
			for c := chain; c != 0; c = m.before[c][0] {
				if gone[c] {
					return fmt.Errorf("owner %d has lost block %d of a chain, and holds one behind it, %d", o, c, chain)
				}
			}
		}
	}
	if lost := before - m.pairs(); lost != evicted {
		return fmt.Errorf("%d blocks were removed, and %d were counted", lost, evicted)
	}
	return nil
}

// At a bound the dropped blocks are counted, and are always ends of chains.
func TestBoundForgetsTailsOnly(t *testing.T) {
	for name, c := range map[string]struct {
		shape
		bound, limit int
	}{
		"of all":               {shape{workers: 5, locals: 2, batch: 40, stores: 80}, 400, 0},
		"of all, lower tiers":  {shape{workers: 5, locals: 2, batch: 40, stores: 80, lower: true}, 400, 0},
		"of each":              {shape{workers: 5, locals: 2, batch: 40, stores: 80}, 0, 150},
		"of each, some hashes": {shape{workers: 5, locals: 2, externals: 300, batch: 20, stores: 80}, 0, 100},
		"both":                 {shape{workers: 9, locals: 2, batch: 40, stores: 80, lower: true}, 500, 100},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(1, 5))
			x, m := indexer.New(indexer.Config{MaxBlocks: c.bound}), newModel(c.workers)
			for w := range c.workers {
				x.SetLimit(w, c.limit)
			}
			evicted, refused := 0, 0
			steps := 10_000 / raceSlows
			if testing.Short() {
				steps = 1000
			}
			for step := range steps {
				w := rng.IntN(c.workers)
				ev := c.event(rng, m, w)
				out := x.Apply(w, ev)
				if out.Refused > 0 { // neither the stored blocks nor the run before them are dropped
					refused++
					ev.Blocks = ev.Blocks[:len(ev.Blocks)-out.Refused]
				}
				if out.Evicted > 0 { // as before the event was stored
					evicted += out.Evicted
					if err := forget(x, m, out.Evicted); err != nil {
						t.Fatalf("step %d: %v", step, err)
					}
					if err := x.Check(); err != nil {
						t.Fatalf("step %d: %v", step, err)
					}
				}
				want := m.apply(w, ev)
				want.Evicted, want.Refused = out.Evicted, out.Refused
				if out != want {
					t.Fatalf("step %d: outcome %+v, want %+v", step, out, want)
				}
				if x.Blocks() != m.pairs() || c.bound > 0 && x.Blocks() > c.bound {
					t.Fatalf("step %d: %d blocks, want %d and at most %d", step, x.Blocks(), m.pairs(), c.bound)
				}
				if n := len(m.owner(w, indexer.Device).held); c.limit > 0 && n > c.limit || x.WorkerBlocks(w) != m.held(w) {
					t.Fatalf("step %d: %d blocks of worker %d, at most %d on the device, want %d", step, x.WorkerBlocks(w), w, c.limit, m.held(w))
				}
				if err := equal(x, m, c.prompt(rng, m)); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
			}
			if refused > evicted/100 {
				t.Errorf("%d events refused, %d blocks evicted: both should be rare", refused, evicted)
			}
			if evicted < steps/10 {
				t.Errorf("%d blocks evicted: the bound was hardly reached", evicted)
			}
		})
	}
}

func TestLeastRecentlyMatchedGoesFirst(t *testing.T) {
	x := indexer.New(indexer.Config{MaxBlocks: 9})
	store := func(chain uint64) indexer.Outcome {
		return x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{
			{External: chain, Local: chain}, {External: chain + 1, Local: 1}, {External: chain + 2, Local: 2},
		}})
	}
	overlap := func(chain uint64) int32 {
		dst := make([]int32, 1)
		x.Match(dst, []uint64{chain, 1, 2})
		return dst[0]
	}
	for _, chain := range []uint64{10, 20, 30} {
		store(chain)
	}
	overlap(10)
	if out := store(40); out.Evicted != 3 || out.Stored != 3 {
		t.Fatalf("outcome %+v, want 3 evicted and stored", out)
	}
	if got := []int32{overlap(30), overlap(20), overlap(40), overlap(10)}; !slices.Equal(got, []int32{3, 0, 3, 3}) {
		t.Fatalf("overlaps %d, want all but that of chain 20", got)
	}
	// Chain 30 was matched first, so it loses its tail.
	x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 50, Local: 50}}})
	if got := []int32{overlap(30), overlap(40), overlap(10), overlap(50)}; !slices.Equal(got, []int32{2, 3, 3, 3 - 2}) {
		t.Fatalf("overlaps %d, want chain 30 to have lost its end", got)
	}
}

// Each worker has its own limit. The index drops the blocks that were matched or stored
// least recently, and reports which workers lost blocks to a bound.
func TestWorkerLimitForgetsItsOwn(t *testing.T) {
	x := indexer.New(indexer.Config{})
	store := func(worker int, chain uint64) indexer.Outcome {
		return x.Apply(worker, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{
			{External: chain, Local: chain}, {External: chain + 1, Local: 1}, {External: chain + 2, Local: 2},
		}})
	}
	overlaps := func(chain uint64) [2]int32 {
		dst := make([]int32, 2)
		x.Match(dst, []uint64{chain, 1, 2})
		return [2]int32(dst)
	}
	x.SetLimit(0, 9)
	for _, chain := range []uint64{10, 20, 30} {
		store(0, chain)
		store(1, chain)
	}
	overlaps(10)
	if x.Truncated(0) {
		t.Error("worker 0 counts as truncated, and has lost nothing")
	}
	if out := store(0, 40); out.Evicted != 3 || out.Stored != 3 {
		t.Errorf("outcome %+v, want 3 evicted and stored", out)
	}
	for chain, want := range map[uint64][2]int32{10: {3, 3}, 20: {0, 3}, 30: {3, 3}, 40: {3, 0}} {
		if got := overlaps(chain); got != want {
			t.Errorf("chain %d: overlaps %d, want %d", chain, got, want)
		}
	}
	if !x.Truncated(0) || x.Truncated(1) {
		t.Errorf("truncated: %v and %v, want worker 0 alone", x.Truncated(0), x.Truncated(1))
	}
	x.SetLimit(0, 2)
	if n := x.WorkerBlocks(0); n > 2 || x.WorkerBlocks(1) != 9 {
		t.Errorf("%d blocks of worker 0, want at most 2; %d of worker 1, want 9", n, x.WorkerBlocks(1))
	}
	if out := store(0, 50); out.Stored != 2 || out.Refused != 1 {
		t.Errorf("outcome %+v of more blocks than the limit, want 2 stored, 1 refused", out)
	}
	x.Apply(0, indexer.Event{Kind: indexer.Cleared})
	if x.Truncated(0) {
		t.Error("worker 0 counts as truncated after it was cleared")
	}
	if out := store(0, 60); out.Stored != 2 {
		t.Errorf("outcome %+v, want the limit to hold after the worker was cleared", out)
	}
	x.RemoveWorker(0)
	if out := store(0, 70); out.Stored != 3 {
		t.Errorf("outcome %+v, want no limit after the worker was removed", out)
	}
}
