// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// What the gate was chosen over: the same plain tree, under locks of several kinds
// and without any; see docs/adr/0004-index.md. Its nodes are runs of 32 blocks that
// are there from the beginning, and an event gives one of them a holder, or takes it.

const (
	plainRuns    = 16
	plainBlocks  = 32
	plainPrompts = 64
)

type plain struct {
	local []uint64
	held  uint64 // of 64 workers
	kids  []*plain
}

// match returns how many blocks of a prompt each worker holds.
func (p *plain) match(dst []int32, local []uint64) {
	clear(dst)
	alive, depth := ^uint64(0), 0
	for p != nil {
		gone := alive &^ p.held
		for w := range 64 {
			if gone>>w&1 != 0 {
				dst[w] = int32(depth)
			}
		}
		if alive &^= gone; alive == 0 || common(p.local, local[depth:]) < len(p.local) {
			break
		}
		depth += len(p.local)
		next := slices.IndexFunc(p.kids, func(k *plain) bool { return depth < len(local) && k.local[0] == local[depth] })
		if next < 0 {
			break
		}
		p = p.kids[next]
	}
	for w := range 64 {
		if alive>>w&1 != 0 {
			dst[w] = int32(depth)
		}
	}
}

// with returns a copy of a path of the tree in which one run has other holders.
func (p *plain) with(run int, held uint64) *plain {
	c := *p
	if run == 0 {
		c.held = held
		return &c
	}
	c.kids = slices.Clone(p.kids)
	c.kids[0] = p.kids[0].with(run-1, held)
	return &c
}

// guarded is the plain tree, by prompt, with a way to guard it.
type guarded struct {
	roots [plainPrompts]atomic.Pointer[plain]
	runs  [plainPrompts][plainRuns]*plain // the writer's
	local [plainPrompts][]uint64
	match func(dst []int32, prompt int)
	flip  func(prompt, run, worker int) // an event
}

func newGuarded() *guarded {
	g := &guarded{}
	for n := range g.roots {
		var before *plain
		for r := range plainRuns {
			p := &plain{held: ^uint64(0)}
			for i := range uint64(plainBlocks) {
				p.local = append(p.local, spread(uint64(n)<<32|uint64(r)<<16|i))
			}
			g.local[n] = append(g.local[n], p.local...)
			g.runs[n][r] = p
			if before == nil {
				g.roots[n].Store(p)
			} else {
				before.kids = []*plain{p}
			}
			before = p
		}
	}
	return g
}

func (g *guarded) find(dst []int32, prompt int) { g.roots[prompt].Load().match(dst, g.local[prompt]) }

func guards() map[string]func() *guarded {
	return map[string]func() *guarded{
		"one gate": func() *guarded {
			g, door := newGuarded(), &gate{}
			g.match = func(dst []int32, prompt int) {
				door.rlock()
				g.find(dst, prompt)
				door.runlock()
			}
			var mu sync.Mutex
			g.flip = func(prompt, run, worker int) {
				mu.Lock()
				door.lock()
				g.runs[prompt][run].held ^= 1 << worker
				door.unlock()
				mu.Unlock()
			}
			return g
		},
		"one RWMutex":                  func() *guarded { return locked(1) },
		"an RWMutex for each sequence": func() *guarded { return locked(plainPrompts) },
		"copied paths": func() *guarded {
			g := newGuarded()
			g.match = g.find
			var mu sync.Mutex
			g.flip = func(prompt, run, worker int) {
				mu.Lock()
				root := g.roots[prompt].Load()
				p := root
				for range run {
					p = p.kids[0]
				}
				g.roots[prompt].Store(root.with(run, p.held^1<<worker))
				mu.Unlock()
			}
			return g
		},
	}
}

func locked(shards int) *guarded {
	type shard struct {
		sync.RWMutex
		_ [40]byte
	}
	g, all := newGuarded(), make([]shard, shards)
	g.match = func(dst []int32, prompt int) {
		s := &all[prompt%shards]
		s.RLock()
		g.find(dst, prompt)
		s.RUnlock()
	}
	g.flip = func(prompt, run, worker int) {
		s := &all[prompt%shards]
		s.Lock()
		g.runs[prompt][run].held ^= 1 << worker
		s.Unlock()
	}
	return g
}

// TestGuardsAgree is for the benchmark to compare the same work.
func TestGuardsAgree(t *testing.T) {
	for name, guard := range guards() {
		g := guard()
		dst := make([]int32, 64)
		g.flip(3, 5, 7)
		g.flip(3, 0, 8)
		g.flip(3, 5, 8)
		g.flip(4, 1, 7)
		g.match(dst, 3)
		for w, n := range dst {
			want := map[int]int32{7: 5 * plainBlocks, 8: 0}
			if all, ok := want[w]; ok && n != all || !ok && n != plainRuns*plainBlocks {
				t.Errorf("%s: overlap of worker %d is %d", name, w, n)
			}
		}
	}
}

// BenchmarkAlternativesGuard times matches of 512 blocks with 64 workers while one
// goroutine applies events as fast as it can, and while none does but another one
// matches, too.
func BenchmarkAlternativesGuard(b *testing.B) {
	for _, name := range []string{"one gate", "one RWMutex", "an RWMutex for each sequence", "copied paths"} {
		for _, writing := range []bool{true, false} {
			other := map[bool]string{true: "events", false: "matches"}[writing]
			b.Run(name+"/beside "+other, func(b *testing.B) {
				g := guards()[name]()
				var done atomic.Bool
				var count int
				var beside sync.WaitGroup
				beside.Go(func() {
					dst := make([]int32, 64)
					for ; !done.Load(); count++ {
						if n := int(spread(uint64(count)) >> 40); writing {
							g.flip(n%plainPrompts, n>>8%plainRuns, n>>16%64)
						} else {
							g.match(dst, n%plainPrompts)
						}
					}
				})
				dst := make([]int32, 64)
				times := make([]time.Duration, 0, b.N)
				for b.Loop() {
					start := time.Now()
					g.match(dst, len(times)%plainPrompts)
					times = append(times, time.Since(start))
				}
				done.Store(true)
				beside.Wait()
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "p99-ns")
				b.ReportMetric(float64(count)/b.Elapsed().Seconds()/1e6, "M"+other+"/s")
			})
		}
	}
}
