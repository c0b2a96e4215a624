// SPDX-License-Identifier: Apache-2.0

package scorer_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvroute/kvroute/scorer"
)

func TestSharedPrefixCountsOnce(t *testing.T) {
	var s scorer.Slots
	const w70, w71, w8 = 0, 1, 2
	s.Add("a", w70, []uint64{11, 22, 33}, 0)
	s.Add("b", w70, []uint64{11, 22, 44}, 0)
	s.Add("c", w71, []uint64{11, 22, 55}, 0)
	prompt := []uint64{11, 22, 33, 66}
	for worker, want := range []struct{ active, potential int }{{4, 5}, {3, 5}, {0, 4}} {
		active := s.Load(worker).Blocks
		if got := active + s.AdditionalBlocks(worker, prompt); active != want.active || got != want.potential {
			t.Errorf("worker %d: active %d, potential %d; want %d and %d", worker, active, got, want.active, want.potential)
		}
	}
	s.Free("b")
	if got := s.Load(w70).Blocks; got != 3 {
		t.Errorf("after b is free: %d active blocks, want 3", got)
	}
}

func TestPrefillIsPendingUntilTheFirstToken(t *testing.T) {
	var s scorer.Slots
	check := func(after string, pend, blocks int) {
		t.Helper()
		if l := s.Load(0); l.PendTokens != pend || l.Blocks != blocks {
			t.Errorf("after %s: %d pending tokens, %d blocks; want %d and %d", after, l.PendTokens, l.Blocks, pend, blocks)
		}
	}
	s.Add("a", 0, []uint64{1, 2}, 48)
	s.Add("b", 0, []uint64{1, 3}, 16)
	check("both came", 64, 3)
	if !s.MarkPrefillCompleted("a") || s.MarkPrefillCompleted("a") {
		t.Error("a's first token must be news once")
	}
	check("a's first token", 16, 3)
	s.Free("b")
	check("b ended", 0, 2)
	if !s.Free("a") || s.Free("a") {
		t.Error("a's end must be news once")
	}
	check("a ended", 0, 0)
}

func TestOddCallsChangeNothing(t *testing.T) {
	var s scorer.Slots
	s.Add("a", 1, []uint64{1}, 16)
	before := s.Load(1)
	if s.Add("a", 0, []uint64{9}, 99) {
		t.Error("a second slot for one id must be refused")
	}
	if s.Add("x", -1, nil, 1) {
		t.Error("a slot on no worker must be refused")
	}
	if s.MarkPrefillCompleted("nobody") || s.Free("nobody") {
		t.Error("an unknown id must not be news")
	}
	s.RemoveWorker(-1)
	s.RemoveWorker(99)
	if got := s.Load(1); got != before || s.Load(0) != (scorer.Load{}) || s.Load(99) != (scorer.Load{}) {
		t.Errorf("load of worker 1 is %+v, want %+v; of others %+v %+v, want none", got, before, s.Load(0), s.Load(99))
	}
	s.Add("negative", 2, nil, -5)
	if got := s.Load(2).PendTokens; got != 0 {
		t.Errorf("negative prefill counts as %d, want 0", got)
	}
	if got := s.AdditionalBlocks(-1, []uint64{1, 2}); got != 2 {
		t.Errorf("a worker never heard of: %d additional blocks, want 2", got)
	}
}

// slowSlots recomputes everything from the list of live slots.
type slowSlots map[string]slowSlot

type slowSlot struct {
	worker, pend int
	completed    bool
	blocks       []uint64
}

func (m slowSlots) load(worker int) (l scorer.Load) {
	distinct := map[uint64]bool{}
	for _, s := range m {
		if s.worker != worker {
			continue
		}
		l.Requests++
		if !s.completed {
			l.PendTokens += s.pend
		}
		for _, b := range s.blocks {
			distinct[b] = true
		}
	}
	l.Blocks = len(distinct)
	return l
}

func TestSlotsEqualSlowModel(t *testing.T) {
	const workers = 3
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var s scorer.Slots
		m := slowSlots{}
		for step := range 2000 {
			id := fmt.Sprint("r", rng.IntN(20))
			switch op := rng.IntN(100); {
			case op < 45:
				w, pend := rng.IntN(workers), rng.IntN(100)
				// Chains that branch: a hash names all that is before it.
				blocks, at := []uint64{}, uint64(1)
				for range rng.IntN(6) {
					at = at*2 + rng.Uint64N(2)
					blocks = append(blocks, at)
				}
				_, exists := m[id]
				before, additional := s.Load(w).Blocks, s.AdditionalBlocks(w, blocks)
				if s.Add(id, w, blocks, pend) == exists {
					t.Fatalf("seed %d, step %d: Add(%s) accepted %v, want %v", seed, step, id, exists, !exists)
				}
				if !exists {
					m[id] = slowSlot{worker: w, pend: pend, blocks: blocks}
					if got := s.Load(w).Blocks - before; got != additional {
						t.Fatalf("seed %d, step %d: adding %d raised the active blocks by %d, announced %d", seed, step, blocks, got, additional)
					}
				}
			case op < 65:
				slot, exists := m[id]
				if got, want := s.MarkPrefillCompleted(id), exists && !slot.completed; got != want {
					t.Fatalf("seed %d, step %d: first token of %s was news: %v, want %v", seed, step, id, got, want)
				}
				if exists {
					slot.completed = true
					m[id] = slot
				}
			case op < 99:
				_, exists := m[id]
				if got := s.Free(id); got != exists {
					t.Fatalf("seed %d, step %d: end of %s was news: %v, want %v", seed, step, id, got, exists)
				}
				delete(m, id)
			default:
				w := rng.IntN(workers)
				s.RemoveWorker(w)
				for id, slot := range m {
					if slot.worker == w {
						delete(m, id)
					}
				}
			}
			for w := range workers {
				if got, want := s.Load(w), m.load(w); got != want {
					t.Fatalf("seed %d, step %d: load of worker %d is %+v, want %+v", seed, step, w, got, want)
				}
			}
			if s.Len() != len(m) {
				t.Fatalf("seed %d, step %d: %d slots, want %d", seed, step, s.Len(), len(m))
			}
		}
		for id := range m {
			s.Free(id)
		}
		for w := range workers {
			if got := s.Load(w); got != (scorer.Load{}) {
				t.Fatalf("seed %d: worker %d has %+v after all requests ended", seed, w, got)
			}
		}
	}
}
