// SPDX-License-Identifier: Apache-2.0

package slots

import "time"

// Move moves a request's slot to another worker, which served the request. The load of the
// slot moves with it; the prefill tokens are those that the new worker has not cached. Move
// returns false, and changes nothing, if the id has no slot, if the worker's number is
// negative, or if the slot is there already.
func (s *Table) Move(now time.Time, id string, worker, cached int) bool {
	n, exists := s.ids[id]
	if !exists || worker < 0 || s.slots[n].Worker == worker {
		return false
	}
	t := s.slots[n]
	b := t.Booking
	b.Worker, b.CachedTokens, b.ExpectedTTFT = worker, cached, 0
	if t.leaf == 0 && t.lone > 0 {
		// Only the number of unshared blocks is known.
		b.NoReuse, b.Blocks = true, make([]uint64, t.lone)
	} else {
		b.Blocks = s.tree.path(t.leaf)
	}
	s.at(now)
	s.drop(n)
	s.Add(now, id, &b)
	m := s.ids[id]
	to := &s.slots[m]
	to.added, to.outputReported, to.estimate = t.added, t.outputReported, t.estimate
	if t.started {
		s.start(m, t.first)
		to.confirmed, to.grown = t.confirmed, t.grown
	}
	s.lengthen(m, t.out)
	return true
}

// path returns the blocks from a tree's root to the end of a node.
func (t *prefixTree) path(leaf int32) []uint64 {
	if leaf == 0 {
		return nil
	}
	n := &t.nodes[leaf]
	return append(t.path(n.parent), n.blocks...)
}
