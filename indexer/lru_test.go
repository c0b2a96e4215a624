// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// slowLRU is a model of a bounded index: blocks by the sequence that leads to them, each
// with its holders and the time when it was last stored or matched. A match of a block
// also matches all blocks before it.
type slowLRU struct {
	blocks map[string]*slowBlock
	now    int
}

type slowBlock struct {
	before   string
	external uint64
	used     int
	held     map[int]bool
}

func external(local []uint64) uint64 {
	return indexer.AppendSequenceHashes(nil, local)[len(local)-1]
}

func path(local []uint64) string { return fmt.Sprint(local) }

// follows reports whether the sequence of a block begins with another sequence.
func follows(key string, local []uint64) bool {
	return strings.HasPrefix(key, strings.TrimSuffix(path(local), "]")+" ")
}

func (s *slowLRU) use(local []uint64) {
	s.now++
	for i := range local {
		if b := s.blocks[path(local[:i+1])]; b != nil {
			b.used = s.now
		}
	}
}

func (s *slowLRU) store(worker int, local []uint64) {
	for i := range local {
		key := path(local[:i+1])
		if s.blocks[key] == nil {
			s.blocks[key] = &slowBlock{before: path(local[:i]), external: external(local[:i+1]), held: map[int]bool{}}
		}
		s.blocks[key].held[worker] = true
	}
	s.use(local)
}

func (s *slowLRU) pairs(worker int) (n int) {
	for _, b := range s.blocks {
		for w := range b.held {
			if worker < 0 || w == worker {
				n++
			}
		}
	}
	return n
}

// evict removes leaf blocks, least recently used first, of all workers (worker -1) or of
// one worker, until so many are left. It reports false if it removed blocks that follow
// the spared ones: the index may have spared these, too.
func (s *slowLRU) evict(worker, left int, spared []uint64) (evicted int, ok bool) {
	ok = true
	keep := map[string]bool{}
	for i := range spared {
		keep[path(spared[:i+1])] = true
	}
	for n := s.pairs(worker); n > left; {
		behind := map[string]bool{}
		for _, b := range s.blocks {
			if worker < 0 || b.held[worker] {
				behind[b.before] = true
			}
		}
		keys := slices.DeleteFunc(slices.Collect(maps.Keys(s.blocks)), func(k string) bool {
			return behind[k] || keep[k] || worker >= 0 && !s.blocks[k].held[worker]
		})
		key := slices.MinFunc(keys, func(a, b string) int { return cmp.Compare(s.blocks[a].used, s.blocks[b].used) })
		ok = ok && (len(spared) == 0 || !follows(key, spared))
		b := s.blocks[key]
		gone := 1
		if worker < 0 {
			gone = len(b.held)
			clear(b.held)
		}
		if delete(b.held, worker); len(b.held) == 0 {
			delete(s.blocks, key)
		}
		n, evicted = n-gone, evicted+gone
	}
	return evicted, ok
}

func (s *slowLRU) clone() *slowLRU {
	c := &slowLRU{blocks: map[string]*slowBlock{}, now: s.now}
	for k, b := range s.blocks {
		c.blocks[k] = &slowBlock{b.before, b.external, b.used, maps.Clone(b.held)}
	}
	return c
}

// overlap returns how many leading blocks a worker holds, or any worker (worker -1).
func (s *slowLRU) overlap(worker int, local []uint64) (n int) {
	for n < len(local) {
		if b := s.blocks[path(local[:n+1])]; b == nil || worker >= 0 && !b.held[worker] {
			break
		}
		n++
	}
	return n
}

// divides reports whether the index can distinguish the times of this sequence and its
// continuation: it keeps one time for each run, so a sequence that ends within a run
// counts for the whole run.
func (s *slowLRU) divides(local []uint64) bool {
	behind := 0
	for _, b := range s.blocks {
		if b.before == path(local) {
			behind++
		}
	}
	return behind != 1 || len(local) == 0
}

// At a bound the index drops the blocks that were stored or matched least recently,
// whatever blocks followed them in the meantime.
func TestBoundsForgetInOrderOfUse(t *testing.T) {
	for name, c := range map[string]struct {
		workers, bound, limit int
		share                 bool
	}{
		"one worker":               {1, 60, 0, false},
		"three workers":            {3, 120, 0, false},
		"three workers that share": {3, 120, 0, true},
		"a limit of each":          {3, 0, 60, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(1, 7))
			x := indexer.New(indexer.Config{MaxBlocks: c.bound})
			for w := range c.workers {
				x.SetLimit(w, c.limit)
			}
			s := &slowLRU{blocks: map[string]*slowBlock{}}
			sequence := func(worker int) (local []uint64) {
				for i := range 2 + rng.Uint64N(3) {
					local = append(local, rng.Uint64N(3)*10+i, 100+i, 200+i)
				}
				if !c.share {
					local[0] += 1000 * uint64(worker)
				}
				return append(local, 300)
			}
			evicted, steps := 0, 4000/raceSlows
			if testing.Short() {
				steps /= 2
			}
			for step := range steps {
				w := rng.IntN(c.workers)
				local := sequence(w)
				held := s.overlap(w, local)
				switch {
				case rng.IntN(3) == 0:
					if held = s.overlap(-1, local); s.divides(local[:held]) {
						got := make([]int32, c.workers)
						x.Match(got, local)
						s.use(local)
						for w := range got {
							if want := s.overlap(w, local); int(got[w]) != want {
								t.Fatalf("step %d: overlap of worker %d with %d is %d, want %d", step, w, local, got[w], want)
							}
						}
					}
				case rng.IntN(4) == 0: // the worker removes all blocks behind a block
					ev := indexer.Event{Kind: indexer.Removed}
					from := 1 + rng.IntN(len(local))
					for _, key := range slices.Sorted(maps.Keys(s.blocks)) {
						if b := s.blocks[key]; b.held[w] && follows(key, local[:from]) {
							ev.Externals = append(ev.Externals, b.external)
							if delete(b.held, w); len(b.held) == 0 {
								delete(s.blocks, key)
							}
						}
					}
					if got, want := x.Apply(w, ev), (indexer.Outcome{Removed: len(ev.Externals)}); got != want {
						t.Fatalf("step %d: outcome %+v, want %+v", step, got, want)
					}
				default:
					unknown := len(local) - held
					want := indexer.Outcome{Stored: unknown, Duplicate: held}
					before, ok := s.clone(), true
					if c.bound > 0 && s.pairs(-1)+unknown > c.bound {
						want.Evicted, ok = s.evict(-1, c.bound-unknown, local[:held])
					}
					if c.limit > 0 && s.pairs(w)+unknown > c.limit {
						want.Evicted, ok = s.evict(w, max(c.limit-c.limit/16-unknown, 0), local[:held])
					}
					if !ok && !before.divides(local[:held]) {
						s = before
						continue
					}
					ev := indexer.Event{Kind: indexer.Stored}
					for i := range local {
						ev.Blocks = append(ev.Blocks, indexer.Block{External: external(local[:i+1]), Local: local[i]})
					}
					if got := x.Apply(w, ev); got != want {
						t.Fatalf("step %d: outcome %+v, want %+v", step, got, want)
					}
					s.store(w, local)
					evicted += want.Evicted
				}
				left := map[string]int{} // holders of each block
				for r := range x.Dump() {
					for _, h := range r.Holders {
						for _, e := range h.Externals {
							left[fmt.Sprint(e)]++
						}
					}
				}
				n := 0
				for _, holders := range left {
					n += holders
				}
				if n != s.pairs(-1) || len(left) != len(s.blocks) {
					t.Fatalf("step %d: %d blocks in %d pairs are left, want %d in %d", step, len(left), n, len(s.blocks), s.pairs(-1))
				}
			}
			if evicted < steps/2 {
				t.Errorf("%d blocks evicted: the bound was hardly reached", evicted)
			}
		})
	}
}
