// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"sync"
)

// Worker is a worker's rank, which has a cache of its own.
type Worker struct {
	ID     uint64
	DPRank uint32
}

// Named is an index whose workers go by their names, and which is asked for
// tokens: the plain form. It may be used by any number of goroutines.
type Named struct {
	index     *Index
	blockSize int

	mu sync.RWMutex
	// mu guards the fields below. Who holds it for reading knows that the
	// numbers stay whose they are.
	numbers map[Worker]int
	names   []Worker
	vacant  []int // numbers free again
}

// NewNamed returns an empty index of blocks of blockSize tokens.
func NewNamed(c Config, blockSize int) *Named {
	return &Named{index: New(c), blockSize: blockSize, numbers: map[Worker]int{}}
}

// Index returns the index beneath, to be read.
func (n *Named) Index() *Index { return n.index }

// Apply applies one event of a worker, which need not be known.
func (n *Named) Apply(w Worker, ev Event) Outcome {
	n.mu.RLock()
	if number, ok := n.numbers[w]; ok {
		defer n.mu.RUnlock()
		return n.index.Apply(number, ev)
	}
	n.mu.RUnlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.index.Apply(n.numberLocked(w), ev)
}

func (n *Named) numberLocked(w Worker) int {
	number, ok := n.numbers[w]
	if ok {
		return number
	}
	if last := len(n.vacant) - 1; last >= 0 {
		number = n.vacant[last]
		n.vacant = n.vacant[:last]
		n.names[number] = w
	} else {
		number = len(n.names)
		n.names = append(n.names, w)
	}
	n.numbers[w] = number
	return number
}

// RemoveRank forgets one rank of a worker.
func (n *Named) RemoveRank(w Worker) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if number, ok := n.numbers[w]; ok {
		n.index.RemoveWorker(number)
		delete(n.numbers, w)
		n.vacant = append(n.vacant, number)
	}
}

// RemoveWorker forgets all ranks of a worker.
func (n *Named) RemoveWorker(id uint64) {
	n.mu.RLock()
	var ranks []Worker
	for w := range n.numbers {
		if w.ID == id {
			ranks = append(ranks, w)
		}
	}
	n.mu.RUnlock()
	for _, w := range ranks {
		n.RemoveRank(w)
	}
}

// FindMatchesForRequest counts, for each worker that has any, how many leading
// blocks of a prompt it holds. The prompt has neither adapter nor salt.
func (n *Named) FindMatchesForRequest(tokens []uint32) map[Worker]int {
	local := AppendLocalHashes(nil, tokens, n.blockSize, Seed("", ""))
	n.mu.RLock()
	defer n.mu.RUnlock()
	counts := make([]int32, len(n.names))
	n.index.Match(counts, local)
	matches := map[Worker]int{}
	for number, count := range counts {
		if count > 0 {
			matches[n.names[number]] = int(count)
		}
	}
	return matches
}
