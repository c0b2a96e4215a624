// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"maps"
	"math/rand/v2"
	"testing"
)

// Any number of children agrees with a map.
func TestChildrenEqualAMap(t *testing.T) {
	for name, hash := range map[string]func(rng *rand.Rand) uint64{
		"few":  func(rng *rand.Rand) uint64 { return rng.Uint64N(12) },
		"some": func(rng *rand.Rand) uint64 { return rng.Uint64N(3000) },
		"many": func(rng *rand.Rand) uint64 { return rng.Uint64N(200_000) },
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 11))
			var c children[node]
			all := map[uint64]*node{}
			for step := range 400_000 {
				local := hash(rng)
				_, known := all[local]
				switch add := rng.IntN(4) > 0 == (step/100_000%2 == 0); {
				case add:
					all[local] = &node{}
					c.set(local, all[local])
				case known:
					c.remove(local)
					delete(all, local)
				}
				if got := c.get(local); got != all[local] {
					t.Fatalf("step %d: child %d is %p, want %p", step, local, got, all[local])
				}
				if c.len() != len(all) {
					t.Fatalf("step %d: %d children, want %d", step, c.len(), len(all))
				}
				if step%50_000 == 0 {
					if got := maps.Collect(c.each()); !maps.Equal(got, all) {
						t.Fatalf("step %d: the children are not what was added", step)
					}
				}
			}
			for local := range all {
				c.remove(local)
			}
			if c.len() != 0 || c.many != nil || c.bytes() != 0 {
				t.Errorf("%d children, %d bytes left after all were removed", c.len(), c.bytes())
			}
		})
	}
}

// Splitting a run does not touch its children: there may be millions.
func TestSplitLeavesTheChildrenAlone(t *testing.T) {
	x := New(Config{})
	run := []Block{{1, 1}, {2, 2}, {3, 3}, {4, 4}}
	x.Apply(0, Event{Kind: Stored, Blocks: run})
	const children = 5000
	for i := range uint64(children) {
		x.Apply(0, Event{Kind: Stored, HasParent: true, Parent: 4, Blocks: []Block{{100 + i, 100 + i}}})
	}
	n := x.root.kids.get(1)
	first := n.kids.get(100)
	for i := range uint64(3) { // behind the first, second and third block
		x.Apply(0, Event{Kind: Stored, HasParent: true, Parent: 1 + i, Blocks: []Block{{50 + i, 50 + i}}})
	}
	if first.parent != n || len(n.local) != 1 || n.kids.len() != children {
		t.Errorf("the node has %d blocks and %d children; want the same children behind its last block", len(n.local), n.kids.len())
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
	got := make([]int32, 1)
	if x.Match(got, []uint64{1, 2, 3, 4, 4321}); got[0] != 5 {
		t.Errorf("overlap %d, want 5", got[0])
	}
}
