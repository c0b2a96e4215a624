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

// A worker without side groups whose blocks are larger than those of the index: on each tier, counts end with one of its
// blocks. A block of which the prompt has only the first part does not count.
func TestTiersOfLargerBlocks(t *testing.T) {
	x := indexer.New(indexer.Config{})
	x.Apply(0, indexer.Event{Kind: indexer.Shaped, Shape: &indexer.Shape{Block: 1, Full: 4}})
	for w, from := range []uint64{0: 1, 1: 1, 2: 5} {
		x.Apply(w, line(w, indexer.Device, 1, 4))
		x.Apply(w, line(w, indexer.HostPinned, from, 12))
		x.Apply(w, line(w, indexer.Disk, 13, 16))
	}
	x.Apply(2, indexer.Event{Kind: indexer.Shaped, Shape: &indexer.Shape{Block: 1, Full: 4}})
	for _, c := range []struct {
		blocks, tokens     int
		device, host, disk []int32
		fromHost           []int32
	}{
		{16, 0, []int32{4, 4, 4}, []int32{8, 8, 8}, []int32{4, 4, 4}, []int32{12, 12, 0}},
		{15, 0, []int32{4, 4, 4}, []int32{8, 8, 8}, []int32{0, 3, 0}, []int32{12, 12, 0}},
		{11, 0, []int32{4, 4, 4}, []int32{4, 7, 4}, []int32{0, 0, 0}, []int32{8, 11, 0}},
		{16, 16, []int32{4, 4, 4}, []int32{8, 8, 8}, []int32{0, 4, 0}, []int32{12, 12, 0}},
		{16, 17, []int32{4, 4, 4}, []int32{8, 8, 8}, []int32{4, 4, 4}, []int32{12, 12, 0}},
		{3, 0, []int32{0, 3, 0}, []int32{0, 0, 0}, []int32{0, 0, 0}, []int32{0, 3, 0}},
	} {
		var prompt []uint64
		for i := range c.blocks {
			prompt = append(prompt, uint64(i+1))
		}
		m := indexer.Matches{Device: make([]int32, 3), Tokens: c.tokens}
		m.Lower[0], m.Lower[1] = make([]int32, 3), make([]int32, 3)
		x.FindMatches(&m, prompt)
		if !slices.Equal(m.Device, c.device) || !slices.Equal(m.Lower[0], c.host) || !slices.Equal(m.Lower[1], c.disk) {
			t.Errorf("%d blocks, %d tokens: %v, %v and %v, want %v, %v and %v", c.blocks, c.tokens, m.Device, m.Lower[0], m.Lower[1], c.device, c.host, c.disk)
		}
		got := make([]int32, 3)
		if x.MatchHost(got, prompt); !slices.Equal(got, c.fromHost) {
			t.Errorf("%d blocks: %v in host memory, want %v", c.blocks, got, c.fromHost)
		}
	}
}
