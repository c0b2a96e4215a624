// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"slices"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// Blocks in host memory count from the beginning of the prompt, whether or not they are on the device.
func TestHostMemoryCountsFromTheFirstBlock(t *testing.T) {
	x := indexer.New(indexer.Config{})
	for _, c := range []struct {
		worker int
		event  indexer.Event
	}{
		{0, line(0, indexer.Device, 1, 8)}, // only on the device
		{1, line(1, indexer.Device, 1, 3)},
		{1, line(1, indexer.HostPinned, 1, 5)},
		{2, line(2, indexer.HostPinned, 1, 9)},
		{2, indexer.Event{Kind: indexer.Removed, Tier: indexer.HostPinned, Externals: []uint64{204}}}, // a hole
		{3, line(3, indexer.Disk, 1, 9)},
		{4, line(4, indexer.Device, 1, 8)},
		{4, line(4, indexer.HostPinned, 1, 8)},
	} {
		if out := x.Apply(c.worker, c.event); out.Orphan > 0 {
			t.Fatalf("%+v of worker %d: %+v", c.event, c.worker, out)
		}
	}
	got := []int32{7, 7, 7, 7, 7, 7}
	x.MatchHost(got, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9})
	if want := []int32{0, 5, 3, 0, 8, 0}; !slices.Equal(got, want) {
		t.Errorf("%v blocks, want %v", got, want)
	}
	for _, prompt := range [][]uint64{nil, {99}} {
		if x.MatchHost(got, prompt); slices.Max(got) > 0 {
			t.Errorf("prompt %v: %v", prompt, got)
		}
	}
}

// Blocks of a hybrid worker in host memory do not count: which blocks of its side groups are there is unknown. Plain
// workers beside it count as always.
func TestHostMemoryOfHybridWorkers(t *testing.T) {
	x := indexer.New(indexer.Config{})
	for w := range 2 {
		x.Apply(w, line(w, indexer.Device, 1, 5))
		x.Apply(w, line(w, indexer.HostPinned, 1, 5))
	}
	x.Apply(1, indexer.Event{Kind: indexer.SideStored, Group: 1, Externals: []uint64{105}, Shape: &indexer.Shape{
		Block: 1, Full: 1, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsState, Block: 1}},
	}})
	got := make([]int32, 2)
	if x.MatchHost(got, []uint64{1, 2, 3, 4, 5, 6}); !slices.Equal(got, []int32{5, 0}) {
		t.Errorf("%v blocks, want 5 and 0", got)
	}
	x.Apply(1, indexer.Event{Kind: indexer.Shaped}) // it is a plain worker now
	if x.MatchHost(got, []uint64{1, 2, 3, 4, 5, 6}); !slices.Equal(got, []int32{5, 5}) {
		t.Errorf("%v blocks of plain workers, want 5 and 5", got)
	}
}
