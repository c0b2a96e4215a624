// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// A worker's log may name nodes that the worker has left. Clearing the last worker with
// blocks then empties the tree before the log is read to its end.
func TestClearOfTheLastHolderWithAnOutdatedLog(t *testing.T) {
	x := indexer.New(indexer.Config{})
	const chains, kept = 70, 44
	for n := range uint64(chains) {
		x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: n + 1, Local: n + 1}}})
	}
	for n := range uint64(chains - kept) {
		x.Apply(0, indexer.Event{Kind: indexer.Removed, Externals: []uint64{kept + n + 1}})
	}
	if out := x.Apply(0, indexer.Event{Kind: indexer.Cleared}); out.Removed != kept || x.Blocks() != 0 {
		t.Errorf("%d blocks removed and %d left, want %d and none", out.Removed, x.Blocks(), kept)
	}
	x.Apply(0, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	if x.Blocks() != 1 {
		t.Errorf("%d blocks after a clear and a store, want 1", x.Blocks())
	}
}
