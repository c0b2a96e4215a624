// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"math/bits"
	"runtime"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// Alternatives to the tree, in the smallest form that can be measured; see
// docs/adr/0004-index.md. Both are keyed by sequence hashes, so a caller that stores must
// compute them, and neither returns the last external hash of a match.

// flat is a sharded map from sequence hashes to workers.
type flat struct {
	shards  [256]flatShard
	workers []map[uint64]uint64 // external hash -> sequence hash
}

type flatShard struct {
	mu     sync.RWMutex
	blocks map[uint64][]uint64 // sequence hash -> set of workers
}

func newFlat(workers int) *flat {
	f := &flat{}
	for i := range f.shards {
		f.shards[i].blocks = map[uint64][]uint64{}
	}
	for range workers {
		f.workers = append(f.workers, map[uint64]uint64{})
	}
	return f
}

func (f *flat) store(worker int, ev *indexer.Event) {
	held := f.workers[worker]
	before, chained := held[ev.Parent], ev.HasParent
	for _, b := range ev.Blocks {
		seq := b.Local
		if chained {
			seq = indexer.NextSequenceHash(before, b.Local)
		}
		before, chained = seq, true
		held[b.External] = seq
		s := &f.shards[seq%256]
		s.mu.Lock()
		set := s.blocks[seq]
		for len(set) <= worker/64 {
			set = append(set, 0)
		}
		set[worker/64] |= 1 << (worker % 64)
		s.blocks[seq] = set
		s.mu.Unlock()
	}
}

func (f *flat) set(dst []uint64, seq uint64) (held bool) {
	s := &f.shards[seq%256]
	s.mu.RLock()
	defer s.mu.RUnlock()
	set := s.blocks[seq]
	for i := range dst {
		dst[i] = 0
		if i < len(set) {
			dst[i] = set[i]
		}
		held = held || dst[i] != 0
	}
	return held
}

// match looks up each block in turn.
func (f *flat) match(dst []int32, seq []uint64) {
	var alive, now [8]uint64
	words := (len(dst) + 63) / 64
	clear(dst)
	for i, h := range seq {
		f.set(now[:words], h)
		held := false
		for w := range words {
			if i == 0 {
				alive[w] = now[w]
			}
			f.end(dst, w, alive[w]&^now[w], i)
			alive[w] &= now[w]
			held = held || alive[w] != 0
		}
		if !held {
			return
		}
	}
	for w := range words {
		f.end(dst, w, alive[w], len(seq))
	}
}

func (f *flat) end(dst []int32, word int, gone uint64, depth int) {
	for ; gone != 0; gone &= gone - 1 {
		dst[word*64+bits.TrailingZeros64(gone)] = int32(depth)
	}
}

// jump is match for workers without holes: it looks up every 64th block, and the blocks in
// between only if a worker's match ended there.
func (f *flat) jump(dst []int32, seq []uint64) {
	const stride = 64
	var alive, now [8]uint64
	words := (len(dst) + 63) / 64
	clear(dst)
	if len(seq) == 0 || !f.set(alive[:words], seq[0]) {
		return
	}
	for at := 0; at < len(seq)-1; {
		next := min(at+stride, len(seq)-1)
		f.set(now[:words], seq[next])
		left := false
		for w := range words {
			left = left || alive[w]&^now[w] != 0
		}
		if !left {
			at = next
			continue
		}
		for at < next {
			at++
			f.set(now[:words], seq[at])
			held := false
			for w := range words {
				f.end(dst, w, alive[w]&^now[w], at)
				alive[w] &= now[w]
				held = held || alive[w] != 0
			}
			if !held {
				return
			}
		}
	}
	for w := range words {
		f.end(dst, w, alive[w], len(seq))
	}
}

// candidate is one of the compared indexes.
type candidate struct {
	name  string
	store func(worker int, ev *indexer.Event)
	match func(dst []int32, local, seq []uint64)
}

func candidates(workers int) []candidate {
	tree, sharded, positional := indexer.New(indexer.Config{}), newFlat(workers), newFlat(workers)
	return []candidate{
		{"tree", func(w int, ev *indexer.Event) { tree.Apply(w, *ev) }, func(dst []int32, local, _ []uint64) { tree.Match(dst, local) }},
		{"flat", sharded.store, func(dst []int32, _, seq []uint64) { sharded.match(dst, seq) }},
		{"jump", positional.store, func(dst []int32, _, seq []uint64) { positional.jump(dst, seq) }},
	}
}

// chain returns the events that store a sequence of 512 blocks for a worker up to
// a depth, 32 at a time.
func chain(worker int, sequence uint64, depth int) (evs []indexer.Event, local []uint64) {
	for i := range uint64(512) {
		local = append(local, indexer.NextSequenceHash(sequence, i))
	}
	for i := 0; i < depth; i += 32 {
		ev := indexer.Event{Kind: indexer.Stored, HasParent: i > 0}
		external := func(i int) uint64 { return indexer.NextSequenceHash(local[i], uint64(worker)) }
		if i > 0 {
			ev.Parent = external(i - 1)
		}
		for j := i; j < min(i+32, depth); j++ {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: external(j), Local: local[j]})
		}
		evs = append(evs, ev)
	}
	return evs, local
}

func BenchmarkAlternativesMatch(b *testing.B) {
	for _, s := range []struct {
		name    string
		workers int
		depth   func(worker int) int
	}{
		{"4 hold all", 4, func(int) int { return 512 }},
		{"64 hold all", 64, func(int) int { return 512 }},
		{"512 hold all", 512, func(int) int { return 512 }},
		{"64 leave at different depths", 64, func(w int) int { return 8 * (w + 1) }},
	} {
		for _, c := range candidates(s.workers) {
			var local []uint64
			for w := range s.workers {
				var evs []indexer.Event
				evs, local = chain(w, 1, s.depth(w))
				for i := range evs {
					c.store(w, &evs[i])
				}
			}
			seq := indexer.AppendSequenceHashes(nil, local)
			dst := make([]int32, s.workers)
			b.Run(s.name+"/"+c.name, func(b *testing.B) {
				for b.Loop() {
					c.match(dst, local, seq)
				}
			})
			for w, n := range dst {
				if int(n) != s.depth(w) {
					b.Errorf("%s: overlap of worker %d is %d, want %d", c.name, w, n, s.depth(w))
				}
			}
		}
	}
}

// BenchmarkAlternativesHashes measures the keys of the alternatives for a prompt of 512
// blocks.
func BenchmarkAlternativesHashes(b *testing.B) {
	_, local := chain(0, 1, 512)
	var seq []uint64
	for b.Loop() {
		seq = indexer.AppendSequenceHashes(seq[:0], local)
	}
}

func BenchmarkAlternativesStore(b *testing.B) {
	const sequences, workers = 512, 64
	for _, shared := range []bool{false, true} {
		name := map[bool]string{false: "unique", true: "shared by 64"}[shared]
		var evs []indexer.Event
		var owner []int
		for n := range sequences {
			sequence := n
			if shared {
				sequence = n / workers
			}
			more, _ := chain(n%workers, uint64(sequence), 512)
			for range more {
				owner = append(owner, n%workers)
			}
			evs = append(evs, more...)
		}
		for i := range candidates(workers)[:2] {
			b.Run(name+"/"+candidates(workers)[i].name, func(b *testing.B) {
				var c candidate
				var before int
				for b.Loop() {
					b.StopTimer()
					c.store, c.match = nil, nil
					before = heap()
					c = candidates(workers)[i]
					b.StartTimer()
					for e := range evs {
						c.store(owner[e], &evs[e])
					}
				}
				b.ReportMetric(float64(b.N)*sequences*512/b.Elapsed().Seconds()/1e6, "Mblocks/s")
				b.ReportMetric(float64(heap()-before)/(sequences*512), "B/pair")
				runtime.KeepAlive(c)
			})
		}
	}
}
