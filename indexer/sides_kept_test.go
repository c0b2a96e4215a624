// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// windows is a shape with equal groups: each needs the last 3 blocks of one token before a boundary.
func windows(full, groups int) *indexer.Shape {
	shape := &indexer.Shape{Block: 1, Full: full}
	for g := range groups {
		shape.Sides = append(shape.Sides, indexer.SideGroup{Group: g, Needs: indexer.NeedsWindow, Block: 1, Tokens: 4})
	}
	return shape
}

// A group that stays as it was keeps the copies of its blocks when the shape changes.
func TestChangedShapesKeepCopies(t *testing.T) {
	for _, size := range []int{1, 4} { // one entry for all groups; entries by group
		x := indexer.New(indexer.Config{})
		ids, local := []uint64{1, 2, 3, 4}, []uint64{71, 72, 73, 74}
		var full []indexer.Block
		for i, id := range ids {
			full = append(full, indexer.Block{External: id, Local: local[i]})
		}
		x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: full})
		for range 3 {
			x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 0, Externals: ids, Shape: windows(size, 1)})
		}
		x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: ids, Shape: windows(size, 2)})
		for copies := 3; copies >= 0; copies-- {
			m, want := indexer.Matches{Device: make([]int32, 1)}, int32(4)
			if copies == 0 {
				want = 0
			}
			if x.FindMatches(&m, local); m.Device[0] != want {
				t.Errorf("full blocks of %d: %d blocks with %d copies, want %d", size, m.Device[0], copies, want)
			}
			x.Apply(0, indexer.Event{Kind: indexer.SideRemoved, Group: 0, Externals: ids})
		}
	}
}

// A change of the shape that gives each group entries of its own keeps as many blocks as there is room for, copies
// included. The index counts these entries.
func TestChangedShapesKeepTheLimit(t *testing.T) {
	const groups, limit = 8, 100
	for name, c := range map[string]struct {
		blocks, copied uint64
		kept           int // entries afterwards
	}{
		"all":                      {11, 12, 8*11 + 11},
		"too many blocks":          {13, 0, limit - 1},
		"too many with the copies": {12, 12, limit - 1},
	} {
		x := indexer.New(indexer.Config{MaxBlocks: limit + 1})
		x.SetSideLimit(limit)
		var ids []uint64
		for id := range c.blocks {
			ids = append(ids, id+1)
		}
		for g := range groups {
			x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: g, Externals: ids, Shape: windows(1, groups)})
		}
		x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 0, Externals: ids[:min(c.copied, c.blocks)], Shape: windows(1, groups)})
		x.Apply(0, indexer.Event{Kind: indexer.Shaped, Shape: windows(4, groups)})
		if n := x.SideBlocks(0); n != c.kept {
			t.Errorf("%s: %d entries, want %d", name, n, c.kept)
		}
		// All workers together have a limit of one more.
		out := x.Apply(1, indexer.Event{Kind: indexer.SideStored, Group: 0, Externals: ids, Shape: windows(1, groups)})
		if want := limit + 1 - c.kept; out.Stored != want {
			t.Errorf("%s: %d blocks of another worker are stored, want %d", name, out.Stored, want)
		}
	}
}

// A block of a side group whose predecessor is the block at an earlier boundary says that the blocks between them are
// missing, although the group has as many blocks behind each other as it needs.
func TestPredecessorsAtBoundaries(t *testing.T) {
	for name, c := range map[string]struct {
		held []uint64
		want int32
	}{
		"all that is needed":             {[]uint64{2, 3, 4, 10, 11, 12}, 12},
		"one is missing":                 {[]uint64{2, 3, 4, 10, 12}, 4},
		"only the one at the boundary":   {[]uint64{2, 3, 4, 6, 7, 8, 12}, 8},
		"the same, two boundaries apart": {[]uint64{2, 3, 4, 12}, 4},
	} {
		x := indexer.New(indexer.Config{})
		var full []indexer.Block
		var local []uint64
		for i := range uint64(12) {
			full, local = append(full, indexer.Block{External: i + 1, Local: i + 71}), append(local, i+71)
		}
		x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: full})
		x.Apply(0, indexer.Event{Kind: indexer.SideStored, Group: 0, Externals: c.held, Shape: windows(4, 1)})
		m := indexer.Matches{Device: make([]int32, 1)}
		if x.FindMatches(&m, local); m.Device[0] != c.want {
			t.Errorf("%s: %d blocks, want %d", name, m.Device[0], c.want)
		}
	}
}
