// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// clock is a clock that only moves by hand.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

func (c *clock) pass(d time.Duration) { c.now = c.now.Add(d) }

func newClock() *clock { return &clock{time.Unix(1_000_000, 0)} }

// book books a prompt; it returns the chosen worker and the overlap known there.
func book(t testing.TB, r *router.Router, id, letters string) (worker uint64, overlap int) {
	t.Helper()
	d, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: prompt(letters)})
	if err != nil {
		t.Fatal(err)
	}
	return d.Worker.ID, d.OverlapBlocks
}

// decide is book without a booking.
func decide(t *testing.T, r *router.Router, letters string) (worker uint64, overlap int) {
	t.Helper()
	return book(t, r, "", letters)
}

// Without events a router remembers the prompts that it sent for the configured time, and
// ignores events.
func TestNoEvents(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{NoEvents: true, Now: c.read}, 4)
	first, _ := book(t, r, "1", "abcd")
	r.Free("1")
	if w, n := decide(t, r, "abcx"); w != first || n != 3 {
		t.Errorf("the next turn goes to worker %d with %d blocks, want %d with 3", w, n, first)
	}
	other := router.Worker{ID: first%4 + 1}
	if !store(r, other, "abcxy") {
		t.Fatal("the event's worker is unknown")
	}
	if w, n := decide(t, r, "abcxy"); w != first || n != 3 {
		t.Errorf("with an event of worker %d the prompt goes to %d with %d blocks, want it ignored", other.ID, w, n)
	}
	c.pass(119 * time.Second)
	book(t, r, "2", "ab")
	c.pass(2 * time.Second)
	if _, n := decide(t, r, "abcd"); n != 2 {
		t.Errorf("after 121 s %d blocks count, want the 2 that were used since", n)
	}
	c.pass(120 * time.Second)
	if _, n := decide(t, r, "abcd"); n != 0 {
		t.Errorf("%d blocks count for ever", n)
	}
}

// A worker's own number of blocks limits what is predicted for it.
func TestNoEventsLimit(t *testing.T) {
	r := newRouter(t, router.Config{NoEvents: true}, 0)
	w := worker(1)
	w.TotalKVBlocks = 3
	set(t, r, w)
	book(t, r, "1", "abcdef")
	if _, n := decide(t, r, "abcdef"); n != 3 {
		t.Errorf("%d blocks believed of a worker of 3", n)
	}
}

// A prediction holds until the event arrives, which replaces it; a removal event then
// removes the blocks.
func TestPrediction(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read, PredictTTL: 10 * time.Second}, 3)
	w, n := book(t, r, "1", "abcd")
	if n != 0 {
		t.Fatalf("%d blocks known at the start", n)
	}
	r.MarkPrefillCompleted("1")
	if v, n := decide(t, r, "abcd"); v != w || n != 4 {
		t.Errorf("before its event the prompt is known as %d blocks on worker %d, want 4 on %d", n, v, w)
	}
	c.pass(11 * time.Second)
	if _, n := decide(t, r, "abcd"); n != 0 {
		t.Errorf("%d blocks of a prediction that no event confirmed", n)
	}

	// An event confirms the prediction, and a later one removes the blocks.
	w, _ = book(t, r, "2", "xyz")
	r.MarkPrefillCompleted("2")
	store(r, router.Worker{ID: w}, "xyz")
	local := indexer.AppendLocalHashes(nil, prompt("xyz"), 8, indexer.Seed("", ""))
	sequence := indexer.AppendSequenceHashes(nil, local)
	r.ApplyEvent(router.Worker{ID: w}, indexer.Event{Kind: indexer.Removed, Externals: []uint64{sequence[2] + 1}})
	if v, n := decide(t, r, "xyz"); v != w || n != 2 {
		t.Errorf("after the removal %d blocks count on worker %d, want 2 on %d", n, v, w)
	}
	r.ApplyEvent(router.Worker{ID: w}, indexer.Event{Kind: indexer.Cleared})
	if _, n := decide(t, r, "xyz"); n != 0 {
		t.Errorf("after the clear %d blocks count", n)
	}

	// A removal from host memory removes nothing from the device.
	w, _ = book(t, r, "5", "klmn")
	r.MarkPrefillCompleted("5")
	store(r, router.Worker{ID: w}, "klm")
	local = indexer.AppendLocalHashes(nil, prompt("klm"), 8, indexer.Seed("", ""))
	sequence = indexer.AppendSequenceHashes(nil, local)
	host := indexer.Event{
		Kind: indexer.Stored, Tier: indexer.HostPinned, HasParent: true, Parent: sequence[1] + 1,
		Blocks: []indexer.Block{{External: sequence[2] + 1, Local: local[2]}},
	}
	r.ApplyEvent(router.Worker{ID: w}, host)
	r.ApplyEvent(router.Worker{ID: w}, indexer.Event{Kind: indexer.Removed, Tier: indexer.HostPinned, Externals: []uint64{sequence[2] + 1}})
	if v, n := decide(t, r, "klmn"); v != w || n != 4 {
		t.Errorf("after a removal in host memory %d blocks count on worker %d, want 4 on %d", n, v, w)
	}

	// A request that was not served predicts nothing; a request that was served does.
	book(t, r, "3", "pqr")
	r.Abandon("3")
	if _, n := decide(t, r, "pqr"); n != 0 {
		t.Errorf("an abandoned request left %d blocks", n)
	}
	book(t, r, "4", "pqr")
	r.MarkPrefillCompleted("4")
	r.Abandon("4")
	if _, n := decide(t, r, "pqr"); n != 3 {
		t.Errorf("a request abandoned after its first token left %d blocks, want 3", n)
	}
	if r.Abandon("4") || r.Abandon("nobody") {
		t.Error("Abandon found a slot of an unknown request")
	}
}

// Predictions apply to a worker without events, beside workers that publish events.
func TestSilentWorker(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read}, 0)
	w := worker(1)
	w.NoEvents = true
	set(t, r, w)
	book(t, r, "1", "abc")
	c.pass(time.Minute)
	if _, n := decide(t, r, "abc"); n != 3 {
		t.Errorf("%d blocks known of a worker without events, want 3", n)
	}
	set(t, r, w) // putting the same record again changes nothing
	if _, n := decide(t, r, "abc"); n != 3 {
		t.Errorf("%d blocks after the record came again, want 3", n)
	}
	w.StartedMS = 5
	set(t, r, w)
	if _, n := decide(t, r, "abc"); n != 0 {
		t.Errorf("%d blocks of a worker that restarted", n)
	}
	r.RemoveWorker(1)
	w.ID = 2
	set(t, r, w)
	if _, n := decide(t, r, "abc"); n != 0 {
		t.Errorf("%d blocks of a worker that got the number of another", n)
	}
}

// Blocks that a worker keeps below the device continue the blocks on the device, and are
// worth less.
func TestLowerTiers(t *testing.T) {
	r := newRouter(t, router.Config{}, 3)
	local := indexer.AppendLocalHashes(nil, prompt("abcdef"), 8, indexer.Seed("", ""))
	stored := func(w uint64, tier indexer.Tier, from, to int) {
		ev := indexer.Event{Kind: indexer.Stored, Tier: tier}
		if from > 0 {
			ev.HasParent, ev.Parent = true, uint64(from)
		}
		for i := from; i < to; i++ {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: uint64(i + 1), Local: local[i]})
		}
		if !r.ApplyEvent(router.Worker{ID: w}, ev) {
			t.Fatal("the worker is unknown")
		}
	}
	stored(1, indexer.Device, 0, 2)
	stored(2, indexer.Device, 0, 2)
	stored(2, indexer.HostPinned, 2, 4)
	stored(2, indexer.Disk, 4, 5)
	stored(3, indexer.HostPinned, 0, 2)
	d, err := r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("abcdef"), Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	var got [][3]int
	for _, c := range d.Candidates {
		got = append(got, [3]int{c.OverlapBlocks, c.HostBlocks, c.DiskBlocks})
	}
	if want := [][3]int{{2, 0, 0}, {2, 2, 1}, {0, 2, 0}}; !slices.Equal(got, want) || d.Worker.ID != 2 {
		t.Errorf("blocks on device, host and disk %v, want %v; worker %d, want 2", got, want, d.Worker.ID)
	}
	// A block predicted to be on the device is not counted on a lower tier, too.
	r = newRouter(t, router.Config{PredictTTL: time.Minute}, 1)
	stored(1, indexer.Device, 0, 1)
	stored(1, indexer.HostPinned, 1, 4)
	book(t, r, "x", "abc")
	d, err = r.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("abcdef"), Explain: true})
	if c := d.Candidates[0]; err != nil || c.OverlapBlocks != 3 || c.HostBlocks != 1 {
		t.Errorf("%d blocks on the device and %d below, %v; want 3 and 1", c.OverlapBlocks, c.HostBlocks, err)
	}
}

// Predictions for a worker never exceed its cache, and all predictions together never
// exceed the setting.
func TestIndexBounds(t *testing.T) {
	r := newRouter(t, router.Config{MaxBlocks: 6}, 0)
	for id := range uint64(2) {
		w := worker(id + 1)
		w.TotalKVBlocks = 4
		set(t, r, w)
		store(r, router.Worker{ID: id + 1}, "abc")
		store(r, router.Worker{ID: id + 1}, "xyz")
	}
	total := 0
	for _, w := range r.Workers() {
		if total += w.CachedBlocks; w.CachedBlocks > 4 {
			t.Errorf("%d blocks are remembered of a worker of 4", w.CachedBlocks)
		}
	}
	if total == 0 || total > 6 {
		t.Errorf("%d blocks are remembered in all, want 1 to 6", total)
	}
}
