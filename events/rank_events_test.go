// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
)

// content returns the blocks that a worker holds in an index: a line for each block with its
// sequence hash and its external hash. Two indexes with equal contents give equal results, now and
// after further events.
func content(x *indexer.Index, worker int) []string {
	lines := []string{}
	ends := map[uint32]uint64{}
	for r := range x.Dump() {
		sequence := make([]uint64, len(r.Local))
		last := ends[r.Parent]
		for i, l := range r.Local {
			if r.Parent == 0 && i == 0 {
				last = l
			} else {
				last = indexer.NextSequenceHash(last, l)
			}
			sequence[i] = last
		}
		ends[r.ID] = last
		for _, h := range r.Holders {
			if h.Worker != worker {
				continue
			}
			for i, e := range h.Externals {
				lines = append(lines, fmt.Sprintf("%016x=%x on %d", sequence[h.Start+i], e, h.Tier))
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// fakeCache is a worker's cache that makes valid events at random: chains that grow and branch, on
// all tiers, second names of blocks, copies on lower tiers, removals anywhere, and sometimes a
// clear.
type fakeCache struct {
	rng  *rand.Rand
	next uint64
	held []held
}

type held struct {
	external, local, parent uint64
	tier                    indexer.Tier
}

func (c *fakeCache) event() indexer.Event {
	tier := indexer.Device
	if c.rng.IntN(4) == 0 {
		tier = indexer.Tier(1 + c.rng.IntN(3))
	}
	switch n := c.rng.IntN(20); {
	case n == 0 && c.rng.IntN(4) == 0:
		c.held = nil
		return indexer.Event{Kind: indexer.Cleared}
	case n < 7 && len(c.held) > 0:
		ev := indexer.Event{Kind: indexer.Removed, Tier: c.held[c.rng.IntN(len(c.held))].tier}
		for range 1 + c.rng.IntN(3) {
			if i := c.pick(func(h held) bool { return h.tier == ev.Tier }); i >= 0 {
				ev.Externals = append(ev.Externals, c.held[i].external)
				c.held = slices.Delete(c.held, i, i+1)
			}
		}
		return ev
	case n == 7:
		// Store the same block once more, under another name.
		i := c.pick(func(h held) bool { return h.parent == 0 || c.parent(h.parent, h.tier) })
		if i < 0 {
			break
		}
		h := c.held[i]
		c.next++
		h.external = c.next
		c.held = append(c.held, h)
		return indexer.Event{Kind: indexer.Stored, Tier: h.tier, HasParent: h.parent != 0, Parent: h.parent, Blocks: []indexer.Block{{External: h.external, Local: h.local}}}
	case n == 8 && tier != indexer.Device:
		// Copy a block of the device tier, under its name.
		i := c.pick(func(h held) bool {
			return h.tier == indexer.Device && (h.parent == 0 || c.parent(h.parent, tier)) &&
				!slices.ContainsFunc(c.held, func(o held) bool { return o.external == h.external && o.tier == tier })
		})
		if i < 0 {
			break
		}
		h := c.held[i]
		h.tier = tier
		c.held = append(c.held, h)
		return indexer.Event{Kind: indexer.Stored, Tier: tier, HasParent: h.parent != 0, Parent: h.parent, Blocks: []indexer.Block{{External: h.external, Local: h.local}}}
	}
	ev := indexer.Event{Kind: indexer.Stored, Tier: tier}
	parent := uint64(0)
	if c.rng.IntN(4) > 0 {
		if i := c.pick(func(h held) bool { return h.tier == tier || h.tier == indexer.Device }); i >= 0 {
			parent = c.held[i].external
			ev.Parent, ev.HasParent = parent, true
		}
	}
	for range 1 + c.rng.IntN(6) {
		c.next++
		// Few local hashes, so that chains meet.
		h := held{external: c.next, local: c.rng.Uint64N(3), parent: parent, tier: tier}
		ev.Blocks = append(ev.Blocks, indexer.Block{External: h.external, Local: h.local})
		c.held = append(c.held, h)
		parent = h.external
	}
	return ev
}

// pick returns the index of a held block that fits, or -1.
func (c *fakeCache) pick(fits func(held) bool) int {
	for try := 0; try < 20 && len(c.held) > 0; try++ {
		if i := c.rng.IntN(len(c.held)); fits(c.held[i]) {
			return i
		}
	}
	return -1
}

// parent reports whether a block can be the parent of one on a tier.
func (c *fakeCache) parent(external uint64, tier indexer.Tier) bool {
	return slices.ContainsFunc(c.held, func(h held) bool {
		return h.external == external && (h.tier == tier || h.tier == indexer.Device)
	})
}

// After any sequence of cache changes, the events made of an index build an equal index, and it
// stays equal after later events.
func TestAnIndexIsMadeOfItsEvents(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 2))
		const workers = 3
		caches := make([]*fakeCache, workers)
		for w := range caches {
			caches[w] = &fakeCache{rng: rng}
		}
		x := indexer.New(indexer.Config{})
		for range 150 {
			w := rng.IntN(workers)
			x.Apply(w, caches[w].event())
		}
		for w := range workers {
			y := indexer.New(indexer.Config{})
			evs, err := events.RankEvents(x.Dump(), w)
			if err != nil {
				t.Fatal(err)
			}
			for _, ev := range evs {
				if out := y.Apply(0, ev); out.Orphan+out.Unknown+out.Invalid+out.Conflict > 0 {
					t.Fatalf("seed %d, worker %d: %+v of %+v", seed, w, out, ev)
				}
			}
			if diff := gocmp.Diff(content(x, w), content(y, 0)); diff != "" {
				t.Fatalf("seed %d, worker %d (-want +got):\n%s", seed, w, diff)
			}
			for range 30 {
				ev := caches[w].event()
				a, b := x.Apply(w, ev), y.Apply(0, ev)
				a.Evicted, b.Evicted = 0, 0
				if a != b {
					t.Fatalf("seed %d, worker %d: %+v did %+v to the index and %+v to its copy", seed, w, ev, a, b)
				}
			}
			if diff := gocmp.Diff(content(x, w), content(y, 0)); diff != "" {
				t.Fatalf("seed %d, worker %d, later (-want +got):\n%s", seed, w, diff)
			}
		}
	}
	if got, err := events.RankEvents(indexer.New(indexer.Config{}).Dump(), 0); len(got) > 0 || err != nil {
		t.Errorf("an empty index gave %v, %v", got, err)
	}
}
