// SPDX-License-Identifier: Apache-2.0

package scorer

import "slices"

// Slots keeps account of the requests in flight: one slot each, from the decision
// to the end of the response. What a worker is busy with is predicted from these,
// at once, and never waits for the engine's own report.
//
// # Invariants
//
//   - The load of a worker equals the load recomputed from the slots on it: its
//     requests are their number, its pending tokens the sum of the prefill tokens
//     of those without a first token, its active blocks the distinct sequence
//     hashes among them.
//   - Nothing is negative, and after all slots are freed nothing is left.
//   - Adding a slot raises the active blocks by exactly the additional blocks
//     that were asked for before, if the hashes are chained.
//
// The zero value is empty and ready. A Slots may not be used by two goroutines at
// once.
type Slots struct {
	slots   map[string]*slot
	workers []workerLoad
}

// Load is what the slots on one worker add up to.
type Load struct {
	Requests   int // slots on the worker
	PendTokens int // prefill tokens of those before their first token
	Blocks     int // distinct blocks of all of them
}

type slot struct {
	worker int
	pend   int      // prefill tokens, until the first token
	blocks []uint64 // sequence hashes of the prompt's full blocks
}

type workerLoad struct {
	requests int
	pend     int
	blocks   map[uint64]int32 // sequence hash -> slots that use it; never 0
}

// Add takes a slot for the request id on a worker. blocks are the sequence hashes
// of the prompt's full blocks, and are copied; prefillTokens is what the worker
// must still compute of the prompt, negative counts as 0. It returns false, and
// changes nothing, if the id has a slot already.
func (s *Slots) Add(id string, worker int, blocks []uint64, prefillTokens int) bool {
	if _, exists := s.slots[id]; exists || worker < 0 {
		return false
	}
	for len(s.workers) <= worker {
		s.workers = append(s.workers, workerLoad{})
	}
	if s.slots == nil {
		s.slots = make(map[string]*slot)
	}
	taken := &slot{worker: worker, pend: max(0, prefillTokens), blocks: slices.Clone(blocks)}
	s.slots[id] = taken

	w := &s.workers[worker]
	w.requests++
	w.pend += taken.pend
	if w.blocks == nil {
		w.blocks = make(map[uint64]int32)
	}
	for _, b := range taken.blocks {
		w.blocks[b]++
	}
	return true
}

// MarkPrefillCompleted notes the first token of a request: its prefill tokens are
// no longer pending. It returns false, and changes nothing, if the id has no slot
// or its first token was noted before.
func (s *Slots) MarkPrefillCompleted(id string) bool {
	taken := s.slots[id]
	if taken == nil || taken.pend < 0 {
		return false
	}
	s.workers[taken.worker].pend -= taken.pend
	taken.pend = -1 // completed
	return true
}

// Free gives the slot of a request back. It returns false, and changes nothing,
// if the id has none.
func (s *Slots) Free(id string) bool {
	taken := s.slots[id]
	if taken == nil {
		return false
	}
	delete(s.slots, id)
	w := &s.workers[taken.worker]
	w.requests--
	w.pend -= max(0, taken.pend)
	for _, b := range taken.blocks {
		if w.blocks[b]--; w.blocks[b] == 0 {
			delete(w.blocks, b)
		}
	}
	return true
}

// RemoveWorker drops every slot on a worker. Its number may be used again.
func (s *Slots) RemoveWorker(worker int) {
	if worker < 0 || worker >= len(s.workers) {
		return
	}
	for id, taken := range s.slots {
		if taken.worker == worker {
			delete(s.slots, id)
		}
	}
	s.workers[worker] = workerLoad{}
}

// Load returns what the slots on a worker add up to.
func (s *Slots) Load(worker int) Load {
	if worker < 0 || worker >= len(s.workers) {
		return Load{}
	}
	w := &s.workers[worker]
	return Load{Requests: w.requests, PendTokens: w.pend, Blocks: len(w.blocks)}
}

// AdditionalBlocks returns how many of the blocks a request with these sequence
// hashes would add to a worker: those behind the longest prefix that is active
// there.
func (s *Slots) AdditionalBlocks(worker int, blocks []uint64) int {
	if worker < 0 || worker >= len(s.workers) {
		return len(blocks)
	}
	active := s.workers[worker].blocks
	for i, b := range blocks {
		if active[b] == 0 {
			return len(blocks) - i
		}
	}
	return 0
}

// Len returns the number of slots taken.
func (s *Slots) Len() int { return len(s.slots) }
