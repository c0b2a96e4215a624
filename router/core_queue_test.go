// SPDX-License-Identifier: Apache-2.0

package router

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// slowQueue is a model of the queue that recomputes everything from lists: waiting
// requests, their lanes, and each worker's pending tokens.
type slowQueue struct {
	workers map[uint64]bool // by id: true if the worker may be chosen
	waiting []*waiter
	pend    map[string]int    // pending tokens by request in flight, until its first token
	on      map[string]uint64 // worker of each request in flight
}

func (m *slowQueue) load(worker uint64) (tokens int) {
	for id, w := range m.on {
		if w == worker {
			tokens += m.pend[id]
		}
	}
	return tokens
}

// mustWait reports whether no worker could take the waiter now.
func (m *slowQueue) mustWait(w *waiter, batch int) bool {
	some := false
	for id, fine := range m.workers {
		if !fine || w.in.Pinned != nil && w.in.Pinned.ID != id || w.in.Allowed != nil && !slices.Contains(w.in.Allowed, Worker{ID: id}) {
			continue
		}
		some = true
		if m.load(id) <= batch {
			return false
		}
	}
	return some
}

func (w *waiter) before(v *waiter) bool {
	if w.in.StrictPriority != v.in.StrictPriority {
		return w.in.StrictPriority > v.in.StrictPriority
	}
	return w.item.Arrival < v.item.Arrival // first come, first served; arrival times are distinct
}

// Random inputs lose no request, admit none twice, keep the order of each lane, and let
// no request wait without need.
func TestQueueAgainstASlowModel(t *testing.T) {
	for seed := range uint64(60) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		const batch, limit = 20, 12
		conf, err := Config{Queue: QueueConfig{Threshold: new(1.), Limit: limit}, Mode: []Mode{KV, LeastLoaded, Random}[seed%3]}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		c := newCore(&conf, 8)
		m := slowQueue{workers: map[uint64]bool{}, pend: map[string]int{}, on: map[string]uint64{}}
		now := time.Unix(1000, 0)
		next := 0
		var left *waiter // the waiter removed last

		// settle compares queue and model after an input.
		settle := func() {
			t.Helper()
			for len(c.woken) > 0 {
				w := c.woken[0]
				c.woken = c.woken[1:]
				at := slices.Index(m.waiting, w)
				if at < 0 {
					t.Fatalf("seed %d: %s is woken though it does not wait", seed, w.in.ID)
				}
				if w.stale {
					w.stale, w.in.overlap.matchedAt = false, now
					c.pump(now)
					continue
				}
				m.waiting = slices.Delete(m.waiting, at, at+1)
				switch {
				case w.err == nil:
					for _, v := range m.waiting {
						if sameLane(v, w) && v.before(w) {
							t.Fatalf("seed %d: %s is admitted before %s", seed, w.in.ID, v.in.ID)
						}
					}
					m.pend[w.in.ID], m.on[w.in.ID] = w.to.decision.PrefillTokens, w.to.decision.Worker.ID
				case !errors.Is(w.err, ErrNoWorkers) && !errors.Is(w.err, ErrPinnedUnknown) && !errors.Is(w.err, ErrTooLate) && w != left:
					t.Fatalf("seed %d: %s ends with %v", seed, w.in.ID, w.err)
				}
			}
			if c.queue.Len() != len(m.waiting) || len(c.waiting) != len(m.waiting) {
				t.Fatalf("seed %d: %d wait and %d by id, want %d", seed, c.queue.Len(), len(c.waiting), len(m.waiting))
			}
			if c.slots.Len() != len(m.on) {
				t.Fatalf("seed %d: %d slots, want %d", seed, c.slots.Len(), len(m.on))
			}
			for _, w := range m.waiting {
				first := true
				for _, v := range m.waiting {
					first = first && (v == w || !sameLane(v, w) || w.before(v))
				}
				if first && !m.mustWait(w, batch) {
					t.Fatalf("seed %d: %s waits without need", seed, w.in.ID)
				}
			}
		}
		anybody := func() string {
			ids := []string{"nobody"}
			for id := range m.on {
				ids = append(ids, id)
			}
			slices.Sort(ids)
			return ids[rnd.IntN(len(ids))]
		}
		for range 400 {
			now = now.Add(time.Duration(rnd.IntN(900)+1) * time.Millisecond)
			switch op := rnd.IntN(20); {
			case op < 9:
				next++
				req := &Request{ID: fmt.Sprint("r", next), StrictPriority: rnd.IntN(3), TTFTTarget: time.Duration(rnd.IntN(2)) * 3 * time.Second}
				if rnd.IntN(3) == 0 {
					req.Pinned = &Worker{ID: uint64(rnd.IntN(4) + 1)}
				} else if rnd.IntN(2) == 0 {
					req.Allowed = []Worker{{ID: uint64(rnd.IntN(3) + 1)}}
				}
				in := &decisionInput{
					Request: req, prompt: prompt{tokens: rnd.IntN(30) + 1},
					hashes: hashes{sequence: []uint64{uint64(next)}}, overlap: overlap{matchedAt: now},
				}
				to := new(result)
				w, err := c.submit(now, in, new(choices), to)
				switch {
				case w != nil:
					m.waiting = append(m.waiting, w)
				case err == nil:
					m.pend[req.ID], m.on[req.ID] = to.decision.PrefillTokens, to.decision.Worker.ID
					for _, v := range m.waiting {
						if sameLane(v, &waiter{in: in}) {
							t.Fatalf("seed %d: %s overtakes %s", seed, req.ID, v.in.ID)
						}
					}
				case errors.Is(err, ErrQueueFull) && len(m.waiting) < limit:
					t.Fatalf("seed %d: %v with %d waiting", seed, err, len(m.waiting))
				}
				settle()
			case op < 12:
				id := anybody()
				c.prefillCompleted(now, id, 0, false, SignTold)
				delete(m.pend, id)
				c.pump(now)
				settle()
			case op < 15:
				id := anybody()
				c.slots.Free(id)
				delete(m.pend, id)
				delete(m.on, id)
				c.pump(now)
				settle()
			case op < 17 && len(m.waiting) > 0:
				at := rnd.IntN(len(m.waiting))
				w := m.waiting[at]
				left = w
				if rnd.IntN(2) == 0 {
					c.giveUp(w)
				} else if c.remove(c.waiting[w.in.ID], ErrFreed); !w.done || !errors.Is(w.err, ErrFreed) || c.waiting[w.in.ID] != nil {
					t.Fatalf("seed %d: %s was freed, and has not left: %v", seed, w.in.ID, w.err)
				}
				c.pump(now)
				settle()
				if slices.Contains(m.waiting, w) {
					t.Fatalf("seed %d: %s was removed, and is not woken", seed, w.in.ID)
				}
			case op < 18 || op == 18 && len(m.waiting) > 5:
				c.expire(now)
				c.pump(now)
				settle()
				for _, w := range m.waiting {
					if target := w.in.TTFTTarget; target > 0 && now.Sub(w.since) >= target {
						t.Fatalf("seed %d: %s waits for %v, its target is %v", seed, w.in.ID, now.Sub(w.since), target)
					}
				}
			case op < 19:
				id := uint64(rnd.IntN(3) + 1)
				fine := rnd.IntN(4) > 0
				c.setWorker(&WorkerInfo{ID: id, Models: []string{"m"}, Address: netip.MustParseAddrPort("10.0.0.1:1"), BlockSize: 8, MaxBatchedTokens: batch, Draining: !fine})
				m.workers[id] = fine
				c.pump(now)
				settle()
			default:
				id := uint64(rnd.IntN(3) + 1)
				c.removeWorker(id)
				delete(m.workers, id)
				for r, w := range m.on {
					if w == id {
						delete(m.on, r)
						delete(m.pend, r)
					}
				}
				c.pump(now)
				settle()
			}
		}
	}
}

func sameLane(a, b *waiter) bool {
	if a.in.Pinned == nil || b.in.Pinned == nil {
		return a.in.Pinned == b.in.Pinned
	}
	return *a.in.Pinned == *b.in.Pinned
}
