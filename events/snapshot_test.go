// SPDX-License-Identifier: Apache-2.0

package events_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
)

// goldenSnapshot is a file as the protocol defines it: block size 4, position 42, one rank (of
// worker 7), one cursor, one node of two blocks.
const goldenSnapshot = "4b5652534e41503201000000f4cf269e980100002a0000000000000039050000000000003e2d3384ac7198b1000000000000000000000000" +
	"00000000978d5e1f01280000007b22706f6f6c73223a5b7b226d6f64656c223a226d222c22626c6f636b5f73697a65223a347d5d7d452e9a" +
	"bc020200000007007b5ad9ca03050000000700b424015044397e06010000000092844206042600000000025cca2dfbd7e438cb4cb707b939" +
	"ecd3e800000002650000000000000066000000000000007301bbc9ff180000000500000000000000010000000000000097ea3ab4ae4810df" +
	"9ca18451"

func goldenContent() *events.Snapshot {
	return &events.Snapshot{
		Created: time.UnixMilli(1755000000500), LastSeq: 42,
		Meta:    events.SnapshotMeta{Pools: []events.SnapshotPool{{Model: "m", BlockSize: 4}}},
		Ranks:   []events.RankName{{WorkerID: 7}},
		Cursors: []events.Cursor{{RankName: events.RankName{WorkerID: 7}, PublisherID: 4660, EventID: 1}},
		Runs: runsOf(run{0, indexer.Run{
			ID: 1, Local: []uint64{14643705804678351452, 16777012769546811212},
			Holders: []indexer.Holder{{Externals: []uint64{101, 102}}},
		}}),
	}
}

type run struct {
	Pool int
	Run  indexer.Run
}

func runsOf(runs ...run) iter.Seq2[int, indexer.Run] {
	return func(yield func(int, indexer.Run) bool) {
		for _, r := range runs {
			if !yield(r.Pool, r.Run) {
				return
			}
		}
	}
}

// readAll reads a complete snapshot, and its runs.
func readAll(data []byte, scope wire.Scope) (*events.Snapshot, []run, error) {
	s, whole, err := events.ReadSnapshot(bytes.NewReader(data), scope)
	if err != nil {
		return nil, nil, err
	}
	var runs []run
	for p, r := range s.Runs {
		r.Local = slices.Clone(r.Local)
		r.Holders = slices.Clone(r.Holders)
		for i := range r.Holders {
			r.Holders[i].Externals = slices.Clone(r.Holders[i].Externals)
		}
		runs = append(runs, run{p, r})
	}
	return s, runs, whole()
}

func TestGoldenSnapshot(t *testing.T) {
	want := unhex(t, goldenSnapshot)
	var got bytes.Buffer
	if n, err := events.WriteSnapshot(&got, wire.Scope{}, goldenContent()); err != nil || n != int64(len(want)) || !bytes.Equal(got.Bytes(), want) {
		t.Errorf("wrote %d bytes, %v\ngot  %x\nwant %x", n, err, got.Bytes(), want)
	}
	s, runs, err := readAll(want, wire.Scope{})
	if err != nil {
		t.Fatal(err)
	}
	golden := goldenContent()
	if d := cmp.Diff(golden, s, cmpopts.IgnoreFields(events.Snapshot{}, "Runs")); d != "" {
		t.Error(d)
	}
	var goldenRuns []run
	for p, r := range golden.Runs {
		goldenRuns = append(goldenRuns, run{p, r})
	}
	if d := cmp.Diff(goldenRuns, runs); d != "" {
		t.Error(d)
	}
}

// Every changed byte and every truncation is detected.
func TestDamagedSnapshotsAreRefused(t *testing.T) {
	good := unhex(t, goldenSnapshot)
	for i := range good {
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			if _, _, err := readAll(bad, wire.Scope{}); !errors.Is(err, events.ErrSnapshot) {
				t.Fatalf("bit %d of byte %d changed: %v", bit, i, err)
			}
		}
		if _, _, err := readAll(good[:i], wire.Scope{}); !errors.Is(err, events.ErrSnapshot) {
			t.Fatalf("cut after %d bytes: %v", i, err)
		}
	}
	for what, data := range map[string][]byte{
		"longer":        append(bytes.Clone(good), 0),
		"twice":         append(bytes.Clone(good), good...),
		"another scope": good,
	} {
		var scope wire.Scope
		if what == "another scope" {
			scope.Endpoint = "other"
		}
		if _, _, err := readAll(data, scope); !errors.Is(err, events.ErrSnapshot) {
			t.Errorf("%s: %v", what, err)
		}
	}
	s, whole, err := events.ReadSnapshot(bytes.NewReader(good), wire.Scope{})
	if err != nil || !errors.Is(whole(), events.ErrSnapshot) {
		t.Errorf("%v; a snapshot whose runs nobody read counts as whole", err)
	}
	for range s.Runs {
		break
	}
	if !errors.Is(whole(), events.ErrSnapshot) {
		t.Error("a snapshot that nobody read to the end counts as whole")
	}
	broken := errors.New("the disk")
	if _, _, err := events.ReadSnapshot(io.MultiReader(bytes.NewReader(good[:70]), errReader{broken}), wire.Scope{}); !errors.Is(err, broken) || errors.Is(err, events.ErrSnapshot) {
		t.Errorf("a file that cannot be read: %v", err)
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

// The checksums are right, but the content of the records is invalid.
func TestSenselessSnapshotsAreRefused(t *testing.T) {
	for name, edit := range map[string]func(*events.Snapshot){
		"a rank that is not there": func(s *events.Snapshot) { s.Ranks = nil },
		"a parent that comes later": func(s *events.Snapshot) {
			s.Runs = runsOf(run{0, indexer.Run{ID: 1, Parent: 2, Local: []uint64{1}}}, run{0, indexer.Run{ID: 2, Local: []uint64{2}}})
		},
		"a run without blocks": func(s *events.Snapshot) { s.Runs = runsOf(run{0, indexer.Run{ID: 1}}) },
		"a range behind the end": func(s *events.Snapshot) {
			s.Runs = runsOf(run{0, indexer.Run{ID: 1, Local: []uint64{1}, Holders: []indexer.Holder{{Start: 1, Externals: []uint64{1}}}}})
		},
		"a parent in another pool": func(s *events.Snapshot) {
			s.Meta.Pools = make([]events.SnapshotPool, 2)
			s.Runs = runsOf(run{0, indexer.Run{ID: 1, Local: []uint64{1}}}, run{0, indexer.Run{ID: 2, Local: []uint64{2}}},
				run{1, indexer.Run{ID: 1, Parent: 1<<32 - 1, Local: []uint64{3}}}) // 2 + this is 1
		},
		"a pool that is not there": func(s *events.Snapshot) {
			s.Meta.Pools = make([]events.SnapshotPool, 1)
			s.Runs = runsOf(run{1, indexer.Run{ID: 1, Local: []uint64{1}}})
		},
	} {
		s := goldenContent()
		edit(s)
		var file bytes.Buffer
		if _, err := events.WriteSnapshot(&file, wire.Scope{}, s); err != nil {
			t.Fatal(err)
		}
		if _, _, err := readAll(file.Bytes(), wire.Scope{}); !errors.Is(err, events.ErrSnapshot) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Any snapshot is restored unchanged: an index with holes and several pools, cursors, waiting
// events.
func TestSnapshotsComeBack(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		s := &events.Snapshot{
			Created: time.UnixMilli(rng.Int64N(1 << 42)), LastSeq: rng.Uint64(),
			Meta: events.SnapshotMeta{Writer: "test", Epoch: rng.Uint64(), Stream: rng.Int64()},
		}
		var pools []*indexer.Index
		for p := range 1 + rng.IntN(3) {
			x, n := randomIndex(rng)
			pools = append(pools, x)
			s.Meta.Pools = append(s.Meta.Pools, events.SnapshotPool{Model: fmt.Sprint("m", p), BlockSize: 16 << p})
			for i := range n {
				s.Ranks = append(s.Ranks, events.RankName{WorkerID: rng.Uint64(), DPRank: rng.Uint32()})
				s.Workers = append(s.Workers, events.SnapshotWorker{ID: rng.Uint64(), StartedMS: rng.Int64(), Home: "m", Info: json.RawMessage(fmt.Sprintf(`{"n":%d}`, i))})
			}
		}
		for range rng.IntN(50) {
			s.Cursors = append(s.Cursors, events.Cursor{RankName: events.RankName{WorkerID: rng.Uint64(), DPRank: rng.Uint32()}, PublisherID: rng.Uint64(), EventID: rng.Uint64()})
			ev := stored(rng.Uint64(), rng.Uint64())
			s.Waiting = append(s.Waiting, events.Waiting{PublisherID: rng.Uint64(), Event: ev})
			s.Parked = append(s.Parked, stored(rng.Uint64(), rng.Uint64()))
			s.States = append(s.States, events.RankState{
				RankName: events.RankName{WorkerID: rng.Uint64(), DPRank: rng.Uint32()}, State: []indexer.State{indexer.StatePartial, indexer.StateSuspect}[rng.IntN(2)], Missed: time.UnixMilli(rng.Int64N(1 << 42)),
			})
		}
		s.Runs = func(yield func(int, indexer.Run) bool) {
			for p, x := range pools {
				for r := range x.Dump() {
					if !yield(p, r) {
						return
					}
				}
			}
		}
		var file bytes.Buffer
		if _, err := events.WriteSnapshot(&file, wire.Scope{}, s); err != nil {
			t.Fatal(err)
		}
		back, whole, err := events.ReadSnapshot(bytes.NewReader(file.Bytes()), wire.Scope{})
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(s, back, cmpopts.IgnoreFields(events.Snapshot{}, "Runs")); d != "" {
			t.Fatal(d)
		}
		byPool := make([][]indexer.Run, len(pools))
		for p, r := range back.Runs {
			r.Local, r.Holders = slices.Clone(r.Local), slices.Clone(r.Holders)
			for i := range r.Holders {
				r.Holders[i].Externals = slices.Clone(r.Holders[i].Externals)
			}
			byPool[p] = append(byPool[p], r)
		}
		if err := whole(); err != nil {
			t.Fatal(err)
		}
		for p, x := range pools {
			y, _, err := indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
				for _, r := range byPool[p] {
					if !yield(r, nil) {
						return
					}
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(natstest.Holdings(x), natstest.Holdings(y)); d != "" {
				t.Fatalf("seed %d, pool %d (-was +is):\n%s", seed, p, d)
			}
		}
	}
}

// randomIndex returns an index after random events of some workers: holes, shared chains, several
// engine hashes for one block.
func randomIndex(rng *rand.Rand) (x *indexer.Index, workers int) {
	x, workers = indexer.New(indexer.Config{}), 1+rng.IntN(8)
	stored := make([][]indexer.Block, workers)
	for range 60 {
		w := rng.IntN(workers)
		if len(stored[w]) > 0 && rng.IntN(3) == 0 {
			x.Apply(w, indexer.Event{Kind: indexer.Removed, Externals: []uint64{stored[w][rng.IntN(len(stored[w]))].External}})
			continue
		}
		ev := indexer.Event{Kind: indexer.Stored}
		if n := len(stored[w]); n > 0 && rng.IntN(2) == 0 {
			ev.HasParent, ev.Parent = true, stored[w][rng.IntN(n)].External
		}
		for range 1 + rng.IntN(90) {
			b := indexer.Block{External: rng.Uint64N(1 << 40), Local: rng.Uint64N(3)}
			ev.Blocks = append(ev.Blocks, b)
		}
		x.Apply(w, ev)
		stored[w] = append(stored[w], ev.Blocks...)
	}
	return x, workers
}

// A run that ten thousand workers hold does not fit into one record.
func TestARunOfManyHolders(t *testing.T) {
	x := indexer.New(indexer.Config{})
	const workers, blocks = 10_000, 64
	ev := indexer.Event{Kind: indexer.Stored, Blocks: make([]indexer.Block, blocks)}
	for w := range workers {
		for i := range ev.Blocks {
			ev.Blocks[i] = indexer.Block{External: uint64(w*blocks + i + 1), Local: uint64(i)}
		}
		x.Apply(w, ev)
		if w%1000 == 0 { // a block after the run
			x.Apply(w, indexer.Event{Kind: indexer.Stored, HasParent: true, Parent: ev.Blocks[blocks-1].External, Blocks: []indexer.Block{{External: 1<<50 + uint64(w), Local: uint64(w)}}})
		}
	}
	s := &events.Snapshot{Created: time.UnixMilli(0), Meta: events.SnapshotMeta{Pools: make([]events.SnapshotPool, 1)}, Ranks: make([]events.RankName, workers), Runs: func(yield func(int, indexer.Run) bool) {
		for r := range x.Dump() {
			if !yield(0, r) {
				return
			}
		}
	}}
	var file bytes.Buffer
	if _, err := events.WriteSnapshot(&file, wire.Scope{}, s); err != nil {
		t.Fatal(err)
	}
	_, runs, err := readAll(file.Bytes(), wire.Scope{})
	if err != nil {
		t.Fatal(err)
	}
	y, _, err := indexer.Restore(indexer.Config{}, func(yield func(indexer.Run, error) bool) {
		for _, r := range runs {
			if !yield(r.Run, nil) {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := natstest.Holdings(x), natstest.Holdings(y); !slices.Equal(a, b) {
		t.Errorf("%d holdings went in, %d came out, or others", len(a), len(b))
	}
}

func FuzzReadSnapshot(f *testing.F) {
	f.Add(unhex(f, goldenSnapshot))
	f.Add([]byte(strings.Repeat("KVRSNAP2", 9)))
	f.Fuzz(func(_ *testing.T, data []byte) {
		_, _, _ = readAll(data, wire.Scope{})
	})
}
