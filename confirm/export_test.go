// SPDX-License-Identifier: Apache-2.0

package confirm

import (
	"fmt"
	"time"
)

// JudgeSteps is Judge. It returns how many blocks it read to judge against requests, too.
func (t *Table) JudgeSteps(now time.Time, c Cache) (changes []Change, steps int) {
	j := t.judge(now, c)
	return j.changes, j.steps
}

// Check returns an error if an invariant of the table or a bound is broken.
func (t *Table) Check() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	open, inChunk := map[*worker]int{}, [chunks]int{}
	words, sum, ids := 0, 0, 0
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
			ids += len(s.ids)
		}
	}
	for i, c := range t.chunks {
		if c != nil && c.open != inChunk[i] {
			return fmt.Errorf("chunk %d has %d open requests, want %d", i, c.open, inChunk[i])
		}
	}
	for of, w := range t.workers {
		n := w.old.words() + w.recent.words()
		if words += n; w.open != open[w] || n > logWords {
			return fmt.Errorf("worker %v: %d open, want %d; a log of %d words", of, w.open, open[w], n)
		}
		if events := len(w.old.events) + len(w.recent.events); w.first+uint64(events) != w.stored {
			return fmt.Errorf("worker %v: %d events from %d on, and %d stored", of, events, w.first, w.stored)
		}
	}
	if words != t.words || words > allWords || sum != t.suspects || sum > suspects || ids != t.ids || ids > idsOfAll || len(t.workers) > maxWorkers {
		return fmt.Errorf("%d words, want %d; %d requests with %d ids, want %d with %d", t.words, words, t.suspects, t.ids, sum, ids)
	}
	if n := len(t.tokens.halves[0].ids) + len(t.tokens.halves[1].ids); n > allTokens {
		return fmt.Errorf("%d ids of stored blocks", n)
	}
	return nil
}
