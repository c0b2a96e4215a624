// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/indexer"
)

// TestScripts plays the stories in testdata. Blocks are written external:local,
// or as one number that is both.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		x := indexer.New(indexer.Config{})
		workers := 3
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var worker int
			d.MaybeScanArgs(t, "worker", &worker)
			switch d.Cmd {
			case "new":
				var bound int
				d.ScanArgs(t, "max", &bound)
				x = indexer.New(indexer.Config{MaxBlocks: bound})
				return ""
			case "stored":
				ev := indexer.Event{Kind: indexer.Stored, HasParent: d.HasArg("parent"), Blocks: blocks(t, d.Input)}
				d.MaybeScanArgs(t, "parent", &ev.Parent)
				if d.HasArg("tier") {
					ev.Tier = indexer.HostPinned
				}
				return outcome(x.Apply(worker, ev))
			case "removed":
				return outcome(x.Apply(worker, indexer.Event{Kind: indexer.Removed, Externals: numbers(t, d.Input)}))
			case "cleared":
				return outcome(x.Apply(worker, indexer.Event{Kind: indexer.Cleared}))
			case "unknown-kind":
				return outcome(x.Apply(worker, indexer.Event{Blocks: blocks(t, d.Input)}))
			case "remove-worker":
				x.RemoveWorker(worker)
				return fmt.Sprintf("%d left\n", x.Blocks())
			case "match":
				dst := make([]int32, workers)
				x.Match(dst, numbers(t, d.Input))
				return fmt.Sprintln(dst)
			case "blocks":
				return fmt.Sprintf("%d in all, %d of worker %d\n", x.Blocks(), x.WorkerBlocks(worker), worker)
			}
			t.Fatalf("unknown command %q", d.Cmd)
			return ""
		})
	})
}

func blocks(t *testing.T, s string) (out []indexer.Block) {
	for f := range strings.FieldsSeq(s) {
		external, local, _ := strings.Cut(f, ":")
		if local == "" {
			local = external
		}
		out = append(out, indexer.Block{External: number(t, external), Local: number(t, local)})
	}
	return out
}

func numbers(t *testing.T, s string) (out []uint64) {
	for f := range strings.FieldsSeq(s) {
		out = append(out, number(t, f))
	}
	return out
}

func number(t *testing.T, s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// outcome prints what is not zero of o.
func outcome(o indexer.Outcome) string {
	var parts []string
	for f := range strings.FieldsSeq(strings.Trim(fmt.Sprintf("%+v", o), "{}")) {
		if !strings.HasSuffix(f, ":0") {
			parts = append(parts, f)
		}
	}
	if len(parts) == 0 {
		return "nothing\n"
	}
	return strings.Join(parts, " ") + "\n"
}

// model is what the index must equal: each worker's blocks by external hash, each
// with the whole chain of local hashes that leads to it.
type model struct {
	workers []map[uint64]string
}

func (m *model) apply(worker int, ev indexer.Event) {
	held := m.workers[worker]
	switch ev.Kind {
	case indexer.Cleared:
		clear(held)
	case indexer.Removed:
		for _, e := range ev.Externals {
			delete(held, e)
		}
	case indexer.Stored:
		seen := map[uint64]bool{ev.Parent: ev.HasParent}
		for _, b := range ev.Blocks {
			if seen[b.External] {
				return
			}
			seen[b.External] = true
		}
		chain := ""
		if ev.HasParent {
			var ok bool
			if chain, ok = held[ev.Parent]; !ok {
				return
			}
		}
		for _, b := range ev.Blocks {
			if known, ok := held[b.External]; ok {
				chain = known
				continue
			}
			chain += fmt.Sprint("/", b.Local)
			held[b.External] = chain
		}
	}
}

func (m *model) match(local []uint64) []int32 {
	dst := make([]int32, len(m.workers))
	for w, held := range m.workers {
		chains := map[string]bool{}
		for _, c := range held {
			chains[c] = true
		}
		var chain strings.Builder
		for _, l := range local {
			if fmt.Fprint(&chain, "/", l); !chains[chain.String()] {
				break
			}
			dst[w]++
		}
	}
	return dst
}

// pairs counts (block, worker) pairs: several external hashes of one block are one.
func (m *model) pairs() (n int) {
	for _, held := range m.workers {
		chains := map[string]bool{}
		for _, c := range held {
			chains[c] = true
		}
		n += len(chains)
	}
	return n
}

// randomEvent favours short chains over few hashes, so that events meet.
func randomEvent(rng *rand.Rand) indexer.Event {
	few := func() uint64 { return rng.Uint64N(12) }
	switch n := rng.IntN(100); {
	case n < 60:
		ev := indexer.Event{Kind: indexer.Stored, HasParent: rng.IntN(3) > 0, Parent: few()}
		for range 1 + rng.IntN(4) {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: few(), Local: rng.Uint64N(3)})
		}
		return ev
	case n < 98:
		ev := indexer.Event{Kind: indexer.Removed}
		for range 1 + rng.IntN(3) {
			ev.Externals = append(ev.Externals, few())
		}
		return ev
	default:
		return indexer.Event{Kind: indexer.Cleared}
	}
}

func TestIndexEqualsSlowModel(t *testing.T) {
	const workers = 4
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		x := indexer.New(indexer.Config{})
		m := model{workers: make([]map[uint64]string, workers)}
		for i := range m.workers {
			m.workers[i] = map[uint64]string{}
		}
		for step := range 2000 {
			w, ev := rng.IntN(workers), randomEvent(rng)
			x.Apply(w, ev)
			m.apply(w, ev)

			prompt := make([]uint64, rng.IntN(6))
			for i := range prompt {
				prompt[i] = rng.Uint64N(3)
			}
			got := make([]int32, workers)
			x.Match(got, prompt)
			if diff := cmp.Diff(m.match(prompt), got); diff != "" {
				t.Fatalf("seed %d, step %d: after %+v of worker %d, match of %d (-want +got):\n%s", seed, step, ev, w, prompt, diff)
			}
			if got, want := x.Blocks(), m.pairs(); got != want {
				t.Fatalf("seed %d, step %d: %d blocks, want %d", seed, step, got, want)
			}
			if got, want := x.WorkerBlocks(w), len(m.workers[w]); got != want {
				t.Fatalf("seed %d, step %d: %d external hashes of worker %d, want %d", seed, step, got, w, want)
			}
		}
		for w := range workers {
			x.RemoveWorker(w)
		}
		if n, nodes := x.Blocks(), x.Nodes(); n != 0 || nodes != 0 {
			t.Fatalf("seed %d: %d blocks and %d nodes left after all workers were removed", seed, n, nodes)
		}
	}
}

// Workers on goroutines of their own end with what each would have alone.
func TestIndexIsSafeForConcurrentUse(t *testing.T) {
	const workers = 4
	x := indexer.New(indexer.Config{})
	models := make([]model, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 2))
			models[w].workers = []map[uint64]string{{}}
			dst := make([]int32, workers)
			for range 3000 {
				ev := randomEvent(rng)
				x.Apply(w, ev)
				models[w].apply(0, ev)
				x.Match(dst, []uint64{rng.Uint64N(3), rng.Uint64N(3)})
			}
		})
	}
	wg.Wait()
	for a := range uint64(3) {
		for b := range uint64(3) {
			got := make([]int32, workers)
			x.Match(got, []uint64{a, b})
			for w := range workers {
				if want := models[w].match([]uint64{a, b})[0]; got[w] != want {
					t.Errorf("worker %d, prompt %d %d: overlap %d, want %d", w, a, b, got[w], want)
				}
			}
		}
	}
}

func TestMatchDoesNotAllocate(t *testing.T) {
	x := indexer.New(indexer.Config{})
	var prompt []uint64
	ev := indexer.Event{Kind: indexer.Stored}
	for i := range uint64(512) {
		prompt = append(prompt, i)
		ev.Blocks = append(ev.Blocks, indexer.Block{External: i, Local: i})
	}
	for w := range 8 {
		x.Apply(w, ev)
	}
	dst := make([]int32, 8)
	if n := testing.AllocsPerRun(10, func() { x.Match(dst, prompt) }); n != 0 {
		t.Errorf("Match makes %v allocations, want 0", n)
	}
	if dst[7] != 512 {
		t.Errorf("overlap is %d, want 512", dst[7])
	}
}

func TestEventsOfNoWorkerAreCounted(t *testing.T) {
	x := indexer.New(indexer.Config{})
	got := x.Apply(-1, indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 1}}})
	if want := (indexer.Outcome{Invalid: 1}); got != want {
		t.Errorf("outcome %+v, want %+v", got, want)
	}
	x.RemoveWorker(99) // never heard of: nothing happens
}
