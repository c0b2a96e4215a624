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

// The index knows what it takes of the heap, and gives it back.
func TestBytesAreTheHeaps(t *testing.T) {
	if raceSlows > 1 {
		t.Skip("the race detector pads what is allocated")
	}
	const workers = 64
	for name, c := range map[string]struct {
		sequences, blocks, batch int
		shared, agree            bool
		holes                    int // of 10 blocks
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
