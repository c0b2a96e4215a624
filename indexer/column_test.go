// SPDX-License-Identifier: Apache-2.0

package indexer_test

import (
	"slices"
	"testing"

	"github.com/kvroute/kvroute/indexer"
)

// named is event with external hashes as a kind of engine makes them.
func named(engine uint64, local []uint64) indexer.Event {
	ev := indexer.Event{Kind: indexer.Stored}
	for _, l := range local {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: indexer.NextSequenceHash(l, engine), Local: l})
	}
	return ev
}

func apply(t *testing.T, x *indexer.Index, worker int, ev indexer.Event, want indexer.Outcome) {
	t.Helper()
	if got := x.Apply(worker, ev); got != want {
		t.Fatalf("worker %d: outcome %+v, want %+v", worker, got, want)
	}
}

// Workers with equal hashes share columns, in any order of arrival: one column for each
// run and each kind of engine. Workers that agree with the first one are not listed with
// the run.
func TestWorkersWhoseHashesAgreeShareColumns(t *testing.T) {
	const runs, blocks = 20, 32
	for name, c := range map[string]struct {
		engine          func(worker int) int // kind of a worker's engine
		columns, listed int                  // columns of a run, at most
	}{
		"all agree":                                    {func(int) int { return 0 }, 1, 0},
		"the first one deviates":                       {func(w int) int { return min(w, 1) }, 2, 63},
		"the second one deviates":                      {func(w int) int { return map[int]int{1: 1}[w] }, 2, 1},
		"the last one deviates":                        {func(w int) int { return w / 63 }, 2, 1},
		"the first three deviate, each in its own way": {func(w int) int { return min(w, 3) }, 4, 63},
		"two halves":                                   {func(w int) int { return w / 32 }, 2, 32},
		"two in turn":                                  {func(w int) int { return w % 2 }, 2, 32},
		"nobody agrees":                                {func(w int) int { return w }, 64, 63},
	} {
		t.Run(name, func(t *testing.T) {
			x := indexer.New(indexer.Config{})
			local := make([][]uint64, runs)
			for r := range local {
				for i := range uint64(blocks) {
					local[r] = append(local[r], uint64(r)<<32|i)
				}
				for w := range 64 {
					apply(t, x, w, named(uint64(c.engine(w)), local[r]), indexer.Outcome{Stored: blocks})
				}
			}
			columns, listed := x.Columns()
			if columns > c.columns*runs || listed > c.listed*runs {
				t.Errorf("%d columns, %d listings, want at most %d and %d", columns, listed, c.columns*runs, c.listed*runs)
			}
			if err := x.Check(); err != nil {
				t.Fatal(err)
			}
			got := indexer.Matches{Device: make([]int32, 64)}
			for _, l := range local {
				x.FindMatches(&got, l)
				for w := range 64 {
					last := indexer.NextSequenceHash(l[blocks-1], uint64(c.engine(w)))
					if end := x.Last(w, got.Device[w], l); got.Device[w] != blocks || end != last {
						t.Fatalf("worker %d: %d blocks up to %d, want %d up to %d", w, got.Device[w], end, blocks, last)
					}
				}
			}
			for w := range 64 {
				for _, l := range local {
					var ev indexer.Event
					for _, b := range named(uint64(c.engine(w)), l).Blocks {
						ev.Externals = append(ev.Externals, b.External)
					}
					ev.Kind = indexer.Removed
					apply(t, x, w, ev, indexer.Outcome{Removed: blocks})
				}
			}
			if columns, _ := x.Columns(); columns != 0 || x.Blocks() != 0 {
				t.Errorf("%d columns and %d blocks left", columns, x.Blocks())
			}
		})
	}
}

// Engines that number their blocks from 1 on use the same hashes for different blocks. A
// lookup compares no more entries because of that.
func TestLookupsAreShortWhereAllUseTheSameHashes(t *testing.T) {
	const workers, blocks = 512, 16
	x := indexer.New(indexer.Config{})
	for w := range workers {
		ev := indexer.Event{Kind: indexer.Stored}
		for i := range uint64(blocks) {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: i + 1, Local: uint64(w)<<32 | i})
		}
		apply(t, x, w, ev, indexer.Outcome{Stored: blocks})
	}
	if err := x.Check(); err != nil {
		t.Fatal(err)
	}
	compared := 0
	for w := range workers {
		for i := range uint64(blocks) {
			n := x.Probes(w, i+1)
			if compared += n; n > 4 {
				t.Errorf("worker %d, hash %d: %d entries are compared", w, i+1, n)
			}
		}
	}
	// One comparison in the shared columns, one in the worker's own; the first worker has
	// no own column.
	if limit := workers * blocks * 21 / 10; compared > limit || compared < workers*blocks {
		t.Errorf("%d entries are compared, want at most %d", compared, limit)
	}
	for w := range workers {
		got := indexer.Matches{Device: make([]int32, workers)}
		x.FindMatches(&got, []uint64{uint64(w) << 32, uint64(w)<<32 | 1})
		if end := x.Last(w, got.Device[w], []uint64{uint64(w) << 32, uint64(w)<<32 | 1}); got.Device[w] != 2 || end != 2 {
			t.Fatalf("worker %d: %d blocks up to %d, want 2 up to 2", w, got.Device[w], end)
		}
		apply(t, x, w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{2, 1, 2}}, indexer.Outcome{Removed: 2, Unknown: 1})
	}
	if n := x.Blocks(); n != workers*(blocks-2) {
		t.Errorf("%d blocks left, want %d", n, workers*(blocks-2))
	}
}

// A prediction is removed with the worker's own block, whatever blocks other workers have
// under the same hash.
func TestForgottenIsWhatTheWorkerHas(t *testing.T) {
	x := indexer.New(indexer.Config{})
	a := newApprox(indexer.ApproxConfig{}, 0, 0, 0)
	local := []uint64{7, 8, 9}
	for w, blocks := range []int{3, 1} {
		apply(t, x, w, named(0, local[:blocks]), indexer.Outcome{Stored: blocks})
	}
	third := indexer.NextSequenceHash(9, 0)
	apply(t, x, 0, named(0, local), indexer.Outcome{Duplicate: 3})
	for w, want := range []int{2, 3, 3} {
		a.Insert(at(0), w, 1, indexer.AppendSequenceHashes(nil, local))
		if a.Forget(w, x, []uint64{third}); a.WorkerBlocks(w) != want {
			t.Errorf("worker %d: %d blocks, want %d", w, a.WorkerBlocks(w), want)
		}
	}
}

// If some hashes of an event stand for other blocks elsewhere, the other hashes are still
// shared.
func TestOnlyWhatStandsElsewhereIsPrivate(t *testing.T) {
	x := indexer.New(indexer.Config{})
	event := func(externals ...uint64) indexer.Event {
		ev := indexer.Event{Kind: indexer.Stored}
		for i, e := range externals {
			ev.Blocks = append(ev.Blocks, indexer.Block{External: e, Local: uint64(i)})
		}
		return ev
	}
	apply(t, x, 0, event(11, 12, 13, 14, 15), indexer.Outcome{Stored: 5})
	apply(t, x, 1, event(15, 12, 11, 14), indexer.Outcome{Stored: 4})
	apply(t, x, 2, event(11, 12, 13, 14, 15), indexer.Outcome{Stored: 5})
	if columns, listed := x.Columns(); columns != 2 || listed != 2 {
		t.Errorf("%d columns, %d listings, want a shared and a private one, and the second worker with both", columns, listed)
	}
	for _, e := range []uint64{12, 14} {
		if x.Private(1, e) {
			t.Errorf("hash %d is private", e)
		}
	}
	for _, e := range []uint64{15, 11} {
		if !x.Private(1, e) {
			t.Errorf("hash %d is not private", e)
		}
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}

// A block stored under three hashes is held until the last of them is removed. A block
// stored three times under one hash is removed at once.
func TestBlockIsHeldUntilItsLastHashIsRemoved(t *testing.T) {
	x := indexer.New(indexer.Config{})
	overlaps := func() [2]int32 {
		got := make([]int32, 2)
		x.Match(got, []uint64{1, 2, 3})
		return [2]int32(got)
	}
	three := func(base uint64) indexer.Event {
		return indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: base + 1, Local: 1}, {External: base + 2, Local: 2}, {External: base + 3, Local: 3}}}
	}
	gone := func(worker int, want int, externals ...uint64) {
		t.Helper()
		apply(t, x, worker, indexer.Event{Kind: indexer.Removed, Externals: externals}, indexer.Outcome{Removed: want, Unknown: len(externals) - want})
	}
	for _, base := range []uint64{10, 20, 30} {
		apply(t, x, 0, three(base), indexer.Outcome{Stored: 3})
	}
	apply(t, x, 1, three(20), indexer.Outcome{Stored: 3})
	apply(t, x, 1, three(20), indexer.Outcome{Duplicate: 3})
	if n := x.Blocks(); n != 6 || x.WorkerBlocks(0) != 9 {
		t.Errorf("%d pairs and %d hashes of worker 0, want 6 and 9", n, x.WorkerBlocks(0))
	}
	for _, step := range []struct {
		worker int
		gone   []uint64
		want   [2]int32
	}{
		{0, []uint64{12}, [2]int32{3, 3}},
		{0, []uint64{32}, [2]int32{3, 3}},
		{0, []uint64{22}, [2]int32{1, 3}},
		{1, []uint64{23}, [2]int32{1, 2}},
		{0, []uint64{21, 11}, [2]int32{1, 2}},
		{0, []uint64{31}, [2]int32{0, 2}},
		{0, []uint64{13, 23, 33}, [2]int32{0, 2}},
		{1, []uint64{21, 22}, [2]int32{0, 0}},
	} {
		gone(step.worker, len(step.gone), step.gone...)
		gone(step.worker, 0, step.gone...) // these hashes are unknown now
		if got := overlaps(); got != step.want {
			t.Errorf("after %d of worker %d: overlaps %d, want %d", step.gone, step.worker, got, step.want)
		}
		if err := x.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if n := x.Nodes(); n != 0 {
		t.Errorf("%d nodes left", n)
	}
}

// A hole that one of many workers makes in the middle of a run belongs to that worker
// alone. It closes when the blocks are stored again, under any hashes.
func TestHoleInTheMiddleIsOneWorkers(t *testing.T) {
	const workers, blocks = 200, 48
	var local []uint64
	for i := range uint64(blocks) {
		local = append(local, 1000+i)
	}
	for name, engine := range map[string]func(int) uint64{
		"hashes agree":  func(int) uint64 { return 0 },
		"hashes differ": func(w int) uint64 { return uint64(w) },
		"two kinds":     func(w int) uint64 { return uint64(w % 2) },
	} {
		x := indexer.New(indexer.Config{})
		for w := range workers {
			apply(t, x, w, named(engine(w), local), indexer.Outcome{Stored: blocks})
		}
		want := make([]int32, workers)
		for w := range workers {
			want[w] = blocks
		}
		check := func(what string) {
			t.Helper()
			got := indexer.Matches{Device: make([]int32, workers)}
			x.FindMatches(&got, local)
			for w := range workers {
				if end := x.Last(w, got.Device[w], local); got.Device[w] != want[w] || end != indexer.NextSequenceHash(local[want[w]-1], engine(w)) {
					t.Fatalf("%s, %s: overlap of worker %d is %d up to %d, want %d", name, what, w, got.Device[w], end, want[w])
				}
			}
			if err := x.Check(); err != nil {
				t.Fatalf("%s, %s: %v", name, what, err)
			}
		}
		for _, w := range []int{0, 7, 63, 64, 199} {
			from := 5 + w%7
			ev := indexer.Event{Kind: indexer.Removed}
			for _, b := range named(engine(w), local[from:from+9]).Blocks {
				ev.Externals = append(ev.Externals, b.External)
			}
			apply(t, x, w, ev, indexer.Outcome{Removed: 9})
			want[w] = int32(from)
			check("with holes")
		}
		for _, w := range []int{0, 7, 63, 64, 199} {
			ev := named(engine(w), local[want[w]:want[w]+9])
			ev.HasParent, ev.Parent = true, indexer.NextSequenceHash(local[want[w]-1], engine(w))
			apply(t, x, w, ev, indexer.Outcome{Stored: 9})
			want[w] = blocks
			check("closed")
		}
		if columns, _ := x.Columns(); columns > map[string]int{"hashes agree": 1, "hashes differ": workers, "two kinds": 2}[name] {
			t.Errorf("%s: %d columns", name, columns)
		}
	}
}

// A worker number that is used again has no blocks of its previous worker, also where the
// sets of workers have many words.
func TestUsedAgainNumberHoldsNothing(t *testing.T) {
	const workers, blocks = 150, 10
	local := []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	x := indexer.New(indexer.Config{})
	for w := range workers {
		apply(t, x, w, named(uint64(w%3), local), indexer.Outcome{Stored: blocks})
	}
	for _, w := range []int{0, 64, 127, 149} {
		x.RemoveWorker(w)
		apply(t, x, w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{indexer.NextSequenceHash(1, uint64(w%3))}}, indexer.Outcome{Unknown: 1})
		after := named(uint64(w%3), local[4:6])
		after.HasParent, after.Parent = true, indexer.NextSequenceHash(4, uint64(w%3))
		apply(t, x, w, after, indexer.Outcome{Orphan: 2})
		apply(t, x, w, named(9, local[:3]), indexer.Outcome{Stored: 3})
		got := indexer.Matches{Device: make([]int32, workers)}
		x.FindMatches(&got, local)
		for other, n := range got.Device {
			want, engine := int32(blocks), uint64(other%3)
			switch {
			case other == w:
				want, engine = 3, 9
			case other < w && (other == 0 || other == 64 || other == 127):
				want, engine = 3, 9
			}
			if end := x.Last(other, n, local); n != want || end != indexer.NextSequenceHash(local[want-1], engine) {
				t.Fatalf("after worker %d: overlap of %d is %d up to %d, want %d", w, other, n, end, want)
			}
		}
		if x.WorkerBlocks(w) != 3 {
			t.Errorf("%d blocks of worker %d, want 3", x.WorkerBlocks(w), w)
		}
		if err := x.Check(); err != nil {
			t.Fatal(err)
		}
	}
}

// Table entries that are removed next to other removed ones leave the table together: a
// few at a time, and all of them when anything else is removed or a column ends.
func TestNeighboursLeaveTheTableTogether(t *testing.T) {
	const blocks = 3 * 64
	local := make([]uint64, blocks)
	for i := range local {
		local[i] = uint64(i) + 1
	}
	for _, engine := range []uint64{0, 1} { // the second worker has columns of its own
		x := indexer.New(indexer.Config{})
		stored := named(engine, local)
		apply(t, x, 0, stored, indexer.Outcome{Stored: blocks})
		apply(t, x, 1, named(0, local), indexer.Outcome{Stored: blocks})
		remove := func(i, due int) {
			t.Helper()
			apply(t, x, 0, indexer.Event{Kind: indexer.Removed, Externals: []uint64{stored.Blocks[i].External}}, indexer.Outcome{Removed: 1})
			if x.Due() != due*int(engine) {
				t.Fatalf("%d entries are due after block %d was removed, want %d", x.Due(), i, due)
			}
			if err := x.Check(); err != nil {
				t.Fatal(err)
			}
		}
		remove(blocks-1, 0)
		for i := 1; i < 32; i++ {
			remove(blocks-1-i, i)
		}
		remove(blocks-33, 0)
		remove(blocks-34, 1)
		remove(5, 0)
		remove(4, 1)
		remove(3, 2)
		apply(t, x, 0, stored, indexer.Outcome{Stored: 37, Duplicate: blocks - 37})
		if err := x.Check(); err != nil || x.Due() != 0 {
			t.Fatalf("%d entries are due after blocks were stored: %v", x.Due(), err)
		}
		x.RemoveWorker(1)
		for _, b := range slices.Backward(stored.Blocks) {
			apply(t, x, 0, indexer.Event{Kind: indexer.Removed, Externals: []uint64{b.External}}, indexer.Outcome{Removed: 1})
		}
		if columns, _ := x.Columns(); columns > 0 || x.Due() != 0 {
			t.Errorf("%d columns are left and %d entries are due after the end of all", columns, x.Due())
		}
	}
}
