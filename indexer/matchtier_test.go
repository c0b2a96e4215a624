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
