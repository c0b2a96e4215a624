// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// fuzzed reads operations from a fuzzer's bytes. After the last byte it reads zeros.
type fuzzed struct{ rest []byte }

func (f *fuzzed) byte() byte {
	if len(f.rest) == 0 {
		return 0
	}
	b := f.rest[0]
	f.rest = f.rest[1:]
	return b
}

// less returns a number below n.
func (f *fuzzed) less(n int) int { return int(f.byte()) % n }

const (
	fuzzWorkers = 4
	fuzzLocals  = 3
)

// external returns one of few hashes, so that events interact. Hashes from 200 on follow
// from the block's place, as for engines that agree.
func (f *fuzzed) external(m *model, before uint64, local uint64) uint64 {
	b := uint64(f.byte())
	if b < 200 {
		return b % 24
	}
	return indexer.NextSequenceHash(m.chain(before, local), b%2)
}

// stored returns an event of up to 80 blocks, more than fit into a node.
func (f *fuzzed) stored(m *model, worker int) indexer.Event {
	shape := f.byte()
	ev := indexer.Event{Kind: indexer.Stored, HasParent: shape&1 != 0, Tier: indexer.Tier(max(0, int(shape>>1&7)-4))}
	chain := uint64(0)
	if ev.HasParent {
		if ev.Parent = uint64(f.byte()) % 24; shape&16 != 0 {
			ev.Parent = f.heldHash(m, worker, ev.Tier)
		}
		chain, _ = m.parent(worker, ev.Tier, ev.Parent)
	}
	n := 1 + f.less(8)
	if shape&32 != 0 {
		n *= 10
	}
	for range n {
		b := indexer.Block{Local: uint64(f.less(fuzzLocals))}
		b.External = f.external(m, chain, b.Local)
		chain = m.chain(chain, b.Local)
		ev.Blocks = append(ev.Blocks, b)
	}
	return ev
}

// heldHash returns an external hash that the owner has, if it has any.
func (f *fuzzed) heldHash(m *model, worker int, t indexer.Tier) uint64 {
	held := slices.Sorted(maps.Keys(m.owner(worker, t).held))
	if len(held) == 0 {
		return 0
	}
	return held[f.less(len(held))]
}

func (f *fuzzed) removed(m *model, worker int) indexer.Event {
	shape := f.byte()
	ev := indexer.Event{Kind: indexer.Removed, Tier: indexer.Tier(max(0, int(shape>>1&7)-4))}
	for range 1 + int(shape>>4) {
		if shape&1 != 0 {
			ev.Externals = append(ev.Externals, uint64(f.byte())%24)
		} else {
			ev.Externals = append(ev.Externals, f.heldHash(m, worker, ev.Tier))
		}
	}
	return ev
}

// FuzzIndex turns bytes into operations on an index and on the slow model. Both must
// agree on each event's outcome and on every query. A dump may be read during later
// operations and shows the moment of its begin.
func FuzzIndex(f *testing.F) {
	for _, seed := range [][]byte{
		// A chain, continued by its parent's hash, cut in the middle and restored.
		{0, 0, 0, 4, 0, 1, 1, 2, 2, 3, 0, 4, 0, 0, 17, 0, 2, 0, 5, 1, 6, 2, 7, 3, 0, 33, 2, 3, 5, 0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 0, 2, 0, 5, 3, 0, 1, 2},
		// Engines that agree hold the same long run; one removes a part, then the index
		// is dumped.
		{0, 0, 32, 7, 0, 200, 1, 200, 0, 200, 0, 0, 32, 7, 0, 200, 1, 200, 0, 200, 3, 1, 64, 1, 2, 3, 4, 6, 5, 3, 0, 1, 0},
		// Tiers: a parent on the device, blocks in host memory and on disk behind it.
		{0, 2, 0, 2, 0, 1, 1, 2, 2, 3, 0, 2, 11, 3, 1, 0, 4, 0, 2, 13, 4, 1, 1, 5, 5, 4, 0, 1, 2, 0, 1, 4, 2, 6},
		// A dump begins, all contents change, then the dump is read.
		{0, 0, 32, 7, 0, 1, 1, 2, 0, 3, 0, 1, 0, 7, 0, 1, 1, 2, 0, 3, 7, 4, 0, 0, 1, 0, 3, 1, 9, 4, 1, 7, 5, 2, 0, 1},
		// A worker with two ranks is removed, and its number is used again.
		{0, 0, 0, 3, 0, 1, 1, 2, 2, 3, 0, 1, 0, 3, 0, 1, 1, 2, 2, 3, 5, 0, 0, 0, 0, 1, 1, 9, 5, 2, 1, 1, 6, 8, 0},
		// Two hashes of one block; a hash for another place; a duplicate; a block that is
		// its own parent.
		{0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 3, 0, 16, 1, 5, 2, 0, 0},
	} {
		f.Add(seed)
	}
	for seed := range uint64(24) { // random operations
		rng := rand.New(rand.NewPCG(seed, 11))
		data := make([]byte, 1<<10)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<11 {
			return // limited, as the model is slow
		}
		x, m := indexer.New(indexer.Config{}), newModel(fuzzWorkers)
		in := fuzzed{data}
		var runs iter.Seq2[indexer.Run, error] // runs of a dump that has begun
		var stop func()
		var then content
		end := func() {
			if runs == nil {
				return
			}
			got, err := contentOf(runs, fuzzWorkers)
			if stop(); err != nil || !slices.EqualFunc(got, then, maps.Equal) {
				t.Fatalf("a dump: %v\ngot  %v\nwant %v", err, got, then)
			}
			runs = nil
		}
		defer func() {
			if runs != nil {
				stop()
			}
		}()
		apply := func(worker int, ev indexer.Event) {
			if got, want := x.Apply(worker, ev), m.apply(worker, ev); got != want {
				t.Fatalf("worker %d, %+v: %+v, want %+v", worker, ev, got, want)
			}
		}
		for len(in.rest) > 0 {
			switch op := in.less(10); op {
			case 0, 1, 2:
				worker := in.less(fuzzWorkers)
				apply(worker, in.stored(m, worker))
			case 3:
				worker := in.less(fuzzWorkers)
				apply(worker, in.removed(m, worker))
			case 4: // a rank is removed or cleared
				worker := in.less(fuzzWorkers)
				if in.byte()%2 == 0 {
					x.RemoveWorker(worker)
					m.apply(worker, indexer.Event{Kind: indexer.Cleared})
				} else {
					apply(worker, indexer.Event{Kind: indexer.Cleared})
				}
			case 5: // match a prompt
				var prompt []uint64
				if b := in.byte(); b%2 == 0 {
					o := &m.owners[int(b/2)%len(m.owners)]
					if held := slices.Sorted(maps.Keys(o.held)); len(held) > 0 {
						prompt = m.locals(o.held[held[in.less(len(held))]])
					}
				}
				for range in.less(6) {
					prompt = append(prompt, uint64(in.less(fuzzLocals)))
				}
				if err := equal(x, m, prompt); err != nil {
					t.Fatal(err)
				}
			case 6: // a worker is removed with its two ranks
				first := in.less(fuzzWorkers / 2)
				for worker := 2 * first; worker < 2*first+2; worker++ {
					x.RemoveWorker(worker)
					m.apply(worker, indexer.Event{Kind: indexer.Cleared})
				}
			case 7: // begin a dump
				end()
				runs, stop = x.DumpNow()
				then = m.content()
			case 8: // read the dump
				end()
			case 9: // continue with an index restored from a dump
				end()
				y, out, err := indexer.Restore(indexer.Config{}, x.Dump())
				if err != nil || out.Conflict > 0 || out.Refused > 0 {
					t.Fatalf("restored: %+v, %v", out, err)
				}
				x = y
			}
			if err := x.Check(); err != nil {
				t.Fatal(err)
			}
			if x.Blocks() != m.pairs() {
				t.Fatalf("%d blocks, want %d", x.Blocks(), m.pairs())
			}
		}
		end()
		if got, err := contentOf(x.Dump(), fuzzWorkers); err != nil || !slices.EqualFunc(got, m.content(), maps.Equal) {
			t.Fatalf("in the end: %v\ngot  %v\nwant %v", err, got, m.content())
		}
		emptied(t, x, fuzzWorkers)
	})
}
