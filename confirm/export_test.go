// SPDX-License-Identifier: Apache-2.0

package confirm

import "fmt"

// Check returns an error if an invariant of the table or a bound is broken.
func (t *Table) Check() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	open, inChunk, hashes := map[*worker]int{}, [chunks]int{}, 0
	sum := 0
	for i := range t.slots {
		s := &t.slots[i]
		if !s.open {
			if s.ids != nil {
				return fmt.Errorf("slot %d has ids and is not open", i)
			}
			continue
		}
		open[s.worker]++
		if inChunk[s.chunk]++; t.chunks[s.chunk].age != s.age {
			return fmt.Errorf("the hashes of slot %d were overwritten", i)
		}
		if s.ids != nil {
			sum++
		}
	}
	for i, c := range t.chunks {
		if c != nil && c.open != inChunk[i] {
			return fmt.Errorf("chunk %d has %d open requests, want %d", i, c.open, inChunk[i])
		}
	}
	for of, w := range t.workers {
		if hashes += len(w.hashes); w.open != open[w] || len(w.hashes) > logHashes || len(w.events) > logEvents {
			return fmt.Errorf("worker %v: %d open, want %d; %d hashes, %d events", of, w.open, open[w], len(w.hashes), len(w.events))
		}
		if w.first+uint64(len(w.events)) != w.stored {
			return fmt.Errorf("worker %v: %d events from %d on, and %d stored", of, len(w.events), w.first, w.stored)
		}
	}
	if hashes != t.hashes || hashes > allHashes || sum != t.suspects || sum > suspects || len(t.workers) > maxWorkers || len(t.tokens) > allTokens {
		return fmt.Errorf("%d hashes, want %d; %d requests with ids, want %d", t.hashes, hashes, t.suspects, sum)
	}
	return nil
}
