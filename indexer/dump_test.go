// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// content holds each owner's blocks: by owner as in a model, from external hashes to the
// sequence hashes of their places.
type content []map[uint64]uint64

func (m *model) content() content {
	c := make(content, len(m.owners))
	for i := range m.owners {
		c[i] = make(map[uint64]uint64, len(m.owners[i].held))
		for external, chain := range m.owners[i].held {
			c[i][external] = m.sequence(chain)
		}
	}
	return c
}

// contentOf returns the content of a dump. It checks every field of a run.
func contentOf(runs iter.Seq2[indexer.Run, error], workers int) (content, error) {
	c := make(content, workers*modelTiers)
	for i := range c {
		c[i] = map[uint64]uint64{}
	}
	type end struct {
		sequence uint64
		depth    int
		held     map[int][]uint64 // by owner: external hashes of the run's last block
	}
	ends := []end{{}}
	for r, err := range runs {
		if err != nil {
			return nil, err
		}
		if int(r.ID) != len(ends) || int(r.Parent) >= len(ends) || r.Depth != ends[r.Parent].depth {
			return nil, fmt.Errorf("run %d of depth %d behind run %d, want run %d", r.ID, r.Depth, r.Parent, len(ends))
		}
		before := ends[r.Parent]
		is := end{before.sequence, r.Depth + len(r.Local), map[int][]uint64{}}
		for i, l := range r.Local {
			if is.sequence = indexer.NextSequenceHash(is.sequence, l); r.Depth+i == 0 {
				is.sequence = l
			}
			for _, h := range r.Holders {
				at := i - h.Start
				if at < 0 || at >= len(h.Externals) {
					continue
				}
				o := int(h.Tier)*workers + h.Worker
				c[o][h.Externals[at]] = is.sequence
				if i == len(r.Local)-1 {
					is.held[o] = append(is.held[o], h.Externals[at])
				}
			}
		}
		for _, h := range r.Holders {
			may := before.held[int(h.Tier)*workers+h.Worker]
			for t := range indexer.Tier(modelTiers) {
				if h.Tier != indexer.Device && len(may) == 0 {
					may = before.held[int(t)*workers+h.Worker]
				}
			}
			if h.Start == 0 && (h.HasParent != (len(may) > 0) || h.HasParent && !slices.Contains(may, h.Parent)) {
				return nil, fmt.Errorf("run %d behind %d: %+v, but the block before is held as %d", r.ID, r.Parent, h, may)
			}
		}
		ends = append(ends, is)
	}
	return c, nil
}

// print returns a checksum of a worker's blocks.
func (c content) print(worker, workers int) (sum uint64) {
	for o := worker; o < len(c); o += workers {
		for external, sequence := range c[o] {
			sum += indexer.NextSequenceHash(external+uint64(o)<<40, sequence)
		}
	}
	return sum
}

// sequence returns the sequence hash of a chain.
func (m *model) sequence(chain uint64) (sequence uint64) {
	for i, l := range m.locals(chain) {
		if sequence = indexer.NextSequenceHash(sequence, l); i == 0 {
			sequence = l
		}
	}
	return sequence
}

// Writers of all workers continue while dumps are taken. For each worker a dump contains
// the complete state after one of the events between the dump's begin and end, and names
// the correct holders of the block before each run.
func TestADumpIsOfOneMomentOfEachWorker(t *testing.T) {
	s := shape{workers: 4, locals: 3, batch: 20, stores: 55, lower: true}
	const events, dumps = 600, 25
	x := indexer.New(indexer.Config{})
	prints := make([][]uint64, s.workers)       // of each worker, after each number of events
	begun := make([]atomic.Int64, s.workers)    // events begun
	ended := make([]atomic.Int64, s.workers)    // events ended
	type taken struct{ from, to, got []uint64 } // all by worker
	var all []taken
	var writers sync.WaitGroup
	// Each writer continues until there are enough dumps.
	turn := make(chan struct{})
	for w := range s.workers {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 21))
			m := newModel(s.workers)
			prints[w] = append(prints[w], 0)
			for n := range events {
				if n%(events/dumps) == 0 {
					<-turn
				}
				ev := s.event(rng, m, w)
				m.apply(w, ev)
				prints[w] = append(prints[w], m.content().print(w, s.workers))
				begun[w].Add(1)
				x.Apply(w, ev)
				ended[w].Add(1)
			}
		})
	}
	for range dumps {
		for range s.workers {
			turn <- struct{}{}
		}
		d := taken{make([]uint64, s.workers), make([]uint64, s.workers), make([]uint64, s.workers)}
		for w := range d.from {
			d.from[w] = uint64(ended[w].Load())
		}
		c, err := contentOf(slowly(x.Dump()), s.workers)
		if err != nil {
			t.Fatal(err)
		}
		for w := range d.got {
			d.got[w] = c.print(w, s.workers)
		}
		for w := range d.to {
			d.to[w] = uint64(begun[w].Load())
		}
		all = append(all, d)
	}
	writers.Wait()
	between := 0
	for n, d := range all {
		for w := range s.workers {
			found := false
			for at := d.from[w]; at <= d.to[w]; at++ {
				found = found || prints[w][at] == d.got[w]
			}
			if between += int(d.to[w] - d.from[w]); !found {
				t.Errorf("dump %d: worker %d does not have its state after any event from %d to %d", n, w, d.from[w], d.to[w])
			}
		}
	}
	if between == 0 {
		t.Error("nothing happened during the dumps")
	}
}

// Bounds drop blocks of any worker while a dump is read. The dump then shows the index as
// it was at its begin, or returns an error.
func TestADumpIsOfItsBeginWhateverBoundsTake(t *testing.T) {
	whole, overtaken, seeds := 0, 0, inLong(8, 4)
	for seed := range uint64(seeds) {
		for i, s := range shapes() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			most := 50 + rng.IntN(3000)
			x := indexer.New(indexer.Config{MaxBlocks: most, DumpWords: 1 << (11 + rng.IntN(10))})
			m := newModel(s.workers)
			change := func() {
				w := rng.IntN(s.workers)
				switch rng.IntN(60) {
				case 0:
					x.RemoveWorker(w)
				case 1:
					x.SetLimit(w, rng.IntN(most))
				case 2:
					x.SetLimit(w, 0)
				case 3:
					x.Match(make([]int32, s.workers), s.prompt(rng, m))
				default:
					ev := s.event(rng, m, w)
					m.apply(w, ev)
					x.Apply(w, ev)
				}
			}
			for range 3 {
				for range 150 {
					change()
				}
				want, err := contentOf(x.Dump(), s.workers)
				if err != nil {
					t.Fatal(err)
				}
				runs, stop := x.DumpNow()
				often := rng.IntN(12)
				got, err := contentOf(func(yield func(indexer.Run, error) bool) {
					for r, err := range runs {
						for range often {
							change()
						}
						if !yield(r, err) {
							return
						}
					}
				}, s.workers)
				stop()
				if errors.Is(err, indexer.ErrOvertaken) {
					overtaken++
					continue
				}
				if err != nil {
					t.Fatalf("seed %d, shape %d: %v", seed, i, err)
				}
				whole++
				for o := range want {
					if !maps.Equal(got[o], want[o]) {
						t.Fatalf("seed %d, shape %d: owner %d holds %d blocks, want the %d of the begin", seed, i, o, len(got[o]), len(want[o]))
					}
				}
				if err := x.Check(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if whole < 25*seeds || overtaken == 0 {
		t.Errorf("%d dumps were whole, %d overtaken", whole, overtaken)
	}
}

// slowly yields the processor between two runs.
func slowly(runs iter.Seq2[indexer.Run, error]) iter.Seq2[indexer.Run, error] {
	return func(yield func(indexer.Run, error) bool) {
		for r, err := range runs {
			if runtime.Gosched(); !yield(r, err) {
				return
			}
		}
	}
}

// filled returns an index of sequences of 40 blocks, each held by four workers, with
// branches and holes.
func filled(sequences int, c indexer.Config) *indexer.Index {
	x := indexer.New(c)
	for n := range sequences {
		for w := range 4 {
			ev := indexer.Event{Kind: indexer.Stored}
			for i := range uint64(40) {
				local := i
				if i > 20 {
					local += uint64(n) << 8
				}
				ev.Blocks = append(ev.Blocks, indexer.Block{External: uint64(n)<<20 | i<<8 | uint64(w), Local: local + uint64(n/16)<<32})
			}
			x.Apply(w, ev)
			x.Apply(w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{ev.Blocks[30].External}})
		}
	}
	return x
}

// allocated returns the number of bytes allocated while f runs.
func allocated(f func()) int {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int(after.TotalAlloc - before.TotalAlloc)
}

// A dump and its events allocate, garbage included, memory for one batch. It does not
// grow with the index.
func TestADumpTakesNoMoreForALargeIndex(t *testing.T) {
	var took [2]int
	small := inLong(1000, 250)
	for i, sequences := range []int{small, 20 * small} {
		x := filled(sequences, indexer.Config{})
		pairs := 0
		took[i] = allocated(func() {
			for c := range indexer.Chains(dumped(t, x)) {
				pairs += len(c.Event.Blocks)
			}
		})
		if want := sequences*4*39 - (sequences-sequences/16-1)*4*21; pairs < want {
			t.Errorf("%d blocks in the chains, want %d at least", pairs, want)
		}
	}
	t.Logf("%d bytes for the small index, %d for one of twenty times its size", took[0], took[1])
	if took[1] > 2<<20 || took[1] > took[0]+64<<10 {
		t.Errorf("a dump allocates %d bytes, %d for one of twenty times the size; want the same and at most 2 MB", took[0], took[1])
	}
}

// A dump that is read more slowly than the index changes is aborted with an error;
// nothing else is affected.
func TestADumpThatIsOvertakenIsGivenUp(t *testing.T) {
	x := filled(2000, indexer.Config{DumpWords: 50_000})
	runs := 0
	var last error
	for r, err := range x.Dump() {
		if last != nil {
			t.Fatal("something follows the error")
		}
		if last = err; err == nil {
			if runs++; int(r.ID) != runs {
				t.Fatalf("run %d, want %d", r.ID, runs)
			}
		}
		if runs == 1 && err == nil {
			for w := range 4 {
				x.Apply(w, indexer.Event{Kind: indexer.Cleared})
			}
		}
	}
	if !errors.Is(last, indexer.ErrOvertaken) {
		t.Errorf("the dump ends with %v after %d runs", last, runs)
	}
	if x.Blocks() != 0 {
		t.Errorf("%d blocks left", x.Blocks())
	}
	x.Apply(1, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	for r, err := range x.Dump() {
		if err != nil || len(r.Holders) != 1 {
			t.Errorf("the next dump: %+v, %v", r, err)
		}
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}
