// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/indexer"
)

func stored(parent uint64, blocks ...uint64) indexer.Event {
	ev := indexer.Event{Kind: indexer.Stored, HasParent: parent != 0, Parent: parent}
	for _, b := range blocks {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: b, Local: b})
	}
	return ev
}

func removed(blocks ...uint64) indexer.Event {
	return indexer.Event{Kind: indexer.Removed, Externals: blocks}
}

func TestEventsWaitForTheirParent(t *testing.T) {
	type outcome = indexer.Outcome
	type step struct {
		after time.Duration
		event indexer.Event
		want  outcome
	}
	cleared := indexer.Event{Kind: indexer.Cleared}
	for name, c := range map[string]struct {
		steps   []step
		overlap int32 // overlap with the prompt 1 2 3 4 5 6
	}{
		"the parent comes": {[]step{
			{0, stored(2, 3, 4), outcome{Parked: 2}},
			{0, stored(0, 1, 2), outcome{Stored: 4}},
		}, 4},
		"a chain that comes in reverse": {[]step{
			{0, stored(4, 5, 6), outcome{Parked: 2}},
			{0, stored(2, 3, 4), outcome{Parked: 2}},
			{0, stored(0, 1, 2), outcome{Stored: 6}},
		}, 6},
		"what waits is removed": {[]step{
			{0, stored(2, 3, 4), outcome{Parked: 2}},
			{0, removed(3), outcome{Unknown: 1}},
			{0, stored(0, 1, 2), outcome{Stored: 4, Removed: 1}},
			{0, stored(2, 3), outcome{Stored: 1}},
		}, 4},
		"what waits is removed and comes again": {[]step{
			{0, stored(2, 3), outcome{Parked: 1}},
			{0, removed(3), outcome{Unknown: 1}},
			{0, stored(0, 3), outcome{Stored: 1}},
			{0, stored(0, 1, 2), outcome{Stored: 2, Conflict: 1}},
		}, 2},
		"a clear ends the wait": {[]step{
			{0, stored(2, 3), outcome{Parked: 1}},
			{0, cleared, outcome{Orphan: 1}},
			{0, stored(0, 1, 2), outcome{Stored: 2}},
		}, 2},
		"the parent is removed again": {[]step{
			{0, stored(0, 1, 2), outcome{Stored: 2}},
			{0, removed(2), outcome{Removed: 1}},
			{0, stored(2, 3), outcome{Parked: 1}},
			{0, stored(1, 2), outcome{Stored: 2}},
		}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			x := indexer.New(indexer.Config{})
			p := indexer.NewParked(x)
			now := time.Unix(0, 0)
			for i, s := range c.steps {
				if got := p.Apply(now.Add(s.after), 0, s.event); got != s.want {
					t.Errorf("step %d: %+v, want %+v", i, got, s.want)
				}
			}
			dst := make([]int32, 1)
			if x.Match(dst, []uint64{1, 2, 3, 4, 5, 6}); dst[0] != c.overlap {
				t.Errorf("overlap %d, want %d", dst[0], c.overlap)
			}
		})
	}
}

func TestWaitingEnds(t *testing.T) {
	x := indexer.New(indexer.Config{})
	p := indexer.NewParked(x)
	now := time.Unix(0, 0)
	p.Apply(now, 0, stored(9, 1, 2))
	p.Apply(now.Add(time.Second), 0, stored(9, 3))
	p.Apply(now, 1, stored(9, 3))
	p.RemoveWorker(1)
	for _, c := range []struct {
		after time.Duration
		want  map[int]int
	}{
		{30*time.Second - 1, nil},
		{30 * time.Second, map[int]int{0: 2}},
		{40 * time.Second, map[int]int{0: 1}},
		{50 * time.Second, nil},
	} {
		if got := p.Expire(now.Add(c.after)); !maps.Equal(got, c.want) {
			t.Errorf("after %v: dropped %v, want %v", c.after, got, c.want)
		}
	}
	if out := p.Apply(now, 0, stored(0, 9)); out != (indexer.Outcome{Stored: 1}) {
		t.Errorf("the parent comes too late: %+v", out)
	}
	for i := range uint64(1024) {
		p.Apply(now, 2, stored(5000+i, 1))
	}
	if out := p.Apply(now, 2, stored(9000, 1)); out != (indexer.Outcome{Orphan: 1}) {
		t.Errorf("one too many: %+v, want it dropped", out)
	}
}

// Blocks on a lower tier may follow blocks that wait on the device, but not the other way
// round.
func TestTiersWaitForTheirParent(t *testing.T) {
	x := indexer.New(indexer.Config{})
	p := indexer.NewParked(x)
	now := time.Unix(0, 0)
	host := stored(2, 3)
	host.Tier = indexer.HostPinned
	device := stored(3, 4)
	for i, c := range []struct {
		event indexer.Event
		want  indexer.Outcome
	}{
		{host, indexer.Outcome{Parked: 1}},
		{device, indexer.Outcome{Parked: 1}},
		{stored(0, 1, 2), indexer.Outcome{Stored: 3, OtherTier: 1}}, // 3 is in host memory: 4 still waits
		{stored(2, 3), indexer.Outcome{Stored: 2}},
	} {
		if got := p.Apply(now, 0, c.event); got != c.want {
			t.Errorf("event %d: %+v, want %+v", i, got, c.want)
		}
	}
	if n := x.WorkerBlocks(0); n != 5 {
		t.Errorf("%d blocks, want 5", n)
	}
}

// Stored events in any order lead to the same index.
func TestOrderOfStoredEventsDoesNotMatter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 7))
	now := time.Unix(0, 0)
	for range 300 {
		x, m := indexer.New(indexer.Config{}), newModel(1)
		p := indexer.NewParked(x)
		var events []indexer.Event
		var stored []uint64
		for next := uint64(1); len(events) < 60; {
			if rng.IntN(6) == 0 && len(stored) > 0 {
				events = append(events, removed(stored[rng.IntN(len(stored))]))
				continue
			}
			ev := indexer.Event{Kind: indexer.Stored}
			if ev.HasParent = len(stored) > 0 && rng.IntN(4) > 0; ev.HasParent {
				ev.Parent = stored[rng.IntN(len(stored))]
			}
			for range 1 + rng.IntN(5) {
				ev.Blocks = append(ev.Blocks, indexer.Block{External: next, Local: rng.Uint64N(3)})
				stored = append(stored, next)
				next++
			}
			events = append(events, ev)
		}
		for _, ev := range events {
			m.apply(0, ev)
		}
		for i := range events { // between two removals any order is possible
			to := i
			for to < len(events) && events[to].Kind == indexer.Stored {
				to++
			}
			if to > i {
				j := i + rng.IntN(to-i)
				events[i], events[j] = events[j], events[i]
			}
		}
		for _, ev := range events {
			p.Apply(now, 0, ev)
		}
		want := slices.Sorted(maps.Keys(m.owners[0].held))
		if got := held(x, 1)[0]; !slices.Equal(got, want) {
			t.Fatalf("external hashes %d, want %d", got, want)
		}
		for range 20 {
			if err := equal(x, m, (&shape{workers: 1, locals: 3}).prompt(rng, m)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The next events depend only on the index and the waiting events, whatever happened
// before.
func TestWaitingEventsCanBeHandedOn(t *testing.T) {
	waited := 0
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 77))
		now := time.Unix(1755000000, 0)
		event := func() indexer.Event {
			tier := indexer.Tier(rng.IntN(2))
			if rng.IntN(4) == 0 {
				return indexer.Event{Kind: indexer.Removed, Tier: tier, Externals: []uint64{1 + rng.Uint64N(25), 1 + rng.Uint64N(25)}}
			}
			ev := indexer.Event{Kind: indexer.Stored, Tier: tier}
			if rng.IntN(5) > 0 {
				ev.HasParent, ev.Parent = true, 1+rng.Uint64N(25)
			}
			for range 1 + rng.IntN(3) {
				b := 1 + rng.Uint64N(25)
				ev.Blocks = append(ev.Blocks, indexer.Block{External: b, Local: b % 7})
			}
			return ev
		}
		x := indexer.New(indexer.Config{})
		p := indexer.NewParked(x)
		for range rng.IntN(60) {
			p.Apply(now, rng.IntN(2), event())
		}
		y, _, err := indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
			for r := range x.Dump() {
				if !yield(r, nil) {
					return
				}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		q := indexer.NewParked(y)
		for worker, evs := range p.Events() {
			for _, ev := range evs {
				q.Apply(now, worker, ev)
				waited++
			}
		}
		for step := range 60 {
			if a, b := p.Events(), q.Events(); !reflect.DeepEqual(a, b) {
				t.Fatalf("seed %d, step %d: waiting (-was +is):\n%s", seed, step, cmp.Diff(a, b))
			}
			w, ev := rng.IntN(2), event()
			if a, b := p.Apply(now, w, ev), q.Apply(now, w, ev); a != b {
				t.Fatalf("seed %d, step %d: %+v makes %+v, and then %+v", seed, step, ev, a, b)
			}
		}
	}
	if waited < 300 {
		t.Errorf("%d events waited", waited)
	}
}
