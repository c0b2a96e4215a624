// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"maps"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/indexer"
)

// slowParked is a model of Parked: it scans all waiting events again and again until
// nothing changes.
type slowParked struct {
	x       *indexer.Index
	waiting map[int][]*slowEvent
}

type slowEvent struct {
	event   indexer.Event
	until   time.Time
	removed []uint64
}

func (p *slowParked) apply(now time.Time, worker int, ev indexer.Event) indexer.Outcome {
	out := p.x.Apply(worker, ev)
	all := p.waiting[worker]
	switch {
	case ev.Kind == indexer.Cleared:
		for _, w := range all {
			out.Orphan += len(w.event.Blocks)
		}
		delete(p.waiting, worker)
	case out.Orphan > 0:
		p.waiting[worker] = append(all, &slowEvent{event: ev, until: now.Add(30 * time.Second)})
		out.Parked, out.Orphan = out.Orphan, 0
	case ev.Kind == indexer.Removed && out.Unknown > 0:
		for _, w := range all {
			for _, b := range w.event.Blocks {
				if w.event.Tier == ev.Tier && slices.Contains(ev.Externals, b.External) && !slices.Contains(w.removed, b.External) {
					w.removed = append(w.removed, b.External)
				}
			}
		}
	case ev.Kind == indexer.Stored && out.Invalid == 0:
		p.wake(worker, ev, &out)
	}
	return out
}

func (p *slowParked) wake(worker int, ev indexer.Event, out *indexer.Outcome) {
	type block struct {
		tier     indexer.Tier
		external uint64
	}
	arrived := map[block]bool{}
	arrive := func(tier indexer.Tier, e uint64) {
		arrived[block{tier, e}] = true
		for _, w := range p.waiting[worker] {
			if w.event.Tier == tier {
				w.removed = slices.DeleteFunc(w.removed, func(r uint64) bool { return r == e })
			}
		}
	}
	for _, b := range ev.Blocks {
		arrive(ev.Tier, b.External)
	}
	for again := true; again; {
		again = false
		for i := 0; i < len(p.waiting[worker]); i++ {
			w := p.waiting[worker][i]
			there := arrived[block{w.event.Tier, w.event.Parent}]
			for t := range indexer.Tier(modelTiers) {
				there = there || w.event.Tier != indexer.Device && arrived[block{t, w.event.Parent}]
			}
			if !there {
				continue
			}
			again = true
			p.waiting[worker] = slices.Delete(p.waiting[worker], i, i+1)
			i--
			sum(out, p.x.Apply(worker, w.event))
			if len(w.removed) > 0 {
				sum(out, p.x.Apply(worker, indexer.Event{Kind: indexer.Removed, Tier: w.event.Tier, Externals: w.removed}))
			}
			for _, b := range w.event.Blocks {
				if !slices.Contains(w.removed, b.External) {
					arrive(w.event.Tier, b.External)
				}
			}
		}
	}
	if len(p.waiting[worker]) == 0 {
		delete(p.waiting, worker)
	}
}

// sum adds all fields of an outcome.
func sum(out *indexer.Outcome, more indexer.Outcome) {
	a, b := reflect.ValueOf(out).Elem(), reflect.ValueOf(more)
	for i := range a.NumField() {
		a.Field(i).SetInt(a.Field(i).Int() + b.Field(i).Int())
	}
}

func (p *slowParked) expire(now time.Time) map[int]int {
	var dropped map[int]int
	for worker, all := range p.waiting {
		p.waiting[worker] = slices.DeleteFunc(all, func(w *slowEvent) bool {
			if now.Before(w.until) {
				return false
			}
			if dropped == nil {
				dropped = map[int]int{}
			}
			dropped[worker] += len(w.event.Blocks)
			return true
		})
		if len(p.waiting[worker]) == 0 {
			delete(p.waiting, worker)
		}
	}
	return dropped
}

func (p *slowParked) all() map[int][]indexer.Event {
	all := map[int][]indexer.Event{}
	for worker, waiting := range p.waiting {
		for _, w := range waiting {
			all[worker] = append(all[worker], w.event)
			if len(w.removed) > 0 {
				all[worker] = append(all[worker], indexer.Event{Kind: indexer.Removed, Tier: w.event.Tier, Externals: slices.Sorted(slices.Values(w.removed))})
			}
		}
	}
	return all
}

func TestParkedEqualsSlowModel(t *testing.T) {
	const workers = 2
	woken, mostWaiting := 0, 0
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 31))
		externals := 10 + rng.Uint64N(90)
		x, y := indexer.New(indexer.Config{}), indexer.New(indexer.Config{})
		p, slow := indexer.NewParked(x), &slowParked{y, map[int][]*slowEvent{}}
		now := time.Unix(0, 0)
		for step := range 400 {
			now = now.Add(time.Duration(rng.IntN(500)) * time.Millisecond)
			ev := indexer.Event{Kind: indexer.Stored, Tier: indexer.Tier(max(0, rng.IntN(5)-2))}
			switch n := rng.IntN(200); {
			case n == 0:
				ev = indexer.Event{Kind: indexer.Cleared}
			case n < 50:
				ev.Kind = indexer.Removed
				for range 1 + rng.IntN(4) {
					ev.Externals = append(ev.Externals, 1+rng.Uint64N(externals))
				}
			default:
				if rng.IntN(12) > 0 {
					ev.HasParent, ev.Parent = true, 1+rng.Uint64N(externals)
				}
				for range 1 + rng.IntN(3) {
					b := 1 + rng.Uint64N(externals)
					ev.Blocks = append(ev.Blocks, indexer.Block{External: b, Local: b % 7})
				}
			}
			w := rng.IntN(workers)
			mostWaiting = max(mostWaiting, len(slow.waiting[w]))
			got, want := p.Apply(now, w, ev), slow.apply(now, w, ev)
			if got != want {
				t.Fatalf("seed %d, step %d: %+v of worker %d makes %+v, want %+v", seed, step, ev, w, got, want)
			}
			if ev.Kind == indexer.Stored && want.Parked == 0 && want.Invalid == 0 {
				woken += want.Stored + want.Duplicate + want.Conflict - len(ev.Blocks)
			}
			if a, b := p.Expire(now), slow.expire(now); !maps.Equal(a, b) {
				t.Fatalf("seed %d, step %d: %v expired, want %v", seed, step, a, b)
			}
			if a, b := p.Events(), slow.all(); !reflect.DeepEqual(a, b) {
				t.Fatalf("seed %d, step %d: waiting after %+v (-want +got):\n%s", seed, step, ev, cmp.Diff(b, a))
			}
			if step%16 > 0 {
				continue
			}
			if a, b := held(x, workers), held(y, workers); !reflect.DeepEqual(a, b) {
				t.Fatalf("seed %d, step %d: held %d, want %d", seed, step, a, b)
			}
		}
		for w := range workers {
			p.RemoveWorker(w)
		}
		if p.Bytes() != 0 || len(p.Events()) > 0 {
			t.Fatalf("seed %d: %d bytes, %v wait after all workers were removed", seed, p.Bytes(), p.Events())
		}
	}
	if woken < 500 || mostWaiting < 20 {
		t.Errorf("%d blocks were woken, at most %d events waited", woken, mostWaiting)
	}
}

// Events of any size leave the waiting blocks bounded and counted, and no event takes
// long because of waiting ones.
func TestWaitingBlocksAreBounded(t *testing.T) {
	const each = 512 // blocks in an event
	now := time.Unix(0, 0)
	p := indexer.NewParked(indexer.New(indexer.Config{}))
	waits := func(worker, number, blocks int) bool {
		ev := indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: 1 << 60}
		for i := range blocks {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: uint64(number*each+i) + 1, Local: 1})
		}
		out := p.Apply(now, worker, ev)
		if out.Parked+out.Orphan != blocks {
			t.Fatalf("%+v", out)
		}
		return out.Parked > 0
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for worker := range 8 {
		for n := range 1 << 16 / each {
			if !waits(worker, n, each) {
				t.Fatalf("worker %d: event %d does not wait", worker, n)
			}
		}
		if waits(worker, 200, 1) {
			t.Fatalf("worker %d: more than 65,536 blocks wait", worker)
		}
	}
	if waits(8, 0, 1) {
		t.Error("more than 524,288 blocks wait")
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	took := int(after.HeapAlloc) - int(before.HeapAlloc)
	if got := p.Bytes(); got < took*3/4 || got > took*5/4 {
		t.Errorf("%d bytes, the heap has %d", got, took)
	}

	start := time.Now()
	unknown := removed()
	for i := range uint64(20_000) {
		unknown.Externals = append(unknown.Externals, 1<<50+i, 1) // block 1 waits and is named each time
	}
	for range 100 {
		p.Apply(now, 0, unknown)
	}
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("a hundred removals of what does not wait take %v", took)
	}
	if n := p.Expire(now.Add(time.Minute)); n[0] != 1<<16 || len(n) != 8 || p.Bytes() != 0 {
		t.Errorf("%v expired, %d bytes left", n, p.Bytes())
	}
	if !waits(8, 0, each) {
		t.Error("there is no room after all events have expired")
	}
}
