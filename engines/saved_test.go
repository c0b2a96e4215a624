// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"testing"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// savedTest is one process of kvroute. Nothing runs: the test begins and ends the ranks.
type savedTest struct {
	*Sources
	t     *testing.T
	sides []indexer.Event // of each rank in the index
	got   int             // blocks that the index got
}

func newSavedTest(t *testing.T) *savedTest {
	t.Helper()
	x := &savedTest{t: t}
	var err error
	x.Sources, err = NewSources(SourcesConfig{
		Sink:  func(_ uint64, _ uint32, ev indexer.Event) { x.got += len(ev.Blocks) },
		Sides: func(uint64, uint32) []indexer.Event { return x.sides },
	})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// begin begins to follow rank 0 of a worker, with the saved state if there is one.
func (x *savedTest) begin(w EngineWorker) *rankSource {
	x.Set(w)
	x.mu.Lock()
	w = x.wanted[w.ID]
	x.mu.Unlock()
	r := newRankSource(x.Sources, &w, socket{replays: true}, x.conf.Log)
	x.mu.Lock()
	x.ranks[r] = struct{}{}
	x.mu.Unlock()
	x.mute(x.same.add(r))
	r.restore()
	return r
}

// batch applies a batch of the rank's engine.
func (x *savedTest) batch(r *rankSource, evs ...EngineEvent) {
	r.applyBatch(&EngineBatch{Events: evs})
	r.follower.Continue(41, 42)
}

// next returns a later process, which loads what x saves, and the number of saved ranks.
func (x *savedTest) next() (later *savedTest, ranks int) {
	x.t.Helper()
	var file bytes.Buffer
	if err := x.Save(&file); err != nil {
		x.t.Fatal(err)
	}
	later = newSavedTest(x.t)
	ranks, err := later.Load(&file)
	if err != nil {
		x.t.Fatal(err)
	}
	return later, ranks
}

// pass makes the loaded states older.
func (x *savedTest) pass(by time.Duration) { x.loaded = x.loaded.Add(-by) }

func savedWorker() EngineWorker {
	return EngineWorker{ID: 7, Transport: TransportZMQ, BlockSize: 4, Started: 5}
}

func firstBlock(group int, kind string) EngineEvent {
	return EngineEvent{Kind: EngineStored, Group: group, Spec: kind, Window: 9, BlockSize: 4, Tokens: []uint32{1, 2, 3, 4}, Hashes: []uint64{11}, Usable: 1}
}

// The saved state of a rank is used for the same process of its engine with the same settings, for a minute.
func TestASavedRankIsForTheSameProcess(t *testing.T) {
	before := newSavedTest(t)
	before.batch(before.begin(savedWorker()), firstBlock(0, "full_attention"))
	for name, c := range map[string]struct {
		change func(*EngineWorker)
		after  time.Duration
		used   bool
	}{
		"the same":              {func(*EngineWorker) {}, 0, true},
		"shortly before":        {func(*EngineWorker) {}, 50 * time.Second, true},
		"after a minute":        {func(*EngineWorker) {}, time.Minute, false},
		"another process":       {func(w *EngineWorker) { w.Started = 6 }, 0, false},
		"no start time":         {func(w *EngineWorker) { w.Started = 0 }, 0, false},
		"another block size":    {func(w *EngineWorker) { w.BlockSize = 8 }, 0, false},
		"another worker":        {func(w *EngineWorker) { w.ID = 8 }, 0, false},
		"another way to repeat": {func(w *EngineWorker) { w.SetLike = true }, 0, false},
	} {
		after, n := before.next()
		after.pass(c.after)
		w := savedWorker()
		c.change(&w)
		r := after.begin(w)
		sequence, digest, used := r.follower.Last()
		if n != 1 || used != c.used || used && (sequence != 41 || digest != 42) || (after.got == 1) != c.used {
			t.Errorf("%s: %d ranks, used %v at batch %d, %d blocks; want used %v", name, n, used, sequence, after.got, c.used)
		}
	}
}

// A loaded rank whose worker does not register is saved again for a minute, because kvroute may end before.
func TestALoadedRankIsSavedForAMinute(t *testing.T) {
	x := newSavedTest(t)
	x.batch(x.begin(savedWorker()), firstBlock(0, "full_attention"))
	x, _ = x.next()
	x, n := x.next()
	if n != 1 {
		t.Errorf("at first %d ranks are saved, want 1", n)
	}
	x.pass(time.Minute)
	if _, n = x.next(); n != 0 {
		t.Errorf("after a minute %d ranks are saved, want none", n)
	}
}

// The rank of a worker that is not followed any more is saved if kvroute ends, and not if the worker was removed or has
// other settings.
func TestARemovedRankIsNotSaved(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*savedTest)
		want   int
	}{
		"kvroute ends":   {func(*savedTest) {}, 1},
		"removed":        {func(x *savedTest) { x.Remove(7) }, 0},
		"other settings": {func(x *savedTest) { w := savedWorker(); w.Started = 6; x.Set(w) }, 0},
	} {
		x := newSavedTest(t)
		r := x.begin(savedWorker())
		x.batch(r, firstBlock(0, "full_attention"))
		c.change(x)
		x.ended(*r.worker)
		if _, n := x.next(); n != c.want {
			t.Errorf("%s: %d ranks are saved, want %d", name, n, c.want)
		}
	}
}

// A hybrid rank is saved with the side groups of the index, and not at all if these are unknown: it would promise no
// cached prompt after a restart, or too much.
func TestAHybridRankIsSavedWithItsSideGroups(t *testing.T) {
	x := newSavedTest(t)
	x.batch(x.begin(savedWorker()), firstBlock(0, "full_attention"), firstBlock(1, "sliding_window"))
	if _, n := x.next(); n != 0 {
		t.Errorf("%d ranks are saved without side groups, want none", n)
	}
	x.sides = []indexer.Event{{Kind: indexer.SideStored, Group: 1, Externals: []uint64{11}}}
	if _, n := x.next(); n != 1 {
		t.Errorf("%d ranks are saved, want 1", n)
	}
}
