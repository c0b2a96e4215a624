// SPDX-License-Identifier: Apache-2.0

package router

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvroute/kvroute/indexer"
)

// filters are what router groups hold, by ordinal. The list is replaced, never changed,
// so that decisions read it without a lock.
type filters struct {
	mu   sync.Mutex // of who replaces
	list atomic.Pointer[[]*filtered]
}

// filtered is what a group holds: checkpoints every stride blocks.
type filtered struct {
	filter *indexer.Filter
	stride int
}

// set replaces what a group holds; nil for nothing.
func (f *filters) set(ord int, to *filtered) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*filtered
	if was := f.list.Load(); was != nil {
		list = slices.Clone(*was)
	}
	switch {
	case ord < len(list):
	case to == nil:
		return
	default:
		list = append(list, make([]*filtered, ord+1-len(list))...)
	}
	list[ord] = to
	f.list.Store(&list)
}

// add adds to what a group holds, if that is known.
func (f *filters) add(ord int, hashes []uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := f.list.Load()
	if list == nil || ord >= len(*list) || (*list)[ord] == nil {
		return
	}
	for _, h := range hashes {
		(*list)[ord].filter.Add(h)
	}
}

// match raises the overlap of each group to what its filter has of a prompt.
func (f *filters) match(overlap []int32, sequence []uint64) {
	list := f.list.Load()
	if list == nil {
		return
	}
	for ord, g := range (*list)[:min(len(*list), len(overlap))] {
		if g != nil {
			overlap[ord] = max(overlap[ord], int32(g.filter.Overlap(sequence, g.stride)))
		}
	}
}
