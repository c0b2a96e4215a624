// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// print stands for what an owner holds: external hashes with their places. It does
// not depend on the order, so that it can follow one event after the other.
func pairPrint(tier indexer.Tier, external, sequence uint64) uint64 {
	return indexer.NextSequenceHash(external+uint64(tier)<<60, sequence)
}

func (m *model) print(worker int) (sum uint64) {
	for t := range indexer.Tier(modelTiers) {
		for external, chain := range m.owner(worker, t).held {
			sum += pairPrint(t, external, m.sequence(chain))
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

// Writers of all workers go on while dumps are taken. Each dump has of every worker
// what it held after one of the events that were under way between its begin and
// its end, whole, and says rightly who holds the block before each run.
func TestADumpIsOfOneMomentOfEachWorker(t *testing.T) {
	s := shape{workers: 4, locals: 3, batch: 20, stores: 55, lower: true}
	const events, dumps = 600, 25
	x := indexer.New(indexer.Config{})
	prints := make([][]uint64, s.workers)       // of each worker, after so many events
	begun := make([]atomic.Int64, s.workers)    // events
	ended := make([]atomic.Int64, s.workers)    // events
	type taken struct{ from, to, got []uint64 } // by worker
	var all []taken
	var writers sync.WaitGroup
	// Every writer runs on until there were enough dumps.
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
				prints[w] = append(prints[w], m.print(w))
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
		ends := map[string]uint64{} // external hash of a run's last block
		at := []uint64{0}           // sequence hash at the end of each run
		for r, err := range x.Dump() {
			if err != nil {
				t.Fatal(err)
			}
			sequence := []uint64{at[r.Parent]}
			for i, l := range r.Local {
				next := indexer.NextSequenceHash(sequence[i], l)
				if r.Depth+i == 0 {
					next = l
				}
				sequence = append(sequence, next)
			}
			at = append(at, sequence[len(r.Local)])
			for _, h := range r.Holders {
				for i, e := range h.Externals {
					d.got[h.Worker] += pairPrint(h.Tier, e, sequence[h.Start+i+1])
				}
				if h.Start+len(h.Externals) == len(r.Local) {
					ends[fmt.Sprint(r.ID, h.Worker, h.Tier, h.Externals[len(h.Externals)-1])] = 1
					ends[fmt.Sprint(r.ID, h.Worker, h.Tier)] = 1
				}
				if h.Start > 0 {
					continue
				}
				held := ends[fmt.Sprint(r.Parent, h.Worker, h.Tier)] > 0
				named := ends[fmt.Sprint(r.Parent, h.Worker, h.Tier, h.Parent)] > 0
				for t := range indexer.Tier(modelTiers) {
					if h.Tier != indexer.Device && !held {
						named = named || ends[fmt.Sprint(r.Parent, h.Worker, t, h.Parent)] > 0
					}
				}
				if h.HasParent != named || held && !h.HasParent {
					t.Fatalf("run %d behind %d: %+v, but that the block before is held is %v", r.ID, r.Parent, h, held)
				}
			}
			runtime.Gosched()
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
				t.Errorf("dump %d: worker %d is as it was at no moment from event %d to %d", n, w, d.from[w], d.to[w])
			}
		}
	}
	if between == 0 {
		t.Error("nothing happened during the dumps")
	}
}

// filled is an index of so many sequences of 40 blocks, each held by four workers,
// with branches and holes.
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

// allocated returns how many bytes are allocated while f runs.
func allocated(f func()) int {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int(after.TotalAlloc - before.TotalAlloc)
}

// All that a dump and its events allocate, garbage included, is what they need for a
// batch: it does not grow with the index.
func TestADumpTakesNoMoreForALargeIndex(t *testing.T) {
	var took [2]int
	for i, sequences := range []int{1000, 20_000} {
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

// A dump that is read more slowly than the index changes is given up, and says so;
// nothing else notices.
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
