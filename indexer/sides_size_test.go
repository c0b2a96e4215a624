// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"runtime"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// A side block takes at most 32 bytes of heap memory in the mean of many sizes, and at most 44 right after its map has
// grown. [indexer.Index.Bytes] reports this memory roughly. The index frees the memory of removed blocks. Equal groups
// share the memory of a block. A group whose blocks are shorter than a step has entries of its own.
func TestBytesOfSideBlocks(t *testing.T) {
	if raceSlows > 1 {
		t.Skip("the race detector pads what is allocated")
	}
	t.Run("equal groups", func(t *testing.T) {
		testBytesOfSideBlocks(t, &indexer.Shape{Block: 16, Full: 16, Sides: []indexer.SideGroup{
			{Group: 0, Needs: indexer.NeedsWindow, Block: 16, Tokens: 1024}, {Group: 1, Needs: indexer.NeedsWindow, Block: 16, Tokens: 1024},
		}})
	})
	t.Run("a group of shorter blocks", func(t *testing.T) {
		testBytesOfSideBlocks(t, &indexer.Shape{Block: 16, Full: 64, Sides: []indexer.SideGroup{
			{Group: 0, Needs: indexer.NeedsWindow, Block: 16, Tokens: 1024},
		}})
	})
}

func testBytesOfSideBlocks(t *testing.T, shape *indexer.Shape) {
	sum, own, sizes := 0., 0., 0.
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
				for g := range shape.Sides {
					x.Apply(0, indexer.Event{Kind: kind, Group: g, Externals: ids})
				}
			}
		}
		apply(indexer.SideStored)
		full, got := heap()-before, x.Bytes()
		t.Logf("%d blocks: %.1f bytes each, %.1f by its own account", blocks, float64(full)/float64(blocks), float64(got)/float64(blocks))
		sum, sizes = sum+float64(full)/float64(blocks), sizes+1
		own += float64(got) / float64(blocks)
		if full > 44*blocks {
			t.Errorf("%d blocks: %.1f bytes each, want at most 44", blocks, float64(full)/float64(blocks))
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
	if own < .8*sum || own > 1.2*sum {
		t.Errorf("Bytes() is %.1f for each block in the mean, but the heap has %.1f", own/sizes, sum/sizes)
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

// manySides is an index whose worker 0 has groups of layers with blocks of the given size, with so many blocks each. The
// engine's blocks of full attention have 64 tokens.
func manySides(groups, blocks, size int) *indexer.Index {
	x := indexer.New(indexer.Config{})
	shape := &indexer.Shape{Block: 64, Full: 64}
	for g := range groups {
		shape.Sides = append(shape.Sides, indexer.SideGroup{Group: g, Needs: indexer.NeedsWindow, Block: size, Tokens: 1024})
	}
	ids := make([]uint64, 1000)
	for g := range groups {
		for i := 0; i < blocks; i += len(ids) {
			for j := range ids {
				ids[j] = uint64(i+j+1) * 0x9E3779B97F4A7C15
			}
			x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: g, Shape: shape, Externals: ids})
		}
	}
	return x
}

// The entries for side blocks of a worker have a limit that all its groups share, and those of all workers have another
// one. Prompts that need a refused block do not count as cached. A removed block makes room for others.
func TestSideBlocksAreBounded(t *testing.T) {
	for name, size := range map[string]int{"equal groups": 64, "groups of shorter blocks": 16} {
		x := indexer.New(indexer.Config{MaxBlocks: 250})
		x.SetSideLimit(100)
		shape := &indexer.Shape{Block: 64, Full: 64}
		for g := range 8 {
			shape.Sides = append(shape.Sides, indexer.SideGroup{Group: g, Needs: indexer.NeedsWindow, Block: size, Tokens: 65})
		}
		apply := func(kind indexer.Kind, worker, group int, from, n uint64) indexer.Outcome {
			ev := indexer.Event{Kind: kind, Group: group, Shape: shape}
			for i := range n {
				ev.Externals = append(ev.Externals, from+i)
			}
			return x.Apply(worker, ev)
		}
		refused, total := 0, 0
		for w := range 3 {
			for g := range 8 {
				out := apply(indexer.SideStored, w, g, uint64(1000*g), 30)
				if refused += out.Refused; out.Stored+out.Refused != 30 {
					t.Errorf("%s: %+v of 30 blocks", name, out)
				}
				apply(indexer.SideStored, w, g, uint64(1000*g), 30) // copies need room, too
			}
			if n := x.SideBlocks(w); n > 100 {
				t.Errorf("%s: worker %d has %d entries, want at most 100", name, w, n)
			}
			total += x.SideBlocks(w)
		}
		if total != 250 || refused == 0 {
			t.Errorf("%s: %d entries of all workers, %d blocks refused; want 250, and some", name, total, refused)
		}
		if out := apply(indexer.SideStored, 0, 7, 7029, 1); out.Refused != 1 {
			t.Errorf("%s: %+v at the limit, want a refused block", name, out)
		}
		for range 2 { // the copies leave first
			apply(indexer.SideRemoved, 0, 0, 0, 30)
		}
		if out := apply(indexer.SideStored, 0, 7, 7000, 30); out.Stored+out.Duplicate != 30 {
			t.Errorf("%s: %+v after blocks left, want no refused ones", name, out)
		}
		// Blocks of other sizes: equal groups get entries of their own.
		shape = &indexer.Shape{Block: 64, Full: 512, Sides: shape.Sides}
		apply(indexer.SideStored, 0, 0, 0, 0)
		if n := x.SideBlocks(0); n == 0 || n > 100 {
			t.Errorf("%s: %d entries of another shape, want at most 100", name, n)
		}
		for w := range 3 {
			x.RemoveWorker(w)
		}
		if out := apply(indexer.SideStored, 0, 0, 0, 100); out.Stored != 100 {
			t.Errorf("%s: %+v after all workers left", name, out)
		}
	}
}

// BenchmarkBytesOfSides measures the heap memory for each entry of a worker at the limit of its entries, and that of the
// events of all its side groups, by the entries.
func BenchmarkBytesOfSides(b *testing.B) {
	const limit, copies = 1 << 21, 2
	for name, c := range map[string]struct{ size, groups, stores int }{
		"one group": {64, 1, 1}, "shorter than a step": {16, 1, 1}, "eight groups shorter than a step": {16, 8, 1},
		"copies": {64, 1, copies}, "copies of shorter ones": {16, 1, copies},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				before := heap()
				x := indexer.New(indexer.Config{})
				shape := &indexer.Shape{Block: 64, Full: 64}
				for g := range c.groups {
					shape.Sides = append(shape.Sides, indexer.SideGroup{Group: g, Needs: indexer.NeedsWindow, Block: c.size, Tokens: 1024})
				}
				ids := make([]uint64, 1024)
				for n := 0; n < limit/c.groups/c.stores; n += len(ids) {
					for j := range ids {
						ids[j] = uint64(n+j+1) * 0x9E3779B97F4A7C15
					}
					for g := range c.groups {
						for range c.stores {
							x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: g, Shape: shape, Externals: ids})
						}
					}
				}
				held := heap() - before
				if n := x.SideBlocks(0); n != limit {
					b.Fatalf("%d entries, want %d", n, limit)
				}
				evs := x.Sides(0)
				b.ReportMetric(float64(held)/limit, "B/entry")
				b.ReportMetric(float64(heap()-before-held)/limit, "dumpB/entry")
				b.ReportMetric(float64(held)/1e6, "MB")
				runtime.KeepAlive(x)
				runtime.KeepAlive(evs)
			}
		})
	}
}

// BenchmarkSides measures how long the copy of all side groups delays events.
func BenchmarkSides(b *testing.B) {
	for name, size := range map[string]int{"shorter than a step": 16, "equal": 64} {
		b.Run(name, func(b *testing.B) {
			x := manySides(8, 100_000, size)
			b.ReportAllocs()
			for b.Loop() {
				x.Sides(0)
			}
		})
	}
}
