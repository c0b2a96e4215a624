// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
)

const (
	indexBatch    = 32      // blocks in a stored event
	indexSequence = 512     // blocks in a prompt
	indexPairs    = 1 << 20 // (block, worker) pairs of the shapes that fill an index
)

// Index measures the index at the shapes of its targets, one after the other.
func (b *Bench) Index() []bench.Figure {
	shapes := indexShapes()
	if b.Dynamo != "" {
		shapes = append(shapes, dynamoShapes(b.Dynamo)...)
	}
	return b.run(shapes)
}

func indexShapes() (shapes []shape) {
	atMost, atLeast := bench.AtMost, bench.AtLeast
	for _, c := range []struct {
		workers int
		target  float64
	}{{4, .7}, {64, 1.8}, {512, 9.9}} {
		for _, hashes := range []struct {
			name string
			seed func(worker int) uint64
		}{{"agree", agree}, {"differ", differ}} {
			name := fmt.Sprintf("match 512 blocks, %d workers, engine hashes %s, p50", c.workers, hashes.name)
			shapes = append(shapes, one(name, "µs", atMost(c.target), func() float64 { return matchTime(fullPath(c.workers, hashes.seed)) }))
		}
	}
	return slices.Concat(append(
		shapes,
		one("match 512 blocks, allocations", "", atMost(0), matchAllocs),
		one("match 512 blocks, 64 workers, path of 16 nodes, p50", "µs", atMost(2.5), func() float64 { return matchTime(branchedPath(16, differ)) }),
		one("match 512 blocks, 64 workers, path of 512 nodes, p50", "µs", atMost(10), func() float64 { return matchTime(branchedPath(512, differ)) }),
		one("match 512 blocks, 64 workers, under full event load, p99", "µs", atMost(10), matchUnderLoad),
		one("match 32 blocks of 10,000 prompts, 4 workers, two threads", "M/s", atLeast(2), func() float64 { return matchRandom(differ) }),
		one("events of 32 blocks, unique", "M blocks/s", atLeast(7), func() float64 { return applyRate(unique()) }),
		one("events of 32 blocks, shared by 64, engine hashes agree", "M blocks/s", atLeast(12), func() float64 { return applyRate(shared(agree)) }),
		one("events of 32 blocks, shared by 64, engine hashes differ", "M blocks/s", atLeast(12), func() float64 { return applyRate(shared(differ)) }),
		one("events of 32 blocks, one deviant first of 64, as a share of where all agree", "", atLeast(.5), func() float64 { return applyRate(shared(deviant)) / applyRate(shared(agree)) }),
		one("removals, 1 per event, tails first", "M blocks/s", atLeast(3), func() float64 { return removeRate(unique(), removals, 1) }),
		one("removals, 1 per event, tails first, shared by 64", "M blocks/s", atLeast(3), func() float64 { return removeRate(shared(differ), removals, 1) }),
		one("removals, 1 per event, at random", "M blocks/s", atLeast(3), func() float64 { return removeRate(unique(), scattered, 1) }),
		one("removals, 32 per event, tails first", "M blocks/s", atLeast(11), func() float64 { return removeRate(unique(), removals, 32) }),
		one("removals, 32 per event, each block at random", "M blocks/s", atLeast(3), func() float64 { return removeRate(unique(), scattered, 32) }),
		one("bytes per (block, worker), unshared", "B", atMost(48), func() float64 { return pairBytes(unique()) }),
		one("bytes per (block, worker), shared by 64, hashes agree", "B", atMost(6), func() float64 { return pairBytes(shared(agree)) }),
		one("bytes per (block, worker), shared by 64, hashes differ", "B", atMost(20), func() float64 { return pairBytes(shared(differ)) }),
		one("heap returned after removing everything", "%", atLeast(90), heapReturned),
	), hybridShapes())
}

// indexEvent is an event with its worker.
type indexEvent struct {
	worker int
	event  indexer.Event
}

// mix makes hashes of small numbers.
func mix(v uint64) uint64 { return indexer.NextSequenceHash(v, 0x6b76) }

// stored appends the events that store a sequence for a worker. Seed makes its
// external hashes.
func stored(dst []indexEvent, worker int, seed uint64, local []uint64) []indexEvent {
	external := func(i int) uint64 { return mix(seed ^ local[i]) }
	for i := 0; i < len(local); i += indexBatch {
		ev := indexer.Event{Kind: indexer.Stored, HasParent: i > 0}
		if i > 0 {
			ev.Parent = external(i - 1)
		}
		for j := i; j < min(i+indexBatch, len(local)); j++ {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: external(j), Local: local[j]})
		}
		dst = append(dst, indexEvent{worker, ev})
	}
	return dst
}

// sequence returns the local hashes of the sequence with a number.
func sequence(number, blocks int) []uint64 {
	local := make([]uint64, blocks)
	for i := range local {
		local[i] = mix(uint64(number)<<20 | uint64(i))
	}
	return local
}

// The seed of a worker's external hashes: the same for all workers, or different for each. With
// deviant only the first worker's differs.
func agree(int) uint64          { return 1 << 60 }
func differ(worker int) uint64  { return uint64(worker+1) << 48 }
func deviant(worker int) uint64 { return differ(min(worker, 1)) }

// unique is 64 workers that share nothing.
func unique() (evs []indexEvent) {
	for n := range indexPairs / indexSequence {
		evs = stored(evs, n%64, differ(n%64), sequence(n, indexSequence))
	}
	return evs
}

// shared is 64 workers that hold the same.
func shared(seed func(worker int) uint64) (evs []indexEvent) {
	for n := range indexPairs / indexSequence / 64 {
		local := sequence(n, indexSequence)
		for w := range 64 {
			evs = stored(evs, w, seed(w), local)
		}
	}
	return evs
}

func applyAll(x *indexer.Index, evs []indexEvent) {
	for i := range evs {
		x.Apply(evs[i].worker, evs[i].event)
	}
}

func blocksOf(evs []indexEvent) (n int) {
	for i := range evs {
		n += len(evs[i].event.Blocks) + len(evs[i].event.Externals)
	}
	return n
}

// rate applies events and returns millions of blocks a second.
func rate(x *indexer.Index, evs []indexEvent) float64 {
	start := time.Now()
	applyAll(x, evs)
	return float64(blocksOf(evs)) / time.Since(start).Seconds() / 1e6
}

func applyRate(evs []indexEvent) float64 { return rate(indexer.New(indexer.Config{}), evs) }

// removals returns events that remove what evs stored, batch blocks each, the
// tails of sequences first.
func removals(evs []indexEvent, batch int) (out []indexEvent) {
	for _, e := range slices.Backward(evs) {
		var all []uint64
		for _, b := range slices.Backward(e.event.Blocks) {
			all = append(all, b.External)
		}
		for part := range slices.Chunk(all, batch) {
			out = append(out, indexEvent{e.worker, indexer.Event{Kind: indexer.Removed, Externals: part}})
		}
	}
	return out
}

// scattered is removals in random order. The blocks of an event have only their worker in common.
func scattered(evs []indexEvent, batch int) (out []indexEvent) {
	rng := rand.New(rand.NewPCG(1, 2))
	blocks := map[int][]uint64{} // by worker
	for i := range evs {
		for _, b := range evs[i].event.Blocks {
			blocks[evs[i].worker] = append(blocks[evs[i].worker], b.External)
		}
	}
	for _, w := range slices.Sorted(maps.Keys(blocks)) {
		all := blocks[w]
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for part := range slices.Chunk(all, batch) {
			out = append(out, indexEvent{w, indexer.Event{Kind: indexer.Removed, Externals: part}})
		}
	}
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	// In memory the blocks are in the order of the events, as if they had just been received.
	received := make([]uint64, 0, len(out)*batch)
	for i := range out {
		received = append(received, out[i].event.Externals...)
		out[i].event.Externals = received[len(received)-len(out[i].event.Externals):]
	}
	return out
}

// removeRate is the rate at which events remove all that others have stored.
func removeRate(evs []indexEvent, removals func([]indexEvent, int) []indexEvent, batch int) float64 {
	gone := removals(evs, batch)
	x := indexer.New(indexer.Config{})
	applyAll(x, evs)
	runtime.GC()
	r := rate(x, gone)
	if x.Blocks() != 0 {
		bench.NoError(errors.New("blocks are left after all were removed"))
	}
	return r
}

// prompt is an index with a prompt to look for in it.
type prompt struct {
	x       *indexer.Index
	workers int
	local   []uint64
}

// fullPath is a number of workers that hold all of a prompt.
func fullPath(workers int, seed func(worker int) uint64) prompt {
	p := prompt{indexer.New(indexer.Config{}), workers, sequence(0, indexSequence)}
	for w := range workers {
		applyAll(p.x, stored(nil, w, seed(w), p.local))
	}
	return p
}

// branchedPath is a prompt whose path branches so often that it has the given
// number of nodes, and that 64 workers leave at different depths.
func branchedPath(nodes int, seed func(worker int) uint64) prompt {
	p := prompt{indexer.New(indexer.Config{}), 64, sequence(0, indexSequence)}
	stride := indexSequence / nodes
	for w := range 64 {
		depth := (w + 1) * indexSequence / 64
		depth = max(depth/stride*stride, stride)
		applyAll(p.x, stored(nil, w, seed(w), p.local[:depth]))
		for at := stride; at < depth; at += stride {
			if at/stride%64 == w || w == 63 {
				branch := indexer.Event{
					Kind: indexer.Stored, HasParent: true, Parent: mix(seed(w) ^ p.local[at-1]),
					Blocks: []indexer.Block{{External: mix(uint64(w)<<32 | uint64(at)), Local: uint64(at)}},
				}
				p.x.Apply(w, branch)
			}
		}
	}
	return p
}

// matchTime returns the median time of a match, in microseconds; eight are timed
// together, since reading the clock takes a tenth of the shortest one.
func matchTime(p prompt) float64 {
	dst := make([]int32, p.workers)
	times := make([]time.Duration, 2000)
	for i := range times {
		start := time.Now()
		for range 8 {
			p.x.Match(dst, p.local)
		}
		times[i] = time.Since(start)
	}
	if dst[p.workers-1] != int32(len(p.local)) {
		bench.NoError(fmt.Errorf("overlap is %d, want %d", dst[p.workers-1], len(p.local)))
	}
	return percentile(times, 50) / 8
}

// percentile returns a percentile of times in microseconds.
func percentile(times []time.Duration, p int) float64 {
	slices.SortFunc(times, cmp.Compare)
	return float64(times[len(times)*p/100].Nanoseconds()) / 1e3
}

func matchAllocs() float64 {
	p := fullPath(64, differ)
	dst := make([]int32, p.workers)
	return testing.AllocsPerRun(1000, func() { p.x.Match(dst, p.local) })
}

// matchUnderLoad returns the time below which 99 of 100 matches stay while
// another thread stores and removes blocks as fast as it can.
func matchUnderLoad() float64 {
	p := fullPath(64, differ)
	evs := unique()[:indexPairs/indexBatch/4]
	gone := removals(evs, indexBatch)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			for _, list := range [][]indexEvent{evs, gone} {
				for i := range list {
					select {
					case <-stop:
						return
					default:
						p.x.Apply(list[i].worker, list[i].event)
					}
				}
			}
		}
	})
	dst := make([]int32, p.workers)
	times := make([]time.Duration, 100_000)
	for i := range times {
		start := time.Now()
		p.x.Match(dst, p.local)
		times[i] = time.Since(start)
	}
	close(stop)
	wg.Wait()
	return percentile(times, 99)
}

// matchRandom returns millions of matches a second of two threads.
func matchRandom(seed func(worker int) uint64) float64 {
	const prompts, each = 10_000, 500_000
	x := indexer.New(indexer.Config{})
	local := make([][]uint64, prompts)
	for n := range local {
		local[n] = sequence(n, 32)
		for w := range 4 {
			applyAll(x, stored(nil, w, seed(w), local[n]))
		}
	}
	runtime.GC()
	start := time.Now()
	var wg sync.WaitGroup
	for t := range 2 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(t), 3))
			dst := make([]int32, 4)
			for range each {
				x.Match(dst, local[rng.IntN(prompts)])
			}
		})
	}
	wg.Wait()
	return 2 * each / time.Since(start).Seconds() / 1e6
}

func pairBytes(evs []indexEvent) float64 {
	before := bench.Heap()
	x := indexer.New(indexer.Config{})
	applyAll(x, evs)
	bytes := bench.Heap() - before
	n := x.Blocks()
	runtime.KeepAlive(evs)
	return bytes / float64(n)
}

func heapReturned() float64 {
	evs := unique()
	gone := scattered(evs, 1)
	before := bench.Heap()
	x := indexer.New(indexer.Config{})
	applyAll(x, evs)
	full := bench.Heap()
	applyAll(x, gone)
	empty := bench.Heap()
	runtime.KeepAlive(evs)
	runtime.KeepAlive(gone)
	runtime.KeepAlive(x)
	return 100 * (full - empty) / (full - before)
}
