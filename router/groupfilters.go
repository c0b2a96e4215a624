// SPDX-License-Identifier: Apache-2.0

package router

import (
	"sync"
	"sync/atomic"

	"github.com/kvroute/kvroute/indexer"
)

// groupFilters are the filters of router groups, by ordinal.
type groupFilters struct {
	some atomic.Bool // whether there are filters: match returns at once without them

	mu sync.RWMutex
	// mu guards the field below.
	byOrdinal map[int]groupFilter
}

// groupFilter has the cached blocks of a router group: checkpoints every stride blocks. The
// filter is nil if the blocks are unknown.
type groupFilter struct {
	*indexer.Filter
	stride int
}

// change replaces the filter of a group, and removes an empty one.
func (x *groupFilters) change(ord int, change func(*groupFilter)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	f := x.byOrdinal[ord]
	change(&f)
	if f.Filter == nil {
		delete(x.byOrdinal, ord)
	} else {
		x.byOrdinal[ord] = f
	}
	x.some.Store(len(x.byOrdinal) > 0)
}

// match raises the overlaps of groups to those of their filters. The caller has checked that there are filters.
func (x *groupFilters) match(overlap []int32, sequence []uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for ord, f := range x.byOrdinal {
		if ord < len(overlap) {
			overlap[ord] = max(overlap[ord], int32(f.Overlap(sequence, f.stride)))
		}
	}
}
