// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

func heap() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// The index reports the heap memory that it uses, and frees it.
func TestBytesAreTheHeaps(t *testing.T) {
	if raceSlows > 1 {
		t.Skip("the race detector pads what is allocated")
	}
	const workers = 64
	for name, c := range map[string]struct {
		sequences, blocks, batch int
		shared, agree            bool
		holes                    int // number of holes in 10 blocks
		tier                     indexer.Tier
	}{
		"unshared":                             {2000, 128, 32, false, false, 0, 0},
		"unshared, one block a time":           {200, 200, 1, false, false, 0, 0},
		"unshared, short":                      {20_000, 3, 3, false, false, 0, 0},
		"unshared, holes":                      {2000, 128, 32, false, false, 3, 0},
		"unshared, almost nothing left":        {2000, 128, 32, false, false, 9, 0},
		"unshared, on disk":                    {2000, 128, 32, false, false, 0, indexer.Disk},
		"shared, hashes differ":                {40, 128, 32, true, false, 0, 0},
		"shared, hashes differ, holes":         {40, 128, 32, true, false, 3, 0},
		"shared, hashes agree":                 {400, 128, 32, true, true, 0, 0},
		"shared, hashes agree, holes":          {400, 128, 32, true, true, 3, 0},
		"shared, short, hashes agree":          {1000, 5, 5, true, true, 0, 0},
		"shared, hashes agree, in host memory": {100, 128, 32, true, true, 0, indexer.HostPinned},
	} {
		t.Run(name, func(t *testing.T) {
			before := heap()
			x := indexer.New(indexer.Config{})
			rng := rand.New(rand.NewPCG(1, 6))
			var ev indexer.Event
			var gone []uint64
			fill := func(worker int, seed uint64) {
				salt := uint64(worker)
				if c.agree {
					salt = 0
				}
				chain := seed
				for i := 0; i < c.blocks; i += c.batch {
					ev = indexer.Event{Kind: indexer.Stored, HasParent: i > 0, Parent: chain + salt, Tier: c.tier, Blocks: ev.Blocks[:0]}
					for range c.batch {
						chain = indexer.NextSequenceHash(chain, 1)
						ev.Blocks = append(ev.Blocks, indexer.Block{External: chain + salt, Local: chain})
						if rng.IntN(10) < c.holes {
							gone = append(gone, chain+salt)
						}
					}
					x.Apply(worker, ev)
				}
				x.Apply(worker, indexer.Event{Kind: indexer.Removed, Tier: c.tier, Externals: gone})
				gone = gone[:0]
			}
			for n := range c.sequences {
				seed := rng.Uint64()
				if !c.shared {
					fill(n%workers, seed)
					continue
				}
				for w := range workers {
					fill(w, seed)
				}
			}
			full, got := heap()-before, x.Bytes()
			pairs := x.Blocks()
			t.Logf("%d blocks, %.2f bytes each, %.2f by its own account", pairs, float64(full)/float64(pairs), float64(got)/float64(pairs))
			if got*10 < full*9 || got*10 > full*11 {
				t.Errorf("Bytes() is %d, but the heap has %d more", got, full)
			}
			for w := range workers {
				x.RemoveWorker(w)
			}
			if left := heap() - before; left*10 > full {
				t.Errorf("%d of %d bytes left after removing everything", left, full)
			}
			runtime.KeepAlive(x)
		})
	}
}

// An index of predictions does too, also after many of them were removed.
func TestBytesOfGuesses(t *testing.T) {
	if raceSlows > 1 {
		t.Skip("the race detector pads what is allocated")
	}
	for name, c := range map[string]struct{ prompts, shared, own int }{
		"long prompts, nothing shared": {1500, 0, 250},
		"long prompts, half shared":    {3000, 100, 100},
		"short prompts":                {30_000, 2, 2},
		"conversations of many turns":  {3000, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			before := heap()
			a := newApprox(indexer.ApproxConfig{}, make([]int, 16)...)
			var local, sequence []uint64
			for n := range c.prompts {
				local = local[:0]
				for i := range c.shared {
					local = append(local, uint64(n%16)<<32|uint64(i))
				}
				for i := range c.own {
					local = append(local, uint64(n)<<20|uint64(i)<<1|1)
				}
				for i := range n % 20 * 3 * max(0, 1-c.shared-c.own) {
					local = append(local, uint64(n/20)<<20|uint64(i)<<1|1)
				}
				if len(local) == 0 {
					continue
				}
				sequence = indexer.AppendSequenceHashes(sequence[:0], local)
				a.Insert(at(0), n/20%16, 1, sequence)
			}
			full, got := heap()-before, a.Bytes()
			t.Logf("%d blocks, %.1f bytes each, %.1f by its own account", a.Blocks(), float64(full)/float64(a.Blocks()), float64(got)/float64(a.Blocks()))
			if got*10 < full*9 || got*10 > full*11 {
				t.Errorf("Bytes() is %d, but the heap has %d more", got, full)
			}
			a.Expire(at(200))
			if left, got := heap()-before, a.Bytes(); left*10 > full || got*10 > full {
				t.Errorf("%d of %d bytes are left when all have expired, Bytes returns %d", left, full, got)
			}
			runtime.KeepAlive(a)
		})
	}
}
