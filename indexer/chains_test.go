// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"iter"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/indexer"
)

// Applying the chains of a dump rebuilds the same index, except for blocks behind holes.
// Each chain behind a hole is marked as such.
func TestChainsCanBeApplied(t *testing.T) {
	for i, s := range shapes() {
		if s.lower && s.externals > 0 {
			continue // a hash has different places on different tiers and so is no parent
		}
		s.stores = 94
		rng := rand.New(rand.NewPCG(uint64(i), 8))
		x, m := indexer.New(indexer.Config{}), newModel(s.workers)
		for range 300 {
			w := rng.IntN(s.workers)
			ev := s.event(rng, m, w)
			if ev.Kind == indexer.Removed {
				ev.Externals = ev.Externals[:1] // test more than holes
			}
			x.Apply(w, ev)
			m.apply(w, ev)
		}
		y := indexer.New(indexer.Config{})
		pairs, lost := 0, 0
		for c := range indexer.Chains(dumped(t, x)) {
			pairs += len(c.Event.Blocks)
			if c.Start > 0 && !c.Event.HasParent {
				lost += len(c.Event.Blocks)
				m.forgetAll(c)
				continue
			}
			out := y.Apply(c.Worker, c.Event)
			if out.Stored != len(c.Event.Blocks) && out.Orphan != len(c.Event.Blocks) {
				t.Fatalf("shape %d: %+v: %+v, want all stored", i, c, out)
			}
			if out.Orphan > 0 { // behind a chain that is behind a hole
				lost += len(c.Event.Blocks)
				m.forgetAll(c)
			}
		}
		want := 0
		for o := range m.owners {
			want += len(m.owners[o].held)
		}
		if pairs != want+lost {
			t.Fatalf("shape %d: %d external hashes in the chains, want %d", i, pairs, want+lost)
		}
		if 2*lost > pairs {
			t.Errorf("shape %d: %d of %d external hashes behind holes: too many for a test", i, lost, pairs)
		}
		if err := y.Check(); err != nil {
			t.Fatal(err)
		}
		for range 100 {
			if err := equal(y, m, s.prompt(rng, m)); err != nil {
				t.Fatalf("shape %d: %v", i, err)
			}
		}
	}
}

// dumped returns a dump during which the index does not change.
func dumped(t *testing.T, x *indexer.Index) iter.Seq[indexer.Run] {
	return func(yield func(indexer.Run) bool) {
		for r, err := range x.Dump() {
			if err != nil {
				t.Error(err)
			}
			if err != nil || !yield(r) {
				return
			}
		}
	}
}

// forgetAll removes the blocks of a chain from the model.
func (m *model) forgetAll(c indexer.Chain) {
	for _, b := range c.Event.Blocks {
		m.owner(c.Worker, c.Event.Tier).remove(b.External)
	}
}

func TestChainsSayWhereTheyBegin(t *testing.T) {
	x := indexer.New(indexer.Config{})
	for _, ev := range []indexer.Event{
		line(1, indexer.Device, 1, 4),
		line(1, indexer.HostPinned, 3, 6),
		{Kind: indexer.Removed, Externals: []uint64{102}},
	} {
		x.Apply(1, ev)
	}
	block := func(n ...uint64) (out []indexer.Block) {
		for _, n := range n {
			out = append(out, indexer.Block{External: n + 100, Local: n})
		}
		return out
	}
	var got []indexer.Chain
	for c := range indexer.Chains(dumped(t, x)) {
		c.Event.Blocks = slices.Clone(c.Event.Blocks)
		got = append(got, c)
	}
	for i, want := range []indexer.Chain{
		{Worker: 1, Event: indexer.Event{Kind: indexer.Stored, Blocks: block(1)}},
		{Worker: 1, Start: 2, Event: indexer.Event{Kind: indexer.Stored, Blocks: block(3, 4)}},
		{Worker: 1, Start: 2, Event: indexer.Event{Kind: indexer.Stored, Tier: indexer.HostPinned, Blocks: block(3, 4)}},
		{Worker: 1, Start: 4, Event: indexer.Event{Kind: indexer.Stored, Tier: indexer.HostPinned, HasParent: true, Parent: 104, Blocks: block(5, 6)}},
	} {
		if i >= len(got) {
			t.Fatalf("%d chains, want chain %d: %+v", len(got), i, want)
		}
		if diff := cmp.Diff(want, got[i]); diff != "" {
			t.Errorf("chain %d (-want +got):\n%s", i, diff)
		}
	}
}
