// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"slices"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// matches returns a Matches that wants the results of all workers.
func matches(workers int) *indexer.Matches {
	m := &indexer.Matches{Device: make([]int32, workers)}
	for t := range m.Lower {
		m.Lower[t] = make([]int32, workers)
	}
	return m
}

// line is a sequence of blocks with local hashes from, from+1 and so on. A worker's
// external hashes are the local ones plus a hundred of its own.
func line(worker int, tier indexer.Tier, from, to uint64) indexer.Event {
	ev := indexer.Event{Kind: indexer.Stored, Tier: tier, HasParent: from > 1, Parent: from - 1 + uint64(worker*100)}
	for l := from; l <= to; l++ {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: l + uint64(worker*100), Local: l})
	}
	return ev
}

func TestTiersGoOnWhereFasterOnesEnd(t *testing.T) {
	x := indexer.New(indexer.Config{})
	for _, c := range []struct {
		worker int
		event  indexer.Event
	}{
		// Worker 0: blocks 1 to 3 on the device, up to 5 in host memory, up to 6 on disk.
		{0, line(0, indexer.Device, 1, 3)},
		{0, line(0, indexer.HostPinned, 1, 5)},
		{0, line(0, indexer.Disk, 6, 6)},
		// Worker 1: nothing on the device; the disk fills a hole in host memory, and
		// external storage follows.
		{1, line(1, indexer.HostPinned, 1, 2)},
		{1, line(1, indexer.Disk, 3, 4)},
		{1, line(1, indexer.External, 5, 8)},
		// Worker 2: without the first block no other block counts.
		{2, line(2, indexer.Disk, 1, 4)},
		{2, indexer.Event{Kind: indexer.Removed, Tier: indexer.Disk, Externals: []uint64{201}}},
		// Worker 3: all blocks on the device.
		{3, line(3, indexer.Device, 1, 8)},
		{3, line(3, indexer.HostPinned, 1, 8)},
	} {
		if out := x.Apply(c.worker, c.event); out.Orphan > 0 {
			t.Fatalf("%+v of worker %d: %+v", c.event, c.worker, out)
		}
	}
	prompt := []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9}
	m := matches(4)
	x.FindMatches(m, prompt)
	got := append([][]int32{m.Device}, m.Lower[:]...)
	want := [][]int32{{3, 0, 0, 8}, {2, 2, 0, 0}, {1, 2, 0, 0}, {0, 4, 0, 0}}
	for tier := range want {
		if !slices.Equal(got[tier], want[tier]) {
			t.Errorf("tier %d: %d, want %d", tier, got[tier], want[tier])
		}
	}
	for w, want := range []uint64{3, 0, 0, 308} {
		if last := x.Last(w, m.Device[w], prompt); last != want {
			t.Errorf("last external hash of worker %d is %d, want %d", w, last, want)
		}
	}

	// Without counts for host memory the disk continues the device.
	m.Lower[0] = nil
	x.FindMatches(m, prompt)
	if want := []int32{0, 0, 0, 0}; !slices.Equal(m.Lower[1], want) {
		t.Errorf("disk behind the device: %d, want %d", m.Lower[1], want)
	}

	if x.WorkerBlocks(0) != 9 {
		t.Errorf("worker 0 has %d blocks, want 9", x.WorkerBlocks(0))
	}
	if out := x.Apply(0, indexer.Event{Kind: indexer.Cleared}); out.Removed != 9 || x.WorkerBlocks(0) != 0 {
		t.Errorf("cleared: %+v and %d blocks left, want 9 removed", out, x.WorkerBlocks(0))
	}
}

func TestMatchDoesNotAllocate(t *testing.T) {
	x := indexer.New(indexer.Config{})
	var prompt []uint64
	ev := indexer.Event{Kind: indexer.Stored}
	for i := range uint64(512) {
		prompt = append(prompt, i)
		ev.Blocks = append(ev.Blocks, indexer.Block{External: i, Local: i})
	}
	whole := ev.Blocks
	for w := range 8 {
		ev.Tier, ev.Blocks = indexer.Device, whole[:64*(w+1)]
		x.Apply(w, ev)
		ev.Tier, ev.Blocks = indexer.HostPinned, whole
		x.Apply(w, ev)
	}
	m := matches(8)
	if n := testing.AllocsPerRun(10, func() { x.Match(m.Device, prompt) }); n != 0 {
		t.Errorf("Match makes %v allocations, want 0", n)
	}
	if n := testing.AllocsPerRun(10, func() { x.FindMatches(m, prompt) }); n != 0 {
		t.Errorf("FindMatches makes %v allocations, want 0", n)
	}
	for w := range 8 {
		if m.Device[w] != int32(64*(w+1)) || m.Device[w]+m.Lower[0][w] != 512 {
			t.Errorf("worker %d: %d blocks on the device and %d in host memory, want %d of 512", w, m.Device[w], m.Lower[0][w], 64*(w+1))
		}
	}
}
