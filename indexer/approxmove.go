// SPDX-License-Identifier: Apache-2.0

package indexer

import "time"

// Move takes an insertion back, as [Approx.Withdraw] does, and makes it again for
// another worker, which got the request in the first one's place. It returns the
// stamp and the last block of the new insertion, as [Approx.Insert] does: a stamp
// of 0 if there is nothing to move. The worker's generation guards it as in Insert.
func (a *Approx) Move(now time.Time, from int, generation, stamp, last uint64, to int, toGeneration uint64) (newStamp, newLast uint64) {
	a.mu.Lock()
	g := a.of(from)
	var sequence []uint64
	if g != nil && g.generation == generation && g.prompts != nil {
		if p, known := g.prompts.Peek(last); known && p.stamp == stamp {
			sequence = p.end.path()
		}
	}
	a.mu.Unlock()
	if sequence == nil {
		return 0, 0
	}
	a.Withdraw(from, generation, stamp, last)
	return a.Insert(now, to, toGeneration, sequence)
}
