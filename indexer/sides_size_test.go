// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"runtime"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// A side block takes at most 32 bytes of heap memory in the mean of many sizes, and at most 40 after the map has
// grown. The index reports them roughly. Removed ones are freed.
func TestBytesOfSideBlocks(t *testing.T) {
	if raceSlows > 1 {
		t.Skip("the race detector pads what is allocated")
	}
	shape := &indexer.Shape{Block: 16, Full: 16, Sides: []indexer.SideGroup{
		{Group: 0, Needs: indexer.NeedsWindow, Block: 16, Tokens: 1024}, {Group: 1, Needs: indexer.NeedsWindow, Block: 16, Tokens: 1024},
	}}
	sum, sizes := 0., 0.
	for blocks := 50_000; blocks < 100_000; blocks += 5000 { // the map's fill repeats with each doubling
		before := heap()
		x := indexer.New(indexer.Config{})
		x.Apply(0, indexer.Event{Kind: indexer.Shaped, Shape: shape})
		apply := func(kind indexer.Kind) {
			ids := make([]uint64, 1000)
			for i := 0; i < blocks; i += len(ids) {
				for j := range ids {
					ids[j] = uint64(i+j+1) * 0x9E3779B97F4A7C15
				}
				for g := range 2 { // the groups share the block's entry
					x.Apply(0, indexer.Event{Kind: kind, Group: g, Externals: ids})
				}
			}
		}
		apply(indexer.SideStored)
		full, got := heap()-before, x.Bytes()
		t.Logf("%d blocks: %.1f bytes each, %.1f by its own account", blocks, float64(full)/float64(blocks), float64(got)/float64(blocks))
		sum, sizes = sum+float64(full)/float64(blocks), sizes+1
		if full > 40*blocks {
			t.Errorf("%d blocks: %.1f bytes each, want at most 40", blocks, float64(full)/float64(blocks))
		}
		if got*10 < full*7 || got*10 > full*13 {
			t.Errorf("Bytes() is %d, but the heap has %d more", got, full)
		}
		apply(indexer.SideRemoved)
		if x.SideBlocks(0) != 0 {
			t.Errorf("%d blocks are left", x.SideBlocks(0))
		}
		x.RemoveWorker(0)
		if left := heap() - before; left*10 > full {
			t.Errorf("%d of %d bytes left after removing the worker", left, full)
		}
		runtime.KeepAlive(x)
	}
	if mean := sum / sizes; mean > 32 {
		t.Errorf("%.1f bytes for each block in the mean, want at most 32", mean)
	} else {
		t.Logf("%.1f bytes for each block in the mean", mean)
	}
}

// Plain models pay nothing for hybrid ones: beside a hybrid worker, too, an event of a plain one allocates nothing
// more, and a match allocates nothing.
func TestPlainModelsPayNothing(t *testing.T) {
	chain := make([]indexer.Block, 64)
	local := make([]uint64, len(chain))
	ids := make([]uint64, len(chain))
	for i := range chain {
		h := uint64(i+1) * 0x9E3779B97F4A7C15
		chain[i], local[i], ids[i] = indexer.Block{External: h, Local: h ^ 77}, h^77, h
	}
	var allocs [2]float64
	for i, hybrid := range []bool{false, true} {
		x := indexer.New(indexer.Config{})
		if hybrid {
			x.Apply(1, indexer.Event{Kind: indexer.Shaped, Shape: &indexer.Shape{Block: 16, Full: 64}})
		}
		x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: chain})
		if x.AnyHybrid() != hybrid || x.Hybrid(0) || x.Boundaries(0) != (indexer.Boundaries{Step: 1}) {
			t.Errorf("a plain worker is hybrid: %v, %+v", x.Hybrid(0), x.Boundaries(0))
		}
		m := indexer.Matches{Device: make([]int32, 2), Tokens: 16*len(chain) + 1}
		if n := testing.AllocsPerRun(1000, func() { x.FindMatches(&m, local) }); n != 0 || m.Device[0] != int32(len(chain)) {
			t.Errorf("hybrid %v: %v allocations for a match of %v", hybrid, n, m.Device)
		}
		allocs[i] = testing.AllocsPerRun(1000, func() {
			x.Apply(0, indexer.Event{Kind: indexer.Removed, Externals: ids})
			x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: chain})
		})
	}
	if allocs[0] != allocs[1] {
		t.Errorf("%v allocations for two events, %v beside a hybrid worker", allocs[0], allocs[1])
	}
	t.Logf("%v allocations for two events", allocs[0])
}
