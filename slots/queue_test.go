// SPDX-License-Identifier: Apache-2.0

package slots_test

import (
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/slots"
)

func admitAll(q *slots.Queue[string]) string {
	var order []string
	q.Admit(func(it *slots.Item[string]) bool {
		order = append(order, it.Value)
		return true
	})
	return strings.Join(order, " ")
}

func TestQueueOrder(t *testing.T) {
	const anyone = slots.AnyWorker
	for _, c := range []struct {
		policy slots.QueuePolicy
		jump   float64 // queue jump of B
		want   string
	}{
		{slots.FCFS, 0, "D A B C"},
		{slots.WSPT, 0, "D C B A"},
		{slots.LCFS, 0, "D C B A"},
		{slots.FCFS, 5, "D B A C"},
		{slots.FCFS, -5, "D A B C"},
		{slots.FCFS, math.NaN(), "D A B C"},
		{slots.WSPT, 5, "D B C A"},
		{slots.LCFS, 5, "D B C A"},
	} {
		q := slots.NewQueue[string](c.policy, 10)
		for _, p := range []struct {
			name string
			w    slots.Waiting
		}{
			{"A", slots.Waiting{Lane: anyone, Arrival: 0, Uncached: 8000}},
			{"B", slots.Waiting{Lane: anyone, Arrival: time.Second, Uncached: 1000, Jump: c.jump}},
			{"C", slots.Waiting{Lane: anyone, Arrival: 2 * time.Second, Uncached: 500}},
			{"D", slots.Waiting{Lane: anyone, Arrival: 3 * time.Second, Uncached: 8000, Strict: 1}},
		} {
			if _, err := q.Push(p.w, p.name); err != nil {
				t.Fatal(err)
			}
		}
		if got := admitAll(q); got != c.want || q.Len() != 0 {
			t.Errorf("%s, jump %v: %s with %d left, want %s", c.policy, c.jump, got, q.Len(), c.want)
		}
	}
}

func TestQueueKeys(t *testing.T) {
	b := slots.Waiting{Arrival: time.Second, Uncached: 1000, Jump: 5}
	for _, c := range []struct {
		policy slots.QueuePolicy
		w      slots.Waiting
		want   float64
	}{
		{slots.FCFS, b, 4},
		{slots.WSPT, slots.Waiting{Uncached: 8000}, .000125},
		{slots.WSPT, slots.Waiting{Uncached: 1000}, .001},
		{slots.WSPT, slots.Waiting{Uncached: 500}, .002},
		{slots.WSPT, slots.Waiting{}, 1},
		{slots.LCFS, b, 6},
	} {
		if got := c.policy.Key(&c.w); got != c.want {
			t.Errorf("%s of %+v: key %v, want %v", c.policy, c.w, got, c.want)
		}
	}
	if err := slots.QueuePolicy("sjf").Validate(); err == nil || !strings.Contains(err.Error(), "router_queue_policy is sjf, want one of") {
		t.Errorf("unknown policy: %v", err)
	}
	if err := slots.WSPT.Validate(); err != nil {
		t.Error(err)
	}
}

func TestQueueIsFull(t *testing.T) {
	q := slots.NewQueue[int](slots.FCFS, 10_000)
	var last *slots.Item[int]
	for i := range 10_000 {
		it, err := q.Push(slots.Waiting{Lane: i % 3}, i)
		if err != nil {
			t.Fatal(err)
		}
		last = it
	}
	if _, err := q.Push(slots.Waiting{}, 0); !errors.Is(err, slots.ErrQueueFull) {
		t.Errorf("request 10,001: %v, want that the queue is full", err)
	}
	if !q.Remove(last) || q.Remove(last) || q.Len() != 9999 {
		t.Errorf("a cancelled request must leave once: %d left", q.Len())
	}
	if _, err := q.Push(slots.Waiting{}, 0); err != nil {
		t.Errorf("after one request has left: %v", err)
	}
}

// A request that needs much room keeps its place until there is enough.
func TestQueueHeadIsNotOvertaken(t *testing.T) {
	q := slots.NewQueue[string](slots.FCFS, 10)
	q.Push(slots.Waiting{Lane: slots.AnyWorker}, "large")
	q.Push(slots.Waiting{Lane: slots.AnyWorker, Arrival: 1}, "small")
	q.Push(slots.Waiting{Lane: 7}, "pinned")
	var admitted []string
	q.Admit(func(it *slots.Item[string]) bool {
		if it.Value == "large" {
			return false
		}
		admitted = append(admitted, it.Value)
		return true
	})
	if len(admitted) != 1 || admitted[0] != "pinned" || q.Len() != 2 {
		t.Errorf("admitted %v, want the pinned one alone", admitted)
	}
}

// The queue agrees with a sorted list.
func TestQueueEqualsSlowModel(t *testing.T) {
	type waiter struct {
		it    *slots.Item[int]
		order int
	}
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		policy := []slots.QueuePolicy{slots.FCFS, slots.LCFS, slots.WSPT}[seed%3]
		q := slots.NewQueue[int](policy, 40)
		var model []waiter
		first := func(a, b waiter) int {
			return cmp.Or(cmp.Compare(a.it.Lane, b.it.Lane), cmp.Compare(b.it.Strict, a.it.Strict),
				cmp.Compare(policy.Key(&b.it.Waiting), policy.Key(&a.it.Waiting)),
				cmp.Compare(a.it.Arrival, b.it.Arrival), cmp.Compare(a.order, b.order))
		}
		for step := range 3000 {
			now := time.Duration(step) * time.Second
			switch op := rng.IntN(100); {
			case op < 60:
				w := slots.Waiting{
					Strict: rng.IntN(2), Jump: float64(rng.IntN(5)), Arrival: now - time.Duration(rng.IntN(3))*time.Second,
					Uncached: rng.IntN(5), Lane: rng.IntN(3) - 1,
				}
				it, err := q.Push(w, step)
				if (err != nil) != (len(model) == 40) {
					t.Fatalf("seed %d, step %d: %v with %d waiting", seed, step, err, len(model))
				}
				if err == nil {
					model = append(model, waiter{it, step})
				}
			case op < 75 && len(model) > 0:
				i := rng.IntN(len(model))
				if !q.Remove(model[i].it) || q.Remove(model[i].it) {
					t.Fatalf("seed %d, step %d: a waiting request must leave once", seed, step)
				}
				model = slices.Delete(model, i, i+1)
			default:
				slices.SortFunc(model, first)
				room := rng.IntN(4)
				var got, want []int
				q.Admit(func(it *slots.Item[int]) bool {
					if len(got) >= room || it.Value%7 == 0 {
						return false
					}
					got = append(got, it.Value)
					return true
				})
				blocked, left := map[int]bool{}, model[:0]
				for _, w := range model {
					if blocked[w.it.Lane] || len(want) >= room || w.it.Value%7 == 0 {
						blocked[w.it.Lane] = true
						left = append(left, w)
						continue
					}
					want = append(want, w.it.Value)
				}
				model = left
				if !slices.Equal(got, want) {
					t.Fatalf("seed %d, step %d: admitted %v, want %v", seed, step, got, want)
				}
			}
			if q.Len() != len(model) {
				t.Fatalf("seed %d, step %d: %d wait, want %d", seed, step, q.Len(), len(model))
			}
		}
	}
}
