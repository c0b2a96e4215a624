// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"math/rand/v2"
	"testing"
)

// Children are found as in a map, however they lie, and no change moves more entries
// than a table has.
func TestChildrenEqualAMap(t *testing.T) {
	for name, hash := range map[string]func(rng *rand.Rand) uint64{
		"few":  func(rng *rand.Rand) uint64 { return rng.Uint64N(12) },
		"some": func(rng *rand.Rand) uint64 { return rng.Uint64N(3000) },
		"many": func(rng *rand.Rand) uint64 { return rng.Uint64N(200_000) },
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 11))
			var c children
			all := map[uint64]*node{}
			var moved, changes, deepest int
			for step := range 400_000 {
				local := hash(rng)
				table := tableOf(&c, local)
				before, entries := address(table.slots), table.n
				_, known := all[local]
				switch add := rng.IntN(4) > 0 == (step/100_000%2 == 0); {
				case add && known:
					all[local] = &node{}
					c.replace(local, all[local])
				case add:
					all[local] = &node{}
					c.add(local, all[local])
				case known:
					c.remove(local)
					delete(all, local)
				}
				if got := c.get(local); got != all[local] {
					t.Fatalf("step %d: child %d is %p, want %p", step, local, got, all[local])
				}
				if after := tableOf(&c, local); address(after.slots) != before {
					changes++
					if moved += max(entries, after.n); max(entries, after.n) > maxTable {
						t.Fatalf("step %d: %d entries moved at once", step, max(entries, after.n))
					}
				}
				if c.n != len(all) {
					t.Fatalf("step %d: %d children, want %d", step, c.n, len(all))
				}
				if step%50_000 == 0 {
					seen := 0
					for k := range c.each() {
						if seen++; all[k.local] != k.node {
							t.Fatalf("step %d: child %d is not what was added", step, k.local)
						}
					}
					if seen != len(all) {
						t.Fatalf("step %d: %d children seen, want %d", step, seen, len(all))
					}
					depth, largest := shapeOf(&c)
					if deepest = max(deepest, depth); largest > maxTable {
						t.Fatalf("step %d: a table of %d slots", step, largest)
					}
				}
			}
			if name == "many" && deepest < 2 {
				t.Errorf("the fans are %d deep: too few children to tell", deepest)
			}
			if moved > 4*400_000 {
				t.Errorf("%d entries were moved in %d changes, for 400,000 events", moved, changes)
			}
			for local := range all {
				c.remove(local)
			}
			if c.n != 0 || c.fan != nil || len(c.slots) != 0 || c.bytes() != 0 {
				t.Errorf("%d children, %d slots, %d bytes left after all were removed", c.n, len(c.slots), c.bytes())
			}
		})
	}
}

// tableOf returns the children that have or would have a child themselves.
func tableOf(c *children, local uint64) *children {
	for hash := spread(local); c.fan != nil; hash <<= fanBits {
		c = &c.fan[fanned(hash)]
	}
	return c
}

func address(slots []child) *child {
	if len(slots) == 0 {
		return nil
	}
	return &slots[0]
}

// shapeOf returns how deep the fans are, and the largest table.
func shapeOf(c *children) (depth, largest int) {
	if c.fan == nil {
		return 0, len(c.slots)
	}
	for i := range c.fan {
		d, l := shapeOf(&c.fan[i])
		depth, largest = max(depth, d+1), max(largest, l)
	}
	return depth, largest
}

// Splitting a run leaves its children, of which there may be millions, alone.
func TestSplitLeavesTheChildrenAlone(t *testing.T) {
	x := New(Config{})
	run := []Block{{1, 1}, {2, 2}, {3, 3}, {4, 4}}
	x.Apply(0, Event{Kind: Stored, Blocks: run})
	const children = 5000
	for i := range uint64(children) {
		x.Apply(0, Event{Kind: Stored, HasParent: true, Parent: 4, Blocks: []Block{{100 + i, 100 + i}}})
	}
	n := x.root.kids.get(1)
	first, fan := n.kids.get(100), n.kids.fan
	for i := range uint64(3) { // behind the first block, the second and the third
		x.Apply(0, Event{Kind: Stored, HasParent: true, Parent: 1 + i, Blocks: []Block{{50 + i, 50 + i}}})
	}
	if n.kids.fan != fan || fan == nil || first.parent != n || len(n.local) != 1 || n.kids.n != children {
		t.Errorf("the node has %d blocks and %d children; want the same children behind its last block", len(n.local), n.kids.n)
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
	got := make([]int32, 1)
	if x.Match(got, []uint64{1, 2, 3, 4, 4321}); got[0] != 5 {
		t.Errorf("overlap %d, want 5", got[0])
	}
}
