// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
)

// hybridShapes are the rows of hybrid models: workers with layers with a window of 1,024 tokens, in blocks of 16.
func hybridShapes() []shape {
	perWorker := func(workers int, windows ...int) func() float64 {
		return func() float64 { return matchTimeOf(hybridPath(workers, windows...)) / float64(workers) }
	}
	return []shape{
		one("match 512 blocks, 8 hybrid workers, one window, each worker, p50", "µs", bench.AtMost(3), perWorker(8, 1024)),
		one("match 512 blocks, 64 hybrid workers, one window, each worker, p50", "µs", bench.AtMost(3), perWorker(64, 1024)),
		one("match 512 blocks, 8 hybrid workers, five equal windows, each worker, p50", "µs",
			bench.AtMost(3), perWorker(8, 1024, 1024, 1024, 1024, 1024)),
		one("match 512 blocks, 8 hybrid workers, windows of 512 to 4,096, each block ÷ with one of 1,024", "×",
			bench.AtMost(1.25), func() float64 {
				return perWorker(8, 512, 1024, 2048, 4096)() / (512 + 1024 + 2048 + 4096) / (perWorker(8, 1024)() / 1024)
			}),
		one("match 512 blocks, 64 hybrid workers, allocations", "", bench.AtMost(0), func() float64 {
			p := hybridPath(64, 1024)
			m := indexer.Matches{Device: make([]int32, p.workers)}
			return testing.AllocsPerRun(1000, func() { p.x.FindMatches(&m, p.local) })
		}),
		one("hybrid worker: bytes per side block, mean of 1.0 to 1.9 million", "B", bench.AtMost(32), func() float64 { return sideBytes(16) }),
		one("hybrid worker: bytes per side block of a group with shorter blocks, mean of 1.0 to 1.9 million", "B",
			bench.AtMost(32), func() float64 { return sideBytes(64) }),
	}
}

// sideWindow is a group with a window of so many tokens.
func sideWindow(group, tokens int) indexer.SideGroup {
	return indexer.SideGroup{Group: group, Needs: indexer.NeedsWindow, Block: 16, Tokens: tokens}
}

// hybridPath is a number of hybrid workers that can use all of a prompt. Each group keeps the window before its end.
func hybridPath(workers int, windows ...int) prompt {
	p := fullPath(workers, differ)
	shape := &indexer.Shape{Block: 16, Full: 16}
	for g, tokens := range windows {
		shape.Sides = append(shape.Sides, sideWindow(g, tokens))
	}
	for w := range workers {
		for g, tokens := range windows {
			var ids []uint64
			for _, l := range p.local[len(p.local)-tokens/shape.Block:] {
				ids = append(ids, mix(differ(w)^l))
			}
			p.x.Apply(w, indexer.Event{Kind: indexer.SideStored, Group: g, Shape: shape, Externals: ids})
		}
	}
	return p
}

// matchTimeOf returns the median time of a match of hybrid workers, in microseconds.
func matchTimeOf(p prompt) float64 {
	m := indexer.Matches{Device: make([]int32, p.workers)}
	times := make([]time.Duration, 2000)
	for i := range times {
		start := time.Now()
		p.x.FindMatches(&m, p.local)
		times[i] = time.Since(start)
	}
	if m.Device[p.workers-1] != int32(len(p.local)) {
		bench.NoError(fmt.Errorf("overlap is %d, want %d", m.Device[p.workers-1], len(p.local)))
	}
	return percentile(times, 50)
}

// sideBytes returns the bytes of a side block. A map's memory for an entry depends on its size, so this is the mean of
// several sizes between two doublings. full is the number of tokens in a block of full attention; those of the side group
// have 16.
func sideBytes(full int) (mean float64) {
	const sizes, least = 10, 1_000_000
	for i := range sizes {
		mean += sideBytesOf(full, least+i*least/sizes) / sizes
	}
	return mean
}

func sideBytesOf(full, blocks int) float64 {
	before := bench.Heap()
	x := indexer.New(indexer.Config{})
	shape := &indexer.Shape{Block: 16, Full: full, Sides: []indexer.SideGroup{sideWindow(0, 1024)}}
	ids := make([]uint64, 64)
	for i := range blocks / len(ids) {
		for j := range ids {
			ids[j] = mix(uint64(i*len(ids) + j))
		}
		x.Apply(0, indexer.Event{Kind: indexer.SideStored, Shape: shape, Externals: ids})
	}
	bytes := bench.Heap() - before
	n := x.SideBlocks(0)
	runtime.KeepAlive(x)
	return bytes / float64(n)
}
