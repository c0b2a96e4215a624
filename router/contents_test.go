// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
)

// lines returns a dump in a form in which two routers can be compared: all but the
// engines' hashes.
func lines(t *testing.T, r *router.Router) (out []string) {
	t.Helper()
	d, ok := r.Dump(nil)
	if !ok {
		t.Fatal("a dump is under way")
	}
	defer d.Close()
	return blockLines(d)
}

// blockLines returns a line for each block of a dump, sorted.
func blockLines(d *router.Dump) (out []string) {
	for ev := range d.Events() {
		for i, b := range ev.Event.Blocks {
			out = append(out, fmt.Sprintf("%d.%d %d %d %x hole=%v", ev.Worker.ID, ev.Worker.DPRank, ev.Event.Tier, ev.Position+i, b.Local, ev.Hole && i == 0))
		}
	}
	slices.Sort(out)
	return out
}

func same(t *testing.T, what string, a, b []string) {
	t.Helper()
	if !slices.Equal(a, b) {
		t.Errorf("%s: %d and %d lines differ\n%s\n---\n%s", what, len(a), len(b), strings.Join(a[:min(20, len(a))], "\n"), strings.Join(b[:min(20, len(b))], "\n"))
	}
}

// scramble applies random events of the workers, of two models, with and without holes.
func scramble(r *router.Router, rng *rand.Rand, ids []uint64, holes bool) {
	type owner struct {
		id   uint64
		tier indexer.Tier
	}
	held := map[owner][]uint64{}
	for range 200 {
		id := owner{ids[rng.IntN(len(ids))], indexer.Tier(max(0, rng.IntN(6)-2))}
		w := router.Worker{ID: id.id, DPRank: uint32(id.id % 2)}
		if n := len(held[id]); n > 0 && rng.IntN(3) == 0 {
			at := n - 1 // a tail
			if holes {
				at = rng.IntN(n)
			}
			r.ApplyEvent(w, indexer.Event{Kind: indexer.Removed, Tier: id.tier, Externals: []uint64{held[id][at]}})
			held[id] = slices.Delete(held[id], at, at+1)
			continue
		}
		ev := indexer.Event{Kind: indexer.Stored, Tier: id.tier}
		if n := len(held[id]); n > 0 && rng.IntN(2) == 0 {
			ev.HasParent, ev.Parent = true, held[id][n-1]
		}
		for range 1 + rng.IntN(20) {
			b := indexer.Block{External: rng.Uint64(), Local: rng.Uint64N(4)}
			ev.Blocks = append(ev.Blocks, b)
			held[id] = append(held[id], b.External)
		}
		r.ApplyEvent(w, ev)
	}
}

func twoModels(t *testing.T, ids []uint64) *router.Router {
	t.Helper()
	r := newRouter(t, router.Config{}, 0)
	for _, id := range ids {
		w := worker(id)
		w.DPSize, w.StartedMS = 2, 5
		if id > 4 {
			w.Models, w.BlockSize = []string{"other"}, 16
		}
		set(t, r, w)
	}
	return r
}

func restored(t *testing.T, from, to *router.Router) router.Restored {
	t.Helper()
	d, ok := from.Dump(nil)
	if !ok {
		t.Fatal("a dump is under way")
	}
	defer d.Close()
	out, err := to.Restore(d.Contents, nil)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestContentsMoveToAnotherRouter(t *testing.T) {
	ids := []uint64{1, 2, 3, 5, 6, 7}
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 3))
		a := twoModels(t, ids)
		scramble(a, rng, ids, true)
		want := lines(t, a)

		// The other router has the workers in another order, only some of them, and old
		// contents.
		shuffled := slices.Clone(ids)
		rng.Shuffle(len(ids), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		b := twoModels(t, shuffled[:rng.IntN(len(ids)+1)])
		if workers := b.Workers(); len(workers) > 0 {
			scramble(b, rng, []uint64{workers[0].ID}, false)
		}
		out := restored(t, a, b)
		same(t, fmt.Sprint("restored, seed ", seed), want, lines(t, b))
		if out.Skipped != 0 || len(out.Expected) != len(ids)-len(b.Workers())/2 {
			t.Fatalf("seed %d: %+v with %d ranks known", seed, out, len(b.Workers()))
		}
		// Both routers must behave alike afterwards.
		for _, r := range []*router.Router{a, b} {
			scramble(r, rand.New(rand.NewPCG(seed, 4)), ids, true)
		}
		same(t, fmt.Sprint("afterwards, seed ", seed), lines(t, a), lines(t, b))
	}
}

// The events of a dump rebuild the same index, except for blocks behind a hole.
func TestADumpsEventsMakeTheIndex(t *testing.T) {
	ids := []uint64{1, 2, 5}
	for seed := range uint64(30) {
		a, b := twoModels(t, ids), twoModels(t, ids)
		scramble(a, rand.New(rand.NewPCG(seed, 5)), ids, false)
		d, _ := a.Dump(nil)
		n := 0
		for ev := range d.Events() {
			if ev.Hole {
				t.Fatalf("seed %d: a hole, although only tails were removed", seed)
			}
			n += len(ev.Event.Blocks)
			b.ApplyEvent(ev.Worker, ev.Event)
		}
		d.Close()
		if n == 0 {
			t.Fatal("nothing was dumped")
		}
		same(t, fmt.Sprint("seed ", seed), lines(t, a), lines(t, b))
	}
}

// A dump shows the index at one moment, even if the index changes while the dump is read.
func TestADumpIsOfOneMoment(t *testing.T) {
	ids := []uint64{1, 2, 3, 5, 6}
	r := twoModels(t, ids)
	scramble(r, rand.New(rand.NewPCG(1, 6)), ids, true)
	want := lines(t, r)
	d, ok := r.Dump(nil)
	if !ok {
		t.Fatal("no dump")
	}
	if _, ok := r.Dump(nil); ok {
		t.Error("two dumps at once")
	}
	scramble(r, rand.New(rand.NewPCG(2, 6)), ids, true)
	r.RemoveWorker(1)
	set(t, r, worker(9))
	store(r, router.Worker{ID: 9}, "ABC")
	got := blockLines(d)
	d.Close()
	d.Close() // closing twice is harmless
	same(t, "a dump of one moment", want, got)
}

func TestExpectedWorkers(t *testing.T) {
	a := newRouter(t, router.Config{}, 3)
	for id := range uint64(3) {
		store(a, router.Worker{ID: id + 1}, "ABC"[:id+1])
	}
	b := newRouter(t, router.Config{}, 0)
	out := restored(t, a, b)
	if !slices.Equal(out.Expected, []uint64{1, 2, 3}) || out.Blocks != 6 {
		t.Errorf("%+v, want three expected workers with 6 blocks", out)
	}
	if n := len(b.Workers()); n != 0 {
		t.Errorf("%d workers are reported, want none: none has registered", n)
	}
	if _, err := b.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABC")}); !errors.Is(err, router.ErrNoWorkers) {
		t.Errorf("a request before anybody registered: %v", err)
	}
	if !store(b, router.Worker{ID: 1}, "XYZ") {
		t.Error("events of an expected worker are ignored")
	}
	set(t, b, worker(2)) // registers with the same process
	again := worker(3)   // has restarted since the dump
	again.StartedMS = 77
	set(t, b, again)
	if got := b.RemoveExpected(out.Expected); !slices.Equal(got, []uint64{1}) {
		t.Errorf("removed %v, want worker 1, the only one that never came", got)
	}
	d, err := b.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABC")})
	if err != nil || d.Worker.ID != 2 || d.OverlapBlocks != 2 {
		t.Errorf("%+v, %v; want worker 2 with 2 blocks", d, err)
	}
	d, err = b.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("ABC"), Uncached: true})
	if err != nil || d.OverlapBlocks != 0 {
		t.Errorf("%+v, %v; want no blocks for a request that does not read the cache", d, err)
	}
	if got := lines(t, b); len(got) != 2 {
		t.Errorf("left: %v", got)
	}
}

func TestAFailedRestoreChangesNothing(t *testing.T) {
	a, b := newRouter(t, router.Config{}, 3), newRouter(t, router.Config{}, 1)
	store(a, router.Worker{ID: 3}, "AB")
	store(b, router.Worker{ID: 1}, "CD")
	want := lines(t, b)
	for name, spoil := range map[string]func(*router.Contents) error{
		"damaged at its end": func(*router.Contents) error { return errors.New("the digest is wrong") },
		"senseless runs": func(c *router.Contents) error {
			c.Runs = func(yield func(int, indexer.Run) bool) { yield(0, indexer.Run{ID: 7}) }
			return nil
		},
		"a pool that is not named": func(c *router.Contents) error {
			c.Runs = func(yield func(int, indexer.Run) bool) { yield(1, indexer.Run{ID: 1, Local: []uint64{1}}) }
			return nil
		},
		"a holder that is not named": func(c *router.Contents) error {
			c.Runs = func(yield func(int, indexer.Run) bool) {
				yield(0, indexer.Run{ID: 1, Local: []uint64{1}, Holders: []indexer.Holder{{Worker: 9, Externals: []uint64{1}}}})
			}
			return nil
		},
	} {
		d, _ := a.Dump(nil)
		c := d.Contents
		bad := spoil(&c)
		if _, err := b.Restore(c, func() error { return bad }); err == nil {
			t.Errorf("%s: no error", name)
		}
		d.Close()
		same(t, name, want, lines(t, b))
		if _, err := b.BestWorker(t.Context(), router.Request{Model: "m", Tokens: prompt("AB")}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := b.RemoveExpected([]uint64{1, 2, 3}); len(got) != 0 {
		t.Errorf("expected workers are left: %v", got)
	}
	// With another block size nothing of the pool can be restored.
	c := newRouter(t, router.Config{BlockSize: 32}, 0)
	w := worker(3)
	w.BlockSize = 32
	set(t, c, w)
	if out := restored(t, a, c); out.Blocks != 0 || out.Skipped != 2 {
		t.Errorf("%+v, want 2 blocks skipped", out)
	}
	// Restoring empty contents clears the index.
	if out, err := a.Restore(router.Contents{}, nil); err != nil || out.Blocks != 0 || len(lines(t, a)) != 0 {
		t.Errorf("%+v, %v: something is left", out, err)
	}
}

// Blocks of kept workers survive a restoration, whatever the contents have for these
// workers.
func TestKeptWorkers(t *testing.T) {
	a, b := newRouter(t, router.Config{}, 3), newRouter(t, router.Config{}, 3)
	for id := range uint64(3) {
		store(a, router.Worker{ID: id + 1}, "ABC")
		store(b, router.Worker{ID: id + 1}, "XY")
	}
	want := append(lines(t, a)[:3:3], lines(t, b)[2:4]...)
	want = append(want, lines(t, a)[6:]...)
	d, ok := a.Dump(nil)
	if !ok {
		t.Fatal("a dump is under way")
	}
	defer d.Close()
	d.Keep = func(id uint64) bool { return id == 2 }
	out, err := b.Restore(d.Contents, nil)
	if err != nil || out.Skipped != 3 {
		t.Errorf("%+v, %v; want the 3 blocks of the kept worker skipped", out, err)
	}
	same(t, "one of three kept", want, lines(t, b))
}

// A hybrid worker never counts for more than its side groups allow: its shape comes into use with its blocks, whether
// they are restored or kept. The same is true of events that wait for a parent.
func TestRestoredHybridWorkers(t *testing.T) {
	w, shape := router.Worker{ID: 1}, &indexer.Shape{Block: 8, Full: 8, Sides: []indexer.SideGroup{{Group: 1, Needs: indexer.NeedsState, Block: 8}}}
	local := indexer.AppendLocalHashes(nil, prompt("abcdefghi"), 8, indexer.Seed("", ""))
	ids := indexer.AppendSequenceHashes(nil, local)
	hybrid := func() *router.Router {
		r := newRouter(t, router.Config{}, 1)
		store(r, w, "abcdefg")
		r.ApplyEvent(w, indexer.Event{Kind: indexer.SideStored, Group: 1, Shape: shape, Externals: []uint64{ids[3] + 1, ids[8] + 1}})
		r.ApplyEvent(w, indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: ids[7] + 1, Blocks: []indexer.Block{{External: ids[8] + 1, Local: local[8]}}})
		return r
	}
	for _, keep := range []bool{false, true} {
		r, from := newRouter(t, router.Config{}, 1), hybrid()
		if keep {
			r, from = from, r
		}
		d, ok := from.Dump(nil)
		if !ok {
			t.Fatal("a dump is under way")
		}
		d.Keep = func(uint64) bool { return keep }
		_, err := r.Restore(d.Contents, nil)
		d.Close()
		if err != nil {
			t.Fatal(err)
		}
		if _, n := decide(t, r, "abcdefghij"); n != 4 {
			t.Errorf("kept %v: %d blocks, want the 4 before the state", keep, n)
		}
		r.ApplyEvent(w, indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: ids[6] + 1, Blocks: []indexer.Block{{External: ids[7] + 1, Local: local[7]}}})
		if _, n := decide(t, r, "abcdefghij"); n != 9 {
			t.Errorf("kept %v: %d blocks when the parent came, want 9", keep, n)
		}
	}
}

// The memory of a dump does not grow with the index in any form.
func TestADumpTakesNoMoreForALargeIndex(t *testing.T) {
	fill := func(sequences int) *router.Router {
		r := newRouter(t, router.Config{}, 4)
		for n := range uint64(sequences) {
			for w := range uint64(4) {
				ev := indexer.Event{Kind: indexer.Stored}
				for i := range uint64(40) {
					ev.Blocks = append(ev.Blocks, indexer.Block{External: n<<20 | i<<8 | w, Local: n/8<<32 | n*(i/20)<<8 | i})
				}
				r.ApplyEvent(router.Worker{ID: w + 1}, ev)
			}
		}
		return r
	}
	small, large := fill(500), fill(10_000)
	for name, dump := range map[string]func(r *router.Router) int{
		"runs": func(r *router.Router) (n int) {
			d, _ := r.Dump(nil)
			defer d.Close()
			for _, run := range d.Runs {
				n += len(run.Holders)
			}
			return n
		},
		"events": func(r *router.Router) (n int) {
			d, _ := r.Dump(nil)
			defer d.Close()
			for ev := range d.Events() {
				n += len(ev.Event.Blocks)
			}
			return n
		},
		"JSON": func(r *router.Router) int {
			c := counter(0)
			if err := r.DumpEvents(t.Context(), &c); err != nil {
				t.Error(err)
			}
			return int(c)
		},
	} {
		var took, read [2]int
		for i, r := range []*router.Router{small, large} {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			read[i] = dump(r)
			runtime.ReadMemStats(&after)
			took[i] = int(after.TotalAlloc - before.TotalAlloc)
		}
		t.Logf("%s: %d bytes for %d, %d for %d", name, took[0], read[0], took[1], read[1])
		if read[1] < 15*read[0] || took[1] > 2<<20 || took[1] > took[0]+64<<10 {
			t.Errorf("%s: %d bytes allocated for %d, %d for %d; want the same and at most 2 MB", name, took[0], read[0], took[1], read[1])
		}
	}
}

type counter int

func (c *counter) Write(b []byte) (int, error) { *c += counter(len(b)); return len(b), nil }
